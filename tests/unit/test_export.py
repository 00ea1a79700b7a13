"""The verb ``export``: packages of native code, their checks, and that they answer as the engine does."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from colonnade import api
from colonnade.checkpoint import atomic_folder
from colonnade.checkpoint.digest import BackgroundDigests, digest_of
from colonnade.checkpoint.package_format import DECODE, PACKAGE, WEIGHTS, PackageInfo, Processor, open_package
from colonnade.cli import main
from colonnade.compress.export import TORCH, check_export, check_pt2e, export, step_module
from colonnade.compress.pt2e import passes, quantise_program
from colonnade.config import LatentConfig, ModelConfig, MoeConfig, ServeConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, ConfigError, RequestError
from colonnade.kernels.attention import reference as attention
from colonnade.kernels.experts import reference
from colonnade.kernels.experts.gathered import all_experts, gathered_experts
from colonnade.kernels.experts.reference import Weights
from colonnade.model import Packed, Rows, Stream, Transformer, initialise
from colonnade.model.static_attend import Static, StaticView, cache_row
from colonnade.model.weight_only_quant import quantisable_modules
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve.engine import Engine
from colonnade.serve.package import Package
from colonnade.serve.sampling_params import SamplingParams
from tests import models
from tests.serve import tiny

MIXTURE = MoeConfig(experts=4, active=2, ffn_width=16, first_k_dense_replace=1, shared_width=8)


@pytest.mark.parametrize("name", ["gpt2", "qwen3_window_tied", "llama_grouped_biased", "latent_yarn_biased"])
def test_a_fixed_cache_gives_the_very_logits(name) -> None:
    config = models.CONFIGS[name]
    model, tokens = models.build(config), torch.arange(17) % config.vocab_size
    cache = [torch.zeros(24, *cache_row(config), dtype=torch.float64) for _ in range(config.layers)]
    for layer in cache:
        layer[17:] = 7.0  # what padding leaves must not matter
    with torch.no_grad():
        want_TV = model(Stream(tokens, torch.arange(17)), Packed.of([17]), Rows())
        got = []
        for start, stop in ((0, 11), (11, 16), (16, 17)):
            stream = Stream(tokens[start:stop], torch.arange(start, stop))
            got.append(model(stream, Static(cache, torch.tensor(start)), Rows()))
    torch.testing.assert_close(torch.cat(got), want_TV, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_of_a_fixed_cache_are_not_rounded(dtype) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int, size: float) -> torch.Tensor:
        return (size * torch.randn(200, heads, 64, generator=generator)).to(dtype)

    q, k, v = normal(8, 4), normal(2, 4), normal(2, 1)
    got = StaticView(torch.zeros(200, 2, 2, 64, dtype=dtype), torch.tensor(0), None)(q, k, v)
    want = attention.attend(q.double(), k.double(), v.double()).o
    assert (got - want).norm() < (4e-3 if dtype is torch.bfloat16 else 6e-4) * want.norm()


@pytest.mark.parametrize("name", ["gpt2", "llama_grouped_biased"])
def test_padding_beyond_the_context(name) -> None:
    """A prompt that continues a cached one begins a pass anywhere, so its padding may pass the context's end."""
    config = models.CONFIGS[name]
    C, V, width = config.context, config.vocab_size, 16
    tokens = torch.arange(C) % V
    with torch.no_grad():
        want_TV = models.build(config)(Stream(tokens, torch.arange(C)), Packed.of([C]), Rows())
    step = step_module(models.build(config))
    cache = [torch.zeros(C + width, *cache_row(config), dtype=torch.float64) for _ in range(config.layers)]
    with torch.no_grad():
        for start in (*range(0, C, width), C - width + 5):
            part = tokens[start : start + width]
            padded = torch.cat([part, torch.zeros(width - len(part), dtype=torch.int64)])
            logits_V = step(padded, torch.tensor(start), torch.tensor(len(part) - 1), cache)
            torch.testing.assert_close(logits_V, want_TV[start + len(part) - 1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("run", [gathered_experts, all_experts])
def test_experts_without_sorting(run, gated) -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    weights = Weights(
        normal(3, 6, 5), normal(3, 6, 5), normal(3, 6, 5) if gated else None, normal(3, 6),
        normal(3, 6) if gated else None, normal(3, 5),
    )  # fmt: skip
    x_TD, routing_TA = normal(7, 5), normal(7, 2).abs()
    ids_TA = torch.tensor([[0, 1], [2, 0], [1, 3], [3, 3], [2, 1], [0, 2], [1, 0]])
    routing_TA[ids_TA == 3] = 0  # 3: none
    want_TD = reference.routed_unsorted(x_TD, ids_TA, routing_TA, weights, "silu")
    torch.testing.assert_close(run(x_TD, ids_TA, routing_TA, weights, "silu"), want_TD)


@pytest.mark.parametrize(
    ("change", "sizes", "says"),
    [
        ({"causal": False, "task_head": "masked"}, (64, 16), "decoders that generate"),
        ({"moe": MoeConfig(experts=4, ffn_width=8, capacity=1.25)}, (64, 16), "--experts.capacity off"),
        ({}, (128, 16), "--context 128"),
        ({}, (64, 1), "--prefill 1 "),
        ({}, (16, 32), "--prefill 32"),
    ],
)
def test_what_cannot_be_exported(change, sizes, says) -> None:
    config = ModelConfig(vocab_size=67, layers=1, width=24, heads=4, ffn_width=26, context=64, **change)
    with pytest.raises(ConfigError, match=says):
        check_export(config, *sizes)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SafetensorError("I/O error"), KeyboardInterrupt()])
def test_nothing_is_left_of_an_export_that_fails(error, monkeypatch, tmp_path) -> None:
    def write(*_: object) -> None:
        raise error

    monkeypatch.setattr("colonnade.compress.export._compile", lambda *_: {"x": torch.zeros(1)})
    monkeypatch.setattr("colonnade.compress.export.atomic_folder.write_tensors", write)
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else CheckpointError
    with pytest.raises(expected, match="cannot be written: .*free space" if expected is CheckpointError else None):
        export(models.build(EIGHT_BITS), None, tmp_path / "p", context=32, prefill=16)
    assert not list(tmp_path.iterdir())


def test_no_compiler(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"g\+\+ was not found"):
        check_export(ModelConfig(vocab_size=67, layers=1, width=24, heads=4, ffn_width=26, context=64), 64, 16)


def test_another_processor(tmp_path) -> None:
    here = Processor.current()
    here.check(tmp_path)
    for change, says in (
        ({"machine": "sparc"}, "compiled for sparc"),
        ({"instructions": (*here.instructions, "avx9000")}, "with avx9000"),
        ({"torch": "1.0"}, "by torch 1.0"),
    ):
        with pytest.raises(CheckpointError, match=f"{says}.*export the model again"):
            here.model_copy(update=change).check(tmp_path)


def package_without_code(model: Transformer, tokenizer: Tokenizer | None) -> Package:
    """A package whose programs are the model's own forward pass, not compiled."""
    config, step = model.config, step_module(copy.deepcopy(model))

    class Program:
        def run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            return [step(*inputs[:3], inputs[3:])]

    package = Package.__new__(Package)
    package.folder, package.tokenizer, package._tokens = Path("p"), tokenizer, []
    package.info = PackageInfo(
        context=config.context, prefill=16, dtype="float32", cache_row=cache_row(config), model=config,
        processor=Processor.current(),
    )  # fmt: skip
    package._decode = package._prefill = Program()
    package._cache = [torch.zeros(config.context + 16, *cache_row(config)) for _ in range(config.layers)]
    return package


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "settings",
    [
        {"min_tokens": 12},
        {"repetition_penalty": 3.0, "frequency_penalty": 0.5, "min_tokens": 3},
        {"logit_bias": {5: 50.0}, "presence_penalty": 1.0},
        {"bad_words": ["a", "word"], "temperature": 2.0},
        {"temperature": 0.0},
        {"temperature": 0.0, "repetition_penalty": 1.5},
    ],
)
def test_a_package_samples_as_the_engine(settings) -> None:
    tokenizer = tiny.tokenizer()
    config = ModelConfig(vocab_size=tokenizer.vocab_size, layers=2, width=32, heads=4, ffn_width=48, context=96)
    params = SamplingParams(**{"temperature": 1.0, "seed": 3, "max_tokens": 20, **settings})
    model = models.build(config, dtype=torch.float32).requires_grad_(False)
    assert model.unembed is not None
    model.unembed.weight[list(tokenizer.eos_ids)] *= 30  # texts end early
    package = package_without_code(model, tokenizer)
    want = Engine(model, tokenizer, ServeConfig(page_tokens=16, pages=8)).generate(["a word"], [params])[0]
    assert [token for _, token in package.stream("a word", params)] == list(want.token_ids)


def test_a_package_without_a_tokenizer_refuses_what_needs_one() -> None:
    package = package_without_code(models.build(models.CONFIGS["gpt2"], dtype=torch.float32), None)
    for settings in ({"stop": "a"}, {"min_tokens": 2}, {"bad_words": ["a"]}):
        with pytest.raises(RequestError, match="needs a tokenizer"):
            package.stream([1], SamplingParams(**settings))
    with pytest.raises(RequestError, match="vocabulary"):
        package.stream([1], SamplingParams(logit_bias={101: 1.0}))
    biased = package.stream([1], SamplingParams(logit_bias={7: 100.0}, max_tokens=3))
    assert [token for _, token in biased] == [7, 7, 7]


def test_checksums_in_the_background(tmp_path) -> None:
    (tmp_path / "part").mkdir()
    for name in ("a", "b", "part/c"):
        (tmp_path / name).write_text(name)
    digests = BackgroundDigests(tmp_path)
    (tmp_path / "d").write_text("d")
    for name in ("a", "b", "part/c", "d"):
        assert digests(tmp_path / name) == digest_of(tmp_path / name)


def test_a_package_starts_without_an_engine() -> None:
    """What takes long to import is imported while checksums are computed, or not at all."""
    for module, later in (
        ("colonnade.package_chat", "{'torch', 'colonnade.serve.engine'}"),
        ("colonnade.serve.package", "{'colonnade.serve.engine', 'colonnade.serve.sampler', 'colonnade.model'}"),
    ):
        code = f"import sys, {module}; print({later} & {{*sys.modules}})"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
        assert done.stdout.strip() == "set()"


def test_a_model_is_not_overwritten(tmp_path, capsys) -> None:
    model = tmp_path / "m"
    tokenizer = tiny.tokenizer()
    config = ModelConfig(vocab_size=tokenizer.vocab_size, layers=1, width=32, heads=4, ffn_width=48, context=96)
    whole = api.Model(models.build(config), tokenizer, DistributedContext.solo(torch.device("cpu")), "m")
    api.save(whole, model)
    before = sorted(path.name for path in model.iterdir())
    with pytest.raises(SystemExit):
        main(["export", str(model), str(model), "--overwrite"])
    assert "a package cannot replace" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(CheckpointError, match="a package cannot replace"):
        export(whole.transformer, tokenizer, model, context=64, prefill=16, overwrite=True)
    assert sorted(path.name for path in model.iterdir()) == before


OLD = tuple(int(n) for n in torch.__version__.split(".")[:2]) < TORCH
pytestmark = pytest.mark.skipif(OLD, reason="export needs a newer torch")


def run(*words: object) -> None:
    main([str(word) for word in words])


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, Path]:
    """(model, its package): a dense block, then one of experts. 12 rotary frequencies: up to 8 are compiled in."""
    folder, tokenizer = tmp_path_factory.mktemp("export"), tiny.tokenizer()
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, layers=2, width=32, heads=4, kv_heads=2, head_width=24, ffn_width=48,
        context=96, moe=MIXTURE,
    )  # fmt: skip
    model = initialise(Transformer(config), 3).requires_grad_(False)
    whole = api.Model(model, tokenizer, DistributedContext.solo(torch.device("cpu")), "m")
    api.save(whole, folder / "m")
    run("export", folder / "m", folder / "package", "--prefill", 16)
    return folder / "m", folder / "package"


EIGHT_BITS = ModelConfig(
    vocab_size=67, layers=2, width=48, heads=4, kv_heads=2, head_width=24, ffn_width=96, context=64, tied=True
)
"""The output projection is also the embedding, which keeps float32."""
PT2E = pytest.mark.filterwarnings("ignore::DeprecationWarning")
"""torchao imports deprecated parts of torch."""


def graph_in_8_bits(how, tokens: int) -> tuple[torch.fx.GraphModule, list[torch.Tensor]]:
    """A pass over ``tokens`` tokens, not compiled, and an empty cache."""
    step = step_module(models.build(EIGHT_BITS, dtype=torch.float32))
    cache = [torch.zeros(56, *cache_row(EIGHT_BITS)) for _ in range(EIGHT_BITS.layers)]
    zero, slots = torch.tensor(0), torch.export.Dim("slots", min=2, max=56)
    example = (torch.zeros(tokens, dtype=torch.int64), zero, zero.clone(), cache)
    shapes = (None, None, None, [{0: slots} for _ in cache])
    with torch.no_grad():
        program = torch.export.export(step, example, dynamic_shapes=shapes)
        weights = {f"model.{name}" for name in quantisable_modules(step.model)}
        program = quantise_program(program, example, shapes, how, weights, passes(calibration(), tokens, cache))
    return program.module(), cache


def calibration() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(EIGHT_BITS.vocab_size, (40,), generator=generator) for _ in range(6)]


def run_graph(graph: torch.fx.GraphModule, cache, ids: list[int], start: int, last: int) -> torch.Tensor:
    with torch.no_grad():
        return graph(torch.tensor(ids), torch.tensor(start), torch.tensor(last), cache)


@PT2E
@pytest.mark.slow
@pytest.mark.parametrize("how", ["dynamic", "static"])
def test_every_linear_layer_is_in_8_bits(how) -> None:
    """The quantizer leaves out, without a word, layers that it does not recognise."""
    pytest.importorskip("torchao")
    graph, cache = graph_in_8_bits(how, 8)
    targets = [str(node.target) for node in graph.graph.nodes]
    # Four matrices per layer and gate, and the output projection.
    assert targets.count("quantized_decomposed.dequantize_per_channel.default") == 5 * EIGHT_BITS.layers + 1
    assert targets.count("aten.linear.default") == 5 * EIGHT_BITS.layers + 1
    ids = calibration()[0][:8]
    with torch.no_grad():
        model = models.build(EIGHT_BITS, dtype=torch.float32)
        want_V = model(Stream(ids, torch.arange(8)), Packed.of([8]), Rows())[-1]
    got_V = run_graph(graph, cache, ids.tolist(), 0, 7)
    assert (got_V - want_V).norm() < 0.05 * want_V.norm()


@PT2E
@pytest.mark.slow
def test_static_scales_do_not_depend_on_padding() -> None:
    pytest.importorskip("torchao")
    graph, cache = graph_in_8_bits("static", 8)
    ids = calibration()[1][:5].tolist()
    first, second = (run_graph(graph, [x.clone() for x in cache], [*ids, *rest], 0, 4) for rest in ([0] * 3, [9, 8, 7]))
    assert torch.equal(first, second)


@PT2E
@pytest.mark.slow
def test_the_verb_quantises_a_mixture(monkeypatch, tmp_path) -> None:
    """Its linear layers have 8 bits, its router and experts do not; the file of shared weights is empty."""
    pytest.importorskip("torchao")
    compiled: list[list[str]] = []

    def compile_program(program, path: Path, *, weights_inside: bool) -> None:
        assert weights_inside
        compiled.append([str(node.target) for node in program.graph.nodes])
        path.write_bytes(b"code")

    monkeypatch.setattr("colonnade.compress.export.compile_program", compile_program)
    tokenizer = tiny.tokenizer()
    config = EIGHT_BITS.replace(vocab_size=tokenizer.vocab_size, moe=MIXTURE, tied=False)
    model = initialise(Transformer(config), 3).requires_grad_(False)
    solo = DistributedContext.solo(torch.device("cpu"))
    api.save(api.Model(model, tokenizer, solo, "m"), tmp_path / "m")
    run("export", tmp_path / "m", tmp_path / "p", "--prefill", 16, "--pt2e", "static")
    for targets in compiled:
        # Two of attention in each block; three of a dense and of a shared network; the output projection.
        assert targets.count("quantized_decomposed.dequantize_per_channel.default") == 2 * 2 + 3 + 3 + 1
        assert targets.count("aten.linear.default") > 2 * 2 + 3 + 3 + 1
    assert len(compiled) == 2
    assert json.loads((tmp_path / "p" / PACKAGE).read_text())["pt2e"] == "static"
    assert not load_file(tmp_path / "p" / WEIGHTS)


def test_what_pt2e_refuses(monkeypatch, tmp_path) -> None:
    with pytest.raises(ConfigError, match="not bfloat16; remove --dtype"):
        check_pt2e("bfloat16")
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ConfigError, match=r"pip install 'colonnade\[pt2e\]'"):
        check_pt2e("float32")


@PT2E
@pytest.mark.long
@pytest.mark.parametrize("how", ["dynamic", "static"])
def test_a_package_in_8_bits_answers_as_its_graph(how, tmp_path) -> None:
    """The compiled programs, with their weights inside, give the logits of the graph that was compiled."""
    pytest.importorskip("torchao")
    with pytest.raises(ConfigError, match="a text of at least 8 tokens"):
        export(
            models.build(EIGHT_BITS, dtype=torch.float32), None, tmp_path / "p", context=48, prefill=8, pt2e="static"
        )
    info = export(
        models.build(EIGHT_BITS, dtype=torch.float32), None, tmp_path / "p", context=48, prefill=8, pt2e=how,
        texts=calibration(),
    )  # fmt: skip
    assert info.pt2e == how
    package, ids = Package(tmp_path / "p", trust=True), calibration()[2][:13].tolist()
    prefill, cache = graph_in_8_bits(how, 8)
    decode, _ = graph_in_8_bits(how, 1)
    want_V = run_graph(prefill, cache, ids[:8], 0, 7)
    for i in range(8, 13):
        want_V = run_graph(decode, cache, ids[i : i + 1], i, 0)
    torch.testing.assert_close(package.logits(ids), want_V, rtol=1e-4, atol=1e-5)
    assert package.logits(ids[:5]).isfinite().all()


@pytest.mark.long
def test_a_package_in_a_new_process_answers_as_the_engine(exported, capsys) -> None:
    model, package = exported
    words = ["a word and more words, so that the prompt is longer than one pass of the prefill", "--max_tokens", "24"]
    for sampling in (["--temperature", "0"], ["--seed", "5"]):
        run("generate", model, *words, *sampling)
        command = [sys.executable, "-m", "colonnade", "generate", str(package), *words, *sampling, "--trust"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        assert answer.stdout == capsys.readouterr().out


@pytest.mark.long
def test_chat_with_a_package(exported) -> None:
    command = [sys.executable, "-m", "colonnade", "chat", str(exported[1]), "--trust", "--temperature", "0"]
    lines = "a word\nmore words\n/reset\na word\n"
    done = subprocess.run(
        [*command, "--max_tokens", "6"], input=lines, capture_output=True, text=True, check=True, timeout=300
    )
    assert "lists the commands" in done.stderr
    assert done.stdout.count("\n") >= 3


@pytest.mark.long
def test_turns_reuse_the_cache(exported) -> None:
    package, again = (Package(exported[1], trust=True) for _ in range(2))
    first, second = list(range(1, 20)), [*range(1, 30), 7]
    package.logits(first)
    torch.testing.assert_close(package.logits(second), again.logits(second), rtol=0, atol=1e-5)
    torch.testing.assert_close(package.logits(first), Package(exported[1], trust=True).logits(first), rtol=0, atol=1e-5)
    with pytest.raises(RequestError, match="maximum context length is 96"):
        package.stream([1] * 96, SamplingParams())
    with pytest.raises(RequestError, match="does not support echo"):
        package.stream([1], SamplingParams(echo=True))


@pytest.mark.long
def test_errors_of_packages(exported, tmp_path, capsys) -> None:
    model, package = exported

    def says(*words: object) -> str:
        with pytest.raises(SystemExit):
            run(*words)
        return " ".join(capsys.readouterr().err.split())

    assert "run it with --trust" in says("generate", package, "a")
    assert "and there is no" in says("generate", model, "a", "--trust")
    assert "runs as it was exported" in says("generate", package, "a", "--trust", "--int8")
    assert "never loaded as a model" in says("eval", package)
    assert "already exists" in says("export", model, package)

    damaged = tmp_path / "damaged"

    def copy() -> None:
        subprocess.run(["cp", "-r", str(package), str(damaged)], check=True)

    copy()
    code = bytearray((damaged / DECODE).read_bytes())
    code[len(code) // 2] ^= 1
    (damaged / DECODE).write_bytes(code)
    assert "does not match its checksum" in says("generate", damaged, "a", "--trust")
    (damaged / DECODE).unlink()
    assert "is missing" in says("generate", damaged, "a", "--trust")

    # One whose manifest is right, but that lacks a weight, or is of another processor.
    for what, expected in (("weight", "lacks model."), ("processor", "compiled for sparc")):
        subprocess.run(["rm", "-r", str(damaged)], check=True)
        copy()
        if what == "weight":
            from safetensors.torch import load_file, save_file

            tensors = load_file(damaged / WEIGHTS)
            tensors.pop("model.blocks.0.attention.qkv.weight")
            save_file({name: tensor.clone() for name, tensor in tensors.items()}, damaged / WEIGHTS)
        else:
            info = json.loads((damaged / PACKAGE).read_text())
            info["processor"]["machine"] = "sparc"
            (damaged / PACKAGE).write_text(json.dumps(info))
        manifest = atomic_folder.Manifest.read(damaged)
        files = {name: atomic_folder.digest_of(damaged / name) for name in manifest.files}
        atomic_folder.write_json(
            damaged / atomic_folder.MANIFEST, manifest.model_copy(update={"files": files}).model_dump()
        )
        assert expected in says("generate", damaged, "a", "--trust")
    with pytest.raises(ConfigError, match="--trust"):
        open_package(package, trust=False)


LATENT = ModelConfig(
    family="deepseek_v2", vocab_size=67, layers=1, width=24, heads=4, head_width=6, ffn_width=26, context=64,
    latent=LatentConfig(kv_rank=8, rope_width=2, v_width=4),
)  # fmt: skip
WINDOWED = ModelConfig(
    family="mistral", vocab_size=67, layers=2, width=24, heads=4, kv_heads=2, head_width=6, ffn_width=26, context=64,
    window=9, window_from_layer=1,
)  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("config", [LATENT, WINDOWED], ids=["latents", "window"])
def test_latents_and_windows(config, tmp_path) -> None:
    export(models.build(config, dtype=torch.float32), None, tmp_path / "p", context=40, prefill=8)
    tokens = torch.arange(30)
    with torch.no_grad():
        model = models.build(config, dtype=torch.float32)
        want_TV = model(Stream(tokens, tokens), Packed.of([30]), Rows())
    package = Package(tmp_path / "p", trust=True)
    for count in (30, 17):  # the second prompt reuses the cache
        torch.testing.assert_close(package.logits(tokens[:count].tolist()), want_TV[count - 1], rtol=0, atol=1e-5)

"""The verb ``export``: packages of native code, their checks, and that they answer as the engine does."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from colonnade import api
from colonnade.checkpoint import atomic_folder
from colonnade.checkpoint.package_format import DECODE, PACKAGE, WEIGHTS, Processor, open_package
from colonnade.cli import main
from colonnade.compress.export import TORCH, check_export
from colonnade.config import LatentConfig, ModelConfig, MoeConfig
from colonnade.errors import CheckpointError, ConfigError, RequestError
from colonnade.kernels.experts import reference
from colonnade.kernels.experts.gathered import all_experts, gathered_experts
from colonnade.kernels.experts.reference import Weights
from colonnade.model import Packed, Rows, Stream, Transformer, initialise
from colonnade.model.static_attend import Static, cache_row
from colonnade.parallel.distributed_context import DistributedContext
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


def test_no_compiler(monkeypatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"no g\+\+ here"):
        check_export(ModelConfig(vocab_size=67, layers=1, width=24, heads=4, ffn_width=26, context=64), 64, 16)


def test_another_processor(tmp_path) -> None:
    here = Processor.here()
    here.check(tmp_path)
    for change, says in (
        ({"machine": "sparc"}, "compiled for sparc"),
        ({"instructions": (*here.instructions, "avx9000")}, "with avx9000"),
        ({"torch": "1.0"}, "by torch 1.0"),
    ):
        with pytest.raises(CheckpointError, match=f"{says}.*export the model again"):
            here.model_copy(update=change).check(tmp_path)


OLD = tuple(int(n) for n in torch.__version__.split(".")[:2]) < TORCH
pytestmark = pytest.mark.skipif(OLD, reason="export needs a newer torch")


def run(*words: object) -> None:
    main([str(word) for word in words])


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> tuple[Path, Path]:
    """(model, its package): a dense block, then one of experts."""
    folder, tokenizer = tmp_path_factory.mktemp("export"), tiny.tokenizer()
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, layers=2, width=32, heads=4, kv_heads=2, ffn_width=48, context=96, moe=MIXTURE
    )
    model = initialise(Transformer(config), 3).requires_grad_(False)
    whole = api.Model(model, tokenizer, DistributedContext.solo(torch.device("cpu")), "m")
    api.save(whole, folder / "m")
    run("export", folder / "m", folder / "package", "--prefill", 16)
    return folder / "m", folder / "package"


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
    from colonnade.serve.package import Package
    from colonnade.serve.sampling_params import SamplingParams

    package, again = (Package(exported[1], trust=True) for _ in range(2))
    first, second = list(range(1, 20)), [*range(1, 30), 7]
    package.logits(first)
    torch.testing.assert_close(package.logits(second), again.logits(second), rtol=0, atol=1e-5)
    torch.testing.assert_close(package.logits(first), Package(exported[1], trust=True).logits(first), rtol=0, atol=1e-5)
    with pytest.raises(RequestError, match="maximum context length is 96"):
        package.stream([1] * 96, SamplingParams())
    with pytest.raises(RequestError, match="does not know echo"):
        package.stream([1], SamplingParams(echo=True))


@pytest.mark.long
def test_errors_of_packages(exported, tmp_path, capsys) -> None:
    model, package = exported

    def says(*words: object) -> str:
        with pytest.raises(SystemExit):
            run(*words)
        return " ".join(capsys.readouterr().err.split())

    assert "run it with --trust" in says("generate", package, "a")
    assert "is not one; leave it out" in says("generate", model, "a", "--trust")
    assert "runs as it was exported" in says("generate", package, "a", "--trust", "--int8")
    assert "never loaded as a model" in says("eval", package)
    assert "exists already" in says("export", model, package)

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


@pytest.mark.long
def test_latents_and_windows(tmp_path) -> None:
    from colonnade.compress.export import export
    from colonnade.serve.package import Package

    config = ModelConfig(
        family="deepseek_v2", vocab_size=67, layers=1, width=24, heads=4, head_width=6, ffn_width=26, context=64,
        latent=LatentConfig(kv_rank=8, rope_width=2, v_width=4), window=9,
    )  # fmt: skip
    export(models.build(config, dtype=torch.float32), None, tmp_path / "p", context=40, prefill=8)
    tokens = torch.arange(30)
    with torch.no_grad():
        model = models.build(config, dtype=torch.float32)
        want_V = model(Stream(tokens, tokens), Packed.of([30]), Rows())[-1]
    torch.testing.assert_close(Package(tmp_path / "p", trust=True).logits(tokens.tolist()), want_V, rtol=0, atol=1e-5)

"""The engine on a GPU generates the same tokens as on a CPU."""

import pytest
import torch

import colonnade
from colonnade.config import LatentConfig, ServeConfig
from colonnade.errors import CheckpointError
from colonnade.kernels.registry import LOOKUP, choose
from colonnade.serve import Engine, SamplingParams, speculation
from colonnade.serve.sample_args import SampleArgs
from colonnade.serve.sampler import sample
from tests.serve import test_draft_model, test_speculation, tiny

PROMPTS = ["The quick brown", "My fellow citizens: we", "ö", "the dog sleeps on"]
LIMITS = ServeConfig(pages=12, page_tokens=4, token_budget=9, max_requests=3)


def test_greedy_text_equals_cpu():
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    on_gpu = Engine(tiny.model().to("cuda"), tiny.tokenizer(), LIMITS)
    assert on_gpu.generate(PROMPTS, greedy) == Engine(tiny.model(), tiny.tokenizer(), LIMITS).generate(PROMPTS, greedy)
    assert on_gpu.stats.preemptions > 0
    on_gpu.scheduler.audit()
    assert not on_gpu.config.graph_capture, "no Triton kernel supports float64"


def test_cuda_graphs_and_dispatch_are_the_default(monkeypatch: pytest.MonkeyPatch):
    """By default decodes use CUDA graphs, and steps with prompts go through ``dispatch``."""
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    from colonnade.kernels.attention import dispatch

    seen = []

    def recorder(*tensors, **options):
        seen.append(tensors[3].host_lengths[0])
        return dispatch.paged(*tensors, **options)

    assert choose("paged_attention", "cuda", torch.float32) is dispatch.paged
    monkeypatch.setitem(LOOKUP, ("paged_attention", "cuda", torch.float32, "auto"), recorder)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = []
    for device in ("cpu", "cuda"):
        engine = Engine(tiny.model(dtype=torch.float32).to(device), tiny.tokenizer())
        tokens: list[list[int]] = [[] for _ in PROMPTS]
        for i, prompt in enumerate(PROMPTS):  # each arrives while earlier ones decode
            engine.add(prompt, greedy, request_id=str(i))
            for output in [*engine.step(), *engine.step()]:
                tokens[int(output.id)].append(output.token)
        while engine.busy:
            for output in engine.step():
                tokens[int(output.id)].append(output.token)
        outputs.append(tokens)
        assert engine.config.async_scheduling is (device == "cuda")
        assert engine.config.graph_capture or device == "cpu"
        assert engine.core.runner.graphs is not None or device == "cpu"
    assert outputs[0] == outputs[1]
    assert all(size._graphs for size in engine.core.runner.graphs._batches.values())
    assert sorted(engine.core.runner.graphs._batches) == [1, 2, 3, 4]
    assert any(1 in new for new in seen), "no step mixed prompts and decodes"
    assert all(max(new) > 1 for new in seen), "a decode-only step did not use a CUDA graph"


def test_penalties_and_grammars_give_the_text_of_a_cpu():
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install llguidance")
    prompts, params = test_speculation.requests(21)
    limits = ServeConfig(pages=90, page_tokens=4, max_requests=8)
    on_gpu = Engine(tiny.model(dtype=torch.float32).to("cuda"), tiny.tokenizer(), limits)
    assert on_gpu.config.async_scheduling and on_gpu.config.graph_capture
    expected = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), limits).generate(prompts, params)
    got = on_gpu.generate(prompts, params)
    assert [each.token_ids for each in got] == [each.token_ids for each in expected]
    assert [each.finish_reason for each in got] == [each.finish_reason for each in expected]


@pytest.mark.parametrize("fixed", [False, True])
def test_speculation_changes_no_text(monkeypatch: pytest.MonkeyPatch, fixed: bool):
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install llguidance")
    monkeypatch.setattr(speculation, "MIN_RATE", 0.0)
    prompts, params = test_speculation.requests(35)
    model = tiny.model(dtype=torch.float32).to("cuda")
    limits = ServeConfig(pages=90, page_tokens=4, max_requests=8, graph_capture=fixed)
    plain, drafted = (Engine(model, tiny.tokenizer(), limits.replace(draft=draft)) for draft in (None, "ngram"))
    expected, got = (engine.generate(prompts, params) for engine in (plain, drafted))
    assert [each.token_ids for each in got] == [each.token_ids for each in expected]
    assert 0 < drafted.stats.accepted_draft_tokens < drafted.stats.draft_tokens
    drafted.scheduler.audit()


@pytest.mark.parametrize("fixed", [False, True])
def test_a_draft_model_changes_no_text(monkeypatch: pytest.MonkeyPatch, fixed: bool):
    pytest.importorskip("llguidance", reason="llguidance is not installed: pip install llguidance")
    test_draft_model.make_cheap(monkeypatch)
    prompts, params = test_draft_model.mixed(40)
    model, draft = (
        it.to("cuda") for it in (tiny.model(dtype=torch.float32), tiny.noisy_copy(0.05, dtype=torch.float32))
    )
    limits = ServeConfig(pages=200, page_tokens=4, max_requests=16, graph_capture=fixed)
    plain = Engine(model, tiny.tokenizer(), limits)
    drafted = Engine(model, tiny.tokenizer(), limits.replace(draft="small"), draft)
    expected, got = (engine.generate(prompts, params) for engine in (plain, drafted))
    assert [each.token_ids for each in got] == [each.token_ids for each in expected]
    assert 0 < drafted.stats.accepted_draft_tokens < drafted.stats.draft_tokens
    drafted.scheduler.audit()


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seed_repeats_in_any_batch(dtype, fixed: bool):
    limits = LIMITS.replace(graph_capture=fixed)
    sampling = SamplingParams(temperature=1.2, top_p=0.9, seed=5, max_tokens=12, ignore_eos=True)
    model = tiny.model(dtype=dtype).to("cuda")
    alone = Engine(model, tiny.tokenizer(), limits).generate(PROMPTS[:1], sampling)
    batched = Engine(model, tiny.tokenizer(), limits).generate([*PROMPTS[1:], PROMPTS[0]], sampling)
    if dtype == torch.float32:  # in bf16 the logits themselves depend on the batch's shape
        assert batched[-1] == alone[0]
    assert Engine(model, tiny.tokenizer(), limits).generate(PROMPTS[:1], sampling) == alone


def test_seeded_sampling_equals_cpu():
    """The noise is a hash of seed, position and token, not from a device's generator."""
    logits_RV = torch.randn(8, 50_257, generator=torch.Generator().manual_seed(0)) * 3
    requests = [{}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_p": 0.99, "temperature": 2.0}]
    requests += [{"temperature": 0}, {"top_k": 5, "top_p": 0.5}, {"temperature": 1.7}]
    for index in range(20):
        draws = [SampleArgs.of(SamplingParams(**params), seed, index) for seed, params in enumerate(requests)]
        assert sample(logits_RV.cuda(), draws).tolist() == sample(logits_RV, draws).tolist()


@pytest.mark.parametrize("ahead", [False, True])
def test_cuda_graphs_generate_same_tokens_as_cpu(ahead: bool):
    """One graph per batch size, replayed while requests arrive, finish and are preempted."""
    greedy = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (12, 3, 30, 7)]
    limits = LIMITS.replace(pages=24, max_requests=4, graph_capture=True, async_scheduling=ahead)
    graphed = Engine(tiny.model(dtype=torch.float32).to("cuda"), tiny.tokenizer(), limits)
    expected = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), LIMITS).generate(PROMPTS, greedy)
    for _ in range(3):
        assert graphed.generate(PROMPTS, greedy) == expected
    graphed.scheduler.audit()


@pytest.mark.parametrize("ahead", [False, True])
def test_cuda_graphs_read_a_shared_prefix_once(ahead: bool, monkeypatch: pytest.MonkeyPatch):
    """Requests with a shared prefix, at costs that make sharing pay, then others without: two graphs of one size."""
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    from colonnade.kernels.attention import decode_tiles

    free = {"start_ns": 0, "merge_ns": 0, "part_ns": 0, "row_ns": 0, "bytes_a_ns": 1, "flops_a_ns": 1e9}
    monkeypatch.setitem(decode_tiles.table(), "costs", decode_tiles.table()["costs"] | free)
    # With one worker per multiprocessor, a prefix of a few tiles would not be worth sharing.
    monkeypatch.setattr("colonnade.kernels.attention.decode_plan.multiprocessors", lambda _: 2)
    monkeypatch.setattr(decode_tiles, "OVERRIDE", [decode_tiles.Tiles(16, 4, 2, 1, 16, 64)])
    prefix = [(3 * i + 1) % 60 for i in range(80)]
    prompts = [[*prefix, i + 1, 2 * i] for i in range(4)] + [[5, 6, 7 + i] for i in range(4)]
    greedy = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (5, 20, 3, 9, 12, 4, 7, 20)]
    limits = ServeConfig(pages=200, page_tokens=4, max_requests=4, token_budget=128, async_scheduling=ahead)
    expected = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), limits).generate(prompts, greedy)
    model = tiny.model(dtype=torch.float32).to("cuda")
    for share, kinds in ((True, {False, True}), (False, {False})):
        graphed = Engine(model, tiny.tokenizer(), limits.replace(graph_capture=True, cascade_attention=share))
        for _ in range(3):
            assert graphed.generate(prompts, greedy) == expected
        assert {kind for size in graphed.core.runner.graphs._batches.values() for kind in size._graphs} == kinds
        assert (graphed.stats.shared_keys > 0) is share
        assert graphed.stats.spared_keys >= graphed.stats.shared_keys


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"kv_heads": 4, "positions": "learned", "family": "gpt2"}, {"window": 48, "family": "mistral"},
        {"qk_norm": True, "family": "qwen3", "head_width": 128}, {"head_width": 80}, {"kv_heads": 1, "head_width": 256},
    ],
    ids=str,
)  # fmt: skip
def test_graphs_of_both_decode_kernels_compute_the_same_logits(changes: dict, monkeypatch: pytest.MonkeyPatch):
    """In 16 bits graphs use the CUDA C++ kernel where it runs; here compared with the Triton kernel."""
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    from colonnade.kernels.attention import cuda_decode
    from colonnade.serve.cuda_graph_runner import CudaGraphRunner

    launches, seen = list[str](), list[torch.Tensor]()
    attend, replay = cuda_decode.attend, CudaGraphRunner.__call__

    def counted(*args, **options):
        launches.append("cuda")
        attend(*args, **options)

    def recorded(*args):
        seen.append(replay(*args))
        return seen[-1]

    monkeypatch.setattr(cuda_decode, "attend", counted)
    monkeypatch.setattr(CudaGraphRunner, "__call__", recorded)
    sizes = {"width": 256, "heads": 4, "kv_heads": 2, "head_width": 64, "ffn_width": 96, "init_std": 0.06}
    model = tiny.model(dtype=torch.bfloat16, **{**sizes, **changes}).to("cuda")
    prompts = [list(range(3 + 40 * i, 43 + 50 * i)) for i in range(4)]
    limits = ServeConfig(pages=40, page_tokens=16, max_requests=4, graph_capture=True, async_scheduling=False)
    logits = []
    for kernels in ("cuda", "triton"):
        engine = Engine(model, tiny.tokenizer(), limits)
        if kernels == "triton":
            engine.core.runner.graphs.kernels = kernels
        launches.clear(), seen.clear()
        engine.generate(prompts, SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
        assert bool(launches) == (kernels == "cuda" and cuda_decode._device_supported(torch.device("cuda", 0)))
        logits.append(seen[0].float().clone())
    assert (logits[0] - logits[1]).norm() < 2e-2 * logits[0].norm()


LATENT = LatentConfig(kv_rank=512, rope_width=64, v_width=32)
WIDE = {"width": 256, "heads": 8, "kv_heads": 4, "head_width": 64, "ffn_width": 96, "init_std": 0.06}
FAMILIES: dict[str, dict] = {
    "llama": {}, "mistral": {"window": 48}, "qwen2": {"qkv_bias": True}, "qwen3": {"qk_norm": True, "head_width": 128},
    "gpt2": {"kv_heads": 8, "positions": "learned", "norm": "layernorm", "gated": False},
    "olmoe": {"qk_norm": True, "qk_norm_over": "all", "qkv_clip": 0.7},
    "deepseek_v2": {"kv_heads": 8, "head_width": 96, "latent": LATENT},
    "deepseek_v3": {"kv_heads": 8, "head_width": 96, "latent": LATENT.replace(q_rank=48)},
}  # fmt: skip
"""Attention of each family, with sizes that the CUDA C++ kernels support."""


def check_greedy_tokens(family: str, kernels: str, device: str):
    """In 16 bits each token is the most likely one in float32 on a CPU, up to the rounding of logits."""
    model = tiny.model(dtype=torch.bfloat16, family=family, **{**WIDE, **FAMILIES[family]})
    exact = tiny.model(dtype=torch.float32, family=family, **{**WIDE, **FAMILIES[family]})
    exact.load_state_dict(model.state_dict())
    limits = ServeConfig(pages=60, page_tokens=16, max_requests=4, graph_capture=device == "cuda")
    engine = Engine(model.to(device), tiny.tokenizer(), limits)
    if kernels == "triton":
        engine.core.runner.graphs.kernels = kernels
    prompts = [list(range(3 + 40 * i, 23 + 50 * i)) for i in range(4)]
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    for prompt, done in zip(prompts, engine.generate(prompts, greedy), strict=True):
        logits_TV = tiny.logits(exact, [*prompt, *done.token_ids])[len(prompt) - 1 : -1]
        behind_T = logits_TV.amax(1) - logits_TV.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        assert (behind_T < 0.1 * logits_TV.std(1)).all(), (family, behind_T / logits_TV.std(1))
    assert len({tuple(done.token_ids) for done in engine.generate(prompts, greedy)}) > 1, "all answers are alike"


@pytest.mark.parametrize("kernels", ["cuda", "triton"])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_of_every_family(family: str, kernels: str):
    """CUDA graphs of decode steps, with the CUDA C++ kernels where they run and with the Triton ones."""
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    check_greedy_tokens(family, kernels, "cuda")


def test_cuda_graphs_of_latent_attention():
    """The latent cache has one vector per token and a kernel of its own."""
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    latent = {"kv_heads": 6, "latent": LatentConfig(kv_rank=16, rope_width=2, v_width=3)}
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    limits = LIMITS.replace(pages=24, max_requests=4)
    expected = Engine(tiny.model(dtype=torch.float32, **latent), tiny.tokenizer(), limits).generate(PROMPTS, greedy)
    on_gpu = Engine(
        tiny.model(dtype=torch.float32, **latent).to("cuda"), tiny.tokenizer(), limits.replace(graph_capture=True)
    )
    assert on_gpu.generate(PROMPTS, greedy) == expected


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_top_p_sampling_does_not_synchronise():
    """Top-p without top-k, where any number of tokens may qualify, does not synchronise."""
    logits_RV = torch.randn(6, 50_257, device="cuda")
    draws = [SampleArgs.of(SamplingParams(top_p=0.95), seed, 0) for seed in range(6)]
    sample(logits_RV, draws)
    try:
        torch.cuda.set_sync_debug_mode("error")
        got = sample(logits_RV, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got.tolist() == sample(logits_RV.cpu(), draws).tolist()


@pytest.mark.parametrize("fixed", [False, True])
def test_float8_cache_generates_same_tokens_as_cpu(fixed: bool):
    """Keys and values are rounded alike, with eager steps and with CUDA graphs."""
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    limits = ServeConfig(pages=24, page_tokens=4, token_budget=9, max_requests=4, cache="float8")
    expected = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), limits).generate(PROMPTS, greedy)
    model = tiny.model(dtype=torch.float32).to("cuda")
    got = Engine(model, tiny.tokenizer(), limits.replace(graph_capture=fixed)).generate(PROMPTS, greedy)
    assert [done.token_ids for done in got] == [done.token_ids for done in expected]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    "how", [{"temperature": 0}, {"seed": 1}, {"seed": 1, "top_p": 0.9, "min_p": 0.01}, {"seed": 1, "top_k": 9}], ids=str
)
def test_decode_step_does_not_synchronise(how: dict):
    """Except for the previous step's tokens, after this step is launched; plans are rebuilt meanwhile."""
    limits = ServeConfig(
        pages=200, page_tokens=4, max_requests=4, token_budget=64, graph_capture=True, async_scheduling=True
    )
    engine = Engine(tiny.model(dtype=torch.float32).to("cuda"), tiny.tokenizer(), limits)
    params = SamplingParams(**({"temperature": 1.0} | how), max_tokens=70, ignore_eos=True)
    for prompt in PROMPTS:
        engine.add(prompt, params)
    for _ in range(6):  # the prompts, then capture
        engine.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        counts = [len(engine.step()) for _ in range(40)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts == [len(PROMPTS)] * 40


@pytest.mark.parametrize("fixed", [False, True])
def test_smollm2_generates_same_tokens_as_cpu(fixed: bool):
    greedy = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    prompts = ["The capital of France is", "Once upon a time", "def fibonacci(n):\n"]
    outputs = []
    for device in ("cpu", "cuda"):
        try:
            model = colonnade.load("smollm2", device=device, dtype="float32")
        except CheckpointError as why:
            pytest.skip(f"SmolLM2 is not installed (make install): {why}")
        limits = ServeConfig(max_requests=4, graph_capture=fixed and device == "cuda")
        outputs.append([done.token_ids for done in colonnade.Engine(model, limits).generate(prompts, greedy)])
    assert outputs[0] == outputs[1]

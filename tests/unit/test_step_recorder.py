"""Recorded decode steps on a CPU: the same bits as eager ones; any other operation leaves them eager."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.config import LatentConfig, MoeConfig, RopeScaling, RouterConfig, ServeConfig
from colonnade.kernels.cpu import calls, kernels, library
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.cuda_graph_runner import CudaGraphRunner
from colonnade.serve.resolve_config import EngineTraits, resolve_config
from colonnade.serve.step_recorder import record
from tests.serve import tiny

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[1, 2, 3], [50, 7], [9, *range(20, 60)], [4] * 30]
GPT2: dict[str, Any] = {
    "norm": "layernorm", "gated": False, "activation": "gelu_tanh", "positions": "learned",
    "qkv_bias": True, "out_bias": True, "ffn_bias": True,
}  # fmt: skip
LATENT: dict[str, Any] = {"kv_heads": 6, "latent": LatentConfig(kv_rank=14, q_rank=9, rope_width=4, v_width=5)}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "untied": {"tied": False},
    "norms of heads": {"qk_norm": True},
    "biases": {"qkv_bias": True},
    "a window": {"window": 5},
    "gpt-2": GPT2,
    "no gate": {"gated": False, "activation": "relu"},
    "experts": {"moe": MoeConfig(experts=5, active=2, ffn_width=20)},
    "shared experts": {
        "moe": MoeConfig(
            experts=4,
            active=3,
            ffn_width=20,
            shared_width=12,
            first_k_dense_replace=1,
            router=RouterConfig(normalise=False, scale=1.7, bias=True),
        ),
        "ffn_bias": True,
    },
    "latent attention": LATENT,
    "latent attention, wide": LATENT | {"width": 64, "kv_heads": 16, "heads": 16, "head_width": 24,
        "latent": LatentConfig(kv_rank=64, rope_width=8, v_width=16)},
    "latent attention, biases": LATENT | {
        "latent": LatentConfig(kv_rank=16, rope_width=2, v_width=6), "qkv_bias": True, "out_bias": True,
        "rope_scaling": RopeScaling(kind="yarn", factor=8, original_context=8, mscale=0.7, mscale_all_dim=0.9),
    },
    "latent attention, experts": LATENT | {
        "moe": MoeConfig(experts=4, active=2, ffn_width=20, shared_width=12, first_k_dense_replace=1),
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def needs_the_library() -> None:
    if not kernels.available(torch.float32):
        pytest.skip("needs a C++ compiler and AVX2, or another processor than x86-64")


def run_engine(*, fixed: bool, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, Engine]:
    model = tiny.model(**changes).to(dtype)
    limits = ServeConfig(pages=40, page_tokens=4, max_requests=4, graph_capture=fixed)
    engine = Engine(model, tiny.tokenizer(), limits)
    return engine.generate(PROMPTS, GREEDY), engine


def runner_of(engine: Engine) -> CudaGraphRunner:
    graphs = engine.core.runner.graphs
    assert isinstance(graphs, CudaGraphRunner)
    return graphs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_recorded_steps_are_eager_steps_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    (eager, plain), (recorded, fixed) = (run_engine(fixed=f, dtype=dtype, **SHAPES[name]) for f in (False, True))
    assert recorded == eager
    batches = runner_of(fixed)._batches
    assert batches and all(batch._recorded is not None for batch in batches.values())
    for a, b in zip([*plain.cache.k, *plain.cache.v], [*fixed.cache.k, *fixed.cache.v], strict=True):
        assert torch.equal(a, b[: len(a)]), "the last page of the padded engine is the scratch page"


@pytest.mark.parametrize("name", [name for name in SHAPES if "latent" in name])
def test_tokens_of_latent_attention_are_those_of_its_materialised_form(name: str) -> None:
    model = tiny.model(**SHAPES[name])  # float64, in torch, without a cache
    engine = Engine(tiny.model(**SHAPES[name]).float(), tiny.tokenizer(), ServeConfig(pages=60, page_tokens=4))
    alone = [
        engine.generate([prompt], GREEDY)[0] for prompt in PROMPTS
    ]  # 17 to 64 rows: torch's attention, in C++ else
    outputs, _ = run_engine(fixed=True, **SHAPES[name])
    assert outputs == alone
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert list(output.token_ids) == tiny.greedy_tokens(model, prompt, len(output.token_ids))


@pytest.mark.parametrize(
    ("changes", "operation"),
    [
        (
            {"moe": MoeConfig(experts=4, active=2, ffn_width=20, shared_width=8, shared_gate=True)},
            "linear|topk|softmax",
        ),
        ({"norm_order": "post"}, "add"),
        ({"qkv_clip": 0.5}, "clamp"),
    ],
    ids=["experts", "norms after", "clipped"],
)
def test_other_operations_leave_steps_eager(
    changes: dict[str, Any], operation: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "colonnade.serve.step_recorder"):
        outputs, engine = run_engine(fixed=True, **changes)
    assert all(batch._recorded is None for batch in runner_of(engine)._batches.values())
    assert caplog.messages and all("not recorded" in message for message in caplog.messages)
    assert any(name in caplog.text for name in operation.split("|"))
    assert outputs == run_engine(fixed=False, **changes)[0]


def test_recording_is_the_default_where_kernels_run_the_whole_step() -> None:
    def fixed(dtype: torch.dtype = torch.float32, limits: ServeConfig | None = None, **changes: Any) -> bool | None:
        traits = EngineTraits.of(tiny.model(**changes).to(dtype))
        return resolve_config(limits or ServeConfig(), traits).graph_capture

    assert fixed() and fixed(torch.bfloat16)
    assert not fixed(torch.float64) and not fixed(limits=ServeConfig(batch_invariant=True))
    assert not fixed(limits=ServeConfig(graph_capture=False))
    assert fixed(**GPT2)
    assert fixed(**SHAPES["experts"]) and fixed(**SHAPES["latent attention, experts"])
    sigmoid = MoeConfig(experts=4, active=2, ffn_width=20, router=RouterConfig(kind="sigmoid"))
    others = [{"moe": sigmoid}, {"norm_order": "post"}, {"qkv_clip": 0.5}, {"norm": "layernorm", "qk_norm": True}]
    assert not any(fixed(**changes) for changes in others)


def test_views_are_fine_and_copies_are_not() -> None:
    x, w = torch.randn(2, 6), torch.randn(4, 6)
    with torch.no_grad():
        y, recording = record(lambda: kernels.linear(x.view(2, 2, 3).flatten(1), w).unflatten(1, (2, 2)))
        assert recording is not None and len(recording) == 1
        x.add_(1)
        recording.replay()
        assert torch.equal(y.flatten(1), kernels.linear(x, w))
        assert record(lambda: kernels.linear(x, w) + 1)[1] is None
        assert record(lambda: kernels.linear(x[:, ::2].contiguous(), w[:, :3].contiguous()))[1] is None
        assert record(lambda: x)[1] is None
    assert calls._active.recording is None


def test_an_error_ends_the_recording() -> None:
    with pytest.raises(RuntimeError), calls.recording():
        raise RuntimeError
    assert calls._active.recording is None


def test_the_library_is_the_processors_best() -> None:
    assert library.load() is library.load_for(library.best_instruction_set(Path("/proc/cpuinfo")))

"""Serving on two GPUs: small all-reduces, a KV cache split between ranks, and CUDA graphs of both.

pytest -q tests/gpu/test_ranks_gpu.py        # two GPUs, about three minutes, most of it starting processes
"""

import itertools
import os

import pytest
import torch

from colonnade.config import MoeConfig, Plan, ServeConfig
from colonnade.errors import ConfigError
from colonnade.parallel.axis import Axes, Axis
from colonnade.parallel.cuda_graphs import capture
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.launch import launch
from colonnade.parallel.symmetric_memory import MAX_BYTES, make_small_allreduce, with_small_allreduce
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.resolve_config import EngineTraits, resolve_config
from tests.serve import tiny
from tests.sharded_cache import step_errors

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, and this machine has {GPUS}"),
]
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


def compare_collectives(world: int) -> int:
    """Sums and gathers of every size and dtype, some delayed on one rank, eager and replayed; counts comparisons."""
    compared = 0
    with DistributedContext.build(Plan(tp=world), "cuda") as context:
        plain = context.axes.tp
        small = make_small_allreduce(plain, context.device, (MAX_BYTES, MAX_BYTES))
        assert small is not None, "the GPUs of one machine have peer access"

        def summed(x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros_like(x, dtype=torch.float32)
            for part in plain.all_gather_(x):
                total += part.float()
            return total.to(x.dtype)

        sizes = (1, 7, 1024, 1025, 4096, 5000, 2**16, 2**18, 2**19)
        for i, (n, dtype) in enumerate(itertools.product(sizes, (torch.bfloat16, torch.float32, torch.float16))):
            x = torch.randn(n, device=context.device, dtype=dtype)
            if x.nbytes > MAX_BYTES:
                assert not small.can_sum(x)
                continue
            if i % world == context.rank:
                torch.cuda._sleep(2_000_000)
            got = small.sum(x)
            assert torch.equal(got, summed(x)), (n, dtype)
            assert torch.equal(plain.all_gather_(got), got.expand(world, -1)), "the bits differ between ranks"
            if x.nbytes % 4 == 0:
                assert torch.equal(small.gather(x), plain.all_gather_(x).flatten())
            compared += 1

        x, y = torch.randn(3, 4096, device=context.device).bfloat16(), torch.randn(2, 129, device=context.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            small.sum(x)
            small.gather(y)
        torch.cuda.current_stream().wait_stream(side)
        with capture() as graph:
            outs = [
                small.sum(x) if i % 3 else small.gather(y) for i in range(7)
            ]  # an odd count, so that the slots alternate between replays
        for i in range(50):
            x.normal_()
            y.normal_()
            if i % world == context.rank:
                torch.cuda._sleep(1_000_000)
            graph.replay()
            right = [summed(x) if i % 3 else plain.all_gather_(y).flatten(0, 1) for i in range(7)]
            assert all(torch.equal(a, b) for a, b in zip(outs, right, strict=True)), i
            if i % 10 == 0:  # an eager call between replays
                assert torch.equal(small.sum(x), right[1])
            compared += 1
    return compared


@pytest.mark.parametrize("world", [2, 4])
def test_small_allreduce_is_bitwise_equal_on_all_ranks(world: int) -> None:
    if world > GPUS:
        pytest.skip(f"needs {world} GPUs, and this machine has {GPUS}")
    assert launch(compare_collectives, (world,), Plan(tp=world)) > 50


TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-5}


def test_split_cache_equals_attention_over_all_keys() -> None:
    shapes = [(64, 16, None), (128, 64, None), (64, 16, 30), (320, 16, None)]
    for dtype, norms in launch(step_errors, (2, "cuda", list(TOLERANCE), shapes), Plan(cp=2)).items():
        assert len(norms) == 16
        assert max(norms.values()) < TOLERANCE[dtype], (dtype, norms)


PROMPTS = ["The quick brown", "My fellow citizens: we", "ö", "the dog sleeps on"]
LIMITS = ServeConfig(pages=24, page_tokens=4, token_budget=9, max_requests=4)
GREEDY = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (12, 3, 30, 7)]
MOE = {"moe": MoeConfig(experts=4, active=2, ffn_width=8, shared_width=3, shared_gate=True)}


def generated_tokens(plan: Plan, changes: dict) -> list[list[tuple[int, ...]]]:
    """Generated tokens: twice with eager steps, then three times with CUDA graphs and async_scheduling."""
    with DistributedContext.build(plan, "cuda") as context:
        axes = with_small_allreduce(context.axes.serving(), context.device)
        assert (axes.tp if plan.tp > 1 else axes.cp).small_collectives is not None
        model = tiny.model(axes, dtype=torch.float32, **changes).to(context.device)
        texts = []
        for fixed, times in ((False, 2), (True, 3)):
            engine = Engine(model, tiny.tokenizer(), LIMITS.replace(graph_capture=fixed, async_scheduling=fixed))
            if context.rank:
                engine.follow()
                continue
            texts += [[c.token_ids for c in engine.generate(PROMPTS, GREEDY)] for _ in range(times)]
            engine.stop()
            engine.scheduler.audit()
        return texts


@pytest.mark.parametrize(
    ("plan", "changes"),
    [
        (Plan(tp=2), {}),
        (Plan(cp=2), {}),
        (Plan(tp=2), MOE),
        (Plan(tp=2, ep=2), MOE),
        (Plan(tp=2, etp=2), MOE),
        (Plan(cp=2, ep=2), MOE),
    ],
    ids=str,
)
def test_two_gpus_generate_same_tokens_as_cpu(plan: Plan, changes: dict) -> None:
    """CUDA graphs contain sums, gathers and state merges; requests arrive, finish and are preempted meanwhile."""
    model = tiny.model(dtype=torch.float32, **changes)
    expected = [c.token_ids for c in Engine(model, tiny.tokenizer(), LIMITS).generate(PROMPTS, GREEDY)]
    assert launch(generated_tokens, (plan, changes), plan) == [expected] * 5


def test_unsupported_capture_is_refused() -> None:
    """Sliding-window layers over a split cache: explicit graph_capture is refused, the default leaves it off."""
    axes = Axes(cp=Axis("cp", 2), model=Axis("model", 2), cp_replicated=True)
    model = tiny.model(axes, dtype=torch.float32, window=7).to("cuda")
    with pytest.raises(
        ConfigError, match=r"steps of attention with a window over cp=2 cannot be captured as CUDA graphs yet"
    ):
        Engine(model, tiny.tokenizer(), LIMITS.replace(graph_capture=True))
    assert resolve_config(LIMITS, EngineTraits.of(model)).graph_capture is False

"""A cache split over context ranks: greedy tokens are the reference forward's, and each rank holds its part of it."""

from typing import Any

import pytest
import torch

from colonnade.config import LatentConfig, MoeConfig, Plan, ServeConfig
from colonnade.errors import PlanError
from colonnade.parallel.axis import Axes, Axis
from colonnade.parallel.mesh import Ground
from colonnade.serve import Engine, SamplingParams
from tests.serve import tiny
from tests.split import errors
from tests.worlds import run

pytestmark = pytest.mark.xdist_group("worlds")

GPT2 = {
    "family": "gpt2", "positions": "learned", "norm": "layernorm", "gated": False, "activation": "gelu_tanh",
    "qkv_bias": True, "out_bias": True, "ffn_bias": True, "tied": True, "kv_heads": 6, "head_width": 4,
}  # fmt: skip
LATENT = {"kv_heads": 6, "head_width": 6, "latent": LatentConfig(kv_rank=5, q_rank=7, rope_width=4, v_width=3)}
EXPERTS = MoeConfig(experts=4, active=2, ffn_width=6, shared_width=3, shared_gate=True)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT2,
    "latent": LATENT,
    "window": {"window": 7, "window_from_layer": 1, "qk_norm": True},
    "experts": {"moe": EXPERTS},
    "capacity": {"moe": EXPERTS.but(capacity=1.0, priority=True)},
}
SYSTEM = [(7 * i) % 300 for i in range(10)]
PROMPTS = [[*SYSTEM, 5], [3], [*SYSTEM, 9, 2, 4], list(range(40, 57)), [8, 1]]
"""Two of them begin alike; some are shorter than the ranks' pages."""
COUNT = 9
LIMITS = ServeConfig(pages=16, page_tokens=3, token_budget=7, max_requests=3)


def _serve(plan: dict[str, int], limits: ServeConfig, changes: dict[str, Any]) -> tuple[list[Any], int, int, int]:
    """(tokens, preemptions, tokens found in the cache, pages of this rank's cache)."""
    with Ground.build(Plan(**plan)) as ground:
        engine = Engine(tiny.model(ground.axes.serving(), **changes), tiny.tokenizer(), limits)
        if ground.rank:
            engine.follow()
            return [], 0, 0, engine.cache.pages
        engine.beat()
        greedy = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
        wild = SamplingParams(temperature=1, top_k=40, seed=3, max_tokens=COUNT, ignore_eos=True)
        texts = [c.token_ids for c in engine.generate([*PROMPTS, PROMPTS[0]], [greedy] * len(PROMPTS) + [wild])]
        engine.stop()
        engine.scheduler.audit()
        return texts, engine.stats.preemptions, engine.stats.prefix_hits, engine.cache.pages


def _expected(changes: dict[str, Any]) -> list[tuple[int, ...]]:
    """Of the prompts, greedy by the reference forward; of the last one, drawn by an engine of one process."""
    model = tiny.model(**changes)
    wild = SamplingParams(temperature=1, top_k=40, seed=3, max_tokens=COUNT, ignore_eos=True)
    drawn = Engine(model, tiny.tokenizer(), LIMITS).generate([PROMPTS[0]], wild)[0].token_ids
    return [*(tuple(tiny.greedy(model, prompt, COUNT)) for prompt in PROMPTS), drawn]


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("name", ["llama", "gpt2", "latent", "window"])
def test_greedy_is_the_reference_forward(name: str, cp: int) -> None:
    """Prompts in chunks, decodes among them, preemption, a shared prefix, odd pages, ranks that hold nothing."""
    changes, limits = MODELS[name], LIMITS.but(run_ahead=cp > 2, fixed_steps=cp > 2)
    (texts, preemptions, found, pages), *others = run(cp, _serve, {"cp": cp}, limits, changes)
    assert texts == _expected(changes)
    assert preemptions > 0
    assert found > 0
    assert [row[3] for row in others] == [pages] * (cp - 1)
    assert pages == 16 / cp + 1, "a part of the pages, and one that is nobody's"


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama", {"cp": 2, "tp": 2}),
        ("gpt2", {"cp": 2, "tp": 2}),
        ("latent", {"cp": 2, "tp": 2}),
        ("experts", {"cp": 2, "ep": 2}),
        ("experts", {"cp": 2, "tp": 2, "ep": 2, "sh": 2}),
        ("capacity", {"cp": 2, "tp": 2, "ep": 4}),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(f"{k}={v}" for k, v in x.items()),
)
def test_together_with_other_axes(name: str, plan: dict[str, int]) -> None:
    """No two ranks hand the same token to the experts, which a capacity would count twice."""
    limits = LIMITS.but(run_ahead=True, fixed_steps=True, page_tokens=2, pages=24)
    changes = MODELS[name]
    if "capacity" in name:  # who is dropped depends on who else is in the step
        limits = limits.but(run_ahead=False, fixed_steps=False)
    world = plan["cp"] * plan.get("tp", 1)
    texts, preemptions, found, _ = run(world, _serve, plan, limits, changes)[0]
    if "capacity" in name:
        assert texts == run(1, _serve, {}, limits, changes)[0][0]
    else:
        assert texts == _expected(changes)
    assert preemptions > 0
    assert found > 0


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (Axes(cp=Axis("cp", 2)), r"a model over cp=2 that serves is built with ground.axes.serving\(\)"),
        (
            Axes(cp=Axis("cp", 2), tp=Axis("tp", 2), sequence_parallel=True, alike=True),
            r"ranks that share a cache \(cp=2\) all have all tokens; leave sequence_parallel off",
        ),
        (Axes(dp=Axis("dp", 2)), r"not over dp=2; use dp=1, and one server for each replica"),
    ],
)
def test_what_does_not_serve_says_so(axes: Axes, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Engine(tiny.model(axes), tiny.tokenizer(), LIMITS)


@pytest.mark.parametrize(("cp", "page", "window"), [(2, 4, None), (4, 16, None), (3, 5, 9), (2, 16, 30)])
def test_it_is_attention_to_all_keys(cp: int, page: int, window: int | None) -> None:
    """In float64, and what no rank holds is never read."""
    for found in run(cp, errors, cp, "cpu", torch.float64, 8, page, window):
        assert len(found) == 4
        assert max(found.values()) < 1e-12, found

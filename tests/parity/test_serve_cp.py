"""A KV cache sharded over context ranks: greedy tokens equal the reference forward's."""

from pathlib import Path

import pytest
import torch

from colonnade import api
from colonnade.config import CacheFormat, Plan
from colonnade.errors import PlanError
from colonnade.model import KVCache, Rows
from colonnade.parallel.axis import Axes, Axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.model_inputs import CacheShard, build_inputs
from colonnade.serve.work import Slice, Work
from tests.serve import tiny
from tests.serve.ranks import COUNT, LIMITS, MODELS, PROMPTS, expected, serve
from tests.sharded_cache import step_errors
from tests.worlds import assert_same, run


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "cp"),
    [
        ("llama", 2),
        ("gpt2", 2),
        ("window", 2),
        ("latent", 4),
        *(pytest.param(*case, marks=pytest.mark.long) for case in (("llama", 4), ("gpt2", 4), ("latent", 2))),
        pytest.param("window", 4, marks=pytest.mark.long),
    ],
)
def test_greedy_tokens_equal_the_reference_forward(name: str, cp: int) -> None:
    """Prompt chunks together with decodes, preemption, a shared prefix, odd page sizes, ranks that hold no tokens."""
    changes, limits = MODELS[name], LIMITS.replace(async_scheduling=cp > 2, graph_capture=cp > 2)
    (texts, preemptions, found, pages), *others = run(cp, serve, {"cp": cp}, limits, changes)
    assert texts == expected(changes)
    assert preemptions > 0
    assert found > 0
    assert [row[3] for row in others] == [pages] * (cp - 1)
    assert pages == 16 / cp + 1, "a share of the pages, and one scratch page"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("cache", "plan"),
    [
        ("latent int8", {"cp": 2}),
        ("latent float8", {"cp": 2, "tp": 2}),
        ("llama float8", {"cp": 2}),
        ("window float8", {"tp": 2}),
        pytest.param("latent float8", {"cp": 4}, marks=pytest.mark.long),
        pytest.param("latent int8", {"tp": 3}, marks=pytest.mark.long),
        pytest.param("gpt2 float8", {"cp": 2, "tp": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_8_bit_cache_gives_the_tokens_of_one_process(cache: str, plan: dict[str, int]) -> None:
    """Prompt chunks (which do not read their own tokens from the cache) and decodes."""
    name, kind = cache.split()
    limits, changes = (
        LIMITS.replace(cache=kind, async_scheduling="tp" in plan, graph_capture="tp" in plan),
        MODELS[name],
    )
    alone = Engine(tiny.model(**changes), tiny.tokenizer(), limits.replace(pages=64, token_budget=64))
    greedy = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    expected_tokens = [done.token_ids for done in alone.generate(PROMPTS, [greedy] * len(PROMPTS))]
    (texts, _, found, _), *_ = run(Plan(**plan).world, serve, plan, limits, changes)
    assert texts[:-1] == expected_tokens
    assert found > 0


def _logits(cp: int, name: str, kind: CacheFormat) -> list[torch.Tensor]:
    """Logits of three steps: two prompts, chunks of both, and a decode together with a chunk."""
    with DistributedContext.build(Plan(cp=cp)) as context:
        model = tiny.model(context.axes.serving(), **MODELS[name])
        cache = KVCache(model.config, model.axes, pages=16 // cp + 1, page_tokens=3, dtype=torch.float64, kind=kind)
        shard, found = CacheShard.of(model, cache), []
        for spans in ([(0, 7), (0, 4)], [(7, 13), (4, 9)], [(13, 14), (9, 20)]):
            pages = (5, 0, 3, 9, 2), (8, 1, 4, 11, 6, 7, 10)
            slices = [
                Slice(start, tuple(range(start + 40, stop + 40)), table[: -(-stop // 3)], None)
                for (start, stop), table in zip(spans, pages, strict=True)
            ]
            stream, attend, _ = build_inputs(shard, Work(tuple(slices)))
            with torch.no_grad():
                found.append(model(stream, attend, Rows()))
        return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "kind"), [("latent", "int8"), ("latent", "float8"), ("llama", "float8")])
def test_chunk_attends_to_its_own_keys_as_cached(name: str, kind: CacheFormat) -> None:
    """No rank reads these keys from the cache."""
    (alone,) = run(1, _logits, 1, name, kind)
    for found in run(2, _logits, 2, name, kind):
        for got, exact in zip(found, alone, strict=True):
            assert_same(got, exact)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("llama", {"cp": 2, "tp": 2}),
        ("capacity", {"cp": 2, "ep": 2}),
        pytest.param("gpt2", {"cp": 2, "tp": 2}, marks=pytest.mark.long),
        pytest.param("latent", {"cp": 2, "tp": 2}, marks=pytest.mark.long),
        pytest.param("experts", {"cp": 2, "ep": 2}, marks=pytest.mark.long),
        pytest.param("experts", {"cp": 2, "tp": 2, "ep": 2, "etp": 2}, marks=pytest.mark.long),
        pytest.param("capacity", {"cp": 2, "tp": 2, "ep": 4}, marks=pytest.mark.long),
    ],
    ids=lambda x: x if isinstance(x, str) else " ".join(f"{k}={v}" for k, v in x.items()),
)
def test_context_ranks_with_other_axes(name: str, plan: dict[str, int]) -> None:
    """Each token is dispatched to the experts by one rank only; a capacity would count duplicates."""
    limits = LIMITS.replace(async_scheduling=True, graph_capture=True, page_tokens=2, pages=24)
    changes = MODELS[name]
    if "capacity" in name:  # dropping depends on the other tokens of the step
        limits = limits.replace(async_scheduling=False, graph_capture=False)
    world = plan["cp"] * plan.get("tp", 1)
    texts, preemptions, found, _ = run(world, serve, plan, limits, changes)[0]
    if "capacity" in name:
        assert texts == run(1, serve, {}, limits, changes)[0][0]
    else:
        assert texts == expected(changes)
    assert preemptions > 0
    assert found > 0


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (Axes(cp=Axis("cp", 2)), r"a model that serves over cp=2 must be built with ground.axes.serving\(\)"),
        (
            Axes(cp=Axis("cp", 2), tp=Axis("tp", 2), sequence_parallel=True, cp_replicated=True),
            r"ranks that share a cache \(cp=2\) all have all tokens; turn sequence_parallel off",
        ),
        (Axes(dp=Axis("dp", 2)), r"not over dp=2; use dp=1, and one server per replica"),
    ],
)
def test_unsupported_serving_axes_are_refused(axes: Axes, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Engine(tiny.model(axes), tiny.tokenizer(), LIMITS)


@pytest.mark.sample(1)
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_sharded_attention_equals_attention_to_all_keys(cp: int) -> None:
    """To float64 precision; in bfloat16 nothing is rounded before the merge. Unassigned pages are never read."""
    shapes = [(8, 4, None), (8, 16, None), (6, 5, 9), (8, 16, 30)]
    tolerance = {torch.float64: 1e-12, torch.bfloat16: 4e-3}
    for by_type in run(cp, step_errors, cp, "cpu", list(tolerance), shapes):
        for dtype, found in by_type.items():
            assert len(found) == 16
            assert max(found.values()) < tolerance[dtype], (dtype, found)


def _loaded(folder: str) -> list[int] | None:
    with DistributedContext.build(Plan(cp=2)) as context:
        model = api.load(folder, context=context, dtype="float64")
        assert torch.equal(model.logits([1, 2, 3])[-1], model.context.axes.cp.from_rank_0_(model.logits([1, 2, 3])[-1]))
        engine = api.Engine(model, LIMITS)
        if context.rank:
            engine.follow()
            return None
        (answer,) = engine.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True))
        engine.stop()
        return list(answer.token_ids)


def test_checkpoint_loads_on_context_ranks(tmp_path: Path) -> None:
    model = api.Model(tiny.model(), tiny.tokenizer(), DistributedContext.solo(), "tiny")
    api.save(model, tmp_path / "model", format="colonnade")
    assert run(2, _loaded, str(tmp_path / "model"))[0] == tiny.greedy_tokens(model.transformer, PROMPTS[0], COUNT)

"""Steps of fixed shape: their sizes, and that what pads them is nobody's."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from colonnade.config import ServeConfig
from colonnade.kernels.attention import cascade
from colonnade.kernels.attention.cascade import Cascade, KernelCosts
from colonnade.kernels.attention.split_plan import Costs, Shape
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.batch_slots import BatchSlots, padded
from colonnade.serve.cuda_graph_runner import AHEAD, Planned
from tests.serve import tiny


def test_sizes_are_few_and_near():
    for most in (1, 7, 64, 300):
        sizes = [padded(n, most) for n in range(1, most + 1)]
        assert sizes == sorted(sizes)
        assert all(n <= size < 1.25 * n or size == n for n, size in enumerate(sizes, start=1))
        assert sizes[-1] == most and len(set(sizes)) <= 4 * most.bit_length()


def test_padding_writes_where_nobody_reads():
    """The last page of the cache is given to no request, and is all that padding touches."""
    model, params = tiny.model(), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    limits = ServeConfig(pages=30, page_tokens=4, max_requests=12)
    plain, fixed = (Engine(model, tiny.tokenizer(), limits.but(fixed_steps=f)) for f in (False, True))
    prompts = [[i + 1, 2 * i] for i in range(9)]
    assert fixed.generate(prompts, params) == plain.generate(prompts, params)
    assert fixed.scheduler.pool.pages == fixed.stats.pages == plain.cache.pages == fixed.cache.pages - 1
    for ours, whole in zip([*fixed.cache.k, *fixed.cache.v], [*plain.cache.k, *plain.cache.v], strict=True):
        assert ours[-1].any(), "nine requests are padded to ten"
        assert float((ours[:-1] - whole).abs().max()) < 1e-12


def test_a_plan_serves_until_lengths_or_shared_pages_are_others():
    """A request that takes another's place, as long as that, may have another prefix."""
    few = KernelCosts(Shape(kv_heads=2, group=4, rows=16, tile=16), 4, Costs(tile=10, start=1, merge=1, part=0))
    prefix, lengths = tuple(range(100, 140)), [650, 650, 700]
    tables = [(*prefix, 1), (*prefix, 2), tuple(range(44))]
    plan = cascade.plan(tables, lengths, [1, 1, 1], 16, few, few._replace(workers=8), ahead=AHEAD)
    assert isinstance(plan, Cascade)
    planned = Planned.of([plan], lengths, tables, 16)
    assert planned.shares and planned.shared == {0: prefix, 1: prefix}
    assert planned.keys == plan.keys == (640, 640), "two requests, so that each key is read once instead of twice"
    assert planned.holds(lengths, tables)
    longer = [(*table, 900 + r) for r, table in enumerate(tables)]
    assert planned.holds([n + AHEAD for n in lengths], longer)
    assert planned.holds([666, 666, 700], longer), "padding does not grow"
    assert not planned.holds([n + AHEAD + 1 for n in lengths], longer)
    assert not planned.holds([n - 1 for n in lengths], tables)
    shorter = Planned.of([plan], lengths, tables, 16, shorter=True)
    assert shorter.holds([650, 650, 20], tables) and not planned.holds([650, 650, 20], tables)
    assert not shorter.holds([649, 650, 700], tables), "its keys would be those that are shared"
    assert not shorter.holds([650, 650, 717], longer)
    assert planned.holds([651, 653, 701], longer), "a rank that shares a cache may have a new key or not"
    other = (*range(200, 240), 2)
    assert not planned.holds(lengths, [tables[0], other, tables[2]])
    assert not planned.holds(lengths, [tables[0], (*prefix[:-1], 7, 2), tables[2]])
    assert Planned.of([], lengths, tables, 16).holds(lengths, [other, other, other])
    assert Planned.of([], lengths, tables, 16).keys == (0, 0)
    three = cascade.plan([tables[0]] * 3, lengths, [1, 1, 1], 16, few, few._replace(workers=8), ahead=AHEAD)
    assert isinstance(three, Cascade) and three.keys == (640, 2 * 640)
    assert Planned.of([plan, three], lengths, [tables[0]] * 3, 16).keys == three.keys


def test_what_steps_share_is_counted(monkeypatch):
    """Each step counts what its plans share, also one that goes on with the plans of the step before."""
    limits = ServeConfig(pages=30, page_tokens=4, max_requests=4, fixed_steps=True)
    it = Engine(tiny.model(), tiny.tokenizer(), limits)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    it.generate([[1, 2], [3, 4]], params)
    assert (it.stats.shared_keys, it.stats.spared_keys) == (0, 0), "on a CPU each request reads for itself"
    monkeypatch.setattr("colonnade.serve.cuda_graph_runner._Size.keys", (40, 120))
    it.generate([[1, 2], [3, 4]], params)
    assert (it.stats.shared_keys, it.stats.spared_keys) == (3 * 40, 3 * 120), "three steps decode"


class Sitting:
    """Who has a place."""

    place = -1


@given(st.lists(st.integers(-8, 20), max_size=60), st.integers(1, 30))
def test_a_place_is_kept_while_the_size_is(changes: list[int], most: int):
    """No two have one place, the lowest is taken first, and nobody moves but where the step gets smaller by it."""
    places, there = BatchSlots(most), list[Sitting]()
    for change in changes:
        before, size = {id(it): it.place for it in there}, padded(len(places.rows), most)
        if change >= 0 and there:
            places.leave(gone := there.pop(change % len(there)))
            places.leave(gone)  # once is enough
            assert gone.place == -1
        elif len(there) < most:
            there.append(Sitting())
            places.join(there[-1])
            taken = {it.place for it in there[:-1]}
            assert there[-1].place == next(i for i in range(most) if i not in taken)
        assert len({it.place for it in there}) == len(there)
        assert [it.place for it in places.rows if it] == [i for i, it in enumerate(places.rows) if it]
        assert padded(len(places.rows), most) == padded(len(there), most)
        if padded(len(there), most) == size:
            assert all(it.place == before.get(id(it), it.place) for it in there)


def test_steps_with_gaps_say_what_steps_without_say():
    """Requests of many lengths, which leave gaps in the middle and come into them."""
    model = tiny.model()
    limits = ServeConfig(pages=200, page_tokens=4, max_requests=18, token_budget=40)
    params = [SamplingParams(temperature=0, max_tokens=1 + 5 * i % 13, ignore_eos=True) for i in range(40)]
    prompts = [[i + 1, 2 * i, 3] for i in range(40)]
    plain, fixed = (Engine(model, tiny.tokenizer(), limits.but(fixed_steps=f)) for f in (False, True))
    seen = list[Sequence[int]]()
    runner = fixed._runner.fixed
    assert runner is not None
    right = runner._places
    runner._places = lambda work: seen.append(right(work)) or seen[-1]  # type: ignore[method-assign]
    assert fixed.generate(prompts, params) == plain.generate(prompts, params)
    assert any(max(rows) + 1 > len(rows) for rows in seen), "some step had a gap"

"""Padded decode batches: their sizes and rows; padding touches the scratch page only."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from colonnade.config import ServeConfig
from colonnade.kernels.attention import cascade
from colonnade.kernels.attention.cascade import Cascade, KernelCosts
from colonnade.kernels.attention.split_plan import Costs, Shape
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.batch_rows import BatchRows, padded_batch_size
from colonnade.serve.cuda_graph_runner import PLAN_AHEAD_STEPS, PlannedBatch
from colonnade.serve.request import Request
from tests.serve import tiny


def test_batch_sizes_are_few_and_close():
    for most in (1, 7, 64, 300):
        sizes = [padded_batch_size(n, most) for n in range(1, most + 1)]
        assert sizes == sorted(sizes)
        assert all(n <= size < 1.25 * n or size == n for n, size in enumerate(sizes, start=1))
        assert sizes[-1] == most and len(set(sizes)) <= 4 * most.bit_length()


def test_padding_writes_to_the_scratch_page_only():
    """The scratch page, the cache's last, belongs to no request, and padding writes to it only."""
    model, params = tiny.model(), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    limits = ServeConfig(pages=30, page_tokens=4, max_requests=12)
    plain, fixed = (Engine(model, tiny.tokenizer(), limits.replace(graph_capture=f)) for f in (False, True))
    prompts = [[i + 1, 2 * i] for i in range(9)]
    assert fixed.generate(prompts, params) == plain.generate(prompts, params)
    assert fixed.scheduler.pool.pages == fixed.stats.pages == plain.cache.pages == fixed.cache.pages - 1
    for padded, whole in zip([*fixed.cache.k, *fixed.cache.v], [*plain.cache.k, *plain.cache.v], strict=True):
        assert padded[-1].any(), "nine requests are padded to ten"
        assert float((padded[:-1] - whole).abs().max()) < 1e-12


def test_plan_is_reused_until_lengths_or_prefixes_change():
    """A request that replaces one of the same length may have another prefix."""
    few = KernelCosts(Shape(kv_heads=2, group=4, rows=16, tile=16), 4, Costs(tile=10, start=1, merge=1, part=0))
    prefix, lengths = tuple(range(100, 140)), [650, 650, 700]
    tables = [(*prefix, 1), (*prefix, 2), tuple(range(44))]
    plan = cascade.plan(tables, lengths, [1, 1, 1], 16, few, few._replace(workers=8), ahead=PLAN_AHEAD_STEPS)
    assert isinstance(plan, Cascade)
    planned = PlannedBatch.of([plan], lengths, tables, 16)
    assert planned.shares_prefix and planned.shared_pages == {0: prefix, 1: prefix}
    assert planned.cascade_keys == plan.keys == (640, 640), (
        "two requests share the prefix, so each key is read once instead of twice"
    )
    assert planned.is_valid_for(lengths, tables)
    longer = [(*table, 900 + r) for r, table in enumerate(tables)]
    assert planned.is_valid_for([n + PLAN_AHEAD_STEPS for n in lengths], longer)
    assert planned.is_valid_for([666, 666, 700], longer), "padding rows keep their length"
    assert not planned.is_valid_for([n + PLAN_AHEAD_STEPS + 1 for n in lengths], longer)
    assert not planned.is_valid_for([n - 1 for n in lengths], tables)
    shorter = PlannedBatch.of([plan], lengths, tables, 16, allow_shorter=True)
    assert shorter.is_valid_for([650, 650, 20], tables) and not planned.is_valid_for([650, 650, 20], tables)
    assert not shorter.is_valid_for([649, 650, 700], tables), "its own keys would be read as shared ones"
    assert not shorter.is_valid_for([650, 650, 717], longer)
    assert planned.is_valid_for([651, 653, 701], longer), "a rank of a sharded cache may or may not get the new key"
    other = (*range(200, 240), 2)
    assert not planned.is_valid_for(lengths, [tables[0], other, tables[2]])
    assert not planned.is_valid_for(lengths, [tables[0], (*prefix[:-1], 7, 2), tables[2]])
    assert PlannedBatch.of([], lengths, tables, 16).is_valid_for(lengths, [other, other, other])
    assert PlannedBatch.of([], lengths, tables, 16).cascade_keys == (0, 0)
    three = cascade.plan([tables[0]] * 3, lengths, [1, 1, 1], 16, few, few._replace(workers=8), ahead=PLAN_AHEAD_STEPS)
    assert isinstance(three, Cascade) and three.keys == (640, 2 * 640)
    assert PlannedBatch.of([plan, three], lengths, [tables[0]] * 3, 16).cascade_keys == three.keys


def test_shared_reads_are_counted(monkeypatch):
    """Each step counts what its plans share, also when it reuses the plans of the step before."""
    limits = ServeConfig(pages=30, page_tokens=4, max_requests=4, graph_capture=True)
    it = Engine(tiny.model(), tiny.tokenizer(), limits)
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    it.generate([[1, 2], [3, 4]], params)
    assert (it.stats.shared_keys, it.stats.spared_keys) == (0, 0), "on a CPU requests share no reads"
    monkeypatch.setattr("colonnade.serve.cuda_graph_runner._PaddedBatch.cascade_keys", (40, 120))
    it.generate([[1, 2], [3, 4]], params)
    assert (it.stats.shared_keys, it.stats.spared_keys) == (3 * 40, 3 * 120), "three steps decode"


def make_request() -> Request:
    return Request(id="", prompt=(1,), params=SamplingParams(), seed=0, limit_tokens=1)


@given(st.lists(st.integers(-8, 20), max_size=60), st.integers(1, 30))
def test_requests_keep_their_row_while_the_batch_size_stays(changes: list[int], most: int):
    """No two requests share a row, the lowest is taken first, and rows move only to a smaller batch."""
    rows, requests = BatchRows(most), list[Request]()
    for change in changes:
        before, size = {id(it): it.batch_row for it in requests}, padded_batch_size(len(rows.rows), most)
        if change >= 0 and requests:
            rows.remove(finished := requests.pop(change % len(requests)))
            rows.remove(finished)  # once is enough
            assert finished.batch_row == -1
        elif len(requests) < most:
            requests.append(make_request())
            rows.add(requests[-1])
            taken = {it.batch_row for it in requests[:-1]}
            assert requests[-1].batch_row == next(i for i in range(most) if i not in taken)
        assert len({it.batch_row for it in requests}) == len(requests)
        assert [it.batch_row for it in rows.rows if it] == [i for i, it in enumerate(rows.rows) if it]
        assert padded_batch_size(len(rows.rows), most) == padded_batch_size(len(requests), most)
        if padded_batch_size(len(requests), most) == size:
            assert all(it.batch_row == before.get(id(it), it.batch_row) for it in requests)


def test_gaps_in_the_batch_do_not_change_the_output():
    """Requests of many lengths, which leave gaps in the middle and fill them again."""
    model = tiny.model()
    limits = ServeConfig(pages=200, page_tokens=4, max_requests=18, token_budget=40)
    params = [SamplingParams(temperature=0, max_tokens=1 + 5 * i % 13, ignore_eos=True) for i in range(40)]
    prompts = [[i + 1, 2 * i, 3] for i in range(40)]
    plain, fixed = (Engine(model, tiny.tokenizer(), limits.replace(graph_capture=f)) for f in (False, True))
    seen = list[Sequence[int]]()
    runner = fixed.core.runner.graphs
    assert runner is not None
    right = runner._batch_rows
    runner._batch_rows = lambda work: seen.append(right(work)) or seen[-1]  # type: ignore[method-assign]
    assert fixed.generate(prompts, params) == plain.generate(prompts, params)
    assert any(max(rows) + 1 > len(rows) for rows in seen), "some step had a gap"

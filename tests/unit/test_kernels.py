"""Every registered kernel computes the values and gradients of its reference."""

from dataclasses import replace

import pytest
import torch

from colonnade.errors import CapacityError, ConfigError
from colonnade.kernels.attention import reference
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.shared_prefix import PrefixTree, shared_prefix_reference
from colonnade.kernels.dropout import AttentionDropout
from colonnade.kernels.linear import reference as linear_reference
from colonnade.kernels.registry import KERNELS, Kernel, choose
from tests.worlds import assert_same

PACKED = [row for row in KERNELS if row.operation == "packed_attention" and row.name != "reference"]
SHARED_PREFIX = [row for row in KERNELS if row.operation == "shared_prefix_attention" and row.name != "reference"]
LINEAR = [row for row in KERNELS if row.operation == "linear" and row.name != "reference"]
PAGED = [row for row in KERNELS if row.operation == "paged_attention" and row.name != "reference"]


def random_heads(T: int, n: int, seed: int, h: int = 8) -> torch.Tensor:
    return torch.randn(T, n, h, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on_cpu(rows: list[Kernel]) -> list[Kernel]:
    return [row for row in rows if "cpu" in row.devices and torch.float64 in row.dtypes]


@pytest.mark.parametrize("row", on_cpu(PACKED), ids=lambda row: row.name)
@pytest.mark.parametrize("lengths", [[6, 6], [5, 0, 1, 9], [1], [0], []], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("kv", [1, 2, 6])
def test_packed_attention_matches_the_reference(
    row: Kernel, lengths: list[int], causal: bool, window: int | None, kv: int
) -> None:
    T = sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    equal = len(set(lengths)) == 1 and lengths[0] > 0
    results = []
    for run in (reference.packed, row.run):
        q, k, v = (random_heads(T, n, seed).requires_grad_() for seed, n in enumerate((6, kv, kv)))
        o = run(q, k, v, cu, longest=max(lengths, default=0), equal=equal, causal=causal, window=window)
        o.pow(2).sum().backward()
        # Without tokens a key is unused, and has no gradient rather than an empty one.
        results.append((o, *(torch.zeros_like(x) if x.grad is None else x.grad for x in (q, k, v))))
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("row", on_cpu(SHARED_PREFIX), ids=lambda row: row.name)
@pytest.mark.parametrize(
    ("prefixes", "continuations"),
    [([5, 1, 7], [[2, 3, 1], [4], []]), ([3, 2], [[], []]), ([6], [[1, 1]]), ([], [])],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("kv", [1, 2, 6])
def test_shared_prefix_attention_matches_the_reference(
    row: Kernel, prefixes: list[int], continuations: list[list[int]], window: int | None, kv: int
) -> None:
    tree = PrefixTree.of(prefixes, continuations, "cpu")
    q, k, v = (random_heads(sum(prefixes) + sum(map(sum, continuations)), n, i) for i, n in enumerate((6, kv, kv)))
    expected = shared_prefix_reference(q, k, v, tree, window=window)
    assert_same(row.run(q, k, v, tree, window=window), expected)
    if prefixes and not any(continuations):
        cu = tree.cu_prefixes
        assert_same(expected, reference.packed(q, k, v, cu, longest=max(prefixes), equal=False, window=window))


def page_table(new: list[int], known: list[int], page: int, *, scattered: bool) -> PageTable:
    """Requests with ``new`` tokens after ``known`` ones, in contiguous pages or scattered among 40."""
    lengths = [n + before for n, before in zip(new, known, strict=False)]
    needed = [-(-n // page) for n in lengths]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)) if scattered else torch.arange(40)
    pages = torch.zeros(len(new), max(needed), dtype=torch.int32)
    for r, n in enumerate(needed):
        pages[r, :n] = order[8 * r : 8 * r + n]
    cu, known_and_new = torch.tensor([0, *new]).cumsum(0).int(), torch.tensor(lengths, dtype=torch.int32)
    return PageTable(pages, cu, known_and_new, page, max(new), max(lengths))


@pytest.mark.parametrize("row", on_cpu(PAGED), ids=lambda row: row.name)
@pytest.mark.parametrize("new", [[1, 1, 1], [4, 1, 2], [1], [7], [1, 3, 1, 1], [1, 0, 1]], ids=str)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scattered", [False, True])
def test_paged_attention_matches_the_reference(
    row: Kernel, new: list[int], window: int | None, scattered: bool
) -> None:
    table = page_table(new, [9, 0, 5, 10], page := 4, scattered=scattered)
    k, v = (random_heads(40 * page, 2, seed).unflatten(0, (40, page)) for seed in (1, 2))
    q = random_heads(sum(new), 4, 0)
    assert_same(row.run(q, k, v, table, window=window), reference.paged(q, k, v, table, window=window))


@pytest.mark.parametrize("row", on_cpu(PAGED), ids=lambda row: row.name)
@pytest.mark.parametrize("new", [[1, 1, 1], [4, 1, 2]], ids=str)
def test_paged_values_may_be_the_first_channels_of_keys(row: Kernel, new: list[int]) -> None:
    """As in latent attention: one head is key and value, and only the first channels of the output are needed."""
    table = page_table(new, [9, 0, 5], page := 4, scattered=True)
    k, q = random_heads(40 * page, 1, 1).unflatten(0, (40, page)), random_heads(sum(new), 4, 0)
    exact = reference.paged(q, k, k, table)[..., :3]
    assert_same(row.run(q, k, k, table, values=3), exact)
    assert_same(reference.paged(q, k, k, table, values=3), exact)


@pytest.mark.parametrize("row", on_cpu(PAGED), ids=lambda row: row.name)
def test_requests_never_read_stale_values_of_a_page(row: Kernel) -> None:
    """Two decodes of different lengths share a call; the shorter one's padding contains another request's NaN."""
    table = page_table([1, 1], [9, 5], page := 4, scattered=False)
    k, v = (random_heads(40 * page, 2, seed).unflatten(0, (40, page)) for seed in (1, 2))
    q = random_heads(2, 4, 0)
    expected = reference.paged(q, k, v, table)
    for x in (k, v):
        x[0] = x[9, 2:] = torch.nan  # page 0 fills up the table; the last page of the second request is half empty
    got = row.run(q, k, v, table)
    assert got[0].isnan().all()  # page 0 is its own
    assert_same(got[1], expected[1])


@pytest.mark.parametrize("row", on_cpu(PAGED), ids=lambda row: row.name)
@pytest.mark.parametrize(
    ("new", "known"), [([1], [-1]), ([1, 1], [-1, 5]), ([3, 1], [-2, 4]), ([1, 2], [-1, -2])], ids=str
)
def test_queries_without_keys_give_the_identity_state(row: Kernel, new: list[int], known: list[int]) -> None:
    """Requests without keys, and with more queries than keys."""
    table = page_table(new, known, page := 4, scattered=True)
    k, v = (random_heads(40 * page, 2, seed).unflatten(0, (40, page)) for seed in (1, 2))
    q = random_heads(sum(new), 4, 0)
    o = row.run(q, k, v, table)
    assert not o[: -known[0]].any()
    assert_same(o, reference.paged(q, k, v, table))


@pytest.mark.parametrize("run", [*(row.run for row in on_cpu(PAGED)), reference.paged, reference.sharded])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("requests_", [[1], [1, 1]], ids=str)
def test_invalid_page_table_is_refused_before_any_read(run, scattered: bool, requests_: list[int]) -> None:
    """For kernels without bounds checks; in the last pages, where views and slices would silently be short."""
    table = page_table(requests_, [9, 5], page := 4, scattered=scattered)
    k, v = (random_heads(40 * page, 2, seed).unflatten(0, (40, page)) for seed in (1, 2))
    q = random_heads(len(requests_), 4, 0)

    def table_with(first: int | None = None, **changes) -> PageTable:
        pages = table.pages_RP.clone()
        if first is not None:
            pages[-1] = first + torch.arange(pages.shape[1])
        return replace(table, **{"pages_RP": pages} | changes)

    run(q, k, v, table_with(37))
    last, longest = len(requests_) - 1, table.pages_RP.shape[1] * page
    for bad, kind, words in (
        (table_with(-1), ConfigError, f"request {last} has page -1 of a cache of 40"),
        (table_with(40), ConfigError, f"request {last} has page 40 of a cache of 40; use page ids below that"),
        (table_with(39 if last else 38), ConfigError, f"request {last} has page 40 of a cache of 40"),
        (table_with(lengths_R=table.lengths_R + longest), CapacityError, f"its page table has room for {longest}"),
        (table_with(lengths_R=table.lengths_R - longest - 1), ConfigError, "below 0 among lengths"),
        (table_with(pages_RP=table.pages_RP[:0]), ConfigError, f"0 rows of pages for {len(requests_)} requests"),
    ):
        with pytest.raises(kind, match=words):
            run(q, k, v, bad)


@pytest.mark.parametrize("row", on_cpu(LINEAR), ids=lambda row: row.name)
@pytest.mark.parametrize("T", [0, 1, 2, 7, 32, 33])
@pytest.mark.parametrize("inputs", [12, 1200])
@pytest.mark.parametrize("outputs", [48, 49, 240])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_matches_the_reference(row: Kernel, T: int, inputs: int, outputs: int, biased: bool) -> None:
    results = []
    for run in (linear_reference.linear, row.run):
        x, weight, bias = (
            random_heads(T, 1, 0, inputs)[:, 0],
            random_heads(outputs, 1, 1, inputs)[:, 0],
            random_heads(1, 1, 2, outputs)[0, 0],
        )
        leaves = [leaf.requires_grad_() for leaf in ((x, weight, bias) if biased else (x, weight))]
        y = run(*leaves)
        assert y.is_contiguous()
        y.pow(2).sum().backward()
        results.append((y, *(leaf.grad for leaf in leaves)))
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert_same(ours, theirs)


def test_naming_a_kernel_forces_it() -> None:
    assert choose("packed_attention", "cpu", torch.float32, "reference") is reference.packed
    with pytest.raises(ConfigError, match="no kernel 'fast' for packed_attention on cpu"):
        choose("packed_attention", "cpu", torch.float32, "fast")


@pytest.mark.parametrize("lengths", [[6, 6], [5, 0, 1, 9], [1], []], ids=str)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (False, 4)])
def test_attention_dropout_multiplies_by_a_mask(lengths: list[int], causal: bool, window: int | None) -> None:
    """The reference against the definition, all tokens at once: o = (softmax(scores) ⊙ z) v."""
    T, kv = sum(lengths), 2
    cu, equal = torch.tensor([0, *lengths]).cumsum(0).int(), len(set(lengths)) == 1
    index_T = torch.randperm(100, generator=torch.Generator().manual_seed(1))[:T]
    pairs = AttentionDropout(torch.tensor(77), index_T, index_T, 0.3, head=4)
    q, k, v = (random_heads(T, n, seed).requires_grad_() for seed, n in enumerate((6, kv, kv)))
    o = reference.packed(
        q, k, v, cu, longest=max(lengths, default=0), equal=equal, causal=causal, window=window, dropout=pairs
    )
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.int64))
    seen = (segment[:, None] == segment) & reference.visible(T, T, causal=causal, window=window, device=q.device)
    scores = torch.einsum("tnh,snh->nts", q, k.repeat_interleave(3, 1)) * 8**-0.5
    p = scores.masked_fill(~seen, -torch.inf).softmax(-1) * pairs.keep_mask(6) / 0.7
    expected = torch.einsum("nts,snh->tnh", p, v.repeat_interleave(3, 1))
    assert_same(o, expected)
    if T:
        for ours, theirs in zip(*(torch.autograd.grad(x.pow(2).sum(), (q, k, v)) for x in (o, expected)), strict=True):
            assert_same(ours, theirs)


def test_only_our_kernels_support_dropout() -> None:
    assert {row.name for row in KERNELS if row.operation == "dropout_attention"} <= {"reference", "triton"}

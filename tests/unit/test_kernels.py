"""The contract: every row of the table computes what its reference computes, values and gradients."""

import pytest
import torch

from colonnade.kernels.attention import reference
from colonnade.kernels.choose import TABLE, Row, choose
from colonnade.kernels.linear import reference as linear_reference
from tests.worlds import assert_same

PACKED = [row for row in TABLE if row.operation == "packed_attention" and row.name != "reference"]
LINEAR = [row for row in TABLE if row.operation == "linear" and row.name != "reference"]
PAGED = [row for row in TABLE if row.operation == "paged_attention" and row.name != "reference"]


def heads(T: int, n: int, seed: int, h: int = 8) -> torch.Tensor:
    return torch.randn(T, n, h, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def on_cpu(rows: list[Row]) -> list[Row]:
    return [row for row in rows if "cpu" in row.devices and torch.float64 in row.dtypes]


@pytest.mark.parametrize("row", on_cpu(PACKED), ids=lambda row: row.name)
@pytest.mark.parametrize("lengths", [[6, 6], [5, 0, 1, 9], [1], [0], []], ids=str)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("kv", [1, 2, 6])
def test_packed(row: Row, lengths: list[int], causal: bool, window: int | None, kv: int) -> None:
    T = sum(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0).int()
    equal = len(set(lengths)) == 1 and lengths[0] > 0
    results = []
    for run in (reference.packed, row.run):
        q, k, v = (heads(T, n, seed).requires_grad_() for seed, n in enumerate((6, kv, kv)))
        o = run(q, k, v, cu, longest=max(lengths, default=0), equal=equal, causal=causal, window=window)
        o.pow(2).sum().backward()
        # Without a single token a key takes no part, and has no gradient rather than an empty one.
        results.append((o, *(torch.zeros_like(x) if x.grad is None else x.grad for x in (q, k, v))))
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert_same(ours, theirs)


@pytest.mark.parametrize("row", on_cpu(PAGED), ids=lambda row: row.name)
@pytest.mark.parametrize("queries", [[1, 1, 1], [4, 1, 2], [1], [7]], ids=str)
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("scattered", [False, True])
def test_paged(row: Row, queries: list[int], window: int | None, scattered: bool) -> None:
    page, kv = 4, 2
    lengths = [n + extra for n, extra in zip(queries, (9, 0, 5), strict=False)]
    needed = [-(-n // page) for n in lengths]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)) if scattered else torch.arange(40)
    pages = torch.zeros(len(queries), max(needed), dtype=torch.int32)
    for r, n in enumerate(needed):
        pages[r, :n] = order[8 * r : 8 * r + n]
    k, v = (heads(40 * page, kv, seed).unflatten(0, (40, page)) for seed in (1, 2))
    q = heads(sum(queries), 4, 0)
    cu = torch.tensor([0, *queries]).cumsum(0).int()
    sizes = {"longest_query": max(queries), "longest_context": max(lengths), "window": window}
    table = (pages, cu, torch.tensor(lengths, dtype=torch.int32))
    assert_same(row.run(q, k, v, *table, **sizes), reference.paged(q, k, v, *table, **sizes))


@pytest.mark.parametrize("row", on_cpu(LINEAR), ids=lambda row: row.name)
@pytest.mark.parametrize("T", [0, 1, 2, 7, 32, 33])
@pytest.mark.parametrize("inputs", [12, 1200])
@pytest.mark.parametrize("outputs", [48, 49])
@pytest.mark.parametrize("biased", [True, False])
def test_linear(row: Row, T: int, inputs: int, outputs: int, biased: bool) -> None:
    results = []
    for run in (linear_reference.linear, row.run):
        x, weight, bias = (
            heads(T, 1, 0, inputs)[:, 0],
            heads(outputs, 1, 1, inputs)[:, 0],
            heads(1, 1, 2, outputs)[0, 0],
        )
        leaves = [leaf.requires_grad_() for leaf in ((x, weight, bias) if biased else (x, weight))]
        y = run(*leaves)
        assert y.is_contiguous()
        y.pow(2).sum().backward()
        results.append((y, *(leaf.grad for leaf in leaves)))
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert_same(ours, theirs)


def test_a_name_forces_an_implementation() -> None:
    assert choose("packed_attention", "cpu", torch.float32, "reference") is reference.packed
    with pytest.raises(LookupError, match="no kernel 'fast' for packed_attention on cpu"):
        choose("packed_attention", "cpu", torch.float32, "fast")

"""Attention kernels on a GPU: every registered one is close to the float64 reference, by relative norm."""

import pytest
import torch

from colonnade.kernels.attention import reference
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.shared_prefix import PrefixTree, shared_prefix_reference
from colonnade.kernels.registry import Kernel
from tests.gpu.rows import rows

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""bfloat16: rounding the output alone costs 1.7e-3. Gradients pass through two roundings and get twice as much."""


def heads(T: int, n: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(T, n, 64, generator=torch.Generator().manual_seed(seed)).to(dtype).cuda()


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("row", "dtype"), rows("packed_attention"))
@pytest.mark.parametrize("lengths", [[128, 128], [5, 0, 1, 99, 300], [1]], ids=str)
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 7), (False, None), (False, 7)])
@pytest.mark.parametrize("kv", [2, 6])
def test_packed(row: Kernel, dtype: torch.dtype, lengths: list[int], causal: bool, window: int | None, kv: int) -> None:
    T, equal = sum(lengths), len(set(lengths)) == 1
    cu = torch.tensor([0, *lengths, *([0] * 3)]).cumsum(0).int().cuda()  # padded with sequences of length 0
    cu = cu[: len(lengths) + 1] if equal else cu
    inputs = [heads(T, n, seed, dtype) for seed, n in enumerate((6, kv, kv))]
    weight = heads(T, 6, 9, torch.float64)
    results = []
    for run, kind in ((reference.packed, torch.float64), (row.run, dtype)):
        q, k, v = (x.to(kind).requires_grad_() for x in inputs)
        o = run(q, k, v, cu, longest=max(lengths), equal=equal, causal=causal, window=window)
        o.backward(weight.to(kind))
        results.append((o.detach(), q.grad, k.grad, v.grad))
    (o, *grads), (o_exact, *grads_exact) = results[1], results[0]
    assert error(o, o_exact) < TOLERANCE[dtype]
    for grad, exact in zip(grads, grads_exact, strict=True):
        if exact.norm() > 1e-9:  # a single key has no gradient but rounding
            assert error(grad, exact) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize(("row", "dtype"), rows("shared_prefix_attention"))
@pytest.mark.parametrize(
    ("prefixes", "continuations"),
    [([200, 1, 33], [[20, 3, 150], [4], []]), ([130, 20], [[], []]), ([64], [[1, 1]])],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("kv", [2, 6])
def test_shared_prefix(
    row: Kernel, dtype: torch.dtype, prefixes: list[int], continuations: list[list[int]], window: int | None, kv: int
) -> None:
    tree = PrefixTree.of(prefixes, continuations, "cuda")
    q, k, v = (heads(sum(prefixes) + sum(map(sum, continuations)), n, i, dtype) for i, n in enumerate((6, kv, kv)))
    exact = shared_prefix_reference(q.double(), k.double(), v.double(), tree, window=window)
    assert error(row.run(q, k, v, tree, window=window), exact) < TOLERANCE[dtype]


@pytest.mark.parametrize(("row", "dtype"), rows("paged_attention"))
@pytest.mark.parametrize("queries", [[1, 1, 1], [40, 1, 2]], ids=str)
@pytest.mark.parametrize("window", [None, 7])
def test_paged(row: Kernel, dtype: torch.dtype, queries: list[int], window: int | None) -> None:
    page, kv = 16, 2
    lengths = [n + extra for n, extra in zip(queries, (90, 0, 5), strict=True)]
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0)).int()
    pages = torch.zeros(3, 10, dtype=torch.int32)
    for r, n in enumerate(lengths):
        used = -(-n // page)
        pages[r, :used] = order[10 * r : 10 * r + used]
    k, v = (heads(40 * page, kv, seed, dtype).unflatten(0, (40, page)) for seed in (1, 2))
    q = heads(sum(queries), 6, 0, dtype)
    cu = torch.tensor([0, *queries]).cumsum(0).int().cuda()
    known_and_new = torch.tensor(lengths, dtype=torch.int32).cuda()
    table = PageTable(pages.cuda(), cu, known_and_new, page, max(queries), max(lengths))
    exact = reference.paged(q.double(), k.double(), v.double(), table, window=window)
    assert error(row.run(q, k, v, table, window=window), exact) < TOLERANCE[dtype]

"""Quantised GEMMs, dense and of experts, and batch-invariant kernels, by Triton's interpreter (see interpreted.py).

Tiles are small, so that inputs and outputs end within a tile, and inputs are split.
"""

import itertools
import warnings
from unittest import mock

import torch

from colonnade.kernels import norm as norm_reference
from colonnade.kernels import permute, triton_batch_invariant
from colonnade.kernels.attention import decode_tiles
from colonnade.kernels.attention import reference as attention_reference
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.experts import reference
from colonnade.kernels.experts import triton_quantised as experts_gpu
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.experts.tiles import GroupedTiles as ExpertTiles
from colonnade.kernels.linear import gptq_columns, skinny_gemm, ternary, triton_gptq, triton_ternary
from colonnade.kernels.linear import reference as linear_reference
from colonnade.kernels.linear import reference as quantised
from colonnade.kernels.linear.gptq_columns import Rounding
from colonnade.kernels.linear.quantise import dequantise, quantise
from colonnade.kernels.linear.skinny_gemm_tiles import SplitKTiles
from tests.experts import LOADS, Case, dequantise_experts, quantise_experts
from tests.rounding import rows_alike

SHAPES = [(40, 96), (16, 64), (7, 50), (33, 300)]
HOW = {
    "int4": SplitKTiles(16, 16, 4, 2),
    "int8": SplitKTiles(16, 32, 4, 2),
    "float8": SplitKTiles(16, 32, 4, 2),
}


def case(kind: str, rows: int, outputs: int, inputs: int, group: int, splits: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(rows + outputs)
    weight = quantise(torch.randn(outputs, inputs, generator=draw), kind, group)
    x = torch.randn(rows, 2 * inputs, generator=draw).to(dtype)[:, :inputs]
    exact = quantised.quantised_linear(x.double(), weight)
    got = skinny_gemm.split_k(x, weight, HOW[kind], splits)
    error = float((got.double() - exact).norm() / exact.norm())
    # Tensor cores take weights rounded to the dtype of x.
    tolerance = 1e-3 if dtype == torch.float16 else 1e-6
    assert got.dtype == dtype and error < tolerance, (kind, rows, outputs, error)


def check_one_row() -> int:
    count = 0
    for (outputs, inputs), (kind, group), splits in itertools.product(
        SHAPES, (("int8", 32), ("int4", 32), ("int4", 64), ("int4", 128), ("float8", 32)), (1, 3)
    ):
        case(kind, 1, outputs, inputs, group, splits, torch.float16 if inputs == 50 else torch.float32)
        count += 1
    return count


def check_more_rows() -> int:
    count = 0
    for (outputs, inputs), (kind, group), rows in itertools.product(
        SHAPES[1:], (("int8", 32), ("int4", 32), ("int4", 128), ("float8", 32)), (2, 17)
    ):
        case(kind, rows, outputs, inputs, group, 1 + count % 3, torch.float16 if inputs == 64 else torch.float32)
        count += 1
    return count


def check_registered_kernel() -> int:
    """Any number of rows, a bias, more dimensions, and no rows."""
    weight, bias = quantise(torch.randn(24, 70), "int4", 32), torch.randn(24)
    for shape in ((70,), (1, 70), (3, 70), (2, 5, 70), (65, 70), (0, 70)):
        x = torch.randn(shape)
        exact = quantised.quantised_linear(x.double(), weight, bias.double())
        got = skinny_gemm.linear(x, weight, bias)
        assert got.shape == exact.shape and (got - exact).norm() <= 1e-4 * exact.norm()
    return 6


def check_dequantise() -> int:
    count = 0
    for (outputs, inputs), kind in itertools.product(SHAPES, ("int8", "int4", "float8")):
        weight = quantise(torch.randn(outputs, inputs), kind, 32)
        for dtype in (torch.float32, torch.float16):
            got, exact = skinny_gemm.dequantise(weight, dtype), dequantise(weight, dtype)
            assert got.dtype == dtype and torch.allclose(got, exact, rtol=torch.finfo(dtype).eps, atol=1e-6)
            count += 1
    return count


def check_experts() -> int:
    """Every load, form and bit width equals float64 on the same weights; experts and widths end within tiles."""
    count = 0
    ways = [(16, 32, 16), (16, 32, 32), (32, 16, 32)]
    loads = itertools.product(LOADS, (("int8", 32), ("int4", 32), ("float8", 32)))
    for i, (load, (kind, group)) in enumerate(loads):
        shape = [(23, 1, 3, 24, 20), (5, 2, 4, 70, 33)][i // 2 % 2]
        gated, biased = i % 3 != 1, i % 2 == 1
        case = Case(*shape, load=load, gated=gated, biased=biased, activation=list(reference.ACTIVATIONS)[i % 4])
        how = ExpertTiles(*ways[i % 3], 4, 2, GROUP=1 + i % 2, programs_per_sm=i % 2)
        experts_case(case, kind, group, torch.float16 if i % 7 == 6 else torch.float32, how)
        count += 1
    for i, shape in enumerate([(1, 2, 4, 16, 16), (0, 2, 4, 16, 16), (40, 1, 2, 16, 16)]):
        experts_case(Case(*shape, biased=True), ("int8", "int4", "float8")[i], 64, torch.float32, None)
        count += 1
    return count


def experts_case(case: Case, kind: str, group: int, dtype: torch.dtype, how: ExpertTiles | None) -> None:
    x, routing, *stacks = (None if w is None else w.detach() for w in case.leaves(dtype, "cpu"))
    wide = torch.cat((x, torch.full_like(x, float("nan"))), 1)[:, : case.D]  # sliced rows
    kept = quantise_experts(Weights(*stacks), kind, group)
    order_R, ends_E = permute.sort(case.ids(), case.E, case.rows())
    plain = dequantise_experts(kept, torch.float64)
    exact = reference.routed(x.double(), order_R, ends_E, routing.double(), plain, case.activation)
    got = experts_gpu.routed(wide, order_R, ends_E, routing, kept, case.activation, how)
    error = float((got.double() - exact).norm() / exact.norm().clamp(min=1))
    assert got.dtype == dtype and got.shape == exact.shape
    assert error < (2e-3 if dtype == torch.float16 else 1e-5), (case, kind, error)


def check_ternary() -> int:
    """Each word length, units of one, two and four words, both tables; experts."""
    count = 0
    for (trits, words), two_levels in itertools.product(((18, 5), (24, 6), (32, 4), (18, 12), (32, 20)), (False, True)):
        rows = 1 + count % 3
        draw = torch.Generator().manual_seed(trits + rows)
        inputs = trits * words - 7
        weight = quantise(torch.randn(20, inputs, generator=draw), "ternary", trits)
        x = torch.randn(rows, 2 * inputs, generator=draw)[:, :inputs]
        unroll = 2 if words == 20 else 1 + rows % 2  # a split of 3 of 5 units: the fourth is the next split's
        tiles = triton_ternary.Tiles(16, 2, unroll, 4, two_levels)
        got, exact = triton_ternary.linear(x, weight, tiles), quantised.quantised_linear(x.double(), weight)
        assert (got - exact).norm() < 1e-6 * exact.norm(), (trits, rows, two_levels)
        assert torch.equal(triton_ternary.linear(x[:1], weight, tiles)[0], got[0])  # no row depends on others
        count += 1
    weight, bias = quantise(torch.randn(24, 70), "ternary", 18), torch.randn(24)
    for shape in ((70,), (2, 2, 70), (0, 70), (65, 70)):
        x = torch.randn(shape)
        exact = quantised.quantised_linear(x.double(), weight, bias.double())
        got = skinny_gemm.linear(x, weight, bias)
        assert got.shape == exact.shape and (got - exact).norm() <= 1e-6 * exact.norm()
    for i, load in enumerate(("skewed", "some dropped", "all dropped")):
        case = Case(3, 2, 4, 40, 33, load=load, gated=i % 3 != 1, biased=i % 2 == 1, activation="silu")
        experts_case(case, "ternary", (18, 24, 32)[i % 3], torch.float16 if i == 1 else torch.float32, None)
        count += 1
    experts_case(Case(40, 2, 4, 16, 16), "ternary", 18, torch.float32, None)  # more rows than the kernel takes
    wide = quantise(torch.randn(20, 300), "ternary", 32)
    x = torch.randn(3, 300)
    assert torch.equal(skinny_gemm.linear(x, wide)[1:2], skinny_gemm.linear(x[1:2], wide))
    return count + 6


def check_ternary_tables() -> int:
    """Both levels say of every word what the table of all words says."""
    for trits in ternary.NONZERO:
        used = ternary.word_count(trits)
        block, starts, rest = triton_ternary.two_level_tables(trits)
        start = starts[block[:used].long()]
        entries = rest[torch.arange(used) - (start & 0xFFFF)]
        found = torch.stack([start >> 16, *(entries >> 8 * j & 255 for j in range(ternary.NONZERO[trits] - 1))])
        exact = torch.stack([triton_ternary.position_table(trits)[:used] >> 8 * j & 255 for j in range(4)])
        exact = exact[: ternary.NONZERO[trits]]
        assert torch.equal(found.sort(0).values, exact.sort(0).values)
    return len(ternary.NONZERO)


@rows_alike()
def check_fixed_products() -> int:
    """Close to float64, and a row's bits do not depend on the batch."""
    weight, bias = torch.randn(40, 150), torch.randn(40)
    for rows, dtype, biased in ((1, torch.float32, True), (70, torch.float32, False), (3, torch.float16, True)):
        x = torch.randn(rows, 2, 150).to(dtype)[:, 0]
        b = bias.to(dtype) if biased else None
        got = triton_batch_invariant.linear(x, weight.to(dtype), b)
        exact = linear_reference.linear(x.double(), weight.to(dtype).double(), None if b is None else b.double())
        assert (got - exact).norm() < (1e-6 if dtype == torch.float32 else 1e-3) * exact.norm()
        for r in {0, rows // 2, rows - 1}:
            assert torch.equal(triton_batch_invariant.linear(x[r : r + 1], weight.to(dtype), b)[0], got[r])
    assert triton_batch_invariant.linear(torch.randn(2, 3, 150), weight).shape == (2, 3, 40)
    assert triton_batch_invariant.linear(torch.randn(0, 150), weight).shape == (0, 40)
    return 5


@rows_alike()
def check_fixed_attention() -> int:
    """A prompt's bits are the same in one pass, in chunks, and in a batch."""
    draw = torch.Generator().manual_seed(0)
    k, v = (torch.randn(40, 16, 2, 16, generator=draw) for _ in range(2))
    q, pages = torch.randn(70, 6, 16, generator=draw), torch.arange(40, dtype=torch.int32).view(2, 20)

    def run(
        queries: torch.Tensor, new: list[int], lengths: list[int], first: int, window: int | None = None
    ) -> torch.Tensor:
        cu = torch.tensor([0, *new]).cumsum(0).int()
        mine = pages[first : first + len(new)]
        table = PageTable(mine, cu, torch.tensor(lengths).int(), 16, max(new), max(lengths))
        exact = attention_reference.paged(queries.double(), k.double(), v.double(), table, window=window)
        got = triton_batch_invariant.paged(queries, k, v, table, window=window)
        assert (got - exact).norm() < 1e-6 * exact.norm()
        return got

    whole = run(q, [70], [70], 0)
    assert torch.equal(run(q[60:], [10], [70], 0), whole[60:])
    assert torch.equal(run(torch.cat((q[:1], q[:3])), [1, 3], [1, 200], 0)[:1], whole[:1])
    with mock.patch.object(triton_batch_invariant, "CHUNK", 32):  # small chunks, so that several are merged
        whole = run(q, [70], [70], 0)
        assert torch.equal(run(q[60:], [10], [70], 0), whole[60:])
    # A block of queries whose first keys are in different chunks.
    with (
        mock.patch.object(triton_batch_invariant, "CHUNK", 16),
        mock.patch.object(decode_tiles, "OVERRIDE", [decode_tiles.Tiles(16, 4, 2, 2, 16, 16)]),
    ):
        whole = run(q[:20], [20], [250], 0, window=200)
        for t in (1, 9, 18):
            assert torch.equal(run(q[t : t + 1], [1], [231 + t], 0, window=200), whole[t : t + 1]), t
    return 5


def check_norms() -> int:
    for width in (1, 24, 700):
        w, b = torch.randn(width), torch.randn(width)
        x = torch.randn(5, 2, width)
        for bias in (None, b):
            got, exact = (norm(x, w, bias, 1e-5) for norm in (triton_batch_invariant.norm, norm_reference.norm))
            assert torch.allclose(got, exact, atol=1e-5)
            assert torch.equal(triton_batch_invariant.norm(x[3:4], w, bias, 1e-5), got[3:4])
    return 6


def check_gptq_columns() -> int:
    """Each format, blocks that are part of larger matrices and not multiples of the tile, the same values exactly."""
    count = 0
    for rows, columns in ((7, 36), (1, 16), (4, 5)):
        draw = torch.Generator().manual_seed(columns)
        w = torch.randn(rows, columns + 9, generator=draw)
        u = torch.randn(columns, columns, generator=draw).triu(1) * 0.1 + torch.eye(columns)
        scale = w[:, :columns].abs().amax(1, keepdim=True).expand(-1, columns) / 7
        cases = [Rounding("int4", scale, -8 * scale), Rounding("int8", scale / 20), Rounding("float8", scale / 60)]
        if columns % 4 == 0:
            cases.append(Rounding("sparse24"))
        for rounding in cases:
            exact, got = (
                run(w.clone()[:, :columns], u, rounding)
                for run in (gptq_columns.round_columns, triton_gptq.round_columns)
            )
            assert torch.equal(got[0], exact[0]), rounding.kind
            assert torch.allclose(got[1], exact[1], atol=1e-6), rounding.kind
            count += 1
    return count


if __name__ == "__main__":
    warnings.simplefilter("error")
    for check in (
        check_one_row,
        check_more_rows,
        check_registered_kernel,
        check_dequantise,
        check_experts,
        check_ternary,
        check_ternary_tables,
        check_fixed_products,
        check_fixed_attention,
        check_norms,
        check_gptq_columns,
    ):
        print(f"{check.__name__}: {check()} cases", flush=True)

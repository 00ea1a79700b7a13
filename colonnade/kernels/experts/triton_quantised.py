"""Experts' products with quantised weights: grouped as in :mod:`~colonnade.kernels.experts.triton_grouped_gemm`,
widened in registers as in
:mod:`colonnade.kernels.linear.triton_quantised`.

    up      h_r = act(a) ⊙ u,  u = W_up x_t(r) + b, a = W_gate x_t(r) + b; x gathered, h in its epilogue
    down    y_r = w_r (W_down h_r + b)

Both are (W xᵀ), a tile of weights on the left, since the matrix units take their left side from registers, where the
weights are widened. Stored weights are read once for each tile of an expert's rows, in their few bits; a decoding step
has one tile an expert. The order of tiles is :mod:`~colonnade.kernels.experts.triton_tile_schedule`'s; rows past the
last end are left alone.

Experts with quantised weights on a GPU (see :mod:`quantised`): two products of
:mod:`~colonnade.kernels.experts.triton_quantised`, and a sum.

Weights are widened within the products at any number of rows: nothing is written out, so that prompts take no more
memory than tokens do. Nothing waits for the device.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.experts.quantised import Stacks
from colonnade.kernels.experts.tiles import Tiles
from colonnade.kernels.experts.triton_activation import activate
from colonnade.kernels.experts.triton_tile_schedule import padded, place, programs, rows_of, spread
from colonnade.kernels.linear.quantise import NIBBLES, Quantised
from colonnade.kernels.linear.triton_quantised import nibble, scale_and_low
from colonnade.kernels.triton_permute import combine_rows, row_contiguous

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false
# Constants are plain numbers to a kernel, and its unrolled ranges are nobody else's.


@triton.jit
def _products(
    x_ptr, at, here, w_ptr, w_s_ptr, v_ptr, v_s_ptr, row, K, columns, groups,
    KIND: tl.constexpr, WORDS: tl.constexpr, TWO: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """(w xᵀ, v xᵀ), (BN, BM) each, for those rows of x that are ``here``, which start at ``at``, and the outputs
    ``row`` of all experts; ``columns`` are those of the stored weights: inputs, or words of eight.
    """
    k = tl.arange(0, BK)
    kind = x_ptr.dtype.element_ty
    x_rows = x_ptr + at[None, :]
    w_rows = w_ptr + (row * columns)[:, None]
    v_rows = w_rows
    if TWO:
        v_rows = v_ptr + (row * columns)[:, None]
    one = tl.zeros((BN, BM), tl.float32)
    two = tl.zeros((BN, BM), tl.float32)
    for k0 in range(0, columns, BK):
        c = k0 + k
        there = (c < columns)[None, :]
        w = tl.load(w_rows + c[None, :], there, 0.0)
        v = w
        if TWO:
            v = tl.load(v_rows + c[None, :], there, 0.0)
        if KIND == "int4":
            group = c // WORDS
            w_scale, w_low = scale_and_low(w_s_ptr, row[:, None], group[None, :], groups, there)
            v_scale, v_low = w_scale, w_low
            if TWO:
                v_scale, v_low = scale_and_low(v_s_ptr, row[:, None], group[None, :], groups, there)
            first = group * (8 * WORDS) + c % WORDS
            for i in tl.static_range(8):
                d = (first + i * WORDS)[:, None]
                x = tl.load(x_rows + d, here[None, :] & (c < columns)[:, None] & (d < K), 0.0)
                one = tl.dot((nibble(w, i) * w_scale + w_low).to(kind), x, one, input_precision="ieee")
                if TWO:
                    two = tl.dot((nibble(v, i) * v_scale + v_low).to(kind), x, two, input_precision="ieee")
        else:
            x = tl.load(x_rows + c[:, None], here[None, :] & (c < columns)[:, None], 0.0)
            one = tl.dot(w.to(kind), x, one, input_precision="ieee")
            if TWO:
                two = tl.dot(v.to(kind), x, two, input_precision="ieee")
    if KIND != "int4":
        one *= tl.load(w_s_ptr + row)[:, None]
        if TWO:
            two *= tl.load(v_s_ptr + row)[:, None]
    return one, two


@triton.jit
def up(
    x_ptr, order_ptr, ends_ptr, up_ptr, up_s_ptr, up_b_ptr, gate_ptr, gate_s_ptr, gate_b_ptr, h_ptr,
    R, D, F, E, stride, active, columns, groups,
    GATED: tl.constexpr, BIASED: tl.constexpr, ACT: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    """h (R, F) of the tokens of the choices in ``order``."""
    across = tl.cdiv(F, BN)
    first_e, tiles_e = spread(ends_ptr, R, E, across, BM, E_PAD, False)
    for tile in range(tl.program_id(0), tl.sum(tiles_e, 0) * across, tl.num_programs(0)):
        expert, m, n = place(tile, first_e, tiles_e, across, E_PAD, GROUP)
        start, end = rows_of(ends_ptr, expert, E, R)
        r = start + m * BM + tl.arange(0, BM)
        at = tl.load(order_ptr + r, r < end, 0).to(tl.int64) // active * stride
        f = n * BN + tl.arange(0, BN)
        row = expert.to(tl.int64) * F + tl.where(f < F, f, 0)
        u, a = _products(
            x_ptr, at, r < end, up_ptr, up_s_ptr, gate_ptr, gate_s_ptr, row, D, columns, groups,
            KIND, WORDS, GATED, BM, BN, BK,
        )  # fmt: skip
        if BIASED:
            u += tl.load(up_b_ptr + row).to(tl.float32)[:, None]
            if GATED:
                a += tl.load(gate_b_ptr + row).to(tl.float32)[:, None]
        h = activate(a, ACT)[0] * u if GATED else activate(u, ACT)[0]
        to = r.to(tl.int64)[None, :] * F + f[:, None]
        tl.store(h_ptr + to, h.to(h_ptr.dtype.element_ty), (f < F)[:, None] & (r < end)[None, :])


@triton.jit
def down(
    h_ptr, order_ptr, ends_ptr, down_ptr, down_s_ptr, down_b_ptr, routing_ptr, y_ptr, R, F, D, E, columns, groups,
    BIASED: tl.constexpr, KIND: tl.constexpr, WORDS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    """y (R, D), each row by its routing weight."""
    across = tl.cdiv(D, BN)
    first_e, tiles_e = spread(ends_ptr, R, E, across, BM, E_PAD, False)
    for tile in range(tl.program_id(0), tl.sum(tiles_e, 0) * across, tl.num_programs(0)):
        expert, m, n = place(tile, first_e, tiles_e, across, E_PAD, GROUP)
        start, end = rows_of(ends_ptr, expert, E, R)
        r = start + m * BM + tl.arange(0, BM)
        d = n * BN + tl.arange(0, BN)
        row = expert.to(tl.int64) * D + tl.where(d < D, d, 0)
        y, _ = _products(
            h_ptr, r.to(tl.int64) * F, r < end, down_ptr, down_s_ptr, down_ptr, down_s_ptr, row, F, columns, groups,
            KIND, WORDS, False, BM, BN, BK,
        )  # fmt: skip
        if BIASED:
            y += tl.load(down_b_ptr + row).to(tl.float32)[:, None]
        choice = tl.load(order_ptr + r, r < end, 0)
        y *= tl.load(routing_ptr + choice, r < end, 0.0).to(tl.float32)[None, :]
        to = r.to(tl.int64)[None, :] * D + d[:, None]
        tl.store(y_ptr + to, y.to(y_ptr.dtype.element_ty), (d < D)[:, None] & (r < end)[None, :])


# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.


CHOSEN: tuple[tuple[int | None, Tiles], ...] = (
    (16, Tiles(16, 64, 64, 4, 4)),
    (64, Tiles(64, 64, 64, 4, 3)),
    (None, Tiles(128, 128, 64, 8, 3)),
)
"""By the mean rows of an expert, at most; of int4 a step has 16 words. Reckoned, not measured: they fit the chip."""
WORDS = 16
"""The least that the matrix units sum over at once."""
EXACT = Tiles(16, 64, 32, 4, 2)
"""float32, which no tensor unit multiplies without rounding it first."""


def routed(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: Stacks, activation: str,
    how: Tiles | None = None,
) -> Tensor:  # fmt: skip
    """y_TD (see :func:`quantised.routed`); ``how`` cuts the products up, where that is not chosen here."""
    x_TD, weights_TA, ends_E = row_contiguous(x_TD), weights_TA.contiguous(), ends_E.contiguous()
    up, down, gate, up_b, gate_b, down_b = weights
    R, E, F, D = len(order_R), len(ends_E), up.outputs, down.outputs
    h, y = x_TD.new_empty(R, F), x_TD.new_empty(R, D)
    if y.numel():
        how = how or pick(R, E, x_TD.dtype)
        cut = _Cut(up, how, R, ends_E)
        up[cut.grid](
            x_TD, order_R, ends_E, up.values, cut.scales(up), up_b,
            None if gate is None else gate.values, None if gate is None else cut.scales(gate), gate_b,
            h, R, D, F, E, x_TD.stride(0), weights_TA.shape[1], *cut.stored,
            gate is not None, up_b is not None, activation, **cut.how,
        )  # fmt: skip
        cut = _Cut(down, how, R, ends_E)
        down[cut.grid](
            h, order_R, ends_E, down.values, cut.scales(down), down_b, weights_TA, y, R, F, D, E, *cut.stored,
            down_b is not None, **cut.how,
        )  # fmt: skip
    return combine_rows(y, order_R, *weights_TA.shape, ends_E=ends_E)


def pick(rows: int, experts: int, dtype: torch.dtype) -> Tiles:
    """The sizes for ``rows`` rows over ``experts`` experts."""
    if dtype.itemsize > 2:
        return EXACT
    return next(tiles for most, tiles in CHOSEN if most is None or rows <= most * max(1, experts))


class _Cut:
    """How a product with ``weight`` is cut up, and what its launch takes."""

    def __init__(self, weight: Quantised, how: Tiles, rows: int, ends_E: Tensor):
        self.four = weight.kind == "int4"
        self.grid = (programs(rows, ends_E, weight.outputs, how),)
        self.stored = (weight.values.shape[2], weight.scales.shape[2] if self.four else 0)
        """Columns and groups of a row, as it is stored."""
        self.how = {
            **how.launch, "BK": WORDS if self.four else how.BK, "GROUP": how.GROUP,
            "E_PAD": padded(ends_E), "KIND": weight.kind, "WORDS": weight.group // NIBBLES if self.four else 1,
        }  # fmt: skip

    def scales(self, weight: Quantised) -> Tensor:
        return weight.scales.view(torch.int32) if self.four else weight.scales

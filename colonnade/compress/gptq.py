"""GPTQ (Frantar 2022, arXiv 2210.17323): rounds a matrix column by column and compensates the error in later columns.

    minimise tr(Δ H Δᵀ), Δ = Ŵ − W, H = (2/N) Σ x xᵀ + λ I          λ = 0.01 · mean(diag H)
    U = chol(H⁻¹)ᵀ;  for each column j by descending H_jj:   δ = (w_j − ŵ_j) / U_jj,   W_{:,j:} −= δ U_{j,j:}

Grids are chosen before any column is rounded, so that a group is a run of consecutive inputs although the columns are
visited in another order (no ``g_idx``). H is factored in float64 on a CPU. If H is a multiple of I, nothing is
corrected, and the result is rounding to nearest on the same grid. Of GPTQ and two kinds of rounding to nearest, the one
with the least error is kept, so the error is never above that of rounding to nearest. The nonzero positions of ternary
words are chosen first, and again word by word in column order, after the corrections of earlier words.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.compress.grids import Grid, GridKind, choose_grid
from colonnade.errors import DataError
from colonnade.kernels.linear import ternary
from colonnade.kernels.linear.gptq_columns import Rounding, compensate, round_values
from colonnade.kernels.linear.quantise import Kind, Quantised, pack_ternary
from colonnade.kernels.registry import choose

DAMPING = 0.01
"""λ, as a share of the mean of H's diagonal."""
BLOCK = 128
"""Columns between two updates of all later ones."""


def nearest(
    w_FD: Tensor, kind: Kind, group: int, grid: GridKind = "affine", importance_D: Tensor | None = None
) -> Quantised:
    """``w_FD`` rounded to nearest; with ``importance_D``, groups clip their range where that lowers the error."""
    return _round_all(w_FD.float(), _grid(w_FD.float(), kind, group, grid, importance_D))


def gptq(w_FD: Tensor, hessian_DD: Tensor, kind: Kind, group: int, grid: GridKind = "affine") -> Quantised:
    """``w_FD`` quantised with the least of the errors tr(Δ H Δᵀ) of GPTQ and of rounding to nearest.

    Raises :class:`DataError` for an H that is not finite.
    """
    h_DD, w_FD = damped(hessian_DD), w_FD.float()
    importance_D = h_DD.diagonal()
    clipped = _grid(w_FD, kind, group, grid, importance_D)
    whole = _grid(w_FD, kind, group, grid)
    found: list[tuple[Tensor, Grid | TernaryGrid]] = [
        (_gptq(w_FD, h_DD, clipped), clipped),
        (_nearest(w_FD, clipped), clipped),
        (_nearest(w_FD, whole), whole),
    ]
    if isinstance(clipped, TernaryGrid):
        found.append(clipped.corrected(w_FD, h_DD))
    groups_D = clipped.groups(torch.arange(w_FD.shape[1], device=w_FD.device))
    errors = [error(by.value(q, groups_D) - w_FD, h_DD) for q, by in found]
    q_FD, by = found[min(range(len(found)), key=errors.__getitem__)]
    return by.pack(q_FD)


@dataclass(frozen=True)
class TernaryGrid:
    """The positions where a matrix may be ±s instead of 0; every column is its own group."""

    trits: int
    allowed_FD: Tensor
    scale_F1: Tensor

    @staticmethod
    def of(w_FD: Tensor, trits: int, importance_D: Tensor | None = None) -> "TernaryGrid":
        """The positions and scales with the least error."""
        return TernaryGrid(trits, *ternary.choose_mask(w_FD, trits, importance_D))

    def round(self, w_FC: Tensor, columns_C: Tensor) -> Tensor:
        """Trits of columns, as float32."""
        return round_values(w_FC, self.rounding(columns_C))

    def rounding(self, columns_C: Tensor) -> Rounding:
        """The possible values of the weights of columns."""
        allowed_FC = self.allowed_FD[:, columns_C]
        return Rounding("ternary", self.scale_F1.expand(-1, len(columns_C)), None, allowed_FC)

    def value(self, q_FC: Tensor, _columns_C: Tensor) -> Tensor:
        """The weights that ``q_FC`` represents."""
        return q_FC * self.scale_F1

    def corrected(self, w_FD: Tensor, h_DD: Tensor) -> "tuple[Tensor, TernaryGrid]":
        """(trits, their grid): the positions of a word are chosen from its weights after the corrections of earlier
        words.
        """
        scale_F1, trits = self.scale_F1.clamp(min=1e-30), self.trits

        def run(w: Tensor, u: Tensor, _columns: slice) -> tuple[Tensor, Tensor]:
            chosen = torch.empty(0)

            def round_column(j: int, w_F1: Tensor) -> tuple[Tensor, Tensor]:
                nonlocal chosen
                if j % trits == 0:
                    word = w[:, j : j + trits] / u.diagonal()[j : j + trits]
                    best = word.abs().topk(min(ternary.NONZERO[trits], word.shape[1]), 1)
                    chosen = torch.zeros_like(word, dtype=torch.bool).scatter_(1, best.indices, True)
                value = (w_F1 / scale_F1).round().clamp(-1, 1) * scale_F1 * chosen[:, j % trits, None]
                return value, value

            return compensate(w, u, round_column)

        rounded = correct_blocks(w_FD, inverse_factor(h_DD), run, max(1, BLOCK // trits) * trits)
        return rounded.sign(), TernaryGrid(self.trits, rounded != 0, self.scale_F1)

    def pack(self, q_FD: Tensor) -> Quantised:
        """The matrix in words."""
        return pack_ternary(q_FD, self.allowed_FD, self.scale_F1, self.trits)

    def groups(self, columns_C: Tensor) -> Tensor:
        """The columns themselves."""
        return columns_C


def _grid(w_FD: Tensor, kind: Kind, group: int, grid: GridKind, importance_D: Tensor | None = None):
    if kind == "ternary":
        return TernaryGrid.of(w_FD, group, importance_D)
    return choose_grid(w_FD, kind, group, grid, importance_D)


def error(delta_FD: Tensor, hessian_DD: Tensor) -> float:
    """tr(Δ H Δᵀ)."""
    delta = delta_FD.to(hessian_DD.dtype)
    return float((delta @ hessian_DD * delta).sum())


def damped(hessian_DD: Tensor) -> Tensor:
    """H + λ I, in float64 on a CPU; I if there were no inputs."""
    h_DD = hessian_DD.to(torch.float32 if hessian_DD.is_cuda else torch.float64)
    mean = h_DD.diagonal().mean()
    if not h_DD.isfinite().all():
        raise DataError(
            f"the calibration text produces non-finite inputs for a matrix of {len(h_DD)} inputs; "
            "use another text, or --by nearest, which needs none"
        )
    return h_DD + torch.eye(len(h_DD), dtype=h_DD.dtype, device=h_DD.device) * (DAMPING * mean if mean > 0 else 1.0)


def _nearest(w_FD: Tensor, grid: Grid | TernaryGrid) -> Tensor:
    return grid.round(w_FD, grid.groups(torch.arange(w_FD.shape[1], device=w_FD.device)))


def _round_all(w_FD: Tensor, grid: Grid | TernaryGrid) -> Quantised:
    return grid.pack(_nearest(w_FD, grid))


def inverse_factor(h_DD: Tensor) -> Tensor:
    """U_DD, float32: the upper Cholesky factor of H⁻¹."""
    lower = torch.linalg.cholesky(h_DD)
    return torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True).float().contiguous()


def correct_blocks(
    w_FD: Tensor,
    u_DD: Tensor,
    run: Callable[[Tensor, Tensor, slice], tuple[Tensor, Tensor]],
    block: int = BLOCK,
) -> Tensor:
    """q (F, D): ``run`` rounds a block of columns, given their weights and U, and returns (q, δ)."""
    w, q = w_FD.clone(), torch.empty_like(w_FD)
    for start in range(0, w.shape[1], block):
        columns, later = slice(start, start + block), slice(start + block, None)
        q[:, columns], delta = run(w[:, columns], u_DD[columns, columns], columns)
        w[:, later] -= delta @ u_DD[columns, later]
    return q


def _gptq(w_FD: Tensor, h_DD: Tensor, grid: Grid | TernaryGrid) -> Tensor:
    """q_FD."""
    order_D = h_DD.diagonal().argsort(descending=True, stable=True)
    groups_D = grid.groups(order_D)
    round_columns = choose("gptq_columns", w_FD.device.type, torch.float32)
    result = torch.empty_like(w_FD)
    result[:, order_D] = correct_blocks(
        w_FD[:, order_D],
        inverse_factor(h_DD[order_D][:, order_D]),
        lambda w, u, columns: round_columns(w, u, grid.rounding(groups_D[columns])),
    )
    return result

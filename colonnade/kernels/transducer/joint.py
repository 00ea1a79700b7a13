"""A transducer's joint network over all cells of a lattice, without storing logits, in plain torch.

    z(t, u) = W relu(e_t + p_u) + b

The cells pass the joint network in chunks. Of each cell only four numbers are kept: the largest logit, the sum of the
exponentials below it, and the logits of the blank and of the next label. The backward pass computes a chunk's logits
again, of the cells that are not dead, and multiplies

    ∂loss/∂z = (γ_∅ + γ_y)·softmax(z) − γ_∅·onehot(∅) − γ_y·onehot(y)        γ: the arcs' posteriors

W and b may be some rows of a larger vocabulary (``start``: the first one); labels outside have logit 0.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.kernels.transducer.cells import Cells

CHUNK_BYTES = 1 << 25
"""Memory for one chunk of logits [bytes]."""

CHUNK_ROWS = 4096
"""Maximum number of cells in one chunk."""

NEGLIGIBLE = 2.0**-32
"""Cells that alignments pass with a smaller probability are skipped in a float32 backward pass, because their logits
enter the gradients times this probability. All cells of a frame add up to at least 1, so what is skipped is below
float32's rounding. With random weights a quarter to a half of all cells are dead, in a trained recogniser nearly all.
"""


class Posteriors(NamedTuple):
    """The parts of the lattice that the backward pass needs, each (B, U, T) but the last; 0 outside of the
    utterances.
    """

    lse_BUT: Tensor
    blank_BUT: Tensor
    label_BUT: Tensor
    grad_B: Tensor
    """Gradients of the utterances' losses."""


class Gradients(NamedTuple):
    """Gradients of the joint network's inputs and parameters."""

    e_TD: Tensor
    p_UD: Tensor
    weight_vD: Tensor
    bias_v: Tensor


class Block(NamedTuple):
    """Frames of an utterance and all its prefixes: as many cells as their product."""

    frame: int
    frames: int
    prefix: int
    prefixes: int

    @property
    def cells(self) -> int:
        """Cells of the block."""
        return self.frames * self.prefixes


def scores(
    e_TD: Tensor, p_UD: Tensor, weight_vD: Tensor, bias_v: Tensor, cells: Cells, *, blank: int, start: int
) -> Tensor:
    """(4, B, U, T): largest logit, sum of exponentials below it, logits of blank and next label; 0 outside."""
    exact = _exact(e_TD)
    out_4BUT = torch.zeros(4, *cells.shape, dtype=exact, device=e_TD.device)
    for blocks, place_c in _chunks(cells, weight_vD):
        z_cv = torch.addmm(bias_v, _hidden(e_TD, p_UD, blocks), weight_vD.T).to(exact)
        top_c = z_cv.amax(1) if z_cv.shape[1] else z_cv.new_full((len(z_cv),), -torch.inf)
        label_c = cells.next_BU.flatten()[place_c // cells.shape[2]]
        picked = (_pick(z_cv, blank - start), _pick(z_cv, label_c - start))
        sum_c = z_cv.sub_(top_c[:, None]).exp_().sum(1)
        out_4BUT.view(4, -1)[:, place_c] = torch.stack((top_c, sum_c, *picked))
    return out_4BUT


def gradients(
    e_TD: Tensor,
    p_UD: Tensor,
    weight_vD: Tensor,
    bias_v: Tensor,
    cells: Cells,
    posteriors: Posteriors,
    *,
    blank: int,
    start: int,
) -> Gradients:
    """Gradients of the sum of the losses, each weighted by its entry of ``posteriors.grad_B``."""
    exact, (_, U, T) = _exact(e_TD), cells.shape
    de_TD, dp_UD, dw_vD, db_v = (torch.zeros_like(x, dtype=exact) for x in (e_TD, p_UD, weight_vD, bias_v))
    least = 0.0 if exact == torch.float64 else NEGLIGIBLE
    place_M = (~(posteriors.blank_BUT + posteriors.label_BUT <= least)).flatten().nonzero().squeeze(1)  # NaN stays
    for place_c in place_M.split(_chunk_rows(weight_vD)):
        row_c, b_c = place_c // T, place_c // (U * T)
        frame_c = cells.frame_start_B[b_c] + place_c % T
        prefix_c = cells.prefix_start_B[b_c] + row_c % U
        h_cD = e_TD.index_select(0, frame_c).add_(p_UD.index_select(0, prefix_c)).relu_()
        z_cv = torch.addmm(bias_v, h_cD, weight_vD.T).to(exact)
        grad_c = posteriors.grad_B[b_c]
        lse_c, blank_c, label_c = (x.flatten()[place_c] for x in posteriors[:3])
        blank_c, label_c = blank_c * grad_c, label_c * grad_c
        dz_cv = z_cv.sub_(lse_c[:, None]).exp_().mul_((blank_c + label_c)[:, None])
        _subtract(dz_cv, blank - start, blank_c)
        _subtract(dz_cv, cells.next_BU.flatten()[row_c] - start, label_c)
        dw_vD.addmm_(dz_cv.T, h_cD.to(exact))
        db_v += dz_cv.sum(0)
        dh_cD = torch.ops.aten.threshold_backward(dz_cv @ weight_vD.to(exact), h_cD.to(exact), 0)
        de_TD.index_add_(0, frame_c, dh_cD)
        dp_UD.index_add_(0, prefix_c, dh_cD)
    return Gradients(de_TD, dp_UD, dw_vD, db_v)


def _exact(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _chunk_rows(weight_vD: Tensor) -> int:
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // max(1, len(weight_vD) * weight_vD.dtype.itemsize)))


def _chunks(cells: Cells, weight_vD: Tensor) -> Iterator[tuple[list[Block], Tensor]]:
    """Blocks of together at most CHUNK_ROWS cells (a larger one alone), and the places of their cells."""
    (_, U, T), device = cells.shape, weight_vD.device
    rows = _chunk_rows(weight_vD)
    u_U, t_T = torch.arange(U, device=device), torch.arange(T, device=device)
    count, own, places = 0, list[Block](), list[Tensor]()
    frame_start = prefix_start = 0
    for b, (frames, labels) in enumerate(zip(cells.frames, cells.labels, strict=True)):
        run = max(1, rows // (labels + 1))
        for first in range(0, frames, run):
            block = Block(frame_start + first, min(run, frames - first), prefix_start, labels + 1)
            if own and count + block.cells > rows:
                yield own, torch.cat(places)
                count, own, places = 0, [], []
            own.append(block)
            places.append(((b * U + u_U[: labels + 1]) * T + t_T[first : first + block.frames, None]).flatten())
            count += block.cells
        frame_start, prefix_start = frame_start + frames, prefix_start + labels + 1
    if own:
        yield own, torch.cat(places)


def _hidden(e_TD: Tensor, p_UD: Tensor, blocks: Sequence[Block]) -> Tensor:
    """relu(e_t + p_u) of the cells of these blocks."""
    h_cD = e_TD.new_empty(sum(x.cells for x in blocks), e_TD.shape[1])
    for x, own in zip(blocks, h_cD.split([x.cells for x in blocks]), strict=True):
        e, p = e_TD[x.frame : x.frame + x.frames, None], p_UD[x.prefix : x.prefix + x.prefixes]
        torch.add(e, p, out=own.view(x.frames, x.prefixes, -1))
    return h_cD.relu_()


def _locate(z_cv: Tensor, label: int | Tensor) -> tuple[Tensor, Tensor]:
    """(whether the label's row of W is here, its index or 0), each (c, 1)."""
    label_c1 = torch.as_tensor(label, device=z_cv.device).expand(len(z_cv))[:, None]
    own_c1 = (label_c1 >= 0) & (label_c1 < z_cv.shape[1])
    return own_c1, torch.where(own_c1, label_c1, 0)


def _pick(z_cv: Tensor, label: int | Tensor) -> Tensor:
    """The label's logit, 0 where its row is not here."""
    if not z_cv.shape[1]:
        return z_cv.new_zeros(len(z_cv))
    own_c1, index_c1 = _locate(z_cv, label)
    return torch.where(own_c1, z_cv.gather(1, index_c1), 0.0).squeeze(1)


def _subtract(dz_cv: Tensor, label: int | Tensor, value_c: Tensor) -> None:
    """Subtract each row's value at its label, where its row is here."""
    if dz_cv.shape[1]:
        own_c1, index_c1 = _locate(dz_cv, label)
        dz_cv.scatter_add_(1, index_c1, torch.where(own_c1, -value_c[:, None], 0.0))

"""Transducer lattices in Triton: both recursions in one launch, and the arcs' posteriors in another.

For a fixed number of labels u the forward recursion over frames is linear in log space,

    α(t, u) = logaddexp(α(t−1, u) + ∅(t−1, u), b(t))        b(t) = α(t, u−1) + y(t, u−1)

so it is an associative scan along t, and a program does U + 1 scans instead of T + U anti-diagonals. β of a lattice is
α of the lattice rotated by 180 degrees, with the arcs of the cell itself; a second program per utterance computes it.

Sums run in float64 as in :mod:`~colonnade.kernels.transducer.lattice`; only log(1 + exp(−|gap|)), which is at most
log 2, is computed in float32.
"""

import torch
import triton
from torch import Tensor
from triton import language as tl

from colonnade.kernels.transducer import lattice as reference
from colonnade.kernels.transducer.lattice import Lattice

MAX_FRAMES = 8192
"""Maximum length of an utterance that a program scans; the reference handles longer ones."""
CELLS = 1024
"""Cells of a program that computes posteriors."""


@triton.jit
def _logaddexp(x, y):
    """log(exp(x) + exp(y)) of float64."""
    large, small = tl.maximum(x, y), tl.minimum(x, y)
    more = tl.log(1.0 + tl.exp((small - large).to(tl.float32)))
    return tl.where(small == float("-inf"), large, large + more.to(tl.float64))


@triton.jit
def _compose(a1, b1, a2, b2):
    """x -> logaddexp(a1 + x, b1), then the same with a2 and b2."""
    return a1 + a2, _logaddexp(b1 + a2, b2)


@triton.jit
def _recursions(blank_ptr, label_ptr, frames_ptr, labels_ptr, alpha_ptr, beta_ptr, U, T, BLOCK: tl.constexpr):
    """α of one utterance, or its β."""
    b, turned = tl.program_id(0), tl.program_id(1) == 1
    frames = tl.load(frames_ptr + b).to(tl.int32)
    labels = tl.load(labels_ptr + b).to(tl.int32)
    i = tl.arange(0, BLOCK)
    inside = i < frames
    t = tl.where(turned, frames - 1 - i, i)
    out_ptr = tl.where(turned, beta_ptr, alpha_ptr)
    first = b.to(tl.int64) * U * T
    final = tl.load(blank_ptr + first + labels * T + frames - 1).to(tl.float64)
    begin = tl.where(turned, final, 0.0)
    column = tl.full((BLOCK,), float("-inf"), tl.float64)
    for j in range(labels + 1):
        u = tl.where(turned, labels - j, j)
        # The arcs that enter a cell: in the rotated lattice those that leave it.
        blank_at = first + u * T + tl.where(turned, t, t - 1)
        label_at = first + tl.where(turned, u, u - 1) * T + t
        blank = tl.load(blank_ptr + blank_at, inside & (i > 0), float("-inf")).to(tl.float64)
        label = tl.load(label_ptr + label_at, inside & (j > 0), float("-inf")).to(tl.float64)
        entered = tl.where((i == 0) & (j == 0), begin, column + label)
        _, column = tl.associative_scan((blank, entered), 0, _compose)
        tl.store(out_ptr + first + u * T + t, column, inside)


@triton.jit
def _posteriors(
    blank_ptr, label_ptr, frames_ptr, labels_ptr, alpha_ptr, beta_ptr, blank_post_ptr, label_post_ptr, U, T, cells,
    CELLS: tl.constexpr,
):  # fmt: skip
    """exp(α + arc + β − log p) of all arcs, 0 outside of the utterances."""
    place = tl.program_id(0) * CELLS + tl.arange(0, CELLS)
    here = place < cells
    b, u, t = place // (U * T), place // T % U, place % T
    frames, labels = tl.load(frames_ptr + b, here, 0), tl.load(labels_ptr + b, here, -1)
    inside = here & (t < frames) & (u <= labels)
    alpha = tl.load(alpha_ptr + place, inside, float("-inf")) - tl.load(beta_ptr + b * U * T, here, 0.0)
    blank = tl.load(blank_ptr + place, inside, float("-inf")).to(tl.float64)
    label = tl.load(label_ptr + place, inside & (u < labels), float("-inf")).to(tl.float64)
    # The last cell's blank leaves the lattice.
    end = tl.where((t + 1 == frames) & (u == labels), 0.0, float("-inf"))
    after_blank = tl.load(beta_ptr + place + 1, inside & (t + 1 < frames), float("-inf"))
    after_blank = tl.where(t + 1 == frames, end, after_blank)
    after_label = tl.load(beta_ptr + place + T, inside & (u < labels), float("-inf"))
    tl.store(blank_post_ptr + place, tl.exp((alpha + blank + after_blank).to(tl.float32)), here)
    tl.store(label_post_ptr + place, tl.exp((alpha + label + after_label).to(tl.float32)), here)


def transducer_lattice(blank_BTU: Tensor, label_BTU: Tensor, frames_B: Tensor, labels_B: Tensor) -> Lattice:
    """Losses in float64 and posteriors in float32 (see :func:`lattice.transducer_lattice`).

    Fastest for arguments whose frames are adjacent in memory, (B, U, T) transposed.
    """
    B, T, U = blank_BTU.shape
    if T > MAX_FRAMES:
        return reference.transducer_lattice(blank_BTU, label_BTU, frames_B, labels_B)
    blank_BUT, label_BUT = (x.transpose(1, 2).contiguous() for x in (blank_BTU, label_BTU))
    scores = torch.empty(2, B, U, T, dtype=torch.float64, device=blank_BUT.device)
    posts = torch.empty(2, B, U, T, dtype=torch.float32, device=blank_BUT.device)
    block = max(16, triton.next_power_of_2(T))
    arcs = (blank_BUT, label_BUT, frames_B, labels_B, scores[0], scores[1])
    _recursions[B, 2](*arcs, U, T, block, num_warps=max(1, min(8, block // 128)))
    _posteriors[(triton.cdiv(B * U * T, CELLS),)](*arcs, posts[0], posts[1], U, T, B * U * T, CELLS)
    return Lattice(-scores[1, :, 0, 0], posts[0].transpose(1, 2), posts[1].transpose(1, 2))

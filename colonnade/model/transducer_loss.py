"""The transducer's joint network and its loss, exact, vocabulary-parallel, without storing logits.

    z(t, u) = W relu(e_t + p_u) + b        log-probabilities = z − lse(z)        loss: :mod:`kernels.transducer`

e_t is the encoder's projection of frame t, p_u the predictor's after u labels (Graves, arXiv 1211.3711). The (t, u)
cells of all utterances lie in one flat list without padding and pass the joint network in chunks. Of each cell only
the log-probabilities of blank and next label and the normaliser are kept; the backward pass computes a chunk's logits
again and multiplies ∂loss/∂z = (γ_∅ + γ_y)·softmax(z) − γ_∅·onehot(∅) − γ_y·onehot(y), γ the arcs' posteriors.
A materialised loss keeps T·U·V logits and their gradients; this one T·U cells and a chunk.

Each tp rank has its rows of W and b: per cell the ranks reduce one maximum and three sums, as cross-entropy does
(:mod:`colonnade.model.loss`).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from colonnade.errors import DataError
from colonnade.kernels.transducer.lattice import transducer_lattice
from colonnade.parallel.axis import SOLO, Axis
from colonnade.parallel.layout import Placement

CHUNK_BYTES = 1 << 25
"""Memory for one chunk of logits [bytes]."""

CHUNK_ROWS = 4096
"""Most cells of one chunk."""


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


class Cells(NamedTuple):
    """The (frame, labels so far) cells of all utterances, in one flat list."""

    blocks: list["Block"]
    """Runs of frames of one utterance with all its prefixes; their cells in order are all cells."""
    label_M: Tensor
    """The next label, −1 after the last one."""
    place_M: Tensor
    """Index into the padded (B, T, U + 1) lattice."""
    frames_B: Tensor
    labels_B: Tensor

    @staticmethod
    def of(
        frames: Sequence[int], labels: Sequence[Sequence[int]], vocab_size: int, rows: int, device: torch.device
    ) -> "Cells":
        """The cells of utterances, in blocks of about ``rows`` at most; refuses what has no alignment."""
        if len(frames) != len(labels):
            raise DataError(f"{len(frames)} lengths but {len(labels)} label sequences; give one per utterance")
        T, U = max(frames, default=0), max(map(len, labels), default=0) + 1
        blocks: list[Block] = []
        label_parts: list[Tensor] = []
        place_parts: list[Tensor] = []
        frame_start = prefix_start = 0
        for b, (n, own) in enumerate(zip(frames, labels, strict=True)):
            if n < 1:
                raise DataError(f"utterance {b} has {n} frames; a transducer needs at least 1")
            if any(not 0 <= label < vocab_size for label in own):
                raise DataError(f"utterance {b} has a label outside of 0..{vocab_size - 1}")
            prefixes = len(own) + 1
            run = max(1, rows // prefixes)
            blocks += [
                Block(frame_start + first, min(run, n - first), prefix_start, prefixes) for first in range(0, n, run)
            ]
            label_parts.append(torch.tensor([*own, -1]).repeat(n))
            place_parts.append(((b * T + torch.arange(n)[:, None]) * U + torch.arange(prefixes)).flatten())
            frame_start, prefix_start = frame_start + n, prefix_start + prefixes
        none = torch.empty(0, dtype=torch.long)
        label_M, place_M = (torch.cat((none, *x)).to(device) for x in (label_parts, place_parts))
        lengths = torch.tensor(list(frames), device=device), torch.tensor([len(x) for x in labels], device=device)
        return Cells(blocks, label_M, place_M, *(x.long() for x in lengths))

    def chunks(self, rows: int) -> Iterator[tuple[slice, list[Block]]]:
        """Blocks of together at most ``rows`` cells (a larger one alone), and the range of their cells."""
        start = stop = 0
        own: list[Block] = []
        for block in self.blocks:
            if own and stop - start + block.cells > rows:
                yield slice(start, stop), own
                start, own = stop, []
            own.append(block)
            stop += block.cells
        if own:
            yield slice(start, stop), own


class Joint(nn.Module):
    """W and b over the vocabulary, this rank's rows; frames and prefixes arrive projected to the joint's width."""

    def __init__(
        self,
        width: int,
        vocab_size: int,
        blank: int = 0,
        tp: Axis = SOLO,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__()
        start, stop = tp.part(vocab_size)
        self.tp, self.vocab_size, self.blank = tp, vocab_size, blank
        self.weight = nn.Parameter(torch.empty(stop - start, width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(stop - start, device=device, dtype=dtype))
        self.layout: dict[str, Placement] = {"weight": 0, "bias": 0}

    def loss(self, e_TD: Tensor, p_UD: Tensor, frames: Sequence[int], labels: Sequence[Sequence[int]]) -> Tensor:
        """−log p of each utterance, (B,); all frames, and all prefixes (labels + 1 each), one utterance after another.

        Raises DataError for an utterance without frames or with unknown labels.
        """
        if (len(e_TD), len(p_UD)) != (sum(frames), sum(len(x) + 1 for x in labels)):
            raise DataError(
                f"{len(e_TD)} frames and {len(p_UD)} prefixes, but the lengths add up to {sum(frames)} and "
                f"{sum(len(x) + 1 for x in labels)}"
            )
        rows = _chunk_rows(self.tp, self.vocab_size, e_TD.dtype)
        cells = Cells.of(frames, labels, self.vocab_size, rows, e_TD.device)
        e_TD, p_UD = self.tp.fan_out(e_TD), self.tp.fan_out(p_UD)
        return _TransducerLoss.apply(e_TD, p_UD, self.weight, self.bias, cells, self.blank, self.tp, self.vocab_size)

    def logprobs(self, e_RD: Tensor, p_RD: Tensor) -> Tensor:
        """Log-probabilities of all labels, (R, V), on every rank: for search."""
        z_Rv = torch.relu(e_RD + p_RD) @ self.weight.T + self.bias
        return self.tp.join(z_Rv, 1, self.vocab_size).log_softmax(1)


class _TransducerLoss(Function):
    @staticmethod
    def forward(ctx, e_TD, p_UD, weight_vD, bias_v, cells: Cells, blank: int, tp: Axis, vocab_size: int) -> Tensor:
        start, _ = tp.part(vocab_size)
        exact = torch.float64 if e_TD.dtype == torch.float64 else torch.float32
        M, B = len(cells.label_M), len(cells.frames_B)
        if not M:
            ctx.save_for_backward(e_TD, p_UD, weight_vD, bias_v)
            ctx.cells = None
            return e_TD.new_zeros(0, dtype=exact)
        rows = _chunk_rows(tp, vocab_size, e_TD.dtype)
        lse_M = torch.empty(M, dtype=exact, device=e_TD.device)
        arcs_2M = torch.empty(2, M, dtype=exact, device=e_TD.device)
        for part, blocks in cells.chunks(rows):
            z_cv = torch.addmm(bias_v, _hidden(e_TD, p_UD, blocks), weight_vD.T).to(exact)
            own_c = z_cv.amax(1) if z_cv.shape[1] else z_cv.new_full((len(z_cv),), -torch.inf)
            top_c = tp.max_(own_c)
            sums = (
                (z_cv - top_c[:, None]).exp().sum(1),
                _pick(z_cv, blank - start),
                _pick(z_cv, cells.label_M[part] - start),
            )
            sum_c, blank_c, label_c = tp.sum_(torch.stack(sums))
            lse_M[part] = sum_c.log() + top_c
            arcs_2M[:, part] = torch.stack((blank_c, label_c)) - lse_M[part]
        T, U = int(cells.frames_B.max()), int(cells.labels_B.max()) + 1
        grids = arcs_2M.new_zeros(2, B * T * U)
        grids[:, cells.place_M] = arcs_2M
        blank_BTU, label_BTU = grids.view(2, B, T, U)
        lattice = transducer_lattice(blank_BTU, label_BTU, cells.frames_B, cells.labels_B)
        posts_2M = torch.stack([x.flatten()[cells.place_M].to(exact) for x in lattice[1:]])
        ctx.save_for_backward(e_TD, p_UD, weight_vD, bias_v, lse_M, posts_2M)
        ctx.cells, ctx.blank, ctx.start, ctx.rows = cells, blank, start, rows
        return lattice.loss_B.to(exact)

    @staticmethod
    def backward(ctx, grad_B: Tensor):
        e_TD, p_UD, weight_vD, bias_v, *saved = ctx.saved_tensors
        cells: Cells | None = ctx.cells
        if cells is None:
            return *(torch.zeros_like(x) for x in (e_TD, p_UD, weight_vD, bias_v)), None, None, None, None
        lse_M, posts_2M = saved
        exact = lse_M.dtype
        de_TD, dp_UD, dw_vD, db_v = (torch.zeros_like(x, dtype=exact) for x in (e_TD, p_UD, weight_vD, bias_v))
        T, U = int(cells.frames_B.max()), int(cells.labels_B.max()) + 1
        posts_2M = posts_2M * grad_B.to(exact)[cells.place_M // (T * U)]
        for part, blocks in cells.chunks(ctx.rows):
            h_cD = _hidden(e_TD, p_UD, blocks)
            z_cv = torch.addmm(bias_v, h_cD, weight_vD.T).to(exact)
            blank_c, label_c = posts_2M[:, part]
            dz_cv = (z_cv - lse_M[part, None]).exp_() * (blank_c + label_c)[:, None]
            _subtract(dz_cv, ctx.blank - ctx.start, blank_c)
            _subtract(dz_cv, cells.label_M[part] - ctx.start, label_c)
            dw_vD += dz_cv.T @ h_cD.to(exact)
            db_v += dz_cv.sum(0)
            dh_cD = torch.ops.aten.threshold_backward(dz_cv @ weight_vD.to(exact), h_cD.to(exact), 0)
            for block, dh in zip(blocks, dh_cD.split([x.cells for x in blocks]), strict=True):
                dh_block = dh.view(block.frames, block.prefixes, -1)
                de_TD[block.frame : block.frame + block.frames] += dh_block.sum(1)
                dp_UD[block.prefix : block.prefix + block.prefixes] += dh_block.sum(0)
        grads = zip((de_TD, dp_UD, dw_vD, db_v), (e_TD, p_UD, weight_vD, bias_v), strict=True)
        return *(grad.to(x.dtype) for grad, x in grads), None, None, None, None


def _chunk_rows(tp: Axis, vocab_size: int, dtype: torch.dtype) -> int:
    """The same on all ranks, whose shares may differ: each chunk has collectives."""
    largest = -(-vocab_size // tp.size)
    return max(1, min(CHUNK_ROWS, CHUNK_BYTES // (largest * dtype.itemsize)))


def _hidden(e_TD: Tensor, p_UD: Tensor, blocks: Sequence[Block]) -> Tensor:
    """relu(e_t + p_u) of the cells of these blocks."""
    h_cD = e_TD.new_empty(sum(x.cells for x in blocks), e_TD.shape[1])
    for x, own in zip(blocks, h_cD.split([x.cells for x in blocks]), strict=True):
        e, p = e_TD[x.frame : x.frame + x.frames, None], p_UD[x.prefix : x.prefix + x.prefixes]
        torch.add(e, p, out=own.view(x.frames, x.prefixes, -1))
    return h_cD.relu_()


def _locate(z_cv: Tensor, label: int | Tensor) -> tuple[Tensor, Tensor]:
    """(whether the label's row of W is on this rank, its index or 0), each (c, 1)."""
    label_c1 = torch.as_tensor(label, device=z_cv.device).expand(len(z_cv))[:, None]
    own_c1 = (label_c1 >= 0) & (label_c1 < z_cv.shape[1])
    return own_c1, torch.where(own_c1, label_c1, 0)


def _pick(z_cv: Tensor, label: int | Tensor) -> Tensor:
    """The label's logit, 0 where another rank has it."""
    if not z_cv.shape[1]:
        return z_cv.new_zeros(len(z_cv))
    own_c1, index_c1 = _locate(z_cv, label)
    return torch.where(own_c1, z_cv.gather(1, index_c1), 0.0).squeeze(1)


def _subtract(dz_cv: Tensor, label: int | Tensor, value_c: Tensor) -> None:
    """Subtract each row's value at its label, where this rank has it."""
    if dz_cv.shape[1]:
        own_c1, index_c1 = _locate(dz_cv, label)
        dz_cv.scatter_add_(1, index_c1, torch.where(own_c1, -value_c[:, None], 0.0))

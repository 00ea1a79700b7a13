"""The transducer's joint network and its loss, exact, vocabulary-parallel, without storing logits.

    z(t, u) = W relu(e_t + p_u) + b        log-probabilities = z − lse(z)        loss: :mod:`kernels.transducer`

e_t is the encoder's projection of frame t, p_u the predictor's after u labels (Graves, arXiv 1211.3711). Of each (t, u)
cell only the log-probabilities of blank and next label and the normaliser are kept; the backward pass computes logits
again, a chunk of cells at a time. A materialised loss keeps T·U·V logits and their gradients; this one T·U cells and a
chunk.

Each tp rank has its rows of W and b: for all cells the ranks reduce one maximum and three sums, as cross-entropy does
(:mod:`colonnade.model.loss`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Function

from colonnade.errors import DataError
from colonnade.kernels.registry import choose
from colonnade.kernels.transducer.cells import Cells
from colonnade.kernels.transducer.joint import Posteriors
from colonnade.parallel.axis import SOLO, Axis
from colonnade.parallel.layout import Placement


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
        cells = Cells.of(frames, labels, self.vocab_size, e_TD.device)
        e_TD, p_UD = self.tp.fan_out(e_TD), self.tp.fan_out(p_UD)
        start, _ = self.tp.part(self.vocab_size)
        return _TransducerLoss.apply(e_TD, p_UD, self.weight, self.bias, cells, self.blank, self.tp, start)

    def logprobs(self, e_RD: Tensor, p_RD: Tensor) -> Tensor:
        """Log-probabilities of all labels, (R, V), on every rank: for search."""
        z_Rv = torch.relu(e_RD + p_RD) @ self.weight.T + self.bias
        return self.tp.join(z_Rv, 1, self.vocab_size).log_softmax(1)


class _TransducerLoss(Function):
    @staticmethod
    def forward(ctx, e_TD, p_UD, weight_vD, bias_v, cells: Cells, blank: int, tp: Axis, start: int) -> Tensor:
        inputs, device = (e_TD, p_UD, weight_vD, bias_v), e_TD.device.type
        ctx.cells, ctx.blank, ctx.start = cells, blank, start
        if not cells.frames:
            ctx.save_for_backward(*inputs)
            return e_TD.new_zeros(0, dtype=torch.float64 if e_TD.dtype == torch.float64 else torch.float32)
        scores = choose("transducer_scores", device, e_TD.dtype)
        stats_4BUT = scores(*inputs, cells, blank=blank, start=start)
        top_BUT = tp.max_(stats_4BUT[0])
        stats_4BUT[1] *= (stats_4BUT[0] - top_BUT).exp_()
        sum_BUT, blank_BUT, label_BUT = tp.sum_(stats_4BUT[1:])
        lse_BUT = sum_BUT.log() + top_BUT
        arcs_BTU = ((x - lse_BUT).transpose(1, 2) for x in (blank_BUT, label_BUT))
        lattice = choose("transducer_lattice", device, lse_BUT.dtype)(*arcs_BTU, cells.frames_B, cells.labels_B)
        posteriors = (x.transpose(1, 2).to(lse_BUT.dtype) for x in (lattice.blank_BTU, lattice.label_BTU))
        ctx.save_for_backward(*inputs, lse_BUT, *posteriors)
        return lattice.loss_B.to(lse_BUT.dtype)

    @staticmethod
    def backward(ctx, grad_B: Tensor):
        saved: tuple[Tensor, ...] = ctx.saved_tensors
        inputs, lattice = saved[:4], saved[4:]
        if not lattice:
            return *(torch.zeros_like(x) for x in inputs), None, None, None, None
        gradients = choose("transducer_gradients", inputs[0].device.type, inputs[0].dtype)
        lse_BUT, blank_BUT, label_BUT = lattice
        posteriors = Posteriors(lse_BUT, blank_BUT, label_BUT, grad_B)
        found = gradients(*inputs, ctx.cells, posteriors, blank=ctx.blank, start=ctx.start)
        return *(grad.to(x.dtype) for grad, x in zip(found, inputs, strict=True)), None, None, None, None

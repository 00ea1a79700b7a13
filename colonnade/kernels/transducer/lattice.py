"""Forward and backward scores of a batch of transducer lattices, one anti-diagonal at a time.

Cells on the diagonal t + u = d depend only on diagonal d − 1, so a lattice of T frames and U labels takes T + U steps
over vectors instead of T·U steps over numbers. The backward scores are

    β(t, u) = logaddexp(β(t+1, u) + ∅(t, u), β(t, u+1) + y(t, u))        β(T, U) = 0

and exp(α + arc + β − log p) is the posterior of an arc: minus the gradient of the loss with respect to its
log-probability. Sums run in float64 whatever the inputs' type: an hour of float32 sums would lose digits, and a lattice
has no vocabulary dimension, so this costs little.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Lattice(NamedTuple):
    """Losses and arc posteriors of B utterances; cells outside an utterance have posteriors 0."""

    loss_B: Tensor
    blank_BTU: Tensor
    label_BTU: Tensor


def transducer_lattice(blank_BTU: Tensor, label_BTU: Tensor, frames_B: Tensor, labels_B: Tensor) -> Lattice:
    """Losses and posteriors from the log-probabilities of blanks and next labels, (B, T, U + 1), padded arbitrarily.

    ``frames_B`` (at least 1) and ``labels_B`` are the lengths of the utterances.
    """
    B, T, U = blank_BTU.shape
    device = blank_BTU.device
    t_T11, u_U = torch.arange(T, device=device)[:, None], torch.arange(U, device=device)
    last_B11, end_B11 = (frames_B - 1)[:, None, None], labels_B[:, None, None]
    # The blank that ends the utterance leaves the lattice and is kept apart.
    blanks = torch.where((t_T11 < last_B11) & (u_U <= end_B11), blank_BTU.double(), -torch.inf)
    labels = torch.where((t_T11 <= last_B11) & (u_U < end_B11), label_BTU.double(), -torch.inf)
    row_B = torch.arange(B, device=device)
    final_B = blank_BTU[row_B, frames_B - 1, labels_B].double()

    S = T + U - 1
    t_SU = torch.arange(S, device=device)[:, None] - u_U
    inside_SU = (t_SU >= 0) & (t_SU < T)
    t_SU = t_SU.clamp(0, T - 1)

    def skew(x_BTU: Tensor) -> Tensor:
        return torch.where(inside_SU, x_BTU[:, t_SU, u_U], -torch.inf).transpose(0, 1)

    def unskew(x_SBU: Tensor) -> Tensor:
        return x_SBU.transpose(0, 1)[:, torch.arange(T, device=device)[:, None] + u_U, u_U]

    blanks_SBU, labels_SBU = skew(blanks), skew(labels)
    never_B1 = final_B.new_full((B, 1), -torch.inf)
    alpha_SBU = final_B.new_full((S, B, U), -torch.inf)
    alpha_SBU[0, :, 0] = 0
    for d in range(1, S):
        before = alpha_SBU[d - 1]
        up = torch.cat((never_B1, (before + labels_SBU[d - 1])[:, :-1]), 1)
        alpha_SBU[d] = torch.logaddexp(before + blanks_SBU[d - 1], up)
    # after[d] = β of the cell that an arc from diagonal d reaches; β of the last cell is its final blank.
    ends_SBU = skew(torch.where((t_T11 == last_B11) & (u_U == end_B11), final_B[:, None, None], -torch.inf))
    beta_SBU = torch.empty_like(alpha_SBU)
    beta_SBU[S - 1] = ends_SBU[S - 1]
    for d in range(S - 2, -1, -1):
        after = beta_SBU[d + 1]
        up = torch.cat((after[:, 1:], never_B1), 1)
        arcs = torch.logaddexp(after + blanks_SBU[d], up + labels_SBU[d])
        beta_SBU[d] = torch.logaddexp(arcs, ends_SBU[d])
    alpha, beta = unskew(alpha_SBU), unskew(beta_SBU)
    total_B = alpha[row_B, frames_B - 1, labels_B] + final_B
    total_B11 = total_B[:, None, None]
    never_B1U, never_BT1 = final_B.new_full((B, 1, U), -torch.inf), final_B.new_full((B, T, 1), -torch.inf)
    blank_post = (alpha + blanks + torch.cat((beta[:, 1:], never_B1U), 1) - total_B11).exp()
    label_post = (alpha + labels + torch.cat((beta[:, :, 1:], never_BT1), 2) - total_B11).exp()
    blank_post[row_B, frames_B - 1, labels_B] = 1
    return Lattice(-total_B, blank_post, label_post)

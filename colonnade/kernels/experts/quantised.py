"""Reference implementation of experts with weight-only quantisation, also used on a CPU; inference only.

    h_r = act(W_gate x_t(r)) ⊙ W_up x_t(r),    y_t = Σ_j w_tj W_down h_r(t, j)        as in :mod:`reference`

Each expert's matrices are quantised like a dense layer's (:mod:`colonnade.kernels.linear.quantise`): a scale per
output, or per group of inputs of an output. Therefore W_down is stored outputs first here, and hidden units first
elsewhere. Experts without rows are skipped. Weights are dequantised a band of rows at a time, as in dense layers.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.kernels import permute
from colonnade.kernels.experts.reference import ACTIVATIONS
from colonnade.kernels.linear.quantise import Quantised
from colonnade.kernels.linear.skinny_gemm_cpu import quantised_linear


class QuantisedWeights(NamedTuple):
    """The weights of E experts: :class:`~colonnade.kernels.experts.reference.Weights` with quantised matrices."""

    up: Quantised
    """E matrices of F outputs and D inputs."""
    down: Quantised
    """E matrices of D outputs and F inputs."""
    gate: Quantised | None = None
    """As ``up``."""
    up_bias_EF: Tensor | None = None
    gate_bias_EF: Tensor | None = None
    down_bias_ED: Tensor | None = None

    def map(self, f: Callable[[Tensor], Tensor]) -> "QuantisedWeights":
        """Weights with ``f`` applied to each tensor."""

        def apply(part: Quantised | Tensor) -> Quantised | Tensor:
            if isinstance(part, Quantised):
                return part._replace(values=f(part.values), scales=f(part.scales))
            return f(part)

        return QuantisedWeights(*(None if part is None else apply(part) for part in self))  # type: ignore[arg-type]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are not None; the first dimension of each is the expert."""
        matrices = [t for w in self[:3] if w is not None for t in (w.values, w.scales)]
        return matrices + [w for w in self[3:] if w is not None]


def routed(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: QuantisedWeights, activation: str
) -> Tensor:
    """y_TD (see :func:`reference.routed`)."""
    x_RD = permute.gather(x_TD, order_R, weights_TA.shape[1])
    act, start, y_RD = ACTIVATIONS[activation], 0, torch.zeros_like(x_RD)
    up, down, gate, up_b, gate_b, down_b = weights
    for e, end in enumerate(ends_E.tolist()):
        if end > start:
            x_cD = x_RD[start:end]
            u_cF = quantised_linear(x_cD, up.matrix(e), None if up_b is None else up_b[e])
            if gate is None:
                h_cF = act(u_cF)
            else:
                h_cF = act(quantised_linear(x_cD, gate.matrix(e), None if gate_b is None else gate_b[e])) * u_cF
            y_RD[start:end] = quantised_linear(h_cF, down.matrix(e), None if down_b is None else down_b[e])
            start = end
    return permute.combine(y_RD, order_R, weights_TA)

"""Reference implementation of the experts' feed-forward layers, in plain torch.

    y_r = W_down act(W_up x_r)                        for the rows r of expert e, with e's weights
    y_r = W_down (act(W_gate x_r) ⊙ W_up x_r)         gated

With dropout, hidden units (W_down's input) are dropped one by one (expert dropout: Switch, arXiv 2101.03961, section
2.4). The mask is a function of the token's choice and of the hidden unit's index in the whole layer, so it does not
depend on the order of rows.

All weights are stored hidden units first, (E, F, D), so that tensor parallelism shards each of them along the same
dimension. Rows past the last end belong to no expert; their result is 0.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels import permute
from colonnade.kernels.dropout import HiddenDropout

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
}


class Weights(NamedTuple):
    """The weights of E experts."""

    up_EFD: Tensor
    down_EFD: Tensor
    gate_EFD: Tensor | None = None
    up_bias_EF: Tensor | None = None
    gate_bias_EF: Tensor | None = None
    down_bias_ED: Tensor | None = None

    def expert(self, e: int) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The weights of expert ``e``."""
        gate, up_b, gate_b, down_b = (None if w is None else w[e] for w in self[2:])
        return self.up_EFD[e], self.down_EFD[e], gate, up_b, gate_b, down_b

    def map(self, f: Callable[[Tensor], Tensor]) -> "Weights":
        """Weights with ``f`` applied to each tensor."""
        return Weights(*(None if w is None else f(w) for w in self))  # type: ignore[arg-type]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that are not None; the first dimension of each is the expert."""
        return [w for w in self if w is not None]


def expert(
    x_cD: Tensor, weights: Weights, e: int, activation: str, drop: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """y_cD: all rows through expert ``e``; ``drop`` is applied to the hidden units."""
    up_FD, down_FD, gate_FD, up_b, gate_b, down_b = weights.expert(e)
    act, up_cF = ACTIVATIONS[activation], F.linear(x_cD, up_FD, up_b)
    h_cF = act(up_cF) if gate_FD is None else act(F.linear(x_cD, gate_FD, gate_b)) * up_cF
    y_cD = (h_cF if drop is None else drop(h_cF)) @ down_FD
    return y_cD if down_b is None else y_cD + down_b


def experts(
    x_RD: Tensor, ends_E: Tensor, weights: Weights, activation: str, dropout: HiddenDropout | None = None
) -> Tensor:
    """y_RD: rows ends[e − 1]:ends[e] through expert e, with optional dropout of hidden units."""
    start, parts = 0, list[Tensor]()
    for e, end in enumerate(ends_E.tolist()):
        drop = None if dropout is None else dropout.rows(slice(start, end)).drop
        parts.append(expert(x_RD[start:end], weights, e, activation, drop))
        start = end
    parts.append(x_RD.new_zeros(len(x_RD) - start, x_RD.shape[1]))
    return torch.cat(parts)


def routed(
    x_TD: Tensor, order_R: Tensor, ends_E: Tensor, weights_TA: Tensor, weights: Weights, activation: str
) -> Tensor:
    """y_TD = Σ_j w_tj expert_j(x_t), for choices sorted by ``permute.sort``."""
    x_RD = permute.gather(x_TD, order_R, weights_TA.shape[1])
    return permute.combine(experts(x_RD, ends_E, weights, activation), order_R, weights_TA)


def routed_unsorted(x_TD: Tensor, ids_TA: Tensor, weights_TA: Tensor, weights: Weights, activation: str) -> Tensor:
    """y_TD as in :func:`routed`, for unsorted choices; a choice with id E has no expert."""
    order_R, ends_E = permute.sort(ids_TA, len(weights.up_EFD))
    return routed(x_TD, order_R, ends_E, weights_TA, weights, activation)

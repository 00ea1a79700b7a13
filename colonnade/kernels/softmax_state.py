"""Partial softmax states and their merge: attention as a fold over parts of the keys.

Attend to a part s of the keys, and return the log-sum-exp along with the output:

    o_s = softmax(q·kₛ) vₛ            lse_s = log Σ exp(q·kₛ)

Two such states merge into the state of the union of their keys,

    lse = log(exp(lse_a) + exp(lse_b))        o = exp(lse_a − lse)·o_a + exp(lse_b − lse)·o_b

which is associative and commutative, with the identity (0, −∞), the state of no keys. Split-KV decoding folds over
chunks, ring attention over ranks, shared prefixes over page ranges (Milakov & Gimelshein, arXiv 1805.02867; Dao et al.,
arXiv 2205.14135; the Flash-Decoding article, PyTorch blog, 2023).

The backward is written by hand because both automatic ways fail: torch's logsumexp of empty states gives NaN gradients,
and a fused kernel's log-sum-exp has no gradient at all (merging such states silently gave gradients 43–47% off):

    dₒₛ = p_s·dₒ          dlse_s = p_s·((o_s − o)·dₒ + dlse)          p_s = exp(lse_s − lse)
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function


class State(NamedTuple):
    """Softmax state of queries over a set of keys: ``o`` (…, H) and ``lse`` (…), natural logarithm."""

    o: Tensor
    lse: Tensor


def identity(o: Tensor) -> State:
    """The state of no keys, in the shape of ``o`` (…, H)."""
    return State(torch.zeros_like(o), o.new_full(o.shape[:-1], -torch.inf))


def merge(a: State, b: State) -> State:
    """The state of the union of two disjoint sets of keys."""
    return merge_all([a, b])


def merge_all(states: Sequence[State]) -> State:
    """The state of the union of all ``states`` in one parallel step; equals folding :func:`merge` over them."""
    o_S, lse_S = torch.stack([s.o for s in states]), torch.stack([s.lse for s in states])
    return State(*_Merge.apply(o_S, lse_S))


class _Merge(Function):
    @staticmethod
    def forward(ctx, o_S: Tensor, lse_S: Tensor) -> tuple[Tensor, Tensor]:
        # A maximum of −∞ (no keys at all) is replaced by 0, so that −∞ − (−∞) never occurs.
        top = lse_S.amax(0)
        top = torch.where(top == -torch.inf, 0.0, top)
        weight_S = torch.exp(lse_S - top)
        total = weight_S.sum(0)
        p_S = weight_S / torch.where(total == 0, 1.0, total)
        o = (p_S.unsqueeze(-1) * o_S).sum(0)
        ctx.save_for_backward(o_S, o, p_S)
        return o, torch.log(total) + top

    @staticmethod
    def backward(ctx, grad_o: Tensor, grad_lse: Tensor):
        o_S, o, p_S = ctx.saved_tensors
        grad_o_S = p_S.unsqueeze(-1) * grad_o
        grad_lse_S = p_S * (((o_S - o) * grad_o).sum(-1) + grad_lse)
        return grad_o_S, grad_lse_S

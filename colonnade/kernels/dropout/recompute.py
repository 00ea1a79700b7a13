"""Dropout that keeps nothing for the backward pass: the mask is computed again from the key.

y = M x with a diagonal M, so the backward pass is the forward pass on the gradient. Under torch.compile the plain
operations are traced into it, and fused with their neighbours into one kernel.
"""

from collections.abc import Callable

from torch import Tensor
from torch.autograd import Function

from colonnade.kernels.dropout import reference


class Recomputed(Function):
    """``apply(x_TD, key, index_T, site=…, rate=…, start=…)``, on the way there and on the way back."""

    @staticmethod
    def forward(
        ctx,
        x_TD: Tensor,
        key: Tensor,
        index_T: Tensor,
        apply: Callable[..., Tensor],
        site: int,
        rate: float,
        start: int,
    ) -> Tensor:
        """y_TD."""
        ctx.save_for_backward(key, index_T)
        ctx.run, ctx.site, ctx.rate, ctx.start = apply, site, rate, start
        return apply(x_TD, key, index_T, site=site, rate=rate, start=start)

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        """The same mask on the gradient."""
        key, index_T = ctx.saved_tensors
        grad_TD = ctx.run(grad_TD, key, index_T, site=ctx.site, rate=ctx.rate, start=ctx.start)
        return grad_TD, None, None, None, None, None, None


def dropout(x_TD: Tensor, key: Tensor, index_T: Tensor, *, site: int, rate: float, start: int = 0) -> Tensor:
    """y_TD (see :func:`reference.dropout`)."""
    return Recomputed.apply(x_TD, key, index_T, reference.dropout, site, rate, start)

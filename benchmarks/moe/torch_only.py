"""Expert parallelism with torch alone and no overlap: the peer of expert_parallel.py.

    sort the choices by expert | all_to_all_single of the counts | wait for them | gather | all_to_all_single of rows
    | sort received rows by expert | two grouped_mm around SwiGLU | unsort | all_to_all_single | weighted sum

Every rank holds E/W whole experts, the first two matrices as one stack.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.experts import grouped_mm


class _Rows(torch.autograd.Function):
    """all_to_all_single; the backward exchanges in the other direction."""

    @staticmethod
    def forward(ctx, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.sizes = send, receive
        out = x.new_empty(sum(receive), x.shape[1])
        dist.all_to_all_single(out, x.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        send, receive = ctx.sizes
        out = grad.new_empty(sum(send), grad.shape[1])
        dist.all_to_all_single(out, grad.contiguous(), send, receive)
        return out, None, None


def layer(x_tD: Tensor, ids_tA: Tensor, weights_tA: Tensor, both_egD: Tensor, down_eFD: Tensor) -> Tensor:
    """y_tD; ``both_egD`` is the gate above up, (e, 2F, D), of this rank's e experts."""
    W, e, A = dist.get_world_size(), len(down_eFD), ids_tA.shape[1]
    ids_R, order_R = ids_tA.flatten().sort()
    counts = torch.bincount(ids_R, minlength=W * e).view(W, e)
    received_counts = torch.empty_like(counts)
    dist.all_to_all_single(received_counts, counts)
    send, receive = torch.stack([counts.sum(1), received_counts.sum(1)]).tolist()
    rows = _Rows.apply(x_tD[order_R // A], send, receive)
    expert_R = (
        torch.arange(e, device=x_tD.device)
        .repeat(W)
        .repeat_interleave(received_counts.flatten(), output_size=len(rows))
    )
    by_R = expert_R.argsort(stable=True)
    ends_e = received_counts.sum(0).cumsum(0).int()
    gate, up = grouped_mm.product(rows[by_R], both_egD.transpose(1, 2), ends_e).chunk(2, 1)
    y_RD = grouped_mm.product(F.silu(gate) * up, down_eFD, ends_e)
    back_R = torch.empty_like(by_R).scatter_(0, by_R, torch.arange(len(by_R), device=by_R.device))
    returned_RD = _Rows.apply(y_RD[back_R], receive, send)
    weighted = returned_RD * weights_tA.flatten()[order_R].unsqueeze(1).to(returned_RD.dtype)
    return torch.zeros_like(x_tD).index_add(0, order_R // A, weighted)

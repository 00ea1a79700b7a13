"""Tensor parallelism whose communication lies beside products, written by hand: two ways for one GPU to do both.

    Halved    Two halves of the batch. While one half multiplies, the other half's sum over ranks, residual, norm and
              gather go on beside it, on a second stream; then they change places.

                  main   attend A   attend B     feed A       feed B      attend A' ...
                  side            | sum norm gather A | sum norm gather B | ...

              Backward autograd runs each operation on its forward's stream and orders the streams: the same picture.

    Ringed    One batch. A product begins with the rows that are here and goes on as the other ranks' rows arrive; a sum
              over ranks is sent off rank by rank as its parts are multiplied. Backward the weight's gradient, which
              needs no rank, fills the gaps.

Both need sequence parallelism, a dense model of pre-norm blocks without gates, sequences of equal length, no dropout.
The copies are :mod:`_copies`'; the numbers are those of the Transformer, which tests/unit/test_overlapped.py holds them
to in float64. A step is hundreds of launches on two streams, so a host alone is too slow for it: record it as a graph.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from _copies import Mover, mover_of
from _jobs import Job
from colonnade.model import Stream, Transformer
from colonnade.model.attend import Attend
from colonnade.model.attention import Attention
from colonnade.model.ffn import FeedForward
from colonnade.model.rotary import Rotation
from colonnade.parallel.mesh import Ground

# -- the conjugate pairs -----------------------------------------------------------------------------------------------


class _Gather(Function):
    @staticmethod
    def forward(ctx, x_tD: Tensor, mover: Mover) -> Tensor:
        ctx.mover = mover
        return mover.gather(x_tD)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.mover.scatter_sum(grad), None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx, y_TD: Tensor, mover: Mover) -> Tensor:
        ctx.mover = mover
        return mover.scatter_sum(y_TD)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return ctx.mover.gather(grad), None


class _GatherProduct(Function):
    """gather(x) Wᵀ."""

    @staticmethod
    def forward(ctx, x_tD: Tensor, weight_zD: Tensor, mover: Mover) -> Tensor:
        x_TD, y_Tz = _multiplied(x_tD, weight_zD.T, mover)
        ctx.save_for_backward(x_TD, weight_zD)
        ctx.mover = mover
        return y_Tz

    @staticmethod
    def backward(ctx, grad_Tz: Tensor):
        x_TD, weight_zD = ctx.saved_tensors
        mine = _summed(grad_Tz, weight_zD, ctx.mover)
        dw_zD = grad_Tz.T @ x_TD
        return ctx.mover.join(mine), dw_zD, None


class _ProductScatter(Function):
    """scatter_sum(x Wᵀ)."""

    @staticmethod
    def forward(ctx, x_Tz: Tensor, weight_Dz: Tensor, mover: Mover) -> Tensor:
        ctx.save_for_backward(x_Tz, weight_Dz)
        ctx.mover = mover
        return mover.join(_summed(x_Tz, weight_Dz.T, mover))

    @staticmethod
    def backward(ctx, grad_tD: Tensor):
        x_Tz, weight_Dz = ctx.saved_tensors
        grad_TD, dx_Tz = _multiplied(grad_tD, weight_Dz, ctx.mover)
        return dx_Tz, grad_TD.T @ x_Tz, None


def _multiplied(x_tD: Tensor, w_Dz: Tensor, mover: Mover) -> tuple[Tensor, Tensor]:
    """(x_TD of all ranks, x_TD w), a part as soon as it is here."""
    size = mover.axis.size
    x_TD = x_tD.new_empty(len(x_tD) * size, x_tD.shape[1])
    y_Tz = x_tD.new_empty(len(x_TD), w_Dz.shape[1])
    inputs, results = x_TD.chunk(size), y_Tz.chunk(size)
    for r in mover.arriving(x_tD, x_TD):
        torch.mm(inputs[r], w_Dz, out=results[r])
    return x_TD, y_Tz


def _summed(x_Tz: Tensor, w_zD: Tensor, mover: Mover) -> Tensor:
    """This rank's part of the sum over ranks of x w; to be joined."""
    parts = x_Tz.chunk(mover.axis.size)
    for r in mover.order:
        mover.push(r, parts[r] @ w_zD)
    return mover.pushed()


# -- what lies between the collectives ---------------------------------------------------------------------------------


def attended(attention: Attention, x_TD: Tensor, turn: Rotation | None, attend: Attend) -> Tensor:
    """The ranks' partial results of attention."""
    return attention.out.product(attention._core(attention.qkv(x_TD), turn, attend))


def fed(ffn: FeedForward, x_TD: Tensor) -> Tensor:
    """The ranks' partial results of the feed-forward part."""
    return ffn.down.product(ffn.act(ffn.up(x_TD)))


def core(attention: Attention, qkv_Tz: Tensor, turn: Rotation | None, attend: Attend) -> Tensor:
    """Between the two projections of attention; the first one's bias is still to be added."""
    bias = attention.qkv.bias
    return attention._core(qkv_Tz if bias is None else qkv_Tz + bias, turn, attend)


def activated(ffn: FeedForward, up_Tf: Tensor) -> Tensor:
    """Between the two projections of the feed-forward part; the first one's bias is still to be added."""
    return ffn.act(up_Tf if ffn.up.bias is None else up_Tf + ffn.up.bias)


def joined(norm: nn.Module, x_tD: Tensor, y_tD: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """(the residual stream with what a part adds to it, the same normalised for the next part)."""
    x_tD = x_tD + y_tD if bias is None else x_tD + y_tD + bias
    return x_tD, norm(x_tD)


# -- the two ways ------------------------------------------------------------------------------------------------------


class Overlapped(Transformer):
    """A Transformer whose blocks are run in another order; weights, names and layout are the same."""

    mover: Mover

    def prepare(self, mover: Mover, compiled: Callable[[Any], Any]) -> None:
        """``compiled`` makes a function faster, or not."""
        config = self.config
        assert self.axes.tp.size > 1, "there is nothing to overlap"
        assert self.axes.sequence_parallel
        assert (config.norm_order, config.gated, config.moe, config.latent) == ("pre", False, None, None)
        self.mover = mover
        self._attended, self._fed, self._core = compiled(attended), compiled(fed), compiled(core)
        self._activated, self._joined = compiled(activated), compiled(joined)

    def _parts(self) -> list[tuple[Any, Any, nn.Module, nn.Module]]:
        """Of each block (attention, feed-forward part, the norm after the first, the norm after the second)."""
        blocks: list[Any] = list(self.blocks)
        first = [block.norm1 for block in blocks[1:]]
        assert self.norm is not None
        return [
            (block.attention, block.ffn, block.norm2, after)
            for block, after in zip(blocks, [*first, self.norm], strict=True)
        ]


class Ringed(Overlapped):
    """One batch, whose products take their operands as they arrive."""

    def forward(self, stream: Stream, attend: Any, head: Any) -> Any:
        """What ``head`` makes of the last residual stream."""
        assert self.embed is not None
        self.mover.begin()
        T, x_tD = len(stream.tokens_T), self.embed(stream)
        turn = self._turn(stream.positions_T, x_tD.dtype)
        a_tD = self.blocks.get_submodule("0").norm1(x_tD)  # type: ignore[operator]
        for i, (attention, ffn, middle, after) in enumerate(self._parts()):
            sees = attend.at(i, self.config.window_of(i))
            qkv_Tz = _GatherProduct.apply(a_tD, attention.qkv.weight, self.mover)
            o_Tz = self._core(attention, qkv_Tz, turn, sees)
            y_tD = _ProductScatter.apply(o_Tz, attention.out.weight, self.mover)
            x_tD, a_tD = self._joined(middle, x_tD, y_tD, attention.out.bias)
            up_Tf = _GatherProduct.apply(a_tD, ffn.up.weight, self.mover)
            y_tD = _ProductScatter.apply(self._activated(ffn, up_Tf), ffn.down.weight, self.mover)
            x_tD, a_tD = self._joined(after, x_tD, y_tD, ffn.down.bias)
        return head(a_tD, T, self.output)


class Halved(Overlapped):
    """Two halves of the batch in turn."""

    def forward(self, stream: Stream, attend: Any, head: Any) -> Any:
        """The sums of both halves' losses and targets."""
        assert self.embed is not None
        self.mover.begin()
        count = (len(attend.cu_seqlens) - 1) // 2
        assert attend.equal, "sequences of one length"
        assert 2 * count == len(attend.cu_seqlens) - 1, "an even number of sequences"
        T = count * attend.longest
        rows = [slice(0, T), slice(T, 2 * T)]
        streams = [Stream(stream.tokens_T[half], stream.positions_T[half]) for half in rows]
        attend = replace(attend, cu_seqlens=attend.cu_seqlens[: count + 1])
        parts = self._parts()
        enters = functools.partial(self._enter, self.blocks.get_submodule("0").norm1)
        embedded = [self.embed(half) for half in streams]
        turns = [self._turn(half.positions_T, x.dtype) for half, x in zip(streams, embedded, strict=True)]
        ready = [self._beside(enters, x_tD) for x_tD in embedded]
        for i, (attention, ffn, middle, after) in enumerate(parts):
            sees = attend.at(i, self.config.window_of(i))
            for h, turn in enumerate(turns):
                x_tD, a_TD = self._arrived(ready[h])
                y_TD = self._attended(attention, a_TD, turn, sees)
                ready[h] = self._beside(functools.partial(self._between, middle, attention.out.bias), x_tD, y_TD)
            last = i == len(parts) - 1
            for h in (0, 1):
                x_tD, a_TD = self._arrived(ready[h])
                y_TD = self._fed(ffn, a_TD)
                between = functools.partial(self._between, after, ffn.down.bias, gathers=not last)
                ready[h] = self._beside(between, x_tD, y_TD)
        losses = [
            replace(head, targets_R=head.targets_R[half])(self._arrived(done)[1], T, self.output)
            for half, done in zip(rows, ready, strict=True)
        ]
        return tuple(sum(both) for both in zip(*losses, strict=True))

    def _enter(self, norm: nn.Module, x_tD: Tensor) -> tuple[Tensor, Tensor]:
        return x_tD, _Gather.apply(norm(x_tD), self.mover)

    def _between(
        self, norm: nn.Module, bias: Tensor | None, x_tD: Tensor, y_TD: Tensor, *, gathers: bool = True
    ) -> tuple[Tensor, Tensor]:
        """From a part's partial results to what the next part begins with."""
        x_tD, a_tD = self._joined(norm, x_tD, _ScatterSum.apply(y_TD, self.mover), bias)
        return x_tD, _Gather.apply(a_tD, self.mover) if gathers else a_tD

    def _beside(self, work: Callable[..., tuple[Tensor, Tensor]], *given: Tensor) -> tuple[Sequence[Tensor], Any]:
        """Begin ``work`` on the side, when what it is given is there; its results, and when they are there."""
        side = self.mover.stream
        if side is None:
            return work(*given), None
        side.wait_stream(torch.cuda.current_stream())
        for x in given:
            x.record_stream(side)
        with torch.cuda.stream(side):
            return work(*given), side.record_event()

    def _arrived(self, begun: tuple[Sequence[Tensor], Any]) -> Sequence[Tensor]:
        """The results, when they are there."""
        found, event = begun
        if event is not None:
            now = torch.cuda.current_stream()
            now.wait_event(event)
            for x in found:
                x.record_stream(now)
        return found


@dataclass(frozen=True)
class OverlappedJob(Job):
    """Training of one of the two."""

    kind: type[Overlapped] = Halved
    carved: int = 0
    """Multiprocessors that products leave free, for barriers, sums and norms on the side."""

    def start(self, ground: Ground) -> Callable[[int], Tensor]:
        """``step(i)``, with fewer multiprocessors for products while it is launched or recorded."""
        step = super().start(ground)
        if not self.carved:
            return step

        def carved(i: int) -> Tensor:
            before = torch.backends.cuda.preferred_blas_library()
            torch.backends.cuda.preferred_blas_library("cublaslt")
            torch._C._set_sm_carveout_experimental(self.carved)
            try:
                return step(i)
            finally:
                torch._C._set_sm_carveout_experimental(None)
                torch.backends.cuda.preferred_blas_library(before)

        return carved

    def model(self, ground: Ground, spans: Sequence[range]) -> Transformer:
        """Uninitialised."""
        return self.kind(self.config, ground.axes, spans=spans, device=ground.device)

    def ready(self, model: Transformer, ground: Ground) -> None:
        """Compile what lies between the collectives, and rendezvous."""
        assert isinstance(model, Overlapped)
        most = self.batch * self.sequence * self.config.width // (2 if self.kind is Halved else 1)
        dtype: torch.dtype = getattr(torch, self.train.dtype)
        compiled = torch.compile if self.train.compile else (lambda function: function)
        model.prepare(mover_of(ground.axes.tp, most, dtype, ground.device), compiled)

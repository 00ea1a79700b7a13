"""An axis of the mesh, as conjugate pairs of collectives.

Model code calls what it *means*; each method's backward is the conjugate of its forward, so gradients are right by
construction (Megatron-LM, arXiv 1909.08053, section 3, calls the first two f and g):

    method              forward          backward         in the papers
    fan_out(x)          identity         all-reduce       Megatron f
    fan_in(x)           all-reduce       identity         Megatron g
    gather(x, dim, n)   all-gather       reduce-scatter   sequence-parallel f (arXiv 2205.05198, section 4.2.2)
    scatter_sum(x, dim) reduce-scatter   all-gather       sequence-parallel g
    split(x, dim)       slice            all-gather       for replicated consumers
    join(x, dim, n)     all-gather       slice            for replicated consumers
    exchange(x, …)      all-to-all       all-to-all back  dispatch and combine of experts

``gather`` and ``join`` differ only backward: after ``gather`` each rank computes something *different* with the whole
(so the gradients are summed), after ``join`` all ranks compute the *same* (so they are not: using ``gather`` there
doubles the gradient at size 2).

Shares follow ``torch.chunk``: the first ranks hold ceil(n / size) rows, the last may hold fewer, or none. An axis of
size 1 (:data:`SOLO`) returns its input, so model code has no ``if`` about the world and a laptop runs a cluster's code.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from colonnade.parallel import collectives

if TYPE_CHECKING:
    from colonnade.parallel.ringed import Mover


class SmallMessages(Protocol):
    """Collectives of a few kilobytes, for which those of a library take too long."""

    def sums(self, x: Tensor) -> bool:
        """Whether :meth:`sum` is for ``x``."""
        ...

    def gathers(self, x: Tensor) -> bool:
        """Whether :meth:`gather` is for ``x``."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over ranks."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """The ``x`` of all ranks, one after another along dimension 0."""
        ...


@dataclass(frozen=True)
class Axis:
    """A handle on one dimension of the mesh: this process's ``rank`` among ``size`` peers.

    ``group`` is the name of the peers' process group (a string, so that it is a constant under torch.compile).
    """

    name: str
    size: int = 1
    rank: int = 0
    group: str = ""
    small: "SmallMessages | None" = field(default=None, compare=False)
    """Another way for small messages, in serving on GPUs (:mod:`colonnade.parallel.small`)."""

    def part(self, n: int, rank: int | None = None) -> tuple[int, int]:
        """(start, stop) of a rank's share of ``n`` rows, by torch.chunk's rule; this process's own by default."""
        share = -(-n // self.size)
        start = min(n, share * (self.rank if rank is None else rank))
        return start, min(n, start + share)

    # -- the conjugate pairs ---------------------------------------------------------------------------------------

    def fan_out(self, x: Tensor) -> Tensor:
        """Hand a replicated ``x`` to each rank's own share of the work; the gradients of all shares are summed."""
        return x if self.size == 1 else _FanOut.apply(x, self.group)

    def fan_in(self, x: Tensor) -> Tensor:
        """Sum the ranks' partial results; the result is replicated."""
        if self.small is not None and self.small.sums(x):
            return self.small.sum(x)
        return x if self.size == 1 else _FanIn.apply(x, self.group)

    def gather(self, x: Tensor, dim: int, n: int) -> Tensor:
        """Lay the shares of a dimension of whole size ``n`` together, for ranks that use it differently."""
        return x if self.size == 1 else _Gather.apply(x, self, dim, n)

    def scatter_sum(self, x: Tensor, dim: int) -> Tensor:
        """Sum the ranks' partial results and keep this rank's share of dimension ``dim``."""
        return x if self.size == 1 else _ScatterSum.apply(x, self, dim)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """This rank's share of a replicated ``x``."""
        return x if self.size == 1 else _Split.apply(x, self, dim)

    def join(self, x: Tensor, dim: int, n: int) -> Tensor:
        """Lay the shares of a dimension of whole size ``n`` together, for ranks that all use it alike."""
        return x if self.size == 1 else _Join.apply(x, self, dim, n)

    def exchange(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send ``send[r]`` rows to each rank r and lay the ``receive[r]`` rows from each together."""
        return x if self.size == 1 else _Exchange.apply(x, send, receive, self.group)

    def begin_exchange(self, x: Tensor, send: list[int], receive: list[int]) -> tuple[Tensor, "Journey | None"]:
        """:meth:`exchange` of which the result may be used only after :meth:`finish_exchange`; so backward too."""
        if self.size == 1:
            return x, None
        journey = Journey(send, receive, self.group)
        return _Begin.apply(x, journey), journey

    def finish_exchange(self, x: Tensor, journey: "Journey | None") -> Tensor:
        """What :meth:`begin_exchange` returned, when it is there."""
        return x if journey is None else _Finish.apply(x, journey)

    # -- the ring: a tensor travels from each rank to the next, for Functions that write their own backward -----------

    def depart(self, x: Tensor, rows: int) -> Tensor:
        """Send ``x`` to the next rank and begin to receive ``rows`` rows from the one before; see :meth:`arrived`."""
        if self.size == 1:
            return x
        send, receive = [0] * self.size, [0] * self.size
        send[(self.rank + 1) % self.size], receive[(self.rank - 1) % self.size] = len(x), rows
        return collectives.begin_all_to_all(x, receive, send, self.group)

    def arrived(self, x: Tensor) -> Tensor:
        """What :meth:`depart` returned, when it is there."""
        return x if self.size == 1 else collectives.wait(x)

    # -- values without gradients ----------------------------------------------------------------------------------

    def sum_(self, x: Tensor) -> Tensor:
        """The sum over the axis, without a gradient."""
        return x.detach() if self.size == 1 else collectives.all_reduce(x.detach(), "sum", self.group)

    def max_(self, x: Tensor) -> Tensor:
        """The maximum over the axis, without a gradient."""
        return x.detach() if self.size == 1 else collectives.all_reduce(x.detach(), "max", self.group)

    def list_(self, n: int, device: torch.device | str = "cpu") -> list[int]:
        """The ``n`` of every rank; waits for the device."""
        if self.size == 1:
            return [n]
        mine = torch.tensor([n], device=device)
        return collectives.all_gather(mine, self.size, self.group).tolist()

    def lay_together_(self, x: Tensor, counts: list[int]) -> Tensor:
        """The rows of all ranks, ``counts`` of each, one rank's after another's, without a gradient."""
        if self.size == 1:
            return x.detach()
        most = max(counts)
        rows = collectives.all_gather(_pad(x.detach(), 0, most), self.size, self.group)
        return torch.cat([part[:n] for part, n in zip(rows.split(most), counts, strict=True)]) if most else rows

    def everyones_(self, x: Tensor) -> Tensor:
        """(ranks, …): the ``x`` of every rank, of one shape, without a gradient."""
        if self.size == 1:
            return x.detach()[None]
        return _all_gather(x.detach()[None], self)

    def firsts_(self, x: Tensor) -> Tensor:
        """The ``x`` of rank 0, on every rank, without a gradient: what ranks must agree on to the bit."""
        return x if self.size == 1 else self.everyones_(x)[0]

    def broadcast_(self, x: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``x`` on every rank with that of rank ``src`` of this axis (control messages; never traced)."""
        if self.size > 1:
            collectives.broadcast_(x, src, self.group)
        return x


SOLO = Axis("solo")
"""The axis of a world of one: every method returns its input."""


@dataclass(frozen=True)
class Grid:
    """How experts stand on the ranks of a pipeline stage, which are also its data, context and tensor ranks.

    The ranks are copies × ep × sh, ``sh`` innermost: each ep rank holds its share of the experts, each sh rank among
    those its share of their hidden units. What is stored where never changes with how a step uses it.
    """

    ep: Axis = SOLO
    sh: Axis = SOLO
    all: Axis = SOLO
    """The ep × sh ranks among which tokens travel; rank = ep rank · sh + sh rank."""
    copies: Axis = SOLO
    """Ranks that hold the same shares of the same experts."""
    tokens: Axis = SOLO
    """All ranks of the stage: no two have the same tokens, where experts are concerned."""
    near: Axis | None = None
    """Of these, the neighbours, where tokens travel in two steps."""
    far: Axis | None = None
    """The ranks of the same place in other neighbourhoods."""
    strided: tuple[tuple[int, Axis], ...] = ()
    """For each divisor r of sh, the sh ranks that are equal modulo r: together a hidden slice of 1/r."""

    def every(self, r: int) -> Axis:
        """This rank among those whose sh rank is equal to its own modulo r."""
        return dict(self.strided).get(r, SOLO)


@dataclass(frozen=True)
class Axes:
    """The axes that a model's modules may use, and how the residual stream stands on them.

    Between the tensor-parallel parts the residual stream is either the same on all tp ranks (x_TD), or, with sequence
    parallelism, cut by tokens among them (x_tD; Korthikanti et al., arXiv 2205.05198, section 4.2.2): norms, dropout
    and additions are then done once instead of tp times, and what they keep for the backward pass is 1/tp as much.
    """

    tp: Axis = SOLO
    cp: Axis = SOLO
    """Ranks that share the tokens of the same samples; in serving, the cache."""
    dp: Axis = SOLO
    """Ranks that read different samples, replicas included."""
    batch: Axis = SOLO
    """All ranks of this pipeline and tensor rank that see different tokens: data and context together."""
    replicate: Axis = SOLO
    """Ranks that hold the same shards of the weights (hybrid sharding)."""
    pp: Axis = SOLO
    ends: Axis = SOLO
    """The first and the last rank of the pipeline, which share tied weights; of size 1 on ranks between them."""
    model: Axis = SOLO
    """Context and tensor ranks together."""
    alike: bool = False
    """Whether these hold the same tokens, as in serving, where context ranks share a cache, and not each its own."""
    sequence_parallel: bool = False
    mover: "Mover | None" = field(default=None, compare=False)
    """What moves the residual stream's rows beside the products that need them; only with sequence parallelism."""
    grid: Grid = Grid()
    """How experts stand on the same ranks."""

    @property
    def same(self) -> Axis:
        """The ranks that hold the same tokens, unless the residual stream is cut among them."""
        return self.model if self.alike else self.tp

    def serving(self) -> "Axes":
        """For a model that serves: all its ranks hold the same tokens, and context ranks share a cache."""
        return self if self.model.size == 1 or self.sequence_parallel else replace(self, alike=True)

    def enter(self, x_tD: Tensor, T: int) -> Tensor:
        """x_TD of the residual stream, for ranks of which each does its own share of the work on all T tokens."""
        return self.tp.gather(x_tD, 0, T) if self.sequence_parallel else self.tp.fan_out(x_tD)

    def together(self, x_tD: Tensor, T: int) -> Tensor:
        """x_TD of the residual stream, for ranks that all do the same with it."""
        return self.tp.join(x_tD, 0, T) if self.sequence_parallel else x_tD

    def leave(self, y_TD: Tensor) -> Tensor:
        """The ranks' partial results, summed, as the residual stream holds them."""
        return self.tp.scatter_sum(y_TD, 0) if self.sequence_parallel else self.tp.fan_in(y_TD)

    def apart(self, x_tD: Tensor) -> Tensor:
        """This rank's own tokens of the residual stream: each is with one rank only."""
        return x_tD if self.sequence_parallel else self.same.split(x_tD, 0)

    def rejoin(self, x_tD: Tensor, T: int) -> Tensor:
        """The residual stream of T tokens of which each rank has its own."""
        return x_tD if self.sequence_parallel else self.same.join(x_tD, 0, T)

    def everywhere(self, x: Tensor) -> Tensor:
        """The sum over data, context and pipeline ranks, without a gradient: of losses, for instance."""
        return self.pp.sum_(self.batch.sum_(x))

    def rows(self, T: int) -> slice:
        """Which of T tokens this rank's part of the residual stream holds."""
        return slice(*self.tp.part(T)) if self.sequence_parallel else slice(0, T)


SOLO_AXES = Axes()
"""One process."""


# -- values: uneven shares are padded to the largest one, moved, and trimmed ---------------------------------------


def _slice(x: Tensor, axis: Axis, dim: int) -> Tensor:
    start, stop = axis.part(x.shape[dim])
    return x.narrow(dim, start, stop - start)


def _pad(x: Tensor, dim: int, n: int) -> Tensor:
    missing = n - x.shape[dim]
    return x if missing == 0 else F.pad(x, [0, 0] * (x.dim() - 1 - dim % x.dim()) + [0, missing])


def _all_gather(rows: Tensor, axis: Axis) -> Tensor:
    if axis.small is not None and axis.small.gathers(rows):
        return axis.small.gather(rows)
    return collectives.all_gather(rows, axis.size, axis.group)


def _whole(x: Tensor, axis: Axis, dim: int, n: int) -> Tensor:
    share = -(-n // axis.size)
    rows = _pad(x, dim, share).movedim(dim, 0)
    return _all_gather(rows, axis)[:n].movedim(0, dim)


def _sum_share(x: Tensor, axis: Axis, dim: int) -> Tensor:
    n = x.shape[dim]
    rows = _pad(x, dim, -(-n // axis.size) * axis.size).movedim(dim, 0)
    start, stop = axis.part(n)
    return collectives.reduce_scatter(rows, axis.size, axis.group)[: stop - start].movedim(0, dim)


# -- the pairs -----------------------------------------------------------------------------------------------------


class _FanOut(Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return collectives.all_reduce(grad, "sum", ctx.group), None


class _FanIn(Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: str) -> Tensor:
        return collectives.all_reduce(x, "sum", group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class _Gather(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, dim: int, n: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _whole(x, axis, dim, n)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _sum_share(grad, ctx.axis, ctx.dim), None, None, None


class _ScatterSum(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.n = axis, dim, x.shape[dim]
        return _sum_share(x, axis, dim)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _whole(grad, ctx.axis, ctx.dim, ctx.n), None, None


class _Split(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, dim: int) -> Tensor:
        ctx.axis, ctx.dim, ctx.n = axis, dim, x.shape[dim]
        return _slice(x, axis, dim).contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _whole(grad, ctx.axis, ctx.dim, ctx.n), None, None


class _Join(Function):
    @staticmethod
    def forward(ctx, x: Tensor, axis: Axis, dim: int, n: int) -> Tensor:
        ctx.axis, ctx.dim = axis, dim
        return _whole(x, axis, dim, n)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _slice(grad, ctx.axis, ctx.dim), None, None, None


class _Exchange(Function):
    @staticmethod
    def forward(ctx, x: Tensor, send: list[int], receive: list[int], group: str) -> Tensor:
        ctx.send, ctx.receive, ctx.group = send, receive, group
        return collectives.all_to_all(x, receive, send, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return collectives.all_to_all(grad, ctx.send, ctx.receive, ctx.group), None, None, None


class Journey:
    """One exchange under way, forward and later backward: what :meth:`Axis.begin_exchange` and ``finish`` share."""

    def __init__(self, send: list[int], receive: list[int], group: str):
        self.send, self.receive, self.group = send, receive, group
        self.gradient: Tensor | None = None
        """Of what was sent, on its way back."""


class _Begin(Function):
    @staticmethod
    def forward(ctx, x: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        return collectives.begin_all_to_all(x, journey.receive, journey.send, journey.group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # What autograd hands over stands for the gradient that is under way.
        gradient, ctx.journey.gradient = ctx.journey.gradient, None
        return collectives.wait(gradient), None


class _Finish(Function):
    @staticmethod
    def forward(ctx, x: Tensor, journey: Journey) -> Tensor:
        ctx.journey = journey
        y = collectives.wait(x)
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad: Tensor):
        journey = ctx.journey
        journey.gradient = collectives.begin_all_to_all(grad, journey.send, journey.receive, journey.group)
        return grad.new_zeros(()).expand_as(grad), None


def group_name(group: dist.ProcessGroup) -> str:
    """The name by which functional collectives find ``group``."""
    return group.group_name


def world_axis() -> Axis:
    """All processes of the default group as one axis; :data:`SOLO` when there is none."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return SOLO
    world = dist.group.WORLD
    assert world is not None
    return Axis("world", dist.get_world_size(), dist.get_rank(), group_name(world))

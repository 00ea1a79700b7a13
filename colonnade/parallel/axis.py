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

from colonnade.parallel import autograd_collectives, collectives
from colonnade.parallel.autograd_collectives import Journey

if TYPE_CHECKING:
    from colonnade.parallel.overlapped_matmul import Mover


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
    """Another way for small messages, in serving on GPUs (:mod:`colonnade.parallel.small_allreduce`)."""

    def part(self, n: int, rank: int | None = None) -> tuple[int, int]:
        """(start, stop) of a rank's share of ``n`` rows, by torch.chunk's rule; this process's own by default."""
        share = -(-n // self.size)
        start = min(n, share * (self.rank if rank is None else rank))
        return start, min(n, start + share)

    # -- the conjugate pairs ---------------------------------------------------------------------------------------

    def fan_out(self, x: Tensor) -> Tensor:
        """Hand a replicated ``x`` to each rank's own share of the work; the gradients of all shares are summed."""
        return x if self.size == 1 else autograd_collectives.fan_out(x, self.group)

    def fan_in(self, x: Tensor) -> Tensor:
        """Sum the ranks' partial results; the result is replicated."""
        if self.small is not None and self.small.sums(x):
            return self.small.sum(x)
        return x if self.size == 1 else autograd_collectives.fan_in(x, self.group)

    def gather(self, x: Tensor, dim: int, n: int) -> Tensor:
        """Lay the shares of a dimension of whole size ``n`` together, for ranks that use it differently."""
        return x if self.size == 1 else autograd_collectives.gather(x, self, dim, n)

    def scatter_sum(self, x: Tensor, dim: int) -> Tensor:
        """Sum the ranks' partial results and keep this rank's share of dimension ``dim``."""
        return x if self.size == 1 else autograd_collectives.scatter_sum(x, self, dim)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """This rank's share of a replicated ``x``."""
        return x if self.size == 1 else autograd_collectives.split(x, self, dim)

    def join(self, x: Tensor, dim: int, n: int) -> Tensor:
        """Lay the shares of a dimension of whole size ``n`` together, for ranks that all use it alike."""
        return x if self.size == 1 else autograd_collectives.join(x, self, dim, n)

    def exchange(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """Send ``send[r]`` rows to each rank r and lay the ``receive[r]`` rows from each together."""
        return x if self.size == 1 else autograd_collectives.exchange(x, send, receive, self.group)

    def begin_exchange(self, x: Tensor, send: list[int], receive: list[int]) -> tuple[Tensor, Journey | None]:
        """:meth:`exchange` of which the result may be used only after :meth:`finish_exchange`; so backward too."""
        if self.size == 1:
            return x, None
        journey = Journey(send, receive, self.group)
        return autograd_collectives.begin(x, journey), journey

    def finish_exchange(self, x: Tensor, journey: Journey | None) -> Tensor:
        """What :meth:`begin_exchange` returned, when it is there."""
        return x if journey is None else autograd_collectives.finish(x, journey)

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
        rows = collectives.all_gather(autograd_collectives.padded(x.detach(), 0, most), self.size, self.group)
        return torch.cat([part[:n] for part, n in zip(rows.split(most), counts, strict=True)]) if most else rows

    def everyones_(self, x: Tensor) -> Tensor:
        """(ranks, …): the ``x`` of every rank, of one shape, without a gradient."""
        if self.size == 1:
            return x.detach()[None]
        return autograd_collectives.all_gather(x.detach()[None], self)

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

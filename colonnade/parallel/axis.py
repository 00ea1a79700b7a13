"""One axis of the device mesh, with its collectives as conjugate forward/backward pairs.

Each method's backward is the conjugate of its forward, so gradients are right by construction (Megatron-LM, arXiv
1909.08053, section 3, calls the first two f and g):

    method              forward          backward         in the papers
    fan_out(x)          identity         all-reduce       Megatron f
    fan_in(x)           all-reduce       identity         Megatron g
    gather(x, dim, n)   all-gather       reduce-scatter   sequence-parallel f (arXiv 2205.05198, section 4.2.2)
    scatter_sum(x, dim) reduce-scatter   all-gather       sequence-parallel g
    split(x, dim)       slice            all-gather       for replicated consumers
    join(x, dim, n)     all-gather       slice            for replicated consumers
    exchange(x, …)      all-to-all       all-to-all back  dispatch and combine of experts

``gather`` and ``join`` differ only in the backward pass. After ``gather`` each rank computes something *different* with
the whole tensor, so the gradients are summed. After ``join`` all ranks compute the *same*, so they are not; ``gather``
there would double the gradient at size 2.

Shards follow ``torch.chunk``: the first ranks hold ceil(n / size) rows, the last may hold fewer, or none. An axis of
size 1 (:data:`SOLO`) returns its input, so model code never branches on the world size.
"""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.parallel import collectives
from colonnade.parallel.collectives import PendingExchange

if TYPE_CHECKING:
    from colonnade.parallel.overlapped_matmul import RowTransfer


class SmallCollectives(Protocol):
    """Collectives for messages of a few kilobytes, where a library's latency dominates."""

    def can_sum(self, x: Tensor) -> bool:
        """Whether :meth:`sum` supports ``x``."""
        ...

    def can_gather(self, x: Tensor) -> bool:
        """Whether :meth:`gather` supports ``x``."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """All-reduce (sum)."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """All-gather along dimension 0."""
        ...


@dataclass(frozen=True)
class Axis:
    """A handle on one dimension of the mesh: this process's ``rank`` among ``size`` peers.

    ``group`` is the name of the process group (a string, so that it is a constant under torch.compile).
    """

    name: str
    size: int = 1
    rank: int = 0
    group: str = ""
    small_collectives: "SmallCollectives | None" = field(default=None, compare=False)
    """Faster collectives for small messages, in serving on GPUs (:mod:`colonnade.parallel.symmetric_memory`)."""

    def part(self, n: int, rank: int | None = None) -> tuple[int, int]:
        """(start, stop) of the shard of ``n`` rows on ``rank`` (default: this one), as torch.chunk cuts them."""
        share = -(-n // self.size)
        start = min(n, share * (self.rank if rank is None else rank))
        return start, min(n, start + share)

    # -- the conjugate pairs ---------------------------------------------------------------------------------------

    def fan_out(self, x: Tensor) -> Tensor:
        """Use a replicated ``x`` in per-rank work; the ranks' gradients are summed."""
        return x if self.size == 1 else collectives.fan_out(x, self.group)

    def fan_in(self, x: Tensor) -> Tensor:
        """Sum the ranks' partial results; the result is replicated."""
        if self.small_collectives is not None and self.small_collectives.can_sum(x):
            return self.small_collectives.sum(x)
        return x if self.size == 1 else collectives.fan_in(x, self.group)

    def gather(self, x: Tensor, dim: int, n: int) -> Tensor:
        """Concatenate the shards of a dimension of full size ``n``, for ranks that use the result differently."""
        return x if self.size == 1 else collectives.gather(x, self, dim, n)

    def scatter_sum(self, x: Tensor, dim: int) -> Tensor:
        """Sum the ranks' partial results and keep this rank's shard of dimension ``dim``."""
        return x if self.size == 1 else collectives.scatter_sum(x, self, dim)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Slice this rank's shard out of a replicated ``x``."""
        return x if self.size == 1 else collectives.split(x, self, dim)

    def join(self, x: Tensor, dim: int, n: int) -> Tensor:
        """Concatenate the shards of a dimension of full size ``n``, for ranks that all use the result in the same
        way.
        """
        return x if self.size == 1 else collectives.join(x, self, dim, n)

    def exchange(self, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """All-to-all: send ``send[r]`` rows to each rank r, concatenate ``receive[r]`` rows from each."""
        return x if self.size == 1 else collectives.exchange(x, send, receive, self.group)

    def begin_exchange(self, x: Tensor, send: list[int], receive: list[int]) -> tuple[Tensor, PendingExchange | None]:
        """Start :meth:`exchange`; use the result only after :meth:`finish_exchange`. Backward is asynchronous too."""
        if self.size == 1:
            return x, None
        pending = PendingExchange(send, receive, self.group)
        return collectives.begin_exchange(x, pending), pending

    def finish_exchange(self, x: Tensor, pending: PendingExchange | None) -> Tensor:
        """Wait for :meth:`begin_exchange`."""
        return x if pending is None else collectives.finish_exchange(x, pending)

    # -- ring shifts, for autograd Functions that write their own backward -----------------------------------------

    def begin_ring_shift(self, x: Tensor, rows: int) -> Tensor:
        """Start to send ``x`` to the next rank and to receive ``rows`` rows from the previous one."""
        if self.size == 1:
            return x
        send, receive = [0] * self.size, [0] * self.size
        send[(self.rank + 1) % self.size], receive[(self.rank - 1) % self.size] = len(x), rows
        return collectives.begin_all_to_all(x, receive, send, self.group)

    def finish_ring_shift(self, x: Tensor) -> Tensor:
        """Wait for :meth:`begin_ring_shift`."""
        return x if self.size == 1 else collectives.wait(x)

    # -- values without gradients ----------------------------------------------------------------------------------

    def sum_(self, x: Tensor) -> Tensor:
        """All-reduce (sum), without a gradient."""
        return x.detach() if self.size == 1 else collectives.all_reduce(x.detach(), "sum", self.group)

    def max_(self, x: Tensor) -> Tensor:
        """All-reduce (max), without a gradient."""
        return x.detach() if self.size == 1 else collectives.all_reduce(x.detach(), "max", self.group)

    def all_gather_int(self, n: int, device: torch.device | str = "cpu") -> list[int]:
        """Return every rank's ``n``; synchronises with the device."""
        if self.size == 1:
            return [n]
        return collectives.all_gather(torch.tensor([n], device=device), self.size, self.group).tolist()

    def all_gather_uneven_(self, x: Tensor, counts: list[int]) -> Tensor:
        """All-gather along dimension 0 where rank r has ``counts[r]`` rows, without a gradient."""
        if self.size == 1:
            return x.detach()
        most = max(counts)
        rows = collectives.all_gather(collectives.pad_to(x.detach(), 0, most), self.size, self.group)
        return torch.cat([part[:n] for part, n in zip(rows.split(most), counts, strict=True)]) if most else rows

    def all_gather_(self, x: Tensor) -> Tensor:
        """Stack the equally shaped ``x`` of all ranks into (ranks, …), without a gradient."""
        if self.size == 1:
            return x.detach()[None]
        return collectives.gather_rows(x.detach()[None], self)

    def from_rank_0_(self, x: Tensor) -> Tensor:
        """Return rank 0's ``x`` on every rank, without a gradient, where ranks must agree bit for bit."""
        return x if self.size == 1 else self.all_gather_(x)[0]

    def broadcast_(self, x: Tensor, src: int = 0) -> Tensor:
        """Overwrite ``x`` on every rank with that of rank ``src`` of this axis (control messages; never traced)."""
        if self.size > 1:
            collectives.broadcast_(x, src, self.group)
        return x


SOLO = Axis("solo")
"""The axis of a world of one: every method returns its input."""


@dataclass(frozen=True)
class ExpertAxes:
    """The axes of expert parallelism, over the data, context and tensor ranks of one pipeline stage.

    The ranks are copies × ep × etp, ``etp`` innermost: each ep rank holds a shard of the experts, and each etp rank
    below it a shard of their hidden units. This placement never changes with the degree at which a step runs.
    """

    ep: Axis = SOLO
    etp: Axis = SOLO
    all: Axis = SOLO
    """The ep × etp ranks of the token all-to-all; rank = ep rank · etp + etp rank."""
    copies: Axis = SOLO
    """Replicas: ranks that hold the same shards of the same experts."""
    tokens: Axis = SOLO
    """All ranks of the stage; no two route the same tokens."""
    intra_node: Axis | None = None
    """For a hierarchical all-to-all: the ranks of this node."""
    inter_node: Axis | None = None
    """For a hierarchical all-to-all: the ranks with this rank's index on their nodes."""
    strided: tuple[tuple[int, Axis], ...] = ()
    """For each divisor r of etp, the etp ranks that are equal modulo r: together they hold 1/r of the hidden units."""

    def hidden_slice(self, r: int) -> Axis:
        """The axis of etp ranks that together hold this rank's 1/r of the hidden units."""
        return dict(self.strided).get(r, SOLO)


@dataclass(frozen=True)
class Axes:
    """All axes that a model's modules use, and how the residual stream is laid out over them.

    Between the tensor-parallel regions the residual stream is either replicated on all tp ranks (x_TD) or, with
    sequence parallelism, sharded by tokens (x_tD; Korthikanti et al., arXiv 2205.05198, section 4.2.2): norms, dropout
    and additions then run once instead of tp times, and keep 1/tp of the activations for the backward pass.
    """

    tp: Axis = SOLO
    cp: Axis = SOLO
    """Context parallelism: ranks that share the tokens of the same samples; in serving, the KV cache."""
    dp: Axis = SOLO
    """Ranks that read different samples, replicas included."""
    batch: Axis = SOLO
    """Data and context ranks together: all ranks of this pipeline and tensor rank that see different tokens."""
    replicate: Axis = SOLO
    """Ranks that hold the same FSDP shards (hybrid sharding)."""
    pp: Axis = SOLO
    embedding: Axis = SOLO
    """The first and last pipeline ranks, which share tied embeddings; of size 1 on ranks between them."""
    model: Axis = SOLO
    """Context and tensor ranks together."""
    cp_replicated: bool = False
    """True where all ranks of ``model`` hold the same tokens: in serving, context ranks shard the cache, not tokens."""
    sequence_parallel: bool = False
    row_transfer: "RowTransfer | None" = field(default=None, compare=False)
    """Moves the residual stream's rows while matrix products run; only with sequence parallelism."""
    experts: ExpertAxes = ExpertAxes()

    @property
    def token_replicas(self) -> Axis:
        """The ranks that hold the same tokens (without sequence parallelism)."""
        return self.model if self.cp_replicated else self.tp

    def serving(self) -> "Axes":
        """The axes for serving: context ranks hold the same tokens and share a KV cache."""
        return self if self.model.size == 1 or self.sequence_parallel else replace(self, cp_replicated=True)

    def enter_tp_region(self, x_tD: Tensor, T: int) -> Tensor:
        """Return x_TD of the residual stream as the input of column-parallel work."""
        return self.tp.gather(x_tD, 0, T) if self.sequence_parallel else self.tp.fan_out(x_tD)

    def leave_tp_region(self, y_TD: Tensor) -> Tensor:
        """Sum row-parallel partial results and return them in the residual stream's layout."""
        return self.tp.scatter_sum(y_TD, 0) if self.sequence_parallel else self.tp.fan_in(y_TD)

    def all_tokens(self, x_tD: Tensor, T: int) -> Tensor:
        """Return x_TD of the residual stream for work that all tp ranks repeat."""
        return self.tp.join(x_tD, 0, T) if self.sequence_parallel else x_tD

    def split_tokens(self, x_tD: Tensor) -> Tensor:
        """Shard the residual stream so that each token is on one rank only."""
        return x_tD if self.sequence_parallel else self.token_replicas.split(x_tD, 0)

    def join_tokens(self, x_tD: Tensor, T: int) -> Tensor:
        """Undo :meth:`split_tokens`."""
        return x_tD if self.sequence_parallel else self.token_replicas.join(x_tD, 0, T)

    def global_sum(self, x: Tensor) -> Tensor:
        """Sum over data, context and pipeline ranks, without a gradient: of losses, for instance."""
        return self.pp.sum_(self.batch.sum_(x))

    def rows(self, T: int) -> slice:
        """Which of T tokens this rank's part of the residual stream holds."""
        return slice(*self.tp.part(T)) if self.sequence_parallel else slice(0, T)


SOLO_AXES = Axes()
"""The axes of one process."""


def group_name(group: dist.ProcessGroup) -> str:
    """Return the name by which functional collectives find ``group``."""
    return group.group_name


def world_axis() -> Axis:
    """All processes of the default group as one axis; :data:`SOLO` when there is none."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return SOLO
    world = dist.group.WORLD
    assert world is not None
    return Axis("world", dist.get_world_size(), dist.get_rank(), group_name(world))

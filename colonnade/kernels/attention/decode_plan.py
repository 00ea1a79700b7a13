"""What Flash-Decoding prepares before its kernels run: how rows and keys are cut up, and plans, on the device.

A :class:`KernelLayout` is what is the same in every step and makes plans; a plan goes to the device as one tensor of a size
that is known before the lengths are, so that a captured graph finds the next step's plan in the same place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from colonnade.kernels.attention import cascade, cuda_decode, split_planner
from colonnade.kernels.attention.cascade import Cascade, CascadeCapacity, KernelCosts
from colonnade.kernels.attention.decode_tiles import OVERRIDE, Tiles, choose_tiles, costs
from colonnade.kernels.attention.split_plan import Capacity, Plan, Shape, pack_rows
from colonnade.kernels.device import multiprocessors, upload, upload_into

DECODE_ROWS = 64
"""Rows, queries times heads of a group, up to which a request is read and not multiplied."""


Kernels = Literal["auto", "triton", "cuda"]


def is_decode(queries: int, group: int) -> bool:
    """Whether a request of so many new tokens is read and not multiplied; one is a decode, whatever the group."""
    return queries * group <= DECODE_ROWS or queries == 1


@dataclass(frozen=True)
class KernelLayout:
    """What is the same in every step: the sizes that plans are made for."""

    shape: Shape
    tiles: Tiles
    width: int
    element_bytes: int
    workers: int
    chunk: int | None = None
    runs: bool = False
    """Whether chunks that follow each other are one item (:mod:`~colonnade.kernels.attention.split_planner`): of
    larger blocks a chunk's state, put away
    while tiles are on their way, would take the room of a worker."""
    many: bool = False
    """Whether blocks of rows are as large as the matrix units like them
    (:mod:`~colonnade.kernels.attention.triton_prefill`)."""
    copies: int = 2
    """What is read of a token, keys and values; 1 where they are one."""
    most: int = 0
    """Rows of a block that any request has, where it is known to be fewer than there is room for; 0: all."""
    shared: "KernelLayout | None" = None
    """How groups that share a prefix read it; None: nobody shares."""
    cuda: bool = False
    """Whether the kernel in CUDA C++ reads (:mod:`cuda_decode`), and not the one in Triton."""

    @staticmethod
    def of(
        q_TNH: Tensor,
        k_PpKH: Tensor,
        longest_query: int,
        *,
        window: int | None = None,
        chunk: int | None = None,
        shares: bool = False,
        kernels: Kernels = "auto",
    ) -> "KernelLayout":
        """For such tensors, and up to ``longest_query`` queries a request.

        With "auto" the kernel in CUDA C++ reads what it reads faster than the one in Triton. With ``chunk``
        keys are cut at its multiples only and blocks of rows do not depend on the number of queries: a request's
        numbers are then the same bits whoever else is in the batch, and so nobody ``shares``.
        """
        (_, N, H), K, size = q_TNH.shape, k_PpKH.shape[2], k_PpKH.element_size()
        queries = 1 if chunk else max(1, longest_query)
        # Fixed cuts are for chunks of prompts too: in blocks of 8 rows their keys would be read twice as often.
        rows = max(16 if chunk else 8, cuda_decode.padded_rows(N // K, queries))
        # Tiles that somebody chose are those of the kernel in Triton.
        wanted = kernels == "cuda" or (kernels == "auto" and not OVERRIDE and cuda_decode.preferred(rows, H))
        cuda = wanted and cuda_decode.supports(q_TNH, k_PpKH, rows)
        if kernels == "cuda" and not cuda:
            raise LookupError(
                f"the kernel in CUDA C++ takes no {rows} rows of {H} numbers of {q_TNH.dtype} and {k_PpKH.dtype} here"
            )
        if cuda:
            # Fixed cuts are the same bits among any number of requests.
            lines = 1 if chunk else len(q_TNH) // queries * K
            tiles = cuda_decode.choose_block(rows, H, size, lines, multiprocessors(q_TNH.device))
        else:
            rows = min(DECODE_ROWS, max(16, triton.next_power_of_2(N // K * queries)))
            tiles = choose_tiles(rows, H, q_TNH.element_size(), size)
        workers = tiles.workers * multiprocessors(q_TNH.device)
        shared = None
        if chunk is not None:
            chunk = -(-chunk // tiles.tile) * tiles.tile
        elif shares:
            shared = KernelLayout.for_prefill(q_TNH, k_PpKH)
            shared = replace(shared, shape=shared.shape._replace(causal=False))
        # Under fixed cuts the layout is of any number of queries, whatever is the longest of this step.
        shape = Shape(K, N // K, rows, tiles.tile, window)
        most = 0 if chunk is not None else shape.used_rows(max(1, longest_query))
        runs = chunk is not None and rows == 16 and not cuda
        return KernelLayout(shape, tiles, H, size, workers, chunk, runs=runs, most=most, shared=shared, cuda=cuda)

    @staticmethod
    def for_prefill(q_TNH: Tensor, k_PpKH: Tensor, *, window: int | None = None) -> "KernelLayout":
        """For requests, or groups of them, of many rows."""
        (_, N, H), K, size = q_TNH.shape, k_PpKH.shape[2], k_PpKH.element_size()
        # 128 rows of 256 numbers, or of float32, are more than there are registers for.
        rows = 128 if max(size, q_TNH.element_size()) <= 2 and H <= 128 else 64
        tiles = choose_tiles(rows, H, q_TNH.element_size(), size)
        workers = tiles.workers * multiprocessors(q_TNH.device)
        return KernelLayout(Shape(K, N // K, rows, tiles.tile, window), tiles, H, size, workers, many=True)

    @staticmethod
    def for_mla(
        q_TNH: Tensor, k_Pp1H: Tensor, longest_query: int, *, window: int | None = None, chunk: int | None = None
    ) -> "KernelLayout":
        """For latent attention (:mod:`~colonnade.kernels.attention.triton_mla_decode`); with ``chunk`` as
        :meth:`of`.
        """
        (_, N, H), size = q_TNH.shape, k_Pp1H.element_size()
        rows = min(64, max(16, triton.next_power_of_2(N * (1 if chunk else max(1, longest_query)))))
        tiles = choose_tiles(rows, H, q_TNH.element_size(), size)
        workers = tiles.workers * multiprocessors(q_TNH.device)
        if chunk is not None:
            chunk = -(-chunk // tiles.tile) * tiles.tile
        return KernelLayout(Shape(1, N, rows, tiles.tile, window), tiles, H, size, workers, chunk, copies=1)

    @property
    def used(self) -> int:
        """Rows of a block that may be there."""
        return self.most or self.shape.rows

    @property
    def kernel_costs(self) -> KernelCosts:
        """Shape, workers and costs."""
        prices = costs(
            self.tiles, self.shape.rows, self.width, self.element_bytes, self.workers, self.copies, cuda=self.cuda
        )
        return KernelCosts(self.shape, self.workers, prices)

    def capacity(self, requests: int, queries: int, context: int) -> Capacity:
        """Of plans for ``requests`` requests of at most so many queries and keys."""
        shape, joined = self.shape, self.shared is not None
        return Capacity.of(requests, queries, shape, self.workers, chunk=self.chunk, context=context, joined=joined)

    def shared_capacity(self, requests: int, queries: int) -> tuple[Capacity, CascadeCapacity]:
        """Of plans for the groups of so many requests, and of who is in which."""
        assert self.shared is not None
        shape, workers = self.shared.shape, self.shared.workers
        lines = shape.kv_heads * (shape.blocks(requests * queries) + requests // 2)
        pieces = lines + workers - 1
        return Capacity(workers, pieces, lines, pieces), CascadeCapacity(requests, requests // 2, requests * queries)

    def plan(
        self,
        lengths: Sequence[int],
        queries: Sequence[int],
        *,
        max_keys: int | None = None,
        ahead: int = 0,
        tables: Sequence[Sequence[int]] | None = None,
        page_tokens: int = 0,
    ) -> Plan | Cascade:
        """A plan for one step; with the requests' ``tables`` of pages a cascade where that is faster."""
        few = self.kernel_costs
        if self.shared is None or tables is None:
            return split_planner.plan(
                lengths, queries, *few, chunk=self.chunk, runs=self.runs, max_keys=max_keys, ahead=ahead
            )
        many = self.shared.kernel_costs
        return cascade.plan(tables, lengths, queries, page_tokens, few, many, max_keys=max_keys, ahead=ahead)

    def prepare(
        self,
        plan: Plan | Cascade,
        device: torch.device | str,
        capacity: Capacity | None = None,
        shared_capacity: tuple[Capacity, CascadeCapacity] | None = None,
    ) -> "DevicePlan":
        """``plan`` on the device, in arrays of its own size or of such capacities."""
        if isinstance(plan, Plan) and shared_capacity is None:
            room = capacity or plan.capacity
            return DevicePlan(upload(plan.flat(room), torch.int32, device), room, self)
        assert self.shared is not None
        found = _as_cascade(plan, self.shared)
        own = replace(self, shared=None).prepare(found.own, device, capacity)
        theirs, members = shared_capacity or (found.shared.capacity, found.capacity)
        shared = SharedPrefix(
            self.shared.prepare(found.shared, device, theirs), upload(found.flat(members), torch.int32, device), members
        )
        return replace(own, layout=self, shared=shared)


def _as_cascade(plan: Plan | Cascade, shared: KernelLayout) -> Cascade:
    """A plan as a cascade of no groups."""
    if isinstance(plan, Cascade):
        return plan
    nothing = Plan((0,) * (shared.workers + 1), pack_rows([]), pack_rows([]), 0, 0, 0)
    return Cascade((), plan, nothing, (), (), shared.shape.kv_heads)


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """What groups read, on the device."""

    ready: "DevicePlan"
    members: Tensor
    """int32, :meth:`cascade.Cascade.flat`."""
    capacity: CascadeCapacity


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """A plan on the device, and what the kernels are compiled for."""

    flat: Tensor
    """int32, :meth:`split_plan.Plan.flat`."""
    capacity: Capacity
    layout: KernelLayout
    shared: SharedPrefix | None = None

    @property
    def merges(self) -> bool:
        """Whether a merge is launched: in a graph always, since another step's plan may need it."""
        return self.capacity.merges > 0

    @property
    def overlaps(self) -> bool:
        """Whether the merge is started while the reading goes on, which no interpreter does."""
        return self.flat.is_cuda and self.layout.tiles.overlap and self.merges and not self.layout.many

    @cached_property
    def mailboxes(self) -> Tensor:
        """Where blocks of :mod:`cuda_decode` leave states for each other; all bits are 1 before and after a launch."""
        shape = self.layout.shape
        count = 2 * max(1, self.capacity.slots) * shape.rows * self.layout.width
        return torch.full((count,), -1, dtype=torch.int32, device=self.flat.device)

    def mailboxes_for_launch(self) -> Tensor:
        """:attr:`mailboxes`; new ones where they would be made by a graph that is being captured, which may never run."""
        if "posts" not in vars(self) and torch.cuda.is_current_stream_capturing():
            return replace(self).mailboxes
        return self.mailboxes

    @property
    def early(self) -> dict[str, Any]:
        """What a launch after the reading takes that begins before its end, where one does."""
        return {"launch_pdl": True} if self.overlaps else {}

    def take(self, plan: Plan | Cascade) -> None:
        """Another step's plan in the place of this one."""
        if self.shared is None:
            assert isinstance(plan, Plan), "a cascade in the place of a plan without groups"
            own = plan
        else:
            assert self.layout.shared is not None
            found = _as_cascade(plan, self.layout.shared)
            own = found.own
            self.shared.ready.take(found.shared)
            upload_into(self.shared.members, found.flat(self.shared.capacity))
        upload_into(self.flat, own.flat(self.capacity))

"""Prepares Flash-Decoding launches: block layout, split plan, and its upload to the device.

A :class:`KernelLayout` is what stays the same in every step and makes plans. A plan is uploaded as one tensor whose
size does not depend on the lengths, so that a captured graph finds the next step's plan at the same address.
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
from colonnade.kernels.attention.split_plan import FIELDS, ITEM_END, Capacity, Plan, Shape, pack_rows
from colonnade.kernels.device import multiprocessors, upload, upload_into

DECODE_ROWS = 64
"""Up to this many rows (queries times heads of a group) a request uses the decode kernel, otherwise the prefill
kernel."""


Kernels = Literal["auto", "triton", "cuda"]


def is_decode(queries: int, group: int) -> bool:
    """Whether a request with so many new tokens uses the decode kernel; a single token always does."""
    return queries * group <= DECODE_ROWS or queries == 1


@dataclass(frozen=True)
class KernelLayout:
    """Block shape, tile sizes and workers of a kernel: what plans are made for."""

    shape: Shape
    tiles: Tiles
    width: int
    element_bytes: int
    workers: int
    chunk: int | None = None
    runs: bool = False
    """Whether consecutive chunks of a line form one item (:mod:`~colonnade.kernels.attention.split_planner`).

    For larger blocks, storing a chunk's state while tiles are in flight would cost a worker's shared memory."""
    prefill: bool = False
    """Whether blocks fill the tensor cores' M dimension (:mod:`~colonnade.kernels.attention.triton_prefill`)."""
    kv_copies: int = 2
    """Vectors read per token: key and value, or 1 if they are the same."""
    max_rows: int = 0
    """Upper bound of the rows that any request uses of a block; 0: all."""
    shared: "KernelLayout | None" = None
    """Layout of groups that share a prefix; None disables sharing."""
    cuda: bool = False
    """Whether the CUDA C++ kernel runs (:mod:`cuda_decode`) instead of the Triton one."""
    short: bool = False
    """Whether steps of a few keys per request may use the kernel without a plan (:func:`cuda_decode.attend_short`)."""

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
        """The layout for such tensors, and up to ``longest_query`` queries per request.

        With "auto" the CUDA C++ kernel runs where it is faster than the Triton one, and a third one in steps of a few
        keys. With ``chunk``, keys are split at its multiples only and blocks do not depend on the number of queries: a
        request's result is then bitwise independent of the batch, and ``shares`` is ignored.
        """
        (_, N, H), K, size = q_TNH.shape, k_PpKH.shape[2], k_PpKH.element_size()
        queries = max(1, longest_query)
        lines = len(q_TNH) // queries * K
        if chunk is not None:
            # Which kernel runs must not depend on the step; rows and teams may.
            rows, preferred = cuda_decode.fixed_rows(N // K, queries), True
            supported = cuda_decode.supports_fixed(q_TNH, k_PpKH)
            queries = 1
        else:
            rows = cuda_decode.padded_rows(N // K, queries)
            preferred, supported = cuda_decode.preferred(rows, H, lines), cuda_decode.supports(q_TNH, k_PpKH, rows)
        # Overridden tiles are meant for the Triton kernel.
        cuda = supported and (kernels == "cuda" or (kernels == "auto" and preferred and not OVERRIDE))
        if kernels == "cuda" and not cuda:
            raise LookupError(
                f"the kernel in CUDA C++ does not support {rows} rows of {H} numbers of {q_TNH.dtype} and "
                f"{k_PpKH.dtype} here"
            )
        if cuda:
            processors = multiprocessors(q_TNH.device)
            tiles = cuda_decode.choose_block(rows, H, size, lines, processors, fixed=chunk is not None)
        else:
            rows = min(DECODE_ROWS, max(16, triton.next_power_of_2(N // K * queries)))
            tiles = choose_tiles(rows, H, q_TNH.element_size(), size)
        workers = tiles.workers * multiprocessors(q_TNH.device)
        shared = None
        if chunk is not None:
            least = cuda_decode.FIXED_CHUNK if cuda else tiles.tile
            chunk = -(-chunk // least) * least
        elif shares:
            shared = KernelLayout.for_prefill(q_TNH, k_PpKH)
            shared = replace(shared, shape=shared.shape._replace(causal=False))
        # With fixed splits in Triton the layout must not depend on this step's longest query.
        shape = Shape(K, N // K, rows, tiles.tile, window)
        max_rows = 0 if chunk is not None else shape.used_rows(max(1, longest_query))
        runs = chunk is not None and rows == 16 and not cuda
        short = kernels == "auto" and chunk is None and not OVERRIDE and queries == 1
        short = short and cuda_decode.supports_short(q_TNH, k_PpKH)
        return KernelLayout(
            shape, tiles, H, size, workers, chunk, runs=runs, max_rows=max_rows, shared=shared, cuda=cuda, short=short
        )

    @staticmethod
    def for_prefill(q_TNH: Tensor, k_PpKH: Tensor, *, window: int | None = None) -> "KernelLayout":
        """The layout of requests, or groups of requests, with many rows."""
        (_, N, H), K, size = q_TNH.shape, k_PpKH.shape[2], k_PpKH.element_size()
        # Blocks of 128 rows with heads of 256 or with float32 exceed the registers.
        rows = 128 if max(size, q_TNH.element_size()) <= 2 and H <= 128 else 64
        tiles = choose_tiles(rows, H, q_TNH.element_size(), size)
        workers = tiles.workers * multiprocessors(q_TNH.device)
        return KernelLayout(Shape(K, N // K, rows, tiles.tile, window), tiles, H, size, workers, prefill=True)

    @staticmethod
    def for_mla(
        q_TNH: Tensor,
        k_Pp1H: Tensor,
        longest_query: int,
        *,
        rank: int | None = None,
        window: int | None = None,
        chunk: int | None = None,
        kernels: Kernels = "auto",
    ) -> "KernelLayout":
        """The layout of latent attention (:mod:`~colonnade.kernels.attention.triton_mla_decode`); ``chunk`` as in
        :meth:`of`. The CUDA C++ kernel needs the latents' ``rank``, and serves up to 16 rows per request.
        """
        (_, N, H), size, queries = q_TNH.shape, k_Pp1H.element_size(), max(1, longest_query)
        rows, processors = cuda_decode.padded_rows(N, queries), multiprocessors(q_TNH.device)
        cuda = chunk is None and not OVERRIDE and kernels != "triton" and rank is not None
        if cuda and rank is not None and cuda_decode.supports_mla(q_TNH, k_Pp1H, rank, rows):
            shape = Shape(1, N, rows, cuda_decode.TOKENS, window)
            tiles = cuda_decode.mla_tiles(rows, H)
            return KernelLayout(shape, tiles, H, size, processors, kv_copies=1, cuda=True)
        if kernels == "cuda":
            raise LookupError(
                f"the kernel in CUDA C++ does not support latents of {rank} + {H - (rank or 0)} numbers of "
                f"{q_TNH.dtype} and {k_Pp1H.dtype} in blocks of {rows} rows here"
            )
        rows = min(64, max(16, triton.next_power_of_2(N * (1 if chunk else queries))))
        tiles = choose_tiles(rows, H, q_TNH.element_size(), size)
        if chunk is not None:
            chunk = -(-chunk // tiles.tile) * tiles.tile
        return KernelLayout(
            Shape(1, N, rows, tiles.tile, window), tiles, H, size, tiles.workers * processors, chunk, kv_copies=1
        )

    @property
    def teams(self) -> int:
        """Workers that share a multiprocessor, as far as plans care: those of a block of the CUDA C++ kernel."""
        return self.tiles.workers if self.cuda else 1

    @property
    def aligned(self) -> bool:
        """Whether fixed splits are at multiples of a chunk times a power of 2, as the CUDA C++ kernel needs."""
        return self.cuda and self.chunk is not None

    @property
    def used_rows(self) -> int:
        """Rows of a block that may be used."""
        return self.max_rows or self.shape.rows

    @property
    def kernel_costs(self) -> KernelCosts:
        """Shape, workers and costs, for the planner."""
        prices = costs(
            self.tiles, self.shape.rows, self.width, self.element_bytes, self.workers, self.kv_copies, cuda=self.cuda
        )
        return KernelCosts(self.shape, self.workers, prices)

    def capacity(self, requests: int, queries: int, context: int) -> Capacity:
        """Capacity of plans for ``requests`` requests with at most so many queries and keys each."""
        shape, joined = self.shape, self.shared is not None
        if self.aligned:
            return Capacity.of_aligned(requests, queries, shape, self.workers)
        return Capacity.of(requests, queries, shape, self.workers, chunk=self.chunk, context=context, joined=joined)

    def shared_capacity(self, requests: int, queries: int) -> tuple[Capacity, CascadeCapacity]:
        """Capacity of the group plans of so many requests, and of the group membership."""
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
        """A plan for one step; a cascade if ``tables`` (each request's pages) are given and it is faster."""
        few = self.kernel_costs
        if self.shared is None or tables is None:
            return split_planner.plan(
                lengths, queries, *few, chunk=self.chunk, runs=self.runs, aligned=self.aligned, max_keys=max_keys,
                ahead=ahead, teams=self.teams,
            )  # fmt: skip
        many = self.shared.kernel_costs
        return cascade.plan(tables, lengths, queries, page_tokens, few, many, max_keys=max_keys, ahead=ahead)

    def prepare(
        self,
        plan: Plan | Cascade,
        device: torch.device | str,
        capacity: Capacity | None = None,
        shared_capacity: tuple[Capacity, CascadeCapacity] | None = None,
    ) -> "DevicePlan":
        """Uploads ``plan``, in arrays of its own size or of the given capacities."""
        if isinstance(plan, Plan) and shared_capacity is None:
            room = capacity or plan.capacity
            # A plan of a given capacity may be replaced by one of more keys.
            short = self._short_keys(plan) if self.short and capacity is None else None
            return DevicePlan(upload(plan.flat(room), torch.int32, device), room, self, short_keys=short)
        assert self.shared is not None
        as_cascade = _as_cascade(plan, self.shared)
        own = replace(self, shared=None, short=False).prepare(as_cascade.own, device, capacity)
        shared_sizes, members = shared_capacity or (as_cascade.shared.capacity, as_cascade.capacity)
        shared = SharedPrefix(
            self.shared.prepare(as_cascade.shared, device, shared_sizes),
            upload(as_cascade.flat(members), torch.int32, device),
            members,
        )
        return replace(own, layout=self, shared=shared)

    def _short_keys(self, plan: Plan) -> int | None:
        """The most keys of a request if the kernel without a plan is faster."""
        ends, firsts = plan.item_rows[ITEM_END::FIELDS], plan.item_rows[ITEM_END - 1 :: FIELDS]
        keys = max(ends, default=0)
        if keys > cuda_decode.SHORT_KEYS:
            return None
        lines = len(set(zip(*(plan.item_rows[field::FIELDS] for field in range(3)), strict=True)))
        key_bytes = (sum(ends) - sum(firsts)) * self.kv_copies * self.width * self.element_bytes
        few = cuda_decode.few_keys(keys, key_bytes, lines * (self.shape.rows // 8), self.width)
        return keys if few else None


def _as_cascade(plan: Plan | Cascade, shared: KernelLayout) -> Cascade:
    """Wraps a plan as a cascade without groups."""
    if isinstance(plan, Cascade):
        return plan
    empty = Plan((0,) * (shared.workers + 1), pack_rows([]), pack_rows([]), 0, 0, 0)
    return Cascade((), plan, empty, (), (), shared.shape.kv_heads)


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """The plan and membership of groups that share a prefix, on the device."""

    ready: "DevicePlan"
    members: Tensor
    """int32, :meth:`cascade.Cascade.flat`."""
    capacity: CascadeCapacity


@dataclass(frozen=True, eq=False)
class DevicePlan:
    """A plan on the device, with the layout that kernels are compiled for."""

    flat: Tensor
    """int32, :meth:`split_plan.Plan.flat`."""
    capacity: Capacity
    layout: KernelLayout
    shared: SharedPrefix | None = None
    short_keys: int | None = None
    """The most keys of a request if the kernel without a plan may run; None if not."""

    @property
    def has_merges(self) -> bool:
        """Whether a merge is launched; always in a graph, since another step's plan may need it."""
        return self.capacity.merges > 0

    @property
    def overlaps_merge(self) -> bool:
        """Whether the merge starts before the reads end (programmatic dependent launch); never in the interpreter."""
        return self.flat.is_cuda and self.layout.tiles.overlap and self.has_merges and not self.layout.prefill

    @cached_property
    def mailboxes(self) -> Tensor:
        """Buffers through which blocks of :mod:`cuda_decode` exchange states; all bits are 1 between launches."""
        shape = self.layout.shape
        count = 2 * max(1, self.capacity.slots) * shape.rows * self.layout.width
        return torch.full((count,), -1, dtype=torch.int32, device=self.flat.device)

    def mailboxes_for_launch(self) -> Tensor:
        """:attr:`mailboxes`, or temporary ones if a graph capture would create them, since that graph may never run."""
        if "mailboxes" not in vars(self) and torch.cuda.is_current_stream_capturing():
            return replace(self).mailboxes
        return self.mailboxes

    @property
    def pdl_options(self) -> dict[str, Any]:
        """Launch options of a kernel that starts before its predecessor ends."""
        return {"launch_pdl": True} if self.overlaps_merge else {}

    def update(self, plan: Plan | Cascade) -> None:
        """Replaces the plan in place by another step's."""
        assert self.short_keys is None, "prepared for its own lengths only; prepare it with a capacity"
        if self.shared is None:
            assert isinstance(plan, Plan), "a cascade instead of a plan without groups"
            own = plan
        else:
            assert self.layout.shared is not None
            as_cascade = _as_cascade(plan, self.layout.shared)
            own = as_cascade.own
            self.shared.ready.update(as_cascade.shared)
            upload_into(self.shared.members, as_cascade.flat(self.shared.capacity))
        upload_into(self.flat, own.flat(self.capacity))

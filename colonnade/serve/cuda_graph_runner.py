"""Decode steps of fixed shape, which a GPU replays as a graph: one launch instead of hundreds.

A graph (CUDA's) is a recording of kernels with their arguments, so what changes from step to step must lie where the
recording looks for it. A step that decodes one token for each of R requests is padded to the next of a few sizes B, and
told through buffers that stay: tokens, positions, slots, lengths, tables of pages, the split plans of attention. A row
of no request (:mod:`~colonnade.serve.batch_slots`) decodes token 0 into a page that is nobody's. Graphs are recorded
when a size is first asked for; sampling, which differs from request to request, follows outside. On a CPU the same
buffers are read without a graph, which is how tests see all of this but the recording.

A plan of splits is made for lengths as they will be a few steps on (:data:`AHEAD`), and serves until then or until
a place in the batch goes to a longer request. It serves a shorter one, as of keys that are not there nothing is read;
not under a window, where plans leave out what lies before it, and not with fixed cuts, whose bits would differ. Where a
plan reads a prefix once for all who share it (:mod:`~colonnade.kernels.attention.cascade`), which takes a kernel more,
another recording of that size is replayed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colonnade.kernels.attention.cascade import Cascade
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import Plan
from colonnade.kernels.device import upload, upload_into
from colonnade.kernels.registry import choose
from colonnade.model import KVCache, Paged, Stream, Transformer
from colonnade.model.head import Shares
from colonnade.model.sharded_kv_cache import ShardedPaged
from colonnade.parallel.cuda_graphs import capture
from colonnade.serve.batch_slots import padded
from colonnade.serve.cache_shard import CacheShard
from colonnade.serve.scheduler import Work

AHEAD = 16
"""Steps of decoding for which a plan of splits is good."""


class CudaGraphRunner:
    """Runs works in which each request decodes one token."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        most: int,
        context: int,
        *,
        share: bool = True,
        kernels: str | None = None,
    ):
        """For at most ``most`` requests of ``context`` tokens; the cache's last page is nobody's."""
        self.model, self.cache, self.most, self.context, self.share = model, cache, most, context, share
        self.kernels = kernels or ("triton" if cache.k[0].is_cuda else "auto")
        self.shared_keys = self.spared_keys = 0
        """:attr:`Cascade.keys`, of all steps so far."""
        self._sizes: dict[int, _Size] = {}
        self._pool = torch.cuda.graph_pool_handle() if cache.k[0].is_cuda else None

    def take(self, work: Work) -> bool:
        """Whether ``work`` is such a one."""
        return all(len(piece.tokens) == 1 and piece.draw is not None for piece in work.slices)

    def __call__(self, work: Work, last_R: Tensor) -> Tensor:
        """logits_Rv, this rank's share of the vocabulary; overwritten by the next call."""
        places = self._places(work)
        size = padded(max(places) + 1, self.most)
        if size not in self._sizes:
            self._sizes[size] = _Size(self.model, self.cache, size, self.context, self.share, self.kernels)
        logits_Bv = self._sizes[size](work, places, last_R, self._pool)
        once, spared = self._sizes[size].keys
        self.shared_keys, self.spared_keys = self.shared_keys + once, self.spared_keys + spared
        if places == list(range(len(places))):
            return logits_Bv[: len(places)]
        return logits_Bv.index_select(0, upload(places, torch.int64, logits_Bv.device))

    def _places(self, work: Work) -> list[int]:
        """The row of each slice: its own, or where none were dealt out, or ranks share a cache, one after another."""
        places = [piece.place for piece in work.slices]
        dealt = self.model.axes.cp.size == 1 and min(places) >= 0
        return places if dealt else list(range(len(places)))


@dataclass(frozen=True)
class _Recording:
    """A graph, the plans that it reads, and where it leaves its logits."""

    table: PageTable
    replay: Callable[[], None]
    logits: Tensor


@dataclass(frozen=True)
class Planned:
    """What the plans at hand were made for."""

    lengths: list[int]
    shared: dict[int, Sequence[int]]
    """Of each request that reads a prefix with others, the pages of it."""
    keys: tuple[int, int] = (0, 0)
    """:attr:`Cascade.keys` in those layers that save most: layers with a window share fewer."""
    shorter: bool = False
    """Whether they are good for shorter requests, too."""

    @staticmethod
    def of(
        plans: Iterable[Plan | Cascade],
        lengths: list[int],
        tables: Sequence[Sequence[int]],
        page_tokens: int,
        *,
        shorter: bool = False,
    ) -> "Planned":
        """Of ``plans`` for requests of these lengths and pages."""
        ends: dict[int, int] = {}
        cascades = [plan for plan in plans if isinstance(plan, Cascade)]
        for group in (group for each in cascades for group in each.groups):
            ends |= {r: max(group.end, ends.get(r, 0)) for r in group.requests}
        shared = {r: tables[r][: -(-end // page_tokens)] for r, end in ends.items()}
        keys = max((each.keys for each in cascades), key=lambda keys: keys[1], default=(0, 0))
        return Planned(list(lengths), shared, keys, shorter)

    @property
    def shares(self) -> bool:
        """Whether any prefix is read once for several."""
        return bool(self.shared)

    def holds(self, lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> bool:
        """Whether plans are good for these too: no length has grown more than a little, and prefixes are the same.

        Not all grow alike: what pads a step does not, nor does a request whose last page another rank has. Another
        request in the same place may be as long, and have other pages.
        """
        grown = [n - p for n, p in zip(lengths, self.lengths, strict=True)]
        near = max(grown) <= AHEAD and (self.shorter or min(grown) >= 0)
        return near and all(grown[r] >= 0 and tables[r][: len(x)] == x for r, x in self.shared.items())


class _Size:
    """The buffers of one size, and the graphs that read them."""

    def __init__(self, model: Transformer, cache: KVCache, size: int, context: int, share: bool, kernels: str):
        self.model, self.cache, self.size, self.share, self.kernels = model, cache, size, share, kernels
        self.device = cache.k[0].device
        widest = -(-context // cache.page_tokens)
        self.scratch = cache.pages - 1
        self.held = CacheShard.of(model, cache)
        self.numbers = torch.zeros(3, size, dtype=torch.int64, device=self.device)
        self.lengths = torch.ones(size, dtype=torch.int32, device=self.device)
        self.pages = torch.full((size, widest), self.scratch, dtype=torch.int32, device=self.device)
        self.head = Shares()
        self.cu_queries = torch.arange(size + 1, dtype=torch.int32, device=self.device)
        self.context = context
        self._tables: list[Sequence[int]] = [(self.scratch,)] * size
        """What is in :attr:`pages`."""
        self._rows = torch.full((size, widest), self.scratch, dtype=torch.int32)
        """The same on the host, of which a step changes a few rows."""
        self._recorded: dict[bool, _Recording] = {}
        """Without and with prefixes that are read once."""
        self._planned: Planned | None = None

    def __call__(self, work: Work, places: Sequence[int], last_R: Tensor, pool: Any) -> Tensor:
        lengths = self._tell(work, places, last_R)
        if self.device.type == "cpu":
            return self._run(self._attend(max(lengths), work))
        tables = self._tables
        if not self._recorded:
            self._record(lengths, work, pool, shares=False)
        shares = self._plan(lengths, tables, work, pool)
        recording = self._recorded[shares]
        recording.replay()
        return recording.logits

    @property
    def keys(self) -> tuple[int, int]:
        """:attr:`Cascade.keys` of the last step."""
        return self._planned.keys if self._planned else (0, 0)

    def _tell(self, work: Work, places: Sequence[int], last_R: Tensor) -> list[int]:
        """Write ``work`` into the buffers; the lengths of all rows."""
        scratch = self.scratch * self.cache.page_tokens
        tokens, starts, slots, lengths = ([x] * self.size for x in (0, 0, scratch, 1))
        tables: list[Sequence[int]] = [(self.scratch,)] * self.size
        for place, piece in zip(places, work.slices, strict=True):
            tokens[place], starts[place], lengths[place] = piece.tokens[0], piece.start, self.held.keys(piece)
            (slots[place],), tables[place] = self.held.slots(piece), self.held.pages(piece)
        upload_into(self.numbers, [tokens, starts, slots])
        upload_into(self.lengths, lengths)
        changed = [row for row, table in enumerate(tables) if table != self._tables[row]]
        if changed:
            for row in changed:
                self._rows[row, : len(tables[row])] = torch.tensor(tables[row], dtype=torch.int32)
                self._rows[row, len(tables[row]) :] = self.scratch
            widest = max(*map(len, tables), *(len(self._tables[row]) for row in changed))
            upload_into(self.pages[:, :widest], self._rows[:, :widest])
            self._tables = tables
        if min(tokens) < 0:
            choose("write_next_tokens", self.device.type, torch.int64)(self.numbers[0], last_R)
        return lengths

    def _attend(self, longest: int, work: Work) -> Paged | ShardedPaged:
        (_, positions, slots), kernels = self.numbers, self.kernels
        attend = Paged(
            self.cache, self.pages, slots, self.cu_queries, self.lengths, 1, longest, kernels, share=self.share
        )
        return attend if self.held.whole else self.held.split(work.slices, attend.table, slots, positions, kernels)

    def _run(self, attend: Paged | ShardedPaged) -> Tensor:
        return self.model(Stream(self.numbers[0], self.numbers[1]), attend, self.head)

    # -- on a GPU --------------------------------------------------------------------------------------------------

    def _record(self, lengths: list[int], work: Work, pool: Any, *, shares: bool) -> None:
        """Run once as it is, which compiles kernels and shows what plans there must be; then record."""
        attend = self._attend(self.context, work)
        prepared = attend.table.plan_cache
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(attend)
            for key, (ready,) in list(prepared.items()):
                layout = ready.layout
                capacity = layout.capacity(self.size, 1, self.context)
                theirs = layout.shared_capacity(self.size, 1) if shares and layout.shared else None
                plan = layout.plan(lengths, [1] * self.size, max_keys=self._room)
                prepared[key] = (layout.prepare(plan, self.device, capacity, theirs),)
            self._run(attend)  # what a graph calls must have run before
        torch.cuda.current_stream().wait_stream(stream)
        with capture(pool) as graph:
            logits = self._run(attend)
        self._recorded[shares] = _Recording(attend.table, graph.replay, logits)
        self._planned = None

    def _plan(self, lengths: list[int], tables: Sequence[Sequence[int]], work: Work, pool: Any) -> bool:
        """Plans for these lengths, where those at hand are not good for them; whether prefixes are read once."""
        if self._planned is None or not self._planned.holds(lengths, tables):
            page, new = self.cache.page_tokens, [1] * self.size
            how = {"max_keys": self._room, "ahead": AHEAD, "tables": tables, "page_tokens": page}
            prepared = self._recorded[False].table.plan_cache
            plans = {key: ready.layout.plan(lengths, new, **how) for key, (ready,) in prepared.items()}
            layouts = [ready.layout for (ready,) in prepared.values()]
            shorter = all(each.shape.window is None and each.chunk is None for each in layouts)
            planned = Planned.of(plans.values(), lengths, tables, page, shorter=shorter)
            if planned.shares not in self._recorded:
                self._record(lengths, work, pool, shares=True)
            for key, (ready,) in self._recorded[planned.shares].table.plan_cache.items():
                ready.update(plans[key])
            self._planned = planned
        return self._planned.shares

    @property
    def _room(self) -> int:
        """Keys that the tables of pages have place for."""
        return self.pages.shape[1] * self.cache.page_tokens

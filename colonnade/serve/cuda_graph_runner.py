"""Replays decode steps as CUDA graphs: one launch instead of hundreds.

A CUDA graph is a recording of kernels with their arguments, so whatever changes from step to step must be in buffers at
fixed addresses: tokens, positions, slots, lengths, page tables, the split plans of attention. A step that decodes one
token for each of R requests is padded to one of a few batch sizes (:func:`batch_rows.padded_batch_size`). A row without
a request (:class:`batch_rows.BatchRows`) decodes token 0 into the scratch page. A size is captured when it is first
needed; sampling, which differs between requests, runs after the graph. On a CPU the same buffers are used, and the
first step of a size is recorded (:mod:`~colonnade.serve.step_recorder`) where C++ kernels compute all of it.

A split plan is made for lengths a few steps ahead (:data:`PLAN_AHEAD_STEPS`), and used until they are reached or a row
goes to a longer request. It is also valid for a shorter request, since missing keys are never read; except under a
window, where the plan skips the keys before it, and with batch-invariant splits, whose bits would differ. If a plan
reads a shared prefix once for all its requests (:mod:`~colonnade.kernels.attention.cascade`), which takes one kernel
more, a second graph of that size is captured and replayed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from colonnade.kernels.attention.cascade import Cascade
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import Plan
from colonnade.kernels.cpu.calls import Recording
from colonnade.kernels.device import upload, upload_into
from colonnade.kernels.registry import choose
from colonnade.model import EncoderDecoderAttend, KVCache, Paged, PagedMemory, Stream, Transformer, fused_block
from colonnade.model.context_parallel import ShardedPaged
from colonnade.model.output_heads import LocalVocabRows
from colonnade.parallel.cuda_graphs import capture
from colonnade.serve.batch_rows import padded_batch_size
from colonnade.serve.graph_sources import SourceTables
from colonnade.serve.model_inputs import CacheShard
from colonnade.serve.step_recorder import record
from colonnade.serve.work import Work

PLAN_AHEAD_STEPS = 16
"""Decode steps for which a split plan stays valid."""


class CudaGraphRunner:
    """Runs works in which every request decodes one token."""

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
        """For at most ``most`` requests of up to ``context`` tokens; the cache's last page is the scratch page."""
        self.model, self.cache, self.most, self.context, self.share = model, cache, most, context, share
        self.kernels = kernels or ("cuda" if cache.k[0].is_cuda else fused_block.enable(model))
        self.shared_keys = self.spared_keys = 0
        """Sums of :attr:`Cascade.keys` over all steps."""
        self._batches: dict[int, _PaddedBatch] = {}
        """By padded batch size."""
        self.pool = torch.cuda.graph_pool_handle() if cache.k[0].is_cuda else None

    def accepts(self, work: Work) -> bool:
        """Whether every slice of ``work`` decodes one token and encodes no source, and there are not too many."""
        return len(work.slices) <= self.most and all(
            len(piece.tokens) == 1 and piece.sample_args is not None and not piece.source for piece in work.slices
        )

    def __call__(self, work: Work, last_R: Tensor) -> Tensor:
        """logits_Rv, this rank's vocabulary shard; overwritten by the next call."""
        rows = self._batch_rows(work)
        size = padded_batch_size(max(rows) + 1, self.most)
        if size not in self._batches:
            self._batches[size] = _PaddedBatch(self, size)
        batch = self._batches[size]
        logits_Bv = batch(work, rows, last_R)
        shared, spared = batch.cascade_keys
        self.shared_keys, self.spared_keys = self.shared_keys + shared, self.spared_keys + spared
        if rows == list(range(len(rows))):
            return logits_Bv[: len(rows)]
        return logits_Bv.index_select(0, upload(rows, torch.int64, logits_Bv.device))

    def clear(self) -> None:
        """Drop everything recorded, which contains the cache's addresses."""
        self._batches.clear()
        if self.pool is not None:
            self.pool = torch.cuda.graph_pool_handle()  # that of deleted graphs is freed with them

    def clear_plans(self) -> None:
        """Make new split plans in the next step of each size: sums are then cut as in a new engine."""
        for batch in self._batches.values():
            batch.planned = None

    def _batch_rows(self, work: Work) -> list[int]:
        """The row of each slice: its request's own, or consecutive ones if none are assigned or ranks share a cache."""
        rows = [piece.batch_row for piece in work.slices]
        return rows if self.model.axes.cp.size == 1 and min(rows) >= 0 else list(range(len(rows)))


@dataclass(frozen=True)
class _CapturedGraph:
    """A graph, the page tables with the plans that it reads, and its output."""

    table: PageTable
    source_table: PageTable | None
    """Of the sources of an encoder–decoder."""
    replay: Callable[[], None]
    logits: Tensor


@dataclass(frozen=True)
class PlannedBatch:
    """The batch for which the current split plans were made."""

    lengths: list[int]
    shared_pages: dict[int, Sequence[int]]
    """For each row that reads a shared prefix, the pages of that prefix."""
    cascade_keys: tuple[int, int] = (0, 0)
    """:attr:`Cascade.keys` of the layers that share most; layers with a window share fewer."""
    allow_shorter: bool = False
    """Whether the plans are also valid for shorter requests."""

    @staticmethod
    def of(
        plans: Iterable[Plan | Cascade],
        lengths: list[int],
        tables: Sequence[Sequence[int]],
        page_tokens: int,
        *,
        allow_shorter: bool = False,
    ) -> "PlannedBatch":
        """The batch of ``plans`` that were made for these lengths and page tables."""
        ends: dict[int, int] = {}
        cascades = [plan for plan in plans if isinstance(plan, Cascade)]
        for group in (group for cascade in cascades for group in cascade.groups):
            ends |= {r: max(group.end, ends.get(r, 0)) for r in group.requests}
        shared_pages = {r: tables[r][: -(-end // page_tokens)] for r, end in ends.items()}
        keys = max((cascade.keys for cascade in cascades), key=lambda keys: keys[1], default=(0, 0))
        return PlannedBatch(list(lengths), shared_pages, keys, allow_shorter)

    @property
    def shares_prefix(self) -> bool:
        """Whether any prefix is read once for several requests."""
        return bool(self.shared_pages)

    def is_valid_for(self, lengths: Sequence[int], tables: Sequence[Sequence[int]]) -> bool:
        """Whether the plans fit these too: no length has grown by more than a few tokens, shared pages are equal.

        Lengths do not all grow equally: padding does not grow, nor does a request whose last page is on another rank.
        Another request in the same row may have the same length and other pages.
        """
        grown = [new - old for new, old in zip(lengths, self.lengths, strict=True)]
        near = max(grown) <= PLAN_AHEAD_STEPS and (self.allow_shorter or min(grown) >= 0)
        shared = self.shared_pages.items()
        return near and all(grown[r] >= 0 and tables[r][: len(pages)] == pages for r, pages in shared)


class _PaddedBatch:
    """The input buffers of one batch size, and the graphs that read them."""

    def __init__(self, runner: CudaGraphRunner, size: int):
        self.runner, self.cache, self.size, self.device = runner, runner.cache, size, runner.cache.k[0].device
        self.shard = CacheShard.of(runner.model, self.cache)
        self.scratch = self.shard.scratch_page
        widest = -(-runner.context // self.cache.page_tokens)
        self.token_position_slot = torch.zeros(3, size, dtype=torch.int64, device=self.device)
        self.tokens, self.positions, self.slots = self.token_position_slot
        self.lengths = torch.ones(size, dtype=torch.int32, device=self.device)
        self.pages = torch.full((size, widest), self.scratch, dtype=torch.int32, device=self.device)
        self.head = LocalVocabRows()
        self.cu_queries = torch.arange(size + 1, dtype=torch.int32, device=self.device)
        self._tables: list[Sequence[int]] = [(self.scratch,)] * size
        """The page tables in :attr:`pages`."""
        self._host_pages = torch.full((size, widest), self.scratch, dtype=torch.int32)
        """A host copy of :attr:`pages`; a step changes a few of its rows."""
        encoder = runner.model.config.encoder
        self.sources = None if encoder is None else SourceTables(self.cache, size, encoder.context, self.scratch)
        self._graphs: dict[bool, _CapturedGraph] = {}
        """Without and with shared prefixes."""
        self.planned: PlannedBatch | None = None
        """The batch of the current split plans; None: new ones are needed."""
        # Collectives are not torch functions, so the recorder would not see them.
        self._records = runner.kernels == "native" and self.shard.is_whole and runner.model.axes.tp.size == 1
        """Whether the next step on a CPU is to be recorded."""
        self._recorded: tuple[Tensor, Recording] | None = None

    def __call__(self, work: Work, rows: Sequence[int], last_R: Tensor) -> Tensor:
        lengths = self._write_inputs(work, rows, last_R)
        if self.device.type == "cpu":
            return self._run_on_cpu(lengths, work)
        if not self._graphs:
            self._capture(lengths, work, shares_prefix=False)
        graph = self._graphs[self._update_plans(lengths, work)]
        graph.replay()
        return graph.logits

    @property
    def cascade_keys(self) -> tuple[int, int]:
        """:attr:`Cascade.keys` of the last step."""
        return self.planned.cascade_keys if self.planned else (0, 0)

    def _write_inputs(self, work: Work, rows: Sequence[int], last_R: Tensor) -> list[int]:
        """Write ``work`` into the buffers; returns the lengths of all rows."""
        scratch_slot = self.scratch * self.cache.page_tokens
        tokens, starts, slots, lengths = ([x] * self.size for x in (0, 0, scratch_slot, 1))
        tables: list[Sequence[int]] = [(self.scratch,)] * self.size
        for row, piece in zip(rows, work.slices, strict=True):
            tokens[row], starts[row] = piece.tokens[0], piece.start
            slots[row], lengths[row], tables[row] = self.shard.decode_row(piece)
        upload_into(self.token_position_slot, [tokens, starts, slots])
        upload_into(self.lengths, lengths)
        changed = [row for row, table in enumerate(tables) if table != self._tables[row]]
        if changed:
            for row in changed:
                self._host_pages[row, : len(tables[row])] = torch.tensor(tables[row], dtype=torch.int32)
                self._host_pages[row, len(tables[row]) :] = self.scratch
            widest = max(*map(len, tables), *(len(self._tables[row]) for row in changed))
            upload_into(self.pages[:, :widest], self._host_pages[:, :widest])
            self._tables = tables
        if self.sources is not None:
            self.sources.write(work, rows)
        if min(tokens) < 0:
            choose("write_next_tokens", self.device.type, torch.int64)(self.tokens, last_R)
        return lengths

    def _attend(self, longest: int, work: Work) -> Paged | ShardedPaged | EncoderDecoderAttend:
        slots, positions, kernels, share = self.slots, self.positions, self.runner.kernels, self.runner.share
        attend = Paged(self.cache, self.pages, slots, self.cu_queries, self.lengths, 1, longest, kernels, share=share)
        if self.sources is not None:
            return EncoderDecoderAttend(attend, None, self.sources.memory(kernels))
        if self.shard.is_whole:
            return attend
        # Each rank's share has one implementation, which chooses between Triton and CUDA C++ itself.
        kernels = "auto" if kernels == "cuda" else kernels
        return self.shard.sharded_attend(work.slices, attend.table, slots, positions, kernels)

    def _run(self, attend: Paged | ShardedPaged | EncoderDecoderAttend) -> Tensor:
        return self.runner.model(Stream(self.tokens, self.positions), attend, self.head)

    def _run_on_cpu(self, lengths: list[int], work: Work) -> Tensor:
        if self._recorded is not None:
            logits, recording = self._recorded
            recording.replay()
            return logits
        attend = self._attend(max(lengths), work)
        if not self._records:
            return self._run(attend)
        logits, recording = record(lambda: self._run(attend))
        self._records = False
        if recording is not None:
            self._recorded = logits, recording
        return logits

    # -- on a GPU --------------------------------------------------------------------------------------------------

    def _capture(self, lengths: list[int], work: Work, *, shares_prefix: bool) -> None:
        """Capture a graph, after an eager run that compiles the kernels and shows which plans they need."""
        attend = self._attend(self.runner.context, work)
        own, source_table = attend, None
        if isinstance(attend, EncoderDecoderAttend):
            assert isinstance(attend.own, Paged)
            assert isinstance(attend.memory, PagedMemory)
            own, source_table = attend.own, attend.memory.table
        assert isinstance(own, Paged | ShardedPaged)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._run(attend)
            self._prepare(own.table, lengths, self.runner.context, shares_prefix=shares_prefix)
            if source_table is not None:
                assert self.sources is not None
                self._prepare(source_table, self.sources.lengths, self.sources.context, shares_prefix=False)
            self._run(attend)  # whatever a graph calls must have run before
        torch.cuda.current_stream().wait_stream(stream)
        with capture(self.runner.pool) as graph:
            logits = self._run(attend)
        self._graphs[shares_prefix] = _CapturedGraph(own.table, source_table, graph.replay, logits)
        self.planned = None

    def _prepare(self, table: PageTable, lengths: Sequence[int], context: int, *, shares_prefix: bool) -> None:
        """Replace the plans of ``table`` by ones in arrays that suffice for any batch of this size."""
        most = table.pages_RP.shape[1] * self.cache.page_tokens
        for key, (ready,) in list(table.plan_cache.items()):
            layout = ready.layout
            capacity = layout.capacity(self.size, 1, context)
            shared = layout.shared_capacity(self.size, 1) if shares_prefix and layout.shared else None
            plan = layout.plan(lengths, [1] * self.size, max_keys=most)
            table.plan_cache[key] = (layout.prepare(plan, self.device, capacity, shared),)

    def _update_plans(self, lengths: list[int], work: Work) -> bool:
        """Make new split plans unless the current ones are valid; returns whether they share a prefix."""
        if self.planned is None or not self.planned.is_valid_for(lengths, self._tables):
            page_tokens, new = self.cache.page_tokens, [1] * self.size
            options = {
                "max_keys": self._max_keys, "ahead": PLAN_AHEAD_STEPS, "tables": self._tables,
                "page_tokens": page_tokens,
            }  # fmt: skip
            prepared = self._graphs[False].table.plan_cache
            layouts = {key: ready.layout for key, (ready,) in prepared.items()}
            plans = {key: layout.plan(lengths, new, **options) for key, layout in layouts.items()}
            shorter = all(each.shape.window is None and each.chunk is None for each in layouts.values())
            planned = PlannedBatch.of(plans.values(), lengths, self._tables, page_tokens, allow_shorter=shorter)
            if planned.shares_prefix not in self._graphs:
                self._capture(lengths, work, shares_prefix=True)
            for key, (ready,) in self._graphs[planned.shares_prefix].table.plan_cache.items():
                ready.update(plans[key])
            self.planned = planned
        source_table = self._graphs[self.planned.shares_prefix].source_table
        if self.sources is not None and source_table is not None:
            self.sources.update_plans(source_table)
        return self.planned.shares_prefix

    @property
    def _max_keys(self) -> int:
        """Keys that a row of the page table can hold."""
        return self.pages.shape[1] * self.cache.page_tokens

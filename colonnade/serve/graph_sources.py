"""The sources of a padded decode batch of an encoder–decoder: page tables at fixed addresses for CUDA graphs.

A source never grows, so its split plan stays valid while every row has a source as long as the planned one, or shorter.
A row without a request reads one key of the scratch page.
"""

from collections.abc import Sequence

import torch

from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.device import upload_into
from colonnade.model import KVCache, PagedMemory
from colonnade.serve.work import Work


class SourceTables:
    """Pages and lengths of the sources of ``size`` rows, each of at most ``context`` tokens."""

    def __init__(self, cache: KVCache, size: int, context: int, scratch: int):
        self.cache, self.size, self.context, self.scratch = cache, size, context, scratch
        device, self.widest = cache.k[0].device, -(-context // cache.page_tokens)
        self._pages = torch.full((size, self.widest), scratch, dtype=torch.int32, device=device)
        self._lengths = torch.ones(size, dtype=torch.int32, device=device)
        self._cu_queries = torch.arange(size + 1, dtype=torch.int32, device=device)
        self._slots = torch.empty(0, dtype=torch.int64, device=device)
        self._host_pages = torch.full((size, self.widest), scratch, dtype=torch.int32)
        self._tables: list[Sequence[int]] = [(scratch,)] * size
        self.lengths = [1] * size
        """Of each row's source."""
        self._planned: dict[int, list[int]] = {}
        """The lengths for which the plans of each page table were made, by the table's identity."""

    def write(self, work: Work, rows: Sequence[int]) -> None:
        """Write the sources of ``work`` into the buffers; only changed rows are uploaded."""
        tables: list[Sequence[int]] = [(self.scratch,)] * self.size
        lengths = [1] * self.size
        for row, piece in zip(rows, work.slices, strict=True):
            tables[row], lengths[row] = piece.source_pages, piece.source_length
        if lengths != self.lengths:
            upload_into(self._lengths, lengths)
            self.lengths = lengths
        if changed := [row for row, table in enumerate(tables) if table != self._tables[row]]:
            for row in changed:
                self._host_pages[row] = self.scratch
                self._host_pages[row, : len(tables[row])] = torch.tensor(tables[row], dtype=torch.int32)
            upload_into(self._pages, self._host_pages)
            self._tables = tables

    def memory(self, kernels: str) -> PagedMemory:
        """Cross attention to these sources, with its own page table."""
        known = ([1] * self.size, self.lengths)
        table = PageTable(
            self._pages, self._cu_queries, self._lengths, self.cache.page_tokens, 1, self.context, known, share=False
        )
        return PagedMemory(self.cache, self._slots, table, kernels)

    def update_plans(self, table: PageTable) -> None:
        """Make new split plans for ``table`` if any row has a longer source than the one that was planned."""
        planned = self._planned.get(id(table))
        if planned is not None and all(new <= old for new, old in zip(self.lengths, planned, strict=True)):
            return
        for (ready,) in table.plan_cache.values():
            most = self.widest * self.cache.page_tokens
            ready.update(ready.layout.plan(self.lengths, [1] * self.size, max_keys=most))
        self._planned[id(table)] = list(self.lengths)

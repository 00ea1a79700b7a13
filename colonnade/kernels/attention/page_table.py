"""Page tables: which pages hold each request's keys, and which new tokens belong to it.

One table per step serves all layers. Kernels on the device read its tensors. SDPA, which is called from Python, uses
:attr:`PageTable.groups`, computed once per step: requests whose attention is one call. Requests with one new token
(decodes) share a group if their page counts have the same bit length, which limits padding to their own size; a request
with several new tokens forms its own group.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.kernels.attention.split_plan import check_lengths


@dataclass(frozen=True, eq=False)
class Group:
    """B requests with the same number of new tokens, for one SDPA call."""

    rows: Tensor | slice
    """Their new tokens in the stream."""
    pages: Tensor | slice
    """Their pages, B equal parts; a slice if they are one request's contiguous pages."""
    lengths_B: Tensor
    """Their lengths, including the new tokens."""
    longest: int
    """The longest of these."""
    unused: Tensor | None
    """Rows of the gathered pages, below ``longest``, that are padding; None if there are none."""

    def gather(self, x_PpKH: Tensor) -> Tensor:
        """x_BSKH of these requests, S being the longest; a copy unless pages are contiguous.

        ``x_PpKH`` may also be any other per-token tensor.
        """
        if isinstance(self.pages, slice):
            return x_PpKH[self.pages].flatten(0, 1)[None, : self.longest]
        if x_PpKH.dtype == torch.float8_e4m3fn:  # float8's zero is byte 0; not every torch can index float8
            return self.gather(x_PpKH.view(torch.uint8)).view(x_PpKH.dtype)
        # index_select is five times as fast as indexing here.
        x_PpKH = x_PpKH.index_select(0, self.pages)
        if self.unused is not None:
            # A stale value with a weight of zero must not give NaN.
            x_PpKH.flatten(0, 1).index_fill_(0, self.unused, 0)
        return x_PpKH.flatten(0, 1).unflatten(0, (len(self.lengths_B), -1))[:, : self.longest]


@dataclass(frozen=True, eq=False)
class PageTable:
    """New tokens, lengths and pages of each request.

    Request r's new tokens are rows ``cu_queries[r]:cu_queries[r + 1]`` of the stream, the last of its ``lengths_R[r]``
    positions; ``pages_RP[r]`` lists its pages of ``page_tokens`` tokens in order.
    """

    pages_RP: Tensor
    cu_queries: Tensor
    lengths_R: Tensor
    page_tokens: int
    longest_query: int
    longest_context: int
    known_lengths: tuple[list[int], list[int]] | None = None
    """:attr:`host_lengths`, if the caller has them without a device synchronisation."""
    known_pages: Sequence[Sequence[int]] | None = None
    """The same for :attr:`host_pages`."""
    share: bool = True
    """Whether shared prefixes may be read once for several requests, which changes the rounding."""

    @property
    def max_keys(self) -> int:
        """Keys that fit a request's pages; raises ConfigError if a request has no row of pages."""
        if len(self.pages_RP) != len(self.lengths_R):
            raise ConfigError(
                f"{len(self.pages_RP)} rows of pages for {len(self.lengths_R)} requests; pass one row per request"
            )
        return self.pages_RP.shape[1] * self.page_tokens

    @cached_property
    def host_lengths(self) -> tuple[list[int], list[int]]:
        """(new tokens, length) of each request; synchronises with the device if they are not known."""
        if self.known_lengths is not None:
            return self.known_lengths
        ends = self.cu_queries.tolist()
        return [b - a for a, b in itertools.pairwise(ends)], self.lengths_R.tolist()

    @cached_property
    def host_pages(self) -> Sequence[Sequence[int]]:
        """Each request's pages, possibly padded; synchronises with the device if they are not known."""
        return self.pages_RP.tolist() if self.known_pages is None else self.known_pages

    @cached_property
    def plan_cache(self) -> dict[Any, Any]:
        """Data that kernels prepared for this table, such as plans, for use by later layers."""
        return {}

    def check(self, cache_pages: int) -> None:
        """Validates lengths and pages, for kernels without bounds checks.

        Raises CapacityError if a request is longer than its row of pages, and ConfigError if a length is negative or a
        page is not below ``cache_pages`` (not on a GPU with :attr:`known_pages`).
        """
        if cache_pages in self._checked:
            return
        _, lengths = self.host_lengths
        if min(lengths, default=0) < 0:
            raise ConfigError(f"a number below 0 among lengths {lengths}; use counts of 0 or more")
        check_lengths(lengths, self.max_keys)
        # Known pages come from the allocator, and checking them on the device would block.
        if self.pages_RP.is_cuda and self.known_pages is not None:
            return
        if self.pages_RP.numel() and not 0 <= int(self.pages_RP.min()) <= int(self.pages_RP.max()) < cache_pages:
            for r, length in enumerate(lengths):
                for page in self.host_pages[r][: self._pages(length)]:
                    if not 0 <= page < cache_pages:
                        raise ConfigError(
                            f"request {r} has page {page} of a cache of {cache_pages}; use page ids below that"
                        )
        self._checked.add(cache_pages)

    @cached_property
    def _checked(self) -> set[int]:
        """Cache sizes for which the table was validated: once for all layers."""
        return set()

    @cached_property
    def groups(self) -> list[Group]:
        """SDPA groups of all requests with new tokens and keys; synchronises with the device to compare pages."""
        new_R, lengths = self.host_lengths
        ends = [0, *itertools.accumulate(new_R)]
        groups: dict[tuple[str, int], list[int]] = {}
        for r, length in enumerate(lengths):
            new = new_R[r] if length else 0  # requests without keys are in no group
            if new == 1:
                groups.setdefault(("decodes", self._pages(length).bit_length()), []).append(r)
            elif new:
                groups["alone", r] = [r]
        return [self._group(requests, ends, lengths) for requests in groups.values()]

    def _pages(self, length: int) -> int:
        return -(-length // self.page_tokens)

    def _group(self, requests: list[int], ends: list[int], lengths: list[int]) -> Group:
        first, last = requests[0], requests[-1]
        longest = max(lengths[r] for r in requests)
        contiguous = last - first + 1 == len(requests)
        index = slice(first, last + 1) if contiguous else torch.tensor(requests, device=self.pages_RP.device)
        rows = slice(ends[first], ends[last + 1]) if contiguous else self.cu_queries[index]
        pages_BP, lengths_B = self.pages_RP[index, : self._pages(longest)], self.lengths_R[index]
        if len(requests) == 1:
            table = pages_BP[0].tolist()
            if table == list(range(table[0], table[0] + len(table))):
                # The usual case of a single conversation: nothing needs to be copied.
                return Group(rows, slice(table[0], table[0] + len(table)), lengths_B, longest, None)
        unused = None
        if any(lengths[r] < longest for r in requests):
            position_S = torch.arange(pages_BP.shape[1] * self.page_tokens, device=self.pages_RP.device)
            unused_BS = (position_S >= lengths_B[:, None]) & (position_S < longest)
            unused = unused_BS.flatten().nonzero().squeeze(1)
        return Group(rows, pages_BP.flatten(), lengths_B, longest, unused)

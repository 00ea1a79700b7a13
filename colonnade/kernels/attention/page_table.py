"""Which pages hold which request's keys, and which new tokens are whose: one table a step, the same for all layers.

A kernel that runs on the device reads the tensors. One that needs Python's help, such as SDPA, reads
:attr:`PageTable.groups`, which is worked out once a step and not once a layer: requests whose attention is one call.
Those with a single new token (decodes) go together where their page counts have the same binary length, so that what a
short one is padded with is never more than its own size; a request with several new tokens goes alone.
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
    """B requests for one call, with the same number of new tokens."""

    rows: Tensor | slice
    """Their new tokens in the stream."""
    pages: Tensor | slice
    """Their pages in the cache, B equal parts one after another; a slice where one request's are neighbours."""
    lengths_B: Tensor
    """Their positions, the new ones included."""
    longest: int
    """The largest of these."""
    unused: Tensor | None
    """Rows of the gathered pages, below ``longest``, that are not the request's; None where there are none."""

    def gather(self, x_PpKH: Tensor) -> Tensor:
        """x_BSKH of these requests, S being the longest; a copy unless pages are neighbours. (Or of anything else that
        is kept of a token.)
        """
        if isinstance(self.pages, slice):
            return x_PpKH[self.pages].flatten(0, 1)[None, : self.longest]
        if x_PpKH.dtype == torch.float8_e4m3fn:  # whose zeros are those of bytes, which every torch moves
            return self.gather(x_PpKH.view(torch.uint8)).view(x_PpKH.dtype)
        # index_select is five times as fast here as indexing by a tensor.
        x_PpKH = x_PpKH.index_select(0, self.pages)
        if self.unused is not None:
            # Another's number times a weight of zero must not be NaN, whatever that number is.
            x_PpKH.flatten(0, 1).index_fill_(0, self.unused, 0)
        return x_PpKH.flatten(0, 1).unflatten(0, (len(self.lengths_B), -1))[:, : self.longest]


@dataclass(frozen=True, eq=False)
class PageTable:
    """Request r's new tokens are rows ``cu_queries[r]:cu_queries[r + 1]`` of the stream, the last of its
    ``lengths_R[r]`` positions; ``pages_RP[r]`` lists its pages of ``page_tokens`` tokens in order.
    """

    pages_RP: Tensor
    cu_queries: Tensor
    lengths_R: Tensor
    page_tokens: int
    longest_query: int
    longest_context: int
    known_lengths: tuple[list[int], list[int]] | None = None
    """What :attr:`host_lengths` says, where somebody knows it without asking the device."""
    known_pages: Sequence[Sequence[int]] | None = None
    """What :attr:`host_pages` says, likewise."""
    share: bool = True
    """Whether keys that several requests share may be read once for all of them, which rounds otherwise."""

    @property
    def max_keys(self) -> int:
        """Keys that a request's pages have place for; raises ConfigError where not each request has a row of pages."""
        if len(self.pages_RP) != len(self.lengths_R):
            raise ConfigError(f"{len(self.pages_RP)} rows of pages for {len(self.lengths_R)} requests; give each one")
        return self.pages_RP.shape[1] * self.page_tokens

    @cached_property
    def host_lengths(self) -> tuple[list[int], list[int]]:
        """(new tokens, positions) of each request; waits for the device where they are not known."""
        if self.known_lengths is not None:
            return self.known_lengths
        ends = self.cu_queries.tolist()
        return [b - a for a, b in itertools.pairwise(ends)], self.lengths_R.tolist()

    @cached_property
    def host_pages(self) -> Sequence[Sequence[int]]:
        """Each request's pages, with or without padding; waits for the device where they are not known."""
        return self.pages_RP.tolist() if self.known_pages is None else self.known_pages

    @cached_property
    def plan_cache(self) -> dict[Any, Any]:
        """What a kernel made of this table, for the layers that come after, by what it was made for."""
        return {}

    def check(self, cache_pages: int) -> None:
        """Refuse what kernels without bounds of their own would read wrongly; for those who ask the device anyway.

        Raises CapacityError where a request is longer than its row of pages, and ConfigError where it has a negative
        length, or a page that it uses is none of ``cache_pages`` (on a GPU, where no :attr:`known_pages` say so).
        """
        if cache_pages in self._checked:
            return
        _, lengths = self.host_lengths
        if min(lengths, default=0) < 0:
            raise ConfigError(f"a number below 0 among lengths {lengths}; give counts")
        check_lengths(lengths, self.max_keys)
        # Whoever knows them without asking the device made them, and to ask it here would be to wait for it.
        if self.pages_RP.is_cuda and self.known_pages is not None:
            return
        if self.pages_RP.numel() and not 0 <= int(self.pages_RP.min()) <= int(self.pages_RP.max()) < cache_pages:
            for r, length in enumerate(lengths):
                for page in self.host_pages[r][: self._pages(length)]:
                    if not 0 <= page < cache_pages:
                        raise ConfigError(
                            f"request {r} has page {page} of a cache of {cache_pages}; give it pages below that"
                        )
        self._checked.add(cache_pages)

    @cached_property
    def _checked(self) -> set[int]:
        """For caches of how many pages this was found right: once for all layers."""
        return set()

    @cached_property
    def groups(self) -> list[Group]:
        """All requests that have new tokens and keys; waits for the device, to see which pages are neighbours."""
        new_R, lengths = self.host_lengths
        ends = [0, *itertools.accumulate(new_R)]
        alike: dict[tuple[str, int], list[int]] = {}
        for r, length in enumerate(lengths):
            new = new_R[r] if length else 0  # who has no keys is nobody's row
            if new == 1:
                alike.setdefault(("decodes", self._pages(length).bit_length()), []).append(r)
            elif new:
                alike["alone", r] = [r]
        return [self._group(requests, ends, lengths) for requests in alike.values()]

    def _pages(self, length: int) -> int:
        return -(-length // self.page_tokens)

    def _group(self, requests: list[int], ends: list[int], lengths: list[int]) -> Group:
        first, last = requests[0], requests[-1]
        longest = max(lengths[r] for r in requests)
        together = last - first + 1 == len(requests)
        chosen = slice(first, last + 1) if together else torch.tensor(requests, device=self.pages_RP.device)
        rows = slice(ends[first], ends[last + 1]) if together else self.cu_queries[chosen]
        pages_BP, lengths_B = self.pages_RP[chosen, : self._pages(longest)], self.lengths_R[chosen]
        if len(requests) == 1:
            table = pages_BP[0].tolist()
            if table == list(range(table[0], table[0] + len(table))):
                # The allocator's usual gift to a single conversation: nothing needs to be copied.
                return Group(rows, slice(table[0], table[0] + len(table)), lengths_B, longest, None)
        unused = None
        if any(lengths[r] < longest for r in requests):
            position_S = torch.arange(pages_BP.shape[1] * self.page_tokens, device=self.pages_RP.device)
            unused_BS = (position_S >= lengths_B[:, None]) & (position_S < longest)
            unused = unused_BS.flatten().nonzero().squeeze(1)
        return Group(rows, pages_BP.flatten(), lengths_B, longest, unused)

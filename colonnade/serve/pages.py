"""Pages of the key/value cache as plain numbers: who holds which, and how many are free.

A cache is cut into pages of a fixed number of tokens, and a request holds a list of page numbers (its page table), so
that memory is given out as a sequence grows and none is lost to fragmentation (Kwon 2023, PagedAttention, §4.1-4.3).
Several requests may hold one page, when they share a prefix; a page is free again when its last holder lets go.

    free + Σ [references > 0] = pages        references(p) = number of page tables that contain p

:meth:`PagePool.audit` checks these two lines; the tests run it after every move. Nothing here touches a tensor.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from colonnade.errors import CapacityError


class PagePool:
    """``pages`` pages of ``page_tokens`` tokens each, numbered from 0, with reference counts."""

    def __init__(self, pages: int, page_tokens: int):
        self.pages, self.page_tokens = pages, page_tokens
        self._references = [0] * pages
        self._free = list(range(pages - 1, -1, -1))  # a stack: the page freed last is the warmest, so it goes out first

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages with at least one holder."""
        return self.pages - len(self._free)

    @property
    def tokens(self) -> int:
        """Tokens that the whole pool holds."""
        return self.pages * self.page_tokens

    def pages_for(self, tokens: int) -> int:
        """Pages that ``tokens`` tokens fill, the last one perhaps in part."""
        return -(-tokens // self.page_tokens)

    def check_fits(self, tokens: int) -> None:
        """Raise :class:`CapacityError` when one request of ``tokens`` tokens would not fit into an empty pool."""
        if self.pages_for(tokens) > self.pages:
            raise CapacityError(
                f"one request of {tokens} tokens needs {self.pages_for(tokens)} cache pages of {self.page_tokens} "
                f"tokens, but the pool has {self.pages}; raise --serve.cache_bytes at least "
                f"{-(-self.pages_for(tokens) * 100 // self.pages) / 100:g}-fold, or ask for fewer tokens"
            )

    def allocate(self, count: int) -> list[int]:
        """``count`` free pages, each now held once; the caller has looked at :attr:`free` first."""
        assert count <= len(self._free), f"{count} pages asked of {len(self._free)} free ones"
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self._references[page] = 1
        return taken

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of ``pages``."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be shared"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each of ``pages``; those without any become free."""
        for page in reversed(list(pages)):  # so that the stack gives neighbours out in ascending order again
            assert self._references[page] > 0, f"page {page} is released but nobody holds it"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free.append(page)

    def audit(self, tables: Iterable[Sequence[int]]) -> None:
        """Check that ``tables``, all the page tables there are, account for every reference and every free page."""
        held = Counter(page for table in tables for page in table)
        free = Counter(self._free)
        for page in range(self.pages):
            references, holders = self._references[page], held[page]
            assert references == holders, f"page {page}: {references} references, {holders} holders"
            assert free[page] == (holders == 0), f"page {page}: {holders} holders, {free[page]} times in the free list"

"""Pages of the key/value cache as plain numbers: who holds which, and how many are free.

A cache is cut into pages of a fixed number of tokens, and a request holds a list of page numbers (its page table), so
that memory is given out as a sequence grows and none is lost to fragmentation (Kwon 2023, PagedAttention, §4.1-4.3).
Several requests may hold one page, when they share a prefix; a page is free again when its last holder lets go.

    free + Σ [references > 0] = pages        references(p) = number of page tables that contain p

What a full page holds is a function of the tokens up to its end, so that a page has a *name*, the hash of them:

    name_i = blake2b(name_{i-1} ‖ tokens of page i)

A free page keeps its name until the room is needed, the one let go of first giving way first; whoever needs the same
prefix meanwhile takes it up again instead of computing it.

Where ranks share the cache (context parallelism), page p lies on rank p mod ranks, as page p // ranks of its own. The
pages of a request go round the ranks, so that each has its part of every long request and reads as long as the others
do; where a rank has no page left another's is as good, for who holds what is a matter of balance alone.

:meth:`PagePool.audit` checks the books; the tests run it after every move. Nothing here touches a tensor.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from colonnade.errors import CapacityError


def extend_names(names: list[bytes], ids: Sequence[int], page_tokens: int) -> None:
    """Append the names of those full pages of ``ids`` that come after ``names``."""
    for start in range(len(names) * page_tokens, len(ids) - page_tokens + 1, page_tokens):
        parent = names[-1] if names else b""
        names.append(blake2b(parent + array("q", ids[start : start + page_tokens]).tobytes(), digest_size=16).digest())


class PagePool:
    """``pages`` pages of ``page_tokens`` tokens each, numbered from 0, with reference counts, on ``ranks`` ranks.

    ``counted`` says that somebody asked for so many pages, and not for so many bytes.
    """

    def __init__(self, pages: int, page_tokens: int, ranks: int = 1, *, counted: bool = False):
        self.pages, self.page_tokens, self.ranks, self.counted = pages, page_tokens, ranks, counted
        self._references = [0] * pages
        # Of each rank a stack: the page freed last is the warmest, so it goes out first.
        self._free = [[*reversed(range(rank, pages, ranks))] for rank in range(ranks)]
        # Free too, but named; in the order in which they were let go of.
        self._kept: list[dict[int, None]] = [{} for _ in range(ranks)]
        self._name_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return sum(map(len, self._free)) + sum(map(len, self._kept))

    @property
    def used(self) -> int:
        """Pages with at least one holder."""
        return self.pages - self.free

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
            needs = self.pages_for(tokens)
            if self.counted:
                remedy = f"raise --serve.pages to {needs} or more"
            else:
                remedy = f"raise --serve.cache_bytes at least {-(-needs * 100 // self.pages) / 100:g}-fold"
            raise CapacityError(
                f"one request of {tokens} tokens needs {needs} cache pages of {self.page_tokens} tokens, but the pool "
                f"has {self.pages}; {remedy}, or ask for fewer tokens"
            )

    def allocate(self, count: int, after: Sequence[int] = ()) -> list[int]:
        """``count`` free pages, each now held once, to follow the table ``after``; the caller has looked at
        :attr:`free` first.
        """
        assert count <= self.free, f"{count} pages asked of {self.free} free ones"
        taken: list[int] = []
        for _ in range(count):
            last = taken[-1] if taken else after[-1] if after else None
            taken.append(self._take(self._roomiest() if last is None else (last + 1) % self.ranks))
            self._references[taken[-1]] = 1
        return taken

    def name(self, page: int, name: bytes) -> None:
        """``page``, held and full, holds what ``name`` says; of two such pages the first one has the name."""
        assert self._references[page] > 0, f"page {page} is free and cannot be named"
        if name not in self._page_of and page not in self._name_of:
            self._page_of[name], self._name_of[page] = page, name

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The pages of these names up to the first that is not there."""
        found = []
        for name in names:
            if (page := self._page_of.get(name)) is None:
                break
            found.append(page)
        return found

    def unheld(self, pages: Iterable[int]) -> int:
        """How many of ``pages`` would be free no more if they were shared."""
        return sum(self._references[page] == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each of ``pages``, which are held or have a name."""
        for page in pages:
            if self._references[page] == 0:
                assert page in self._kept[page % self.ranks], f"page {page} is free and cannot be shared"
                del self._kept[page % self.ranks][page]
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each of ``pages``; those without any become free."""
        for page in reversed(list(pages)):  # so that the stack gives neighbours out in ascending order again
            assert self._references[page] > 0, f"page {page} is released but nobody holds it"
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._name_of:
                    # The end of a prefix before its beginning, which more may share.
                    self._kept[page % self.ranks][page] = None
                else:
                    self._free[page % self.ranks].append(page)

    def audit(self, tables: Iterable[Sequence[int]]) -> None:
        """Check that ``tables``, all the page tables there are, account for every reference and every free page."""
        held = Counter(page for table in tables for page in table)
        free = Counter(page for pages in (*self._free, *self._kept) for page in pages)
        assert {page: name for name, page in self._page_of.items()} == self._name_of, "a name without its page"
        for rank, (unnamed, kept) in enumerate(zip(self._free, self._kept, strict=True)):
            assert kept.keys() <= self._name_of.keys(), "a page is kept that has no name"
            assert not self._name_of.keys() & set(unnamed), "a page has a name and is free to be overwritten"
            assert all(page % self.ranks == rank for page in (*unnamed, *kept)), f"rank {rank} has another's page"
        for page in range(self.pages):
            references, holders = self._references[page], held[page]
            assert references == holders, f"page {page}: {references} references, {holders} holders"
            assert free[page] == (holders == 0), f"page {page}: {holders} holders, {free[page]} times in the free list"

    def _roomiest(self) -> int:
        """The rank with most free pages, the first of equals."""
        return max(range(self.ranks), key=lambda rank: len(self._free[rank]) + len(self._kept[rank]))

    def _take(self, rank: int) -> int:
        """A page of this rank, or where it has none of the roomiest: of named ones the one let go of first, whose name
        is nobody's then.
        """
        if not (self._free[rank] or self._kept[rank]):
            rank = self._roomiest()
        if self._free[rank]:
            return self._free[rank].pop()
        page = next(iter(self._kept[rank]))
        del self._kept[rank][page]
        del self._page_of[self._name_of.pop(page)]
        return page

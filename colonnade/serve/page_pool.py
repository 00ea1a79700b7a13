"""Page numbers of the paged KV cache: reference counts, free lists and prefix caching.

The cache is divided into pages of a fixed number of tokens, and a request has a page table: a list of page numbers.
Memory is allocated as a sequence grows, without fragmentation (Kwon 2023, PagedAttention, §4.1-4.3). Requests with a
common prefix share its pages; a page is free when no page table contains it.

    free + Σ [references > 0] = pages        references(p) = number of page tables that contain p

The contents of a full page depend only on the tokens up to its end, so their hash identifies it:

    hash_i = blake2b(hash_{i-1} ‖ tokens of page i)

A free page keeps its hash, and can be shared again, until it is allocated. Pages without a hash are allocated first,
then those that were released first.

Under context parallelism page p is page p // ranks of the cache of rank p mod ranks. The pages of a request are
assigned to the ranks in turn, so that each rank holds, and reads, an equal part of every long request. If a rank has no
free page, one of another rank is used: this affects the balance only, not the result.

:meth:`PagePool.audit` checks the reference counts; the tests call it after every operation. Nothing here is a tensor.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from colonnade.errors import CapacityError


def fewer_tokens(prompt_tokens: int, limit: int) -> str:
    """The remedy for a request of more than ``limit`` tokens, with the largest number that is accepted."""
    left = limit - prompt_tokens
    return f"ask for at most {left:,}" if left > 0 else f"shorten the prompt to at most {limit - 1:,}"


def extend_page_hashes(hashes: list[bytes], ids: Sequence[int], page_tokens: int, first: bytes = b"") -> None:
    """Append to ``hashes`` those of the further full pages of ``ids``.

    ``first``: the hash of what the keys depend on besides the tokens, such as an adapter or the source of a
    translation.
    """
    for start in range(len(hashes) * page_tokens, len(ids) - page_tokens + 1, page_tokens):
        parent, page = hashes[-1] if hashes else first, array("q", ids[start : start + page_tokens])
        hashes.append(blake2b(parent + page.tobytes(), digest_size=16).digest())


class PagePool:
    """``pages`` pages of ``page_tokens`` tokens each, numbered from 0, with reference counts, on ``ranks`` ranks.

    ``page_bytes`` is the memory of a page if the user set the cache's size in bytes, not in pages; it only changes an
    error's remedy.
    """

    def __init__(self, pages: int, page_tokens: int, ranks: int = 1, *, page_bytes: int | None = None):
        self.pages, self.page_tokens, self.ranks, self.page_bytes = pages, page_tokens, ranks, page_bytes
        self._references = [0] * pages
        # A stack for each rank: the page freed last is the warmest, so it is allocated first.
        self._free = [[*reversed(range(rank, pages, ranks))] for rank in range(ranks)]
        # Free pages with a hash, in the order of their release.
        self._evictable: list[dict[int, None]] = [{} for _ in range(ranks)]
        self.drafted: set[int] = set()
        """Full pages that the cache of a draft model, which has the same pages, has computed too."""
        self._hash_of: dict[int, bytes] = {}
        self._page_of: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """Pages without a reference."""
        return sum(map(len, self._free)) + sum(map(len, self._evictable))

    @property
    def used(self) -> int:
        """Pages with at least one reference."""
        return self.pages - self.free

    @property
    def tokens(self) -> int:
        """Capacity of the pool in tokens."""
        return self.pages * self.page_tokens

    @property
    def max_request_tokens(self) -> int:
        """Maximum number of tokens of one request, prompt and output; the last one is never run, so it has no key."""
        return self.tokens + 1

    def pages_for(self, tokens: int) -> int:
        """Number of pages that ``tokens`` tokens take."""
        return -(-tokens // self.page_tokens)

    def check_fits(self, prompt_tokens: int, new_tokens: int, source_tokens: int = 0, beams: int = 1) -> None:
        """Raise :class:`CapacityError` if one request of this many tokens does not fit into an empty pool."""
        if source_tokens:
            self._check_source_fits(prompt_tokens + new_tokens, source_tokens, beams)
        total = prompt_tokens + new_tokens
        if total <= self.max_request_tokens:
            return
        needs = self.pages_for(total - 1)
        if self.page_bytes is None:
            remedy = f"set --serve.pages to {needs} or more"
        else:
            remedy = f"set --serve.cache_bytes to {-(-needs // self.ranks) * self.page_bytes} or more"
        raise CapacityError(
            f"the prompt's {prompt_tokens:,} tokens and {new_tokens:,} to generate make {total:,}; this server holds "
            f"{self.max_request_tokens:,} for a request: {fewer_tokens(prompt_tokens, self.max_request_tokens)}",
            operator_hint=remedy,
        )

    def _check_source_fits(self, target_tokens: int, source_tokens: int, beams: int) -> None:
        """The same for a request with a source, whose keys have their own pages."""
        needs = beams * self.pages_for(target_tokens - 1) + self.pages_for(source_tokens)
        if needs > self.pages:
            target = "a target" if beams == 1 else f"{beams} beams"
            raise CapacityError(
                f"the source's {source_tokens:,} tokens and {target} of {target_tokens:,} take {needs:,} pages of "
                f"{self.page_tokens} tokens; this server has {self.pages:,}: shorten the source, or ask for "
                f"fewer tokens{'' if beams == 1 else ' or beams'}",
                operator_hint=f"set --serve.pages to {needs} or more",
            )

    def allocate(self, count: int, after: Sequence[int] = ()) -> list[int]:
        """``count`` free pages to append to the page table ``after``; the caller has checked :attr:`free`."""
        assert count <= self.free, f"{count} pages requested, {self.free} are free"
        taken: list[int] = []
        for _ in range(count):
            last = taken[-1] if taken else after[-1] if after else None
            taken.append(self._pop_free(self._freest_rank() if last is None else (last + 1) % self.ranks))
            self._references[taken[-1]] = 1
        self.drafted.difference_update(taken)
        return taken

    def cache_page(self, page: int, page_hash: bytes) -> None:
        """Record the hash of a full, referenced ``page``; of two pages with equal contents only the first is cached."""
        assert self._references[page] > 0, f"page {page} is free and cannot be cached"
        if page_hash not in self._page_of and page not in self._hash_of:
            self._page_of[page_hash], self._hash_of[page] = page, page_hash

    def find_cached(self, hashes: Iterable[bytes]) -> list[int]:
        """The pages with these hashes, up to the first that is not cached."""
        pages = []
        for page_hash in hashes:
            if (page := self._page_of.get(page_hash)) is None:
                break
            pages.append(page)
        return pages

    def cached_pages(self) -> list[int]:
        """Free pages whose contents are kept for requests with the same prefix."""
        return [page for evictable in self._evictable for page in evictable]

    def count_unreferenced(self, pages: Iterable[int]) -> int:
        """How many of ``pages`` are free, and would no longer be if they were shared."""
        return sum(self._references[page] == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Add a reference to each of ``pages``, which are referenced or cached."""
        for page in pages:
            if self._references[page] == 0:
                assert page in self._evictable[page % self.ranks], f"page {page} is free and cannot be shared"
                del self._evictable[page % self.ranks][page]
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove a reference from each of ``pages``."""
        for page in reversed(list(pages)):  # so that the stack returns neighbours in ascending order again
            assert self._references[page] > 0, f"page {page} is released without a reference"
            self._references[page] -= 1
            if self._references[page] == 0:
                if page in self._hash_of:
                    # The end of a prefix is evicted before its beginning, which more requests may share.
                    self._evictable[page % self.ranks][page] = None
                else:
                    self._free[page % self.ranks].append(page)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache: no page is found any more; those with references stay with their requests."""
        for free, evictable in zip(self._free, self._evictable, strict=True):
            free.extend(evictable)
            evictable.clear()
        self._hash_of.clear()
        self._page_of.clear()

    def audit(self, tables: Iterable[Sequence[int]]) -> None:
        """Check that ``tables``, all existing page tables, account for every reference and every free page."""
        references = Counter(page for table in tables for page in table)
        free = Counter(page for pages in (*self._free, *self._evictable) for page in pages)
        assert {page: page_hash for page_hash, page in self._page_of.items()} == self._hash_of, "a hash has no page"
        for rank, (plain, cached) in enumerate(zip(self._free, self._evictable, strict=True)):
            assert cached.keys() <= self._hash_of.keys(), "an evictable page has no hash"
            assert not self._hash_of.keys() & set(plain), "a free page has a hash and is not evictable"
            assert all(page % self.ranks == rank for page in (*plain, *cached)), f"rank {rank} has another's page"
        for page in range(self.pages):
            counted, expected = self._references[page], references[page]
            assert counted == expected, f"page {page}: {counted} references, in {expected} page tables"
            assert free[page] == (expected == 0), f"page {page}: {expected} references, {free[page]} times free"

    def _freest_rank(self) -> int:
        return max(range(self.ranks), key=lambda rank: len(self._free[rank]) + len(self._evictable[rank]))

    def _pop_free(self, rank: int) -> int:
        """A free page of ``rank``, or of the rank with most free pages; a cached page is evicted if it must be."""
        if not (self._free[rank] or self._evictable[rank]):
            rank = self._freest_rank()
        if self._free[rank]:
            return self._free[rank].pop()
        page = next(iter(self._evictable[rank]))
        del self._evictable[rank][page]
        del self._page_of[self._hash_of.pop(page)]
        return page

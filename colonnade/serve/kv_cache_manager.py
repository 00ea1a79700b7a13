"""Gives requests their pages of the KV cache: on admission, for each further token, and for the beams of a search.

A request starts after the pages of its prefix that are still cached, whichever request computed them. The source of an
encoder–decoder has its own pages, for cross attention, which running requests with the same source share.

The pages of a request change only here and by preemption, which the scheduler decides. The pool counts references
(:mod:`colonnade.serve.page_pool`). Pure Python: no tensors.
"""

from collections import Counter
from collections.abc import Collection

from colonnade.serve.page_pool import PagePool, extend_page_hashes
from colonnade.serve.request import Request


class KVCacheManager:
    """Page tables of running requests; without ``prefix_cache`` no pages are shared between requests."""

    def __init__(self, pool: PagePool, *, prefix_cache: bool):
        self.pool, self.prefix_cache = pool, prefix_cache
        self._sources: dict[bytes, tuple[list[int], int]] = {}
        """The pages of each source of a running request, by its hash, and how many requests use them."""
        self.source_tokens = self.shared_source_tokens = 0
        """Tokens of the sources of admitted requests, and of those that another request had encoded."""
        self.prefix_queries = self.prefix_hits = 0
        """Tokens of admitted requests looked up in the prefix cache, and found there."""

    def admit(self, request: Request) -> bool:
        """Allocate pages for all known tokens of ``request`` and for its source; False if too few are free."""
        prefix = self._cached_prefix(request)
        needed = self.pool.pages_for(len(request.ids)) - len(prefix)
        encoded = request.source_hash in self._sources
        far = 0 if encoded else self.pool.pages_for(len(request.source))
        if needed + far > self.pool.free - self.pool.count_unreferenced(prefix):
            return False
        self.pool.share(prefix)  # before the allocation, which might evict them
        request.pages = [*prefix, *self.pool.allocate(needed, prefix)]
        request.computed, request.cached_pages = len(prefix) * self.pool.page_tokens, len(prefix)
        if request.cached_tokens is None:
            request.cached_tokens = request.computed
        if self.prefix_cache:
            self.prefix_queries += len(request.ids)
            self.prefix_hits += request.computed
        if request.source:
            if encoded:
                self._share_source(request)
            else:
                request.source_pages, request.encode_source = self.pool.allocate(far), True
                self._sources[request.source_hash] = list(request.source_pages), 1
            self.source_tokens += len(request.source)
            self.shared_source_tokens += len(request.source) if encoded else 0
        return True

    def _cached_prefix(self, request: Request) -> list[int]:
        """Cached pages with the beginning of ``request``; its last token is always run."""
        if not self.prefix_cache or request.unscored:
            return []
        extend_page_hashes(request.page_hashes, request.ids, self.pool.page_tokens, request.prefix_hash_seed)
        return self.pool.find_cached(request.page_hashes[: (len(request.ids) - 1) // self.pool.page_tokens])

    def _share_source(self, request: Request) -> None:
        pages, users = self._sources[request.source_hash]
        self.pool.share(pages)
        request.source_pages = list(pages)
        self._sources[request.source_hash] = pages, users + 1

    def grow(self, request: Request, tokens: int) -> None:
        """Allocate the pages that ``request`` lacks for ``tokens`` tokens; so many must be free."""
        missing = self.pool.pages_for(tokens) - len(request.pages)
        request.pages += self.pool.allocate(max(0, missing), request.pages)

    def lacks_page(self, request: Request) -> bool:
        """Whether its next token needs another page."""
        return self.pool.pages_for(request.length) > len(request.pages)  # fewer after refused drafts

    def max_growth(self, request: Request) -> int:
        """Tokens that fit into its pages and the free ones."""
        return (len(request.pages) + self.pool.free) * self.pool.page_tokens - len(request.ids)

    def cache_full_pages(self, request: Request) -> None:
        """Add the full pages whose tokens are all known and scheduled to the prefix cache.

        Requests admitted in the same step may share them: in each layer a pass writes all its keys and values before it
        reads any.
        """
        full = min(request.computed, len(request.ids)) // self.pool.page_tokens
        if not self.prefix_cache or full <= request.cached_pages:
            return
        extend_page_hashes(request.page_hashes, request.ids, self.pool.page_tokens, request.prefix_hash_seed)
        for i in range(request.cached_pages, full):
            self.pool.cache_page(request.pages[i], request.page_hashes[i])
        request.cached_pages = full

    def pages_to_fork(self, parent: Request) -> int:
        """Pages that a fork of ``parent`` does not share with it."""
        return self.pool.pages_for(len(parent.ids)) - parent.computed // self.pool.page_tokens

    def fork(self, parent: Request, child: Request) -> None:
        """Let ``child``, which has as many tokens, share the full pages and the source of ``parent``."""
        full = parent.computed // self.pool.page_tokens
        self.pool.share(parent.pages[:full])
        child.pages = [*parent.pages[:full], *self.pool.allocate(self.pages_to_fork(parent), parent.pages[:full])]
        child.page_hashes, child.cached_pages = parent.page_hashes[:full], min(parent.cached_pages, full)
        child.computed = full * self.pool.page_tokens
        self._share_source(child)

    def release(self, request: Request) -> None:
        """Release all pages of ``request``; those with a hash stay cached until they are allocated again."""
        if request.pages:
            self.cache_full_pages(request)  # pages that became full since its last slice
        self.pool.release(request.pages)
        if request.source_pages:
            pages, users = self._sources.pop(request.source_hash)
            if users > 1:
                self._sources[request.source_hash] = pages, users - 1
            self.pool.release(request.source_pages)
            request.source_pages, request.encode_source = [], False
        request.pages, request.computed, request.cached_pages, request.draft_computed = [], 0, 0, 0

    def audit(self, running: Collection[Request], waiting: Collection[Request]) -> None:
        """Check all invariants of pages; for tests."""
        users = Counter(r.source_hash for r in running if r.source)
        assert users == {key: count for key, (_, count) in self._sources.items()}, "sources are counted wrongly"
        assert all(r.source_pages == self._sources[r.source_hash][0] for r in running if r.source)
        assert not any(request.source_pages for request in waiting), "a waiting request has pages of its source"
        self.pool.audit(pages for request in running for pages in (request.pages, request.source_pages))
        assert not any(request.pages for request in waiting), "a waiting request has pages"

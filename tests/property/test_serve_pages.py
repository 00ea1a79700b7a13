"""The page pool under any sequence of allocations, shares and releases."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from colonnade.serve.page_pool import PagePool


class Pages(RuleBasedStateMachine):
    """Page tables grow, share prefixes and are released in any order."""

    @initialize(pages=st.integers(1, 10), page_tokens=st.integers(1, 8), ranks=st.integers(1, 4))
    def start(self, pages: int, page_tokens: int, ranks: int):
        self.pool = PagePool(pages, page_tokens, ranks)
        self.tables: list[list[int]] = []
        self.cached: dict[bytes, int] = {}

    @rule(count=st.integers(0, 10), which=st.integers(0, 100))
    def allocate(self, count: int, which: int):
        count = min(count, self.pool.free)
        after = self.tables[which % len(self.tables)] if self.tables else []
        used = {page for table in self.tables for page in table}
        free = [{*range(rank, self.pool.pages, self.pool.ranks)} - used for rank in range(self.pool.ranks)]
        table = self.pool.allocate(count, after)
        assert len(set(table)) == count
        before = after[-1] if after else None
        for page in table:
            rank = page % self.pool.ranks if before is None else (before + 1) % self.pool.ranks
            assert page in free[rank] or not free[rank], "a page is allocated on the next rank if it has a free one"
            free[page % self.pool.ranks].discard(page)
            before = page
        assert not set(table) & {page for other in self.tables for page in other}
        self.tables.append(table)
        self.cached = {key: page for key, page in self.cached.items() if page not in table}  # allocated again

    @precondition(lambda self: any(self.tables))
    @rule(which=st.integers(0, 100), key=st.integers(0, 20).map(lambda n: b"%d" % n))
    def cache(self, which: int, key: bytes):
        used = sorted({page for table in self.tables for page in table})
        page = used[which % len(used)]
        self.pool.cache_page(page, key)
        if key not in self.cached and page not in self.cached.values():
            self.cached[key] = page

    @precondition(lambda self: self.cached)
    @rule(which=st.integers(0, 100), beyond=st.booleans())
    def share_a_cached_page(self, which: int, beyond: bool):
        key = sorted(self.cached)[which % len(self.cached)]
        (page,) = self.pool.find_cached([key, b"missing", *([key] if beyond else [])])
        assert page == self.cached[key]
        before = self.pool.free
        unreferenced = self.pool.count_unreferenced([page])
        self.pool.share([page])
        assert self.pool.free == before - unreferenced
        self.tables.append([page])

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100), length=st.integers(0, 10))
    def share(self, which: int, length: int):
        prefix = self.tables[which % len(self.tables)][:length]
        self.pool.share(prefix)
        self.tables.append(prefix)

    @precondition(lambda self: self.tables)
    @rule(which=st.integers(0, 100))
    def release(self, which: int):
        self.pool.release(self.tables.pop(which % len(self.tables)))

    @invariant()
    def every_page_is_accounted_for(self):
        if hasattr(self, "pool"):
            self.pool.audit(self.tables)
            assert self.pool.used == len({page for table in self.tables for page in table})


TestPages = Pages.TestCase
TestPages.settings = settings(max_examples=60, stateful_step_count=20)

"""The content of one forward pass: tokens, pages and sampling arguments of each request."""

from dataclasses import dataclass
from typing import NamedTuple

from colonnade.serve.request import Request
from colonnade.serve.sample_args import SampleArgs


class Slice(NamedTuple):
    """The tokens of one request in a forward pass."""

    start: int
    """Position of the first of ``tokens``; also the number of tokens already in the cache."""
    tokens: tuple[int, ...]
    """Token ids; -1 - i stands for the i-th token that the previous work sampled."""
    pages: tuple[int, ...]
    """The page table up to and including ``tokens``."""
    sample_args: SampleArgs | None
    """How to sample the next token; None if ``tokens`` do not reach the end of the request."""
    batch_row: int = -1
    """The request's row in a padded decode batch (:class:`BatchRows`); negative for none."""
    targets: tuple[int, ...] = ()
    """For each of ``tokens`` the prompt's next one if its log-probability is requested, otherwise -1; empty if none
    is."""
    alternatives: int = 0
    """How many of the most probable tokens to return with those."""
    adapter: int = 0
    """The request's adapter (:mod:`colonnade.serve.adapters`), from 1; 0: none."""
    source: tuple[int, ...] = ()
    """The source's tokens, if this pass has to encode it."""
    source_pages: tuple[int, ...] = ()
    """The pages of its keys and values for cross attention."""
    source_length: int = 0
    """Tokens of the source."""

    def source_slots(self, page_tokens: int) -> list[int]:
        """Cache slots for the keys and values of ``source``."""
        return [self.source_pages[i // page_tokens] * page_tokens + i % page_tokens for i in range(len(self.source))]

    def slots(self, page_tokens: int) -> list[int]:
        """Cache slots for the keys and values of ``tokens``: page · page_tokens + offset."""
        span = range(self.start, self.start + len(self.tokens))
        return [self.pages[i // page_tokens] * page_tokens + i % page_tokens for i in span]


@dataclass(frozen=True, slots=True)
class Work:
    """One forward pass. Ranks above 0 receive it without the requests."""

    slices: tuple[Slice, ...]
    requests: tuple[Request, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens in the pass."""
        return sum(len(piece.tokens) for piece in self.slices)

    @property
    def sample_args(self) -> list[SampleArgs]:
        """Those of the slices that sample a token, in order."""
        return [piece.sample_args for piece in self.slices if piece.sample_args is not None]


def sample_args(request: Request, index: int) -> SampleArgs:
    """How to sample token ``index`` of the output of ``request``."""
    changes = None if request.processor is None else request.processor.changes(request.ids, index)
    return SampleArgs.of(request.params, request.seed, index, changes)

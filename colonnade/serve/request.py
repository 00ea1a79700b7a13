"""One generation in progress: its tokens, its pages, and how far the cache has come.

    ids = prompt + output          ids[:computed] are in the cache, ids[computed:] are still to be run

A decode is nothing special: a request with exactly one token left to run. That token may be drawn but not known yet,
when the next pass is made ready while the last one still runs: then it is the device that puts it in its place.
"""

from dataclasses import dataclass, field
from enum import Enum

from colonnade.serve.sampling_params import SamplingParams


class Status(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    """In the queue, holding no page: not admitted yet, or preempted."""
    RUNNING = "running"
    """Holds pages for all its tokens and takes part in the steps."""
    FINISHED = "finished"
    """Done or cancelled; holds nothing."""


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """The scheduler's and the sampler's view of one generation (the text is :mod:`colonnade.serve.text_stream`'s)."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    seed: int
    """params.seed, or a fresh one."""
    limit_tokens: int
    """Tokens that may be generated, at most."""
    ids: list[int] = field(init=False)
    pages: list[int] = field(default_factory=list)
    """The page table: token i lives in pages[i // page_tokens]."""
    names: list[bytes] = field(default_factory=list)
    """What the full pages of ``ids`` hold, as far as anybody asked (:mod:`colonnade.serve.page_pool`)."""
    named: int = 0
    """Pages, from the first on, of which the pool was told what they hold."""
    computed: int = 0
    """Tokens in the cache when the work that was handed out has run."""
    ahead: int = 0
    """Tokens drawn by work that was handed out, but not committed."""
    row: int = 0
    """Which of the last work's draws was this request's."""
    place: int = -1
    """The row of a step of fixed shape that is its own (:mod:`~colonnade.serve.batch_slots`); negative for none."""
    status: Status = Status.WAITING

    def __post_init__(self):
        self.ids = list(self.prompt)

    @property
    def generated(self) -> int:
        """Tokens generated so far."""
        return len(self.ids) - len(self.prompt)

    @property
    def pending(self) -> int:
        """Tokens that the cache does not hold yet."""
        return self.length - self.computed

    @property
    def length(self) -> int:
        """Tokens, those that are not known yet among them."""
        return len(self.ids) + self.ahead

    @property
    def complete(self) -> bool:
        """True when no token is to be drawn any more."""
        return self.generated + self.ahead >= self.limit_tokens

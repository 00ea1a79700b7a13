"""What an engine counts; the HTTP layer shows it as metrics."""

from dataclasses import dataclass, field


@dataclass
class Stats:
    """Totals since the start, and the state after the last step."""

    running: int = 0
    """Requests that hold pages."""
    waiting: int = 0
    """Requests in the queue."""
    pages_used: int = 0
    pages: int = 0
    """Pages in the pool."""
    steps: int = 0
    """Forward passes."""
    preemptions: int = 0
    """Times that a request gave its pages back and was recomputed."""
    prefix_queries: int = 0
    """Tokens of requests when they were admitted, which the cache was searched for."""
    prefix_hits: int = 0
    """Of these, tokens that were there already and not computed again."""
    shared_keys: int = 0
    """Keys of a layer that decode steps read once for several requests, summed over the steps."""
    spared_keys: int = 0
    """Readings of a key that this saved: each, times the requests that shared it but one."""
    prompt_tokens: int = 0
    """Tokens of the prompts that were run, each prompt counted once."""
    generation_tokens: int = 0
    """Tokens sampled."""
    finished: dict[str, int] = field(default_factory=dict)
    """Requests by finish reason."""

    @property
    def cache_usage(self) -> float:
        """Share of the pages in use, 0 to 1."""
        return self.pages_used / self.pages if self.pages else 0.0

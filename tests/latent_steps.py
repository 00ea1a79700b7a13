"""One step of a model with a paged cache, as an engine would call it."""

import torch

from colonnade.model import KVCache, Paged


def step(cache: KVCache, pages: list[list[int]], spans: list[tuple[int, int]]) -> tuple[torch.Tensor, Paged]:
    """Positions and attend for new tokens start … stop − 1 of each request."""
    table, size = torch.tensor(pages, dtype=torch.int32), cache.page_tokens
    at = [torch.arange(start, stop) for start, stop in spans]
    slots = torch.cat([table[r, t // size] * size + t % size for r, t in enumerate(at)]).long()
    new = [stop - start for start, stop in spans]
    ends = torch.tensor([0, *new]).cumsum(0).int()
    lengths = torch.tensor([stop for _, stop in spans], dtype=torch.int32)
    paged = Paged(cache, table, slots, ends, lengths, max(new), max(stop for _, stop in spans))
    return torch.cat(at), paged

"""A server's step on a GPU, of decodes and of chunks of prompts: each request by what is faster for it.

Decodes read their keys where they lie in the cache (:mod:`triton_decode`), once for all who share them. A prompt is
arithmetic, at which torch's attention is faster than the kernel of ours that reads pages (8,192 new tokens on an H200:
1.04 ms, its keys gathered first, against 1.85; with 32,768 keys before them both are alike), so that its keys are
gathered. Latents are read where they lie, which is faster at every length.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.kernels.attention import sdpa, triton_decode
from colonnade.kernels.attention.decode_layout import few
from colonnade.kernels.attention.pages import PageTable
from colonnade.kernels.device import upload


class Part(NamedTuple):
    """Some requests of a step, as a step of their own."""

    rows: Tensor | slice
    """Their new tokens in the stream."""
    table: PageTable

    @staticmethod
    def of(table: PageTable, requests: Sequence[int]) -> "Part":
        """Those of ``requests``, in rising order."""
        new, lengths = table.host
        ends, device = [0, *accumulate(new)], table.lengths_R.device
        first, last = requests[0], requests[-1] + 1
        near = last - first == len(requests)
        rows = slice(ends[first], ends[last])
        which: Tensor | slice = slice(first, last)
        if not near:
            rows = upload([t for r in requests for t in range(ends[r], ends[r + 1])], torch.int64, device)
            which = upload(requests, torch.int64, device)
        counts, positions = [new[r] for r in requests], [lengths[r] for r in requests]
        pages = None if table.known_pages is None else [table.known_pages[r] for r in requests]
        own = PageTable(
            table.pages_RP[which], upload([0, *accumulate(counts)], torch.int32, device), table.lengths_R[which],
            table.page_tokens, max(counts), max(positions), known=(counts, positions), known_pages=pages,
            share=table.share,
        )  # fmt: skip
        return Part(rows, own)


def paged(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    *,
    window: int | None = None,
    values: int | None = None,
    scales_Pp2: Tensor | None = None,
) -> Tensor:
    """o_TNH of requests whose keys lie in pages (see :func:`reference.paged`)."""
    new, group = table.host[0], q_TNH.shape[1] // k_PpKH.shape[2]
    decodes = [r for r, count in enumerate(new) if count and few(count, group)]
    prompts = [r for r, count in enumerate(new) if not few(count, group)]
    latents = values is not None and v_PpKH is k_PpKH
    if latents or not prompts:
        how = {"window": window, "values": values, "scales_Pp2": scales_Pp2}
        return triton_decode.paged(q_TNH, k_PpKH, v_PpKH, table, **how)
    if not decodes:
        return sdpa.paged(q_TNH, k_PpKH, v_PpKH, table, window=window, values=values)
    key = "parts", group
    if key not in table.prepared:
        table.prepared[key] = [Part.of(table, each) for each in (decodes, prompts)]
    o_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    for run, (rows, part) in zip((triton_decode.paged, sdpa.paged), table.prepared[key], strict=True):
        o_TNH[rows] = run(q_TNH[rows], k_PpKH, v_PpKH, part, window=window)
    return o_TNH[..., :values]

"""A server's step on a GPU, of decodes and of chunks of prompts: each request by what is faster for it.

All but one kind read their keys where they lie in the cache, by one launch or two for all requests of the step, once
for all who share them (:mod:`triton_decode`). A whole prompt of thousands of tokens is arithmetic, at which torch's
attention is faster (8,192 tokens on an H200: 0.99 ms, its keys gathered first, against 1.61), so that its keys are
gathered. Not those of a shorter one (1,024: a tenth faster, which its own launches take many times over), or of a chunk
with keys before it (512 tokens with 4,096 before them: a fifth slower).

cuDNN makes a plan for each length that it has not met, 45 ms, which was half of all time in a load of prompts of 256
lengths. So that it meets few, a prompt is filled up with zeros to the next of :data:`PAD_TO` tokens; being last, nobody
sees them.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.attention import sdpa, triton_decode
from colonnade.kernels.attention.page_table import Group, PageTable
from colonnade.kernels.device import upload

LONG_PROMPT = 4096
"""Tokens of a prompt from which on torch's attention is worth its launches."""
PAD_TO = 256


class SubBatch(NamedTuple):
    """Some requests of a step, as a step of their own."""

    rows: Tensor | slice
    """Their new tokens in the stream."""
    table: PageTable

    @staticmethod
    def of(table: PageTable, requests: Sequence[int]) -> "SubBatch":
        """Those of ``requests``, in rising order."""
        new, lengths = table.host_lengths
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
            table.page_tokens, max(counts), max(positions), known_lengths=(counts, positions), known_pages=pages,
            share=table.share,
        )  # fmt: skip
        return SubBatch(rows, own)


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
    long = [r for r, (new, length) in enumerate(zip(*table.host_lengths, strict=True)) if new == length >= LONG_PROMPT]
    latents = values is not None and v_PpKH is k_PpKH
    if latents or not long or (window is not None and window < table.longest_context):
        how = {"window": window, "values": values, "scales_Pp2": scales_Pp2, "kernels": "auto"}
        return triton_decode.paged(q_TNH, k_PpKH, v_PpKH, table, **how)
    if "parts" not in table.plan_cache:
        rest = [r for r, new in enumerate(table.host_lengths[0]) if new and r not in long]
        table.plan_cache["parts"] = [SubBatch.of(table, each) for each in ([r] for r in long)]
        table.plan_cache["rest"] = [SubBatch.of(table, rest)] if rest else []
    o_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    for rows, part in table.plan_cache["parts"]:
        o_TNH[rows] = _sdpa_prefill(q_TNH[rows], k_PpKH, v_PpKH, part)
    for rows, part in table.plan_cache["rest"]:
        o_TNH[rows] = triton_decode.paged(q_TNH[rows], k_PpKH, v_PpKH, part, window=window, kernels="auto")
    return o_TNH[..., :values]


def _sdpa_prefill(q_TNH: Tensor, k_PpKH: Tensor, v_PpKH: Tensor, table: PageTable) -> Tensor:
    """o_TNH of one request that has no keys but of its new tokens."""
    T, page_P = len(q_TNH), table.pages_RP[0, : -(-len(q_TNH) // table.page_tokens)]
    # Not the table's own group, which asks the device whether its pages are neighbours.
    group = Group(slice(None), page_P, table.lengths_R, T, None)
    held = (group.gather(x_PpKH).to(q_TNH.dtype) for x_PpKH in (k_PpKH, v_PpKH))
    filled = (F.pad(x_1TNH, (0, 0, 0, 0, 0, -T % PAD_TO)) for x_1TNH in (q_TNH[None], *held))
    return sdpa.attend(*filled, causal=True, window=None)[0, :T]

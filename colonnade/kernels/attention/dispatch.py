"""Paged attention for mixed batches of decodes and prompt chunks: SDPA for long prompts, Flash-Decoding otherwise.

Flash-Decoding reads keys in place, in one or two launches for all requests of a step, and shared prefixes once
(:mod:`triton_decode`). A whole prompt of thousands of tokens is compute-bound, and torch's attention is faster even
though its keys are gathered first (8,192 tokens on an H200: 0.99 ms against 1.61). It is not worth it for shorter
prompts (1,024 tokens: a tenth faster, much less than its launches cost) or for chunks with keys before them (512 tokens
after 4,096: a fifth slower).

cuDNN builds a plan for each new length, 45 ms, which took half of the time under a load of 256 prompt lengths. Prompts
are therefore padded to multiples of :data:`PAD_TO` tokens; the padding comes last, so no token sees it.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.attention import sdpa, triton_decode
from colonnade.kernels.attention.page_table import Group, PageTable
from colonnade.kernels.device import upload

LONG_PROMPT = 4096
"""Tokens of a prompt from which on torch's attention is faster."""
PAD_TO = 256


class SubBatch(NamedTuple):
    """Some requests of a step, with their own page table."""

    rows: Tensor | slice
    """Their new tokens in the stream."""
    table: PageTable

    @staticmethod
    def of(table: PageTable, requests: Sequence[int]) -> "SubBatch":
        """The sub-batch of ``requests``, given in ascending order."""
        new, lengths = table.host_lengths
        ends, device = [0, *accumulate(new)], table.lengths_R.device
        first, last = requests[0], requests[-1] + 1
        contiguous = last - first == len(requests)
        rows = slice(ends[first], ends[last])
        index: Tensor | slice = slice(first, last)
        if not contiguous:
            rows = upload([t for r in requests for t in range(ends[r], ends[r + 1])], torch.int64, device)
            index = upload(requests, torch.int64, device)
        counts, positions = [new[r] for r in requests], [lengths[r] for r in requests]
        pages = None if table.known_pages is None else [table.known_pages[r] for r in requests]
        sub_table = PageTable(
            table.pages_RP[index], upload([0, *accumulate(counts)], torch.int32, device), table.lengths_R[index],
            table.page_tokens, max(counts), max(positions), known_lengths=(counts, positions), known_pages=pages,
            share=table.share,
        )  # fmt: skip
        return SubBatch(rows, sub_table)


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
    """o_TNH of requests with a paged KV cache (see :func:`reference.paged`)."""
    long = [r for r, (new, length) in enumerate(zip(*table.host_lengths, strict=True)) if new == length >= LONG_PROMPT]
    latents = values is not None and v_PpKH is k_PpKH
    if latents or not long or (window is not None and window < table.longest_context):
        options: dict[str, Any] = {"window": window, "values": values, "scales_Pp2": scales_Pp2, "kernels": "auto"}
        return triton_decode.paged(q_TNH, k_PpKH, v_PpKH, table, **options)
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
    """o_TNH of one request without keys before its new tokens."""
    T, page_P = len(q_TNH), table.pages_RP[0, : -(-len(q_TNH) // table.page_tokens)]
    # PageTable.groups would synchronise with the device to check whether pages are contiguous.
    group = Group(slice(None), page_P, table.lengths_R, T, None)
    kv = (group.gather(x_PpKH).to(q_TNH.dtype) for x_PpKH in (k_PpKH, v_PpKH))
    padded = (F.pad(x_1TNH, (0, 0, 0, 0, 0, -T % PAD_TO)) for x_1TNH in (q_TNH[None], *kv))
    return sdpa.attend(*padded, causal=True, window=None)[0, :T]

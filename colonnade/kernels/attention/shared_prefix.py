"""Attention of continuations that share prefixes: candidate answers to a question, each after the same context.

Rows are all prefixes, then the continuations of each prefix. A prefix attends to itself, and a continuation to its
prefix and to itself, both causally, so the keys of a prefix are computed and stored once for all its continuations:

    state(q) = merge(state over the prefix, state over the own continuation)

``flash`` computes the two states of all continuations in one varlen launch each; ``sdpa`` runs a masked call for each
prefix. The flash kernel's log-sum-exp has no gradient: this is for inference.
"""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.kernels.attention import reference, sdpa
from colonnade.kernels.softmax_state import State, merge


class PrefixTree(NamedTuple):
    """Lengths of B prefixes and of the continuations of each; ``cu_…`` are int32 offsets on the device."""

    prefixes: tuple[int, ...]
    continuations: tuple[tuple[int, ...], ...]
    """Per prefix; none for a sequence that nothing continues."""
    cu_sequences: Tensor
    """Of all prefixes and continuations, in the order of their rows."""
    cu_prefixes: Tensor
    cu_groups: Tensor
    """Of each prefix's continuations, among the rows of continuations."""

    @staticmethod
    def of(prefixes: list[int], continuations: list[list[int]], device: torch.device | str) -> "PrefixTree":
        """A tree with these lengths."""

        def offsets(lengths: list[int]) -> Tensor:
            return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32).to(device)

        flat = [length for each in continuations for length in each]
        return PrefixTree(
            tuple(prefixes), tuple(map(tuple, continuations)), offsets([*prefixes, *flat]), offsets(prefixes),
            offsets([sum(each) for each in continuations]),
        )  # fmt: skip

    @property
    def longest(self) -> int:
        """Tokens of the longest prefix with its longest continuation."""
        pairs = zip(self.prefixes, self.continuations, strict=True)
        return max((prefix + max(lengths, default=0) for prefix, lengths in pairs), default=0)

    def groups(self) -> list[tuple[slice, slice, tuple[int, ...]]]:
        """(rows of a prefix, rows of its continuations, their lengths) for each prefix."""
        found: list[tuple[slice, slice, tuple[int, ...]]] = []
        start, more = 0, sum(self.prefixes)
        for prefix, lengths in zip(self.prefixes, self.continuations, strict=True):
            end = more + sum(lengths)
            found.append((slice(start, start + prefix), slice(more, end), lengths))
            start, more = start + prefix, end
        return found


def shared_prefix_reference(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, tree: PrefixTree, *, window: int | None = None
) -> Tensor:
    """o_TNH: each continuation as the end of its own sequence."""
    prefixes, rest = list[Tensor](), list[Tensor]()
    for prefix, rows, lengths in tree.groups():
        k_SKH, v_SKH = k_TKH[prefix], v_TKH[prefix]
        prefixes.append(reference.attend(q_TNH[prefix], k_SKH, v_SKH, window=window).o)
        for start, end in itertools.pairwise(itertools.accumulate(lengths, initial=rows.start)):
            keys, values = torch.cat([k_SKH, k_TKH[start:end]]), torch.cat([v_SKH, v_TKH[start:end]])
            rest.append(reference.attend(q_TNH[start:end], keys, values, window=window).o)
    return torch.cat([*prefixes, *rest]) if prefixes else q_TNH.clone()


def shared_prefix_sdpa(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, tree: PrefixTree, *, window: int | None = None
) -> Tensor:
    """o_TNH through scaled_dot_product_attention: for each prefix a causal call, and a masked one for the rest."""
    out_TNH = torch.empty_like(q_TNH, memory_format=torch.contiguous_format)
    for prefix, rows, lengths in tree.groups():
        q_1TNH, k_1SKH, v_1SKH = (x[None, prefix] for x in (q_TNH, k_TKH, v_TKH))
        out_TNH[prefix] = sdpa.attend(q_1TNH, k_1SKH, v_1SKH, causal=True, window=window)[0]
        if lengths:
            keys, values = (torch.cat([x[prefix], x[rows]])[None] for x in (k_TKH, v_TKH))
            mask_TS = _mask(prefix.stop - prefix.start, lengths, window, q_TNH.device)
            out_TNH[rows] = sdpa.attend_masked(q_TNH[None, rows], keys, values, mask_TS)[0]
    return out_TNH


def _mask(prefix: int, lengths: tuple[int, ...], window: int | None, device: torch.device) -> Tensor:
    """Which keys of the prefix and of all its continuations each row of these sees."""
    sequence_T = torch.arange(len(lengths), device=device).repeat_interleave(torch.tensor(lengths, device=device))
    starts_T = torch.tensor([0, *itertools.accumulate(lengths)], device=device)[sequence_T]
    position_T = prefix + torch.arange(len(sequence_T), device=device) - starts_T
    key_S = torch.cat([torch.arange(prefix, device=device), position_T])
    owner_S = torch.cat([sequence_T.new_full((prefix,), -1), sequence_T])
    mask_TS = ((owner_S == -1) | (owner_S == sequence_T[:, None])) & (key_S <= position_T[:, None])
    return mask_TS if window is None else mask_TS & (key_S > position_T[:, None] - window)


def shared_prefix_flash(
    q_TNH: Tensor, k_TKH: Tensor, v_TKH: Tensor, tree: PrefixTree, *, window: int | None = None
) -> Tensor:
    """o_TNH in two launches of varlen FlashAttention, whose states are merged in float32."""
    if q_TNH.shape[2] % 8 or not len(q_TNH) or (window is not None and window < tree.longest):
        return shared_prefix_sdpa(q_TNH, k_TKH, v_TKH, tree, window=window)
    P = sum(tree.prefixes)
    longest = max(max(lengths) for lengths in (tree.prefixes, *tree.continuations) if lengths)
    run = torch.ops.aten._flash_attention_forward
    cu = tree.cu_sequences
    o_TNH, lse_NT, *_ = run(q_TNH, k_TKH, v_TKH, cu, cu, longest, longest, 0.0, True, False)
    if len(q_TNH) == P:
        return o_TNH
    longest, group = max(tree.prefixes), max(map(sum, tree.continuations))
    shared_TNH, shared_NT, *_ = run(
        q_TNH[P:], k_TKH[:P], v_TKH[:P], tree.cu_groups, tree.cu_prefixes, group, longest, 0.0, False, False
    )
    own, shared = State(o_TNH[P:].float(), lse_NT.T[P:]), State(shared_TNH.float(), shared_NT.T)
    return torch.cat([o_TNH[:P], merge(own, shared).o.to(o_TNH.dtype)])

"""Attention backends: packed sequences for training, a paged KV cache for serving.

This is the only place where training and serving differ. A Transformer gets an ``attend`` with its stream and passes
each block the view of its layer, ``attend.at(layer, window)``, which the block calls with (q, k, v). The view has only
tensors and plain numbers that are the same in all layers, so torch.compile makes one graph for all blocks (with a layer
index inside the block it makes one for each layer, and gives up after eight).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from colonnade.kernels.attention.cross import relative_mask
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.shared_prefix import PrefixTree
from colonnade.kernels.dropout import AttentionDropout
from colonnade.kernels.linear.reference import NormWeights
from colonnade.kernels.registry import choose
from colonnade.kernels.rotary import Rotation
from colonnade.model.cache import KVCache, Pools
from colonnade.model.dropout import Dropout


class Attend(Protocol):
    """The view of one layer: called with this rank's heads of the new tokens, it returns the attention output."""

    caches: ClassVar[bool]
    """Whether keys and values are stored beyond the call, so that compressed ones pay off."""

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        """o_TnH."""
        ...


class AttendBackend(Protocol):
    """The ``attend`` argument of a Transformer."""

    def at(self, layer: int, window: int | None) -> Attend:
        """The view of one layer with a sliding window of ``window`` tokens."""
        ...


@dataclass(frozen=True)
class Packed:
    """Packed sequences, concatenated without padding: training, scoring and encoders.

    ``cu_seqlens`` int32 holds the start of each sequence, and T at the end (sequences of length 0 are allowed, so it
    can be padded to a fixed length). ``longest`` and ``equal`` (all of length ``longest``) are plain numbers, known
    without waiting for the device.
    """

    caches: ClassVar[bool] = False

    cu_seqlens: Tensor
    longest: int
    equal: bool
    causal: bool = True
    window: int | None = None
    kernels: str = "auto"
    dropout: Dropout | None = None
    """Attention-probability dropout, in training."""
    first_head: int = 0
    """The number, among all ranks' query heads, of this rank's first one."""
    layer_dropout: AttentionDropout | None = None
    """The dropout of one layer; set by :meth:`at`."""
    near_Rn: Tensor | None = None
    """Relative position biases of this rank's heads (:mod:`~colonnade.model.relative_positions`)."""
    bias_nTS: Tensor | None = None
    """The same for all pairs of a sequence, made once for all layers."""

    @staticmethod
    def of(lengths: list[int], device: torch.device | str = "cpu", **options: object) -> "Packed":
        """Packed sequences of these ``lengths``."""
        ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return Packed(ends, max(lengths, default=0), len(set(lengths)) <= 1, **options)  # type: ignore[arg-type]

    def with_relative_bias(self, near_Rn: Tensor) -> "Packed":
        """With relative position biases, which are expanded here unless the plain implementation does it itself."""
        bias_nTS = None
        if self.dropout is None and self.kernels != "reference":
            bias_nTS = relative_mask(near_Rn, self.longest, causal=self.causal)
        return replace(self, near_Rn=near_Rn, bias_nTS=bias_nTS)

    def at(self, layer: int, window: int | None) -> "Packed":
        """The view of one layer: its window and its dropout key."""
        if self.dropout is not None:
            pairs = self.dropout.pairs(layer, self.first_head)
            return replace(self, window=window, dropout=None, layer_dropout=pairs)
        return self if window == self.window else replace(self, window=window)

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        """o_TnH."""
        if self.near_Rn is not None:
            assert self.window is None, "relative positions with a window"
            kernels = self.kernels if self.layer_dropout is None else "reference"
            run = choose("relative_attention", q_TnH.device.type, q_TnH.dtype, kernels)
            options = {} if self.layer_dropout is None else {"dropout": self.layer_dropout}
            return run(
                q_TnH, k_TkH, v_TkH, self.cu_seqlens, self.near_Rn, causal=self.causal, longest=self.longest,
                equal=self.equal, bias_NTS=self.bias_nTS, **options,
            )  # fmt: skip
        mask = {"longest": self.longest, "equal": self.equal, "causal": self.causal, "window": self.window}
        if self.layer_dropout is not None:
            run = choose("dropout_attention", q_TnH.device.type, q_TnH.dtype, self.kernels)
            return run(q_TnH, k_TkH, v_TkH, self.cu_seqlens, **mask, dropout=self.layer_dropout)
        run = choose("packed_attention", q_TnH.device.type, q_TnH.dtype, self.kernels)
        return run(q_TnH, k_TkH, v_TkH, self.cu_seqlens, **mask)


@dataclass(frozen=True)
class SharedPrefix:
    """Packed prefixes, then their continuations, each of which attends to its prefix and itself: scoring of
    continuations.
    """

    caches: ClassVar[bool] = False

    tree: PrefixTree
    window: int | None = None

    @staticmethod
    def of(prefixes: list[int], continuations: list[list[int]], device: torch.device | str = "cpu") -> "SharedPrefix":
        """Prefixes of these lengths, each with continuations of these lengths."""
        return SharedPrefix(PrefixTree.of(prefixes, continuations, device))

    def at(self, layer: int, window: int | None) -> "SharedPrefix":
        """The view of one layer."""
        return self if window == self.window else replace(self, window=window)

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        """o_TnH."""
        run = choose("shared_prefix_attention", q_TnH.device.type, q_TnH.dtype)
        return run(q_TnH, k_TkH, v_TkH, self.tree, window=self.window)


@dataclass(frozen=True)
class Paged:
    """New tokens of R requests with keys in a paged cache: prefill, chunked prefill and decoding in one batch.

    The new tokens of request r are rows ``cu_queries[r]:cu_queries[r + 1]`` of the stream and the last of its
    ``lengths_R[r]`` positions. ``slots_T`` is where each new token's key and value are written (page · page_tokens +
    offset).
    """

    cache: KVCache
    pages_RP: Tensor
    slots_T: Tensor
    cu_queries: Tensor
    lengths_R: Tensor
    longest_query: int
    longest_context: int
    kernels: str = "auto"
    known: tuple[list[int], list[int]] | None = None
    """(new tokens, positions) of each request as plain numbers, if known without waiting for the device."""
    known_pages: Sequence[Sequence[int]] | None = None
    """Each request's pages."""
    share: bool = True
    """Whether a prefix that several requests share may be read once for all of them."""
    near_Rn: Tensor | None = None
    """Relative position biases of this rank's heads (:mod:`~colonnade.model.relative_positions`)."""

    @cached_property
    def table(self) -> PageTable:
        """The kernels' page table; shared by all layers, so that kernels plan once per step."""
        return PageTable(
            self.pages_RP,
            self.cu_queries,
            self.lengths_R,
            self.cache.page_tokens,
            self.longest_query,
            self.longest_context,
            self.known,
            self.known_pages,
            self.share,
        )

    def with_relative_bias(self, near_Rn: Tensor) -> "Paged":
        """This with relative position biases, on the same :attr:`table`: a CUDA graph reads the plans in that."""
        biased = replace(self, near_Rn=near_Rn)
        biased.__dict__["table"] = self.table
        return biased

    def at(self, layer: int, window: int | None) -> "PagedView":
        """The view of one layer."""
        return PagedView(self.table, self.slots_T, self.cache.at(layer), window, self.kernels, self.near_Rn)


@dataclass(frozen=True)
class PagedView:
    """One layer of a :class:`Paged`: writes the new keys and values, then attends to all keys."""

    caches: ClassVar[bool] = True

    table: PageTable
    slots_T: Tensor
    pools: Pools
    window: int | None
    kernels: str
    near_Rn: Tensor | None = None

    @property
    def writes_in_one_launch(self) -> bool:
        """Whether :meth:`from_qkv` replaces rotation and cache write outside fused blocks too."""
        return self.kernels == "batch_invariant" and self.slots_T.is_cuda and self.near_Rn is None

    def from_qkv(
        self, qkv_Tz: Tensor, rotation: Rotation | None, norms: tuple[NormWeights, NormWeights] | None
    ) -> Tensor:
        """o_TnH from the fused q/k/v projection; one kernel normalises, rotates and writes to the cache."""
        # Other names are of attention only.
        kernels = self.kernels if self.kernels in ("native", "batch_invariant") else "auto"
        place = choose("rope_and_kv_write", qkv_Tz.device.type, qkv_Tz.dtype, kernels)
        q_TnH = place(qkv_Tz, self.pools.k_PpKH, self.pools.v_PpKH, self.slots_T, turn=rotation, norms=norms)
        return self.of_written(q_TnH)

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        """o_TnH."""
        self.pools.write(self.slots_T, k_TkH, v_TkH)
        return self.of_written(q_TnH)

    def of_written(self, q_TnH: Tensor) -> Tensor:
        """o_TnH of queries whose keys and values are in the cache."""
        if self.near_Rn is not None:
            # Fused steps have no biases; "reference" is the only other implementation.
            kernels = "reference" if self.kernels == "reference" else "auto"
            biased = choose("relative_paged_attention", q_TnH.device.type, q_TnH.dtype, kernels)
            return biased(q_TnH, self.pools.k_PpKH, self.pools.v_PpKH, self.table, self.near_Rn)
        pools, run = self.pools, choose("paged_attention", q_TnH.device.type, q_TnH.dtype, self.kernels)
        return run(q_TnH, pools.k_PpKH, pools.v_PpKH, self.table, window=self.window, **pools.kernel_arguments)

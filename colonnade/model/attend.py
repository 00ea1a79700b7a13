"""Who sees whom, and where the keys live: the one thing in which training and serving differ.

A Transformer is given an ``attend`` with its stream and hands each block the block's own view,
``attend.at(layer, window)``, which the block calls with (q, k, v). The view holds only tensors and plain numbers that
do not change from layer to layer, so that torch.compile makes one graph for all blocks (a layer index inside the
block makes one a layer, and after eight of them gives up).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.dropout import AttentionDropout
from colonnade.kernels.linear.reference import Scale
from colonnade.kernels.registry import choose
from colonnade.kernels.rotary import Rotation
from colonnade.model.cache import KVCache, Pools
from colonnade.model.dropout import Dropout


class Attend(Protocol):
    """One layer's view: called with this rank's heads of the new tokens, it returns the attention's output."""

    keeps: ClassVar[bool]
    """Whether keys and values outlive the call, so that small ones are worth some work."""

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        """o_TnH."""
        ...


class Attending(Protocol):
    """What a Transformer is called with."""

    def at(self, layer: int, window: int | None) -> Attend:
        """The view of one layer, whose sliding window is ``window`` tokens."""
        ...


@dataclass(frozen=True)
class Packed:
    """Sequences laid end to end, keys beside the queries: training, scoring and encoders.

    ``cu_seqlens`` int32 holds where each sequence starts, and T at the end (sequences of length 0 are allowed, so it
    can be padded to a fixed length). ``longest`` and ``equal`` (all of length ``longest``) are plain numbers, known
    without asking the device.

    With ``noise`` probabilities are dropped, in training; ``head`` is the number, of all, of this rank's first query
    head. ``dropout`` is what :meth:`at` makes of the two for one layer.
    """

    keeps: ClassVar[bool] = False

    cu_seqlens: Tensor
    longest: int
    equal: bool
    causal: bool = True
    window: int | None = None
    kernels: str = "auto"
    noise: Dropout | None = None
    head: int = 0
    dropout: AttentionDropout | None = None

    @staticmethod
    def of(lengths: list[int], device: torch.device | str = "cpu", **options: object) -> "Packed":
        """Packed sequences of these ``lengths``."""
        ends = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        return Packed(ends, max(lengths, default=0), len(set(lengths)) <= 1, **options)  # type: ignore[arg-type]

    def at(self, layer: int, window: int | None) -> "Packed":
        """The same for every layer, but for the window and the key of the dropout."""
        if self.noise is not None:
            return replace(self, window=window, noise=None, dropout=self.noise.pairs(layer, self.head))
        return self if window == self.window else replace(self, window=window)

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        """o_TnH."""
        sees = {"longest": self.longest, "equal": self.equal, "causal": self.causal, "window": self.window}
        if self.dropout is not None:
            run = choose("dropout_attention", q_TnH.device.type, q_TnH.dtype, self.kernels)
            return run(q_TnH, k_TkH, v_TkH, self.cu_seqlens, **sees, dropout=self.dropout)
        run = choose("packed_attention", q_TnH.device.type, q_TnH.dtype, self.kernels)
        return run(q_TnH, k_TkH, v_TkH, self.cu_seqlens, **sees)


@dataclass(frozen=True)
class Paged:
    """New tokens of R requests whose keys live in pages: prefill, chunks of prefill and decoding, freely mixed.

    Request r's new tokens are rows ``cu_queries[r]:cu_queries[r + 1]`` of the stream and the last of its
    ``lengths_R[r]`` positions. ``slots_T`` says where each new token's key and value go (page · page_tokens + offset).
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
    """(new tokens, positions) of each request, as plain numbers, where they are known without asking the device."""
    known_pages: Sequence[Sequence[int]] | None = None
    """Each request's pages, likewise."""
    share: bool = True
    """Whether keys that several requests share may be read once for all of them."""

    @cached_property
    def table(self) -> PageTable:
        """What a kernel is told of the requests; one for all layers, so that it is worked through only once."""
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

    def at(self, layer: int, window: int | None) -> "PagedView":
        """This layer's pools."""
        return PagedView(self.table, self.slots_T, self.cache.at(layer), window, self.kernels)


@dataclass(frozen=True)
class PagedView:
    """One layer of a :class:`Paged`: writes the new keys and values, then attends to all of them."""

    keeps: ClassVar[bool] = True

    table: PageTable
    slots_T: Tensor
    pools: Pools
    window: int | None
    kernels: str

    def of_product(self, qkv_Tz: Tensor, turn: Rotation | None, norms: tuple[Scale, Scale] | None) -> Tensor:
        """o_TnH of heads as the first projection gives them, which are normalised and turned on their way."""
        place = choose("rope_and_kv_write", qkv_Tz.device.type, qkv_Tz.dtype)
        q_TnH = place(qkv_Tz, self.pools.k_PpKH, self.pools.v_PpKH, self.slots_T, turn=turn, norms=norms)
        return self._attend(q_TnH)

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        """o_TnH."""
        self.pools.write(self.slots_T, k_TkH, v_TkH)
        return self._attend(q_TnH)

    def _attend(self, q_TnH: Tensor) -> Tensor:
        pools, run = self.pools, choose("paged_attention", q_TnH.device.type, q_TnH.dtype, self.kernels)
        return run(q_TnH, pools.k_PpKH, pools.v_PpKH, self.table, window=self.window, **pools.seen)

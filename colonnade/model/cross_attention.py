"""Cross attention of an encoder–decoder: decoder queries attend to the encoder's output, its *memory*.

    [k_i; v_i] = W_bridge,i s_j           for all decoder layers i and source tokens j at once (the bridge)
    y = W_out,i attend(W_q,i norm(x), k_i, v_i)

One product makes the keys and values of all decoder layers, so that the encoder's output enters the tensor-parallel
region once. Rows of W_bridge are grouped by key/value head, then by layer (its key, its value): each rank's heads are
one contiguous range.

``attend = EncoderDecoderAttend(own, source, memory)`` carries three attention backends through the model: ``own`` among
the targets, ``source`` among the sources, and ``memory``, which keeps the bridge's output and answers the queries of
each layer: :class:`PackedMemory` for sources in the same pass, :class:`PagedMemory` for sources in the pages of the KV
cache. Cross attention over pages needs no separate kernel: a query is a request of one new token whose pages are its
source's.
"""

from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.dropout import AttentionDropout
from colonnade.kernels.registry import choose
from colonnade.model.attend import Attend, AttendBackend, Packed, Paged
from colonnade.model.cache import KVCache, Pools
from colonnade.model.dropout import Dropout
from colonnade.model.tensor_parallel_linear import Linear, column_parallel, row_parallel
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import Placement, residual_placement


class CrossAttention(nn.Module):
    """The queries and the output projection of one decoder layer's cross attention."""

    def __init__(self, config: ModelConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.axes, self.H = axes, config.head_width
        self.q_factor = 1.0 if config.score_scale is None else config.score_scale * config.head_width**0.5
        z = config.heads // axes.tp.size * config.head_width
        on = {"device": device, "dtype": dtype}
        self.q = Linear(config.width, z, bias=config.qkv_bias, **on)
        self.out = Linear(z, config.width, bias=config.out_bias, **on)
        self.layout: dict[str, Placement] = {"q.weight": 0, "out.weight": 1}
        if config.qkv_bias:
            self.layout["q.bias"] = 0
        if config.out_bias:
            self.layout["out.bias"] = residual_placement(axes)

    def forward(self, x_tD: Tensor, T: int, attend: "EncoderDecoderView") -> Tensor:
        """y_tD for the residual stream of T target tokens."""
        (q_Tz,) = column_parallel(self.axes, x_tD, T, self.q)
        return row_parallel(self.axes, self.attend(q_Tz, attend), self.out)

    def attend(self, q_Tz: Tensor, attend: "EncoderDecoderView") -> Tensor:
        """The output of this rank's heads, side by side."""
        q_TnH = q_Tz.unflatten(-1, (-1, self.H))
        return attend.cross_attend(q_TnH if self.q_factor == 1.0 else q_TnH * self.q_factor).flatten(1)


class Bridge(nn.Module):
    """Keys and values of all decoder layers for the encoder's output."""

    def __init__(self, config: ModelConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.axes, self.layers, self.H = axes, config.layers, config.head_width
        rows = config.kv_heads // axes.tp.size * config.layers * 2 * config.head_width
        self.kv = Linear(config.width, rows, bias=config.qkv_bias, device=device, dtype=dtype)
        self.layout: dict[str, Placement] = {"kv.weight": 0}
        if config.qkv_bias:
            self.layout["kv.bias"] = 0

    def forward(self, x_sD: Tensor, S: int) -> Tensor:
        """kv_SkL2H of S source tokens: for each key/value head and decoder layer a key and a value."""
        (kv_Sz,) = column_parallel(self.axes, x_sD, S, self.kv)
        return kv_Sz.unflatten(-1, (-1, self.layers, 2, self.H))


class LayerMemory(Protocol):
    """The memory of one decoder layer."""

    def __call__(self, q_TnH: Tensor) -> Tensor:
        """o_TnH of the target tokens."""
        ...


class Memory(Protocol):
    """Where the keys and values of the sources are."""

    def write(self, kv_SkL2H: Tensor) -> "Memory":
        """The memory with the keys and values of new sources."""
        ...

    def at(self, layer: int) -> LayerMemory:
        """The memory of one decoder layer."""
        ...


@dataclass(frozen=True)
class PackedMemory:
    """Sources in the same pass as their targets: sequence b of the targets attends to sequence b of the sources."""

    cu_sources: Tensor
    cu_targets: Tensor
    dropout: Dropout | None = None
    """Dropout of the attention probabilities; its indices are the targets'."""
    source_index_S: Tensor | None = None
    """The indices of the sources' tokens in the step's global batch, for dropout."""
    first_head: int = 0
    kernels: str = "auto"
    longest: tuple[int, int] | None = None
    """The longest target and the longest source, or upper bounds; None: not known without waiting for the device."""
    equal: bool = False
    """Whether all targets and all sources have these lengths."""
    layers: tuple[Tensor, ...] | None = None
    """kv_Sk2H of each layer."""

    def write(self, kv_SkL2H: Tensor) -> "PackedMemory":
        """The memory with these keys and values."""
        # One unbind: a slice for each layer would fill a whole gradient with zeros, and add it, as many times.
        return replace(self, layers=kv_SkL2H.unbind(2))

    def at(self, layer: int) -> "PackedMemoryLayer":
        """The memory of one decoder layer."""
        assert self.layers is not None, "the sources come before the targets"
        pairs = None
        if self.dropout is not None:
            pairs = self.dropout.pairs(layer, self.first_head, self.source_index_S)
        k_SkH, v_SkH = self.layers[layer].unbind(2)
        return PackedMemoryLayer(
            k_SkH, v_SkH, self.cu_targets, self.cu_sources, pairs, self.kernels, self.longest, self.equal
        )


@dataclass(frozen=True)
class PackedMemoryLayer:
    """One layer of :class:`PackedMemory`."""

    k_SkH: Tensor
    v_SkH: Tensor
    cu_targets: Tensor
    cu_sources: Tensor
    dropout: AttentionDropout | None
    kernels: str
    longest: tuple[int, int] | None
    equal: bool

    def __call__(self, q_TnH: Tensor) -> Tensor:
        """o_TnH."""
        kernels = self.kernels if self.dropout is None else "reference"
        run: Any = choose("cross_attention", q_TnH.device.type, q_TnH.dtype, kernels)
        options = {} if self.dropout is None else {"dropout": self.dropout}
        return run(
            q_TnH, self.k_SkH, self.v_SkH, self.cu_targets, self.cu_sources, longest=self.longest, equal=self.equal,
            **options,
        )  # fmt: skip


@dataclass(frozen=True)
class PagedMemory:
    """Sources in pages of the KV cache: written once by the pass that encodes them, read by every later one.

    ``slots_S`` is where the keys and values of the pass's new source tokens go (page · page_tokens + offset), and
    ``table`` has a request of one new token for each target token of the pass, with the pages and the length of its
    source.
    """

    cache: KVCache
    slots_S: Tensor
    table: PageTable
    kernels: str = "auto"

    @staticmethod
    def of(
        cache: KVCache, slots_S: Tensor, pages: list[list[int]], lengths: list[int], new: list[int]
    ) -> "PagedMemory":
        """The memory of requests whose sources have these pages and lengths, with ``new`` target tokens each."""
        rows = [r for r, count in enumerate(new) for _ in range(count)]
        device, T, most = cache.k[0].device, len(rows), max(map(len, pages), default=1)
        padded = [[*row, *([0] * (most - len(row)))] for row in pages]
        pages_TP = torch.tensor([padded[r] for r in rows], dtype=torch.int32, device=device).view(T, most)
        lengths_T = torch.tensor([lengths[r] for r in rows], dtype=torch.int32, device=device)
        ends = torch.arange(T + 1, dtype=torch.int32, device=device)
        known = ([1] * T, [lengths[r] for r in rows])
        table = PageTable(pages_TP, ends, lengths_T, cache.page_tokens, 1, max(lengths, default=0), known)
        return PagedMemory(cache, slots_S, table)

    def write(self, kv_SkL2H: Tensor) -> "PagedMemory":
        """Write the keys and values of new sources into their pages."""
        for layer in range(kv_SkL2H.shape[2]):
            k_SkH, v_SkH = kv_SkL2H[:, :, layer].unbind(2)
            self.cache.at(layer).write(self.slots_S, k_SkH, v_SkH)
        return self

    def at(self, layer: int) -> "PagedMemoryLayer":
        """The memory of one decoder layer."""
        return PagedMemoryLayer(self.cache.at(layer), self.table, self.kernels)


@dataclass(frozen=True)
class PagedMemoryLayer:
    """One layer of :class:`PagedMemory`."""

    pools: Pools
    table: PageTable
    kernels: str

    def __call__(self, q_TnH: Tensor) -> Tensor:
        """o_TnH."""
        run = choose("paged_attention", q_TnH.device.type, q_TnH.dtype, self.kernels)
        pools = self.pools
        return run(q_TnH, pools.k_PpKH, pools.v_PpKH, self.table, window=None, **pools.kernel_arguments)


@dataclass(frozen=True)
class EncoderDecoderAttend:
    """The ``attend`` of an encoder–decoder model."""

    own: AttendBackend
    """Self-attention of the targets."""
    source: Packed | None
    """Self-attention of the sources in this pass; None if the pass has none."""
    memory: Memory

    def at(self, layer: int, window: int | None) -> Attend:
        """The view of one decoder layer, a :class:`EncoderDecoderView`."""
        view = EncoderDecoderView(self.own.at(layer, window), self.memory.at(layer))
        return cast(Attend, view)  # its ``caches`` is a property


@dataclass(frozen=True)
class EncoderDecoderView:
    """One decoder layer: a call is self-attention, :meth:`cross_attend` is cross attention."""

    own: Attend
    memory: LayerMemory

    @property
    def caches(self) -> bool:
        """Whether self-attention stores keys and values beyond the call."""
        return self.own.caches

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        """o_TnH among the targets."""
        return self.own(q_TnH, k_TkH, v_TkH)

    def cross_attend(self, q_TnH: Tensor) -> Tensor:
        """o_TnH over each target's source."""
        return self.memory(q_TnH)


def with_relative_bias(attend: AttendBackend, near_Rn: Tensor) -> AttendBackend:
    """``attend`` with relative position biases in its self-attention."""
    if isinstance(attend, EncoderDecoderAttend):
        return replace(attend, own=with_relative_bias(attend.own, near_Rn))
    assert isinstance(attend, Packed | Paged), f"relative positions are not implemented for {type(attend).__name__}"
    return attend.with_relative_bias(near_Rn)

"""Estimate of an engine's memory on one rank, before anything is allocated.

    weights       this rank's shard, in its storage format
    cache         pages · bytes of a page
    activations   max(t · max(2 D + 3 f, 2 D + z + 4 n H) + 2 s k H, r · v · (2 + 24 / bytes))    elements of the dtype
                  and the largest quantised matrix, dequantised (on a CPU a band of it)
    graphs        for each captured size its logits and page tables, and once the activations of the largest

At its peak a pass of t tokens (``token_budget``) holds the residual stream, its norm and three rows of f hidden units,
or the projections z and rotated heads; keys and values of one context (s) gathered from their pages; and for each of r
requests (``max_requests``) v logits, a float32 copy and the sampler's float64 noise. A draft model
(:mod:`~colonnade.serve.draft_model`) adds its weights and graphs, and to each page its keys and values; it runs before
the target, so that only the larger activations count. Allocator waste and libraries are
not included: the engine plans for a share of the free memory
(:data:`~colonnade.parallel.device_memory.USABLE_FRACTION`).
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch

from colonnade.config import ModelConfig, ServeConfig
from colonnade.config.memory_remedies import MemoryUse
from colonnade.kernels.linear.reference import BAND_ELEMENTS
from colonnade.model import KVCache, Transformer
from colonnade.model.moe.expert_offload import device_bytes
from colonnade.model.weight_only_quant import Formats, quantisable_shapes, weight_bytes_as
from colonnade.parallel.axis import Axes, Axis, ExpertAxes
from colonnade.serve.batch_rows import padded_batch_size
from colonnade.serve.resolve_config import EngineTraits, draft_config, resolve_config

FLOAT8 = (8, 9)
"""The lowest compute capability with kernels that can convert float8."""


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes of one rank by purpose."""

    weights: int
    cache: int
    graphs: int
    activations: int
    draft: int = 0
    """Weights and graphs of a draft model."""

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.cache + self.graphs + self.activations + self.draft

    def use(self, available: int) -> MemoryUse:
        """The needs as a table, compared with the ``available`` bytes."""
        rows = {
            "weights": self.weights,
            "key/value cache": self.cache,
            "graphs": self.graphs,
            "activations": self.activations,
        }
        if self.draft:
            rows["draft model"] = self.draft
        return MemoryUse("rank", rows, available)


@dataclass(frozen=True)
class EngineSpec:
    """Everything that determines an engine's memory."""

    model: ModelConfig
    serve: ServeConfig
    dtype: torch.dtype
    device: torch.device
    tp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int = 1
    layers_on_device: int | None = None
    """Layers whose experts are on the device."""
    weights: int | None = None
    """Bytes of a loaded model's weights; None: estimated from its shape."""
    formats: Formats = field(default_factory=dict, hash=False)
    """The formats of quantised matrices that are kept as the checkpoint stores them."""
    draft: ModelConfig | None = None
    """The draft model, if ``serve.draft`` names one; rank 0 has all of it."""
    draft_weights: int | None = None
    """Bytes of its weights, if it is loaded."""

    @property
    def axes(self) -> Axes:
        """The parallel axes of the first rank."""
        grid = ExpertAxes(ep=Axis("ep", self.ep), etp=Axis("etp", self.etp))
        return Axes(tp=Axis("tp", self.tp), cp=Axis("cp", self.cp), experts=grid)

    @cached_property
    def resolved(self) -> ServeConfig:
        """``serve`` with defaults resolved for this model and device."""
        waiting = self.layers_on_device is not None and self.layers_on_device < self.model.expert_layers
        return resolve_config(
            self.serve, EngineTraits(self.model, self.dtype, self.device, self.cp, offloads_experts=waiting)
        )

    @cached_property
    def draft_spec(self) -> "EngineSpec | None":
        """The draft model as a separate engine; None without one."""
        if self.draft is None or self.serve.draft_model is None:
            return None
        serve = draft_config(self.resolved, EngineTraits(self.draft, self.dtype, self.device))
        if self.formats:  # serve.weights is the format of this model's file, not of the draft's
            serve = serve.replace(weights="stored")
        return EngineSpec(self.draft, serve, self.dtype, self.device, weights=self.draft_weights)

    @cached_property
    def page_count(self) -> int:
        """Pages of the rank's cache; 0 when none fits.

        As many as configured, but no more than ``max_requests`` whole contexts fill, divided by the ranks that share
        it. Without a configured size that is the most that an engine uses
        (:func:`colonnade.serve.cache_size.size_cache`).
        """
        serve = self.resolved
        each = -(-self.model.context // serve.page)
        if self.model.encoder is not None:  # the source's keys
            each += -(-self.model.encoder.context // serve.page)
        pages = -(-(serve.pages or serve.max_requests * each) // self.cp)
        if serve.pages is None and serve.cache_bytes is not None:
            pages = min(serve.cache_bytes // self.page_bytes, pages)
        return pages and pages + scratch_pages(self.axes, serve)

    def needs(self) -> MemoryNeeds:
        """The needs of the first rank, which has the largest shards."""
        return self.needs_with(self.page_count)

    def needs_with(self, pages: int) -> MemoryNeeds:
        """The needs with ``pages`` pages on the rank, including a scratch page."""
        context = min(self.model.context, pages * self.resolved.page * self.cp)
        activations = self._activation_bytes(context) + self._dequantised_bytes
        own = MemoryNeeds(self._weight_bytes, pages * self.page_bytes, self._graph_bytes(context), activations)
        if (draft := self.draft_spec) is None:
            return own
        needs = draft.needs_with(pages * self.cp)
        return replace(own, activations=max(activations, needs.activations), draft=needs.weights + needs.graphs)

    def _graph_bytes(self, context: int) -> int:
        if not self.resolved.graph_capture or self.device.type != "cuda":
            return 0
        most = self.serve.max_requests
        sizes = {padded_batch_size(n, most) for n in range(1, most + 1)}
        logits = -(-self.model.vocab_size // self.tp) * self.dtype.itemsize
        tables = 4 * -(-context // self.resolved.page)
        return sum(sizes) * (logits + tables) + self._layer_bytes(most)

    @cached_property
    def page_bytes(self) -> int:
        """Memory of one page of the rank's cache, and of those of the draft model's [bytes]."""
        serve, draft = self.resolved, self.draft_spec
        own = KVCache.bytes_per_page(self.model, self.axes, serve.page, self.dtype, serve.cache)
        return own if draft is None else own + self.cp * draft.page_bytes

    @cached_property
    def _shape(self) -> Transformer:
        return Transformer(self.model, self.axes, device="meta", dtype=self.dtype)

    @cached_property
    def _weight_bytes(self) -> int:
        if self.weights is not None:
            return self.weights
        storage = partial(
            weight_bytes_as, weights="stored" if self.formats else self.serve.weights, group=self.serve.weight_group,
            formats=self.formats,
        )  # fmt: skip
        return device_bytes(self._shape, self.layers_on_device, storage)

    def _layer_bytes(self, tokens: int) -> int:
        """Peak activations of ``tokens`` tokens in a layer [bytes]."""
        config, tp = self.model, self.tp
        heads, kv = config.heads // tp, config.kv_heads // tp
        wide = config.latent.kv_rank + config.latent.rope_width if config.latent else config.head_width
        hidden = 3 * -(-config.ffn_width // tp)
        if config.moe is not None:
            hidden = max(hidden, config.moe.active * (3 * config.moe.ffn_width + 2 * config.width))
        attention = (heads + 2 * kv) * config.head_width + 4 * heads * wide
        return tokens * (2 * config.width + max(hidden, attention)) * self.dtype.itemsize

    def _activation_bytes(self, context: int) -> int:
        config, serve, each = self.model, self.serve, self.dtype.itemsize
        element_bytes = each if serve.cache == "stored" else each + 1  # gathered in 8 bits, then converted
        gathered = 2 * context * max(1, config.kv_heads // self.tp) * config.head_width * element_bytes
        if config.latent:
            # 8-bit latents are gathered as such, and first converted to float32.
            element_bytes = each if serve.cache == "stored" else each + 5
            gathered = context * (config.latent.kv_rank + config.latent.rope_width) * element_bytes
        budget = self.resolved.budget
        rows = min(serve.max_requests, budget)
        logits = rows * -(-config.vocab_size // self.tp) * (2 * each + 24)
        return max(self._layer_bytes(budget) + gathered, logits)

    @cached_property
    def _dequantised_bytes(self) -> int:
        """Bytes of quantised matrices dequantised at a time.

        On a GPU the largest matrix (except experts, which are dequantised inside their GEMMs); on a CPU a band of it,
        in several steps.
        """
        if self.serve.weights in ("stored", "dense"):
            return 0
        on_gpu = self.device.type == "cuda"
        sizes = [
            outputs * inputs for name, (_, outputs, inputs) in quantisable_shapes(self._shape).items()
            if not (on_gpu and ".experts." in name)
        ]  # fmt: skip
        return max(sizes) * self.dtype.itemsize if on_gpu else min(max(sizes), BAND_ELEMENTS) * 16

    def replace(self, **changes: object) -> "EngineSpec":
        """The same with ``changes``, and its weights estimated unless given."""
        return replace(self, **{"weights": None, "draft_weights": None, **changes})  # type: ignore[arg-type]


def scratch_pages(axes: Axes, serve: ServeConfig) -> int:
    """1 if a rank's cache has a scratch page at its end, otherwise 0.

    It takes padded writes, and writes to pages of other ranks.
    """
    assert serve.graph_capture is not None, "resolved"
    return int(serve.graph_capture or axes.cp.size > 1)


def supports_float8(device: torch.device) -> bool:
    """Whether kernels for ``device`` can convert float8, as far as this machine can tell."""
    return device.type == "cpu" or not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= FLOAT8

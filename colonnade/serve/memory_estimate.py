"""What an engine takes of a rank's memory, reckoned before any of it is asked for.

    weights       this rank's share, as it is kept
    cache         pages · bytes of a page
    activations   max(t · max(2 D + 3 f, 2 D + z + 4 n H) + 2 s k H, r · v · (2 + 24 / bytes))      numbers of the dtype
                  and of quantised weights the largest matrix, written out (on a CPU a band of it)
    graphs        of each size that is recorded its logits and tables, and once the activations of the largest

A pass of t tokens (``token_budget``) holds at its highest the stream, its norm and three rows of f hidden units, or
the projections z and rotated heads; keys and values of one context (s) gathered from their pages; and for each of r
requests (``max_requests``) v logits, once more in float32 and the sampler's noise in float64. What the allocator wastes
and libraries take is not in it: for that a part of what is free is not promised
(:data:`~colonnade.parallel.device_memory.SHARE`).
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch

from colonnade.config import ModelConfig, ServeConfig, size
from colonnade.kernels.linear.reference import BAND_ELEMENTS
from colonnade.model import KVCache, Transformer
from colonnade.model.moe.expert_offload import device_bytes
from colonnade.model.weight_only_quant import kept_bytes, matrices
from colonnade.parallel.axis import Axes, Axis, Grid
from colonnade.serve.batch_slots import padded
from colonnade.serve.resolve_config import Site, resolve_config

FLOAT8 = (8, 9)
"""The least compute capability that widens float8 in a kernel."""


@dataclass(frozen=True)
class Needs:
    """Bytes of one rank."""

    weights: int
    cache: int
    graphs: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.cache + self.graphs + self.activations

    def table(self, there: int) -> str:
        """A line each, with its share of what is ``there``."""
        rows = {
            "weights": self.weights, "key/value cache": self.cache, "graphs": self.graphs,
            "activations": self.activations, "asked for": self.total,
        }  # fmt: skip
        lines = [f"  {what:<18}{size(n):>12}  {_share(n / max(there, 1)):>7}" for what, n in rows.items()]
        return "\n".join([*lines, f"  {'there is':<18}{size(there):>12}"])


def _share(part: float) -> str:
    """``"41.3%"``; from tenfold on ``"538,060×"``."""
    return f"{part:.1%}" if part < 10 else f"{part:,.0f}×"


@dataclass(frozen=True)
class Asked:
    """All that the needs depend on."""

    model: ModelConfig
    serve: ServeConfig
    dtype: torch.dtype
    device: torch.device
    tp: int = 1
    cp: int = 1
    ep: int = 1
    sh: int = 1
    resident: int | None = None
    """Layers whose experts are on the device."""
    weights: int | None = None
    """What a model that is there already takes; None: reckoned from its shape."""

    @property
    def axes(self) -> Axes:
        """A rank's."""
        grid = Grid(ep=Axis("ep", self.ep), sh=Axis("sh", self.sh))
        return Axes(tp=Axis("tp", self.tp), cp=Axis("cp", self.cp), grid=grid)

    @cached_property
    def settled(self) -> ServeConfig:
        """``serve``, with what it leaves open decided."""
        waiting = self.resident is not None and self.resident < self.model.expert_layers
        return resolve_config(self.serve, Site(self.model, self.dtype, self.device, self.cp, waiting=waiting))

    def needs(self) -> Needs:
        """Of the rank that has most."""
        shape = Transformer(self.model, self.axes, device="meta", dtype=self.dtype)
        weights = self.weights
        if weights is None:
            kept = partial(kept_bytes, weights=self.serve.weights, group=self.serve.weight_group)
            weights = device_bytes(shape, self.resident, kept)
        pages = pages_of(self.model, shape.axes, self.settled, self.dtype)
        page_bytes = page_bytes_of(self.model, shape.axes, self.settled, self.dtype)
        context = min(self.model.context, pages * self.settled.page * self.cp)
        graphs = 0
        if self.settled.fixed_steps and self.device.type == "cuda":
            most = self.serve.max_requests
            sizes = {padded(n, most) for n in range(1, most + 1)}
            logits = -(-self.model.vocab_size // self.tp) * self.dtype.itemsize
            tables = 4 * -(-context // self.settled.page)
            graphs = sum(sizes) * (logits + tables) + self._stream(most)
        activations = self._activations(context) + self._written_out(shape)
        return Needs(weights, pages * page_bytes, graphs, activations)

    def _stream(self, tokens: int) -> int:
        """Of ``tokens`` between the embedding and the head, at their highest [bytes]."""
        config, tp = self.model, self.tp
        heads, kv = config.heads // tp, config.kv_heads // tp
        wide = config.latent.kv_rank + config.latent.rope_width if config.latent else config.head_width
        hidden = 3 * -(-config.ffn_width // tp)
        if config.moe is not None:
            hidden = max(hidden, config.moe.active * (3 * config.moe.ffn_width + 2 * config.width))
        attention = (heads + 2 * kv) * config.head_width + 4 * heads * wide
        return tokens * (2 * config.width + max(hidden, attention)) * self.dtype.itemsize

    def _activations(self, context: int) -> int:
        config, serve, each = self.model, self.serve, self.dtype.itemsize
        once = each if serve.cache == "stored" else each + 1  # gathered as it is kept, then widened
        gathered = 2 * context * max(1, config.kv_heads // self.tp) * config.head_width * once
        if config.latent:
            # Latents of 8 bits are gathered so, and written out in float32 first.
            once = each if serve.cache == "stored" else each + 5
            gathered = context * (config.latent.kv_rank + config.latent.rope_width) * once
        budget = self.settled.budget
        rows = min(serve.max_requests, budget)
        logits = rows * -(-config.vocab_size // self.tp) * (2 * each + 24)
        return max(self._stream(budget) + gathered, logits)

    def _written_out(self, shape: Transformer) -> int:
        """Of quantised matrices what is widened at a time: on a GPU the largest (no expert's: they are widened within
        their products), on a CPU a band, in several steps.
        """
        if self.serve.weights == "stored":
            return 0
        on_gpu = self.device.type == "cuda"
        sizes = [
            outputs * inputs for name, (_, outputs, inputs) in matrices(shape).items()
            if not (on_gpu and ".experts." in name)
        ]  # fmt: skip
        return max(sizes) * self.dtype.itemsize if on_gpu else min(max(sizes), BAND_ELEMENTS) * 16

    def but(self, **changes: object) -> "Asked":
        """The same with some of it changed; its weights reckoned anew."""
        return replace(self, **{"weights": None, **changes})  # type: ignore[arg-type]


def page_bytes_of(model: ModelConfig, axes: Axes, serve: ServeConfig, dtype: torch.dtype) -> int:
    """Memory of one page of a rank's cache [bytes]."""
    return KVCache.bytes_per_page(model, axes, serve.page, dtype, serve.cache)


def pages_of(model: ModelConfig, axes: Axes, serve: ServeConfig, dtype: torch.dtype) -> int:
    """Pages of a rank's cache: those asked for, but no more than ``max_requests`` whole contexts fill, divided by the
    ranks that share it; 0 when none fits. ``serve`` is settled (:mod:`colonnade.serve.resolve_config`).
    """
    page_bytes = page_bytes_of(model, axes, serve, dtype)
    pages = -(-(serve.pages or serve.max_requests * -(-model.context // serve.page)) // axes.cp.size)
    if serve.pages is None:
        pages = min(serve.cache_bytes // page_bytes, pages)
    return pages and pages + spare_pages(axes, serve)


def spare_pages(axes: Axes, serve: ServeConfig) -> int:
    """1 where the last page of a rank's cache is nobody's: written where a step is padded, or where the page that is
    meant is another rank's.
    """
    assert serve.fixed_steps is not None, "settled"
    return int(serve.fixed_steps or axes.cp.size > 1)


def widens_float8(device: torch.device) -> bool:
    """Whether kernels for ``device`` can, as far as this machine tells."""
    return device.type == "cpu" or not torch.cuda.is_available() or torch.cuda.get_device_capability(device) >= FLOAT8

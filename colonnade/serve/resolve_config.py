"""Resolves the open fields (None) of a :class:`ServeConfig` for one model on one device; the only place that does.

    page_tokens    16; on a GPU 64, which are whole tiles of keys for its copy engine (TMA)
    token_budget   512; on a GPU 2048, since it runs a pass of 512 faster than the host prepares the next one
    async_scheduling      on a GPU
    graph_capture    on a GPU, if its decode steps can be captured as CUDA graphs and padding changes no result; on a
                   CPU, if C++ kernels run its decode steps, which are then recorded

A CUDA graph replays the same kernels with the same arguments: nothing in it may synchronise with the host, and kernels
must read what changes from the buffers of :mod:`colonnade.serve.cuda_graph_runner`.
"""

from dataclasses import dataclass

import torch

from colonnade.config import ModelConfig, ServeConfig
from colonnade.errors import ConfigError, PlanError
from colonnade.kernels.cpu import kernels as cpu_kernels
from colonnade.kernels.registry import LOOKUP
from colonnade.model import Transformer, fused_block
from colonnade.model.context_parallel import MAX_FUSED_HEAD_WIDTH
from colonnade.model.moe.expert_offload import expert_modules
from colonnade.model.moe.router import find_router


@dataclass(frozen=True)
class EngineTraits:
    """The properties of a model and its placement that decide whether decode steps can be captured."""

    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    cp: int = 1
    offloads_experts: bool = False
    """Whether experts are fetched from host memory."""
    exchanges_tokens: bool = False
    """Whether tokens are sent to the ranks of their experts (all-to-all)."""
    sequence_parallel: bool = False
    """Whether the residual stream is sharded by tokens."""
    loops_over_experts: bool = False
    """Whether the host reads the experts' loads: their format has no kernel (ternary, int4 with float32 scales, int8 in
    groups)."""

    @staticmethod
    def of(model: Transformer) -> "EngineTraits":
        """Those of a loaded model."""
        axes, weight = model.axes, next(model.parameters())
        experts = expert_modules(model)
        return EngineTraits(
            model.config, weight.dtype, weight.device, axes.cp.size,
            offloads_experts=any(layer.fetch is not None for layer in experts),
            exchanges_tokens=bool(experts) and axes.experts.all.size > 1 and not axes.cp_replicated,
            sequence_parallel=axes.sequence_parallel,
            loops_over_experts=any(w.needs_reference for layer in experts for w in layer.quantised.values()),
        )  # fmt: skip

    @property
    def graph_limitation(self) -> tuple[str, str] | None:
        """(which steps cannot be captured on a GPU, what to change); None if all can."""
        config, windows = self.model, (self.model.window_of(i) for i in range(self.model.layers))
        if self.dtype == torch.float64:
            return "in float64", "use another --dtype"
        if ("paged_attention", "cuda", self.dtype, "triton") not in LOOKUP:
            return "without triton", "install it: pip install triton"
        if self.cp > 1 and any(window is not None for window in windows):
            return f"of attention with a window over cp={self.cp}", "use tp instead of cp"
        if config.latent is None and config.head_width > MAX_FUSED_HEAD_WIDTH:
            return f"of heads {config.head_width} wide (at most {MAX_FUSED_HEAD_WIDTH})", "use --device cpu"
        if self.offloads_experts:
            return "of experts offloaded to host memory", "remove --experts.layers_on_device"
        if self.loops_over_experts:
            return "of experts in a format without a kernel", "remove --serve.graph_capture"
        if self.exchanges_tokens:
            return "that exchange tokens between expert ranks", "build the model with ground.axes.serving()"
        return None

    @property
    def records_steps(self) -> bool:
        """Whether C++ kernels run all of a decode step on a CPU (on one rank), so that it can be recorded."""
        moe = self.model.moe
        experts = moe is None or (fused_block.fuses_experts(moe) and not self.offloads_experts)
        on_cpu = self.cp == 1 and not self.sequence_parallel and self.device.type == "cpu"
        fused = experts and fused_block.fuses_dense_steps(self.model)
        return fused and on_cpu and cpu_kernels.available(self.dtype)

    @property
    def padding_safe(self) -> bool:
        """Whether padding a batch cannot change a token's result."""
        moe = self.model.moe
        return not self.sequence_parallel and (moe is None or (not moe.capacity and find_router(moe).per_token))


def resolve_config(serve: ServeConfig, traits: EngineTraits) -> ServeConfig:
    """``serve`` with every open field resolved."""
    on_gpu, async_scheduling, graph_capture = traits.device.type == "cuda", serve.async_scheduling, serve.graph_capture
    if graph_capture is None:
        recorded = traits.records_steps and not serve.batch_invariant
        graph_capture = traits.graph_limitation is None and traits.padding_safe if on_gpu else recorded
    return serve.replace(
        page_tokens=serve.page_tokens or (64 if on_gpu else 16),
        token_budget=serve.token_budget or (2048 if on_gpu else 512),
        async_scheduling=on_gpu if async_scheduling is None else async_scheduling,
        graph_capture=graph_capture,
    )


def draft_config(serve: ServeConfig, traits: EngineTraits) -> ServeConfig:
    """How the draft model of the resolved ``serve`` runs: on one rank, with CUDA graphs if both models allow them."""
    capturable = traits.device.type == "cpu" or traits.graph_limitation is None
    graph_capture = serve.graph_capture and traits.padding_safe and capturable
    cache = "stored" if serve.cache == "int8" and traits.model.latent is None else serve.cache
    return serve.replace(draft=None, graph_capture=graph_capture, cache=cache, batch_invariant=False)


def check_graph_capture(serve: ServeConfig, traits: EngineTraits) -> None:
    """Raise :class:`ConfigError` if ``serve`` requires CUDA graphs that cannot be captured."""
    if serve.graph_capture and traits.device.type == "cuda" and (limitation := traits.graph_limitation):
        steps, remedy = limitation
        raise ConfigError(
            f"steps {steps} cannot be captured as CUDA graphs yet; remove --serve.graph_capture, or {remedy}"
        )


def check_plan(model: Transformer) -> None:
    """Raise :class:`PlanError` for a layout that cannot serve ``model``."""
    axes = model.axes
    if axes.dp.size > 1:
        raise PlanError(
            f"an engine shards its model over tp and cp ranks only, not over dp={axes.dp.size}; "
            "use dp=1, and one server per replica"
        )
    if axes.cp.size == 1:
        return
    if model.config.encoder is not None:
        raise PlanError(
            f"serving an encoder–decoder over cp={axes.cp.size} ranks that share a cache is not supported; use tp"
        )
    if axes.sequence_parallel:
        raise PlanError(f"ranks that share a cache (cp={axes.cp.size}) all have all tokens; turn sequence_parallel off")
    if not axes.cp_replicated:
        raise PlanError(f"a model that serves over cp={axes.cp.size} must be built with ground.axes.serving()")

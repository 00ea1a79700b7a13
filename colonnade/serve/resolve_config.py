"""What a :class:`ServeConfig` leaves open (None), decided for one model on one device: here, and nowhere else.

    page_tokens    16, on a GPU 64: whole tiles of keys, which its copy engine can fetch
    token_budget   512, on a GPU 2048: it has a pass of 512 done before the host has the next one ready
    run_ahead      on a GPU
    fixed_steps    on a GPU, where its steps can be recorded and padding changes nobody's answer

A recording launches the same kernels with the same arguments at each replay: nothing in it may wait for the device, and
what changes from step to step kernels must read from the buffers of :mod:`colonnade.serve.cuda_graph_runner`.
"""

from dataclasses import dataclass

import torch

from colonnade.config import ModelConfig, ServeConfig
from colonnade.errors import ConfigError
from colonnade.kernels.registry import LOOKUP
from colonnade.model import Transformer
from colonnade.model.moe.expert_offload import experts_of
from colonnade.model.sharded_kv_cache import WIDEST

EACH_ALONE = {"cosine", "gshard", "hash", "noisy", "sigmoid", "softmax", "switch", "task", "topology"}
"""Routers that, where nobody trains, look at each token by itself and ask nothing of the device. What a program's own
router does nobody knows.
"""


@dataclass(frozen=True)
class Site:
    """What it depends on whether steps can be recorded."""

    model: ModelConfig
    dtype: torch.dtype
    device: torch.device
    cp: int = 1
    waiting: bool = False
    """Whether experts wait in host memory."""
    exchanging: bool = False
    """Whether tokens travel to the ranks of their experts."""
    cut: bool = False
    """Whether the residual stream is cut by tokens among ranks."""

    @staticmethod
    def of(model: Transformer) -> "Site":
        """A model's that is there."""
        axes, weight = model.axes, next(model.parameters())
        experts = experts_of(model)
        return Site(
            model.config, weight.dtype, weight.device, axes.cp.size,
            waiting=any(layer.fetch is not None for layer in experts),
            exchanging=bool(experts) and axes.grid.all.size > 1 and not axes.alike,
            cut=axes.sequence_parallel,
        )  # fmt: skip

    @property
    def obstacle(self) -> tuple[str, str] | None:
        """(what steps are not recorded on a GPU, what else would do); None where they can be."""
        config, windows = self.model, (self.model.window_of(i) for i in range(self.model.layers))
        if self.dtype == torch.float64:
            return "in float64", "use another --dtype"
        if ("paged_attention", "cuda", self.dtype, "triton") not in LOOKUP:
            return "without triton", "install it: pip install triton"
        if self.cp > 1 and any(window is not None for window in windows):
            return f"of attention with a window over cp={self.cp}", "use tp in the place of cp"
        if config.latent is None and config.head_width > WIDEST:
            return f"of heads {config.head_width} numbers wide (at most {WIDEST})", "use --device cpu"
        if self.waiting:
            return "of experts that wait in host memory", "leave --experts.resident out"
        if self.exchanging:
            return "in which tokens travel to their experts", "build the model with ground.axes.serving()"
        return None

    @property
    def each_alone(self) -> bool:
        """Whether a token's answer is surely the same beside tokens that pad its step."""
        moe = self.model.moe
        return not self.cut and (moe is None or (not moe.capacity and moe.router.kind in EACH_ALONE))


def check_steps(serve: ServeConfig, site: Site) -> None:
    """Raise :class:`ConfigError` where ``serve`` asks for recorded steps, and they cannot be."""
    if serve.fixed_steps and site.device.type == "cuda" and (found := site.obstacle):
        what, remedy = found
        raise ConfigError(f"steps {what} are not recorded as graphs yet; leave --serve.fixed_steps out, or {remedy}")


def resolve_config(serve: ServeConfig, site: Site) -> ServeConfig:
    """``serve`` without anything left open. On a CPU nothing is recorded: ``fixed_steps`` only pads, if told to."""
    on_gpu, ahead, fixed = site.device.type == "cuda", serve.run_ahead, serve.fixed_steps
    if fixed is None:
        fixed = on_gpu and site.obstacle is None and site.each_alone
    page, budget = serve.page_tokens or (64 if on_gpu else 16), serve.token_budget or (2048 if on_gpu else 512)
    ahead = on_gpu if ahead is None else ahead
    return serve.but(page_tokens=page, token_budget=budget, run_ahead=ahead, fixed_steps=fixed)

"""Routers: who goes to which expert, and with what weight.

A router is one function of what it sees, under a name:

    @router("softmax")
    def softmax(seen: Seen) -> Choice: …

with parameters of its own where it has any, which :class:`Router` makes and hands over. Scores are computed in float32
unless the config says otherwise. All decisions are functions of values and of tokens' global numbers, so that no layout
changes them.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.config import ModelConfig, MoeConfig
from colonnade.config.base import nearest
from colonnade.errors import ConfigError
from colonnade.model.noise import PlaceNoise
from colonnade.parallel.axis import Axes, Axis
from colonnade.parallel.layout import PARTIAL, Placement

SCORES, INPUT, SECOND = 3, 4, 5
"""Sites of a router's noise within a block, after the dropouts' (:mod:`colonnade.model.noise`)."""


class Choice(NamedTuple):
    """Where each token goes."""

    ids_TA: Tensor
    """int64: the expert of each choice; E for none."""
    weights_TA: Tensor
    """What each choice counts, in the scores' precision; 0 for none."""
    probs_TE: Tensor
    """How much each token leans to each expert, for the balance losses; rows need not sum to 1."""
    rows: int | None = None
    """At most so many choices are not none, where that is less than T·A."""


class Seen(NamedTuple):
    """What a router decides by."""

    x_TD: Tensor
    """The tokens, in the scores' precision."""
    logits_TE: Tensor
    """Their scores by the gate, noise included."""
    moe: MoeConfig
    own: Mapping[str, Tensor]
    """The router's own parameters."""
    bias_E: Tensor | None
    """Added to what is compared, never to what is multiplied (DeepSeek-V3's balance without a loss)."""
    noise: PlaceNoise | None
    """What is random, in training."""
    tokens_T: Tensor
    """The tokens' ids."""
    index_T: Tensor
    """The tokens' numbers in the step's global batch."""
    over: Axis
    """All ranks that have other tokens."""


class _Rule(NamedTuple):
    choose: Callable[[Seen], Choice]
    shapes: Callable[[ModelConfig], dict[str, tuple[int, ...]]]
    gate: bool


_RULES: dict[str, _Rule] = {}


def router(
    name: str,
    shapes: Callable[[ModelConfig], dict[str, tuple[int, ...]]] = lambda config: {},
    *,
    gate: bool = True,
) -> Callable[[Callable[[Seen], Choice]], Callable[[Seen], Choice]]:
    """Enter a function under ``name``; ``shapes`` says what parameters of its own it has, ``gate`` whether it wants a
    linear gate's scores.
    """

    def enter(choose: Callable[[Seen], Choice]) -> Callable[[Seen], Choice]:
        _RULES[name] = _Rule(choose, shapes, gate)
        return choose

    return enter


def rule(name: str) -> _Rule:
    """The router called ``name``; raises :class:`ConfigError` with the nearest name."""
    if name not in _RULES:
        raise ConfigError(f"there is no router '{name}'" + nearest(name, sorted(_RULES)))
    return _RULES[name]


def keep(moe: MoeConfig, scores_TE: Tensor, ids_TA: Tensor) -> Tensor:
    """weights_TA: the scores of the chosen experts, divided by their sum where the config says so, and scaled."""
    weights_TA = scores_TE.gather(1, ids_TA)
    if moe.router.normalise and moe.active > 1:
        weights_TA = weights_TA / weights_TA.sum(1, keepdim=True).clamp(min=1e-20)
    return weights_TA * moe.router.scale


@router("softmax")
def softmax(seen: Seen) -> Choice:
    """The A experts of the highest probability (GShard, Switch, Mixtral, Qwen, OLMoE)."""
    probs_TE = seen.logits_TE.softmax(1)
    ids_TA = seen.logits_TE.topk(seen.moe.active, dim=1).indices
    return Choice(ids_TA, keep(seen.moe, probs_TE, ids_TA), probs_TE)


class Gate(nn.Module):
    """Scores of E experts."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(moe.experts, config.width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(moe.experts, device=device, dtype=dtype)) if moe.router.bias else None
        # Each rank scores its own tokens: the gradient is a sum over tp, whatever the residual stream looks like.
        self.layout: dict[str, Placement] = {"weight": PARTIAL}
        if moe.router.bias:
            self.layout["bias"] = PARTIAL

    def forward(self, x_TD: Tensor) -> Tensor:
        """logits_TE in the type of ``x_TD``."""
        bias_E = None if self.bias is None else self.bias.to(x_TD.dtype)
        return F.linear(x_TD, self.weight.to(x_TD.dtype), bias_E)


class Router(nn.Module):
    """The gates of one layer and the rule by which they decide."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.moe, self.axes, self._rule = moe, axes, rule(moe.router.kind)
        on = {"device": device, "dtype": dtype}
        count = moe.router.gates if self._rule.gate else 0
        self.gates = nn.ModuleList(Gate(config, moe, **on) for _ in range(count))
        self.own = nn.ParameterDict(
            {name: nn.Parameter(torch.empty(shape, **on)) for name, shape in self._rule.shapes(config).items()}
        )
        self.layout: dict[str, Placement] = {f"own.{name}": PARTIAL for name in self.own}
        self.bias_E: Tensor | None
        # Moved by the load, not by a gradient, and so small beside the scores that 16 bits would lose it.
        exact = torch.promote_types(dtype, torch.float32)
        self.register_buffer("bias_E", torch.zeros(moe.experts, device=device, dtype=exact) if moe.bias_rate else None)

    @torch.no_grad()
    def rebalance(self, load_E: Tensor) -> None:
        """Move the bias against the load of all ranks, by a fixed step (DeepSeek-V3, section 2.1.2)."""
        if self.bias_E is not None:
            load_E = load_E.to(self.bias_E.dtype)
            self.bias_E += self.moe.bias_rate * (load_E.mean() - load_E).sign()

    def forward(
        self, x_TD: Tensor, tokens_T: Tensor, index_T: Tensor, noise: PlaceNoise | None, gate: int = 0
    ) -> tuple[Choice, Tensor | None]:
        """The choice of each token, and the gate's scores logits_TE, if it has one."""
        config = self.moe.router
        if config.dtype == "float32":
            x_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
        if noise is not None and config.jitter:
            x_TD = x_TD * (1 + config.jitter * (2 * noise.uniform(x_TD.shape[1], INPUT).to(x_TD.dtype) - 1))
        logits_TE = self.gates[gate](x_TD) if len(self.gates) else x_TD.new_zeros(len(x_TD), self.moe.experts)
        if noise is not None and config.noise:
            logits_TE = logits_TE + config.noise / self.moe.experts * noise.normal(self.moe.experts, SCORES).to(
                x_TD.dtype
            )
        seen = Seen(
            x_TD, logits_TE, self.moe, dict(self.own.items()), self.bias_E, noise, tokens_T, index_T,
            self.axes.grid.tokens,
        )  # fmt: skip
        return self._rule.choose(seen), logits_TE if len(self.gates) else None

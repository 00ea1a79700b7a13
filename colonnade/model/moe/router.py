"""Routers: who goes to which expert, and with what weight.

A router is one function of what it sees, under a name; :mod:`colonnade.model.moe.routers` has ours, a file each, and a
program's own stands wherever its ``@router`` was run before the model is built:

    @router("softmax")
    def softmax(seen: Seen) -> Choice: …

with parameters of its own where it has any (:class:`Own`), which a :class:`Gate` makes and hands over. A config names a
router, and a name never imports anything, so that a checkpoint cannot bring code along. Scores are computed in float32
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
from colonnade.kernels.registry import choose
from colonnade.model.dropout import BlockDropout
from colonnade.model.moe.routing_context import Units
from colonnade.parallel.axis import Axes, Axis
from colonnade.parallel.layout import PARTIAL, Placement

SCORES, INPUT, SECOND = 3, 4, 5
"""Sites of a router's noise within a block, after the dropouts' (:mod:`colonnade.model.dropout`)."""


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
    logits_TE: Tensor | None = None
    """The scores, for the z-loss, where they are not the linear gate's."""
    expected_TE: Tensor | None = None
    """The probability that the noise sends each token to each expert, for the load loss."""


class Seen(NamedTuple):
    """What a router decides by."""

    given_TD: Tensor
    """The tokens as they came, or with the input's noise."""
    logits_TE: Tensor
    """Their scores by the linear gate, noise included; 0 for a router without one."""
    clean_TE: Tensor
    """The same without noise."""
    moe: MoeConfig
    own: Mapping[str, Tensor]
    """The gate's own parameters, in the scores' precision."""
    bias_E: Tensor | None
    """Added to what is compared, never to what is multiplied (DeepSeek-V3's balance without a loss)."""
    noise: BlockDropout | None
    """What is random, in training."""
    tokens_T: Tensor
    """The tokens' ids."""
    index_T: Tensor
    """The tokens' numbers in the step's global batch."""
    over: Axis
    """All ranks that have other tokens."""
    training: bool = False
    """Whether what follows trains: some routers hold back only then."""
    units: Units | None = None
    """Which tokens decide as one; None where the stream does not say."""

    @property
    def x_TD(self) -> Tensor:  # noqa: N802 - named by its shape, as any tensor
        """The tokens in the scores' precision: made by whoever asks, since most routers decide by the scores alone."""
        return self.given_TD.to(self.logits_TE.dtype)

    def noisy(self, logits_TE: Tensor) -> Tensor:
        """``logits_TE`` with noise·N(0, 1)/E, in training where the config asks for it (Tutel's gate_noise)."""
        if self.noise is None or not self.moe.router.noise:
            return logits_TE
        normal_TE = self.noise.normal(self.moe.experts, SCORES).to(logits_TE.dtype)
        return logits_TE + self.moe.router.noise / self.moe.experts * normal_TE


class Own(NamedTuple):
    """A parameter of a router's own."""

    shape: tuple[int, ...]
    start: float | None = None
    """What it is filled with at first; None: drawn as the weights of all layers are."""


Owns = Callable[[ModelConfig, MoeConfig], dict[str, Own]]


class Rule(NamedTuple):
    """A router, as the registry knows it."""

    choose: Callable[[Seen], Choice]
    own: Owns
    gate: bool
    random: bool
    biased: bool
    active: int | None


RULES: dict[str, Rule] = {}
"""The registry."""


def router(
    name: str,
    own: Owns = lambda config, moe: {},
    *,
    gate: bool = True,
    random: bool = False,
    biased: bool = False,
    active: int | None = None,
) -> Callable[[Callable[[Seen], Choice]], Callable[[Seen], Choice]]:
    """Enter a function under ``name``.

    ``own`` says what parameters of its own it has, ``gate`` whether it wants a linear gate's scores, ``random`` whether
    it needs noise in training, ``biased`` whether it heeds the balancing bias and groups of experts, ``active`` to how
    many experts a token must go (None: as many as the config says).
    """

    def enter(choose: Callable[[Seen], Choice]) -> Callable[[Seen], Choice]:
        RULES[name] = Rule(choose, own, gate, random, biased, active)
        return choose

    return enter


def rule(moe: MoeConfig, otherwise: str = "") -> Rule:
    """The router that ``moe`` names; raises :class:`ConfigError` for an unknown name, with the nearest one, and for
    what it cannot do. ``otherwise`` is the remedy for a number of experts that it does not take.
    """
    kind, config = moe.router.kind, moe.router
    if kind not in RULES:
        known = nearest(kind, sorted(RULES))
        raise ConfigError(f"there is no router '{kind}'{known}; one of your own needs --import MODULE")
    found = RULES[kind]
    if found.active not in (None, moe.active):
        raise ConfigError(
            f"router '{kind}' sends a token to {found.active} of the experts, not {moe.active}; "
            + (otherwise or f"set model.moe.active to {found.active}, or model.moe.router.kind to softmax")
        )
    if not found.biased and (moe.bias_rate or config.groups > 1):
        what = "model.moe.bias_rate" if moe.bias_rate else "model.moe.router.groups"
        able = ", ".join(sorted(name for name, other in RULES.items() if other.biased))
        raise ConfigError(f"router '{kind}' does not heed {what}; leave it off, or use one of: {able}")
    return found


def draws(moe: MoeConfig) -> bool:
    """Whether the router needs noise in training."""
    return rule(moe).random or bool(moe.router.jitter or moe.router.noise)


def best(moe: MoeConfig, compared_TE: Tensor, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
    """(ids_TA, weights_TA): the experts of the A highest ``compared_TE`` of each token, highest first; and their
    scores, divided by their sum where the config says so, and scaled.
    """
    run = choose("top_experts", compared_TE.device.type, compared_TE.dtype)
    ids_TA, weights_TA = run(compared_TE, scores_TE, moe.active, normalise=moe.normalises, scale=moe.router.scale)
    if moe.normalises and moe.active == 1:
        # Always 1: what gradient it has is rounding, which Adam would make as large as any other.
        weights_TA = weights_TA.detach() + 0 * weights_TA
    return ids_TA, weights_TA


def top(x_TE: Tensor, count: int) -> Tensor:
    """int64 (T, count): indices of each row's highest, highest first, the lower index first of equals."""
    x_TE = x_TE.detach()
    run = choose("top_experts", x_TE.device.type, x_TE.dtype)
    return run(x_TE, x_TE, count, normalise=False, scale=1)[0]


class Gate(nn.Module):
    """Scores of E experts, and what else a router has of its own."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, rule: Rule, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        on = {"device": device, "dtype": dtype}
        biased = rule.gate and moe.router.bias
        self.weight = nn.Parameter(torch.empty(moe.experts, config.width, **on)) if rule.gate else None
        self.bias = nn.Parameter(torch.empty(moe.experts, **on)) if biased else None
        owns = rule.own(config, moe)
        self.own = nn.ParameterDict({name: nn.Parameter(torch.empty(own.shape, **on)) for name, own in owns.items()})
        # Each rank scores its own tokens: the gradient is a sum over tp, whatever the residual stream looks like.
        self.layout: dict[str, Placement] = {name: PARTIAL for name, _ in self.named_parameters()}
        self.initial = {f"own.{name}": own.start for name, own in owns.items() if own.start is not None}
        """What parameters are filled with at first, where that is not what the others of their kind are."""

    def forward(self, x_TD: Tensor, *, exact: bool) -> Tensor | None:
        """logits_TE in the type of ``x_TD``, or if ``exact`` in float32 at least; None of a gate that is not linear."""
        if self.weight is None:
            return None
        if exact:
            return choose("router_scores", x_TD.device.type, x_TD.dtype)(x_TD, self.weight, self.bias)
        bias_E = None if self.bias is None else self.bias.to(x_TD.dtype)
        return F.linear(x_TD, self.weight.to(x_TD.dtype), bias_E)


class Router(nn.Module):
    """The gates of one layer and the rule by which they decide."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.moe, self.axes, self._rule = moe, axes, rule(moe)
        self.frozen = False
        """Whether the load leaves the balancing bias where it is."""
        self.gates = nn.ModuleList(
            Gate(config, moe, self._rule, device=device, dtype=dtype) for _ in range(moe.router.gates)
        )
        self.bias_E: Tensor | None
        # Moved by the load, not by a gradient, and so small beside the scores that 16 bits would lose it.
        exact = torch.promote_types(dtype, torch.float32)
        self.register_buffer("bias_E", torch.zeros(moe.experts, device=device, dtype=exact) if moe.bias_rate else None)

    @torch.no_grad()
    def rebalance(self, load_E: Tensor, skip: Tensor | int = 0) -> None:
        """Move the bias by ``bias_rate``·sign(mean load − load_e), of the choices of a whole step on all ranks, by
        expert (DeepSeek-V3, section 2.1.2); by nothing where ``skip`` is 1, or in a router that is frozen.
        """
        if self.bias_E is not None and not self.frozen:
            # The sum against E times the load, in integers: an expert at exactly the mean stays where it is.
            direction_E = (load_E.sum() - len(load_E) * load_E).sign().to(self.bias_E.dtype)
            # The rate is multiplied in the bias's precision: ``skip`` and integers would round it to float32.
            self.bias_E += self.moe.bias_rate * direction_E * (1 - skip)

    def forward(
        self,
        x_TD: Tensor,
        tokens_T: Tensor,
        index_T: Tensor,
        noise: BlockDropout | None,
        gate: int = 0,
        *,
        training: bool = False,
        units: Units | None = None,
        moe: MoeConfig | None = None,
    ) -> tuple[Choice, Tensor | None]:
        """The choice of each token, and its scores logits_TE, if it was by scores; by ``moe`` where it is not what the
        router was built with.
        """
        moe = moe or self.moe
        if not 0 <= gate < len(self.gates):
            raise ConfigError(f"there is no gate {gate} in a layer of {len(self.gates)}; raise model.moe.router.gates")
        config, picked = moe.router, self.gates[gate]
        assert isinstance(picked, Gate)
        exact = config.dtype == "float32"
        dtype = torch.promote_types(x_TD.dtype, torch.float32) if exact else x_TD.dtype
        if noise is not None and config.jitter:
            x_TD = x_TD.to(dtype)
            x_TD = x_TD * (1 + config.jitter * (2 * noise.uniform(x_TD.shape[1], INPUT).to(dtype) - 1))
        linear_TE = picked(x_TD, exact=exact)
        clean_TE = x_TD.new_zeros(len(x_TD), moe.experts, dtype=dtype) if linear_TE is None else linear_TE
        own = {name: parameter.to(dtype) for name, parameter in picked.own.items()}
        seen = Seen(
            x_TD, clean_TE, clean_TE, moe, own, self.bias_E, noise, tokens_T, index_T, self.axes.grid.tokens,
            training, units,
        )  # fmt: skip
        if linear_TE is not None:
            seen = seen._replace(logits_TE=seen.noisy(linear_TE))
        choice = self._rule.choose(seen)
        self._check(choice, len(x_TD))
        if choice.logits_TE is not None:
            return choice, choice.logits_TE
        return choice, None if linear_TE is None else seen.logits_TE

    def _check(self, choice: Choice, T: int) -> None:
        ids_TA, weights_TA, probs_TE = choice[:3]
        right = ids_TA.dtype == torch.int64 and ids_TA.shape == weights_TA.shape and ids_TA.shape[:1] == (T,)
        if not right or ids_TA.dim() != 2 or probs_TE.shape != (T, self.moe.experts):
            raise ConfigError(
                f"router '{self.moe.router.kind}' gave ids of {tuple(ids_TA.shape)} {ids_TA.dtype}, weights of "
                f"{tuple(weights_TA.shape)} and probabilities of {tuple(probs_TE.shape)} for {T} tokens and "
                f"{self.moe.experts} experts; it must give int64 ({T}, A), ({T}, A) and ({T}, {self.moe.experts})"
            )

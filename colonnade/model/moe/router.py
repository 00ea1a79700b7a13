"""Routers: which experts a token goes to, and with what weight.

A router is one function from :class:`RouterInput` to :class:`RouterOutput`, registered under a name together with
everything else that the library needs about it. Ours are in :mod:`colonnade.model.moe.routers`, one file each; your own
works as soon as its module has been imported:

    @router("softmax", biased=True, per_token=True)
    def softmax(inputs: RouterInput) -> RouterOutput: …

A router may have its own parameters (:class:`RouterParameter`), which a :class:`Gate` holds. A config names a router
and never imports code, so a checkpoint cannot bring code along. Scores are computed in float32 unless the config says
otherwise. Every decision is a function of values and of the tokens' global indices, so no layout changes it.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.config import ModelConfig, MoeConfig
from colonnade.config.base import did_you_mean
from colonnade.errors import ConfigError
from colonnade.kernels.registry import choose
from colonnade.model.dropout import BlockDropout
from colonnade.model.moe.routing_context import TokenGroups
from colonnade.parallel.axis import Axes, Axis
from colonnade.parallel.layout import PARTIAL, Placement

SCORES, INPUT, SECOND, OUTPUT_MASK = 3, 4, 5, 6
"""Sites of a router's random numbers within a block; dropout has the others (:mod:`colonnade.model.dropout`)."""


class RouterOutput(NamedTuple):
    """Where each token goes."""

    ids_TA: Tensor
    """int64: the expert of each choice; E for none."""
    weights_TA: Tensor
    """The weight of each choice, in the scores' precision; 0 for none."""
    probs_TE: Tensor
    """Each token's probability of each expert, for the balance losses; rows need not sum to 1."""
    max_choices: int | None = None
    """An upper bound of the choices that are not none, if it is less than T·A."""
    logits_TE: Tensor | None = None
    """The scores for the z-loss, if they are not the linear gate's."""
    expected_TE: Tensor | None = None
    """The probability that the noise sends each token to each expert, for the importance loss."""


class RouterInput(NamedTuple):
    """The inputs of a router."""

    raw_TD: Tensor
    """The tokens in the model's type, multiplied by the input jitter in training."""
    logits_TE: Tensor
    """Scores of the linear gate, noise included; 0 for a router without one."""
    clean_TE: Tensor
    """The same without noise."""
    moe: MoeConfig
    parameters: Mapping[str, Tensor]
    """The router's own parameters, in the scores' precision."""
    bias_E: Tensor | None
    """The balancing bias: added to the scores that are compared, never to the weights (DeepSeek-V3)."""
    noise: BlockDropout | None
    """Random numbers, in training."""
    tokens_T: Tensor
    """Token ids."""
    index_T: Tensor
    """Each token's index in the step's global batch."""
    token_axis: Axis
    """All ranks that have other tokens."""
    training: bool = False
    """Whether a backward pass follows; some routers restrict choices only then."""
    token_groups: TokenGroups | None = None
    """Tokens that are routed as one; None if the stream does not define them."""

    @property
    def x_TD(self) -> Tensor:  # noqa: N802 - named by its shape, as any tensor
        """The tokens in the scores' precision; converted on use, since most routers need the scores only."""
        return self.raw_TD.to(self.logits_TE.dtype)

    def noisy(self, logits_TE: Tensor) -> Tensor:
        """``logits_TE`` plus noise·N(0, 1)/E, in training if the config enables it (Tutel's gate_noise)."""
        if self.noise is None or not self.moe.router.noise:
            return logits_TE
        normal_TE = self.noise.normal(self.moe.experts, SCORES).to(logits_TE.dtype)
        return logits_TE + self.moe.router.noise / self.moe.experts * normal_TE


class RouterParameter(NamedTuple):
    """A parameter of a router in addition to its linear gate."""

    shape: tuple[int, ...]
    start: float | None = None
    """Constant initial value; None: drawn like all other weights."""


class RouterSpec(NamedTuple):
    """A registered router."""

    choose: Callable[[RouterInput], RouterOutput]
    parameters: Callable[[ModelConfig, MoeConfig], dict[str, RouterParameter]]
    gate: bool
    random: bool
    biased: bool
    active: int | None
    per_token: bool
    per_sequence: bool
    needs_token_ids: bool


ROUTERS: dict[str, RouterSpec] = {}
"""The registry, by name."""


def router(
    name: str,
    parameters: Callable[[ModelConfig, MoeConfig], dict[str, RouterParameter]] = lambda config, moe: {},
    *,
    gate: bool = True,
    random: bool = False,
    biased: bool = False,
    active: int | None = None,
    per_token: bool = False,
    per_sequence: bool = False,
    needs_token_ids: bool = False,
) -> Callable[[Callable[[RouterInput], RouterOutput]], Callable[[RouterInput], RouterOutput]]:
    """Register a router under ``name``.

    ``parameters``: its own parameters. ``gate``: it uses the scores of a linear gate. ``random``: it needs random
    numbers in training. ``biased``: it supports the balancing bias and groups of experts. ``active``: the only number
    of experts per token that it supports. ``per_token``: outside training a token's experts depend on that token only,
    and nothing waits for the device, so a server may pad its steps and record them as CUDA graphs. ``per_sequence``: it
    needs to know which tokens are of one sequence. ``needs_token_ids``: it routes by the tokens' ids.
    """

    def register(choose: Callable[[RouterInput], RouterOutput]) -> Callable[[RouterInput], RouterOutput]:
        ROUTERS[name] = RouterSpec(
            choose, parameters, gate, random, biased, active, per_token, per_sequence, needs_token_ids
        )
        return choose

    return register


def find_router(moe: MoeConfig, otherwise: str = "") -> RouterSpec:
    """The router that ``moe`` names; ``otherwise`` is the remedy for a number of experts that it does not support.

    Raises :class:`ConfigError` for an unknown name, with the nearest one, and for an unsupported setting.
    """
    kind, config = moe.router.kind, moe.router
    if kind not in ROUTERS:
        known = did_you_mean(kind, sorted(ROUTERS))
        raise ConfigError(f"there is no router '{kind}'{known}; a custom router needs --import MODULE")
    spec = ROUTERS[kind]
    if spec.active not in (None, moe.active):
        raise ConfigError(
            f"router '{kind}' sends a token to {spec.active} of the experts, not {moe.active}; "
            + (otherwise or f"set model.moe.active to {spec.active}, or model.moe.router.kind to softmax")
        )
    if not spec.biased and (moe.bias_rate or config.groups > 1):
        what = "model.moe.bias_rate" if moe.bias_rate else "model.moe.router.groups"
        able = ", ".join(sorted(name for name, other in ROUTERS.items() if other.biased))
        raise ConfigError(f"router '{kind}' does not support {what}; turn it off, or use one of: {able}")
    return spec


def uses_noise(moe: MoeConfig) -> bool:
    """Whether the layer needs random numbers in training."""
    return find_router(moe).random or bool(moe.router.jitter or moe.router.noise or moe.output_mask)


def needs_sequences(moe: MoeConfig) -> bool:
    """Whether a stream must define which tokens belong to one sequence, for the router, the capacity or the balance
    loss.
    """
    return moe.balance == "sequence" or moe.capacity_tokens is not None or find_router(moe).per_sequence


def select_experts(moe: MoeConfig, compared_TE: Tensor, scores_TE: Tensor) -> tuple[Tensor, Tensor]:
    """(ids_TA, weights_TA): the experts of the A highest ``compared_TE`` of each token, highest first.

    Weights are their ``scores_TE``, normalised if configured, and scaled.
    """
    run = choose("top_experts", compared_TE.device.type, compared_TE.dtype)
    ids_TA, weights_TA = run(
        compared_TE, scores_TE, moe.active, normalise=moe.normalises_weights, scale=moe.router.scale
    )
    if moe.normalises_weights and moe.active == 1:
        # Always 1: its gradient is rounding only, which Adam would scale up to that of any other.
        weights_TA = weights_TA.detach() + 0 * weights_TA
    return ids_TA, weights_TA


def top_indices(x_TE: Tensor, count: int) -> Tensor:
    """int64 (T, count): indices of each row's highest values, highest first, the lower index first of equals."""
    x_TE = x_TE.detach()
    run = choose("top_experts", x_TE.device.type, x_TE.dtype)
    return run(x_TE, x_TE, count, normalise=False, scale=1)[0]


class Gate(nn.Module):
    """The linear scores of E experts, and the router's own parameters."""

    def __init__(
        self, config: ModelConfig, moe: MoeConfig, spec: RouterSpec, *, device: torch.device, dtype: torch.dtype
    ):
        super().__init__()
        on = {"device": device, "dtype": dtype}
        biased = spec.gate and moe.router.bias
        self.weight = nn.Parameter(torch.empty(moe.experts, config.width, **on)) if spec.gate else None
        self.bias = nn.Parameter(torch.empty(moe.experts, **on)) if biased else None
        own = spec.parameters(config, moe)
        # The name `own` is part of the checkpoint format.
        self.own = nn.ParameterDict({name: nn.Parameter(torch.empty(it.shape, **on)) for name, it in own.items()})
        # Each rank scores its own tokens: the gradient is a sum over tp in every layout.
        self.layout: dict[str, Placement] = {name: PARTIAL for name, _ in self.named_parameters()}
        self.initial = {f"own.{name}": it.start for name, it in own.items() if it.start is not None}
        """Constant initial values of parameters."""

    def forward(self, x_TD: Tensor, *, exact: bool) -> Tensor | None:
        """logits_TE in the type of ``x_TD``, or if ``exact`` in at least float32; None without a linear gate."""
        if self.weight is None:
            return None
        if exact:
            return choose("router_scores", x_TD.device.type, x_TD.dtype)(x_TD, self.weight, self.bias)
        bias_E = None if self.bias is None else self.bias.to(x_TD.dtype)
        return F.linear(x_TD, self.weight.to(x_TD.dtype), bias_E)


class Router(nn.Module):
    """The gates of one layer and the router that decides by their scores."""

    def __init__(self, config: ModelConfig, moe: MoeConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.moe, self.axes, self._spec = moe, axes, find_router(moe)
        self.frozen = False
        """Whether :meth:`rebalance` leaves the balancing bias unchanged."""
        self.gates = nn.ModuleList(
            Gate(config, moe, self._spec, device=device, dtype=dtype) for _ in range(moe.router.gates)
        )
        self.bias_E: Tensor | None
        # Updated by the load, not by a gradient, in steps too small for 16 bits.
        exact = torch.promote_types(dtype, torch.float32)
        self.register_buffer("bias_E", torch.zeros(moe.experts, device=device, dtype=exact) if moe.bias_rate else None)

    @torch.no_grad()
    def rebalance(self, load_E: Tensor, skip: Tensor | int = 0) -> None:
        """Add ``bias_rate``·sign(mean load − load_e) to the bias (DeepSeek-V3, section 2.1.2), unless ``skip`` is 1.

        ``load_E``: choices by expert of a whole step on all ranks.
        """
        if self.bias_E is not None and not self.frozen:
            # The sum against E times the load, in integers: an expert at exactly the mean keeps its bias.
            direction_E = (load_E.sum() - len(load_E) * load_E).sign().to(self.bias_E.dtype)
            # Multiply in the bias's precision: ``skip`` and integers would round the rate to float32.
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
        token_groups: TokenGroups | None = None,
        moe: MoeConfig | None = None,
    ) -> tuple[RouterOutput, Tensor | None]:
        """The experts of each token, and the scores logits_TE, if there are any.

        ``moe`` replaces the config that the router was built with.
        """
        moe = moe or self.moe
        if not 0 <= gate < len(self.gates):
            raise ConfigError(f"there is no gate {gate} in a layer of {len(self.gates)}; raise model.moe.router.gates")
        config, module = moe.router, self.gates[gate]
        assert isinstance(module, Gate)
        exact = config.dtype == "float32"
        dtype = torch.promote_types(x_TD.dtype, torch.float32) if exact else x_TD.dtype
        if noise is not None and config.jitter:
            x_TD = x_TD.to(dtype)
            x_TD = x_TD * (1 + config.jitter * (2 * noise.uniform(x_TD.shape[1], INPUT).to(dtype) - 1))
        linear_TE = module(x_TD, exact=exact)
        clean_TE = x_TD.new_zeros(len(x_TD), moe.experts, dtype=dtype) if linear_TE is None else linear_TE
        parameters = {name: parameter.to(dtype) for name, parameter in module.own.items()}
        inputs = RouterInput(
            x_TD, clean_TE, clean_TE, moe, parameters, self.bias_E, noise, tokens_T, index_T, self.axes.experts.tokens,
            training, token_groups,
        )  # fmt: skip
        if linear_TE is not None:
            inputs = inputs._replace(logits_TE=inputs.noisy(linear_TE))
        choice = self._spec.choose(inputs)
        self._check(choice, len(x_TD))
        if choice.logits_TE is not None:
            return choice, choice.logits_TE
        return choice, None if linear_TE is None else inputs.logits_TE

    def _check(self, choice: RouterOutput, T: int) -> None:
        ids_TA, weights_TA, probs_TE = choice[:3]
        right = ids_TA.dtype == torch.int64 and ids_TA.shape == weights_TA.shape and ids_TA.shape[:1] == (T,)
        if not right or ids_TA.dim() != 2 or probs_TE.shape != (T, self.moe.experts):
            raise ConfigError(
                f"router '{self.moe.router.kind}' returned ids of {tuple(ids_TA.shape)} {ids_TA.dtype}, weights of "
                f"{tuple(weights_TA.shape)} and probabilities of {tuple(probs_TE.shape)} for {T} tokens and "
                f"{self.moe.experts} experts; it must return int64 ({T}, A), ({T}, A) and ({T}, {self.moe.experts})"
            )

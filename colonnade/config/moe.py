"""Mixture of experts in the feed-forward part: how many experts, who goes where, and what balances the load.

    y = Σ_j w_j · expert_{i_j}(x) [+ shared(x)]           (i, w) = router(x), A of E experts a token

Symbols as in docs/alphabet.md: E experts, A active ones a token, F hidden width of one expert, C capacity.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from colonnade.config.base import MOST_SIZE, Config
from colonnade.config.derive import Rule, in_proportion
from colonnade.errors import ConfigError

MOST_EXPERTS = 1 << 20
MOST_CAPACITY = 1e6
"""A factor of E / A already gives every token a place."""
Balance = Literal["none", "gshard", "switch", "choices", "sequence", "importance"]


class RouterConfig(Config):
    """Who goes to which expert."""

    kind: str = "softmax"
    """Its name: softmax, switch, gshard, noisy, cosine, sigmoid, expert_choice, hash, sequence, task, topology, or one
    that a program entered itself (:mod:`colonnade.model.moe.router`)."""
    gates: int = Field(default=1, ge=1, le=1 << 10)
    """Gates of a layer, one of which a forward pass picks."""
    dtype: Literal["float32", "model"] = "float32"
    """Precision of the scores: float32, or the model's own (Switch, arXiv 2101.03961, section 2.4)."""
    bias: bool = False
    """A bias on the scores."""
    normalise: bool = True
    """Divide a token's A weights by their sum, where A > 1."""
    normalise_single: bool = False
    """With ``normalise``, divide also where A is 1: the weight is then 1, as transformers has it with norm_topk_prob,
    and the router learns from the balance and z-losses alone, because the model's loss has no gradient in it."""
    scale: float = Field(default=1.0, gt=0)
    """The weights are multiplied by this at the end (DeepSeek's routed_scaling_factor)."""
    jitter: float = Field(default=0.0, ge=0, lt=1)
    """In training the router's input is multiplied by U(1 − jitter, 1 + jitter) (Switch, section 2.2)."""
    noise: float = Field(default=0.0, ge=0)
    """In training noise·N(0, 1)/E is added to the scores (Tutel's gate_noise)."""
    groups: int = Field(default=1, ge=1, le=MOST_EXPERTS)
    """Groups of experts, of which a token may use some (DeepSeek-V2, arXiv 2405.04434, section 2.2.2)."""
    groups_kept: int = Field(default=1, ge=1, le=MOST_EXPERTS)
    """Groups that a token may use."""
    group_score: Literal["max", "top2"] = "top2"
    """A group's score: its best expert's (DeepSeek-V2) or the sum of its two best, biased (DeepSeek-V3)."""
    projection: int = Field(default=256, ge=1, le=MOST_SIZE)
    """cosine: width in which tokens and experts are compared."""
    temperature: float = Field(default=0.5, gt=0)
    """cosine: the initial temperature; learned from there on."""
    tasks: int = Field(default=1, ge=1, le=1 << 16)
    """task: how many there are."""
    task: int | None = Field(default=None, ge=0, lt=1 << 16)
    """task: the one that tokens are of where nobody says so (in generation, for one)."""
    nodes: int = Field(default=1, ge=1, le=MOST_EXPERTS)
    """topology: machines among which tokens and experts are thought to be cut, whatever the plan (FasterMoE)."""
    away: float = Field(default=0.14, ge=0, le=1)
    """topology: the share of a node's tokens whose first choice may be another node's expert, in training."""


class MoeConfig(Config):
    """The mixture of experts that stands in the place of a model's feed-forward part."""

    RULES = (
        Rule("shared_width", ("ffn_width",), lambda a, b: in_proportion(a.shared_width, a.ffn_width, b.ffn_width)),
    )

    experts: int = Field(ge=1, le=MOST_EXPERTS)
    """E: experts of a layer."""
    active: int = Field(default=2, ge=1, le=MOST_EXPERTS)
    """A: experts that a token goes to (top-k)."""
    ffn_width: int = Field(gt=0, le=MOST_SIZE)
    """F: hidden width of one expert."""
    shared_width: int = Field(default=0, ge=0, le=MOST_SIZE)
    """Hidden width of the experts that every token goes to, together; 0: none."""
    shared_gate: bool = False
    """The shared experts' output is multiplied by σ(w·x) (Qwen2-MoE)."""
    first: int = Field(default=0, ge=0, le=1 << 20)
    """The first layer with experts; those before it are dense."""
    every: int = Field(default=1, ge=1, le=1 << 20)
    """Of the layers from there on, every n-th has experts (2: GShard and Switch)."""
    dense: tuple[Annotated[int, Field(ge=0, le=1 << 20)], ...] = ()
    """Layers among those that are dense all the same (Qwen's mlp_only_layers)."""
    router: RouterConfig = RouterConfig()
    """Who goes to which expert."""
    capacity: float | None = Field(default=None, ge=-MOST_CAPACITY, le=MOST_CAPACITY, allow_inf_nan=False)
    """None: dropless, every token reaches its experts. f > 0: at most C = A·int(f·⌈T/E⌉) tokens an expert; 0: as many
    as any expert has, so that none is dropped; f < 0: the smaller of the two, with −f (Tutel)."""
    capacity_over: Literal["batch", "rank"] = "batch"
    """Whose tokens an expert's capacity counts: those of all ranks together, which no layout changes, or of each rank
    by itself (Tutel)."""
    priority: bool = False
    """Places go to the tokens of the highest probability first, not to the first ones (batch-prioritised routing)."""
    dropped: Literal["zero", "residual"] = "zero"
    """What a token gets for a place that it did not get: nothing, or its own input at that weight."""
    balance: Balance = "switch"
    """The loss that balances the load. gshard: E/T²·Σ_e(Σ_t p_te)(Σ_t [top1 = e]). switch: E·Σ_e f_e·P_e, f the
    shares of all choices, which sum to 1 (Switch, Megatron). choices: the same with shares that sum to A (as Hugging
    Face has it). sequence: switch of each sequence by itself, f by the A highest scores without bias or groups
    (DeepSeek-V3). importance: squared coefficients of variation of Σ_t p and of the expected load (Shazeer 2017)."""
    balance_over: Literal["layer", "model"] = "layer"
    """layer: the loss of each layer by itself, summed (Switch, GShard, Megatron). model: one loss, whose f and P are
    means over the tokens of all layers with experts, as Hugging Face has it; for switch and choices."""
    balance_weight: float = Field(default=0.01, ge=0)
    """Weight of the balance loss beside the model's own."""
    z_weight: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss, mean_t logsumexp(scores)² (ST-MoE, arXiv 2202.08906, section 3.3)."""
    bias_rate: float = Field(default=0.0, ge=0)
    """By how much an expert's bias moves against its load at each step (DeepSeek-V3, arXiv 2412.19437, section 2.1.2);
    0: there is none."""

    @model_validator(mode="after")
    def _consistent(self) -> "MoeConfig":
        if self.active > self.experts:
            raise ConfigError(f"a token cannot go to {self.active} of {self.experts} experts; lower model.moe.active")
        router = self.router
        if self.experts % router.groups:
            raise ConfigError(f"{self.experts} experts do not divide into {router.groups} groups; change one of them")
        if router.groups_kept > router.groups:
            raise ConfigError(
                f"a token cannot use {router.groups_kept} of {router.groups} groups; lower model.moe.router.groups_kept"
            )
        if self.active > router.groups_kept * (self.experts // router.groups):
            raise ConfigError(
                f"{router.groups_kept} groups of {self.experts // router.groups} experts do not hold {self.active} "
                "active ones; raise model.moe.router.groups_kept or lower model.moe.active"
            )
        if router.task is not None and router.task >= router.tasks:
            raise ConfigError(f"there is no task {router.task} among {router.tasks}; raise model.moe.router.tasks")
        if router.nodes > self.experts:
            raise ConfigError(
                f"{self.experts} experts are not at home on {router.nodes} nodes; lower model.moe.router.nodes"
            )
        if self.balance_over == "model" and self.balance not in ("none", "switch", "choices"):
            raise ConfigError(
                f"model.moe.balance '{self.balance}' is a loss of one layer; set model.moe.balance_over to layer, or "
                "model.moe.balance to switch or choices"
            )
        if self.balance == "importance" and router.noise and (self.bias_rate or router.groups > 1):
            name, off = ("bias_rate", 0) if self.bias_rate else ("router.groups", 1)
            raise ConfigError(
                "model.moe.balance 'importance' needs the probability that noise lifts a score among the highest, "
                f"which is not implemented with model.moe.{name}; set that to {off}, model.moe.router.noise to 0, or "
                "model.moe.balance to switch"
            )
        if self.shared_gate and not self.shared_width:
            raise ConfigError("model.moe.shared_gate needs shared experts; set model.moe.shared_width or leave it off")
        return self

    @property
    def normalises(self) -> bool:
        """Whether a token's weights are divided by their sum."""
        return self.router.normalise and (self.active > 1 or self.router.normalise_single)

    @property
    def pools_layers(self) -> bool:
        """Whether one balance loss is taken over all layers together."""
        return self.balance_over == "model" and self.balance != "none"

    def router_parameters(self, width: int) -> int:
        """Weights of one layer's router for tokens of ``width`` features; for a program's own, of a linear gate."""
        router, E = self.router, self.experts
        linear = E * (width + router.bias)
        table = {
            "noisy": linear + E * width,
            "cosine": router.projection * (width + E) + 1,
            "hash": 0,
            "task": router.tasks * E,
        }
        return router.gates * table.get(router.kind, linear)

    def layers_among(self, layers: int) -> int:
        """How many of so many blocks have experts, without counting them one by one: the number may be absurd."""
        turns = range(self.first, layers, self.every)
        return len(turns) - sum(i in turns for i in set(self.dense))

    def has_experts(self, layer: int) -> bool:
        """Whether block number ``layer`` has experts in the place of its feed-forward part."""
        return layer >= self.first and (layer - self.first) % self.every == 0 and layer not in self.dense

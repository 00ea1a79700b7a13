"""Settings of a mixture of experts: experts, router, capacity and load balancing.

    y = Σ_j w_j · expert_{i_j}(x) [+ shared(x)]           (i, w) = router(x), A of E experts per token

Symbols as in docs/alphabet.md: E experts, A active experts per token, F hidden width of one expert, C capacity.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from colonnade.config.base import MAX_DIM, Config
from colonnade.config.derive import DerivedField, scale_width
from colonnade.errors import ConfigError

MAX_EXPERTS = 1 << 20
MAX_CAPACITY = 1e6
"""At a factor of E / A no token is dropped, so larger ones change nothing."""
Balance = Literal["none", "gshard", "switch", "choices", "sequence", "importance"]


class RouterConfig(Config):
    """How tokens are assigned to experts."""

    kind: str = "softmax"
    """The routing algorithm: softmax, switch, gshard, noisy, cosine, sigmoid, expert_choice, hash, sequence, task,
    topology, or one that a plugin registered (:mod:`colonnade.model.moe.router`)."""
    gates: int = Field(default=1, ge=1, le=1 << 10)
    """Gates per layer; each forward pass uses one of them."""
    dtype: Literal["float32", "model"] = "float32"
    """Precision of the scores: float32, or the model's own (Switch, arXiv 2101.03961, section 2.4)."""
    bias: bool = False
    """Whether the scores have a bias."""
    normalise: bool = True
    """Divide a token's A weights by their sum if A > 1."""
    normalise_single: bool = False
    """With ``normalise``, divide also if A is 1, as transformers does with norm_topk_prob: the weight is then 1, and
    the router is trained by the balance and z-losses alone, because the model's loss gives it no gradient."""
    scale: float = Field(default=1.0, gt=0)
    """Factor on the final weights (DeepSeek's routed_scaling_factor)."""
    jitter: float = Field(default=0.0, ge=0, lt=1)
    """In training the router's input is multiplied by a random factor from U(1 − jitter, 1 + jitter) (Switch, section
    2.2)."""
    noise: float = Field(default=0.0, ge=0)
    """In training noise·N(0, 1)/E is added to the scores (Tutel's gate_noise)."""
    groups: int = Field(default=1, ge=1, le=MAX_EXPERTS)
    """Groups of experts for group-limited routing (DeepSeek-V2, arXiv 2405.04434, section 2.2.2)."""
    groups_kept: int = Field(default=1, ge=1, le=MAX_EXPERTS)
    """Groups that a token may use."""
    group_score: Literal["max", "top2"] = "top2"
    """Score of a group: its best expert's (DeepSeek-V2), or the sum of its two best biased ones (DeepSeek-V3)."""
    projection: int = Field(default=256, ge=1, le=MAX_DIM)
    """cosine: width to which tokens and experts are projected before they are compared."""
    temperature: float = Field(default=0.5, gt=0)
    """cosine: initial value of the learned temperature."""
    tasks: int = Field(default=1, ge=1, le=1 << 16)
    """task: number of tasks."""
    task: int | None = Field(default=None, ge=0, lt=1 << 16)
    """task: the task of tokens that come without one, as in generation; None: it must be set to generate."""
    nodes: int = Field(default=1, ge=1, le=MAX_EXPERTS)
    """topology: nodes over which tokens and experts are assumed to be spread, independently of the plan (FasterMoE)."""
    outgoing_fraction: float = Field(default=0.14, ge=0, le=1)
    """topology: in training, largest share of a node's tokens whose first choice may be an expert of another node."""


class MoeConfig(Config):
    """The mixture of experts that replaces a block's feed-forward network."""

    DERIVED_FIELDS = (
        DerivedField(
            "shared_width", ("ffn_width",), lambda a, b: scale_width(a.shared_width, a.ffn_width, b.ffn_width)
        ),
    )

    experts: int = Field(ge=1, le=MAX_EXPERTS)
    """E: experts per layer."""
    active: int = Field(default=2, ge=1, le=MAX_EXPERTS)
    """A: experts per token (top-k)."""
    merged: int = Field(default=0, ge=0, le=MAX_EXPERTS)
    """Experts stored in each layer if they were merged (colonnade compress --merge): the router chooses among E, and
    each of its choices is mapped to one of these; 0: not merged."""
    ffn_width: int = Field(gt=0, le=MAX_DIM)
    """F: hidden width of one expert."""
    shared_width: int = Field(default=0, ge=0, le=MAX_DIM)
    """Total hidden width of the shared experts, which process every token; 0: none."""
    shared_gate: bool = False
    """Multiply the shared experts' output by σ(w·x) (Qwen2-MoE)."""
    first_k_dense_replace: int = Field(default=0, ge=0, le=1 << 20)
    """The first layer with experts; the layers before it are dense."""
    layer_freq: int = Field(default=1, ge=1, le=1 << 20)
    """From the first one on, every n-th layer has experts (2: GShard and Switch)."""
    mlp_only_layers: tuple[Annotated[int, Field(ge=0, le=1 << 20)], ...] = ()
    """Layers that are dense nevertheless (Qwen's mlp_only_layers)."""
    router: RouterConfig = RouterConfig()
    """How tokens are assigned to experts."""
    capacity: float | None = Field(default=None, ge=-MAX_CAPACITY, le=MAX_CAPACITY, allow_inf_nan=False)
    """Capacity factor f. None: dropless. f > 0: at most C = A·int(f·⌈T/E⌉) tokens per expert; 0: C is the load of the
    busiest expert, so no token is dropped; f < 0: the smaller of the two, with −f (Tutel)."""
    capacity_tokens: int | None = Field(default=None, ge=1, le=MAX_DIM)
    """Maximum tokens of one sequence per expert, first come (Switch's published models: 64); needs capacity_over =
    sequence. It is applied where whole sequences are run: in training, scoring and encoding, not in decoding."""
    capacity_over: Literal["batch", "rank", "sequence"] = "batch"
    """Tokens that count towards an expert's capacity. batch: those of all ranks, so that the result does not depend on
    the layout. rank: those of each rank separately (Tutel). sequence: those of each sequence (capacity_tokens)."""
    priority: bool = False
    """If an expert is over capacity, keep the tokens of the highest probability instead of the first ones
    (batch-prioritised routing)."""
    dropped_token_output: Literal["zero", "residual"] = "zero"
    """Output for a dropped token. zero: nothing. residual: its own input, at the weight of the expert."""
    output_mask: float = Field(default=0.0, ge=0, lt=1)
    """In training each of a token's chosen experts is dropped at this rate, and the others are not rescaled; otherwise
    all are used at 1 − this (expert output masking: NLLB, arXiv 2207.04672, section 6.2)."""
    balance: Balance = "switch"
    """The load-balancing loss. gshard: E/T²·Σ_e(Σ_t p_te)(Σ_t [top1 = e]). switch: E·Σ_e f_e·P_e, f the shares of all
    choices, which sum to 1 (Switch, Megatron). choices: the same with shares that sum to A (as in Hugging Face).
    sequence: switch for each sequence separately, f by the A highest scores without bias or groups (DeepSeek-V3).
    importance: squared coefficients of variation of Σ_t p and of the expected load (Shazeer 2017)."""
    balance_over: Literal["layer", "model"] = "layer"
    """layer: the sum of the layers' losses (Switch, GShard, Megatron). model: one loss whose f and P are means over the
    tokens of all layers with experts, as in Hugging Face; for switch and choices."""
    balance_weight: float = Field(default=0.01, ge=0)
    """Weight of the balance loss, which is added to the model's loss."""
    z_weight: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss, mean_t logsumexp(scores)² (ST-MoE, arXiv 2202.08906, section 3.3)."""
    bias_rate: float = Field(default=0.0, ge=0)
    """Step of the expert biases that balance the load without a loss: after each step the bias of an overloaded expert
    falls by this and that of an underloaded one rises (DeepSeek-V3, arXiv 2412.19437, section 2.1.2); 0: no biases."""

    @model_validator(mode="after")
    def _validate(self) -> "MoeConfig":
        if self.active > self.experts:
            raise ConfigError(f"a token cannot go to {self.active} of {self.experts} experts; lower model.moe.active")
        if self.merged >= self.experts:
            raise ConfigError(f"{self.experts} experts cannot be merged into {self.merged}; set model.moe.merged to 0")
        router = self.router
        if self.experts % router.groups:
            raise ConfigError(
                f"{self.experts} experts cannot be divided into {router.groups} groups; change one of them"
            )
        if router.groups_kept > router.groups:
            raise ConfigError(
                f"a token cannot use {router.groups_kept} of {router.groups} groups; lower model.moe.router.groups_kept"
            )
        if self.active > router.groups_kept * (self.experts // router.groups):
            raise ConfigError(
                f"{router.groups_kept} groups of {self.experts // router.groups} experts cannot hold {self.active} "
                "active ones; raise model.moe.router.groups_kept or lower model.moe.active"
            )
        if router.task is not None and router.task >= router.tasks:
            raise ConfigError(f"there is no task {router.task} among {router.tasks}; raise model.moe.router.tasks")
        if router.nodes > self.experts:
            raise ConfigError(
                f"{self.experts} experts cannot be spread over {router.nodes} nodes; lower model.moe.router.nodes"
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
        if (self.capacity_tokens is not None) != (self.capacity_over == "sequence"):
            raise ConfigError(
                f"model.moe.capacity_tokens {self.capacity_tokens} and capacity_over '{self.capacity_over}' do not go "
                "together: capacity_tokens counts the tokens of one sequence; set both, or neither"
            )
        if self.capacity_tokens is not None and (self.capacity is not None or self.priority):
            name = "capacity" if self.capacity is not None else "priority"
            raise ConfigError(
                f"model.moe.capacity_tokens drops tokens by their order in a sequence; remove model.moe.{name}"
            )
        if self.shared_gate and not self.shared_width:
            raise ConfigError(
                "model.moe.shared_gate needs shared experts; set model.moe.shared_width or turn shared_gate off"
            )
        return self

    @property
    def stored_experts(self) -> int:
        """Number of experts with weights in a layer."""
        return self.merged or self.experts

    @property
    def normalises_weights(self) -> bool:
        """Whether a token's weights are divided by their sum."""
        return self.router.normalise and (self.active > 1 or self.router.normalise_single)

    @property
    def pools_layers(self) -> bool:
        """Whether there is one balance loss over all layers."""
        return self.balance_over == "model" and self.balance != "none"

    def router_parameters(self, width: int) -> int:
        """Weights of one layer's router; a plugin's router is counted as a linear gate."""
        router, E = self.router, self.experts
        linear = E * (width + router.bias)
        table = {
            "noisy": linear + E * width,
            "cosine": router.projection * (width + E) + 1,
            "hash": 0,
            "task": router.tasks * E,
        }
        return router.gates * table.get(router.kind, linear)

    def count_expert_layers(self, layers: int) -> int:
        """How many of ``layers`` blocks have experts; computed without a loop, because the number may be absurd."""
        candidates = range(self.first_k_dense_replace, layers, self.layer_freq)
        return len(candidates) - sum(i in candidates for i in set(self.mlp_only_layers))

    def has_experts(self, layer: int) -> bool:
        """Whether block ``layer`` has experts instead of a feed-forward network."""
        return (
            layer >= self.first_k_dense_replace
            and (layer - self.first_k_dense_replace) % self.layer_freq == 0
            and layer not in self.mlp_only_layers
        )

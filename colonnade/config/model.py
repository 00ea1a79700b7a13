"""Multi-head latent attention: keys and values of all heads made of one short vector a token (arXiv 2405.04434).

What a transformer is: sizes, and the few choices that tell one family from another.

One set of fields spans GPT-2 (learned positions, LayerNorm, GELU, biases, tied), the Llama line (rotary positions,
RMSNorm, SwiGLU, grouped heads) and BERT (both directions, segments, a top of its own): the model reads these fields and
never the family's name, which only says how :mod:`colonnade.checkpoint.hf` spells the weights on disk.
"""

from typing import Any, Literal, cast

from pydantic import Field, model_validator

from colonnade.config.base import MAX_DIM, Config
from colonnade.config.derive import MODEL_DERIVED_FIELDS, divisors
from colonnade.config.moe import MoeConfig
from colonnade.errors import ConfigError


class LatentConfig(Config):
    """How a token is compressed; the model's head_width is that of queries and keys, rotary part included."""

    kv_rank: int = Field(gt=0, le=MAX_DIM)
    """Width of the vector that keys and values of all heads are made of."""
    rope_width: int = Field(gt=0, le=MAX_DIM)
    """Of each query and key head, how much at its end is turned by the position; the keys' is one for all heads."""
    v_width: int = Field(gt=0, le=MAX_DIM)
    """Width of a value head."""
    q_rank: int = Field(default=0, ge=0, le=MAX_DIM)
    """Width of the vector that queries of all heads are made of; 0: they are made of the token itself."""
    norm_eps: float = Field(default=1e-6, gt=0)
    """Added to the variance of the two compressed vectors."""

    def projections(self, width: int, heads: int, head_width: int) -> int:
        """Numbers in the matrices of one layer of a model of these sizes."""
        q = (width + heads * head_width) * self.q_rank if self.q_rank else width * heads * head_width
        up = head_width - self.rope_width + self.v_width
        kv = width * (self.kv_rank + self.rope_width) + self.kv_rank * heads * up
        return q + kv + heads * self.v_width * width

    def vectors(self, *, bias: bool) -> int:
        """Numbers in the norms and biases of the two compressed vectors."""
        return (1 + bias) * (self.q_rank + self.kv_rank) + bias * self.rope_width


Family = Literal[
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "bert", "megatron-bert",
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3",
]  # fmt: skip
Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]
MAX_PARAMETERS = 10**15
TaskHead = Literal["unembed", "masked", "pretraining", "encoder", "classes", "spans"]


class RopeScaling(Config):
    """How rotary frequencies are stretched beyond the context that the model was first trained on."""

    kind: Literal["linear", "llama3", "yarn"]
    """linear: positions divided by the factor (Chen 2023). llama3: by frequency band (Llama 3.1).
    yarn: NTK by parts with an attention temperature (Peng 2023)."""
    factor: float = Field(gt=0)
    """The new context over the original one."""
    original_context: int = Field(default=8192, gt=0, le=MAX_DIM)
    """Context of the first training [tokens]."""
    low_freq_factor: float = Field(default=1.0, gt=0)
    """llama3: wavelengths above original_context / this are divided by the whole factor."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """llama3: wavelengths below original_context / this are left as they are."""
    beta_fast: float = Field(default=32.0, gt=0)
    """yarn: rotations within the original context above which a frequency is left as it is."""
    beta_slow: float = Field(default=1.0, gt=0)
    """yarn: rotations below which a frequency is divided by the whole factor."""
    attention_factor: float | None = Field(default=None, gt=0)
    """yarn: multiplies cos and sin; None computes 0.1·ln(factor) + 1 (or mscale's ratio)."""
    mscale: float | None = Field(default=None, ge=0)
    """yarn, DeepSeek's variant: numerator's coefficient of the attention temperature."""
    mscale_all_dim: float | None = Field(default=None, ge=0)
    """yarn, DeepSeek's variant: denominator's coefficient."""
    truncate: bool = True
    """yarn: round the band's two ends to whole dimensions, as the authors' code does."""


class ModelConfig(Config):
    """The sizes and choices of one :class:`colonnade.model.Transformer`."""

    RULES = MODEL_DERIVED_FIELDS

    family: Family = "llama"
    """How the weights are named on disk when saved for Hugging Face."""
    vocab_size: int = Field(gt=0, le=MAX_DIM)
    """V: rows of the embedding; any number, never padded by the plan."""
    layers: int = Field(gt=0, le=1 << 20)
    """L: transformer blocks."""
    width: int = Field(gt=0, le=MAX_DIM)
    """D: the residual stream."""
    heads: int = Field(gt=0, le=MAX_DIM)
    """N: query heads."""
    kv_heads: int = Field(default=0, ge=0, le=MAX_DIM)
    """K: key/value heads; 0 means as many as query heads."""
    head_width: int = Field(default=0, ge=0, le=MAX_DIM)
    """H: width of a head; 0 means width / heads."""
    ffn_width: int = Field(gt=0, le=MAX_DIM)
    """F: hidden width of the feed-forward part."""
    context: int = Field(default=1024, gt=0, le=MAX_DIM)
    """The longest sequence, in tokens."""
    positions: Literal["learned", "rotary"] = "rotary"
    """learned: a table added to the embedding (GPT-2). rotary: queries and keys are turned (Su 2021)."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """How rotary frequencies are stretched for long contexts; none by default."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """Kind of normalisation."""
    norm_order: Literal["pre", "post"] = "pre"
    """pre: x + f(norm(x)), and a norm after the last block (GPT-2; Megatron-LM, figure 7b). post: norm(x + f(x)), the
    original Transformer's and BERT's order (figure 7a)."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance."""
    activation: Activation = "silu"
    """Non-linearity of the feed-forward part; gelu_tanh is GPT-2's."""
    gated: bool = True
    """True: down(act(gate(x))·up(x)), SwiGLU when act is silu. False: down(act(up(x)))."""
    qkv_bias: bool = False
    """A bias on the query, key and value projections (GPT-2, Qwen2)."""
    out_bias: bool = False
    """A bias on the attention's output projection."""
    ffn_bias: bool = False
    """Biases in the feed-forward part."""
    qk_norm: bool = False
    """RMSNorm on queries and keys before rotation."""
    qk_norm_over: Literal["head", "all"] = "head"
    """What is normalised together: each head by itself (Qwen3), or all heads of a token (OLMoE)."""
    qkv_clip: float | None = Field(default=None, gt=0)
    """Queries, keys and values are clipped to ± this before rotation (OLMoE); None leaves them."""
    latent: LatentConfig | None = None
    """Latent attention in the place of plain heads (DeepSeek)."""
    tied: bool = False
    """The output projection is the embedding."""
    window: int | None = Field(default=None, gt=0, le=MAX_DIM)
    """Sliding window: a query sees itself and window − 1 earlier tokens (Mistral); None sees all."""
    window_from_layer: int = Field(default=0, ge=0, le=MAX_DIM)
    """The first layer that has the window (Qwen2's max_window_layers)."""
    causal: bool = True
    """False: every token sees its whole sequence (BERT, and decoders turned into encoders for embeddings)."""
    segments: int = Field(default=0, ge=0, le=MAX_DIM)
    """Rows of a table of segments added to the embedding (BERT: 2, for its pairs of texts); 0 has no table."""
    embed_norm: bool = False
    """Normalise the sum of the embeddings (the original BERT)."""
    top: TaskHead = "unembed"
    """What stands on the last block. unembed: the vocabulary's logits. The others need causal = false. masked: logits
    through BERT's transform. pretraining: masked, with a pooler and the order of two sentences. encoder: a pooler
    alone. classes: a pooler and a classifier. spans: the first and the last token of an answer."""
    classes: int = Field(default=0, ge=0, le=MAX_DIM)
    """Outputs of the classifier (top = classes)."""
    moe: MoeConfig | None = None
    """Experts in the place of the feed-forward part, in some layers or all."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights; residual outputs are divided by √(2L)."""

    @model_validator(mode="before")
    @classmethod
    def _derive(cls, values: object) -> object:
        """Fill kv_heads and head_width, so that they hold real numbers from the first moment on."""
        if isinstance(values, dict):
            values = dict(cast(dict[str, Any], values))
            heads, width = values.get("heads"), values.get("width")
            if isinstance(heads, int) and heads > 0:
                values["kv_heads"] = values.get("kv_heads") or heads
                if not values.get("head_width") and isinstance(width, int):
                    if width % heads:
                        raise ConfigError(
                            f"width {width} does not divide by {heads} heads; change one of them, or set head_width"
                        )
                    values["head_width"] = width // heads
        return values

    @model_validator(mode="after")
    def _consistent(self) -> "ModelConfig":
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} query heads do not divide by {self.kv_heads} key/value heads; "
                f"kv_heads must be one of {divisors(self.heads)}"
            )
        if self.positions == "rotary" and self.latent is None and self.head_width % 2:
            raise ConfigError(f"rotary positions turn pairs: head_width {self.head_width} must be even")
        if self.positions == "learned" and self.rope_scaling:
            raise ConfigError("rope_scaling belongs to rotary positions; this model has learned ones; remove it")
        self._consistent_latent()
        self._consistent_top()
        if self.parameters > MAX_PARAMETERS:
            raise ConfigError(f"{self.parameters:.3g} parameters are more than any machine holds; lower the sizes")
        return self

    def _consistent_latent(self) -> None:
        if (latent := self.latent) is None:
            return
        if latent.rope_width % 2 or latent.rope_width >= self.head_width:
            raise ConfigError(
                f"latent.rope_width {latent.rope_width} must be even and leave some of head_width {self.head_width}; "
                "change one of them"
            )
        if latent.v_width > self.head_width:
            raise ConfigError(
                f"latent.v_width {latent.v_width} is more than head_width {self.head_width}; values wider than keys "
                "are not implemented"
            )
        plain = {
            "kv_heads": self.kv_heads == self.heads, "positions": self.positions == "rotary",
            "qk_norm": not self.qk_norm, "qkv_clip": self.qkv_clip is None, "window": self.window is None,
            "norm": self.norm == "rmsnorm",
        }  # fmt: skip
        if wrong := [name for name, so in plain.items() if not so]:
            raise ConfigError(
                "latent attention has a key and a value head for each query head, rotary positions, RMSNorm, and "
                f"neither a window nor query norms of its own; leave {wrong[0]} as it is by default"
            )

    def _consistent_top(self) -> None:
        if self.causal and self.top != "unembed":
            raise ConfigError(
                f"causal = True and top = '{self.top}' do not belong together; a causal model has the top 'unembed'"
            )
        if not self.causal and self.window is not None:
            raise ConfigError(
                f"causal = False and window = {self.window} do not belong together: a window in both directions is "
                "not implemented; remove the window if your texts are no longer than it, or set causal to true"
            )
        if bool(self.classes) != (self.top == "classes"):
            raise ConfigError(
                f"top = '{self.top}' and classes = {self.classes} do not belong together; set both or neither"
            )
        if not self.tied and self.top in ("encoder", "classes", "spans"):
            raise ConfigError(f"top = '{self.top}' has no output projection that could be untied; set tied to true")

    @property
    def group(self) -> int:
        """G: query heads that share one key/value head."""
        return self.heads // self.kv_heads

    def window_of(self, layer: int) -> int | None:
        """The sliding window of one layer [tokens], or None for full attention."""
        return self.window if layer >= self.window_from_layer else None

    def experts_of(self, layer: int) -> MoeConfig | None:
        """The mixture of experts of one layer, or None for a dense feed-forward part."""
        return self.moe if self.moe is not None and self.moe.has_experts(layer) else None

    @property
    def expert_layers(self) -> int:
        """Blocks with experts."""
        return 0 if self.moe is None else self.moe.count_expert_layers(self.layers)

    @property
    def rotary_width(self) -> int:
        """How much of a head is turned by the position."""
        return self.latent.rope_width if self.latent else self.head_width

    @property
    def has_pooler(self) -> bool:
        """Whether a tanh layer reads each sequence's first token."""
        return self.top in ("pretraining", "encoder", "classes")

    @property
    def has_transform(self) -> bool:
        """Whether BERT's transform stands before the output projection."""
        return self.top in ("masked", "pretraining")

    @property
    def predicts_masked(self) -> bool:
        """Whether the model is trained to predict masked tokens, and not the next one."""
        return not self.causal and (self.has_transform or self.top == "unembed")

    @property
    def parameters(self) -> int:
        """Number of weights, tied ones counted once."""
        d, f, h = self.width, self.ffn_width, self.head_width
        norm = d * (2 if self.norm == "layernorm" else 1)
        qkv = (self.heads + 2 * self.kv_heads) * h
        normed = 2 if self.qk_norm_over == "head" else self.heads + self.kv_heads
        attention = self._projections + d * self.out_bias
        if self.latent:
            attention += self.latent.vectors(bias=self.qkv_bias)
        else:
            attention += qkv * self.qkv_bias + normed * h * self.qk_norm
        expert_layers = self.expert_layers
        ffn = self._ffn_parameters(f) * (self.layers - expert_layers)
        if moe := self.moe:
            each = moe.experts * self._ffn_parameters(moe.ffn_width)
            each += self._ffn_parameters(moe.shared_width) * bool(moe.shared_width) + d * moe.shared_gate
            each += moe.router_parameters(d)
            ffn += each * expert_layers
        outside = self.vocab_size * d * (1 if self.tied else 2)
        outside += norm * ((self.norm_order == "pre") + self.embed_norm) + self.segments * d
        outside += self.context * d if self.positions == "learned" else 0
        square = d * d + d
        outside += (square + norm + self.vocab_size) * self.has_transform + square * self.has_pooler
        outside += (d + 1) * {"pretraining": 2, "spans": 2, "classes": self.classes}.get(self.top, 0)
        return self.layers * (attention + 2 * norm) + ffn + outside

    @property
    def expert_parameters(self) -> int:
        """Of these, the weights of experts that not every token goes to."""
        if self.moe is None:
            return 0
        return self.expert_layers * self.moe.experts * self._ffn_parameters(self.moe.ffn_width)

    @property
    def active_parameters(self) -> int:
        """Weights that one token has to do with: all but the experts that it does not go to."""
        if self.moe is None:
            return self.parameters
        idle = self.moe.experts - self.moe.active
        return self.parameters - self.expert_parameters // self.moe.experts * idle

    @property
    def size(self) -> str:
        """The number of weights in words, and of a mixture those that a token has to do with."""
        size = f"{self.parameters / 1e6:.2f} M parameters"
        return size if self.moe is None else f"{size}, {self.active_parameters / 1e6:.2f} M of them active"

    @property
    def _projections(self) -> int:
        """Numbers in the matrices of one layer's attention."""
        if self.latent:
            return self.latent.projections(self.width, self.heads, self.head_width)
        return 2 * self.width * (self.heads + self.kv_heads) * self.head_width

    def _ffn_parameters(self, hidden: int) -> int:
        """Weights of a feed-forward part with so many hidden units."""
        return (2 + self.gated) * self.width * hidden + self.ffn_bias * ((1 + self.gated) * hidden + self.width)

    def flops_per_token(self, sequence: int, *, causal: bool) -> float:
        """Floating-point operations to train on one token: 3 × the forward pass's matrix products.

        ``sequence`` is the attended length [tokens]; ``causal`` counts only the half of the scores that a causal
        mask keeps (of a causal model), otherwise all of them (the Megatron and PaLM papers'). The embedding look-up
        costs nothing; recomputation is not counted (it is model FLOPs, not hardware FLOPs).
        """
        # Units that a token passes, in all layers.
        hidden = (self.layers - self.expert_layers) * self.ffn_width
        if self.moe:
            hidden += self.expert_layers * (self.moe.active * self.moe.ffn_width + self.moe.shared_width)
        ffn = self.width * (2 + self.gated) * hidden
        seen = min(sequence, self.window) if self.window else sequence
        widths = self.head_width + (self.latent.v_width if self.latent else self.head_width)
        scores = seen * self.heads * widths * (0.5 if causal and self.causal else 1.0)
        head = self.width * self.vocab_size if self.causal or self.predicts_masked else 0
        return 3 * 2 * (self.layers * (self._projections + scores) + ffn + head)

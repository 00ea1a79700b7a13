"""The model's configuration: sizes, and the choices that distinguish model families.

The same fields describe GPT-2 (learned positions, LayerNorm, GELU, biases, tied embeddings), the Llama family (rotary
positions, RMSNorm, SwiGLU, grouped-query attention) and BERT (bidirectional, segments, its own output layers). The
model reads these fields and never the family's name, which only selects the weight names of
:mod:`colonnade.checkpoint.hf`.
"""

from typing import Any, Literal, cast

from pydantic import Field, model_validator

from colonnade.config.attention import LatentConfig, RopeScaling
from colonnade.config.base import MAX_DIM, Config
from colonnade.config.derive import MODEL_DERIVED_FIELDS, divisors
from colonnade.config.encoder import EncoderConfig, RelativePositions
from colonnade.config.lora import LoraConfig
from colonnade.config.moe import MoeConfig
from colonnade.config.parameter_count import count_parameters, ffn_parameters, flops_per_token
from colonnade.errors import ConfigError

Family = Literal[
    "gpt2", "llama", "mistral", "qwen2", "qwen3", "bert", "megatron-bert",
    "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "t5", "switch_transformers",
    "nllb-moe", "whisper",
]  # fmt: skip
Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]
MAX_PARAMETERS = 10**15
TaskHead = Literal["unembed", "masked", "pretraining", "encoder", "classes", "spans"]


class ModelConfig(Config):
    """The sizes and choices of one :class:`colonnade.model.Transformer`."""

    DERIVED_FIELDS = MODEL_DERIVED_FIELDS

    family: Family = "llama"
    """Model family, which determines the names of the weights in Hugging Face's format."""
    vocab_size: int = Field(gt=0, le=MAX_DIM)
    """V: vocabulary size; any number, the plan never pads it."""
    layers: int = Field(gt=0, le=1 << 20)
    """L: transformer blocks."""
    width: int = Field(gt=0, le=MAX_DIM)
    """D: width of the residual stream."""
    heads: int = Field(gt=0, le=MAX_DIM)
    """N: query heads."""
    kv_heads: int = Field(default=0, ge=0, le=MAX_DIM)
    """K: key/value heads; 0 means as many as query heads."""
    head_width: int = Field(default=0, ge=0, le=MAX_DIM)
    """H: width of a head; 0 means width / heads."""
    ffn_width: int = Field(gt=0, le=MAX_DIM)
    """F: hidden width of the feed-forward network."""
    context: int = Field(default=1024, gt=0, le=MAX_DIM)
    """Maximum sequence length [tokens]."""
    positions: Literal["learned", "rotary", "sinusoidal", "none"] = "rotary"
    """learned: a table of positions is added to the embedding (GPT-2). rotary: queries and keys are rotated (RoPE, Su
    2021). sinusoidal: sines and cosines of the position, from 2 on, are added (NLLB). none: none of these (T5, which
    has relative_positions)."""
    relative_positions: RelativePositions | None = None
    """Biases of the attention scores by distance, one table for the layers of each stack (T5); None: no biases."""
    score_scale: float | None = Field(default=None, gt=0, le=1e6)
    """Factor of attention scores; None: head_width^-½. T5 uses 1."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotary wavelengths."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies for long contexts; None: unscaled."""
    norm: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    """Kind of normalisation."""
    norm_order: Literal["pre", "post"] = "pre"
    """pre: x + f(norm(x)), and a norm after the last block (GPT-2; Megatron-LM, figure 7b). post: norm(x + f(x)), as in
    the original Transformer and BERT (figure 7a)."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance when normalising."""
    activation: Activation = "silu"
    """Activation function of the feed-forward network; gelu_tanh is GPT-2's."""
    gated: bool = True
    """True: down(act(gate(x))·up(x)), SwiGLU when act is silu. False: down(act(up(x)))."""
    qkv_bias: bool = False
    """A bias on the query, key and value projections (GPT-2, Qwen2)."""
    out_bias: bool = False
    """A bias on the attention's output projection."""
    ffn_bias: bool = False
    """Biases in the feed-forward network."""
    qk_norm: bool = False
    """RMSNorm on queries and keys before the rotary embedding."""
    qk_norm_over: Literal["head", "all"] = "head"
    """Scope of qk_norm: each head separately (Qwen3), or all heads of a token together (OLMoE)."""
    qkv_clip: float | None = Field(default=None, gt=0)
    """Clip queries, keys and values to ± this before the rotary embedding (OLMoE); None: no clipping."""
    latent: LatentConfig | None = None
    """Multi-head latent attention (DeepSeek); None: ordinary multi-head or grouped-query attention."""
    scale_embedding: bool = False
    """Multiply the embeddings of tokens by width^½ (NLLB)."""
    scale_decoder_outputs: bool = False
    """Multiply the last hidden state by width^-½ before the output projection (T5 1.0, which has a tied embedding)."""
    encoder: EncoderConfig | None = None
    """The encoder of an encoder–decoder model; each decoder block attends to its output. None: no encoder."""
    tied: bool = False
    """The output projection shares its weights with the embedding."""
    window: int | None = Field(default=None, gt=0, le=MAX_DIM)
    """Sliding window: a query attends to itself and window − 1 earlier tokens (Mistral); None: to all."""
    window_from_layer: int = Field(default=0, ge=0, le=MAX_DIM)
    """The first layer with the sliding window (Qwen2's max_window_layers)."""
    causal: bool = True
    """False: bidirectional attention (BERT, and decoders converted to encoders for embeddings)."""
    segments: int = Field(default=0, ge=0, le=MAX_DIM)
    """Rows of the segment embedding table (BERT: 2, for pairs of texts); 0: no table."""
    embed_norm: bool = False
    """Normalise the sum of the embeddings (the original BERT)."""
    task_head: TaskHead = "unembed"
    """Output layers after the last block. unembed: logits over the vocabulary. The others need causal = false. masked:
    BERT's masked-language-model head. pretraining: masked, with a pooler and a sentence-order classifier. encoder: only
    a pooler. classes: a pooler and a classifier. spans: first and last token of an answer (question answering)."""
    classes: int = Field(default=0, ge=0, le=MAX_DIM)
    """Number of classes (task_head = classes)."""
    moe: MoeConfig | None = None
    """Mixture of experts instead of the feed-forward network, in some or all layers; None: a dense model."""
    lora: LoraConfig | None = None
    """Low-rank adapters, the only parameters that are trained; None: none."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of the initial weights; those of projections into the residual stream are divided by √(2L)."""

    @model_validator(mode="before")
    @classmethod
    def _fill_defaults(cls, values: object) -> object:
        """Replace zero kv_heads and head_width with their values."""
        if isinstance(values, dict):
            values = dict(cast(dict[str, Any], values))
            heads, width = values.get("heads"), values.get("width")
            if isinstance(heads, int) and heads > 0:
                values["kv_heads"] = values.get("kv_heads") or heads
                if not values.get("head_width") and isinstance(width, int):
                    if width % heads:
                        raise ConfigError(
                            f"width {width} is not divisible by {heads} heads; change one of them, or set head_width"
                        )
                    values["head_width"] = width // heads
        return values

    @model_validator(mode="after")
    def _validate(self) -> "ModelConfig":
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{self.heads} query heads are not divisible by {self.kv_heads} key/value heads; "
                f"kv_heads must be one of {divisors(self.heads)}"
            )
        if self.positions == "rotary" and self.latent is None and self.head_width % 2:
            raise ConfigError(f"rotary positions rotate pairs: head_width {self.head_width} must be even")
        if self.positions == "sinusoidal" and (self.width % 2 or self.width < 4):
            raise ConfigError(f"sinusoidal positions are sines and cosines: width {self.width} must be even, 4 or more")
        if self.positions != "rotary" and self.rope_scaling:
            raise ConfigError(f"rope_scaling needs rotary positions, and this model has {self.positions}; remove it")
        self._validate_encoder()
        self._validate_latent()
        self._validate_task_head()
        if self.parameters > MAX_PARAMETERS:
            raise ConfigError(f"{self.parameters:.3g} parameters are more than any machine can hold; lower the sizes")
        return self

    def _validate_encoder(self) -> None:
        near = self.relative_positions
        if near is not None:
            if near.buckets % 4 or near.distance <= near.buckets // 2:
                raise ConfigError(
                    f"relative_positions.buckets {near.buckets} must be a multiple of 4, and distance {near.distance} "
                    "more than half of them; use 32 and 128"
                )
            if self.window is not None or self.latent is not None:
                raise ConfigError(
                    "relative_positions support neither a window nor latent attention; remove one of them"
                )
        if (encoder := self.encoder) is None:
            return
        required = {
            "causal": self.causal, "norm_order": self.norm_order == "pre", "latent": self.latent is None,
            "window": self.window is None, "qk_norm": not self.qk_norm, "qkv_clip": self.qkv_clip is None,
            "segments": not self.segments, "embed_norm": not self.embed_norm,
        }  # fmt: skip
        if wrong := [name for name, valid in required.items() if not valid]:
            raise ConfigError(f"a model with an encoder supports only the default {wrong[0]}; remove {wrong[0]}")
        if self.moe is not None:
            self._validate_encoder_experts(encoder, self.moe)
        if encoder.reads == "audio" and (self.positions != "learned" or self.norm != "layernorm"):
            raise ConfigError("an audio encoder is Whisper's: set positions learned and norm layernorm")
        if encoder.reads == "tokens" and self.positions == "learned":
            raise ConfigError(
                "a text encoder with learned positions is not implemented; set positions none with "
                "relative_positions, or rotary"
            )

    @staticmethod
    def _validate_encoder_experts(encoder: EncoderConfig, moe: MoeConfig) -> None:
        if encoder.reads == "audio":
            raise ConfigError("an audio encoder with experts is not implemented; remove model.moe")
        if moe.pools_layers:
            raise ConfigError(
                "one balance loss over the layers of two stacks is not implemented; set model.moe.balance_over to layer"
            )
        if moe.capacity is not None:
            raise ConfigError(
                "a capacity over a batch depends on which sources are encoded together; use model.moe.capacity_tokens"
            )
        if moe.router.kind == "task":
            raise ConfigError("router 'task' is not implemented for an encoder's tokens; use softmax or switch")

    def _validate_latent(self) -> None:
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
        required = {
            "kv_heads": self.kv_heads == self.heads, "positions": self.positions == "rotary",
            "qk_norm": not self.qk_norm, "qkv_clip": self.qkv_clip is None, "window": self.window is None,
            "norm": self.norm == "rmsnorm",
        }  # fmt: skip
        if wrong := [name for name, valid in required.items() if not valid]:
            raise ConfigError(
                "latent attention needs a key and a value head for each query head, rotary positions and RMSNorm, and "
                f"supports neither a window nor qk_norm nor qkv_clip; leave {wrong[0]} at its default"
            )

    def _validate_task_head(self) -> None:
        if self.causal and self.task_head != "unembed":
            raise ConfigError(
                f"causal = True and task_head = '{self.task_head}' cannot be combined; a causal model needs task_head "
                "'unembed'"
            )
        if not self.causal and self.window is not None:
            raise ConfigError(
                f"causal = False and window = {self.window} cannot be combined: a window in both directions is "
                "not implemented; remove the window if your sequences are no longer than it, or set causal to true"
            )
        if bool(self.classes) != (self.task_head == "classes"):
            raise ConfigError(
                f"task_head = '{self.task_head}' and classes = {self.classes} cannot be combined; set both or neither"
            )
        if not self.tied and self.task_head in ("encoder", "classes", "spans"):
            raise ConfigError(f"task_head = '{self.task_head}' has no output projection to untie; set tied to true")

    @property
    def group(self) -> int:
        """G: query heads per key/value head."""
        return self.heads // self.kv_heads

    def window_of(self, layer: int) -> int | None:
        """The sliding window of one layer [tokens], or None for full attention."""
        return self.window if layer >= self.window_from_layer else None

    @property
    def encoder_stack(self) -> "ModelConfig":
        """The encoder as a separate config, from which its blocks are built."""
        assert self.encoder is not None, "this model has no encoder"
        return self.replace(
            encoder=None,
            layers=self.encoder.layers,
            ffn_width=self.encoder.ffn_width or self.ffn_width,
            context=self.encoder.context,
            causal=False,
            moe=self.moe
            and self.moe.replace(
                first_k_dense_replace=self.encoder.first_k_dense_replace,
                layer_freq=self.encoder.layer_freq,
                mlp_only_layers=(),
            ),
        )

    @property
    def total_layers(self) -> int:
        """Blocks of the decoder and of the encoder, if there is one; the encoder's are numbered after the decoder's."""
        return self.layers + (self.encoder.layers if self.encoder else 0)

    def experts_of(self, layer: int) -> MoeConfig | None:
        """The mixture of experts of one block, or None for a dense feed-forward part."""
        if self.moe is None:
            return None
        if self.encoder is not None and layer >= self.layers:
            return self.moe if self.encoder.has_experts(layer - self.layers) else None
        return self.moe if self.moe.has_experts(layer) else None

    @property
    def expert_layers(self) -> int:
        """Blocks with experts, those of an encoder included."""
        if self.moe is None:
            return 0
        return self.moe.count_expert_layers(self.layers) + (self.encoder.expert_layers if self.encoder else 0)

    @property
    def rotary_width(self) -> int:
        """Width of the rotary part of a head."""
        return self.latent.rope_width if self.latent else self.head_width

    @property
    def has_pooler(self) -> bool:
        """Whether the model has BERT's pooler, a tanh layer on each sequence's first token."""
        return self.task_head in ("pretraining", "encoder", "classes")

    @property
    def has_transform(self) -> bool:
        """Whether BERT's transform (dense, activation, norm) precedes the output projection."""
        return self.task_head in ("masked", "pretraining")

    @property
    def predicts_masked(self) -> bool:
        """Whether the training objective is masked language modelling."""
        return not self.causal and (self.has_transform or self.task_head == "unembed")

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones counted once."""
        return count_parameters(self)

    @property
    def expert_parameters(self) -> int:
        """Parameters of the routed experts, without shared experts."""
        if self.moe is None:
            return 0
        return self.expert_layers * self.moe.stored_experts * ffn_parameters(self, self.moe.ffn_width)

    @property
    def active_parameters(self) -> int:
        """Parameters that process one token: all but the experts to which it is not routed."""
        if self.moe is None:
            return self.parameters
        stored = self.moe.stored_experts
        return self.parameters - self.expert_parameters // stored * max(0, stored - self.moe.active)

    @property
    def size(self) -> str:
        """The number of parameters in readable form; for a mixture of experts, also the active ones."""
        size = f"{self.parameters / 1e6:.2f} M parameters"
        return size if self.moe is None else f"{size}, {self.active_parameters / 1e6:.2f} M of them active"

    def flops_per_token(self, sequence: int, *, causal: bool) -> float:
        """Floating-point operations to train on one token: 3 × the forward pass's matrix products.

        ``sequence`` is the attended length [tokens]. ``causal`` counts half of the scores of a causal model, those that
        the mask keeps; otherwise all are counted, as in the Megatron and PaLM papers. The embedding look-up is free.
        Recomputation is not counted: these are model FLOPs, not hardware FLOPs.
        """
        return flops_per_token(self, sequence, causal=causal)

"""What a training run is told: data, optimisation, and where to put the results."""

import math
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from colonnade.config import feature_checks
from colonnade.config.base import MAX_DIM, Config, dtype_name
from colonnade.config.derive import UNCHANGED, DerivedField
from colonnade.config.expert_overrides import AS_TRAINED, Capacity, ExpertsConfig
from colonnade.config.model import ModelConfig
from colonnade.config.moe import MAX_EXPERTS, MoeConfig
from colonnade.config.plan import Plan
from colonnade.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
ComputeType = Literal["float32", "bfloat16", "float16", "float64"]


MAX_SAMPLES = 1 << 24
"""Samples of one step."""
DEFAULT_SEQUENCE = 512
"""Tokens in one sample, unless the model's context is shorter or another number is set."""


def _sequence(was: "RunConfig", now: "RunConfig") -> object:
    """As much of the context as by default, where it was so before."""
    default = min(DEFAULT_SEQUENCE, was.model.context)
    return min(DEFAULT_SEQUENCE, now.model.context) if was.data.sequence == default else UNCHANGED


class DataConfig(Config):
    """Where tokens come from and how they are cut into samples."""

    path: Path = Path("corpus")
    """A corpus folder, as colonnade corpus writes it: manifest, shards, tokenizer."""
    sequence: int = Field(default=DEFAULT_SEQUENCE, gt=1, le=MAX_DIM)
    """Tokens in one sample; unless it is given, no more than the model's context."""
    separate_documents: bool = True
    """True: attention and positions restart at each document. False: one sample is one sequence. An encoder's sample is
    a part of one document in any case."""
    seed: int = Field(default=0, ge=0)
    """Seeds the order of the samples, and an encoder's masks; independent of the layout and of the model's seed."""
    restart: bool = False
    """A resume with another corpus, sequence or seed starts the data at its first sample; False: it is refused."""
    mask_share: float = Field(default=0.15, gt=0, lt=1)
    """Encoders: share of a sample's tokens that are masked and predicted."""
    mask_ngram: int = Field(default=3, ge=1, le=1 << 10)
    """Encoders: most words in one masked run; n words are drawn with a probability in proportion to 1/n."""
    short_seq_prob: float = Field(default=0.1, ge=0, le=1)
    """Encoders: share of the samples that aim at a random shorter length (Devlin 2019, appendix A.2)."""


class TrainConfig(Config):
    """Optimisation: what one step is, how long to go on, and what to note on the way."""

    MAY_BE_INFINITE = ("clip",)
    RULES = (
        DerivedField("min_lr", ("lr",), shown="final_lr"),
        DerivedField("warmup", ("steps",), shown="warmup_steps"),
    )

    steps: int = Field(default=1000, gt=0)
    """Optimiser steps in all."""
    batch: int = Field(default=32, gt=0, le=MAX_SAMPLES)
    """Samples in one optimiser step, over all ranks."""
    micro_batch: int = Field(default=8, gt=0, le=MAX_SAMPLES)
    """Samples that one rank runs through the model at once; the rest of its share is accumulated."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    min_lr: float | None = Field(default=None, ge=0)
    """Learning rate at the end of the decay; None: a tenth of lr."""
    warmup: int | None = Field(default=None, ge=0)
    """Steps of linear warm-up from 0; None: a tenth of the steps, at most 100."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay after the warm-up."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices and embeddings; biases and norms have none (Loshchilov 2017)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW: decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW: decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW: added to the root of the second moment."""
    clip: float = Field(default=1.0, gt=0)
    """Largest global gradient norm; inf never clips."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: experts (of a mixture), rest (all but those), or patterns of names. A pattern is
    a glob of a parameter or a module (embed, 'blocks.[0-5]', '*.bias'), or a regular expression of whole parameter
    names after re: ('re:(?!top).*' trains the top alone)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of each target's probability spread over the whole vocabulary."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share dropped of what attention and the feed-forward part add to the residual stream, and of what a classifier
    reads; GPT-2 had 0.1."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share dropped of the attention's probabilities, by kernels that are slower than those without; GPT-2 had 0.1."""
    embedding_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share dropped of the embeddings; GPT-2 had 0.1."""
    expert_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Share dropped of the hidden units of each expert that a router chooses, not of those that all tokens share;
    Switch had 0.4 in fine-tuning, beside a dropout of 0.1 (arXiv 2101.03961, section 2.4)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Compute type; auto: bfloat16 on a GPU, float32 on a CPU or with deterministic. Master weights and optimiser state
    are float32 (float64 for parity tests)."""
    loss_scale: float = Field(default=65536.0, ge=1, allow_inf_nan=False)
    """float16: what the loss is multiplied by at first, a power of two; halved by each step that overflows."""
    loss_scale_steps: int = Field(default=2000, gt=0)
    """float16: steps without an overflow after which the scale is doubled."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """Products of the blocks in float8, with bfloat16 around them: one scale a tensor, or one a row (finer, slower)."""
    recompute: Literal["none", "full", "attention", "budget"] = "none"
    """What the backward pass computes again instead of keeping it: nothing, all of each block, only its attention, or
    as little as activation_bytes allows."""
    activation_bytes: int = Field(default=0, ge=0)
    """With recompute budget: what the blocks of one rank may keep for one micro-batch [bytes]."""
    offload: Literal["none", "optimizer"] = "none"
    """optimizer: Adam's moments live in host memory and visit the GPU while they are needed."""
    fused_adamw: bool | None = None
    """AdamW by a kernel of ours that clips, moves and rounds in one pass over the weights (28 instead of 52 bytes each
    in bfloat16); with one micro-batch a step it reads gradients in the compute type. A CPU does it in plain torch.
    None: on a GPU, unless deterministic or offload is set."""
    compile: bool | None = None
    """torch.compile each block. None: of a dense model on a GPU, unless deterministic is set or the schedule is
    zero_bubble; blocks with experts may compile anew whenever the experts' loads change."""
    cuda_graph: bool = False
    """Record a step's forward and backward passes once and replay them, so that the GPU never waits for the host: for
    one micro-batch a step, on one GPU or tensor-parallel ones; takes the memory of a step for good."""
    seed: int = Field(default=0, ge=0)
    """Seeds the initial weights and the dropout."""
    start: str = ""
    """Model whose weights a new run begins with, instead of drawn ones: anything that load takes (a run, a checkpoint,
    a Hugging Face folder, a GGUF file). It must be of the run's shape and tokens."""
    log_every: int = Field(default=10, gt=0)
    """Steps between two lines of metrics."""
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    """Where metrics go besides JSON lines and TensorBoard; each needs its package (pip install 'colonnade[track]')."""
    profile: int = Field(default=0, ge=0)
    """Steps to trace with torch.profiler, the fourth of a session and those after it, into runs/NAME/profile; then a
    table says where their time went."""
    eval_every: int | None = Field(default=None, ge=0)
    """Steps between two validations; 0 never; None: 100, or never where too little text is held out."""
    eval_samples: int = Field(default=64, gt=0, le=MAX_SAMPLES)
    """Samples of one validation, over all ranks."""
    eval_active: int | None = Field(default=None, ge=1, le=MAX_EXPERTS)
    """Experts that a token goes to in validations; None: as in training."""
    eval_capacity: Capacity = None
    """Capacity factor in validations, or off; None: as in training (Switch and ST-MoE: 1.25, and 2 in evaluation)."""
    save_every: int = Field(default=200, ge=0)
    """Steps between two checkpoints; 0 saves only at the end and on a signal."""
    async_save: bool = True
    """Write checkpoints while training goes on; holds a copy of weights and moments in host memory."""
    keep: int | None = None
    """Newest complete checkpoints to keep, 1 or more; older ones are deleted. None keeps all."""
    keep_every: int | None = None
    """With keep: checkpoints of steps that are a multiple of this, 1 or more, stay for good; None: of no others."""
    skip_bad_batches: int = Field(default=0, ge=0)
    """Batches of the whole run whose loss or gradient norm may be not finite: they change nothing, and the next is
    taken; one more ends the run."""
    timeout_s: float = Field(default=300.0, gt=0, le=1e6)
    """Longest that a rank may be silent, or a step may take, before the run ends and names the missing rank [s]; the
    first step, a save and a validation may take ten times as long."""
    restarts: int = Field(default=0, ge=0)
    """Times that the processes of --plan are started again after one was killed, hung or failed with a bug."""
    check_memory: bool = True
    """Refuse a run that needs more memory than is free, by an estimate, before any is allocated; False tries anyway."""
    deterministic: bool = False
    """Only bitwise repeatable algorithms, also on a GPU, where the defaults are then a CPU's: float32, not compiled,
    AdamW not fused."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _named_dtype(cls, value: object) -> object:
        """Take torch.bfloat16 as "bfloat16"."""
        return dtype_name(value)

    @field_validator("freeze", mode="before")
    @classmethod
    def _one_pattern(cls, value: object) -> object:
        """A single pattern may be given as a string; none is what older checkpoints say."""
        return (() if value == "none" else (value,)) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _consistent(self) -> "TrainConfig":
        if self.final_lr > self.lr:
            raise ConfigError(f"train.min_lr {self.min_lr} is above train.lr {self.lr}; lower it")
        for name, value in (("keep", self.keep), ("keep_every", self.keep_every)):
            if value is not None and value < 1:
                raise ConfigError(
                    f"train.{name} is {value}, and it counts from 1; set 1 or more, or leave it out: then "
                    + ("all checkpoints are kept" if name == "keep" else "keep alone says which stay")
                )
        if self.keep_every is not None and self.keep is None:
            raise ConfigError(
                f"train.keep_every {self.keep_every} spares checkpoints that train.keep would delete, and without it "
                "all are kept; set train.keep, or leave keep_every out"
            )
        if self.warmup_steps > self.steps:
            raise ConfigError(
                f"--train.warmup {self.warmup} is longer than the run of {self.steps} steps; lower it, or leave it out"
            )
        if not math.log2(self.loss_scale).is_integer():
            near = 2 ** round(math.log2(self.loss_scale))
            raise ConfigError(f"train.loss_scale {self.loss_scale} is no power of two, so it would round; use {near}")
        if self.float8 != "none" and self.dtype not in ("auto", "bfloat16"):
            raise ConfigError(
                f"train.float8 {self.float8} computes beside bfloat16, not {self.dtype}; set train.dtype bfloat16"
            )
        if (self.recompute == "budget") != (self.activation_bytes > 0):
            raise ConfigError(
                f"train.recompute is {self.recompute} and train.activation_bytes {self.activation_bytes}: a budget "
                "needs bytes, and bytes need recompute budget; set both or neither"
            )
        if self.fused_adamw and self.offload != "none":
            raise ConfigError(
                f"train.fused_adamw passes over moments that are at hand, and train.offload {self.offload} brings them "
                "in pieces; set one of them"
            )
        return self

    def resolved(self, device: str, *, compiles: bool = True) -> "TrainConfig":
        """This with ``dtype``, ``compile`` and ``fused_adamw`` decided for "cuda" or "cpu"; what was set stays.

        ``compiles``: whether blocks are compiled by default on a GPU.
        """
        fast = device == "cuda" and not self.deterministic
        dtype, fused, compiled = self.dtype, self.fused_adamw, self.compile
        if dtype == "auto":
            dtype = "bfloat16" if fast or self.float8 != "none" else "float32"
        if fused is None:
            fused = fast and self.offload == "none"
        return self.replace(dtype=dtype, fused_adamw=fused, compile=fast and compiles if compiled is None else compiled)

    @property
    def compute_dtype(self) -> ComputeType:
        """``dtype`` of settings that are resolved."""
        assert self.dtype != "auto", "resolved() decides it"
        return self.dtype

    @property
    def final_lr(self) -> float:
        """Learning rate at the end of the decay."""
        return self.lr / 10 if self.min_lr is None else self.min_lr

    @property
    def warmup_steps(self) -> int:
        """Steps of linear warm-up."""
        return min(100, self.steps // 10) if self.warmup is None else self.warmup


class RunConfig(Config):
    """One training run, whole: it is saved inside every checkpoint."""

    RULES = (DerivedField("data.sequence", ("model.context",), _sequence),)

    name: str = Field(default="run", min_length=1)
    """The run's folder, within runs."""
    runs: Path = Path("runs")
    """Where runs are kept: runs/NAME/step-N."""
    device: Device = "auto"
    """auto: CUDA when every local rank can have a GPU of its own, otherwise the CPU."""
    model: ModelConfig
    """The transformer."""
    plan: Plan = Plan()
    """The parallel layout."""
    data: DataConfig = DataConfig()
    """The corpus."""
    train: TrainConfig = TrainConfig()
    """The optimisation."""

    @model_validator(mode="before")
    @classmethod
    def _sequence_of_the_model(cls, values: object) -> object:
        """Samples of a model with a short context are as short, unless their length is given."""
        if isinstance(values, dict):
            values = dict(cast("dict[str, Any]", values))
            model, data = values.get("model"), values.get("data", DataConfig())
            open_length = isinstance(data, DataConfig) and "sequence" not in data.model_fields_set
            if isinstance(model, ModelConfig) and open_length and model.context < data.sequence:
                values["data"] = data.replace(sequence=model.context)
        return values

    @model_validator(mode="after")
    def _consistent(self) -> "RunConfig":
        if Path(self.name).is_absolute() or ".." in Path(self.name).parts:
            raise ConfigError(f"name {self.name!r} leads out of the folder of runs; use --runs for another folder")
        ranks = self.plan.data_ranks
        if self.train.batch % ranks:
            raise ConfigError(
                f"train.batch {self.train.batch} does not divide over {ranks} data ranks; "
                f"make it a multiple, such as {-(-self.train.batch // ranks) * ranks}"
            )
        share, micro = self.train.batch // ranks, self.train.micro_batch
        if self.plan.pp > 1 and share % min(micro, share):
            raise ConfigError(
                f"a pipeline needs equal micro-batches: {share} samples of a data rank do not divide by "
                f"train.micro_batch {micro}; change one of them"
            )
        self.plan.check_micro_batches(self.micro_batches)
        if self.train.compile and self.plan.pp > 1 and self.plan.schedule == "zero_bubble":
            raise ConfigError(
                "zero_bubble computes the gradients of weights apart, and a compiled block all at once; "
                "use --plan.schedule interleaved, or leave --train.compile out"
            )
        if self.train.expert_dropout and self.model.moe is None:
            raise ConfigError(
                f"train.expert_dropout {self.train.expert_dropout:g} is about experts, and this model has none; "
                "leave it out, or set --train.dropout"
            )
        if self.train.expert_dropout and self.train.float8 != "none":
            raise ConfigError(
                f"train.expert_dropout {self.train.expert_dropout:g} with train.float8 {self.train.float8}: float8's "
                "products of experts do not drop; set one of them to 0 or none"
            )
        _ = self.eval_moe
        if self.train.cuda_graph:
            feature_checks.check_cuda_graph(self)
        if self.train.float8 != "none" and self.plan.tp_overlap:
            raise ConfigError(
                f"train.float8 {self.train.float8} scales whole operands, and plan.tp_overlap multiplies parts as they "
                "arrive; set train.float8 none or plan.tp_overlap False"
            )
        if self.train.float8 != "none":
            feature_checks.check_float8(self.model, self.plan.tp, self.plan.sh)
        if self.data.sequence > self.model.context:
            raise ConfigError(
                f"data.sequence {self.data.sequence} is longer than the model's context {self.model.context}; "
                f"set --data.sequence {self.model.context} or --model.context {self.data.sequence}"
            )
        return self

    def resolved(self, device: str) -> "RunConfig":
        """This on "cuda" or "cpu", with the settings of ``train`` that depend on it decided."""
        zero_bubble = self.plan.pp > 1 and self.plan.schedule == "zero_bubble"
        compiles = self.model.moe is None and not zero_bubble
        return self.replace(train=self.train.resolved(device, compiles=compiles))

    @property
    def eval_moe(self) -> MoeConfig | None:
        """What validations choose experts by, where it is not what training does."""
        told = ExpertsConfig(active=self.train.eval_active, capacity=self.train.eval_capacity)
        if told == AS_TRAINED:
            return None
        try:
            return told.of(self.model).moe
        except ConfigError as error:
            raise ConfigError(str(error).replace("--experts.", "--train.eval_")) from None

    @property
    def micro_batches(self) -> int:
        """Forward and backward passes of a rank in one step."""
        return -(-(self.train.batch // self.plan.data_ranks) // self.train.micro_batch)

    @property
    def folder(self) -> Path:
        """runs/NAME."""
        return self.runs / self.name

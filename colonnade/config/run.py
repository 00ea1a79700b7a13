"""Settings of a training run: data, optimisation, and where the results are written."""

import math
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import Field, field_validator, model_validator

from colonnade.config import feature_checks
from colonnade.config.base import MAX_DIM, Config, dtype_name
from colonnade.config.derive import UNCHANGED, DerivedField
from colonnade.config.distill import DistillConfig
from colonnade.config.expert_overrides import AS_TRAINED, Capacity, ExpertsConfig
from colonnade.config.model import ModelConfig
from colonnade.config.moe import MAX_EXPERTS, MoeConfig
from colonnade.config.plan import Plan
from colonnade.errors import ConfigError

Device = Literal["auto", "cpu", "cuda"]
ComputeType = Literal["float32", "bfloat16", "float16", "float64"]


MAX_SAMPLES = 1 << 24
"""Maximum number of samples in one step."""
DEFAULT_SEQUENCE = 512
"""Default tokens per sample, unless the model's context is shorter."""


def _sequence(was: "RunConfig", now: "RunConfig") -> object:
    """The default for the new context, if the value before was the default."""
    default = min(DEFAULT_SEQUENCE, was.model.context)
    return min(DEFAULT_SEQUENCE, now.model.context) if was.data.sequence == default else UNCHANGED


class DataConfig(Config):
    """The corpus and how it is split into samples."""

    path: Path = Path("corpus")
    """Corpus folder written by colonnade corpus: manifest, shards, tokenizer."""
    sequence: int = Field(default=DEFAULT_SEQUENCE, gt=1, le=MAX_DIM)
    """Tokens per sample; by default 512, or the model's context if it is shorter."""
    separate_documents: bool = True
    """True: attention and positions restart at each document. False: a sample is one sequence. An encoder's sample is
    always a part of one document."""
    seed: int = Field(default=0, ge=0)
    """Seed of the samples' order and of an encoder's masks; independent of the layout and of train.seed."""
    restart: bool = False
    """Allow a resume with a different corpus, sequence or seed, which starts at the first sample; False: refuse it."""
    mask_share: float = Field(default=0.15, gt=0, lt=1)
    """Encoders: share of a sample's tokens that are masked and predicted."""
    mask_ngram: int = Field(default=3, ge=1, le=1 << 10)
    """Encoders: longest masked n-gram [words]; n is drawn with a probability proportional to 1/n."""
    short_seq_prob: float = Field(default=0.1, ge=0, le=1)
    """Encoders: share of the samples with a random shorter length (Devlin 2019, appendix A.2)."""


class TrainConfig(Config):
    """Optimisation, precision, checkpoints, logging and fault handling of a training run."""

    MAY_BE_INFINITE = ("clip",)
    DERIVED_FIELDS = (
        DerivedField("min_lr", ("lr",), resolved_by="final_lr"),
        DerivedField("warmup", ("steps",), resolved_by="warmup_steps"),
    )

    steps: int = Field(default=1000, gt=0)
    """Optimiser steps of the run."""
    batch: int = Field(default=32, gt=0, le=MAX_SAMPLES)
    """Samples in one optimiser step, over all ranks."""
    micro_batch: int = Field(default=8, gt=0, le=MAX_SAMPLES)
    """Samples in one forward pass of a rank; gradients of its micro-batches are accumulated."""
    lr: float = Field(default=3e-4, gt=0)
    """Peak learning rate."""
    min_lr: float | None = Field(default=None, ge=0)
    """Learning rate at the end of the decay; None: a tenth of lr."""
    warmup: int | None = Field(default=None, ge=0)
    """Steps of linear learning-rate warm-up from 0; None: a tenth of the steps, at most 100."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning-rate schedule after the warm-up."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay of matrices and embeddings, not of biases and norms (Loshchilov 2017)."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW: decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW: decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW: added to the square root of the second moment."""
    clip: float = Field(default=1.0, gt=0)
    """Global gradient norm above which gradients are clipped; inf: no clipping."""
    freeze: tuple[str, ...] = ()
    """Parameters that are not trained: experts (of a mixture), rest (all others), or name patterns. A pattern is a glob
    that matches a parameter or a module (embed, 'blocks.[0-5]', '*.bias'), or re: and a regular expression that
    matches whole parameter names ('re:(?!top).*' trains only the output layers)."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Label smoothing: share of each target's probability that is spread over the whole vocabulary."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the outputs of attention and feed-forward network before they are added to the residual stream, and on
    a classifier's input; GPT-2 used 0.1."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the attention probabilities, with slower kernels than without dropout; GPT-2 used 0.1."""
    embedding_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the embeddings; GPT-2 used 0.1."""
    expert_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout on the hidden units of routed experts, not of shared ones; Switch used 0.4 in fine-tuning, with dropout
    0.1 (arXiv 2101.03961, section 2.4)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto"
    """Compute type; auto: bfloat16 on a GPU, float32 on a CPU or with deterministic. Master weights and optimiser state
    are float32 (with float64, float64)."""
    loss_scale: float = Field(default=65536.0, ge=1, allow_inf_nan=False)
    """float16: initial loss scale, a power of two; halved at each step that overflows."""
    loss_scale_steps: int = Field(default=2000, gt=0)
    """float16: steps without an overflow after which the loss scale is doubled."""
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    """float8 matrix products in the blocks, bfloat16 elsewhere: one scale per tensor, or one per row (more exact,
    slower)."""
    recompute: Literal["none", "full", "attention", "budget"] = "none"
    """Activation checkpointing: what the backward pass recomputes. Nothing, each whole block, only its attention, or as
    little as activation_bytes allows."""
    activation_bytes: int = Field(default=0, ge=0)
    """With recompute budget: memory for the activations of one rank's blocks and one micro-batch [bytes]."""
    offload: Literal["none", "optimizer"] = "none"
    """optimizer: keep Adam's moments in host memory and copy them to the GPU while they are needed."""
    fused_adamw: bool | None = None
    """AdamW as one kernel that clips, updates and rounds in one pass over the weights (28 instead of 52 bytes per
    weight in bfloat16); with one micro-batch per step it reads gradients in the compute type. A CPU uses plain torch.
    None: on a GPU, unless deterministic or offload is set."""
    compile: bool | None = None
    """torch.compile each block. None: for a dense model on a GPU, unless deterministic is set or the schedule is
    zero_bubble; blocks with experts may recompile whenever the experts' loads change."""
    cuda_graph: bool = False
    """Capture a step's forward and backward passes as a CUDA graph and replay it, so that the GPU never waits for the
    host. Needs one micro-batch per step and no parallelism except tp; keeps the memory of a step allocated."""
    seed: int = Field(default=0, ge=0)
    """Seed of the initial weights and of dropout."""
    pretrained_checkpoint: str = ""
    """Model that provides the initial weights of a new run (a run, a checkpoint, a Hugging Face folder, a GGUF file);
    empty: random weights. Its shape and tokenizer must match the run's."""
    log_every: int = Field(default=10, gt=0)
    """Steps between two logged lines of metrics; after 20 s without a line the next step logs one too."""
    trackers: tuple[Literal["wandb", "mlflow"], ...] = ()
    """Experiment trackers besides JSON lines and TensorBoard; they need pip install 'colonnade[track]'."""
    profile: int = Field(default=0, ge=0)
    """Steps to trace with torch.profiler, starting with the fourth step after the start or resume, into
    runs/NAME/profile; a table of where their time went is printed."""
    eval_every: int | None = Field(default=None, ge=0)
    """Steps between two validations; 0: never; None: 100, or never if too little text is held out."""
    eval_samples: int = Field(default=64, gt=0, le=MAX_SAMPLES)
    """Samples per validation, over all ranks."""
    eval_active: int | None = Field(default=None, ge=1, le=MAX_EXPERTS)
    """Experts per token in validations; None: as in training."""
    eval_capacity: Capacity = None
    """Capacity factor in validations; off: dropless; None: as in training (Switch and ST-MoE train with 1.25 and
    evaluate with 2)."""
    save_every: int = Field(default=200, ge=0)
    """Steps between two checkpoints; 0: only at the end and on a signal."""
    async_save: bool = True
    """Write checkpoints in the background; needs host memory for a copy of weights and moments."""
    keep: int | None = None
    """Number of newest complete checkpoints to keep, 1 or more; older ones are deleted. None: keep all."""
    keep_every: int | None = None
    """With keep: also keep the checkpoints of steps that are a multiple of this, 1 or more; None: no others."""
    skip_bad_batches: int = Field(default=0, ge=0)
    """Batches of the run that may be skipped because their loss or gradient norm is not finite; one more ends the
    run."""
    timeout_s: float = Field(default=300.0, gt=0, le=1e6)
    """Longest time without a heartbeat of a rank, and longest step, before the run ends and names the missing rank [s];
    the first step, a save and a validation may take ten times as long."""
    restarts: int = Field(default=0, ge=0)
    """How often the processes of --plan are restarted after one was killed, hung or failed with a bug."""
    check_memory: bool = True
    """Refuse a run whose estimated memory exceeds the free memory, before anything is allocated; False: try anyway."""
    deterministic: bool = False
    """Use only deterministic (bitwise repeatable) algorithms; on a GPU the defaults are then those of a CPU: float32,
    no torch.compile, no fused AdamW."""

    @field_validator("dtype", mode="before")
    @classmethod
    def _named_dtype(cls, value: object) -> object:
        """Accept torch.bfloat16 for "bfloat16"."""
        return dtype_name(value)

    @field_validator("freeze", mode="before")
    @classmethod
    def _one_pattern(cls, value: object) -> object:
        """Accept a single pattern as a string, and "none" from older checkpoints."""
        return (() if value == "none" else (value,)) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _validate(self) -> "TrainConfig":
        if self.final_lr > self.lr:
            raise ConfigError(f"train.min_lr {self.min_lr} is above train.lr {self.lr}; lower it")
        for name, value in (("keep", self.keep), ("keep_every", self.keep_every)):
            if value is not None and value < 1:
                raise ConfigError(
                    f"train.{name} is {value} and must be 1 or more; change it, or remove it: then "
                    + ("all checkpoints are kept" if name == "keep" else "only keep decides which are kept")
                )
        if self.keep_every is not None and self.keep is None:
            raise ConfigError(
                f"train.keep_every {self.keep_every} exempts checkpoints from deletion by train.keep, and without it "
                "all are kept; set train.keep, or remove keep_every"
            )
        if self.warmup_steps > self.steps:
            raise ConfigError(
                f"--train.warmup {self.warmup} is longer than the run of {self.steps} steps; lower it, or remove it"
            )
        if not math.log2(self.loss_scale).is_integer():
            nearest = 2 ** round(math.log2(self.loss_scale))
            raise ConfigError(
                f"train.loss_scale {self.loss_scale} is not a power of two, so it would be rounded; use {nearest}"
            )
        if self.float8 != "none" and self.dtype not in ("auto", "bfloat16"):
            raise ConfigError(f"train.float8 {self.float8} needs bfloat16, not {self.dtype}; set train.dtype bfloat16")
        if (self.recompute == "budget") != (self.activation_bytes > 0):
            raise ConfigError(
                f"train.recompute is {self.recompute} and train.activation_bytes {self.activation_bytes}: a budget "
                "needs bytes, and bytes need recompute budget; set both or neither"
            )
        if self.fused_adamw and self.offload != "none":
            raise ConfigError(
                f"train.fused_adamw needs all moments on the GPU, and train.offload {self.offload} keeps them in host "
                "memory; set one of them"
            )
        return self

    def resolved(self, device: str, *, compiles: bool = True) -> "TrainConfig":
        """A copy with unset ``dtype``, ``compile`` and ``fused_adamw`` resolved for "cuda" or "cpu".

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
        """``dtype`` of a resolved config."""
        assert self.dtype != "auto", "the config must be resolved"
        return self.dtype

    @property
    def final_lr(self) -> float:
        """Learning rate at the end of the decay."""
        return self.lr / 10 if self.min_lr is None else self.min_lr

    @property
    def warmup_steps(self) -> int:
        """Steps of linear learning-rate warm-up."""
        return min(100, self.steps // 10) if self.warmup is None else self.warmup


class RunConfig(Config):
    """All settings of one training run; saved in every checkpoint."""

    DERIVED_FIELDS = (DerivedField("data.sequence", ("model.context",), _sequence),)

    name: str = Field(default="run", min_length=1)
    """Name of the run's folder within runs."""
    runs: Path = Path("runs")
    """Folder of all runs; checkpoints are written to runs/NAME/step-N."""
    device: Device = "auto"
    """auto: CUDA if there is a GPU for each local rank, otherwise the CPU."""
    model: ModelConfig
    """The transformer."""
    plan: Plan = Plan()
    """The parallel layout."""
    data: DataConfig = DataConfig()
    """The corpus."""
    train: TrainConfig = TrainConfig()
    """The optimisation."""
    distill: DistillConfig = DistillConfig()
    """The teacher to imitate, if any."""

    @model_validator(mode="before")
    @classmethod
    def _limit_sequence(cls, values: object) -> object:
        """Limit the default data.sequence to the model's context."""
        if isinstance(values, dict):
            values = dict(cast("dict[str, Any]", values))
            model, data = values.get("model"), values.get("data", DataConfig())
            is_default = isinstance(data, DataConfig) and "sequence" not in data.model_fields_set
            if isinstance(model, ModelConfig) and is_default and model.context < data.sequence:
                values["data"] = data.replace(sequence=model.context)
        return values

    @model_validator(mode="after")
    def _validate(self) -> "RunConfig":
        if Path(self.name).is_absolute() or ".." in Path(self.name).parts:
            raise ConfigError(f"name {self.name!r} is outside the folder of runs; use --runs for another folder")
        ranks = self.plan.data_ranks
        if self.train.batch % ranks:
            raise ConfigError(
                f"train.batch {self.train.batch} is not divisible by {ranks} data ranks; use a multiple, such as "
                f"{-(-self.train.batch // ranks) * ranks}"
            )
        share, micro = self.train.batch // ranks, self.train.micro_batch
        if self.plan.pp > 1 and share % min(micro, share):
            raise ConfigError(
                f"a pipeline needs equal micro-batches: {share} samples per data rank are not divisible by "
                f"train.micro_batch {micro}; change one of them"
            )
        self.plan.check_micro_batches(self.micro_batches)
        if self.train.compile and self.plan.pp > 1 and self.plan.schedule == "zero_bubble":
            raise ConfigError(
                "zero_bubble computes the gradients of the weights separately, and a compiled block computes all at "
                "once; use --plan.schedule interleaved, or remove --train.compile"
            )
        if self.train.expert_dropout and self.model.moe is None:
            raise ConfigError(
                f"train.expert_dropout {self.train.expert_dropout:g} applies to experts, and this model has none; "
                "remove it, or set --train.dropout"
            )
        if self.train.expert_dropout and self.train.float8 != "none":
            raise ConfigError(
                f"train.expert_dropout {self.train.expert_dropout:g} with train.float8 {self.train.float8}: the float8 "
                "kernels of experts do not support dropout; set dropout to 0 or float8 to none"
            )
        _ = self.eval_moe  # raises for overrides that the model does not support
        if self.train.cuda_graph:
            feature_checks.check_cuda_graph(self)
        if self.train.float8 != "none" and self.plan.tp_overlap:
            raise ConfigError(
                f"train.float8 {self.train.float8} scales whole operands, and plan.tp_overlap multiplies them in parts "
                "as they arrive; set train.float8 none or plan.tp_overlap False"
            )
        if self.train.float8 != "none":
            feature_checks.check_float8(self.model, self.plan.tp, self.plan.etp)
        if self.data.sequence > self.model.context:
            raise ConfigError(
                f"data.sequence {self.data.sequence} is longer than the model's context {self.model.context}; "
                f"set --data.sequence {self.model.context} or --model.context {self.data.sequence}"
            )
        return self

    def resolved(self, device: str) -> "RunConfig":
        """A copy with the device-dependent settings in ``train`` resolved for "cuda" or "cpu"."""
        zero_bubble = self.plan.pp > 1 and self.plan.schedule == "zero_bubble"
        compiles = self.model.moe is None and not zero_bubble
        return self.replace(train=self.train.resolved(device, compiles=compiles))

    @property
    def eval_moe(self) -> MoeConfig | None:
        """The mixture of experts in validations, if it differs from that in training."""
        overrides = ExpertsConfig(active=self.train.eval_active, capacity=self.train.eval_capacity)
        if overrides == AS_TRAINED:
            return None
        try:
            return overrides.apply_to(self.model).moe
        except ConfigError as error:
            raise ConfigError(str(error).replace("--experts.", "--train.eval_")) from None

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a rank per step."""
        return -(-(self.train.batch // self.plan.data_ranks) // self.train.micro_batch)

    @property
    def folder(self) -> Path:
        """runs/NAME."""
        return self.runs / self.name

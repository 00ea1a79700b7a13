"""The parallel layout: the size of each mesh axis, checked before any process starts.

    world = pp · replicate · dp · cp · tp

Ranks are numbered in this order, ``tp`` innermost: tensor-parallel ranks exchange activations in every block, so they
are placed on the fastest links; then come context and data parallelism, replicas, and outermost the pipeline, which
communicates least.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from colonnade.config.base import Config, plural
from colonnade.config.model import ModelConfig, divisors
from colonnade.config.moe import MAX_EXPERTS
from colonnade.errors import PlanError

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
MAX_RANKS = 1 << 20
MULTI_STAGE_SCHEDULES = ("interleaved", "zero_bubble")
"""Schedules that allow several pipeline stages per rank."""


class Plan(Config):
    """How one model is distributed over processes."""

    tp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Tensor parallelism: ranks over which heads, hidden width and vocabulary are sharded (Megatron-LM)."""
    sequence_parallel: bool = False
    """Sequence parallelism: between the tensor-parallel layers each tp rank has only its share of the tokens
    (Korthikanti 2022)."""
    tp_overlap: bool = False
    """Overlap tensor-parallel communication with the matrix products: a product starts with the rows of this rank while
    copy engines fetch the others, and partial sums are sent while the rest is computed. Needs sequence_parallel and
    GPUs of one machine (a CPU runs the steps one after the other). Fast only as a CUDA graph: set train.cuda_graph
    too."""
    cp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Context parallelism: ranks over which each sequence is sharded; keys and values are passed around a ring (ring
    attention, Liu 2023)."""
    pp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Pipeline parallelism: ranks over which the layers are distributed."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule: gpipe (Huang 2019), 1f1b (Narayanan 2019), interleaved (Narayanan 2021),
    zero_bubble (Qi 2023)."""
    stages: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Pipeline stages per rank (virtual stages); more than one needs interleaved or zero_bubble."""
    layers: tuple[Annotated[int, Field(ge=1, le=1 << 20)], ...] = ()
    """Blocks of each pipeline stage, in order; empty: as even as possible, with fewer in the first and last stage,
    which also have the embedding and the loss."""
    dp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Data parallelism: ranks that read different samples and over which the weights are sharded (FSDP)."""
    replicate: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Replicas of the data-parallel group, each with its own samples (hybrid sharding, HSDP)."""
    reshard: bool = True
    """Free gathered weights (FSDP) after the forward pass and gather them again for the backward pass; False keeps
    them, which is faster and takes more memory. A pipeline always keeps them until the end of the step."""

    ep: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Expert parallelism: ranks of a pipeline stage over which each layer's experts are distributed; they overlap with
    the other axes of the stage."""
    etp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Expert sharding: ranks over which each expert's hidden units are sharded."""
    adaptive_r: Annotated[int, Field(ge=0, le=MAX_RANKS)] | Literal["auto"] = 1
    """r of Tutel's adaptive expert parallelism. 0: gather all experts' weights on every rank. A divisor of etp: send
    each token to r ranks of its expert. auto: choose degree and overlap per layer, by measured bandwidth and the load.
    The weights' placement is the same for all values."""
    overlap: int = Field(default=1, ge=1, le=1 << 10)
    """p: parts into which the expert all-to-all is split; each is sent while the experts compute the previous one."""

    shadows: int = Field(default=0, ge=0, le=MAX_EXPERTS)
    """Shadow experts: gather the weights of this many of the busiest experts on every rank at each step, so that their
    tokens are not sent (FasterMoE)."""
    hierarchical_a2a_size: int = Field(default=0, ge=0, le=MAX_RANKS)
    """Hierarchical all-to-all: exchange tokens first among this many neighbouring ranks (those of a machine), then
    between machines (Tutel's 2DH); 0: one all-to-all."""

    @model_validator(mode="after")
    def _validate(self) -> "Plan":
        if self.world > MAX_RANKS:
            raise PlanError(f"the plan needs {self.world:,} processes, more than {MAX_RANKS:,}; lower its axes")
        if self.tp_overlap and not self.sequence_parallel:
            raise PlanError(
                "tp_overlap needs the tokens sharded over tensor-parallel ranks; set --plan.sequence_parallel too, or "
                "remove tp_overlap"
            )
        if self.hierarchical_a2a_size and (self.ep * self.etp) % self.hierarchical_a2a_size:
            raise PlanError(
                f"hierarchical_a2a_size={self.hierarchical_a2a_size} does not divide the {self.ep * self.etp} "
                f"ranks that exchange tokens (ep · etp); "
                f"use one of {divisors(self.ep * self.etp)}"
            )
        if self.stage_ranks % (self.ep * self.etp):
            raise PlanError(
                f"ep={self.ep} times etp={self.etp} does not divide the {self.stage_ranks} ranks of a pipeline stage "
                "(replicate · dp · cp · tp), over which experts are distributed; "
                f"set --plan.dp {self.ep * self.etp}, or ep · etp to one of {divisors(self.stage_ranks)}"
            )
        if self.adaptive_r not in ("auto", 0) and self.etp % self.adaptive_r:
            raise PlanError(
                f"adaptive_r={self.adaptive_r} does not divide the etp={self.etp} ranks of an expert; use 0 or one of "
                f"{divisors(self.etp)}"
            )
        if self.stages > 1 and self.pp == 1:
            raise PlanError(f"{self.stages} stages per rank need a pipeline; set --plan.pp 2 or --plan.stages 1")
        if self.stages > 1 and self.schedule not in MULTI_STAGE_SCHEDULES:
            raise PlanError(
                f"{self.schedule} has one stage per rank, not {self.stages}; use --plan.schedule interleaved"
            )
        if self.layers and (len(self.layers) != self.total_stages or min(self.layers) < 1):
            raise PlanError(
                f"layers {self.layers} must assign one or more blocks to each of the {self.total_stages} stages "
                f"(pp={self.pp}, {self.stages} per rank)"
            )
        return self

    @property
    def _expert_setting(self) -> str:
        """``"overlap 2"``: the first setting of expert parallelism that is not its default, or ""."""
        for name in ("adaptive_r", "overlap", "shadows", "hierarchical_a2a_size"):
            if (value := getattr(self, name)) != Plan.model_fields[name].default:
                return f"{name} {value}"
        return ""

    @property
    def world(self) -> int:
        """World size: the number of processes."""
        return self.pp * self.replicate * self.dp * self.cp * self.tp

    @property
    def stage_ranks(self) -> int:
        """Ranks of a pipeline stage."""
        return self.replicate * self.dp * self.cp * self.tp

    @property
    def expert_replicas(self) -> int:
        """Ranks of a stage that have the same shards of the same experts."""
        return self.stage_ranks // (self.ep * self.etp)

    @property
    def total_stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.pp * self.stages

    @property
    def data_ranks(self) -> int:
        """Data-parallel ranks: groups of ranks that read different samples."""
        return self.replicate * self.dp

    def stage_layers(self, layers: int) -> list[range]:
        """The blocks of each pipeline stage, in order; stage s is on pipeline rank s mod pp."""
        count = self.total_stages
        sizes = list(self.layers)
        if not sizes:
            # The first and last stage also have the embedding and the loss, so the middle stages take the remainder.
            extra = sorted(range(count), key=lambda s: (s in (0, count - 1), s))[: layers % count]
            sizes = [layers // count + (s in extra) for s in range(count)]
        ends = [sum(sizes[: s + 1]) for s in range(count)]
        return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def check(self, model: ModelConfig) -> None:
        """Raise :class:`PlanError` if ``model`` cannot be distributed this way; the message names what would work."""
        if model.kv_heads % self.tp:
            fits = [str(d) for d in divisors(model.kv_heads)]
            choice = fits[0] if len(fits) == 1 else f"{', '.join(fits[:-1])} or {fits[-1]}"
            raise PlanError(f"{model.kv_heads} key/value heads cannot be divided over tp={self.tp}; use tp of {choice}")
        for what, size in (("vocabulary rows", model.vocab_size), ("hidden units", model.ffn_width)):
            if -(-size // self.tp) * (self.tp - 1) >= size:
                raise PlanError(
                    f"{size} {what} leave the last of {self.tp} tensor-parallel ranks empty; use a lower tp"
                )
        if model.encoder is not None or model.relative_positions is not None:
            what = "an encoder" if model.encoder is not None else "relative positions"
            for name, chosen in (("cp", self.cp > 1), ("pp", self.pp > 1), ("tp_overlap", self.tp_overlap)):
                if chosen:
                    raise PlanError(
                        f"{name} has not been verified for a model with {what}; use tp, sequence_parallel, dp and "
                        "replicate"
                    )
        if model.moe is None and self.ep * self.etp > 1:
            raise PlanError(f"ep={self.ep} and etp={self.etp} distribute experts, and this model has none; omit both")
        if model.moe is None and (setting := self._expert_setting):
            raise PlanError(f"plan.{setting} applies to experts, and this model has none; remove it")
        if model.moe is not None:
            for what, size, ranks in (
                ("experts", model.moe.stored_experts, self.ep),
                ("hidden units of an expert", model.moe.ffn_width, self.etp)
            ):  # fmt: skip
                if size % ranks:
                    name = "ep" if what == "experts" else "etp"
                    raise PlanError(
                        f"{size} {what} cannot be divided over {name}={ranks}; use {name} of {divisors(size)}"
                    )
            if self.shadows >= model.moe.stored_experts:
                raise PlanError(
                    f"{self.shadows} shadows of {model.moe.stored_experts} experts means all of them; use "
                    "--plan.adaptive_r 0"
                )
        if model.layers < self.total_stages:
            raise PlanError(
                f"{model.layers} layers do not fill {self.total_stages} pipeline stages; use a lower pp or stages"
            )
        if self.layers and sum(self.layers) != model.layers:
            raise PlanError(f"layers {self.layers} are {sum(self.layers)} blocks, and the model has {model.layers}")

    def check_micro_batches(self, count: int) -> None:
        """Raise :class:`PlanError` if the pipeline schedule cannot run ``count`` micro-batches per step."""
        if self.pp == 1:
            return
        if self.schedule == "1f1b" and count < self.pp:
            raise PlanError(
                f"1f1b over pp={self.pp} needs at least {self.pp} micro-batches per step and has {count}; raise "
                "train.batch, lower train.micro_batch, or use --plan.schedule gpipe"
            )
        if self.schedule in MULTI_STAGE_SCHEDULES and count % max(1, count // self.pp):
            raise PlanError(
                f"{self.schedule} over pp={self.pp} needs a multiple of {self.pp} micro-batches per step and has "
                f"{count}; change train.batch or train.micro_batch"
            )

    def check_world(self, world: int) -> None:
        """Raise :class:`PlanError` unless the plan needs exactly ``world`` processes."""
        if world != self.world:
            others = self.world // self.dp
            remedy = "" if world % others else f", or set --plan.dp {world // others} (for training)"
            processes = plural(self.world, "process")
            raise PlanError(f"the plan ({self}) needs {processes} but {world} were started; start {self.world}{remedy}")

    def __str__(self) -> str:
        """``tp=2 sequence_parallel dp=2``: the settings that differ from one process."""
        words = [
            f"{name}={size}" for name in ("pp", "replicate", "dp", "cp", "tp") if (size := getattr(self, name)) > 1
        ]
        if self.tp > 1:
            words += ["sequence_parallel"] * self.sequence_parallel + ["tp_overlap"] * self.tp_overlap
        if self.pp > 1:
            words += [self.schedule] + ([f"stages={self.stages}"] if self.stages > 1 else [])
        words += ["no_reshard"] if not self.reshard and self.dp * self.cp * self.replicate > 1 else []
        words += [f"{name}={size}" for name in ("ep", "etp", "overlap") if (size := getattr(self, name)) > 1]
        words += [f"{name}={size}" for name in ("hierarchical_a2a_size", "shadows") if (size := getattr(self, name))]
        words += [f"adaptive_r={self.adaptive_r}"] if self.adaptive_r != 1 else []
        return " ".join(words) or "one process"

    def table(self, model: ModelConfig) -> list[tuple[str, str, str]]:
        """Human-readable rows (axis, ranks, what each rank has)."""

        def share(size: int) -> str:
            return f"{'up to ' if size % self.tp else ''}{-(-size // self.tp)} of {size}"

        blocks = [len(layers) for layers in self.stage_layers(model.layers)]
        rows = [
            ("tp", self.tp, f"{model.heads // self.tp} of {model.heads} query heads, "
             f"{model.kv_heads // self.tp} of {model.kv_heads} key/value heads, "
             f"{share(model.ffn_width)} hidden units, {share(model.vocab_size)} vocabulary rows"
             + (f"; between these layers 1/{self.tp} of the tokens" if self.sequence_parallel else "")
             + (", exchanged during the products" if self.tp_overlap else "")),
            ("cp", self.cp, f"1/{self.cp} of each sequence, as a chunk from its front and one from its back"),
            ("dp", self.dp, f"1/{self.dp * self.cp} of each parameter and 1/{self.data_ranks} of every batch"),
            ("replicate", self.replicate, "a copy of the data-parallel group's shards"),
            ("pp", self.pp, f"{plural(self.stages, 'stage')} of {blocks} blocks, {self.schedule}"),
            *self._expert_rows(model),
            ("world", self.world, f"{self._parameters_per_rank(model) / 1e6:.2f} M of "
             f"{model.parameters / 1e6:.2f} M parameters"),
        ]  # fmt: skip
        listed = [row for row in rows if row[1] > 1 or row[0] in ("tp", "dp", "world")]
        return [(name, str(size), what) for name, size, what in listed]

    def _expert_rows(self, model: ModelConfig) -> list[tuple[str, int, str]]:
        moe = model.moe
        if moe is None:
            return []
        how = {0: "weights are gathered", "auto": "tokens are sent or weights gathered, whichever is faster"}.get(
            self.adaptive_r, f"each token is sent to {self.adaptive_r} of the ranks of its expert"
        )
        return [
            (
                "ep",
                self.ep,
                f"{moe.stored_experts // self.ep} of {moe.stored_experts} experts in each layer that has some; {how}",
            ),
            ("etp", self.etp, f"{moe.ffn_width // self.etp} of {moe.ffn_width} hidden units of each expert"),
        ]

    def _parameters_per_rank(self, model: ModelConfig) -> float:
        """Parameters that a rank stores, on average."""
        experts = model.expert_parameters
        return (model.parameters - experts) / self.world * self.replicate + experts / (self.pp * self.ep * self.etp)

"""A parallel layout as data: how many ranks share what, checked before any process starts.

    world = pp · replicate · dp · cp · tp

Ranks are numbered in this order, ``tp`` innermost: tensor-parallel peers exchange activations in every block, so they
are neighbours on the fastest links; then context, data, its replicas, and outermost the pipeline, which sends least.
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
"""Schedules in which a rank may have several stages."""


class Plan(Config):
    """How one model is laid over processes."""

    tp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Tensor parallel: ranks that share each layer's heads, hidden width and vocabulary (Megatron-LM)."""
    sequence_parallel: bool = False
    """Between the tensor-parallel parts each tp rank keeps its share of the tokens only (Korthikanti 2022)."""
    tp_overlap: bool = False
    """Products begin with the rows that are on this rank while copy engines bring the others', and sums are sent off
    while the rest is multiplied; needs sequence_parallel, and GPUs of one machine (a CPU does it one after the other).
    Fast only as a recorded graph: set train.cuda_graph too."""
    cp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Context parallel: ranks that share each sequence's tokens; keys travel round a ring (Liu 2023)."""
    pp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Pipeline parallel: ranks that hold the layers one after another."""
    schedule: Schedule = "1f1b"
    """Order of a pipeline's micro-batches: gpipe (Huang 2019), 1f1b (Narayanan 2019), interleaved (Narayanan 2021),
    zero_bubble (Qi 2023)."""
    stages: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Pipeline stages on each rank; more than one needs interleaved or zero_bubble."""
    layers: tuple[Annotated[int, Field(ge=1, le=1 << 20)], ...] = ()
    """Blocks of each pipeline stage in order; empty: as even as possible, the first and the last stage lightest."""
    dp: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Data parallel: ranks that hold shards of the weights (FSDP) and read different samples."""
    replicate: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Copies of the whole data-parallel group, each with samples of its own (hybrid sharding)."""
    reshard: bool = True
    """FSDP gives gathered weights back after the forward pass and gathers them again; False keeps them: faster, larger.
    A pipeline always keeps them until its step is over."""

    ep: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Expert parallel: ranks of a pipeline stage that share a layer's experts among them, whatever else they share."""
    sh: int = Field(default=1, ge=1, le=MAX_RANKS)
    """Ranks that share each expert's hidden units."""
    degree: Annotated[int, Field(ge=0, le=MAX_RANKS)] | Literal["auto"] = 1
    """r: 0: all experts' weights are gathered on every rank. r of the divisors of sh: tokens travel, each to r ranks of
    its expert (Tutel). auto: whichever is faster, layer by layer, by measured links and the load (overlap too). What is
    stored where is the same for all."""
    overlap: int = Field(default=1, ge=1, le=1 << 10)
    """p: parts in which tokens travel to the experts, each while the experts compute the one before."""

    shadows: int = Field(default=0, ge=0, le=MAX_EXPERTS)
    """So many experts, those of the highest load at each step, are gathered on every rank, and their tokens stay where
    they are (FasterMoE's shadowing)."""
    near: int = Field(default=0, ge=0, le=MAX_RANKS)
    """Tokens travel in two steps: among so many neighbouring ranks (those of a machine), then across (Tutel's 2DH); 0:
    in one."""

    @model_validator(mode="after")
    def _consistent(self) -> "Plan":
        if self.world > MAX_RANKS:
            raise PlanError(f"the plan needs {self.world:,} processes, more than {MAX_RANKS:,}; lower its axes")
        if self.tp_overlap and not self.sequence_parallel:
            raise PlanError(
                "tp_overlap moves the rows of which each tensor-parallel rank keeps its share; "
                "set --plan.sequence_parallel too, or leave tp_overlap out"
            )
        if self.near and (self.ep * self.sh) % self.near:
            raise PlanError(
                f"near={self.near} does not divide the {self.ep * self.sh} ranks among which tokens travel (ep · sh); "
                f"use one of {divisors(self.ep * self.sh)}"
            )
        if self.stage % (self.ep * self.sh):
            raise PlanError(
                f"ep={self.ep} times sh={self.sh} shares experts out over ranks that are there for other axes too, and "
                f"does not divide the {self.stage} of a pipeline stage (replicate · dp · cp · tp); "
                f"set --plan.dp {self.ep * self.sh}, or ep and sh of which the product is one of {divisors(self.stage)}"
            )
        if self.degree not in ("auto", 0) and self.sh % self.degree:
            raise PlanError(
                f"degree={self.degree} does not divide the sh={self.sh} ranks of an expert; use 0 or one of "
                f"{divisors(self.sh)}"
            )
        if self.stages > 1 and self.pp == 1:
            raise PlanError(f"{self.stages} stages a rank need a pipeline; set --plan.pp 2 or --plan.stages 1")
        if self.stages > 1 and self.schedule not in MULTI_STAGE_SCHEDULES:
            raise PlanError(
                f"{self.schedule} has one stage on each rank, not {self.stages}; use --plan.schedule interleaved"
            )
        if self.layers and (len(self.layers) != self.total_stages or min(self.layers) < 1):
            raise PlanError(
                f"layers {self.layers} do not name one or more blocks for each of the {self.total_stages} stages "
                f"(pp={self.pp}, {self.stages} on each rank)"
            )
        return self

    @property
    def _asks_experts(self) -> str:
        """``"overlap 2"``: the first setting of how experts work that is not as it is by itself."""
        fields = {name: Plan.model_fields[name].default for name in ("degree", "overlap", "shadows", "near")}
        return next((f"{name} {at}" for name, default in fields.items() if (at := getattr(self, name)) != default), "")

    @property
    def world(self) -> int:
        """Processes in all."""
        return self.pp * self.replicate * self.dp * self.cp * self.tp

    @property
    def stage(self) -> int:
        """Ranks of a pipeline stage."""
        return self.replicate * self.dp * self.cp * self.tp

    @property
    def copies(self) -> int:
        """Ranks of a stage that hold the same shares of the same experts."""
        return self.stage // (self.ep * self.sh)

    @property
    def total_stages(self) -> int:
        """Pipeline stages on all ranks together."""
        return self.pp * self.stages

    @property
    def data_ranks(self) -> int:
        """Groups of ranks that read different samples."""
        return self.replicate * self.dp

    def spans(self, layers: int) -> list[range]:
        """The blocks of each pipeline stage, in order; stage s stands on pipeline rank s mod pp."""
        count = self.total_stages
        sizes = list(self.layers)
        if not sizes:
            # The embedding and the loss are work too, so that what does not divide goes to the stages between them.
            extra = sorted(range(count), key=lambda s: (s in (0, count - 1), s))[: layers % count]
            sizes = [layers // count + (s in extra) for s in range(count)]
        ends = [sum(sizes[: s + 1]) for s in range(count)]
        return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def check(self, model: ModelConfig) -> None:
        """Raise :class:`PlanError` when ``model`` cannot be laid out so; say what would do."""
        if model.kv_heads % self.tp:
            fits = [str(d) for d in divisors(model.kv_heads)]
            choice = fits[0] if len(fits) == 1 else f"{', '.join(fits[:-1])} or {fits[-1]}"
            raise PlanError(f"{model.kv_heads} key/value heads do not divide over tp={self.tp}; use tp of {choice}")
        for what, size in (("vocabulary rows", model.vocab_size), ("hidden units", model.ffn_width)):
            if -(-size // self.tp) * (self.tp - 1) >= size:
                raise PlanError(
                    f"{size} {what} leave the last of {self.tp} tensor-parallel ranks empty; use a lower tp"
                )
        if model.moe is None and self.ep * self.sh > 1:
            raise PlanError(
                f"ep={self.ep} and sh={self.sh} share out experts, and this model has none; leave them at 1"
            )
        if model.moe is None and (asked := self._asks_experts):
            raise PlanError(f"plan.{asked} is about experts, and this model has none; leave it out")
        if model.moe is not None:
            for what, size, ranks in (
                ("experts", model.moe.experts, self.ep), ("hidden units of an expert", model.moe.ffn_width, self.sh)
            ):  # fmt: skip
                if size % ranks:
                    name = "ep" if what == "experts" else "sh"
                    raise PlanError(f"{size} {what} do not divide over {name}={ranks}; use {name} of {divisors(size)}")
            if self.shadows >= model.moe.experts:
                raise PlanError(f"{self.shadows} shadows of {model.moe.experts} experts are all; use --plan.degree 0")
        if model.layers < self.total_stages:
            raise PlanError(
                f"{model.layers} layers do not fill {self.total_stages} pipeline stages; use a lower pp or stages"
            )
        if self.layers and sum(self.layers) != model.layers:
            raise PlanError(f"layers {self.layers} are {sum(self.layers)} blocks, and the model has {model.layers}")

    def check_micro_batches(self, count: int) -> None:
        """Raise :class:`PlanError` when a pipeline cannot be fed with ``count`` micro-batches a step."""
        if self.pp == 1:
            return
        if self.schedule == "1f1b" and count < self.pp:
            raise PlanError(
                f"1f1b over pp={self.pp} needs at least {self.pp} micro-batches a step and has {count}; raise "
                "train.batch, lower train.micro_batch, or use --plan.schedule gpipe"
            )
        if self.schedule in MULTI_STAGE_SCHEDULES and count % max(1, count // self.pp):
            raise PlanError(
                f"{self.schedule} over pp={self.pp} needs a multiple of {self.pp} micro-batches a step and has {count};"
                " change train.batch or train.micro_batch"
            )

    def check_world(self, world: int) -> None:
        """Raise :class:`PlanError` unless exactly ``world`` processes run."""
        if world != self.world:
            others = self.world // self.dp
            fits = "" if world % others else f", or set --plan.dp {world // others} (if it trains)"
            needs = plural(self.world, "process")
            raise PlanError(f"the plan ({self}) needs {needs} but {world} were started; start {self.world}{fits}")

    def __str__(self) -> str:
        """``tp=2 sp cp=2 dp=2``: what differs from one process."""
        words = [
            f"{name}={size}" for name in ("pp", "replicate", "dp", "cp", "tp") if (size := getattr(self, name)) > 1
        ]
        if self.tp > 1:
            words += ["sequence_parallel"] * self.sequence_parallel + ["tp_overlap"] * self.tp_overlap
        if self.pp > 1:
            words += [self.schedule] + ([f"stages={self.stages}"] if self.stages > 1 else [])
        words += ["no_reshard"] if not self.reshard and self.dp * self.cp * self.replicate > 1 else []
        words += [f"{name}={size}" for name in ("ep", "sh", "overlap") if (size := getattr(self, name)) > 1]
        words += [f"{name}={size}" for name in ("near", "shadows") if (size := getattr(self, name))]
        words += [f"degree={self.degree}"] if self.degree != 1 else []
        return " ".join(words) or "one process"

    def table(self, model: ModelConfig) -> list[tuple[str, str, str]]:
        """Rows (axis, ranks, what each rank holds) for people to read."""

        def share(size: int) -> str:
            return f"{'up to ' if size % self.tp else ''}{-(-size // self.tp)} of {size}"

        rows = [
            ("tp", self.tp, f"{model.heads // self.tp} of {model.heads} query heads, "
             f"{model.kv_heads // self.tp} of {model.kv_heads} key/value heads, "
             f"{share(model.ffn_width)} hidden units, {share(model.vocab_size)} vocabulary rows"
             + (f"; between them 1/{self.tp} of the tokens" if self.sequence_parallel else "")
             + (", which travel beside products" if self.tp_overlap else "")),
            ("cp", self.cp, f"1/{self.cp} of each sequence, as a chunk from its front and one from its back"),
            ("dp", self.dp, f"1/{self.dp * self.cp} of each parameter and 1/{self.data_ranks} of every batch"),
            ("replicate", self.replicate, "a copy of the data-parallel group's shards"),
            ("pp", self.pp, f"{plural(self.stages, 'stage')} of {[len(s) for s in self.spans(model.layers)]} blocks, "
             f"{self.schedule}"),
            *self._expert_rows(model),
            ("world", self.world, f"{self._held(model) / 1e6:.2f} M of "
             f"{model.parameters / 1e6:.2f} M parameters"),
        ]  # fmt: skip
        shown = [row for row in rows if row[1] > 1 or row[0] in ("tp", "dp", "world")]
        return [(name, str(size), what) for name, size, what in shown]

    def _expert_rows(self, model: ModelConfig) -> list[tuple[str, int, str]]:
        moe = model.moe
        if moe is None:
            return []
        how = {0: "weights travel", "auto": "tokens or weights travel, whichever is faster"}.get(
            self.degree, f"each token travels to {self.degree} of the ranks of its expert"
        )
        return [
            ("ep", self.ep, f"{moe.experts // self.ep} of {moe.experts} experts in each layer that has some; {how}"),
            ("sh", self.sh, f"{moe.ffn_width // self.sh} of {moe.ffn_width} hidden units of each expert"),
        ]

    def _held(self, model: ModelConfig) -> float:
        """Parameters that a rank stores, on the average."""
        experts = model.expert_parameters
        return (model.parameters - experts) / self.world * self.replicate + experts / (self.pp * self.ep * self.sh)

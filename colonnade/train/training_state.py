"""State of a training run on one rank: model, masters, optimizer, data position and step count.

Exact resume: weights, both moments, the step, the data cursor and float16's loss scale are the whole state. The
learning-rate schedule is a function of Adam's step count, and the order of the data a function of the cursor. So a run
that was stopped and resumed under the same plan is bitwise equal to an uninterrupted one; under another plan it is
equal up to rounding.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor
from torch.profiler import record_function

from colonnade.checkpoint import atomic_folder as folders
from colonnade.checkpoint import native
from colonnade.checkpoint.async_save import AsyncSave
from colonnade.checkpoint.atomic_folder import Manifest, prune
from colonnade.checkpoint.file_lock import FileLock
from colonnade.config import ModelConfig, RunConfig, TrainConfig, differences
from colonnade.data import Batch
from colonnade.errors import CheckpointError, ConfigError
from colonnade.model import Transformer
from colonnade.model.moe import DispatchOptions
from colonnade.model.tensor_parallel_linear import enable_float8
from colonnade.parallel.axis import Axis, world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters, masters
from colonnade.parallel.launch import slurm_job
from colonnade.parallel.rendezvous import broadcast_text, check_same_settings
from colonnade.parallel.watchdog import Watchdog
from colonnade.train.activation_memory import configure_recompute
from colonnade.train.cuda_graph import check_device
from colonnade.train.data_feed import CorpusFeed, MakeFeed, VaryingFeed, check_data_unchanged
from colonnade.train.distill import load_distiller
from colonnade.train.initial_weights import freeze, initialise_masters, load_quantised_base
from colonnade.train.loss_scaler import LossScaler
from colonnade.train.memory_advice import check_rank_memory
from colonnade.train.moe_autotune import CHECK_INTERVAL, MoeAutotuner, has_moe_layers
from colonnade.train.optimizer import AdamW, FusedAdamW, OffloadedAdamW
from colonnade.train.out_of_memory import explain_checkpoint_copy_oom, explain_oom, explain_setup_oom, peak_bytes
from colonnade.train.prepared_feed import PreparedFeed
from colonnade.train.profiler import READ_SAMPLES
from colonnade.train.rollout_feed import RolloutFeed
from colonnade.train.train_step import PipelineStep, StepMetrics, TrainStep, evaluate


class TrainingState:
    """A new run, or one resumed from its newest complete checkpoint."""

    def __init__(
        self,
        run: RunConfig,
        context: DistributedContext,
        watchdog: Watchdog | None = None,
        lock: "RunLock | None" = None,
        feed: MakeFeed = CorpusFeed,
        announce: Callable[[str], object] = lambda _line: None,
    ):
        """``watchdog`` records this rank's progress for the other ranks; ``lock`` is checked before each save; ``feed``
        opens the data; ``announce`` shows what is loaded. Raises :class:`PlanError` where ranks have different data.
        """
        if run.train.cuda_graph:
            check_device(context.device)
        run = VaryingFeed.with_compile_default(run, feed).resolved(context.device.type)
        self.run, self.context, self.world = run, context, world_axis()
        self.watchdog = watchdog or Watchdog(run.train.timeout_s)
        self._compiled, self._lock = False, lock
        self.feed = feed(run, context.axes.dp.rank, context.axes.dp.size)
        if run.distill.on_policy and not isinstance(self.feed, RolloutFeed):
            raise ConfigError("distill.on_policy samples text in each step; pass feed=colonnade.tune.OnPolicyFeed")
        check_same_settings({name: _short_hash(value) for name, value in self.feed.identity.items()}, self.world)
        master_dtype = torch.float64 if run.train.dtype == "float64" else torch.float32
        compute: torch.dtype = getattr(torch, run.train.compute_dtype)  # torch's own names
        spans = [span for _, span in context.stages(run.model.layers)]
        check_rank_memory(run, context)
        self.checkpoint = newest_checkpoint(run.folder, self.world)
        """The newest complete checkpoint, if any."""
        if source := self.checkpoint or run.train.pretrained_checkpoint:
            announce(f"loading {source}")
        with explain_setup_oom(run, context.device):
            lora = run.model.lora
            if lora is not None and lora.base != "stored":
                self.model = load_quantised_base(run, context, master_dtype, spans)
            else:
                self.model = self._build(run.model, master_dtype, spans, meta=context.sharded)
            freeze(self.model, run.train.freeze)
            self.recompute_summary = configure_recompute(
                self.model,
                run.train,
                lambda: next(self._on_device(self.feed.samples.at(0))),
                lambda config: self._build(config, compute),
                self.world,
            )
            """The recomputation chosen for train.recompute budget; None otherwise."""
            self.pipeline = PipelineStep(self.model, context, compute) if run.plan.pp > 1 else None
            single = bool(run.train.fused_adamw) and run.micro_batches == 1 and self.pipeline is None
            stages = self.pipeline.stages if self.pipeline else None
            self.masters = masters(self.model, context, compute, stages, single=single, keep_frozen=lora is None)
            prepares = isinstance(self.feed, PreparedFeed) and self.feed.needs_start_weights(self.world)
            # A checkpoint of a model with adapters has only these.
            if self.checkpoint is None or run.model.lora is not None or prepares:
                initialise_masters(self.model, run, context, self.masters)
            if prepares:
                assert isinstance(self.feed, PreparedFeed)
                self.watchdog.mark(0, "computes with the initial weights", patient=True)
                self.feed.prepare(self.model, self.pipeline, self.world, context.device, announce)
            self.optimizer = make_optimizer(self.masters, run.train)
        self.scaler = LossScaler(run.train, context.device) if run.train.dtype == "float16" else None
        degree = run.plan.adaptive_r
        spread = DispatchOptions() if degree == "auto" else DispatchOptions(degree, run.plan.overlap, run.plan.shadows)
        self._moe_autotuner = MoeAutotuner(self.model) if degree == "auto" and has_moe_layers(self.model) else None
        self._step = TrainStep(
            self.model, self.masters, self.optimizer, run.train, self.world, self.pipeline, self.scaler, [spread],
            run.train.cuda_graph, load_distiller(run, context),
        )  # fmt: skip
        self.spread_changes: list[str] = []
        """Changes by the MoE autotuner (plan.adaptive_r auto) that were not shown yet."""
        self.steps_taken = 0
        """Optimizer steps taken."""
        self.samples_seen = 0
        """Samples consumed by all ranks."""
        self._save = AsyncSave(context.device)
        self.skipped = 0
        """Steps skipped because they were not finite, among those whose metrics were read."""
        self.changes: list[str] = []
        """Settings that differ from those of the resumed checkpoint."""
        if self.checkpoint is not None:
            self._resume(self.checkpoint)

    def step(self) -> StepMetrics:
        """Take the next optimizer step."""
        number = self.steps_taken + 1
        self.watchdog.mark(number, READ_SAMPLES)
        start_s = time.perf_counter()
        with record_function(READ_SAMPLES):
            if isinstance(self.feed, RolloutFeed):
                self.watchdog.mark(number, "samples answers", patient=True)
                self.feed.before_step(self.model, self.samples_seen)
            batches = list(self._on_device(self.feed.samples.at(self.samples_seen)))
        data_s = time.perf_counter() - start_s
        self.watchdog.mark(number, "computes", patient=not self._compiled)
        with self._explain_oom(f"in step {number}"):
            metrics = self._step(self.steps_taken, batches)
        peak = max(peak_bytes(self.context.device), self._step.capture_peak_bytes)
        extra = self.feed.step_metrics() if isinstance(self.feed, RolloutFeed) else {}
        metrics = replace(metrics, data_s=data_s, memory_bytes=peak, extra=extra)
        if self._moe_autotuner is not None and metrics.moe is not None and self.steps_taken % CHECK_INTERVAL == 0:
            loads = metrics.moe.load_LE.tolist()
            self.spread_changes += self._moe_autotuner.update(metrics.moe.layers, loads, len(batches))
            self._step.spread = self._moe_autotuner.spread
        self._compiled = True
        self.steps_taken, self.samples_seen = number, self.samples_seen + self.run.train.batch
        return metrics

    def take_messages(self) -> list[str]:
        """The feed's lines for the user about the newest step."""
        return self.feed.messages() if isinstance(self.feed, RolloutFeed) else []

    def samples_of(self, step: int) -> list[int]:
        """The sample numbers of step ``step`` (from 1), taken since the run started or resumed."""
        return self.feed.samples.numbers(self.samples_seen - (self.steps_taken - step + 1) * self.run.train.batch)

    def validate(self) -> Tensor:
        """The mean loss on held-out samples, the same ones every time."""
        assert self.feed.held_out is not None, "validation is switched off"
        self.watchdog.mark(self.steps_taken, "validates", patient=True)
        batches = self._on_device(self.feed.held_out.validation_batches(self.run.train.eval_samples))
        with self._explain_oom(f"in the validation after step {self.steps_taken}"):
            return evaluate(self.model, batches, self.pipeline, self.run.eval_moe)

    def save(self) -> Path | None:
        """Start writing ``runs/NAME/step-N``; :meth:`finish_save` completes it. No other save may be running.

        Without train.async_save the checkpoint is written and returned before the weights can change. Nothing is
        written when the newest checkpoint is of this step. Raises :class:`CheckpointError` when another run has taken
        over the folder.
        """
        self.watchdog.mark(self.steps_taken, "saves", patient=True)
        folder, t = self.run.folder / f"step-{self.steps_taken}", self.run.train
        if folder == self.checkpoint:
            return None
        if self._lock is not None:
            self._lock.check()
        with explain_checkpoint_copy_oom(folder.name):
            write = self._writer(folder)
        self._save.start(folder, write)
        return None if t.async_save else self.finish_save(wait=True)

    def _writer(self, folder: Path) -> Callable[[], None]:
        t = self.run.train
        return native.prepare_save(
            folder,
            self.model,
            native.Meta(
                model=self.run.model,
                run=self.run,
                step=self.steps_taken,
                loss_scale=None if self.scaler is None else self.scaler.state,
                cursor=self._cursor(),
                tasks=self._tasks,
            ),
            self.context,
            masters=self.masters,
            optimizer=self.optimizer,
            tokenizer=self.feed.tokenizer,
            stage=self._save.stage if t.async_save else dict,
            group=self._save.group,
            on_commit=lambda: prune(self.run.folder, t.keep, t.keep_every),
        )

    def finish_save(self, *, wait: bool = False) -> Path | None:
        """The checkpoint being written, once all ranks have written it; None if that needs a ``wait``.

        Raises the error of the save on every rank after the same step.
        """
        if not self._save.running:
            return None
        # When one rank has finished, the others are about to: torch's last collective of a save is behind it.
        if not wait and not int(self.world.max_(torch.tensor(int(self._save.finished)))):
            return None
        if wait:
            self.watchdog.mark(self.steps_taken, "waits for a checkpoint", patient=True)
        self.checkpoint = self._save.wait()
        return self.checkpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Finish a checkpoint that is being written, also after an error."""
        if isinstance(self.feed, RolloutFeed):
            self.feed.close()
        if not self._save.running:
            return
        self.watchdog.mark(self.steps_taken, "ends", patient=True)
        try:
            self.checkpoint = self._save.wait()
        except BaseException as failure:
            if error is None:
                raise
            error.add_note(f"and writing the checkpoint failed: {failure}")

    def _explain_oom(self, when: str) -> AbstractContextManager[None]:
        return explain_oom(self.run, self.model, self.masters, self.optimizer, self.context.device, when)

    def _build(
        self, config: ModelConfig, dtype: torch.dtype, spans: Sequence[range] | None = None, *, meta: bool = False
    ) -> Transformer:
        """An uninitialised model with this run's precision and compilation; only the blocks of ``spans`` if given."""
        device = "meta" if meta else self.context.device
        model = Transformer(config, self.context.axes, spans=spans, device=device, dtype=dtype)
        for stack in (model.blocks, model.encoder_blocks):
            if self.run.train.float8 != "none":
                enable_float8(stack, self.run.train.float8, self.context.device)
            if self.run.train.compile:
                for block in stack:
                    block.compile()
        return model

    def _on_device(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        return (batch.to(self.context.device) for batch in batches)

    def _resume(self, folder: Path) -> None:
        meta = native.load(folder, self.model, self.context, masters=self.masters, optimizer=self.optimizer)
        cursor = meta.cursor
        if meta.run is None or "seen" not in cursor:
            raise CheckpointError(f"{folder} was not written by a training run; use another name for this run")
        if any(type(count := cursor.get(key, 0)) is not int or count < 0 for key in ("seen", "skipped")):
            raise CheckpointError(f"{folder} has the data cursor {cursor}; use another checkpoint")
        data_changes = check_data_unchanged(self.feed, self.run.data, cursor, str(folder))
        self.steps_taken, self.samples_seen = meta.step, 0 if data_changes else cursor["seen"]
        self.skipped = cursor.get("skipped", 0)
        if self.scaler is not None:
            overflowed = meta.step - self.optimizer.steps - self.skipped
            self.scaler.restore(meta.loss_scale or self.scaler.state, overflowed)
        self.changes = [*differences(meta.run, self.run), *(f"{what}: the data is restarted" for what in data_changes)]
        if not data_changes and any(cursor.get(name) != value for name, value in self.feed.identity.items()):
            self.changes.append("different documents are held out: validation losses are not comparable")

    @property
    def _tasks(self) -> tuple[str, ...]:
        """The corpus's names of the tasks by which the task router chooses experts."""
        moe, corpus = self.run.model.moe, self.feed.corpus
        return corpus.manifest.tasks or () if corpus and moe and moe.router.kind == "task" else ()

    def _cursor(self) -> dict[str, Any]:
        """The data cursor: the number of samples consumed, and all settings that determine their order."""
        data = self.run.data
        counts = {"seen": self.samples_seen, "skipped": self.skipped}
        return counts | self.feed.identity | {"sequence": data.sequence, "seed": data.seed}


class RunLock:
    """Context manager: rank 0 locks the folder of a run on behalf of all ranks.

    Entering raises :class:`CheckpointError` on all ranks when another run has locked the folder.
    """

    def __init__(self, folder: Path, world: Axis):
        self._lock, self._world = FileLock(folder, slurm_job()), world

    def __enter__(self) -> Self:
        self._on_rank_0(self._lock.acquire)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._lock.release()

    def check(self) -> None:
        """Raise :class:`CheckpointError` on all ranks when another run has taken over the folder."""
        self._on_rank_0(self._lock.check)

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        """Run ``action`` on rank 0 and raise its error on all ranks."""
        failure = ""
        if self._world.rank == 0:
            try:
                action()
            except CheckpointError as error:
                failure = str(error)
        if failure := broadcast_text(failure, self._world):
            raise CheckpointError(failure)


def _short_hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def make_optimizer(masters: Masters, train: TrainConfig) -> AdamW:
    """The optimizer for ``train``'s settings; plain AdamW on a rank that trains nothing."""
    if not masters.local:
        return AdamW(masters.local, train)
    if train.fused_adamw:
        return FusedAdamW(masters, train)
    return (AdamW if train.offload == "none" else OffloadedAdamW)(masters.local, train)


def newest_checkpoint(run: Path, world: Axis) -> Path | None:
    """The newest checkpoint of a run as rank 0 sees it, so that all ranks resume from the same one.

    Removes the remains of an interrupted save. Raises :class:`CheckpointError` when a newer checkpoint has lost files:
    skipping it would only fail later, when its step comes again.
    """
    if world.rank == 0:
        folders.remove_partials(run)
    newest = native.newest(run) if world.rank == 0 else None
    step = torch.tensor(-1 if newest is None else int(newest.name.removeprefix("step-")))
    world.broadcast_(step)
    for number, damaged in folders.list_steps(run)[:1]:
        if number > int(step):
            Manifest.read(damaged).check_sizes(damaged)
    return None if step < 0 else run / f"step-{int(step)}"

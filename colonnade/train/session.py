"""The state of a run on one rank: model, masters, optimizer, data, and how far it came.

Exact resume: weights, both moments, the step, the data cursor and float16's loss scale are the whole state. The
schedule is a function of Adam's count and the order of the data one of the cursor, so that a run that was stopped and
resumed under the same plan is bit for bit the run that was not; under another plan it is the same run up to rounding.
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
from colonnade.config import ModelConfig, RunConfig, TrainConfig, differences
from colonnade.data import Batch
from colonnade.errors import CheckpointError
from colonnade.model import Transformer
from colonnade.model.linear import in_float8
from colonnade.model.moe import Spread
from colonnade.parallel.axis import Axis, world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters, masters
from colonnade.parallel.rendezvous import check_same_settings
from colonnade.parallel.watchdog import Watchdog
from colonnade.train.activation_memory import arrange
from colonnade.train.cuda_graph import check_device
from colonnade.train.data_feed import CorpusFeed, MakeFeed, compare
from colonnade.train.initial_weights import begin, freeze
from colonnade.train.loss_scaler import LossScaler
from colonnade.train.memory_advice import check_rank_memory
from colonnade.train.moe_autotune import EVERY, MoeAutotuner, holds_experts
from colonnade.train.optimizer import AdamW, FusedAdamW
from colonnade.train.optimizer_offload import OffloadedAdamW
from colonnade.train.out_of_memory import accounted, beginning, copying, peak_bytes
from colonnade.train.pipeline_step import PipelineStep
from colonnade.train.profiler import READS
from colonnade.train.run_lock import RunLock
from colonnade.train.train_step import Outcome, Step, evaluate


class Session:
    """A run, begun or resumed from its newest complete checkpoint."""

    def __init__(
        self,
        run: RunConfig,
        context: DistributedContext,
        watch: Watchdog | None = None,
        lock: RunLock | None = None,
        feed: MakeFeed = CorpusFeed,
    ):
        """``watch`` is told where this rank is, so that others can say when it falls silent; ``lock`` is checked before
        each save; ``feed`` opens the data. Raises :class:`PlanError` where ranks have different data.
        """
        if run.train.cuda_graph:
            check_device(context.device)
        run = run.resolved(context.device.type)
        self.run, self.context, self.world = run, context, world_axis()
        self.watch = watch or Watchdog(run.train.timeout_s)
        self._compiled, self._lock = False, lock
        self.feed = feed(run, context.axes.dp.rank, context.axes.dp.size)
        check_same_settings({name: _digest(value) for name, value in self.feed.identity.items()}, self.world)
        kept = torch.float64 if run.train.dtype == "float64" else torch.float32
        spans = [span for _, span in context.stages(run.model.layers)]
        compute: torch.dtype = getattr(torch, run.train.compute_dtype)  # torch's own names
        check_rank_memory(run, context)
        with beginning(run, context.device):
            self.model = self._build(run.model, kept, spans, cut=context.sharded)
            self.checkpoint = newest(run.folder, self.world)
            """The newest complete checkpoint, if there is one."""
            freeze(self.model, run.train.freeze)
            self.recomputed = arrange(
                self.model,
                run.train,
                lambda: next(self._on_device(self.feed.samples.at(0))),
                lambda config: self._build(config, compute),
                self.world,
            )
            """What the backward pass computes again, where that was chosen by measurement."""
            self.piped = PipelineStep(self.model, context, compute) if run.plan.pp > 1 else None
            single = bool(run.train.fused_adamw) and run.micro_batches == 1 and self.piped is None
            self.masters = masters(self.model, context, compute, self.piped and self.piped.stages, single=single)
            if self.checkpoint is None:
                begin(self.model, run, context, self.masters)
            self.optimizer = moving(self.masters, run.train)
        self.scaler = LossScaler(run.train, context.device) if run.train.dtype == "float16" else None
        self._adaptive = MoeAutotuner(self.model) if run.plan.degree == "auto" and holds_experts(self.model) else None
        spread = [
            Spread() if run.plan.degree == "auto" else Spread(run.plan.degree, run.plan.overlap, run.plan.shadows)
        ]
        self._step = Step(
            self.model, self.masters, self.optimizer, run.train, self.world, self.piped, self.scaler, spread,
            run.train.cuda_graph,
        )  # fmt: skip
        self.decided: list[str] = []
        """What was decided about the layers of experts and not yet shown (plan.degree auto)."""
        self.taken = 0
        """Optimizer steps taken."""
        self.seen = 0
        """Samples consumed by all ranks."""
        self._saving = AsyncSave(context.device)
        self.skipped = 0
        """Steps of the run that were not finite and moved nothing, as far as anybody looked."""
        self.changes: list[str] = []
        """Settings that are not those with which the checkpoint was written."""
        if self.checkpoint is not None:
            self._resume(self.checkpoint)

    def step(self) -> Outcome:
        """Take the next optimizer step."""
        self.watch.mark(self.taken + 1, READS)
        begun_s = time.perf_counter()
        with record_function(READS):
            batches = list(self._on_device(self.feed.samples.at(self.seen)))
        data_s = time.perf_counter() - begun_s
        self.watch.mark(self.taken + 1, "computes", patient=not self._compiled)
        device = self.context.device
        with self._accounted(f"in step {self.taken + 1}"):
            outcome = self._step(self.taken, batches)
        outcome = replace(outcome, data_s=data_s, memory_bytes=max(peak_bytes(device), self._step.recorded_bytes))
        if self._adaptive is not None and outcome.routed is not None and self.taken % EVERY == 0:
            self.decided += self._adaptive.look(outcome.routed.layers, outcome.routed.load_LE.tolist(), len(batches))
            self._step.spread = self._adaptive.spread
        self._compiled = True
        self.taken, self.seen = self.taken + 1, self.seen + self.run.train.batch
        return outcome

    def samples_of(self, step: int) -> list[int]:
        """The numbers of the samples that step ``step`` (from 1) of this session was made of."""
        return self.feed.samples.numbers(self.seen - (self.taken - step + 1) * self.run.train.batch)

    def validate(self) -> Tensor:
        """The mean loss on held-out samples, always the same ones."""
        assert self.feed.held_out is not None, "validation is switched off"
        self.watch.mark(self.taken, "validates", patient=True)
        batches = self._on_device(self.feed.held_out.sweep(self.run.train.eval_samples))
        with self._accounted(f"in the validation after step {self.taken}"):
            return evaluate(self.model, batches, self.piped, self.run.evaluated)

    def save(self) -> Path | None:
        """Begin to write ``runs/NAME/step-N``, which :meth:`settle` ends; no other save may be under way.

        Without train.async_save it is written, and returned, before the weights can move. The one that is there is
        kept when no step was taken since. Raises :class:`CheckpointError` when another run has taken the folder over.
        """
        self.watch.mark(self.taken, "saves", patient=True)
        folder, t = self.run.folder / f"step-{self.taken}", self.run.train
        if folder == self.checkpoint:
            return None
        if self._lock is not None:
            self._lock.check()
        with copying(folder.name):
            write = self._writing(folder)
        self._saving.start(folder, write)
        return None if t.async_save else self.settle(wait=True)

    def _writing(self, folder: Path) -> Callable[[], None]:
        t = self.run.train
        return native.writing(
            folder,
            self.model,
            native.Meta(
                model=self.run.model,
                run=self.run,
                step=self.taken,
                loss_scale=None if self.scaler is None else self.scaler.state,
                cursor=self._cursor(),
                tasks=self._tasks,
            ),
            self.context,
            masters=self.masters,
            optimizer=self.optimizer,
            tokenizer=self.feed.tokenizer,
            stage=self._saving.stage if t.async_save else dict,
            group=self._saving.group,
            after=lambda: prune(self.run.folder, t.keep, t.keep_every),
        )

    def settle(self, *, wait: bool = False) -> Path | None:
        """The checkpoint that was being written, if all ranks have written it by now, or after a ``wait``.

        Raises what went wrong with it, on every rank after the same step.
        """
        if not self._saving.running:
            return None
        # When one rank has seen the end, the others are about to: torch's last collective of a save is behind it.
        if not wait and not int(self.world.max_(torch.tensor(int(self._saving.over)))):
            return None
        if wait:
            self.watch.mark(self.taken, "waits for a checkpoint", patient=True)
        self.checkpoint = self._saving.settle()
        return self.checkpoint

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        """Whatever ended the run: a checkpoint that is being written is as good as it was."""
        if not self._saving.running:
            return
        self.watch.mark(self.taken, "ends", patient=True)
        try:
            self.checkpoint = self._saving.settle()
        except BaseException as failure:
            if error is None:
                raise
            error.add_note(f"and the checkpoint that was being written failed: {failure}")

    def _accounted(self, when: str) -> AbstractContextManager[None]:
        return accounted(self.run, self.model, self.masters, self.optimizer, self.context.device, when)

    def _build(
        self, config: ModelConfig, dtype: torch.dtype, spans: Sequence[range] | None = None, *, cut: bool = False
    ) -> Transformer:
        """An uninitialised model that computes as this run's does: these blocks of it, or all; nowhere, if it is to be
        ``cut``.
        """
        device = "meta" if cut else self.context.device
        model = Transformer(config, self.context.axes, spans=spans, device=device, dtype=dtype)
        if self.run.train.float8 != "none":
            in_float8(model.blocks, self.run.train.float8, self.context.device)
        if self.run.train.compile:
            for block in model.blocks:
                block.compile()
        return model

    def _on_device(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        return (batch.to(self.context.device) for batch in batches)

    def _resume(self, folder: Path) -> None:
        meta = native.load(folder, self.model, self.context, masters=self.masters, optimizer=self.optimizer)
        if meta.run is None or "seen" not in meta.cursor:
            raise CheckpointError(f"{folder} was not written by a training run; use another name for this run")
        if any(type(at := meta.cursor.get(key, 0)) is not int or at < 0 for key in ("seen", "skipped")):
            raise CheckpointError(f"{folder} has the data cursor {meta.cursor}; use another checkpoint")
        differs = compare(self.feed, self.run.data, meta.cursor, str(folder))
        self.taken, self.seen = meta.step, 0 if differs else meta.cursor["seen"]
        self.skipped = meta.cursor.get("skipped", 0)
        if self.scaler is not None:
            overflowed = meta.step - self.optimizer.steps - self.skipped
            self.scaler.restore(meta.loss_scale or self.scaler.state, overflowed)
        self.changes = [*differences(meta.run, self.run), *(f"{what}: the data starts anew" for what in differs)]
        if not differs and any(meta.cursor.get(name) != value for name, value in self.feed.identity.items()):
            self.changes.append("other documents are held out: validation losses do not compare")

    @property
    def _tasks(self) -> tuple[str, ...]:
        """What the corpus calls the tasks that experts are chosen by."""
        moe, corpus = self.run.model.moe, self.feed.corpus
        return corpus.manifest.tasks or () if corpus and moe and moe.router.kind == "task" else ()

    def _cursor(self) -> dict[str, Any]:
        """How many samples are behind us, and all that decides which ones these are."""
        data = self.run.data
        where = {"seen": self.seen, "skipped": self.skipped}
        return where | self.feed.identity | {"sequence": data.sequence, "seed": data.seed}


def _digest(value: object) -> str:
    """A few characters that differ where ``value`` does."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def moving(held: Masters, train: TrainConfig) -> AdamW:
    """The optimizer of ``held`` that ``train`` asks for; the plain one where this rank trains nothing."""
    if not held.local:
        return AdamW(held.local, train)
    if train.fused_adamw:
        return FusedAdamW(held, train)
    return (AdamW if train.offload == "none" else OffloadedAdamW)(held.local, train)


def newest(run: Path, world: Axis) -> Path | None:
    """The newest checkpoint of a run, as rank 0 sees it, so that all ranks resume from the same.

    What an interrupted save left behind is removed. Raises :class:`CheckpointError` when a newer checkpoint has lost
    files: to pass over it would mean to fail when its step comes again.
    """
    if world.rank == 0:
        folders.discard_all(run)
    found = native.newest(run) if world.rank == 0 else None
    step = torch.tensor(-1 if found is None else int(found.name.removeprefix("step-")))
    world.broadcast_(step)
    for number, damaged in folders.steps(run)[:1]:
        if number > int(step):
            Manifest.read(damaged).check_sizes(damaged)
    return None if step < 0 else run / f"step-{int(step)}"

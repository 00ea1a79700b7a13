"""Per-step metrics, collected on the device and read at intervals.

A step leaves its loss and norm as tensors that a GPU may not have computed yet. Reading them every step would keep the
host from preparing the next one, so they are read together when a line of metrics is due: one all-reduce over the data
ranks, one copy to the host (and the maximum of all ranks' memory peaks). A non-finite loss is found then, with its step
and data ranks; no checkpoint is written before the metrics were read.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from colonnade.config import RunConfig
from colonnade.errors import ColonnadeError
from colonnade.parallel.axis import world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.loss_scaler import MIN_SCALE
from colonnade.train.mfu import Throughput, find_accelerator, throughput
from colonnade.train.moe_stats import MoeStats, RoutingTable, gather_routing_table, nonfinite_router, tracker_row
from colonnade.train.train_step import StepMetrics

Row = dict[str, float]
"""Names and values of one step for trackers; non-finite values of a skipped step are left out."""

LOSS_SCALE_COLUMNS = ("loss_scale", "skipped")
"""Additional columns in float16: the loss scale of the step, and the number of steps skipped so far."""


class Diverged(ColonnadeError):
    """The loss or the gradient is not finite."""


class Meter:
    """Collects the metrics of steps and the training time; returns rows."""

    def __init__(
        self,
        run: RunConfig,
        context: DistributedContext,
        on_bad_step: Callable[[int, str], None],
        sample_tokens: float | None = None,
    ):
        """``on_bad_step(steps, diagnosis)`` is called on every rank for a step that was not finite; it may raise.
        ``sample_tokens`` is the mean length of a sample; by default all have ``data.sequence``.
        """
        self.run, self.context, self.on_bad_step = run, context, on_bad_step
        self.sample_tokens = sample_tokens or run.data.sequence
        self.accelerator = find_accelerator(context.device)
        self._pending: list[tuple[int, StepMetrics]] = []
        self.routing: RoutingTable = {}
        """Routing statistics of the newest step that was read."""
        self._busy_s, self._since_s, self._steps = 0.0, time.perf_counter(), 0

    def add(self, steps: int, metrics: StepMetrics) -> None:
        """Keep the metrics of the step after which ``steps`` steps have been taken."""
        self._pending.append((steps, metrics))
        self._steps += 1

    def read(self) -> list[tuple[int, Row]]:
        """(steps taken, row) for each step since the last call; synchronises with the device.

        Rows lack loss and norm that are not finite; :attr:`on_bad_step` has been called for them.
        """
        if not self._pending:
            return []
        pending = [metrics for _, metrics in self._pending]
        local_losses = torch.stack([metrics.loss_sum for metrics in pending]).double()
        losses = self.context.axes.global_sum(local_losses) / torch.stack([metrics.count for metrics in pending])
        norms = torch.stack([metrics.norm for metrics in pending]).double()
        table = torch.stack([losses, norms, *_loss_scale_columns(pending)]).T.tolist()
        finite_here = local_losses.isfinite().tolist()
        peaks = world_axis().max_(torch.tensor([metrics.memory_bytes for metrics in pending])).tolist()
        rows: list[tuple[int, Row]] = []
        columns = zip(self._pending, table, finite_here, peaks, strict=True)
        for (steps, metrics), (loss, norm, *scale), here, peak in columns:
            row = {"loss": loss, "grad_norm": norm, "lr": float(metrics.lr)}
            row |= dict(zip(LOSS_SCALE_COLUMNS, scale, strict=False))
            row |= {"data_s": metrics.data_s, "memory_peak_bytes": peak}
            finite = {name: value for name, value in row.items() if value - value == 0}
            if len(finite) < len(row) and not scale:
                self.on_bad_step(steps, self._diagnosis(steps, loss, norm, here, metrics.moe))
            elif len(finite) < len(row) and row["loss_scale"] <= MIN_SCALE:
                # A larger scale means a normal float16 overflow; at the smallest one the run has diverged.
                raise Diverged(self._diagnosis(steps, loss, norm, here, metrics.moe) + _collapse(scale))
            rows.append((steps, finite))
        newest, pp = pending[-1], self.context.axes.pp
        self.routing = gather_routing_table(newest.moe, self.run.model, pp, self.context.device, newest.balance)
        if self.routing:
            rows[-1][1].update(tracker_row(self.routing))
        self._pending.clear()
        return rows

    def _diagnosis(self, steps: int, loss: float, norm: float, finite_here: bool, stats: MoeStats | None) -> str:
        batch = self.context.axes.batch
        flags = torch.zeros(batch.size, device=self.context.device)
        flags[batch.rank] = not finite_here
        culprits = [str(rank) for rank, flag in enumerate(self.context.axes.global_sum(flags).tolist()) if flag]
        where = f" on data rank {', '.join(culprits)} of {batch.size}" if culprits else " on no rank alone"
        what = f"loss is {loss}{where}" if loss - loss != 0 else f"gradient norm is {norm} (the loss is {loss:.4g})"
        if self.run.model.moe is not None:
            what += nonfinite_router(stats, self.run.model.layers, world_axis(), self.context.device)
        return f"step {steps}: the {what}"

    # -- time: only training counts, not validation, saving or start-up ---------------------------------------------

    def pause(self) -> None:
        """Stop the clock, once the device has finished its work."""
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        self._busy_s += time.perf_counter() - self._since_s

    def resume(self) -> None:
        """Start the clock again."""
        self._since_s = time.perf_counter()

    def restart(self) -> None:
        """Discard the time measured so far (the first step compiles, and profiled steps are slower)."""
        self._busy_s, self._steps = 0.0, 0
        self.resume()

    def speed(self) -> Throughput | None:
        """Throughput over the steps since the last call; None without any. The clock must be paused."""
        steps, busy_s = self._steps, self._busy_s
        self._busy_s, self._steps = 0.0, 0
        if not steps or not busy_s:
            return None
        run = self.run
        return throughput(
            run.model,
            sequence=round(self.sample_tokens),
            tokens_per_s=steps * run.train.batch * self.sample_tokens / busy_s,
            ranks=self.context.world,
            accelerator=self.accelerator,
            dtype=run.train.compute_dtype,
        )


def _loss_scale_columns(pending: Sequence[StepMetrics]) -> list[Tensor]:
    """The columns of :data:`LOSS_SCALE_COLUMNS`; none unless the run is in float16."""
    pairs = [(m.loss_scale, m.skipped) for m in pending if m.loss_scale is not None and m.skipped is not None]
    return [torch.stack(column).double() for column in zip(*pairs, strict=True)]


def _collapse(scale: Sequence[float]) -> str:
    if not scale:
        return ""
    return f", and the loss scale fell to {scale[0]:g} after {scale[1]:.0f} skipped steps: no scale helps"


def throughput_row(speed: Throughput) -> Row:
    """The values of a :class:`Throughput` for trackers; unknown ones are left out."""
    return {name: value for name, value in asdict(speed).items() if value is not None}

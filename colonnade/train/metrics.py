"""Metrics of a run: loss, norm and routing of each step, throughput and model FLOPs utilisation (MFU).

A step leaves its loss and norm as tensors that a GPU may not have computed yet. Reading them every step would keep the
host from preparing the next one, so they are read together when a line of metrics is due: one all-reduce over the data
ranks, one copy to the host (and the maximum of all ranks' memory peaks). A non-finite loss is found then, with its step
and data ranks; no checkpoint is written before the metrics were read.

    model FLOP/s = tokens/s · FLOPs per token (:meth:`ModelConfig.flops_per_token`)
    MFU          = model FLOP/s per rank / peak FLOP/s of its accelerator     (PaLM, arXiv 2204.02311, appendix B)

The peaks are the vendors' dense rates (no structured sparsity) with 32-bit accumulation, from their data sheets. An
accelerator that is not in the table has no MFU: a guessed peak would give a number that looks measured.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor

from colonnade.config import ModelConfig, RunConfig
from colonnade.errors import ColonnadeError
from colonnade.parallel.axis import world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.loss_scaler import MIN_SCALE
from colonnade.train.moe_stats import MoeStats, RoutingTable, gather_routing_table, nonfinite_router, tracker_row
from colonnade.train.train_step import StepMetrics

ComputeType = Literal["float32", "bfloat16", "float16", "float64"]

Row = dict[str, float]
"""Names and values of one step for trackers; non-finite values of a skipped step are omitted."""

LOSS_SCALE_COLUMNS = ("loss_scale", "skipped")
"""Additional columns in float16: the loss scale of the step, and the number of steps skipped so far."""


@dataclass(frozen=True)
class Accelerator:
    """Dense peaks of one accelerator [FLOP/s]; ``float32`` is without TF32, which nothing here switches on."""

    match: str
    """Part of its name in the driver."""
    bfloat16: float
    float32: float
    float64: float

    def peak(self, dtype: ComputeType) -> float:
        """FLOP/s of GEMMs with operands of ``dtype`` (float16 is as fast as bfloat16 on all of them)."""
        return self.bfloat16 if dtype == "float16" else getattr(self, dtype)


# The first match wins, so the longer of two names with a common prefix comes first.
ACCELERATORS = (
    Accelerator("GB200", 2500e12, 80e12, 40e12),
    Accelerator("B200", 2250e12, 75e12, 37e12),
    Accelerator("GH200", 989e12, 67e12, 67e12),
    Accelerator("H200", 989e12, 67e12, 67e12),
    Accelerator("H100 NVL", 835e12, 60e12, 60e12),
    Accelerator("H100 PCIe", 756e12, 51e12, 51e12),
    Accelerator("H100", 989e12, 67e12, 67e12),
    Accelerator("A100", 312e12, 19.5e12, 19.5e12),
    Accelerator("A40", 149.7e12, 37.4e12, 0.58e12),
    Accelerator("L40S", 362e12, 91.6e12, 1.4e12),
    Accelerator("L4", 121e12, 30.3e12, 0.47e12),
    Accelerator("RTX 4090", 165.2e12, 82.6e12, 1.3e12),
    Accelerator("RTX 3090", 71e12, 35.6e12, 0.56e12),
    Accelerator("MI300X", 1307.4e12, 163.4e12, 163.4e12),
)  # fmt: skip


def accelerator_named(name: str) -> Accelerator | None:
    """The accelerator that a driver calls ``name``; None for one not in the table (and for any CPU)."""
    upper = name.upper()
    return next((known for known in ACCELERATORS if known.match.upper() in upper), None)


def find_accelerator(device: torch.device) -> Accelerator | None:
    """The accelerator of ``device``, if known."""
    return accelerator_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


@dataclass(frozen=True)
class Throughput:
    """Tokens/s, FLOP/s and MFU of a run, in the field's two conventions for causal attention."""

    tokens_per_s: float
    """Over all ranks."""
    tflops: float
    """Model TFLOP/s of one rank with all attention scores counted (Megatron, PaLM)."""
    tflops_causal: float
    """The same without the half of the scores that the causal mask removes."""
    mfu: float | None
    """``tflops`` / the accelerator's peak; None when it is unknown."""
    mfu_causal: float | None
    """``tflops_causal`` / the accelerator's peak."""

    def __str__(self) -> str:
        rate = f"{self.tokens_per_s:,.0f} tokens/s"
        flops = f"{self.tflops:.3g} TFLOP/s ({self.tflops_causal:.3g} causal)"
        if self.mfu is None or self.mfu_causal is None:
            return f"{rate}  {flops}  mfu n/a"
        return f"{rate}  {flops}  mfu {self.mfu:.1%} ({self.mfu_causal:.1%} causal)"


def throughput(
    model: ModelConfig,
    *,
    sequence: int,
    tokens_per_s: float,
    ranks: int,
    accelerator: Accelerator | None,
    dtype: ComputeType,
) -> Throughput:
    """Throughput of a run that trains ``tokens_per_s`` over ``ranks`` ranks on samples of ``sequence`` tokens.

    Attention is counted at the full sample length, even where documents are separated and less is computed.
    """
    full, causal = (
        tokens_per_s * model.flops_per_token(sequence, causal=half) / ranks / 1e12 for half in (False, True)
    )
    peak = None if accelerator is None else accelerator.peak(dtype)
    return Throughput(tokens_per_s, full, causal, peak and full * 1e12 / peak, peak and causal * 1e12 / peak)


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
            row |= {"data_s": metrics.data_s, "memory_peak_bytes": peak, **metrics.extra}
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
            what += nonfinite_router(stats, self.run.model.total_layers, world_axis(), self.context.device)
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
    return f", and the loss scale fell to {scale[0]:g} after {scale[1]:.0f} skipped steps; no scale avoids the overflow"


def throughput_row(speed: Throughput) -> Row:
    """The values of a :class:`Throughput` for trackers; unknown ones are omitted."""
    return {name: value for name, value in asdict(speed).items() if value is not None}

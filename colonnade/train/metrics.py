"""What is noted of each step, read from the device only now and then.

A step leaves its loss and norm as tensors that may not exist yet (a GPU runs behind the program). Waiting for them
every step would stop the program from preparing the next one, so they are kept, and read all at once when a line of
metrics is due: one sum over the data ranks, one copy to the host (and the largest memory peak of all ranks). A loss
that is not finite is found then, with the step and the data ranks in which it arose; no checkpoint is written before
that was looked at.
"""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from colonnade.config import RunConfig
from colonnade.errors import ColonnadeError
from colonnade.parallel.axis import world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.loss_scaler import LOWEST
from colonnade.train.mfu import Throughput, chip_of, throughput
from colonnade.train.moe_stats import Routed, Table, blamed, row_of, tabled
from colonnade.train.train_step import Outcome

Row = dict[str, float]
"""Names and values of one step, as trackers get them; what was not finite in a skipped step is left out."""

SCALED = ("loss_scale", "skipped")
"""What a row of float16 holds besides: the scale that the step used, and how many steps were skipped so far."""


class Diverged(ColonnadeError):
    """The loss or the gradient is no longer a number."""


class Meter:
    """Collects outcomes and time; hands out rows."""

    def __init__(
        self,
        run: RunConfig,
        context: DistributedContext,
        bad: Callable[[int, str], None],
        sample_tokens: float | None = None,
    ):
        """``bad(steps, diagnosis)`` is told, on every rank alike, of a step that moved nothing, or refuses it.
        ``sample_tokens`` is the mean length of a sample; by default all have ``data.sequence``.
        """
        self.run, self.context, self.bad = run, context, bad
        self.sample_tokens = sample_tokens or run.data.sequence
        self.chip = chip_of(context.device)
        self._pending: list[tuple[int, Outcome]] = []
        self.routing: Table = {}
        """What the layers of experts did in the newest step that was read."""
        self._busy_s, self._since_s, self._steps = 0.0, time.perf_counter(), 0

    def note(self, steps: int, outcome: Outcome) -> None:
        """Keep the outcome of the step after which ``steps`` steps have been taken."""
        self._pending.append((steps, outcome))
        self._steps += 1

    def read(self) -> list[tuple[int, Row]]:
        """(steps taken, row) for each step since the last reading; waits for the device.

        A step whose loss or norm is not finite has neither in its row, after :attr:`bad` took note of it.
        """
        if not self._pending:
            return []
        outcomes = [outcome for _, outcome in self._pending]
        mine = torch.stack([outcome.loss_sum for outcome in outcomes]).double()
        losses = self.context.axes.global_sum(mine) / torch.stack([outcome.count for outcome in outcomes])
        norms = torch.stack([outcome.norm for outcome in outcomes]).double()
        table = torch.stack([losses, norms, *_scales(outcomes)]).T.tolist()
        flags = mine.isfinite().tolist()
        peaks = world_axis().max_(torch.tensor([outcome.memory_bytes for outcome in outcomes])).tolist()
        rows: list[tuple[int, Row]] = []
        read = zip(self._pending, table, flags, peaks, strict=True)
        for (steps, outcome), (loss, norm, *scaled), here, peak in read:
            row = {"loss": loss, "grad_norm": norm, "lr": float(outcome.lr)} | dict(zip(SCALED, scaled, strict=False))
            row |= {"data_s": outcome.data_s, "memory_peak_bytes": peak}
            finite = {name: value for name, value in row.items() if value - value == 0}
            if len(finite) < len(row) and not scaled:
                self.bad(steps, self._diagnosis(steps, loss, norm, here, outcome.routed))
            elif len(finite) < len(row) and row["loss_scale"] <= LOWEST:
                # Otherwise it overflowed in float16 and is no news, until lowering the scale stops helping.
                raise Diverged(self._diagnosis(steps, loss, norm, here, outcome.routed) + _collapse(scaled))
            rows.append((steps, finite))
        newest, pp = outcomes[-1], self.context.axes.pp
        self.routing = tabled(newest.routed, self.run.model, pp, self.context.device, newest.balance)
        if self.routing:
            rows[-1][1].update(row_of(self.routing))
        self._pending.clear()
        return rows

    def _diagnosis(self, steps: int, loss: float, norm: float, finite_here: bool, found: Routed | None) -> str:
        batch = self.context.axes.batch
        flags = torch.zeros(batch.size, device=self.context.device)
        flags[batch.rank] = not finite_here
        guilty = [str(rank) for rank, flag in enumerate(self.context.axes.global_sum(flags).tolist()) if flag]
        where = f" on data rank {', '.join(guilty)} of {batch.size}" if guilty else " on no rank alone"
        what = f"loss is {loss}{where}" if loss - loss != 0 else f"gradient norm is {norm} (the loss is {loss:.4g})"
        if self.run.model.moe is not None:
            what += blamed(found, self.run.model.layers, world_axis(), self.context.device)
        return f"step {steps}: the {what}"

    # -- time: only training counts, not validation, saving or starting up -----------------------------------------

    def pause(self) -> None:
        """Stop the clock, once the device has caught up."""
        if self.context.device.type == "cuda":
            torch.cuda.synchronize(self.context.device)
        self._busy_s += time.perf_counter() - self._since_s

    def resume(self) -> None:
        """Start the clock again."""
        self._since_s = time.perf_counter()

    def restart(self) -> None:
        """Forget what was measured (the first step compiles, and is no measure of the others)."""
        self._busy_s, self._steps = 0.0, 0
        self.resume()

    def speed(self) -> Throughput | None:
        """Rates over the steps since the last call; None without any. The clock must be paused."""
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
            chip=self.chip,
            dtype=run.train.compute_dtype,
        )


def _scales(outcomes: Sequence[Outcome]) -> list[Tensor]:
    """The columns of :data:`SCALED`, none unless the run is in float16."""
    pairs = [(o.loss_scale, o.skipped) for o in outcomes if o.loss_scale is not None and o.skipped is not None]
    return [torch.stack(column).double() for column in zip(*pairs, strict=True)]


def _collapse(scaled: Sequence[float]) -> str:
    if not scaled:
        return ""
    return f", and the loss scale fell to {scaled[0]:g} after {scaled[1]:.0f} skipped steps: no scale helps"


def rates(speed: Throughput) -> Row:
    """The values of a :class:`Throughput` for a tracker; what is not known is left out."""
    known = {
        "tokens_per_s": speed.tokens_per_s,
        "tflops": speed.tflops,
        "tflops_causal": speed.tflops_causal,
        "mfu": speed.mfu,
        "mfu_causal": speed.mfu_causal,
    }
    return {name: value for name, value in known.items() if value is not None}

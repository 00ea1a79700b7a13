"""Metric trackers: JSON Lines, TensorBoard, Weights & Biases, MLflow; and the loss curve as a picture.

A tracker has two methods, :meth:`Tracker.record` and :meth:`Tracker.close`, so a run can have its own. Only rank 0
tracks. A resumed run removes what was tracked after its checkpoint, so that each step appears once. The loss curve is
drawn from the run's ``metrics.jsonl`` when it ends.
"""

import functools
import importlib
import importlib.util
import json
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from colonnade.config import RunConfig
from colonnade.errors import ConfigError

METRICS = "metrics.jsonl"
ROUTING = "routing.jsonl"
"""For a mixture of experts: each layer's load by expert, one line for each line of metrics."""
WANDB, MLFLOW = "wandb-id", "mlflow-id"
"""Files in the run's folder with its run id at the service."""


class Tracker(Protocol):
    """Receives the metrics of a run."""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Record ``values`` after ``step`` optimizer steps; names may differ from call to call."""
        ...

    def close(self) -> None:
        """End of the run, or a stop before a resume."""
        ...


OpenTracker = Callable[[Path, int], Tracker]
"""(run folder, steps taken before a resume; 0 for a new run) -> tracker; called on rank 0."""


class JsonLines:
    """One JSON object per line, in ``metrics.jsonl`` or another file."""

    def __init__(self, folder: Path, resumed_step: int, file: str = METRICS):
        self.path = folder / file
        rows = [row for row in read_rows(folder, file) if row["step"] <= resumed_step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        partial.replace(self.path)
        self._file = self.path.open("a", encoding="utf-8")

    def record(self, step: int, values: Mapping[str, Any]) -> None:
        """Append a line."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Flush to the disk."""
        os.fsync(self._file.fileno())
        self._file.close()


class TensorBoard:
    """Event files in ``tensorboard/``; ``tensorboard --logdir runs`` compares all runs."""

    def __init__(self, folder: Path, resumed_step: int):
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only rank 0 needs it

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Add a scalar for each name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def loads(self, step: int, by_layer: Mapping[int, Sequence[int]]) -> None:
        """Add a histogram of choices by expert number for each MoE layer."""
        for layer, load in by_layer.items():
            experts = range(len(load))
            self._writer.add_histogram_raw(
                f"moe/{layer}/load",
                min=0,
                max=len(load),
                num=sum(load),
                sum=sum(e * n for e, n in zip(experts, load, strict=True)),
                sum_squares=sum(e * e * n for e, n in zip(experts, load, strict=True)),
                bucket_limits=[e + 1 for e in experts],
                bucket_counts=list(load),
                global_step=step,
            )

    def close(self) -> None:
        """Flush to the disk."""
        self._writer.close()


class Wandb:
    """Weights & Biases, which reads ``WANDB_PROJECT``, ``WANDB_MODE`` and its other settings from the environment.

    A resumed run continues the same run there; steps that it already has are not written again.
    """

    def __init__(self, folder: Path, resumed_step: int, *, config: Mapping[str, Any]):
        wandb = importlib.import_module("wandb")
        known = _service_run_id(folder / WANDB, resumed_step)
        id = known or uuid.uuid4().hex
        self._run = wandb.init(name=folder.name, id=id, resume="allow", dir=str(folder), config=dict(config))
        (folder / WANDB).write_text(id, encoding="utf-8")

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Log a row; rows of one step are joined."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send what is left."""
        self._run.finish()


class Mlflow:
    """MLflow, which reads ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME`` from the environment.

    A resumed run continues the same run there; steps that it already has are not written again.
    """

    def __init__(self, folder: Path, resumed_step: int, *, config: Mapping[str, Any]):
        mlflow = importlib.import_module("mlflow")
        known = _service_run_id(folder / MLFLOW, resumed_step)
        id = mlflow.start_run(run_id=known, run_name=None if known else folder.name).info.run_id
        (folder / MLFLOW).write_text(id, encoding="utf-8")
        if known is None:
            mlflow.log_params(flattened(config))
        history = mlflow.MlflowClient().get_metric_history(id, "loss")
        self._last_step, self._mlflow = max((metric.step for metric in history), default=0), mlflow

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Log a row."""
        if step > self._last_step:
            self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """Mark the run as finished (or stopped for now)."""
        self._mlflow.end_run()


SERVICES: dict[str, Callable[..., Tracker]] = {"wandb": Wandb, "mlflow": Mlflow}
"""The values of train.trackers; each tracker also gets the configuration."""


class ServiceTracker:
    """Wraps the tracker of an external service: if it fails during a run it is dropped, and the run continues.

    A failure at the start ends the run, because its user can still fix it.
    """

    def __init__(self, folder: Path, resumed_step: int, *, name: str, config: Mapping[str, Any]):
        self._name, self._tracker = name, SERVICES[name](folder, resumed_step, config=config)
        self._failed = False

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Forward to the service."""
        self._try(lambda: self._tracker.record(step, values), f"no metrics are sent from step {step} on")

    def close(self) -> None:
        """Forward to the service."""
        self._try(self._tracker.close, "the run was not closed there")

    def _try(self, action: Callable[[], object], consequence: str) -> None:
        if self._failed:
            return
        try:
            action()
        except Exception as why:  # noqa: BLE001 - a service may raise anything, and the run must continue
            self._failed = True
            reason = (str(why).splitlines() or [""])[0]
            print(f"{self._name} failed with {type(why).__name__}: {reason}; {consequence}; {METRICS} has all of them",
                  file=sys.stderr, flush=True)  # fmt: skip


def service_trackers(run: RunConfig) -> list[OpenTracker]:
    """The trackers of ``train.trackers``; raises :class:`ConfigError` if a package is missing."""
    for name in run.train.trackers:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # no origin: a plain folder of that name, such as wandb leaves behind
            raise ConfigError(
                f"train.trackers includes {name}, but the package '{name}' is not installed; "
                "run: pip install 'colonnade[track]', or remove it"
            )
    config = run.model_dump(mode="json")
    return [functools.partial(ServiceTracker, name=name, config=config) for name in run.train.trackers]


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """``{"train.lr": "0.0003", …}``."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": str(value)}
    return flat


def _service_run_id(file: Path, resumed_step: int) -> str | None:
    """The service's id of a resumed run; None for a new one."""
    return file.read_text(encoding="utf-8") if resumed_step and file.is_file() else None


def read_rows(folder: Path, file: str = METRICS) -> list[dict[str, Any]]:
    """The rows of a run's ``metrics.jsonl``, or another file; an incomplete last line is dropped."""
    path = folder / file
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


PICTURE = "loss.png"
TEXT_COLOR, MUTED_COLOR, TRAIN_COLOR, VALIDATION_COLOR = "#1f2933", "#8a94a0", "#2f6fb3", "#d1495b"


def moving_average(values: Sequence[float], reach: int) -> list[float]:
    """Centred mean over up to ``reach`` neighbours on either side (a trailing mean would lag)."""
    sums = [0.0, *accumulate(values)]
    ends = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in ends]


def draw_loss_curve(folder: Path, title: str) -> Path | None:
    """Write ``folder/loss.png`` and return its path; None without tracked steps."""
    rows = read_rows(folder)
    nan = float("nan")  # the norm of a step skipped in float16
    train = [(row["step"], row["loss"], row["lr"], row.get("grad_norm", nan)) for row in rows if "loss" in row]
    held_out = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    if not train:
        return None
    # Imported here because it is slow; without pyplot the caller's figures are not affected.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, losses, rates, norms = (list(column) for column in zip(*train, strict=True))
    figure = Figure(figsize=(8, 5.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["loss", "loss"], ["norm", "lr"]], height_ratios=[3, 1])
    top, left, right = panels["loss"], panels["norm"], panels["lr"]
    reach = len(losses) // 100
    if reach:
        top.plot(steps, losses, color=TRAIN_COLOR, alpha=0.25, linewidth=0.8)
    top.plot(
        steps, moving_average(losses, reach), color=TRAIN_COLOR, linewidth=1.8, label=f"training, now {losses[-1]:.3f}"
    )
    if held_out:
        label = f"validation, now {held_out[-1][1]:.3f}"
        top.plot(
            *zip(*held_out, strict=True), color=VALIDATION_COLOR, marker="o", markersize=4, linewidth=1.4, label=label
        )
    top.set_ylabel("loss (nats per token)", color=TEXT_COLOR)
    top.set_title(title, loc="left", color=TEXT_COLOR, fontsize=11, fontweight="bold")
    top.legend(frameon=False, labelcolor=TEXT_COLOR)
    left.plot(steps, norms, color=MUTED_COLOR, linewidth=0.9)
    left.set_ylabel("gradient norm", color=TEXT_COLOR, fontsize=8)
    left.set_ylim(bottom=0)
    right.plot(steps, rates, color=MUTED_COLOR, linewidth=1.2)
    right.set_ylabel("learning rate", color=TEXT_COLOR, fontsize=8)
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
    for axes in (top, left, right):
        axes.set_xlim(0, max(steps) * 1.01)  # margin for the last marker
        axes.grid(color="#e4e7eb", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=MUTED_COLOR, labelcolor=TEXT_COLOR, labelsize=8 if axes is not top else 9)
    for axes in (left, right):
        axes.set_xlabel("step", color=TEXT_COLOR, fontsize=8)
    path = folder / PICTURE
    partial = path.with_suffix(".partial.png")
    figure.savefig(partial, dpi=150)
    partial.replace(path)
    return path

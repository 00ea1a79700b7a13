"""Where metrics go. A tracker is two methods; JSON Lines and TensorBoard are two trackers, wandb and mlflow two more
that a run may ask for, yours is a fifth.

Only rank 0 tracks. A resumed run forgets what was tracked after the checkpoint that it resumes from, so that each
step stands once.

The loss curve as a picture, drawn from the run's own ``metrics.jsonl`` at its end.
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
"""Of a mixture of experts: for each line of metrics, every layer's load by expert."""
WANDB, MLFLOW = "wandb-id", "mlflow-id"
"""Files in the run's folder: the names by which the services know it."""


class Tracker(Protocol):
    """Anything that wants the numbers of a run."""

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Note ``values`` after ``step`` optimizer steps; names may differ from call to call."""
        ...

    def close(self) -> None:
        """The run is over (or stops for now)."""
        ...


OpenTracker = Callable[[Path, int], Tracker]
"""Makes a tracker on rank 0, from the run's folder and the steps taken before a resume (0 for a new run)."""


class JsonLines:
    """One JSON object a line in ``metrics.jsonl``, or another file: easy to read with anything."""

    def __init__(self, folder: Path, resumed_step: int, file: str = METRICS):
        self.path = folder / file
        kept = [row for row in read_rows(folder, file) if row["step"] <= resumed_step]
        fresh = self.path.with_suffix(".partial")
        fresh.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
        fresh.replace(self.path)
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
    """Event files in ``tensorboard/``: ``tensorboard --logdir runs`` shows all runs beside each other."""

    def __init__(self, folder: Path, resumed_step: int):
        from torch.utils.tensorboard import SummaryWriter  # slow to import; rank 0 alone pays

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=resumed_step + 1)

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Add one scalar a name."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def loads(self, step: int, by_layer: Mapping[int, Sequence[int]]) -> None:
        """Add a histogram a layer of experts: the choices that fell on each, by its number."""
        for layer, load in by_layer.items():
            number = range(len(load))
            self._writer.add_histogram_raw(
                f"moe/{layer}/load",
                min=0,
                max=len(load),
                num=sum(load),
                sum=sum(e * n for e, n in zip(number, load, strict=True)),
                sum_squares=sum(e * e * n for e, n in zip(number, load, strict=True)),
                bucket_limits=[e + 1 for e in number],
                bucket_counts=list(load),
                global_step=step,
            )

    def close(self) -> None:
        """Flush to the disk."""
        self._writer.close()


class Wandb:
    """Weights & Biases. ``WANDB_PROJECT``, ``WANDB_MODE`` and its other settings are read from the environment, by it.

    A resumed run goes on as the same run there; steps that it has already are not written a second time.
    """

    def __init__(self, folder: Path, resumed_step: int, *, config: Mapping[str, Any]):
        wandb = importlib.import_module("wandb")
        known = _service_run_id(folder / WANDB, resumed_step)
        # A run that it does not know by this name begins.
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
    """MLflow. ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME`` are read from the environment, by it.

    A resumed run goes on as the same run there; steps that it has already are not written a second time.
    """

    def __init__(self, folder: Path, resumed_step: int, *, config: Mapping[str, Any]):
        mlflow = importlib.import_module("mlflow")
        known = _service_run_id(folder / MLFLOW, resumed_step)
        id = mlflow.start_run(run_id=known, run_name=None if known else folder.name).info.run_id
        (folder / MLFLOW).write_text(id, encoding="utf-8")
        if known is None:
            mlflow.log_params(flattened(config))
        history = mlflow.MlflowClient().get_metric_history(id, "loss")
        self._seen, self._mlflow = max((metric.step for metric in history), default=0), mlflow

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Log a row."""
        if step > self._seen:
            self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        """Mark the run as finished (or stopped for now)."""
        self._mlflow.end_run()


SERVICES: dict[str, Callable[..., Tracker]] = {"wandb": Wandb, "mlflow": Mlflow}
"""What train.trackers can name; each is told the configuration besides."""


class ServiceTracker:
    """A tracker that is not ours, behind a network: when it fails in the middle of a run, it is told no more, and the
    run goes on. At the start a failure ends the run, whose owner is still there to mend it.
    """

    def __init__(self, folder: Path, resumed_step: int, *, name: str, config: Mapping[str, Any]):
        self._name, self._tracker = name, SERVICES[name](folder, resumed_step, config=config)
        self._lost = False

    def record(self, step: int, values: Mapping[str, float]) -> None:
        """Pass on."""
        self._try(lambda: self._tracker.record(step, values), f"from step {step} on it is told no more")

    def close(self) -> None:
        """Pass on."""
        self._try(self._tracker.close, "its end was not told")

    def _try(self, work: Callable[[], object], otherwise: str) -> None:
        if self._lost:
            return
        try:
            work()
        except Exception as why:  # noqa: BLE001 - whatever a service raises, the run is worth more
            self._lost = True
            said = (str(why).splitlines() or [""])[0]
            print(f"{self._name} failed with {type(why).__name__}: {said}; {otherwise}, {METRICS} has it all",
                  file=sys.stderr, flush=True)  # fmt: skip


def service_trackers(run: RunConfig) -> list[OpenTracker]:
    """The trackers that ``run`` asks for; raises :class:`ConfigError` when the package of one is missing."""
    for name in run.train.trackers:
        found = importlib.util.find_spec(name)
        if found is None or found.origin is None:  # a mere folder of that name, as wandb itself leaves, is no package
            raise ConfigError(
                f"train.trackers names {name}, and the package '{name}' is not installed; "
                "run: pip install 'colonnade[track]', or leave it out"
            )
    config = run.model_dump(mode="json")
    return [functools.partial(ServiceTracker, name=name, config=config) for name in run.train.trackers]


def flattened(config: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """``{"train.lr": "0.0003", …}``."""
    found: dict[str, str] = {}
    for key, value in config.items():
        found |= flattened(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": str(value)}
    return found


def _service_run_id(file: Path, resumed_step: int) -> str | None:
    """By which name a service knows the run that is resumed; one that begins anew is a new run there."""
    return file.read_text(encoding="utf-8") if resumed_step and file.is_file() else None


def read_rows(folder: Path, file: str = METRICS) -> list[dict[str, Any]]:
    """The rows of a run's ``metrics.jsonl``, or another file; a last line that a kill cut off is dropped."""
    path = folder / file
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


PICTURE = "loss.png"
INK, QUIET, TRAIN, VALIDATION = "#1f2933", "#8a94a0", "#2f6fb3", "#d1495b"


def moving_average(values: Sequence[float], reach: int) -> list[float]:
    """The mean of each value and up to ``reach`` neighbours on either side (a trailing mean would lag behind)."""
    sums = [0.0, *accumulate(values)]
    ends = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[stop] - sums[start]) / (stop - start) for start, stop in ends]


def draw_loss_curve(folder: Path, title: str) -> Path | None:
    """Write ``folder/loss.png`` and return it; None when nothing was tracked yet."""
    rows = read_rows(folder)
    gap = float("nan")  # of a step that float16 skipped
    train = [(row["step"], row["loss"], row["lr"], row.get("grad_norm", gap)) for row in rows if "loss" in row]
    held_out = [(row["step"], row["validation_loss"]) for row in rows if "validation_loss" in row]
    if not train:
        return None
    # Imported here because it is slow; a figure of its own (no pyplot) leaves the caller's figures alone.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps, losses, rates, norms = (list(column) for column in zip(*train, strict=True))
    figure = Figure(figsize=(8, 5.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["loss", "loss"], ["norm", "lr"]], height_ratios=[3, 1])
    top, left, right = panels["loss"], panels["norm"], panels["lr"]
    reach = len(losses) // 100
    if reach:
        top.plot(steps, losses, color=TRAIN, alpha=0.25, linewidth=0.8)
    top.plot(steps, moving_average(losses, reach), color=TRAIN, linewidth=1.8, label=f"training, now {losses[-1]:.3f}")
    if held_out:
        label = f"validation, now {held_out[-1][1]:.3f}"
        top.plot(*zip(*held_out, strict=True), color=VALIDATION, marker="o", markersize=4, linewidth=1.4, label=label)
    top.set_ylabel("loss (nats per token)", color=INK)
    top.set_title(title, loc="left", color=INK, fontsize=11, fontweight="bold")
    top.legend(frameon=False, labelcolor=INK)
    left.plot(steps, norms, color=QUIET, linewidth=0.9)
    left.set_ylabel("gradient norm", color=INK, fontsize=8)
    left.set_ylim(bottom=0)
    right.plot(steps, rates, color=QUIET, linewidth=1.2)
    right.set_ylabel("learning rate", color=INK, fontsize=8)
    right.set_ylim(bottom=0)
    right.yaxis.set_major_formatter(lambda rate, _: f"{rate:g}")
    for axes in (top, left, right):
        axes.set_xlim(0, max(steps) * 1.01)  # room for the last marker
        axes.grid(color="#e4e7eb", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=QUIET, labelcolor=INK, labelsize=8 if axes is not top else 9)
    for axes in (left, right):
        axes.set_xlabel("step", color=INK, fontsize=8)
    path = folder / PICTURE
    fresh = path.with_suffix(".partial.png")
    figure.savefig(fresh, dpi=150)
    fresh.replace(path)
    return path

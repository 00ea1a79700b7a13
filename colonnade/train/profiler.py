"""Where a step's time goes, read from a trace of torch.profiler.

On a GPU the time of a step is laid over what the device did, on a CPU over what its operators did. Each instant is
counted once, for the first of these that was going on:

    data             reading and moving the samples (on a GPU: only while the device does nothing else)
    matmul           products of matrices                 attention      attention kernels
    optimizer        Adam                                 elementwise    every other operator
    copies           memory moved by the device
    communication    a collective, *exposed*: no arithmetic was going on at the same time
    idle             nothing of these: the device waits for the program (on a CPU: Python)

So exposed communication is |∪ collectives − ∪ arithmetic|, and what of it lay behind arithmetic is told beside it.
The input is the Chrome trace format that the profiler writes, not its objects: traces of other machines work too.

A few steps under torch.profiler: a trace to look at, and a table of where the time went.

The window opens after the first three steps of a session, of which the first compiles and allocates and the third
wakes the profiler up; only the steps within it are slower, and the device is waited for only at its two ends.
"""

import gzip
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from colonnade.config import RunConfig
from colonnade.parallel.distributed_context import DistributedContext

READS = "reads samples"
"""The annotation under which samples are read."""
STEP = re.compile(r"ProfilerStep#\d+")
US = 1e-6

Spans = list[tuple[float, float]]
"""Disjoint intervals in order [µs]."""

# Names of kernels, the first match counts. cuBLAS calls its kernels nvjet, gemm or xmma; cuDNN's attention says sdpa;
# _forward, _queries and _keys are ours (kernels/attention/triton_dropout.py).
KERNELS = {
    "communication": re.compile(r"nccl|multimem|symm_mem|PtoP"),
    "attention": re.compile(r"flash|fmha|sdpa|attention|^_(forward|queries|keys)$", re.I),
    "matmul": re.compile(r"gemm|nvjet|xmma|cutlass|cublas|splitk|scaled_mm|triton_tem|matmul", re.I),
    "optimizer": re.compile(r"adam", re.I),
}
OPERATORS = {
    "communication": re.compile(r"^(gloo:|c10d::|_c10d_functional::)"),
    "attention": re.compile(r"^aten::.*(attention|flash)"),
    "matmul": re.compile(r"^aten::(mm|addmm|bmm|baddbmm|_?(scaled|grouped)_mm)\b"),
    "optimizer": re.compile(r"^aten::_fused_adam"),
    "elementwise": re.compile(r"^aten::"),
}
ORDER = ("matmul", "attention", "optimizer", "elementwise", "copies")
"""Arithmetic first, in the order in which an instant is given away."""


@dataclass(frozen=True)
class Breakdown:
    """The mean step of a trace."""

    steps: int
    step_s: float
    parts: dict[str, float]
    """Seconds a step by kind; they add up to :attr:`step_s`."""
    hidden_s: float
    """Communication behind arithmetic, in seconds a step; in none of :attr:`parts`."""

    @property
    def row(self) -> dict[str, float]:
        """The same for trackers: ``step_s``, ``compute_s``, ``data_exposed_s`` and the parts."""
        compute = sum(self.parts[kind] for kind in ORDER)
        named = {f"{kind}_s": seconds for kind, seconds in self.parts.items() if kind not in ("data", "communication")}
        return named | {
            "step_s": self.step_s,
            "compute_s": compute,
            "data_exposed_s": self.parts["data"],
            "communication_exposed_s": self.parts["communication"],
            "communication_hidden_s": self.hidden_s,
        }

    def __str__(self) -> str:
        """A table, a line for each kind that took time."""
        said = {"communication": "exposed communication", "elementwise": "elementwise and other"}
        lines = [
            f"  {said.get(kind, kind):<24}{1e3 * seconds:>10.3f} ms {seconds / self.step_s:>7.1%}"
            for kind, seconds in self.parts.items()
            if seconds
        ]
        if self.hidden_s:
            lines.append(f"  ({1e3 * self.hidden_s:.3f} ms of communication are hidden behind arithmetic)")
        return "\n".join([f"{self.steps} steps traced, {1e3 * self.step_s:.3f} ms each:", *lines])


def breakdown(trace: Mapping[str, Any]) -> Breakdown:
    """The mean over the profiler's steps in ``trace``; raises :class:`ValueError` for a trace without any."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    windows = [_span(e) for e in events if e.get("cat") == "user_annotation" and STEP.fullmatch(e["name"])]
    if not windows:
        raise ValueError("the trace has no ProfilerStep in it")
    left = union(windows)
    total = length(left)
    kinds: dict[str, Spans] = {kind: [] for kind in (*ORDER, "communication", "data")}
    on_device = any(event.get("cat") == "kernel" for event in events)
    kind_of: Callable[[str, str], str | None] = _device_kind if on_device else _host_kind
    for event in events:
        name, cat = event["name"], event.get("cat", "")
        kind = "data" if (name, cat) == (READS, "user_annotation") else kind_of(name, cat)
        if kind is not None:
            kinds[kind].append(_span(event))
    spans = {kind: union(found) for kind, found in kinds.items()}
    busy = union(span for kind in ORDER for span in spans[kind])
    order = (*ORDER, "communication", "data") if on_device else ("data", *ORDER, "communication")
    parts: dict[str, float] = {}
    for kind in order:
        rest = subtract(left, spans[kind])
        parts[kind] = (length(left) - length(rest)) * US / len(windows)
        left = rest
    parts["idle"] = length(left) * US / len(windows)
    hidden = length(spans["communication"]) - length(subtract(spans["communication"], busy))
    return Breakdown(len(windows), total * US / len(windows), parts, hidden * US / len(windows))


def _device_kind(name: str, cat: str) -> str | None:
    if cat in ("gpu_memcpy", "gpu_memset"):
        return "communication" if KERNELS["communication"].search(name) else "copies"
    if cat != "kernel":
        return None
    return next((kind for kind, pattern in KERNELS.items() if pattern.search(name)), "elementwise")


def _host_kind(name: str, cat: str) -> str | None:
    if cat not in ("cpu_op", "user_annotation"):
        return None
    return next((kind for kind, pattern in OPERATORS.items() if pattern.search(name)), None)


# -- intervals --------------------------------------------------------------------------------------------------------


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The same instants as disjoint intervals in order; empty ones are dropped."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    return merged


def subtract(spans: Spans, others: Spans) -> Spans:
    """The instants of ``spans`` that are in none of ``others``; both disjoint and in order."""
    rest: Spans = []
    first = 0
    for begin, end in spans:
        start = begin
        while first < len(others) and others[first][1] <= start:
            first += 1
        i = first
        while i < len(others) and others[i][0] < end:
            if others[i][0] > start:
                rest.append((start, others[i][0]))
            start = others[i][1]
            i += 1
        if start < end:
            rest.append((start, end))
    return rest


def length(spans: Sequence[tuple[float, float]]) -> float:
    """How long disjoint intervals last together."""
    return sum(end - start for start, end in spans)


BEFORE = 3
"""Steps of a session before the traced ones."""


class Profile:
    """Traces train.profile steps into ``runs/NAME/profile/rank-R.json.gz``, for Perfetto or chrome://tracing."""

    def __init__(self, run: RunConfig, context: DistributedContext):
        self.steps, self.device = run.train.profile, context.device
        self.path = run.folder / "profile" / f"rank-{context.rank}.json.gz"
        self._seen = 0
        self._profiler: profile | None = None

    def after_step(self) -> Breakdown | None:
        """A step was taken; where the time of the traced ones went, once the last of them is over."""
        self._seen += 1
        if not self.steps or self._seen > BEFORE + self.steps:
            return None
        if self._seen == BEFORE - 1:
            self._profiler = self._start()
            return None
        if self._profiler is None:
            return None
        if self._seen not in (BEFORE, BEFORE + self.steps):
            self._profiler.step()
            return None
        self._settle()  # so that the device's work of the traced steps is all of it within them
        self._profiler.step()
        if self._seen == BEFORE:
            return None
        self.close()
        with gzip.open(self.path, "rt", encoding="utf-8") as file:
            return breakdown(json.load(file))

    def close(self) -> None:
        """Stop, also in the middle."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _start(self) -> profile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=lambda it: _export(it, self.path),
            acc_events=True,
        )
        profiler.start()
        return profiler

    def _settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _export(profiler: profile, path: Path) -> None:
    profiler.export_chrome_trace(str(path))

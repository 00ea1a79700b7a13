"""Profiles a few steps with torch.profiler: a trace file, and a table of where the time went.

The traced steps follow three warm-up steps: the first compiles and allocates, the third starts the profiler. Only
traced steps are slower, and only at both ends of the trace does the host wait for the device.

The breakdown attributes each instant of a step to the first of these that was active; on a GPU by what the device ran,
on a CPU by its operators:

    data             reading and copying the samples (on a GPU: only while the device is otherwise idle)
    matmul           matrix products                      attention      attention kernels
    optimizer        Adam                                 elementwise    every other operator
    copies           device memory copies
    communication    a collective that is *exposed*: no arithmetic was running at the same time
    idle             none of these: the device waits for the host (on a CPU: Python)

So exposed communication is |∪ collectives − ∪ arithmetic|; communication hidden behind arithmetic is listed separately.
The input is the Chrome trace format that the profiler writes, so traces of other machines work too.
"""

import gzip
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from colonnade.config import RunConfig
from colonnade.parallel.distributed_context import DistributedContext

READ_SAMPLES = "reads samples"
"""Name of the profiler annotation around the reading of samples."""
STEP_NAME = re.compile(r"ProfilerStep#\d+")
US = 1e-6
WARMUP_STEPS = 3
"""Steps of this process before the traced ones."""

Spans = list[tuple[float, float]]
"""Disjoint intervals in order [µs]."""

# Names of kernels; the first match counts. cuBLAS calls its kernels nvjet, gemm or xmma; cuDNN's attention has sdpa in
# the name; _forward, _queries and _keys are ours (kernels/triton_dropout.py).
KERNEL_PATTERNS = {
    "communication": re.compile(r"nccl|multimem|symm_mem|PtoP"),
    "attention": re.compile(r"flash|fmha|sdpa|attention|^_(forward|queries|keys)$", re.I),
    "matmul": re.compile(r"gemm|nvjet|xmma|cutlass|cublas|splitk|scaled_mm|triton_tem|matmul", re.I),
    "optimizer": re.compile(r"adam", re.I),
}
OPERATOR_PATTERNS = {
    "communication": re.compile(r"^(gloo:|c10d::|_c10d_functional::)"),
    "attention": re.compile(r"^aten::.*(attention|flash)"),
    "matmul": re.compile(r"^aten::(mm|addmm|bmm|baddbmm|_?(scaled|grouped)_mm)\b"),
    "optimizer": re.compile(r"^aten::_fused_adam"),
    "elementwise": re.compile(r"^aten::"),
}
COMPUTE_KINDS = ("matmul", "attention", "optimizer", "elementwise", "copies")
"""Arithmetic and copies, in order of priority for an instant."""


@dataclass(frozen=True)
class Breakdown:
    """Mean time of a traced step by kind of work."""

    steps: int
    step_s: float
    parts: dict[str, float]
    """Seconds per step by kind; they add up to :attr:`step_s`."""
    hidden_s: float
    """Seconds per step of communication hidden behind arithmetic; not in :attr:`parts`."""

    @property
    def row(self) -> dict[str, float]:
        """Metrics for trackers: ``step_s``, ``compute_s``, ``data_exposed_s`` and the parts."""
        compute = sum(self.parts[kind] for kind in COMPUTE_KINDS)
        named = {f"{kind}_s": seconds for kind, seconds in self.parts.items() if kind not in ("data", "communication")}
        return named | {
            "step_s": self.step_s,
            "compute_s": compute,
            "data_exposed_s": self.parts["data"],
            "communication_exposed_s": self.parts["communication"],
            "communication_hidden_s": self.hidden_s,
        }

    def __str__(self) -> str:
        """A table with a line for each kind that took time."""
        labels = {"communication": "exposed communication", "elementwise": "elementwise and other"}
        lines = [
            f"  {labels.get(kind, kind):<24}{1e3 * seconds:>10.3f} ms {seconds / self.step_s:>7.1%}"
            for kind, seconds in self.parts.items()
            if seconds
        ]
        if self.hidden_s:
            lines.append(f"  ({1e3 * self.hidden_s:.3f} ms of communication are overlapped with computation)")
        return "\n".join([f"{self.steps} steps traced, {1e3 * self.step_s:.3f} ms each:", *lines])


def breakdown(trace: Mapping[str, Any]) -> Breakdown:
    """The mean over the profiler's steps in ``trace``; raises :class:`ValueError` without any."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    windows = [_span(e) for e in events if e.get("cat") == "user_annotation" and STEP_NAME.fullmatch(e["name"])]
    if not windows:
        raise ValueError("the trace contains no ProfilerStep")
    remaining = union(windows)
    total = total_length(remaining)
    kinds: dict[str, Spans] = {kind: [] for kind in (*COMPUTE_KINDS, "communication", "data")}
    on_device = any(event.get("cat") == "kernel" for event in events)
    kind_of: Callable[[str, str], str | None] = _device_kind if on_device else _host_kind
    for event in events:
        name, cat = event["name"], event.get("cat", "")
        kind = "data" if (name, cat) == (READ_SAMPLES, "user_annotation") else kind_of(name, cat)
        if kind is not None:
            kinds[kind].append(_span(event))
    spans = {kind: union(kind_spans) for kind, kind_spans in kinds.items()}
    arithmetic = union(span for kind in COMPUTE_KINDS for span in spans[kind])
    order = (*COMPUTE_KINDS, "communication", "data") if on_device else ("data", *COMPUTE_KINDS, "communication")
    parts: dict[str, float] = {}
    for kind in order:
        rest = subtract(remaining, spans[kind])
        parts[kind] = (total_length(remaining) - total_length(rest)) * US / len(windows)
        remaining = rest
    parts["idle"] = total_length(remaining) * US / len(windows)
    hidden = total_length(spans["communication"]) - total_length(subtract(spans["communication"], arithmetic))
    return Breakdown(len(windows), total * US / len(windows), parts, hidden * US / len(windows))


def _device_kind(name: str, cat: str) -> str | None:
    if cat in ("gpu_memcpy", "gpu_memset"):
        return "communication" if KERNEL_PATTERNS["communication"].search(name) else "copies"
    if cat != "kernel":
        return None
    return next((kind for kind, pattern in KERNEL_PATTERNS.items() if pattern.search(name)), "elementwise")


def _host_kind(name: str, cat: str) -> str | None:
    if cat not in ("cpu_op", "user_annotation"):
        return None
    return next((kind for kind, pattern in OPERATOR_PATTERNS.items() if pattern.search(name)), None)


# -- intervals --------------------------------------------------------------------------------------------------------


def _span(event: Mapping[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))


def union(spans: Iterable[tuple[float, float]]) -> Spans:
    """The union of intervals as disjoint intervals in order; empty ones are dropped."""
    merged: Spans = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        elif end > start:
            merged.append((start, end))
    return merged


def subtract(spans: Spans, others: Spans) -> Spans:
    """The parts of ``spans`` outside ``others``; both are disjoint and in order."""
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


def total_length(spans: Sequence[tuple[float, float]]) -> float:
    """The total length of disjoint intervals."""
    return sum(end - start for start, end in spans)


class StepProfiler:
    """Traces train.profile steps into ``runs/NAME/profile/rank-R.json.gz``, for Perfetto or chrome://tracing."""

    def __init__(self, run: RunConfig, context: DistributedContext):
        self.steps, self.device = run.train.profile, context.device
        self.path = run.folder / "profile" / f"rank-{context.rank}.json.gz"
        self._steps_seen = 0
        self._profiler: profile | None = None

    def after_step(self) -> Breakdown | None:
        """Call after each step; returns the breakdown after the last traced one."""
        self._steps_seen += 1
        if not self.steps or self._steps_seen > WARMUP_STEPS + self.steps:
            return None
        if self._steps_seen == WARMUP_STEPS - 1:
            self._profiler = self._start()
            return None
        if self._profiler is None:
            return None
        if self._steps_seen not in (WARMUP_STEPS, WARMUP_STEPS + self.steps):
            self._profiler.step()
            return None
        if self.device.type == "cuda":  # the trace gets all device work of its steps
            torch.cuda.synchronize(self.device)
        self._profiler.step()
        if self._steps_seen == WARMUP_STEPS:
            return None
        self.close()
        with gzip.open(self.path, "rt", encoding="utf-8") as file:
            return breakdown(json.load(file))

    def close(self) -> None:
        """Stop the profiler, also in the middle of a trace."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _start(self) -> profile:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device.type == "cuda")
        profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(self.path)),
            acc_events=True,
        )
        profiler.start()
        return profiler

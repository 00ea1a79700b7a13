"""CUDA graph of a step's forward and backward passes: captured once, then replayed.

    first two steps   run eagerly on a side stream: they compile, and choose their kernels
    third step        is captured, which runs nothing, and replayed
    later steps       copy their inputs into the captured graph's static inputs and launch once

The inputs that change from step to step are tensors: the samples, the loss divisor, the dropout keys. Plain numbers
that select kernels (the longest sequence, dropout rates) are baked into the graph, so each combination of shapes and
numbers has its own graph; all share one memory pool. Gradients are always written to the memory of the capture and are
assigned to ``.grad`` after a replay. Norm, clip, AdamW and the schedule run eagerly: they are a handful of launches,
which the host issues while the device is still busy with the graph. The next replay overwrites a graph's outputs, so
the loss is copied out, and gradients are gone after the optimizer step.

(NVIDIA 2019; the host needs 12 ms for 5,000 launches, in a step of 492 ms of GPT-2 1.2B, docs/log.md.)
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colonnade.data import Batch
from colonnade.errors import ConfigError
from colonnade.parallel.cuda_graphs import capture
from colonnade.train.model_inputs import StepContext

WARMUP_STEPS = 2
"""Eager steps of each shape before its capture."""

ForwardBackward = Callable[[Batch, Tensor, StepContext], Tensor]
"""Forward and backward of a micro-batch with its loss divided by the tensor; returns the loss sum."""


@dataclass(frozen=True)
class CapturedGraph:
    """A CUDA graph with its static inputs and outputs."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    loss_sum: Tensor
    gradients: list[tuple[Tensor, Tensor]]
    """(tensor, its gradient in the graph's memory)."""


class GraphedForwardBackward:
    """Runs forward and backward eagerly at first, then as a CUDA graph for each set of shapes."""

    def __init__(self, run: ForwardBackward, grad_tensors: Iterable[Tensor], device: torch.device):
        """``grad_tensors`` are all tensors that may have a gradient after ``run``; none has one before.

        Raises :class:`ConfigError` for a device without CUDA graphs.
        """
        check_device(device)
        self._run, self._grad_tensors = run, list({id(x): x for x in grad_tensors}.values())
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._eager_steps: Counter[object] = Counter()
        self._graphs: dict[object, CapturedGraph] = {}
        self.peak_bytes = 0
        """Peak memory during captures; replays do not show it."""

    def __call__(self, batch: Batch, divisor: Tensor, step: StepContext) -> Tensor:
        """Same result as the eager function."""
        assert all(x.grad is None for x in self._grad_tensors), "a replay overwrites gradients instead of adding"
        inputs = graph_inputs(batch, divisor, step)
        key = graph_key(batch, step, inputs)
        captured = self._graphs.get(key)
        if captured is None and self._eager_steps[key] < WARMUP_STEPS:
            self._eager_steps[key] += 1
            return self._run_eagerly(batch, divisor, step)
        if captured is None:
            captured = self._graphs[key] = self._capture(batch, step, inputs)
        for name, x in inputs.items():
            captured.inputs[name].copy_(x)
        captured.graph.replay()
        for x, gradient in captured.gradients:
            x.grad = gradient
        return captured.loss_sum.clone()

    def _run_eagerly(self, batch: Batch, divisor: Tensor, step: StepContext) -> Tensor:
        """Run on the capture stream: autograd stays on the stream on which it first ran."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            loss_sum = self._run(batch, divisor, step)
        current.wait_stream(self._stream)
        return loss_sum

    def _capture(self, batch: Batch, step: StepContext, inputs: dict[str, Tensor]) -> CapturedGraph:
        inputs = {name: x.clone() for name, x in inputs.items()}
        with capture(self._pool, self._stream) as graph:
            loss_sum = self._run(*with_graph_inputs(batch, step, inputs))
        self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self._stream.device))
        gradients = [(x, x.grad) for x in self._grad_tensors if x.grad is not None]
        return CapturedGraph(graph, inputs, loss_sum, gradients)


def check_device(device: torch.device) -> None:
    """Raise :class:`ConfigError` for a device without CUDA graphs."""
    if device.type != "cuda":
        raise ConfigError(f"train.cuda_graph needs a GPU, but this run is on the {device.type}; remove it")


def graph_inputs(batch: Batch, divisor: Tensor, step: StepContext) -> dict[str, Tensor]:
    """The tensors of a step by name, which a replay copies into the graph's static inputs."""
    inputs = {name: x for name, x in vars(batch).items() if isinstance(x, Tensor)} | {"divisor": divisor}
    if isinstance(step.order_loss_weight, Tensor):
        inputs["order_loss_weight"] = step.order_loss_weight
    if step.dropout is not None:
        inputs["keys"] = step.dropout.keys
    return inputs


def with_graph_inputs(batch: Batch, step: StepContext, inputs: dict[str, Tensor]) -> tuple[Batch, Tensor, StepContext]:
    """(batch, divisor, step) with the tensors of :func:`graph_inputs` replaced by ``inputs``."""
    batch_tensors: dict[str, Any] = {name: x for name, x in inputs.items() if name in vars(batch)}
    step = replace(step, order_loss_weight=inputs.get("order_loss_weight", step.order_loss_weight))
    if step.dropout is not None:
        step = replace(step, dropout=replace(step.dropout, keys=inputs["keys"]))
    return replace(batch, **batch_tensors), inputs["divisor"], step


def graph_key(batch: Batch, step: StepContext, inputs: dict[str, Tensor]) -> object:
    """The shapes, types and plain numbers that a captured graph is specialised for."""
    shapes = tuple((name, x.shape, x.dtype) for name, x in inputs.items())
    order_weight = None if isinstance(step.order_loss_weight, Tensor) else step.order_loss_weight
    rates = None if step.dropout is None else step.dropout.rates
    return shapes, batch.longest, batch.equal, batch.first, step.label_smoothing, order_weight, rates

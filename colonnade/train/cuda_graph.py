"""A step's forward and backward passes as one CUDA graph, recorded once and replayed.

    first two steps   passes run as ever, on a stream of their own: they compile, and find their kernels
    third step        the passes are recorded, which runs nothing, and replayed
    later steps       what differs from step to step is copied to where the recording reads it; one launch

What differs is all tensors: the samples, what the loss is divided by, the keys of the dropout. What is recorded with
them are numbers that make other kernels (the longest sequence, the rates), so that each set of shapes and numbers has a
recording of its own; they share memory. The gradients always lie where the recording left them and are handed to
whoever takes them. Norm, clip, AdamW and the schedule follow as ever: they are a handful of launches, while the device
is still busy with the graph, and reading a recorded loss or gradient later than the next step is impossible, because
the loss is copied out and gradients are gone when the optimizer has moved.

(NVIDIA 2019; what the host needs for 5,000 launches is 12 ms of a step of 492 ms of GPT-2 1.2B, docs/log.md.)
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from colonnade.data import Batch
from colonnade.errors import ConfigError
from colonnade.parallel.cuda_graphs import capture
from colonnade.train.model_inputs import StepContext

WARMUP_STEPS = 2
"""Steps of each shape that run before it is recorded."""

ForwardBackward = Callable[[Batch, Tensor, StepContext], Tensor]
"""Forward and backward of a micro-batch, its loss divided by the tensor; the loss sum."""


@dataclass(frozen=True)
class CapturedGraph:
    """One graph with all that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: dict[str, Tensor]
    loss_sum: Tensor
    gradients: list[tuple[Tensor, Tensor]]
    """Each tensor that has one, and where it lies."""


class GraphedForwardBackward:
    """Passes that are replayed where they can be."""

    def __init__(self, passes: ForwardBackward, graded: Iterable[Tensor], device: torch.device):
        """``graded`` are all tensors that may have a gradient when ``passes`` are over; none has one before.

        Raises :class:`ConfigError` for a device that has no graphs.
        """
        check_device(device)
        self._passes, self._graded = passes, list({id(x): x for x in graded}.values())
        self._stream, self._pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
        self._seen: Counter[object] = Counter()
        self._recorded: dict[object, CapturedGraph] = {}
        self.peak_bytes = 0
        """The most memory in use while anything was recorded, which no replay shows."""

    def __call__(self, batch: Batch, divisor: Tensor, terms: StepContext) -> Tensor:
        """As the passes."""
        assert all(x.grad is None for x in self._graded), "a replay writes gradients, and adds none up"
        inputs = graph_inputs(batch, divisor, terms)
        key = graph_key(batch, terms, inputs)
        recording = self._recorded.get(key)
        if recording is None and self._seen[key] < WARMUP_STEPS:
            self._seen[key] += 1
            return self._beside(batch, divisor, terms)
        if recording is None:
            recording = self._recorded[key] = self._record(batch, terms, inputs)
        for name, x in inputs.items():
            recording.inputs[name].copy_(x)
        recording.graph.replay()
        for x, gradient in recording.gradients:
            x.grad = gradient
        return recording.loss_sum.clone()

    def _beside(self, batch: Batch, divisor: Tensor, terms: StepContext) -> Tensor:
        """Run the passes on the stream on which they will be recorded: autograd keeps to the stream it began on."""
        now = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(now)
        with torch.cuda.stream(self._stream):
            loss_sum = self._passes(batch, divisor, terms)
        now.wait_stream(self._stream)
        return loss_sum

    def _record(self, batch: Batch, terms: StepContext, inputs: dict[str, Tensor]) -> CapturedGraph:
        inputs = {name: x.clone() for name, x in inputs.items()}
        with capture(self._pool, self._stream) as graph:
            loss_sum = self._passes(*with_graph_inputs(batch, terms, inputs))
        self.peak_bytes = max(self.peak_bytes, torch.cuda.max_memory_allocated(self._stream.device))
        gradients = [(x, x.grad) for x in self._graded if x.grad is not None]
        return CapturedGraph(graph, inputs, loss_sum, gradients)


def check_device(device: torch.device) -> None:
    """Raise :class:`ConfigError` for a device that has no graphs."""
    if device.type != "cuda":
        raise ConfigError(f"train.cuda_graph needs a GPU, and this run is on the {device.type}; leave it out")


def graph_inputs(batch: Batch, divisor: Tensor, terms: StepContext) -> dict[str, Tensor]:
    """By name the tensors of a step, which a replay copies in."""
    found = {name: x for name, x in vars(batch).items() if isinstance(x, Tensor)} | {"divisor": divisor}
    if isinstance(terms.order_loss_weight, Tensor):
        found["order_weight"] = terms.order_loss_weight
    if terms.noise is not None:
        found["keys"] = terms.noise.keys
    return found


def with_graph_inputs(batch: Batch, terms: StepContext, inputs: dict[str, Tensor]) -> tuple[Batch, Tensor, StepContext]:
    """What the passes are given when ``inputs`` stand in for the :func:`graph_inputs` tensors."""
    mine = {name: x for name, x in inputs.items() if name in vars(batch)}
    terms = replace(terms, order_loss_weight=inputs.get("order_weight", terms.order_loss_weight))
    if terms.noise is not None:
        terms = replace(terms, noise=replace(terms.noise, keys=inputs["keys"]))
    return replace(batch, **mine), inputs["divisor"], terms


def graph_key(batch: Batch, terms: StepContext, inputs: dict[str, Tensor]) -> object:
    """What a recording holds for: shapes, types and numbers."""
    shapes = tuple((name, x.shape, x.dtype) for name, x in inputs.items())
    weight = None if isinstance(terms.order_loss_weight, Tensor) else terms.order_loss_weight
    rates = None if terms.noise is None else terms.noise.rates
    return shapes, batch.longest, batch.equal, batch.first, terms.smoothing, weight, rates

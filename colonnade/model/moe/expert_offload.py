"""Expert offload: experts in host memory, those of a few layers on the device; for models larger than a GPU's memory.

    layer i computes   |   experts of layers i+1 … i+k−1 are copied in, on a second stream, each into one of k buffers

Layers run in turn, and after the last comes the first (of the next pass), so the next ones are known. A buffer is
reused once the next layer has asked for its weights: all kernels on its old contents are queued by then, and the copy
waits for their end, not for the host. With one buffer nothing overlaps.

A pass of many tokens (prefill, a batch) needs most experts of each layer, so all of them are copied. A pass of few
tokens needs few: with at most half as many choices as experts nothing is prefetched, and the layer waits for the router
and then for the chosen experts. These use one buffer of the ring until the next large pass.

On a CPU the same buffers are filled by plain copies, which saves nothing: it tests this without a GPU.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from colonnade.kernels.experts.quantised import QuantisedWeights
from colonnade.kernels.experts.reference import Weights
from colonnade.model.moe.experts import Experts


class OffloadedExperts:
    """The experts of ``buffers`` layers on ``device``; the weights of all ``layers`` are in host memory."""

    def __init__(self, layers: Sequence[Experts], buffers: int, device: torch.device):
        """Make each of ``layers`` compute with a buffer. There must be fewer buffers than layers."""
        assert 0 < buffers < len(layers), (buffers, len(layers))
        self._asynchronous = device.type == "cuda"
        if self._asynchronous:
            for layer in layers:
                layer.pin()
        self._host = [layer.stored for layer in layers]
        self._buffers = [self._host[0].map(partial(torch.empty_like, device=device)) for _ in range(buffers)]
        self._free = deque(range(buffers))
        self._partial: int | None = None
        """The buffer for chosen experts alone."""
        self._loaded: deque[tuple[int, int]] = deque()
        """(layer, buffer) of loaded or loading layers, in the order in which they will run."""
        if self._asynchronous:
            self._stream = torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))  # the buffers' memory may still be in use
            self._copied, self._released = ([torch.cuda.Event() for _ in self._buffers] for _ in range(2))
        for index, layer in enumerate(layers):
            layer.fetch = partial(self._weights, index)

    @property
    def size_bytes(self) -> int:
        """Memory of the buffers on the device [bytes]."""
        return sum(w.nbytes for buffer in self._buffers for w in buffer.tensors)

    def _weights(self, layer: int, ends_e: Tensor | None, rows: int) -> Weights | QuantisedWeights:
        """A layer's experts for kernels launched now; at least those with some of the ``rows`` by ``ends_e``."""
        if ends_e is not None and 2 * rows <= len(ends_e):
            return self._chosen(layer, ends_e)
        if self._partial is not None:
            self._release(self._partial)
            self._partial = None
        while self._loaded and self._loaded[0][0] != layer:
            self._release(self._loaded.popleft()[1])
        if not self._loaded:
            self._load(layer)
        buffer = self._loaded[0][1]
        self._wait_for_copy(buffer)
        while self._free:
            self._load((self._loaded[-1][0] + 1) % len(self._host))
        return self._buffers[buffer]

    def _chosen(self, layer: int, ends_e: Tensor) -> Weights | QuantisedWeights:
        """Copy only the experts that have rows, unless the whole layer is loaded."""
        if (loaded := dict(self._loaded).get(layer)) is not None:
            self._wait_for_copy(loaded)
            return self._buffers[loaded]
        if self._partial is None:
            self._partial = self._free.popleft() if self._free else self._loaded.pop()[1]
            self._wait_for_copy(self._partial)  # a copy in flight must not overwrite what follows
        ends = ends_e.tolist()
        for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if end > start:
                self._copy(layer, self._partial, e)
        return self._buffers[self._partial]

    def _wait_for_copy(self, buffer: int) -> None:
        """Make kernels launched from now on wait for the copy into this buffer."""
        if self._asynchronous:
            torch.cuda.current_stream(self._stream.device).wait_event(self._copied[buffer])

    def _release(self, buffer: int) -> None:
        """Free a buffer: all kernels that read it have been launched."""
        if self._asynchronous:
            self._released[buffer].record(torch.cuda.current_stream(self._stream.device))
        self._free.append(buffer)

    def _load(self, layer: int) -> None:
        """Start to copy a layer's experts into a free buffer."""
        buffer = self._free.popleft()
        if self._asynchronous:
            self._stream.wait_event(self._released[buffer])
            with torch.cuda.stream(self._stream):
                self._copy(layer, buffer)
            self._copied[buffer].record(self._stream)
        else:
            self._copy(layer, buffer)
        self._loaded.append((layer, buffer))

    @torch.no_grad()
    def _copy(self, layer: int, buffer: int, expert: int | None = None) -> None:
        """Copy all experts of a layer, or one of them, into a buffer."""
        part = slice(None) if expert is None else expert
        for target, source in zip(self._buffers[buffer].tensors, self._host[layer].tensors, strict=True):
            target[part].copy_(source[part], non_blocking=True)


def expert_modules(model: nn.Module) -> list[Experts]:
    """The experts of each layer, in the order of the forward pass."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def unquantised_bytes(part: nn.Module) -> int:
    """Memory of a module's parameters and buffers [bytes]."""
    return sum(x.nbytes for x in (*part.parameters(), *part.buffers()))


CountBytes = Callable[[nn.Module], int]
"""Returns the memory of a module's weights [bytes]."""


def device_bytes(model: nn.Module, layers_on_device: int | None = None, weigh: CountBytes = unquantised_bytes) -> int:
    """Memory on the device of this rank's weights with ``layers_on_device`` layers' experts there (None: all) [bytes].

    The model may be on the meta device.
    """
    layers, whole = expert_modules(model), weigh(model)
    if layers_on_device is None or layers_on_device >= len(layers):
        return whole
    return whole - (len(layers) - layers_on_device) * weigh(layers[0])

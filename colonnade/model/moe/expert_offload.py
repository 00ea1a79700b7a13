"""Experts that wait in host memory, those of a few layers on the device at a time: models larger than a GPU's memory.

    layer i computes   |   experts of layers i+1 … i+k−1 come in, on a second stream, each into one of k buffers

Layers are asked for in turn, and after the last comes the first (of the next pass), so what will be needed next is
known. A buffer is filled anew when the next layer has been asked for: all work on the one before is then in the
device's queue, and the copy waits for its end, not for the host. With one buffer nothing overlaps.

A pass of many tokens (prefill, a batch) needs most experts of each layer, so all of them come. One of few tokens needs
few: where there are at most half as many choices as experts, nothing comes ahead, and the layer waits until the router
has spoken, and for the experts that were chosen. They take a buffer from the ring until the next large pass.

On a CPU the same buffers are filled by plain copies, which saves nothing: it is how this is tested without a GPU.
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
    """``buffers`` layers' experts on ``device``; the weights of ``layers`` stay where they are, in host memory."""

    def __init__(self, layers: Sequence[Experts], buffers: int, device: torch.device):
        """From now on each of ``layers`` computes with what is in a buffer. There must be fewer buffers than layers."""
        assert 0 < buffers < len(layers), (buffers, len(layers))
        self._moves = device.type == "cuda"
        if self._moves:
            for layer in layers:
                layer.pin()
        self._homes = [layer.stored for layer in layers]
        self._buffers = [self._homes[0].map(partial(torch.empty_like, device=device)) for _ in range(buffers)]
        self._free = deque(range(buffers))
        self._few: int | None = None
        """The buffer that is used for chosen experts alone."""
        self._here: deque[tuple[int, int]] = deque()
        """(layer, buffer) of what is there or on its way, in the order in which it will be asked for."""
        if self._moves:
            self._in = torch.cuda.Stream(device)
            self._in.wait_stream(torch.cuda.current_stream(device))  # whose memory the buffers were before
            self._came, self._left = ([torch.cuda.Event() for _ in self._buffers] for _ in range(2))
        for place, layer in enumerate(layers):
            layer.fetch = partial(self._at, place)

    @property
    def size_bytes(self) -> int:
        """Of the buffers on the device."""
        return sum(w.nbytes for buffer in self._buffers for w in buffer.tensors)

    def _at(self, place: int, ends_e: Tensor | None, rows: int) -> Weights | QuantisedWeights:
        """The experts of the layer at this place, for work that is given to the device now; those that have some of
        the ``rows`` by ``ends_e`` at least.
        """
        if ends_e is not None and 2 * rows <= len(ends_e):
            return self._chosen(place, ends_e)
        if self._few is not None:
            self._leave(self._few)
            self._few = None
        while self._here and self._here[0][0] != place:
            self._leave(self._here.popleft()[1])
        if not self._here:
            self._fetch(place)
        buffer = self._here[0][1]
        self._await(buffer)
        while self._free:
            self._fetch((self._here[-1][0] + 1) % len(self._homes))
        return self._buffers[buffer]

    def _chosen(self, place: int, ends_e: Tensor) -> Weights | QuantisedWeights:
        """Only the experts that have rows are brought, unless all are there already."""
        if (there := dict(self._here).get(place)) is not None:
            self._await(there)
            return self._buffers[there]
        if self._few is None:
            self._few = self._free.popleft() if self._free else self._here.pop()[1]
            self._await(self._few)  # what is on its way there must not come later than what follows
        ends = ends_e.tolist()
        for e, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if end > start:
                self._copy(place, self._few, e)
        return self._buffers[self._few]

    def _await(self, buffer: int) -> None:
        """Work that is given to the device from now on finds in this buffer what was fetched into it."""
        if self._moves:
            torch.cuda.current_stream(self._in.device).wait_event(self._came[buffer])

    def _leave(self, buffer: int) -> None:
        """All work on what is in this buffer has been given to the device."""
        if self._moves:
            self._left[buffer].record(torch.cuda.current_stream(self._in.device))
        self._free.append(buffer)

    def _fetch(self, place: int) -> None:
        """Have the experts of this layer come into a free buffer."""
        buffer = self._free.popleft()
        if self._moves:
            self._in.wait_event(self._left[buffer])
            with torch.cuda.stream(self._in):
                self._copy(place, buffer)
            self._came[buffer].record(self._in)
        else:
            self._copy(place, buffer)
        self._here.append((place, buffer))

    @torch.no_grad()
    def _copy(self, place: int, buffer: int, expert: int | None = None) -> None:
        """All experts of a layer, or one of them, into a buffer."""
        part = slice(None) if expert is None else expert
        for into, home in zip(self._buffers[buffer].tensors, self._homes[place].tensors, strict=True):
            into[part].copy_(home[part], non_blocking=True)


def experts_of(model: nn.Module) -> list[Experts]:
    """The layers' experts, in the order in which a forward pass comes to them."""
    return [module for module in model.modules() if isinstance(module, Experts)]


def plain_bytes(part: nn.Module) -> int:
    """Memory of the weights of a part of a model, as its tensors are [bytes]."""
    return sum(x.nbytes for x in (*part.parameters(), *part.buffers()))


Weigh = Callable[[nn.Module], int]
"""What says how much memory the weights of a part of a model take [bytes]."""


def device_bytes(model: nn.Module, resident: int | None = None, weigh: Weigh = plain_bytes) -> int:
    """What the weights of this rank's share of a model (it may be on the meta device) take on the device, if so many
    layers' experts are there at a time.
    """
    layers, whole = experts_of(model), weigh(model)
    if resident is None or resident >= len(layers):
        return whole
    return whole - (len(layers) - resident) * weigh(layers[0])

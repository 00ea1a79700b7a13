"""CUDA graph capture that allows collectives, and destruction of all graphs before their process groups.

A captured collective keeps its communicator in use until the graph is destroyed; NCCL waits for that without a limit
when the communicator is destroyed (pytorch issue 115388).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

_LIVE: WeakSet[torch.cuda.CUDAGraph] = WeakSet()


@contextmanager
def capture(pool: Any = None, stream: torch.cuda.Stream | None = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Capture this thread's kernel launches, in the memory ``pool``, on ``stream`` (default: a new one)."""
    graph = torch.cuda.CUDAGraph()
    _LIVE.add(graph)
    # thread_local: other threads, such as NCCL's watchdog, may make calls that a capture forbids.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield graph


def destroy_graphs() -> None:
    """Destroy all graphs of :func:`capture`; they cannot be replayed afterwards."""
    for graph in list(_LIVE):
        graph.reset()
    _LIVE.clear()

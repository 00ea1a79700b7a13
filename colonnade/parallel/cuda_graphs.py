"""CUDA graphs that may hold collectives: they must be gone before the groups that they talk over.

A recorded collective keeps its communicator in use until the graph is destroyed, whoever still refers to the graph;
NCCL waits for that without a limit when the communicator is destroyed (pytorch issue 115388).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch

_LIVE: WeakSet[torch.cuda.CUDAGraph] = WeakSet()


@contextmanager
def capture(pool: Any = None, stream: torch.cuda.Stream | None = None) -> Iterator[torch.cuda.CUDAGraph]:
    """Record what this thread launches meanwhile, in the memory ``pool``, on ``stream`` (else one of its own)."""
    graph = torch.cuda.CUDAGraph()
    _LIVE.add(graph)
    # Other threads, such as NCCL's watchdog, may go on calling what a recording forbids its own.
    with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
        yield graph


def end_graphs() -> None:
    """Destroy all graphs that :func:`capture` made: what remains of them cannot be replayed."""
    for graph in list(_LIVE):
        graph.reset()
    _LIVE.clear()

"""Chooses the size of the KV cache from the free memory, if neither ``pages`` nor ``cache_bytes`` is set.

    cache = share · (available − weights − activations of the largest step − CUDA graphs)

Available is what is free on the device, so that a second server on it takes its share of what the first has left. The
share is 0.9 on a GPU, a quarter on a CPU, where other programs need memory too, and 1 if the user has set
``memory_bytes``. On a CPU memory is taken only when a page is first written (:mod:`colonnade.model.cache`).
"""

from bisect import bisect_right
from dataclasses import replace

from colonnade.parallel.device_memory import usable_bytes
from colonnade.serve.memory_estimate import EngineSpec, scratch_pages

CACHE_SHARES = {"cuda": 0.9, "cpu": 0.25}
"""Share of the cache in the available memory that nothing else of the engine needs."""


def available_bytes(spec: EngineSpec, in_use: int = 0, engines: int = 1) -> int:
    """Memory that the engine may use [bytes]: serve.memory_bytes, or its share of the usable one plus ``in_use``.

    ``in_use`` is what it has already. Replicas share the memory of a CPU; what is left after loading is divided equally
    among ``engines`` of different models.
    """
    replicas = spec.serve.replicas if spec.device.type == "cpu" and spec.serve.replicas != "auto" else 1
    return spec.serve.memory_bytes or usable_bytes(spec.device) // (replicas * engines) + in_use


def size_cache(spec: EngineSpec, available: int) -> EngineSpec:
    """``spec`` with ``cache_bytes`` set, unless it has a size; for one whole context if not even a page fits."""
    if spec.serve.pages is not None or spec.serve.cache_bytes is not None:
        return spec
    context = -(-spec.model.context // (spec.resolved.page * spec.cp))
    pages = affordable_pages(spec, available) or context
    return replace(spec, serve=spec.serve.replace(cache_bytes=pages * spec.page_bytes))


def affordable_pages(spec: EngineSpec, available: int) -> int:
    """The maximum number of pages on a rank with memory within the share, at most those of ``max_requests`` whole
    contexts.

    Activations and graphs grow with the longest context that the pages can hold.
    """
    share = 1.0 if spec.serve.memory_bytes else CACHE_SHARES[spec.device.type]
    scratch = scratch_pages(spec.axes, spec.resolved)

    def total(pages: int) -> float:
        needs = spec.needs_with(pages + scratch)
        return needs.total - needs.cache + needs.cache / share

    most = spec.page_count - scratch
    return bisect_right(range(1, most + 1), available, key=total)

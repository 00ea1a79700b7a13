"""Attention over a cache split between ranks compared with attention over all keys; any device and dtype."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from colonnade.config import ModelConfig, Plan
from colonnade.kernels.attention import reference
from colonnade.model import KVCache
from colonnade.parallel.axis import Axes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.symmetric_memory import with_small_allreduce
from colonnade.serve.model_inputs import CacheShard, build_inputs
from colonnade.serve.work import Slice, Work

STEPS = {
    "decodes": [(37, 1), (0, 1), (5, 1), (200, 1)],
    "chunks": [(0, 20), (37, 1), (16, 16), (3, 5), (100, 33)],
    "alone": [(63, 1)],
    "prompts": [(0, 1), (0, 40)],
}
"""(cached tokens, new tokens) of each request: with and without cached keys, full and partial pages."""


Shape = tuple[int, int, int | None]
"""(head width, page tokens, window)."""


def step_errors(
    cp: int, device: str, dtypes: Sequence[torch.dtype], shapes: Sequence[Shape]
) -> dict[torch.dtype, dict[str, float]]:
    """On each rank: the relative error by norm of each step."""
    results: dict[torch.dtype, dict[str, float]] = {dtype: {} for dtype in dtypes}
    with DistributedContext.build(Plan(cp=cp), device) as context:
        axes = with_small_allreduce(context.axes.serving(), context.device)
        for dtype, (H, page, window), (step, requests) in itertools.product(dtypes, shapes, STEPS.items()):
            config = ModelConfig(
                vocab_size=8, layers=1, width=8, heads=6, kv_heads=2, head_width=H, ffn_width=8, context=512,
                window=window,
            )  # fmt: skip
            error = _error(config, axes, requests, page, dtype, context.device)
            results[dtype][f"{step}, {H} wide, pages of {page}, window {window}"] = error
    return results


def _error(
    config: ModelConfig, axes: Axes, requests: list[tuple[int, int]], page: int, dtype: torch.dtype, on: torch.device
) -> float:
    draw = torch.Generator().manual_seed(sum(itertools.chain(*requests)))
    counts = [-(-(start + new) // page) for start, new in requests]
    order = torch.randperm(sum(counts) + 3, generator=draw).tolist()
    local = -(-len(order) // axes.cp.size) + 1
    cache = KVCache(config, axes, pages=local, page_tokens=page, dtype=dtype, device=on)
    for pool in (*cache.k, *cache.v):
        pool.fill_(torch.nan)  # unwritten entries must not be read
    shard = CacheShard(axes.cp, cache, frozenset({config.window}))
    slices, new_qkv, exact = [], [], []
    for (start, new), count in zip(requests, counts, strict=True):
        pages, order = order[:count], order[count:]
        q, k, v = (_drawn(draw, start + new, n, config.head_width).to(dtype) for n in (config.heads, 2, 2))
        old = Slice(0, (0,) * start, tuple(pages), None)
        slots = torch.tensor(shard.slots(old), dtype=torch.int64, device=on)
        for pool, x in ((cache.k[0], k), (cache.v[0], v)):
            pool.flatten(0, 1)[slots] = x[:start].to(on)
        slices.append(Slice(start, (0,) * new, tuple(pages), None))
        new_qkv.append([x[start:] for x in (q, k, v)])
        exact.append(reference.attend(q[start:].double(), k.double(), v.double(), window=config.window).o)
    _, attend, _ = build_inputs(shard, Work(tuple(slices)))
    new_tokens = [torch.cat(parts).to(on) for parts in zip(*new_qkv, strict=True)]
    got, right = attend.at(0, config.window)(*new_tokens).double().cpu(), torch.cat(exact)
    return float((got - right).norm() / right.norm())


def _drawn(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, dtype=torch.float64)

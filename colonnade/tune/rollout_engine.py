"""The serving engine inside the trainer: on the same ranks, with its own copy of the weights and of a KV cache.

    refresh    the trainer's weights are copied into the engine's: gathered from FSDP's shards, adapters merged
    sample     the first tensor rank of each data rank schedules; the others run its work
    release    the KV cache's memory is freed while the trainer computes, unless the memory left free exceeds the peak
               of the last step: CUDA graphs contain the cache's addresses, and would be captured in each step

The engine has the tensor ranks of the trainer, so a tensor rank's shards are the same in both; each data rank has its
own engine for its own prompts.
"""

import json
from collections.abc import Callable
from typing import Any

import torch

from colonnade.config import RunConfig, ServeConfig, TuneConfig
from colonnade.data import Tokenizer
from colonnade.model import Transformer
from colonnade.model.exact_forward import PAGE_TOKENS
from colonnade.model.lora import is_adapter, merged_delta
from colonnade.parallel.axis import Axes
from colonnade.parallel.device_memory import usable_bytes
from colonnade.parallel.fsdp import unsharded
from colonnade.parallel.rendezvous import broadcast_text
from colonnade.serve.engine import Engine
from colonnade.train.out_of_memory import peak_bytes


class RolloutEngine:
    """The engine of one rank."""

    def __init__(self, run: RunConfig, tune: TuneConfig, tokenizer: Tokenizer, answers: int):
        """``answers``: the number of completions in a step on this data rank."""
        self._run, self._tokenizer = run, tokenizer
        self._requests, self._exact = min(answers, tune.requests), tune.exact
        self.engine: Engine | None = None
        self._peak_is_known = False
        """Whether a training step was taken, so that its peak memory is known."""

    def run(self, trained: Transformer, sample: Callable[[Engine], Any]) -> Any:
        """Calls ``sample`` with an engine that has the weights of ``trained``, on the first tensor rank; all ranks get
        its result.

        The result consists of JSON's types. Every rank calls this.
        """
        if self.engine is None:
            self.engine = self._build(trained)
        engine, ranks = self.engine, self.engine.model.axes.token_replicas
        engine.update_weights(lambda own: copy_weights(trained, own))
        result = None
        if ranks.rank == 0:
            try:
                result = sample(engine)
            finally:
                engine.stop()
        else:
            engine.follow()
        device = engine.cache.k[0].device
        fits = self._peak_is_known and peak_bytes(device) <= usable_bytes(device)
        self._peak_is_known = True
        if not all(ranks.all_gather_int(int(fits))):
            engine.release_cache()
        return result if ranks.size == 1 else json.loads(broadcast_text(json.dumps(result), ranks))

    def _build(self, trained: Transformer) -> Engine:
        """An engine with room for all requests of the longest sequence, without weights."""
        own = copy_of(trained, self._run, serving=True)
        page = PAGE_TOKENS[next(own.parameters()).device.type]
        pages = self._requests * -(-self._run.data.sequence // page) + 1
        config = ServeConfig(
            max_requests=self._requests,
            page_tokens=page,
            pages=pages,
            batch_invariant=self._exact,
        )
        return Engine(own, self._tokenizer, config)


def copy_of(trained: Transformer, run: RunConfig, *, serving: bool) -> Transformer:
    """An uninitialised model with this rank's shapes in the trainer's compute dtype, without adapters."""
    device, axes = next(trained.parameters()).device, trained.axes
    if serving:
        axes = Axes(tp=axes.tp, model=axes.model).serving()
    dtype = getattr(torch, run.resolved(device.type).train.compute_dtype)
    own = Transformer(trained.config.replace(lora=None), axes, device=device, dtype=dtype)
    return own.eval().requires_grad_(False)


@torch.no_grad()
def copy_weights(trained: Transformer, own: Transformer) -> None:
    """Copy the weights of ``trained`` into ``own``, with its adapters merged; all data ranks call this together."""
    source = {name: x.detach() for name, x in (*trained.named_parameters(), *trained.named_buffers())}
    adapters = {name: unsharded(x) for name, x in source.items() if is_adapter(name)}
    adapters = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in adapters.items()}
    for name, parameter in (*own.named_parameters(), *own.named_buffers()):
        value = unsharded(source[name])
        if adapters and (delta := merged_delta(name, adapters, trained.config)) is not None:
            value = value.to(delta.dtype) + delta
        parameter.copy_(value)

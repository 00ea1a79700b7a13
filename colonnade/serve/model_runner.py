"""Runs the model: one forward pass for each :class:`Work`, on this rank's share of the model and of the KV cache."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from colonnade.config import ServeConfig
from colonnade.errors import CapacityError, ConfigError
from colonnade.kernels.registry import choose
from colonnade.model import KVCache, Paged, Transformer, fused_block
from colonnade.model.weight_only_quant import kind_of, tensors_of
from colonnade.parallel.device_memory import share_bytes
from colonnade.serve.batch_invariance import one_by_one
from colonnade.serve.cache_shard import CacheShard
from colonnade.serve.cuda_graph_runner import CudaGraphRunner
from colonnade.serve.memory_advice import check_room, told
from colonnade.serve.memory_estimate import FLOAT8, Asked, pages_of, widens_float8
from colonnade.serve.model_inputs import arguments
from colonnade.serve.sampler import sample, sample_each
from colonnade.serve.scheduler import Work


def check_model(model: Transformer, config: ServeConfig) -> None:
    """Raise :class:`ConfigError` where ``config`` says of the model what it is not."""
    config.check(model.config)
    kept = kind_of(model) or "stored"
    if config.weights not in ("stored", kept):
        raise ConfigError(
            f"serve.weights is {config.weights}, and this model's are {kept}: they are quantised while a model is "
            f'read; load it with weights="{config.weights}"'
        )
    weight = next(model.parameters())
    if config.cache == "float8" and not widens_float8(weight.device):
        has = torch.cuda.get_device_capability(weight.device)
        raise ConfigError(
            f"a cache in float8 needs compute capability {FLOAT8[0]}.{FLOAT8[1]}, and this "
            f"{torch.cuda.get_device_name(weight.device)} has {has[0]}.{has[1]}; leave --serve.cache out"
        )
    if config.batch_invariant and config.fixed_steps and weight.device.type == "cpu":
        raise ConfigError(
            "serve.batch_invariant runs one token at a time on a CPU, which serve.fixed_steps cannot pad; leave one out"
        )


def build_cache(model: Transformer, config: ServeConfig) -> KVCache:
    """The cache that ``config`` allows, but no larger than ``max_requests`` whole contexts could fill; where context
    ranks share it, this rank's part.

    Raises :class:`CapacityError` when not one page fits, and with a table when the memory is not there.
    """
    weight = next(model.parameters())
    pages = pages_of(model.config, model.axes, config, weight.dtype)
    held = sum(x.nbytes for x in tensors_of(model) if x.device == weight.device)
    asked = Asked(
        model.config, config.but(weights=kind_of(model) or "stored"), weight.dtype, weight.device,
        tp=model.axes.tp.size, cp=model.axes.cp.size, ep=model.axes.grid.ep.size, sh=model.axes.grid.sh.size,
        weights=held,
    )  # fmt: skip
    check_room(asked, held)
    try:
        return KVCache(
            model.config, model.axes, pages=pages, page_tokens=config.page, dtype=weight.dtype,
            device=weight.device, kind=config.cache,
        )  # fmt: skip
    except RuntimeError:  # torch's only type for a failed allocation on a CPU; on a GPU its pieces may not fit
        raise CapacityError(told(asked, asked.needs(), share_bytes(weight.device) + held)) from None


class Runner:
    """Runs one :class:`Work` after another on this rank's share of the model and of the cache."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        fixed: CudaGraphRunner | None = None,
        *,
        share: bool = True,
        invariant: str | None = None,
    ):
        """``fixed`` takes the steps that it can; ``share``: keys of several requests are read once. ``invariant``: the
        attention of :func:`invariant.prepare`.
        """
        self.model, self.cache, self.fixed, self.share, self.invariant = model, cache, fixed, share, invariant
        if invariant is None:  # whose kernels are others
            fused_block.prepare(model)
        self._held = CacheShard.of(model, cache)
        self._one_by_one = invariant is not None and not cache.k[0].is_cuda
        self._last_R = torch.zeros(1, dtype=torch.int64, device=cache.k[0].device)
        """What the last work drew: the next one may begin with these tokens before the host has seen them."""

    @torch.inference_mode()
    def __call__(self, work: Work) -> "Drawn":
        """Run ``work``; the next tokens of the R slices that draw one, in order (R may be 0), on every rank."""
        axes = self.model.axes
        if self.fixed is not None and self.fixed.take(work):
            logits_Rv = self.fixed(work, self._last_R)
            draw = sample_each if self.invariant else sample
            tokens_R = draw(logits_Rv, work.draws, axes.tp, self.model.config.vocab_size)
        else:
            passes = one_by_one(work, self.cache.page_tokens) if self._one_by_one else [work]
            tokens_R = torch.cat([self._run(each) for each in passes])
        if work.draws:
            # Context ranks compute the same, but sums over their tensor ranks may differ in the last bit.
            self._last_R = tokens_R = axes.cp.firsts_(tokens_R)
        return Drawn(tokens_R)

    def _run(self, work: Work) -> Tensor:
        stream, attend, head = arguments(self._held, work, share=self.share)
        if self.invariant:
            assert isinstance(attend, Paged), "invariance is for one rank"
            attend, head = replace(attend, kernels=self.invariant, share=False), replace(head, each=True)
        if any(piece.tokens[-1] < 0 for piece in work.slices):
            choose("told_tokens", stream.tokens_T.device.type, torch.int64)(stream.tokens_T, self._last_R)
        return self.model(stream, attend, head)


class Drawn:
    """Tokens on their way from the device to the host, which need not wait for what the device does after them."""

    def __init__(self, tokens_R: Tensor):
        self._arrived: torch.cuda.Event | None = None
        self._tokens_R = tokens_R
        if tokens_R.is_cuda:
            self._tokens_R = torch.empty_like(tokens_R, device="cpu", pin_memory=True)
            self._tokens_R.copy_(tokens_R, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def tolist(self) -> list[int]:
        """The tokens, when they are here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._tokens_R.tolist()

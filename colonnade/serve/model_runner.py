"""Runs the model: allocates the KV cache, and runs one forward pass, with sampling, for each :class:`Work`."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.config import ServeConfig
from colonnade.errors import CapacityError, ConfigError
from colonnade.kernels.registry import choose
from colonnade.model import KVCache, Paged, Transformer, fused_block
from colonnade.model.token_logprobs import TokenScores
from colonnade.model.weight_only_quant import quantised_kind, weight_tensors
from colonnade.parallel.device_memory import usable_bytes
from colonnade.serve.adapters import AdapterChoice
from colonnade.serve.batch_invariance import check_ranks, make_batch_invariant, split_into_single_tokens
from colonnade.serve.cuda_graph_runner import CudaGraphRunner
from colonnade.serve.memory_advice import check_memory, refusal
from colonnade.serve.memory_estimate import FLOAT8, EngineSpec, scratch_pages, supports_float8
from colonnade.serve.model_inputs import CacheShard, build_inputs
from colonnade.serve.page_pool import PagePool
from colonnade.serve.resolve_config import EngineTraits, draft_config
from colonnade.serve.sampler import Sampled, sample_and_score
from colonnade.serve.work import Work


def check_model(model: Transformer, config: ServeConfig) -> None:
    """Raise :class:`ConfigError` if ``config`` contradicts the loaded model or its device."""
    config.check(model.config)
    loaded = quantised_kind(model) or "stored"
    if config.weights not in ("stored", "file", loaded) and (config.weights, loaded) != ("dense", "stored"):
        raise ConfigError(
            f"serve.weights is {config.weights}, but this model's weights are {loaded}; they are quantised during "
            f'loading: load it with weights="{config.weights}"'
        )
    device = next(model.parameters()).device
    if config.cache == "float8" and not supports_float8(device):
        has = torch.cuda.get_device_capability(device)
        raise ConfigError(
            f"a cache in float8 needs compute capability {FLOAT8[0]}.{FLOAT8[1]}, and this "
            f"{torch.cuda.get_device_name(device)} has {has[0]}.{has[1]}; remove --serve.cache"
        )
    if model.config.encoder is not None:
        if config.batch_invariant:
            raise ConfigError("serve.batch_invariant does not cover an encoder's attention; remove it")
        if model.config.encoder.reads == "audio":
            raise ConfigError(
                "this model reads audio; serve it alone, or transcribe files with: colonnade speech transcribe FILE"
            )
    if config.batch_invariant:
        check_ranks(tp=model.axes.tp.size, cp=model.axes.cp.size)
    if config.batch_invariant and config.graph_capture and device.type == "cpu":
        raise ConfigError("serve.batch_invariant cannot be recorded on a CPU; remove it or serve.graph_capture")


def build_caches(
    model: Transformer, config: ServeConfig, draft: Transformer | None = None, engines: int = 1
) -> tuple[KVCache, KVCache | None]:
    """Allocate this rank's part of the KV cache that ``config`` allows, at most ``max_requests`` whole contexts.

    All ranks allocate as many pages as the one with the least memory, which is divided among ``engines``. The second
    cache is the ``draft`` model's, with the pages of all ranks. Raises :class:`CapacityError` if not one page fits and,
    with a table, if there is not enough memory.
    """
    weight = next(model.parameters())
    weight_bytes, draft_bytes = (0 if each is None else _device_bytes(each) for each in (model, draft))
    asked = EngineSpec(
        model.config, config.replace(weights=quantised_kind(model) or "stored"), weight.dtype, weight.device,
        tp=model.axes.tp.size, cp=model.axes.cp.size, ep=model.axes.experts.ep.size, etp=model.axes.experts.etp.size,
        weights=weight_bytes, draft=None if draft is None else draft.config, draft_weights=draft_bytes,
    )  # fmt: skip
    in_use = weight_bytes + draft_bytes
    asked = check_memory(asked, in_use, engines)
    pages = min(model.axes.token_replicas.all_gather_int(asked.page_count))
    options = {"page_tokens": config.page, "dtype": weight.dtype, "device": weight.device}
    try:
        cache, second = KVCache(model.config, model.axes, pages=pages, kind=config.cache, **options), None
        if draft is not None:
            own, ranks = draft_config(config, EngineTraits.of(draft)), model.axes.cp.size
            pages = (pages - scratch_pages(model.axes, config)) * ranks + scratch_pages(draft.axes, own)
            second = KVCache(draft.config, draft.axes, pages=pages, kind=own.cache, **options)
        return cache, second
    except (RuntimeError, MemoryError):  # the system refuses the allocation, or a GPU's memory is fragmented
        raise CapacityError(refusal(asked, asked.needs(), usable_bytes(weight.device) + in_use)) from None


def build_page_pool(cache: KVCache, draft_cache: KVCache | None, model: Transformer, config: ServeConfig) -> PagePool:
    """The pages of ``cache`` on all ranks, without scratch pages."""
    ranks = model.axes.cp.size
    page_bytes = None
    if config.pages is None:
        page_bytes = cache.bytes // cache.pages
        page_bytes += 0 if draft_cache is None else ranks * (draft_cache.bytes // draft_cache.pages)
    pages = (cache.pages - scratch_pages(model.axes, config)) * ranks
    return PagePool(pages, cache.page_tokens, ranks, page_bytes=page_bytes)


def _device_bytes(model: Transformer) -> int:
    """Bytes of the weights on the model's device."""
    device = next(model.parameters()).device
    return sum(x.nbytes for x in weight_tensors(model) if x.device == device)


class ModelRunner:
    """Runs one :class:`Work` after another on this rank's share of the model and of the cache."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        graphs: CudaGraphRunner | None = None,
        *,
        share: bool = True,
        invariant: str | None = None,
        adapters: AdapterChoice | None = None,
    ):
        """``graphs`` runs pure decode steps; ``share``: keys that several requests share are read once.

        ``invariant`` is the attention implementation from :func:`batch_invariance.make_batch_invariant`; ``adapters``
        chooses those of each step.
        """
        self.model, self.cache, self.graphs, self.share, self.invariant = model, cache, graphs, share, invariant
        self._adapters = adapters
        self._kernels = invariant or fused_block.enable(model)
        self._shard = CacheShard.of(model, cache)
        self._single_tokens = invariant == "reference"
        self._last_R = torch.zeros(1, dtype=torch.int64, device=cache.k[0].device)
        """Tokens sampled by the last work: the next one may begin with them before the host has seen them."""

    @torch.inference_mode()
    def __call__(self, work: Work) -> "SampledTokens":
        """Run ``work``; returns the R sampled tokens in the order of its slices, equal on every rank (R may be 0)."""
        axes, launched_s = self.model.axes, time.perf_counter()
        adapts = any(piece.adapter for piece in work.slices)
        if self._adapters is not None:
            self._adapters.set(work.slices, self._last_R.device) if adapts else self._adapters.clear()
        if self.graphs is not None and not adapts and self.graphs.accepts(work):
            logits_Rv = self.graphs(work, self._last_R)
            vocab_size, rowwise = self.model.config.vocab_size, self.invariant is not None
            sampled = sample_and_score(logits_Rv, work.sample_args, axes.tp, vocab_size, rowwise=rowwise)
        elif self._single_tokens:
            passes = [self._run(each) for each in split_into_single_tokens(work, self.cache.page_tokens)]
            tokens, scores, prompt = zip(*passes, strict=True)
            sampled = Sampled(torch.cat(tokens), _join_scores(scores), _join_scores(prompt))
        else:
            sampled = self._run(work)
        if work.sample_args:
            # Context ranks compute the same, but sums over their tensor ranks may differ in the last bit.
            self._last_R = axes.cp.from_rank_0_(sampled.tokens_R)
            sampled = sampled._replace(tokens_R=self._last_R)
        return SampledTokens(sampled, launched_s)

    def clear_recorded_steps(self) -> None:
        """Drop recorded steps and CUDA graphs."""
        if self.graphs is not None:
            self.graphs.clear()

    def _run(self, work: Work) -> Sampled:
        stream, attend, head = build_inputs(self._shard, work, share=self.share)
        if self.invariant:
            assert isinstance(attend, Paged), "batch invariance is for one rank"
            attend, head = replace(attend, share=False), replace(head, rowwise=True)
        if isinstance(attend, Paged):
            attend = replace(attend, kernels=self._kernels)
        if any(piece.tokens[-1] < 0 for piece in work.slices):
            choose("write_next_tokens", stream.tokens_T.device.type, torch.int64)(stream.tokens_T, self._last_R)
        return self.model(stream, attend, head)


def build_runner(
    model: Transformer, cache: KVCache, config: ServeConfig, cache_tokens: int, adapters: AdapterChoice | None = None
) -> ModelRunner:
    """The runner for the resolved ``config``, with CUDA graphs if configured; all ranks cache ``cache_tokens``."""
    invariant, graphs = make_batch_invariant(model) if config.batch_invariant else None, None
    if config.graph_capture:
        share = config.cascade_attention and not invariant
        context = min(model.config.context, cache_tokens)
        graphs = CudaGraphRunner(model, cache, config.max_requests, context, share=share, kernels=invariant)
    return ModelRunner(model, cache, graphs, share=config.cascade_attention, invariant=invariant, adapters=adapters)


class HostScore(NamedTuple):
    """One row of :class:`TokenScores`."""

    logp: float
    greedy: bool
    top_logp: list[float]
    top_ids: list[int]


class SampledTokens:
    """Sampled tokens, copied to the host asynchronously: reading them does not wait for later work of the device."""

    def __init__(self, sampled: Sampled, launched_s: float):
        self.launched_s = launched_s
        """When the pass was launched (time.perf_counter)."""
        self._copied: torch.cuda.Event | None = None
        self._tokens_R, self._scores, self._prompt = sampled.tokens_R, sampled.scores, sampled.prompt
        if self._tokens_R.is_cuda:
            self._tokens_R = _copy_to_host(self._tokens_R)
            self._scores = self._scores and TokenScores(*map(_copy_to_host, self._scores))
            self._prompt = self._prompt and TokenScores(*map(_copy_to_host, self._prompt))
            self._copied = torch.cuda.Event()
            self._copied.record()

    def tolist(self) -> list[int]:
        """The tokens, as soon as they have been copied."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tokens_R.tolist()

    def scores(self) -> list[HostScore]:
        """Those of :attr:`Sampled.scores`; call after :meth:`tolist`."""
        return _to_host_scores(self._scores)

    def prompt(self) -> list[HostScore]:
        """Those of :attr:`Sampled.prompt`; call after :meth:`tolist`."""
        return _to_host_scores(self._prompt)


def _to_host_scores(scores: TokenScores | None) -> list[HostScore]:
    return [HostScore(*row) for row in zip(*(x.tolist() for x in scores), strict=True)] if scores else []


def _join_scores(passes: Sequence[TokenScores | None]) -> TokenScores | None:
    """The rows of all passes that have scores, padded to the largest number of alternatives."""
    parts = [part for part in passes if part is not None]
    if not parts:
        return None
    most = max(part.top_ids_RK.shape[1] for part in parts)
    return TokenScores.cat([part.pad(most) for part in parts])


def _copy_to_host(x: Tensor) -> Tensor:
    return torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)

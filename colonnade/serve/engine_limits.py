"""What an engine can do: the layouts it takes, the memory of its cache, the tokens that a request may generate."""

from collections.abc import Sequence

import torch

from colonnade.config import ServeConfig
from colonnade.errors import CapacityError, ConfigError, PlanError, RequestError
from colonnade.model import KVCache, Transformer
from colonnade.model.weight_only_quant import kind_of, tensors_of
from colonnade.parallel.device_memory import usable_bytes
from colonnade.serve.memory_advice import check_room, told
from colonnade.serve.memory_estimate import FLOAT8, Asked, pages_of, widens_float8
from colonnade.serve.page_pool import PagePool
from colonnade.serve.prompts import check_vocabulary
from colonnade.serve.sampling_params import SamplingParams


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
        tp=model.axes.tp.size, cp=model.axes.cp.size, ep=model.axes.experts.ep.size, sh=model.axes.experts.sh.size,
        weights=held,
    )  # fmt: skip
    check_room(asked, held)
    try:
        return KVCache(
            model.config, model.axes, pages=pages, page_tokens=config.page, dtype=weight.dtype,
            device=weight.device, kind=config.cache,
        )  # fmt: skip
    except RuntimeError:  # torch's only type for a failed allocation on a CPU; on a GPU its pieces may not fit
        raise CapacityError(told(asked, asked.needs(), usable_bytes(weight.device) + held)) from None


def check_plan(model: Transformer) -> None:
    """Raise :class:`PlanError` for a layout that does not serve ``model``."""
    axes = model.axes
    if axes.dp.size > 1:
        raise PlanError(
            f"an engine lays its model over tp and cp ranks only, not over dp={axes.dp.size}; "
            "use dp=1, and one server for each replica"
        )
    if axes.cp.size == 1:
        return
    if axes.sequence_parallel:
        raise PlanError(
            f"ranks that share a cache (cp={axes.cp.size}) all have all tokens; leave sequence_parallel off"
        )
    if not axes.cp_replicated:
        raise PlanError(f"a model over cp={axes.cp.size} that serves is built with context.axes.serving()")


def limit_tokens(ids: Sequence[int], params: SamplingParams, *, context: int, vocab_size: int, pool: PagePool) -> int:
    """Tokens that a request with this prompt may generate; :class:`RequestError` when it cannot even start, or could
    never end as it is told to.

    Without ``max_tokens`` that is what the context and the cache hold, and at least 1: whether that fits into the
    cache is checked, with the numbers, where pages are given out.
    """
    check_vocabulary(params.stop_token_ids, vocab_size, "stop_token_ids")
    room, asked = context - len(ids), params.max_tokens
    if room < (asked or 1):
        total = f" and max_tokens {asked} make {len(ids) + asked}" if asked else ""
        remedy = f"ask for at most {room}" if room > 0 else f"shorten the prompt to at most {context - 1}"
        raise RequestError(
            f"the prompt's {len(ids)} tokens{total}: too many for the model's context of {context}; {remedy}",
            param="prompt",
            code="context_length_exceeded",
        )
    return asked or max(1, min(room, pool.tokens + 1 - len(ids)))

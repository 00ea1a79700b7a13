"""Decoding one request, as a share of the speed at which memory could deliver its bytes.

    bytes per token   weights that a step reads, once, and the keys and values of its context
    bound [tokens/s]  read bandwidth / bytes per token
    intensity         operations per byte: 2 per weight, so 0.5 in float32, 1 in bfloat16, 2 in int8, 4 in int4

A step of one token multiplies each weight once, so it waits for memory on every machine whose products are faster than
intensity × bandwidth (the roofline model: Williams, Waterman and Patterson 2009). Steps run through the real engine.
"""

import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from colonnade import api
from colonnade.config import Plan, ServeConfig
from colonnade.errors import ConfigError
from colonnade.model import KVCache, Transformer
from colonnade.model.moe.experts import Experts
from colonnade.model.tensor_parallel_linear import QuantisableMatrix
from colonnade.model_spec import ModelSpec
from colonnade.serve.sampling_params import SamplingParams

DeviceType = Literal["cpu", "cuda"]
WeightKind = Literal["float32", "bfloat16", "int8", "int4"]

PROMPT_TOKENS, MOST_TOKENS, LEAST_STEPS = 16, 240, 8


@dataclass(frozen=True)
class DecodeSpeed:
    """Decoding with one format of the weights, one request at a time."""

    weights: str
    bytes_per_token: float
    """Of weights, keys and values."""
    flops_per_token: float
    bound_tokens_per_s: float
    """At full read bandwidth."""
    tokens_per_s: float

    @property
    def share(self) -> float:
        """Part of the bound that was reached."""
        return self.tokens_per_s / self.bound_tokens_per_s

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops_per_token / self.bytes_per_token


def check_model(model: str) -> None:
    """Raise the error of a model that cannot be opened, or does not generate text."""
    ModelSpec(model, Plan(), ServeConfig(), "cpu", "auto").open_generative()


def measure_decoding(
    model: str, kinds: Sequence[WeightKind], device: DeviceType, bandwidth: float, budget_s: float
) -> Iterator[DecodeSpeed]:
    """The speed of ``model`` with weights of each of ``kinds``; decodes for ``budget_s`` seconds, loading excluded."""
    for kind in kinds:
        yield _measure(model, kind, device, bandwidth, budget_s / len(kinds))
        gc.collect()  # the engine, before the next one is loaded


def _measure(model: str, kind: WeightKind, device: DeviceType, bandwidth: float, budget_s: float) -> DecodeSpeed:
    page = 16 if device == "cpu" else 64
    serve = ServeConfig(
        max_requests=1, weights=kind if kind in ("int8", "int4") else "stored", page_tokens=page,
        pages=-(-(PROMPT_TOKENS + MOST_TOKENS) // page),
    )  # fmt: skip
    spec = ModelSpec(model, Plan(), serve, device, kind if kind in ("float32", "bfloat16") else "auto")
    loaded = spec.load()
    config, weights = loaded.config, loaded.transformer
    steps = step_seconds(loaded, serve, budget_s)
    dtype = next(weights.parameters()).dtype
    context = PROMPT_TOKENS + len(steps) / 2
    size = read_bytes(weights, 1) + context * KVCache.bytes_per_page(config, weights.axes, 1, dtype)
    used = config.active_parameters - (0 if config.tied else config.vocab_size * config.width)
    return DecodeSpeed(kind, size, 2.0 * used, bandwidth / size, 1 / statistics.median(steps))


def step_seconds(model: api.Model, serve: ServeConfig, budget_s: float) -> list[float]:
    """Seconds of each decode step of one request, without the first ones."""
    config = model.config
    if config.context < 2 * PROMPT_TOKENS:
        raise ConfigError(
            f"{model.source} has a context of {config.context} tokens; measuring decoding needs at least "
            f"{2 * PROMPT_TOKENS}"
        )
    engine = api.Engine(model, serve)
    most = min(MOST_TOKENS, config.context - PROMPT_TOKENS)
    prompt = [i * 7919 % config.vocab_size for i in range(PROMPT_TOKENS)]
    engine.add(prompt, SamplingParams(max_tokens=most, temperature=0, ignore_eos=True))
    taken: list[float] = []
    for _ in range(3):  # skip the prompt and the first steps, which allocate or capture
        engine.step()
    end = time.perf_counter() + budget_s
    while engine.busy and (len(taken) < LEAST_STEPS or time.perf_counter() < end):
        began = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - began)
    return taken


def read_bytes(model: Transformer, batch: int) -> float:
    """Bytes of weights read by a step of ``batch`` tokens on this rank."""
    config, total = model.config, 0.0
    # experts that no token chose are not read
    chosen = 1 - (1 - config.moe.active / config.moe.experts) ** batch if config.moe else 1.0
    for name, weight in model.named_parameters():
        share = chosen if ".experts." in name else 1.0
        if name == "embed.tokens.weight" and not config.tied:
            share = min(1.0, batch / weight.shape[0])
        total += share * weight.nbytes
    for module in model.modules():
        if isinstance(module, QuantisableMatrix) and module.quantised is not None:
            total += module.quantised.nbytes
        elif isinstance(module, Experts):
            total += chosen * sum(stack.nbytes for stack in module.quantised.values())
    return total

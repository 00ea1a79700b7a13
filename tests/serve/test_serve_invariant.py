"""``serve.batch_invariant``: a request's keys, values and tokens are bitwise independent of the batch."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from colonnade.config import LatentConfig, ModelConfig, MoeConfig, ServeConfig
from colonnade.errors import ConfigError
from colonnade.model import Transformer, initialise
from colonnade.parallel.axis import Axes, Axis
from colonnade.serve import Engine, SamplingParams
from tests.serve import tiny

SYSTEM = [7, 8, 9, 10, 11, 12, 13, 14, 15]
"""A shared prefix: two pages of four tokens and one more token."""
PROMPT = [*SYSTEM, 5, 3, 5, 8, 9, 7, 9, 3]
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.1, top_p=0.9, seed=11, max_tokens=7, ignore_eos=True)
LIMITS = ServeConfig(batch_invariant=True, pages=400, page_tokens=4, max_requests=256, token_budget=300)
Bits = tuple[list[int], list[Tensor]]

GPT2 = ModelConfig(
    vocab_size=301, layers=2, width=24, heads=6, ffn_width=35, context=128, init_std=0.3, family="gpt2",
    positions="learned", norm="layernorm", gated=False, activation="gelu_tanh", qkv_bias=True, out_bias=True,
    ffn_bias=True, tied=True,
)  # fmt: skip
LATENT = {"kv_heads": 6, "head_width": 6, "latent": LatentConfig(kv_rank=5, q_rank=7, rope_width=4, v_width=3)}
MODELS = {
    "llama": tiny.config(),
    "gpt2": GPT2,
    "window": tiny.config(tied=True, window=7, qk_norm=True),
    "latent": tiny.config(**LATENT),
    "experts": tiny.config(moe=MoeConfig(experts=4, active=2, ffn_width=6, shared_width=3, shared_gate=True)),
}


def model(name: str, dtype: torch.dtype = torch.float32) -> Transformer:
    return initialise(Transformer(MODELS[name], dtype=dtype), seed=1)


def bits(
    it: Transformer,
    others: Sequence[tuple[Sequence[int], SamplingParams]] = (),
    *,
    at: int = 0,
    after: int = 0,
    params: SamplingParams = GREEDY,
    **limits: object,
) -> Bits:
    """(tokens, every layer's keys and values) of one request, submitted at position ``at`` among ``others``.

    The requests before it have run for ``after`` steps.
    """
    engine = Engine(it, tiny.tokenizer(), LIMITS.replace(**limits))
    for prompt, theirs in others[:at]:
        engine.add(prompt, theirs)
    for _ in range(after):
        engine.step()
    key = engine.add(PROMPT, params)
    for prompt, theirs in others[at:]:
        engine.add(prompt, theirs)
    tokens: list[int] = []
    pools: list[Tensor] = []
    while engine.busy:
        ours = next((r for r in engine.scheduler.running if r.id == key), None)
        pages = list(ours.pages) if ours else []
        tokens += [output.token for output in engine.step() if output.id == key and output.token is not None]
        ran = len(PROMPT) + len(tokens) - 1
        if tokens and pages and len(tokens) < 7:
            pools = [pool[pages].flatten(0, 1)[:ran].clone() for pool in (*engine.cache.k, *engine.cache.v)]
    engine.scheduler.audit()
    return tokens, pools


def same(ours: Bits, alone: Bits) -> bool:
    rows = min(len(ours[1][0]), len(alone[1][0]))  # the two snapshots may be a step apart
    assert rows >= len(PROMPT) + 3
    return ours[0] == alone[0] and all(torch.equal(a[:rows], b[:rows]) for a, b in zip(ours[1], alone[1], strict=True))


def other_requests(number: int, seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Other requests: short and long, greedy and sampled, some with the same prefix."""
    draw = random.Random(seed)
    found = []
    for i in range(number):
        prompt = [draw.randrange(1, 300) for _ in range(draw.choice([1, 2, 3, 9] if number < 50 else [1, 2]))]
        prompt = [*SYSTEM, *prompt] if i % 5 == 3 and number < 50 else prompt
        drawn = SamplingParams(
            temperature=0.8 * (i % 2), seed=i, top_k=5 * (i % 3), max_tokens=1 + i % 4, ignore_eos=True
        )
        found.append((prompt, drawn))
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_request_is_independent_of_the_batch(name: str) -> None:
    """Arrival order, chunked prompts, prefix cache on and off, preemption, async_scheduling."""
    it = model(name)
    alone = bits(it)
    assert same(bits(it, other_requests(6), at=0), alone)
    assert same(bits(it, other_requests(6), at=6, token_budget=7), alone)
    assert same(bits(it, other_requests(6, seed=1), at=5, after=3, prefix_cache=False, async_scheduling=True), alone)
    assert same(bits(it, other_requests(6, seed=3), at=4, pages=14, max_requests=5), alone)
    drawn = bits(it, params=SAMPLED)
    assert same(bits(it, other_requests(6), at=3, token_budget=9, params=SAMPLED), drawn)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_precisions(dtype: torch.dtype) -> None:
    it = model("llama", dtype)
    assert same(bits(it, other_requests(6), at=3, token_budget=9), bits(it))


@pytest.mark.parametrize("at", [100, *(pytest.param(at, marks=pytest.mark.long) for at in (0, 255))])
def test_request_in_a_batch_of_256(at: int) -> None:
    it = model("llama")
    assert same(bits(it, other_requests(255, seed=at), at=at), bits(it))


def test_unsupported_configurations_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"is for one rank, and this model is on tp=2: .*use --plan.tp 1"):
        Engine(tiny.model(Axes(tp=Axis("tp", 2))), tiny.tokenizer(), LIMITS)
    with pytest.raises(ConfigError, match=r"is for one rank, and this model is on cp=2: .*use --plan.cp 1"):
        Engine(tiny.model(Axes(cp=Axis("cp", 2), cp_replicated=True)), tiny.tokenizer(), LIMITS)
    with pytest.raises(ConfigError, match=r"cannot be recorded on a CPU"):
        Engine(tiny.model(), tiny.tokenizer(), LIMITS.replace(graph_capture=True))

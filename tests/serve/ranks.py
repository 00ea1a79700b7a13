"""Engines over several ranks and their expected tokens, for tests of every serving layout."""

from typing import Any

from colonnade.config import LatentConfig, MoeConfig, Plan, ServeConfig
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from tests.serve import tiny

GPT2 = {
    "family": "gpt2", "positions": "learned", "norm": "layernorm", "gated": False, "activation": "gelu_tanh",
    "qkv_bias": True, "out_bias": True, "ffn_bias": True, "tied": True, "kv_heads": 6, "head_width": 4,
}  # fmt: skip
LATENT = {"kv_heads": 6, "head_width": 6, "latent": LatentConfig(kv_rank=5, q_rank=7, rope_width=4, v_width=3)}
EXPERTS = MoeConfig(experts=4, active=2, ffn_width=6, shared_width=3, shared_gate=True)
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT2,
    "latent": LATENT,
    "window": {"window": 7, "window_from_layer": 1, "qk_norm": True},
    "experts": {"moe": EXPERTS},
    "capacity": {"moe": EXPERTS.replace(capacity=1.0, priority=True, dropped_token_output="residual")},
    "biased": GPT2 | {"moe": EXPERTS},
    "four_heads": {"heads": 4, "kv_heads": 4, "moe": EXPERTS.replace(shared_width=7)},
}
SYSTEM = [(7 * i) % 300 for i in range(10)]
PROMPTS = [[*SYSTEM, 5], [3], [*SYSTEM, 9, 2, 4], list(range(40, 57)), [8, 1]]
"""Two share a prefix; some are shorter than the ranks' pages."""
COUNT = 9
LIMITS = ServeConfig(pages=16, page_tokens=3, token_budget=7, max_requests=3)


def serve(plan: dict[str, int], limits: ServeConfig, changes: dict[str, Any]) -> tuple[list[Any], int, int, int]:
    """(tokens, preemptions, prefix-cache hits in tokens, pages of this rank's cache)."""
    with DistributedContext.build(Plan(**plan)) as context:
        engine = Engine(tiny.model(context.axes.serving(), **changes), tiny.tokenizer(), limits)
        if context.rank:
            engine.follow()
            return [], 0, 0, engine.cache.pages
        engine.heartbeat()
        greedy = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
        wild = SamplingParams(temperature=1, top_k=40, seed=3, max_tokens=COUNT, ignore_eos=True)
        texts = [c.token_ids for c in engine.generate([*PROMPTS, PROMPTS[0]], [greedy] * len(PROMPTS) + [wild])]
        engine.stop()
        engine.scheduler.audit()
        return texts, engine.stats.preemptions, engine.stats.prefix_hits, engine.cache.pages


def expected(changes: dict[str, Any]) -> list[tuple[int, ...]]:
    """Expected tokens: greedy by the reference forward pass; the last prompt sampled by a one-process engine."""
    model = tiny.model(**changes)
    wild = SamplingParams(temperature=1, top_k=40, seed=3, max_tokens=COUNT, ignore_eos=True)
    drawn = Engine(model, tiny.tokenizer(), LIMITS).generate([PROMPTS[0]], wild)[0].token_ids
    return [*(tuple(tiny.greedy_tokens(model, prompt, COUNT)) for prompt in PROMPTS), drawn]

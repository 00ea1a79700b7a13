"""Training equals an independent implementation (tests/oracle.py) in float64, on random models and layouts.

The other parity tests compare layouts with one process of the same code; a fault that all layouts share shows here.
"""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.config import ModelConfig, Plan, RouterConfig, TrainConfig
from colonnade.config.moe import MoeConfig
from colonnade.data import Batch
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.train_step import evaluate
from tests.oracle import Oracle
from tests.parity.train_cases import BERT, Run, micro_batches
from tests.worlds import assert_same, run

STEPS, MICRO_BATCHES = 3, 4
PLANS = {
    1: [Plan()],
    2: [
        Plan(dp=2, ep=2), Plan(tp=2), Plan(pp=2), Plan(cp=2, ep=2),
        Plan(tp=2, sequence_parallel=True, etp=2, adaptive_r=2),
        Plan(replicate=2, etp=2, adaptive_r=0), Plan(dp=2, ep=2, shadows=1, overlap=2),
    ],
    4: [
        Plan(tp=2, dp=2, ep=2, etp=2), Plan(pp=2, dp=2, ep=2), Plan(dp=4, ep=4), Plan(cp=2, tp=2, ep=2),
        Plan(tp=4, sequence_parallel=True, etp=4, adaptive_r=2), Plan(replicate=2, dp=2, etp=2),
        Plan(pp=2, tp=2, etp=2),
    ],
}  # fmt: skip
"""Plans by number of processes; a model without experts omits ep, etp and related fields."""
CI_CASES = {1: range(6), 2: range(5), 4: (0, 2, 4)}
"""The seeds that CI runs, by number of processes."""


def draw(seed: int, world: int) -> tuple[ModelConfig, TrainConfig, Plan]:
    """A random case; of five consecutive seeds three have experts and one is BERT."""
    r = random.Random(1000 * world + seed)
    layers, width, vocab = r.choice([2, 3]), r.choice([12, 20]), r.choice([37, 50])
    plan = PLANS[world][seed % len(PLANS[world])]
    kv_heads = plan.tp * r.choice([1, 2])
    common: dict[str, Any] = {
        "vocab_size": vocab, "layers": layers, "width": width, "heads": kv_heads * r.choice([1, 2, 3]),
        "kv_heads": kv_heads, "head_width": r.choice([2, 4, 6]), "ffn_width": r.choice([11, 16]), "context": 32,
        "norm": r.choice(["layernorm", "rmsnorm"]), "activation": r.choice(["gelu", "gelu_tanh", "silu", "relu"]),
        "gated": r.random() < 0.6, "qkv_bias": r.random() < 0.4, "out_bias": r.random() < 0.4,
        "ffn_bias": r.random() < 0.4, "tied": r.random() < 0.5, "init_std": 0.2, "norm_eps": r.choice([1e-5, 1e-6]),
        "positions": r.choice(["learned", "rotary"]),
    }  # fmt: skip
    if seed % 5 == 4:
        post = r.random() < 0.5
        model = ModelConfig(**BERT | common | {"norm_order": "post" if post else "pre", "embed_norm": post})
    else:
        window = {"window": r.choice([3, 5]), "window_from_layer": r.choice([0, 1])} if r.random() < 0.3 else {}
        query = {"qk_norm": r.random() < 0.4, "qk_norm_over": r.choice(["head", "all"])}
        clip = {"qkv_clip": 0.5} if r.random() < 0.2 else {}
        moe = {"moe": draw_experts(r, plan)} if seed % 5 in (0, 2, 3) else {}
        if moe and moe["moe"].priority:
            common["vocab_size"] = 2003  # equal tokens at the start of two sequences have equal priorities
        model = ModelConfig(**common, **window, **query, **clip, **moe)
    if model.moe is None:
        plan = plan.replace(ep=1, etp=1, adaptive_r=1, overlap=1, shadows=0)
    train = TrainConfig(
        steps=r.choice([3, 20]), warmup=r.choice([0, 2]), lr=3e-3, min_lr=1e-4, dtype="float64",
        schedule=r.choice(["cosine", "linear", "constant"]), weight_decay=r.choice([0, 0.1]),
        beta1=r.choice([0.8, 0.9]), beta2=r.choice([0.95, 0.99]), clip=r.choice([0.1, 1.0, float("inf")]),
        label_smoothing=r.choice([0, 0.1]), fused_adamw=r.random() < 0.3,
    )  # fmt: skip
    return model, train, plan


def draw_experts(r: random.Random, plan: Plan) -> MoeConfig:
    experts, kind = max(4, plan.ep) * r.choice([1, 2]), r.choice(["softmax", "sigmoid"])
    balance = r.choice(["none", "gshard", "switch", "choices", "sequence", "importance"])
    plain = balance in ("sequence", "importance")  # their own rules for a biased choice are tested elsewhere
    groups = 1 if plain else r.choice([1, 2])
    capacity = r.choice([None, None, 0.5, 1.0, 0.0, -1.0])
    return MoeConfig(
        experts=experts, active=r.choice([1, 2, 3] if groups == 1 else [1, 2]), ffn_width=r.choice([4, 8]),
        shared_width=(shared := r.choice([0, 5])), shared_gate=shared > 0 and r.random() < 0.5,
        first_k_dense_replace=r.choice([0, 0, 1]), layer_freq=r.choice([1, 1, 2]), capacity=capacity,
        priority=r.random() < 0.3,
        dropped_token_output=r.choice(["zero", "residual"]), balance=balance, balance_weight=r.choice([0.03, 0.7]),
        z_weight=r.choice([0, 0.01, 0.3]), bias_rate=0 if plain else r.choice([0, 0.003]),
        router=RouterConfig(
            kind=kind, bias=r.random() < 0.3, normalise=r.random() < 0.6, scale=r.choice([1.0, 1.7]), groups=groups,
            groups_kept=1, group_score=r.choice(["max", "top2"]),
        ),
    )  # fmt: skip


Expected = tuple[list[tuple[float, float]], float, dict[str, Tensor]]


def expected(config: ModelConfig, train: TrainConfig, plan: Plan) -> Expected:
    """The oracle's (loss and norm of each step, validation loss, weights, buffers and moments by name)."""
    solo = DistributedContext.solo()
    model = initialise(Transformer(config, dtype=torch.float64), 7)
    oracle = Oracle(config, train, dict(model.named_parameters()), dict(model.named_buffers()))
    each = MICRO_BATCHES // (plan.dp * plan.replicate)

    def passes(number: int) -> list[list[Batch]]:
        """Micro-batches that the data ranks compute at the same time form one pass."""
        batches = micro_batches(number, solo.axes.dp, config, MICRO_BATCHES)
        return [batches[i::each] for i in range(each)]

    found = [oracle.step(number, passes(number)) for number in range(STEPS)]
    validation = oracle.evaluate(passes(STEPS))
    tensors = {name: w.detach() for name, w in oracle.w.items()} | oracle.biases
    tensors |= {f"exp_avg/{name}": m for name, m in oracle.m.items()}
    return found, validation, tensors | {f"exp_avg_sq/{name}": v for name, v in oracle.v.items()}


def _double(x: Any) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


def _check(config: ModelConfig, train: TrainConfig, plan: Plan, wanted: Expected) -> None:
    steps, validation, tensors = wanted
    with DistributedContext.build(plan) as context:
        it = Run.start(config, context, train)
        for number, (mine, theirs) in enumerate(zip(it.go(0, STEPS), steps, strict=True)):
            assert_same(_double(mine), _double(theirs), what=f"loss and norm of step {number}")
        batches = micro_batches(STEPS, context.axes.dp, config)
        found = evaluate(it.model, batches, it.step.pipeline)
        assert_same(found, _double(validation), what="validation")
        for name, weight in it.masters.local.items():
            assert_same(weight, it.shard_of(name, tensors[name]), what=name)
        for name, buffer in it.model.named_buffers():
            assert_same(buffer, tensors[name], 1e-14, what=name)
        for key, moment in it.optimizer.state.items():
            # Relative to the largest value of its kind: small gradients are compared at 1e-10 of the large ones.
            unit = max(x.abs().max() for name, x in tensors.items() if name.startswith(key.partition("/")[0]))
            assert_same(moment / unit, it.shard_of(key.partition("/")[2], tensors[key]) / unit, what=key)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("world", "seed"),
    [
        pytest.param(world, seed, marks=[] if seed in often else [pytest.mark.long])
        for world, often in CI_CASES.items()
        for seed in range(60)
    ],
)
def test_training_equals_the_oracle(world: int, seed: int) -> None:
    config, train, plan = draw(seed, world)
    run(world, _check, config, train, plan, expected(config, train, plan))

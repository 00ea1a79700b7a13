"""Quantised weights are bitwise equal under every layout: a checkpoint read by one process and by two."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from colonnade import api
from colonnade.checkpoint.hf.write import write_hf
from colonnade.config import ModelConfig, MoeConfig, Plan, ServeConfig
from colonnade.kernels.cpu import kernels as cpu_kernels
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import SamplingParams
from colonnade.serve.engine import Engine
from tests.models import build
from tests.serve import tiny
from tests.worlds import assert_same, run

# Shards of heads and of hidden units are a multiple of the group size 32; for 8 bits some sizes divide unevenly.
CONFIG = ModelConfig(vocab_size=301, layers=2, width=40, heads=8, kv_heads=4, head_width=16, ffn_width=128, context=64)
UNEVEN = CONFIG.replace(ffn_width=37)


def _load(folder: Path, world: int, weights: str) -> tuple[Tensor, list[int], dict[str, Tensor]]:
    """(logits, greedy tokens, the values of a column-parallel layer)."""
    with DistributedContext.build(Plan(tp=world)) as context:
        model = api.load(folder, dtype="float64", context=context, weights=weights, weight_group=32)
        logits = model.logits(torch.arange(20))
        engine = Engine(model.transformer, tiny.tokenizer(), ServeConfig(pages=8, weights=weights))
        down = model.transformer.get_submodule("blocks.1.ffn.down").quantised
        values = {"values": down.values.view(torch.uint8), "scales": down.scales}
        if context.rank:
            engine.follow()
            return logits, [], values
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        tokens = engine.generate([[3, 1, 4, 1, 5]], params)[0].token_ids
        engine.stop()
        return logits, list(tokens), values


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("format", "weights", "config"),
    [("hf", "int8", UNEVEN), ("hf", "int4", CONFIG), ("colonnade", "float8", UNEVEN), ("colonnade", "int4", CONFIG)],
)
def test_quantised_weights_on_two_ranks_are_bitwise_equal(
    format: str, weights: str, config: ModelConfig, tmp_path: Path
) -> None:
    whole = build(config, dtype=torch.float32)
    if format == "hf":
        write_hf(whole, tmp_path / "m", shard_bytes=10_000)
        assert len(list((tmp_path / "m").glob("*.safetensors"))) > 3
    else:
        api.save(api.Model(whole, None, DistributedContext.solo(torch.device("cpu")), "tiny"), tmp_path / "m")
    ((alone, tokens, bits),) = run(1, _load, tmp_path / "m", 1, weights)
    both = run(2, _load, tmp_path / "m", 2, weights)
    for logits, _, _ in both:
        assert_same(logits, alone, 1e-12)
    assert both[0][1] == tokens
    assert torch.equal(torch.cat([part["values"] for _, _, part in both], 1), bits["values"])
    for _, _, part in both if weights != "int4" else []:
        assert torch.equal(part["scales"], bits["scales"])
    if weights == "int4":
        assert torch.equal(torch.cat([part["scales"] for _, _, part in both], 1), bits["scales"])


SHARED = MoeConfig(experts=4, active=2, ffn_width=64, first_k_dense_replace=1, shared_width=64, shared_gate=True)
_GATED = CONFIG.replace(layers=3, init_std=0.3, moe=SHARED)
MIXTURES = {
    "gated": _GATED,
    "biased": _GATED.replace(
        gated=False, activation="gelu_tanh", ffn_bias=True, moe=SHARED.replace(ffn_width=36, shared_width=37)
    ),
}
"""A dense layer, then experts and shared ones; of the second model only 8-bit weights can be sharded over ranks."""


def _load_experts(folder: Path, plan: Plan, weights: str) -> tuple[Tensor, list[tuple[int, ...]], dict[str, Tensor]]:
    """(logits, greedy tokens, the values of a layer's experts on this rank, by (expert, output, input))."""
    with DistributedContext.build(plan) as context:
        model = api.load(folder, dtype="float64", context=context, weights=weights, weight_group=32)
        logits = model.logits(torch.arange(20))
        limits = ServeConfig(pages=16, page_tokens=3, token_budget=7, max_requests=3, weights=weights)
        engine = Engine(model.transformer, tiny.tokenizer(), limits)
        made = model.transformer.get_submodule("blocks.2.ffn.experts").quantised
        bits = {part: stack.values.view(torch.uint8) for part, stack in made.items()}
        bits |= {f"{part} scales": stack.scales for part, stack in made.items()}
        if context.rank:
            engine.follow()
            return logits, [], bits
        greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
        tokens = engine.generate([[3, 1, 4, 1, 5], [7], list(range(40, 57))], greedy)
        engine.stop()
        return logits, [one.token_ids for one in tokens], bits


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("weights", "name", "plan"),
    [
        ("int8", "biased", Plan(tp=2)),
        ("int4", "gated", Plan(tp=2, ep=2)),
        ("int8", "biased", Plan(tp=2, etp=2)),
        ("float8", "biased", Plan(tp=4, ep=2, etp=2)),
        pytest.param("int4", "gated", Plan(tp=2, etp=2), marks=pytest.mark.long),
        pytest.param("int8", "gated", Plan(tp=2, ep=2, sequence_parallel=True), marks=pytest.mark.long),
        pytest.param("int8", "biased", Plan(tp=4, ep=2, etp=2, sequence_parallel=True), marks=pytest.mark.long),
        pytest.param("float8", "gated", Plan(tp=2, cp=2, ep=4), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_sharded_experts_give_the_output_of_one_process(weights: str, name: str, plan: Plan, tmp_path: Path) -> None:
    """Full experts, slices of them, or both: the weights, logits and greedy tokens of one process."""
    config = MIXTURES[name]
    whole = build(config, dtype=torch.float32)
    with torch.no_grad():
        for stack, p in whole.named_parameters():
            if stack.endswith("_bias"):
                p.copy_(torch.linspace(-0.5, 0.5, p.numel()).view_as(p))
    api.save(api.Model(whole, None, DistributedContext.solo(torch.device("cpu")), "m"), tmp_path / "m")
    ((alone, tokens, bits),) = run(1, _load_experts, tmp_path / "m", Plan(), weights)
    ranks = run(plan.world, _load_experts, tmp_path / "m", plan, weights)
    for rank, (logits, _, mine) in enumerate(ranks):
        assert_same(logits, alone, 1e-12)
        ep, etp = rank // plan.etp % plan.ep, rank % plan.etp
        for part, held in mine.items():
            share = bits[part].chunk(plan.ep)[ep]
            cut = 2 if part.startswith("down") else 1  # the hidden units are inputs of W_down
            if share.shape[cut] > 1:  # a single scale for all inputs is the same on every rank
                share = share.chunk(plan.etp, cut)[etp]
            assert torch.equal(held, share), part
    assert ranks[0][1] == tokens
    assert len({token for text in tokens for token in text}) > 5


STEPS = _GATED.replace(moe=SHARED.replace(shared_gate=False))
"""A model whose decode steps are recorded on one rank."""


def _scored_steps(folder: Path, plan: Plan, weights: str) -> tuple[list[tuple[int, ...]], Tensor]:
    """(greedy tokens, their log-probabilities) of an engine in float32, whose kernels on a CPU are C++."""
    with DistributedContext.build(plan) as context:
        model = api.load(folder, dtype="float32", context=context, weights=weights, weight_group=32)
        engine = Engine(model.transformer, tiny.tokenizer(), ServeConfig(pages=16, max_requests=3, weights=weights))
        if context.rank:
            engine.follow()
            return [], torch.zeros(0)
        greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=1)
        done = engine.generate([[3, 1, 4, 1, 5], [7], list(range(40, 57))], greedy)
        engine.stop()
        return [one.token_ids for one in done], torch.tensor([t.logprob for one in done for t in one.logprobs or ()])


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [Plan(tp=2, ep=2), Plan(tp=2), Plan(tp=2, etp=2)], ids=str)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_experts_round_their_inputs_alike_on_one_rank_and_on_two(weights: str, plan: Plan, tmp_path: Path) -> None:
    """One rank runs a mixture in one C++ call, two run it in torch around the same products: only sums differ.

    Where the last bit of a sum decides how an input rounds, that input differs by one step of 127.
    """
    if not cpu_kernels.available(torch.float32):
        pytest.skip("needs the C++ kernels")
    model = api.Model(build(STEPS, dtype=torch.float32), None, DistributedContext.solo(torch.device("cpu")), "m")
    api.save(model, tmp_path / "m")
    ((tokens, alone),) = run(1, _scored_steps, tmp_path / "m", Plan(), weights)
    shared, scores = run(2, _scored_steps, tmp_path / "m", plan, weights)[0]
    assert shared == tokens and len({token for text in tokens for token in text}) > 5
    difference = (scores - alone).abs()
    assert difference.median() < 2e-6, "with 8-bit inputs on one side only, most scores would differ by 1e-3"
    assert difference.max() < 0.05

"""Experts merged into fewer: matched hidden units, groups by router likeness, and the merged checkpoint."""

from itertools import permutations

import pytest
import torch

from colonnade import api
from colonnade.cli import main
from colonnade.compress import Compression, compress
from colonnade.config import ModelConfig, MoeConfig
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.model import Packed, Rows, Stream, Transformer
from colonnade.model.moe import Routing
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.tune import merge_experts, prune, to_dense
from colonnade.tune.expert_scores import score_experts
from colonnade.tune.merge_experts import AUCTION_STEP, group_experts, match
from tests.models import MOES
from tests.models import build as built
from tests.serve import tiny
from tests.worlds import assert_same

TEXTS = [torch.randint(67, (n,), generator=torch.Generator().manual_seed(n)) for n in (60, 53)]


def logits(model: Transformer, tokens: torch.Tensor = TEXTS[0]) -> torch.Tensor:
    positions = torch.arange(len(tokens))
    with torch.no_grad():
        return model(Stream(tokens, positions, routing=Routing(positions)), Packed.of([len(tokens)]), Rows())


@pytest.mark.parametrize("seed", range(5))
def test_match_is_nearly_the_best_of_all_matchings(seed) -> None:
    likeness = torch.randn(6, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    column = match(likeness)
    assert sorted(column.tolist()) == list(range(6))
    best = max(sum(float(likeness[i, p]) for i, p in enumerate(order)) for order in permutations(range(6)))
    assert float(likeness[range(6), column].sum()) >= best - 6 * AUCTION_STEP * float(likeness.abs().max())
    assert match(torch.zeros(3, 3)).sort().values.tolist() == [0, 1, 2]
    assert match(torch.ones(1, 1)).tolist() == [0]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(value) -> None:
    """No bid of NaN is the highest: the auction would never end."""
    likeness_FF = torch.ones(4, 4)
    likeness_FF[1, 2] = value
    with pytest.raises(CheckpointError, match="not finite"):
        match(likeness_FF)


def test_groups_lead_by_use_and_join_by_likeness() -> None:
    columns = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.1], [0.1, 3.0], [-1.0, 0.2]])
    load = torch.tensor([5.0, 0.0, 1.0, 9.0, 2.0])
    leaders, group = group_experts(load, columns @ columns.T, 2)
    assert leaders.tolist() == [0, 3]
    assert group.tolist() == [0, 1, 0, 1, 1]


@pytest.mark.parametrize("name", ["gated", "biased_shared"])
@torch.no_grad()
def test_permuted_twins_merge_into_the_same_function(name) -> None:
    config = MOES[name].replace(vocab_size=67)
    model = built(config.replace(moe=config.moe.replace(active=1))).requires_grad_(False)
    generator = torch.Generator().manual_seed(1)
    for layer in range(config.layers):
        if config.experts_of(layer) is None:
            continue
        ffn = model.get_submodule(f"blocks.{layer}.ffn")
        gate = ffn.router.gates[0]
        gate.weight[3:] = 0.9 * gate.weight[:3]  # scores as those of the twins, but lower where they are high
        for e in range(3):
            order = torch.randperm(config.moe.ffn_width, generator=generator)
            for part, stack in ffn.experts.named_parameters(recurse=False):
                stack[3 + e] = stack[e] if part == "down_bias" else stack[e][order]
    merged = merge_experts(model, TEXTS, 3)
    assert merged.config.moe.merged == 3
    assert merged.get_parameter("blocks.1.ffn.experts.up").shape[0] == 3
    assert merged.config.parameters == sum(p.numel() for p in merged.parameters())
    for text in TEXTS:
        assert_same(logits(merged, text), logits(model, text))


@torch.no_grad()
def test_averages_by_use() -> None:
    model = built(MOES["gated"]).requires_grad_(False)
    merged = merge_experts(model, TEXTS, 1)
    load = score_experts(model, TEXTS).load_LE[1].double()
    leader, share = int(load.argmax()), load / load.sum()
    experts, expected = model.get_submodule("blocks.1.ffn.experts"), 0.0
    for e in range(6):
        parts = (experts.up, experts.gate, experts.down)
        likeness = torch.stack([stack[leader].float() @ stack[e].float().T for stack in parts]).sum(0)
        order = match(likeness) if e != leader else torch.arange(12)
        expected = expected + share[e] * experts.down[e][order]
    assert_same(merged.get_parameter("blocks.1.ffn.experts.down")[0], expected)


def test_what_cannot_be_merged(tmp_path) -> None:
    model = built(MOES["gated"]).requires_grad_(False)
    for merge in (0, 6):
        with pytest.raises(ConfigError, match=f"6 experts cannot be merged into {merge}; use 1 to 5"):
            merge_experts(model, TEXTS, merge)
    with pytest.raises(DataError, match="no text"):
        merge_experts(model, [], 3)
    merged = merge_experts(model, TEXTS, 3)
    for again in (
        lambda: merge_experts(merged, TEXTS, 2),
        lambda: prune(merged, torch.ones(2, 6), 4),
        lambda: to_dense(merged, TEXTS),
    ):
        with pytest.raises(ConfigError, match="merged into 3"):
            again()
    merged = merge_experts(built(MOES["gated"].replace(family="mixtral")).requires_grad_(False), TEXTS, 3)
    whole = api.Model(merged, None, DistributedContext.solo(torch.device("cpu")), "m")
    with pytest.raises(CheckpointError, match="cannot represent that 6 experts are merged into 3"):
        api.save(whole, tmp_path / "hf", format="hf")
    scores, quantised = score_experts(model, TEXTS), built(MOES["gated"], dtype=torch.float32).requires_grad_(False)
    compress(quantised, Compression(weights="int8", by="nearest"))
    for choose in (lambda: prune(quantised, scores.load_LE, 4), lambda: to_dense(quantised, TEXTS)):
        with pytest.raises(ConfigError, match="weights are in int8; load it with weights='dense'"):
            choose()
    with pytest.raises(ConfigError, match="cannot be merged into 6"):
        MoeConfig(experts=6, ffn_width=8, merged=6)


def test_gradients_reach_the_merged_experts() -> None:
    merged = merge_experts(built(MOES["gated"]).requires_grad_(False), TEXTS, 2).requires_grad_(True)
    positions = torch.arange(60)
    merged(Stream(TEXTS[0], positions, routing=Routing(positions)), Packed.of([60]), Rows()).square().sum().backward()
    grad = merged.get_parameter("blocks.1.ffn.experts.up").grad
    assert grad is not None
    assert grad.abs().sum((1, 2)).gt(0).all()


@pytest.mark.slow
def test_merged_quantised_and_served_over_ranks(tmp_path, capfd) -> None:
    tokenizer = tiny.tokenizer()
    config = ModelConfig(
        family="mixtral", vocab_size=tokenizer.vocab_size, layers=2, width=32, heads=4, kv_heads=2, ffn_width=32,
        context=64, moe=MoeConfig(experts=6, active=2, ffn_width=32),
    )  # fmt: skip
    context = DistributedContext.solo(torch.device("cpu"))
    api.save(api.Model(built(config, dtype=torch.float32), tokenizer, context, "m"), tmp_path / "m")
    for words in (["--merge", "4"], ["--merge", "4", "--weights", "int8"]):
        out = tmp_path / "-".join(words)
        main(["compress", str(tmp_path / "m"), str(out), "--tokens", "400", *words])
        texts = []
        for plan in ([], ["--plan.tp", "2", "--plan.ep", "2"]):
            capfd.readouterr()
            main(["generate", str(out), "a word", "--temperature", "0", "--max_tokens", "12", *plan])
            texts.append(capfd.readouterr().out)
        assert texts[0] == texts[1]
    with pytest.raises(SystemExit):
        main(["compress", str(tmp_path / "m"), str(tmp_path / "x"), "--merge", "4", "--keep", "4"])
    assert "use only one" in " ".join(capfd.readouterr().err.split())

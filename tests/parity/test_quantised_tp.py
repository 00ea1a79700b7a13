"""Quantised weights have the same bits under every layout: a checkpoint in shards, read by one process and by two."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from colonnade import api
from colonnade.checkpoint.hf.write import write_hf
from colonnade.config import ModelConfig, Plan, ServeConfig
from colonnade.parallel.mesh import Ground
from colonnade.serve import SamplingParams
from colonnade.serve.engine import Engine
from tests.models import build
from tests.serve import tiny
from tests.worlds import assert_same, run

# Rows of heads and of hidden units whose halves are whole groups of 32, and for 8 bits some that are cut unevenly.
CONFIG = ModelConfig(vocab_size=301, layers=2, width=40, heads=8, kv_heads=4, head_width=16, ffn_width=128, context=64)
UNEVEN = CONFIG.but(ffn_width=37)


def _load(folder: Path, world: int, weights: str) -> tuple[Tensor, list[int], dict[str, Tensor]]:
    """(logits, greedy tokens, the values of a layer cut by columns)."""
    with Ground.build(Plan(tp=world)) as ground:
        model = api.load(folder, dtype="float64", ground=ground, weights=weights, weight_group=32)
        logits = model.logits(torch.arange(20))
        engine = Engine(model.transformer, tiny.tokenizer(), ServeConfig(pages=8, weights=weights))
        down = model.transformer.get_submodule("blocks.1.ffn.down").quantised
        values = {"values": down.values.view(torch.uint8), "scales": down.scales}
        if ground.rank:
            engine.follow()
            return logits, [], values
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        said = engine.generate([[3, 1, 4, 1, 5]], params)[0].token_ids
        engine.stop()
        return logits, list(said), values


@pytest.mark.parametrize(
    ("format", "weights", "config"),
    [("hf", "int8", UNEVEN), ("hf", "int4", CONFIG), ("colonnade", "float8", UNEVEN), ("colonnade", "int4", CONFIG)],
)
@pytest.mark.xdist_group("worlds")
def test_two_ranks_have_the_bits_of_one(format: str, weights: str, config: ModelConfig, tmp_path: Path) -> None:
    whole = build(config, dtype=torch.float32)
    if format == "hf":
        write_hf(whole, tmp_path / "m", shard_bytes=10_000)
        assert len(list((tmp_path / "m").glob("*.safetensors"))) > 3
    else:
        api.save(api.Model(whole, None, Ground.solo(torch.device("cpu")), "tiny"), tmp_path / "m")
    ((alone, said, bits),) = run(1, _load, tmp_path / "m", 1, weights)
    both = run(2, _load, tmp_path / "m", 2, weights)
    for logits, _, _ in both:
        assert_same(logits, alone, 1e-12)
    assert both[0][1] == said
    assert torch.equal(torch.cat([part["values"] for _, _, part in both], 1), bits["values"])
    for _, _, part in both if weights != "int4" else []:
        assert torch.equal(part["scales"], bits["scales"])
    if weights == "int4":
        assert torch.equal(torch.cat([part["scales"] for _, _, part in both], 1), bits["scales"])

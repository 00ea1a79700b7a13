"""Decode steps through fused blocks compute the same as the separate modules, on any layout."""

import functools
import json
from typing import Any

import pytest
import torch

import skinny_gemm
from colonnade.config import MoeConfig, Plan, ServeConfig
from colonnade.kernels.linear import skinny_gemm_tiles
from colonnade.model import KVCache, Packed, Paged, fused_block
from colonnade.model.weight_only_quant import quantisable_modules
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from tests.serve import tiny
from tests.worlds import run

SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "one head a group": {"heads": 2, "kv_heads": 2},
    "norms of heads": {"qk_norm": True},
    "biases": {"qkv_bias": True},
    "a window": {"window": 5},
    "experts": {"moe": MoeConfig(experts=4, active=2, ffn_width=20)},
    "not gated": {"gated": False, "activation": "gelu"},
    "norms after": {"norm_order": "post"},
    "layer norms": {"norm": "layernorm"},
    "clipped": {"qkv_clip": 0.5},
}
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
PROMPTS = [[1, 2, 3], [50, 7], [9, *range(20, 60)]]


def run_engine(*, on: bool, **changes: Any) -> list[Any]:
    """The engine's output, and the contents of its cache afterwards."""
    model = tiny.model(**changes)
    for block in model.blocks:
        block.fused = on
    engine = Engine(model, tiny.tokenizer(), ServeConfig(pages=30, page_tokens=4, max_requests=3, graph_capture=True))
    outputs = engine.generate(PROMPTS, GREEDY)
    return [outputs, *engine.cache.k, *engine.cache.v]


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", SHAPES)
def test_fused_blocks_give_the_same_output_and_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = {"attention_step": 0, "ffn_step": 0}
    real = {part: getattr(fused_block, part) for part in calls}

    def counted(part: str, *args: Any, **options: Any) -> torch.Tensor:
        calls[part] += 1
        return real[part](*args, **options)

    for part in calls:
        monkeypatch.setattr(fused_block, part, functools.partial(counted, part))
    plain, ours = (run_engine(on=on, **SHAPES[name]) for on in (False, True))
    assert plain[0] == ours[0]
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(plain[1:], ours[1:], strict=True))
    # LayerNorm, post-norm and clipped qkv have no fused path.
    assert (calls["attention_step"] > 0) == (name not in ("norms after", "layer norms", "clipped"))
    assert (calls["ffn_step"] > 0) == (name not in ("experts", "not gated", "norms after", "layer norms"))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_fused_blocks_with_quantised_weights(kind: str) -> None:
    model = tiny.model(width=64, ffn_width=96)
    for layer in quantisable_modules(model).values():
        layer.quantise(layer.weight.detach(), kind, 32, lambda x: x)
    outputs = []
    for on in (False, True):
        for block in model.blocks:
            block.fused = on
        engine = Engine(model, tiny.tokenizer(), ServeConfig(pages=30, page_tokens=4, max_requests=3))
        outputs.append(engine.generate(PROMPTS, GREEDY))
    assert outputs[0] == outputs[1]


def outputs_of_ranks() -> list[Any]:
    outputs = []
    with DistributedContext.build(Plan(tp=2), "cpu") as context:
        for on in (False, True):
            model = tiny.model(context.axes.serving())
            for block in model.blocks:
                block.fused = on
            engine = Engine(model, tiny.tokenizer(), ServeConfig(pages=30, page_tokens=4, max_requests=3))
            outputs.append(engine.generate(PROMPTS, GREEDY))
    return outputs


def test_fused_blocks_with_tensor_parallelism() -> None:
    for plain, ours in run(2, outputs_of_ranks):
        assert plain == ours


def test_fusing_requires_no_grad_rows_and_a_paged_cache() -> None:
    model = tiny.model()
    block, x = model.blocks[0], torch.randn(2, 24, dtype=torch.float64)
    cache = KVCache(model.config, pages=2, page_tokens=4, dtype=torch.float64)
    some = torch.zeros(1, dtype=torch.int64)
    attend = Paged(cache, some[None].int(), some, some.int(), some.int(), 1, 1).at(0, None)
    assert not fused_block.can_fuse_ffn(block, x, attend) and not fused_block.can_fuse_attention(block, x, attend)
    with torch.no_grad():
        assert fused_block.can_fuse_ffn(block, x, attend) and fused_block.can_fuse_attention(block, x, attend)
        assert not fused_block.can_fuse_ffn(block, x[:0], attend) and not fused_block.can_fuse_attention(
            block, x[:0], attend
        )
        packed = Packed.of([2])
        assert not fused_block.can_fuse_ffn(block, x, packed) and not fused_block.can_fuse_attention(block, x, packed)
    fused_block.enable(model)  # a CPU has none of the kernels, so nothing changes
    assert not block.fused and block.ffn.up.kernels == "auto"


def test_tile_candidates_are_valid_and_survive_writing() -> None:
    for cell in skinny_gemm.CELLS:
        assert skinny_gemm.candidates(cell)
        assert all(candidate.BK & (candidate.BK - 1) == 0 for candidate in skinny_gemm.candidates(cell))
    tiles = skinny_gemm.candidates(skinny_gemm.CELLS[0])[0]
    rows = [{"kind": "plain", "tiles": tiles._asdict()}, {"kind": "int4", "tiles": None}]
    record = json.loads(skinny_gemm.written("none", rows))
    assert record == {"measured_on": "none", "rows": rows}
    assert skinny_gemm_tiles.SkinnyTiles(**record["rows"][0]["tiles"]) == tiles


def test_tuning_tensor_cores_keeps_other_rows_of_the_table() -> None:
    table = skinny_gemm_tiles.table()
    remaining, cases = skinny_gemm.to_measure(skinny_gemm.CELLS, units=True)
    assert remaining == [row for row in table if row["kind"] == "plain"]
    for cell, candidates in cases.items():
        F, D, _ = skinny_gemm.SHAPES[cell.name]
        now = skinny_gemm_tiles.table_tiles(cell.kind, cell.rows, F, D, gated=cell.gated)
        assert (
            cell.kind != "plain"
            and any(candidate.tensor_cores for candidate in candidates)
            and len(set(candidates)) == len(candidates)
        )
        assert now is None or now in candidates
    # Every case of the table is measured, and further row counts.
    measured_before = {(row["kind"], row["gated"], row["rows"]) for row in table if row["kind"] != "float8"}
    assert measured_before - {(row["kind"], row["gated"], row["rows"]) for row in remaining} <= {
        (c.kind, c.gated, c.rows) for c in cases
    }
    assert {c.rows for c in cases} == {1, 2, 4, 8, 16}
    assert not any(candidate.tensor_cores for candidate in skinny_gemm.cuda_core_tiles(skinny_gemm.CELLS[-1]))


def test_tuning_one_models_sizes_keeps_the_others() -> None:
    table = skinny_gemm_tiles.table()
    large = {skinny_gemm.SHAPES[cell.name][:2] for cell in skinny_gemm.LARGE}
    of_large = [row for row in table if (row["outputs"], row["inputs"]) in large]
    assert len(of_large) == len(skinny_gemm.LARGE) == 5
    assert skinny_gemm.to_measure(skinny_gemm.CELLS, units=False)[0] == of_large
    remaining, ways = skinny_gemm.to_measure(skinny_gemm.LARGE, units=False)
    assert remaining == [row for row in table if row not in of_large]
    assert all(ways[cell] for cell in skinny_gemm.LARGE)


def test_table_tiles_of_unmeasured_shapes() -> None:
    for kind, gated in (("plain", False), ("plain", True), ("int8", False), ("float8", True), ("int4", False)):
        for rows in (1, 2, 3, 4):
            tiles = skinny_gemm_tiles.table_tiles(kind, rows, 12288, 4096, gated=gated)
            assert tiles is None or (tiles.BK & (tiles.BK - 1) == 0 and tiles.stages > 1)
        assert skinny_gemm_tiles.table_tiles(kind, skinny_gemm_tiles.MAX_ROWS + 1, 4096, 4096, gated=gated) is None
    assert skinny_gemm_tiles.table_tiles("plain", 1, 4096, 4096, gated=False) is not None

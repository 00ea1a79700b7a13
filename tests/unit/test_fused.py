"""Steps through fused products: what the modules by themselves compute, on any layout."""

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


def texts(*, on: bool, **changes: Any) -> list[Any]:
    """What the engine says, and the cache that it leaves behind."""
    model = tiny.model(**changes)
    for block in model.blocks:
        block.fused = on
    engine = Engine(model, tiny.tokenizer(), ServeConfig(pages=30, page_tokens=4, max_requests=3, fixed_steps=True))
    said = engine.generate(PROMPTS, GREEDY)
    return [said, *engine.cache.k, *engine.cache.v]


@pytest.mark.parametrize("name", SHAPES)
def test_the_engine_says_and_keeps_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {"attention_step": 0, "ffn_step": 0}
    real = {part: getattr(fused_block, part) for part in taken}

    def counted(part: str, *args: Any, **how: Any) -> torch.Tensor:
        taken[part] += 1
        return real[part](*args, **how)

    for part in taken:
        monkeypatch.setattr(fused_block, part, functools.partial(counted, part))
    plain, ours = (texts(on=on, **SHAPES[name]) for on in (False, True))
    assert plain[0] == ours[0]
    assert all((a - b).abs().max() < 1e-10 for a, b in zip(plain[1:], ours[1:], strict=True))
    # Layers' norms, norms after, and clipped heads are in no fused line.
    assert (taken["attention_step"] > 0) == (name not in ("norms after", "layer norms", "clipped"))
    assert (taken["ffn_step"] > 0) == (name not in ("experts", "not gated", "norms after", "layer norms"))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights(kind: str) -> None:
    model = tiny.model(width=64, ffn_width=96)
    for layer in quantisable_modules(model).values():
        layer.quantise(layer.weight.detach(), kind, 32, lambda x: x)
    said = []
    for on in (False, True):
        for block in model.blocks:
            block.fused = on
        engine = Engine(model, tiny.tokenizer(), ServeConfig(pages=30, page_tokens=4, max_requests=3))
        said.append(engine.generate(PROMPTS, GREEDY))
    assert said[0] == said[1]


def ranks_say() -> list[Any]:
    said = []
    with DistributedContext.build(Plan(tp=2), "cpu") as context:
        for on in (False, True):
            model = tiny.model(context.axes.serving())
            for block in model.blocks:
                block.fused = on
            engine = Engine(model, tiny.tokenizer(), ServeConfig(pages=30, page_tokens=4, max_requests=3))
            said.append(engine.generate(PROMPTS, GREEDY))
    return said


@pytest.mark.xdist_group("worlds")
def test_ranks_that_share_a_model_say_the_same() -> None:
    for plain, ours in run(2, ranks_say):
        assert plain == ours


def test_what_wants_a_gradient_goes_through_the_modules() -> None:
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
    fused_block.enable(model)  # a CPU has none of the kernels, and stays as it is
    assert not block.fused and block.ffn.up.kernels == "auto"


def test_candidates_of_tiles_fit_a_kernel_and_a_table() -> None:
    for cell in skinny_gemm.CELLS:
        assert skinny_gemm.candidates(cell)
        assert all(how.BK & (how.BK - 1) == 0 for how in skinny_gemm.candidates(cell))
    tiles = skinny_gemm.candidates(skinny_gemm.CELLS[0])[0]
    rows = [{"kind": "plain", "tiles": tiles._asdict()}, {"kind": "int4", "tiles": None}]
    record = json.loads(skinny_gemm.written("none", rows))
    assert record == {"measured_on": "none", "rows": rows}
    assert skinny_gemm_tiles.SkinnyTiles(**record["rows"][0]["tiles"]) == tiles


def test_tuning_the_matrix_units_leaves_other_rows_of_the_table() -> None:
    table = skinny_gemm_tiles.table()
    kept, ways = skinny_gemm.to_measure(skinny_gemm.CELLS, units=True)
    assert kept == [row for row in table if row["kind"] == "plain"]
    for cell, hows in ways.items():
        F, D, _ = skinny_gemm.SHAPES[cell.name]
        now = skinny_gemm_tiles.table_tiles(cell.kind, cell.rows, F, D, gated=cell.gated)
        assert cell.kind != "plain" and any(how.tensor_cores for how in hows) and len(set(hows)) == len(hows)
        assert now is None or now in hows
    # Each shape that the table had is measured, and more rows.
    had = {(row["kind"], row["gated"], row["rows"]) for row in table if row["kind"] != "float8"}
    assert had - {(row["kind"], row["gated"], row["rows"]) for row in kept} <= {(c.kind, c.gated, c.rows) for c in ways}
    assert {c.rows for c in ways} == {1, 2, 4, 8, 16}
    assert not any(how.tensor_cores for how in skinny_gemm.in_registers(skinny_gemm.CELLS[-1]))


def test_the_table_of_tiles_is_asked_by_the_nearest_shape() -> None:
    for kind, gated in (("plain", False), ("plain", True), ("int8", False), ("float8", True), ("int4", False)):
        for rows in (1, 2, 3, 4):
            tiles = skinny_gemm_tiles.table_tiles(kind, rows, 12288, 4096, gated=gated)
            assert tiles is None or (tiles.BK & (tiles.BK - 1) == 0 and tiles.stages > 1)
        assert skinny_gemm_tiles.table_tiles(kind, skinny_gemm_tiles.MAX_ROWS + 1, 4096, 4096, gated=gated) is None
    assert skinny_gemm_tiles.table_tiles("plain", 1, 4096, 4096, gated=False) is not None

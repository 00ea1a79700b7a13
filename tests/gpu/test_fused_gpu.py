"""Fused kernels for decoding: skinny GEMMs with prologue and epilogue, RoPE with KV-cache write, whole models.

pytest -q tests/gpu/test_fused_gpu.py        # about six minutes, most of it compiling
"""

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from colonnade.config import ServeConfig
from colonnade.kernels import rotary as rotary_reference
from colonnade.kernels import sampling as sample_reference
from colonnade.kernels import triton_rotary, triton_sampled_tokens, triton_sampling
from colonnade.kernels.attention import cache_write, triton_cache_write
from colonnade.kernels.linear import reference, skinny_gemm, skinny_gemm_tiles
from colonnade.kernels.linear.quantise import quantise
from colonnade.kernels.linear.reference import Gate, NormWeights
from colonnade.kernels.linear.skinny_gemm_tiles import SkinnyTiles
from colonnade.model import fused_block
from colonnade.model.weight_only_quant import quantisable_modules
from colonnade.serve import Engine, SamplingParams
from tests.all_codes import matrices_of_all_codes, tolerance
from tests.sample_cases import sample_cases
from tests.serve import tiny
from tests.unit.test_fused import SHAPES

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1.2e-3, torch.float32: 2e-4}
"""Relative norm against float64; int4 sets the limit for float16 and float32: its nibbles are offset by 2048."""
KINDS = [("plain", 64), ("int8", 64), ("float8", 64), ("int4", 64)]
ODD = 333, 1000
CASES = [(kind, size, torch.bfloat16) for kind in KINDS for size in ((4096, 4096), (4096, 11008), ODD)]
CASES += [(kind, ODD, dtype) for kind in KINDS for dtype in (torch.float16, torch.float32)]
CASES += [
    (("int4", 32), ODD, torch.bfloat16),
    (("int4", 128), ODD, torch.bfloat16),
    (KINDS[0], (17, 40), torch.bfloat16),
]
"""Each case compiles a few kernels."""


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def to_double(weight: Any) -> Any:
    return weight.double() if isinstance(weight, torch.Tensor) else weight


@pytest.mark.parametrize(("how", "size", "dtype"), CASES, ids=str)
def test_products(how: tuple[str, int], size: tuple[int, int], dtype: torch.dtype) -> None:
    kind, group = how
    (F, D), weights = size, [randn(*size, dtype=torch.float32, seed=i) / size[1] ** 0.5 for i in range(2)]
    made = [w.to(dtype) if kind == "plain" else quantise(w, kind, group) for w in weights]
    bias, gain = randn(F, dtype=dtype), NormWeights(randn(D, dtype=dtype), 1e-5)
    for rows in (1, 3, 16):
        x, more = randn(rows, D, dtype=dtype), randn(rows, F, dtype=dtype, seed=1)
        options: list[dict[str, Any]] = [{}, {"residual_TF": more}, {"norm": gain, "gate": Gate(made[1], None, "silu")}]
        for way in options:
            b = None if way else bias
            exact = {
                "norm": NormWeights(gain.weight_D.double(), 1e-5), "residual_TF": more.double(),
                "gate": Gate(to_double(made[1]), None, "silu"),
            }  # fmt: skip
            expected = reference.fused_linear(
                x.double(), to_double(made[0]), None if b is None else b.double(), **{k: exact[k] for k in way}
            )
            got = skinny_gemm.fused_linear(x, made[0], b, **way)
            error = float((got.double() - expected).norm() / expected.norm())
            # torch's kernels round after every operation and dequantise weights to the dtype of x.
            ours = (
                skinny_gemm_tiles.table_tiles(kind, rows, F, D, gated="gate" in way)
                if rows <= skinny_gemm_tiles.MAX_ROWS
                else None
            )
            factor = 1 if ours else 3
            if ours and ours.tensor_cores and kind == "int4" and dtype == torch.float16 and "gate" in way:
                factor = 2  # tensor cores sum nibbles offset by 1024, in both products of a gate
            assert got.dtype == dtype and error < factor * TOLERANCE[dtype], (rows, list(way), error)
            assert torch.equal(got, skinny_gemm.fused_linear(x, made[0], b, **way))


@pytest.mark.parametrize(
    "tiles",
    [
        SkinnyTiles(8, 1024, 4, 4),
        SkinnyTiles(16, 1024, 4, 3, 2),
        SkinnyTiles(4, 4096, 8, 4, 1),
        SkinnyTiles(8, 512, 2, 6, 4),
        SkinnyTiles(2, 64, 1, 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["plain", "int8", "int4"])
def test_any_tiles(tiles: SkinnyTiles, kind: str) -> None:
    """One step, several, a partial last one; one program per block, or persistent programs."""
    if kind == "int4":
        tiles = tiles._replace(BK=tiles.BK // 8)
    w = randn(1000, 4096, dtype=torch.float32) / 64
    weight = w.bfloat16() if kind == "plain" else quantise(w, kind, 64)
    for rows in (1, 4):
        x, more = randn(rows, 4096, dtype=torch.bfloat16), randn(rows, 1000, dtype=torch.bfloat16)
        norm = NormWeights(randn(4096, dtype=torch.bfloat16), 1e-5)
        got = skinny_gemm.launch(x, weight, tiles=tiles, norm=norm, residual_TF=more)
        exact = NormWeights(norm.weight_D.double(), 1e-5)
        expected = reference.fused_linear(x.double(), to_double(weight), norm=exact, residual_TF=more.double())
        assert (got.double() - expected).norm() < 4e-3 * expected.norm()
        repeats = [skinny_gemm.launch(x, weight, tiles=tiles, norm=norm, residual_TF=more) for _ in range(3)]
        assert all(torch.equal(got, again) for again in repeats)


TENSOR_CORE_TILES = [
    SkinnyTiles(16, 512, 8, 4, 1, True), SkinnyTiles(16, 512, 8, 4, 2, True), SkinnyTiles(32, 512, 16, 3, 1, True),
    SkinnyTiles(32, 128, 8, 3, 1, True), SkinnyTiles(16, 64, 2, 3, 0, True),
]  # fmt: skip
"""BK counts int4 words."""
ODD_EVEN = 333, 1000


TENSOR_CORE_CASES = [(tiles, (1000, 4096), torch.bfloat16) for tiles in TENSOR_CORE_TILES]
TENSOR_CORE_CASES += [(tiles, ODD_EVEN, torch.float16) for tiles in (TENSOR_CORE_TILES[0], TENSOR_CORE_TILES[3])]


@pytest.mark.parametrize(("tiles", "size", "dtype"), TENSOR_CORE_CASES, ids=str)
@pytest.mark.parametrize("how", [("int8", 64), ("float8", 64), ("int4", 64)], ids=str)
def test_tensor_core_tiles(tiles: SkinnyTiles, how: tuple[str, int], size: tuple[int, int], dtype: torch.dtype) -> None:
    """All inputs at once and in steps, one or two programs per SM; a row's result ignores the other rows."""
    (kind, group), (F, D) = how, size
    turn = TENSOR_CORE_TILES.index(tiles)
    if kind != "int4":
        tiles = tiles._replace(BN=16, BK=tiles.BK * 8, stages=2 if tiles.BK == 512 else tiles.stages)
    made = [quantise(randn(*size, dtype=torch.float32, seed=i) / D**0.5, kind, group) for i in range(2)]
    gain = NormWeights(randn(D, dtype=dtype), 1e-5)
    exact = {"norm": NormWeights(gain.weight_D.double(), 1e-5), "gate": Gate(made[1], None, "silu")}
    for i, rows in enumerate((1, 3, 16)):
        if rows == 16 and tiles.programs_per_sm == 2:
            continue  # sixteen rows of x fill an SM's registers
        x, more = randn(rows, D, dtype=dtype), randn(rows, F, dtype=dtype, seed=1)
        options: list[dict[str, Any]] = [{}, {"residual_TF": more, "norm": gain}, {"norm": gain, "gate": exact["gate"]}]
        way = options[(i + turn) % 3]
        b = None if way else randn(F, dtype=dtype)
        expected = reference.fused_linear(
            x.double(), made[0], None if b is None else b.double(),
            **{k: exact.get(k, more.double()) for k in way},
        )  # fmt: skip
        got = skinny_gemm.launch(x, made[0], b, tiles=tiles, **way)
        error = float((got.double() - expected).norm() / expected.norm())
        most = (2 if "gate" in way else 1.5) * tolerance(dtype)  # a gate multiplies two rounded products
        assert got.dtype == dtype and error < most, (rows, list(way), error)
        others = torch.cat((x[: rows // 2], 50 * x[rows // 2 :]))
        assert torch.equal(skinny_gemm.launch(others, made[0], b, tiles=tiles, **way)[: rows // 2], got[: rows // 2])


@pytest.mark.parametrize("group", [32, 128])
def test_tensor_core_tiles_with_other_groups(group: int) -> None:
    weight = quantise(randn(334, 1000, dtype=torch.float32) / 32, "int4", group)
    for rows, tiles in itertools.product((1, 3, 8, 16), (TENSOR_CORE_TILES[0], TENSOR_CORE_TILES[3])):
        x = randn(rows, 1000, dtype=torch.bfloat16)
        got, expected = skinny_gemm.launch(x, weight, tiles=tiles), reference.fused_linear(x.double(), weight)
        assert (got.double() - expected).norm() < tolerance(x.dtype) * expected.norm(), (rows, tiles)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tensor_cores_decode_every_code(dtype: torch.dtype) -> None:
    """One value at a time; tensor cores must not flush float8 values that are subnormal in their bfloat16 form."""
    for weight in matrices_of_all_codes("cuda"):
        x = torch.eye(weight.inputs, dtype=dtype, device="cuda")
        exact = reference.fused_linear(x.double(), weight).T
        tiles = SkinnyTiles(16, weight.values.shape[1], 2, 2, tensor_cores=True)
        got = torch.cat([skinny_gemm.launch(some, weight, tiles=tiles) for some in x.split(16)]).T
        near = 4e-3 if dtype == torch.bfloat16 else 6e-4
        assert torch.allclose(got.double(), exact, rtol=near, atol=1e-7), weight.kind
        assert weight.kind == "int4" or torch.equal(got.double(), exact), weight.kind


@pytest.mark.parametrize("pool", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("group", "K", "H"), [(1, 32, 128), (4, 8, 128), (8, 2, 64), (5, 3, 80), (7, 1, 256)])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_kv_write(pool: torch.dtype, group: int, K: int, H: int, normed: bool) -> None:
    T, dtype = 13, torch.bfloat16
    qkv = randn(T, K * (group + 2) * H, dtype=dtype)
    turn = rotary_reference.Rotation(randn(T, 1, H, dtype=dtype, seed=1), randn(T, 1, H, dtype=dtype, seed=2))
    norms = (
        (NormWeights(randn(H, dtype=dtype), 1e-5), NormWeights(randn(H, dtype=dtype, seed=3), 1e-6)) if normed else None
    )
    slots = torch.randperm(20 * 16, device="cuda")[:T]
    ours, theirs = ([torch.zeros(20, 16, K, H, device="cuda", dtype=pool) for _ in range(2)] for _ in range(2))
    q = triton_cache_write.rope_and_kv_write(qkv, *ours, slots, turn=turn, norms=norms)
    expected = cache_write.rope_and_kv_write(qkv, *theirs, slots, turn=turn, norms=norms)
    assert (q.double() - expected.double()).norm() < 6e-3 * expected.double().norm()
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b.double()).norm() < (6e-3 if pool == dtype else 4e-2) * b.double().norm()
        assert torch.equal((a == 0).all(-1), (b == 0).all(-1))  # the same slots and no others


@pytest.mark.parametrize("name", ["llama", "one head a group", "norms of heads", "biases", "a window", "experts"])
@pytest.mark.parametrize("graphed", [False, True])
@pytest.mark.parametrize("weights", ["stored", "int8", "int4"])
def test_engine_generates_same_tokens_as_cpu(name: str, graphed: bool, weights: str, plain_cpu: None) -> None:
    if weights != "stored" and name == "experts":
        pytest.skip("experts have quantised formats of their own")
    params, outputs = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), []
    for device in ("cpu", "cuda"):
        model = tiny.model(dtype=torch.float32, width=64, ffn_width=96, **SHAPES[name])
        if weights != "stored":
            for layer in quantisable_modules(model).values():
                layer.quantise(layer.weight.detach().to(device), weights, 32, lambda x: x)
        fixed = graphed and device == "cuda"
        limits = ServeConfig(pages=30, page_tokens=4, max_requests=4, graph_capture=fixed)
        engine = Engine(model.to(device), tiny.tokenizer(), limits)
        assert all(block.fused for block in model.blocks) == (device == "cuda")
        outputs.append(engine.generate([[1, 2, 3], [50, 7], [9, *range(20, 60)]], params))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("R", "V"), [(1, 32_000), (7, 151_936), (256, 301)])
def test_greedy_sampling(dtype: torch.dtype, R: int, V: int) -> None:
    logits = randn(R, V, dtype=dtype)
    right = logits.cpu().max(1).values
    tokens = triton_sampling.greedy(logits, -1)
    assert torch.equal(logits.gather(1, tokens[:, None]).squeeze(1).cpu(), right)
    for row, top, token in zip(logits.cpu(), right, tokens.tolist(), strict=True):
        assert int((row == top).nonzero()[0]) == token  # the first of equal maxima
    logits[0, V // 2] = torch.nan
    assert triton_sampling.greedy(logits, -1)[0] == -1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [1, 7, 5000, 151_936])
def test_sampling(dtype: torch.dtype, vocab: int) -> None:
    """Each filter with many ties, and rows that are not finite."""
    for drawn_RV, args_RA in sample_cases(vocab, "cuda"):
        logits_RV = drawn_RV.to(dtype)
        ours_R = triton_sampled_tokens.sample(logits_RV, args_RA, -5)
        assert torch.equal(ours_R, sample_reference.sample(logits_RV, args_RA, -5))
        alone_R = [triton_sampled_tokens.sample(logits_RV[r : r + 1], args_RA[r : r + 1], -5) for r in range(3)]
        assert torch.equal(torch.cat(alone_R), ours_R[:3])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rotary_angles_of_distant_positions(dtype: torch.dtype) -> None:
    """A million radians are reduced as exactly as in torch."""
    positions, theta = torch.tensor([0, 1, 77, 131_071, 1_048_575], device="cuda"), torch.logspace(0, -6, 64).cuda()
    ours, theirs = (run.rotation(positions, theta, 1.1, dtype) for run in (triton_rotary, rotary_reference))
    for a, b in zip(ours, theirs, strict=True):
        assert (a.double() - b.double()).abs().max() < 2e-6 + torch.finfo(dtype).eps * 1.2


def test_write_next_tokens() -> None:
    last = torch.tensor([5, -1, 7], device="cuda")
    for T in (1, 1000):
        ids = torch.arange(T, device="cuda") % 7 - 3
        theirs = ids.clone()
        triton_sampling.write_next_tokens_(ids, last)
        sample_reference.write_next_tokens_(theirs, last)
        assert torch.equal(ids, theirs)


def test_training_after_serving_has_gradients() -> None:
    model = tiny.model(dtype=torch.float32).to("cuda")
    fused_block.enable(model)
    x = torch.randn(3, 24, device="cuda", requires_grad=True)
    ffn = model.blocks[0].ffn
    assert ffn.up.kernels == "skinny"
    ffn(x, 3).sum().backward()
    assert x.grad is not None and ffn.up.weight.grad is not None

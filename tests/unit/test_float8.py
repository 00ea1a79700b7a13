"""Float8 products compared with rounding written out by hand and with the exact product."""

import pytest
import torch
from torch import Tensor

from colonnade.config import ModelConfig
from colonnade.kernels.linear import float8, reference, scaled_mm
from colonnade.model.activation_checkpointing import set_recompute
from colonnade.model.tensor_parallel_linear import enable_float8
from tests.models import build, ragged
from tests.unit.test_compile import loss_of
from tests.worlds import assert_same

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
BITS = {torch.float8_e4m3fn: (3, -6), torch.float8_e5m2: (2, -14)}


def random_rows(*shape: int, seed: int, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(shape[0], 1, generator=generator, dtype=torch.float64).mul(spread).exp()
    return rows * torch.randn(*shape, generator=generator, dtype=torch.float64)


def rounded(x: Tensor, kind: torch.dtype, dim: int | None) -> Tensor:
    """``x`` scaled and rounded to the format's nearest value (ties to even), by arithmetic on exponents."""
    highest = x.abs().max() if dim is None else x.abs().amax(dim, keepdim=True)
    scale = torch.exp2(torch.floor(torch.log2(LARGEST[kind] / highest)))
    mantissa, lowest = BITS[kind]
    exponent = torch.floor(torch.log2((x * scale).abs())).clamp(min=lowest)
    unit = torch.exp2(exponent - mantissa)
    return torch.round(x * scale / unit) * unit / scale


@pytest.mark.parametrize("kind", LARGEST, ids=str)
@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantise_rounds_to_the_nearest(kind: torch.dtype, row_wise: bool, dtype: torch.dtype) -> None:
    x = random_rows(33, 48, seed=0, spread=3).to(dtype)
    x8, scale = float8.quantise(x, kind, row_wise=row_wise)
    assert scale.shape == ((33, 1) if row_wise else ()) and x8.dtype == kind
    assert torch.equal(scale.log2(), scale.log2().round()), "powers of two"
    assert torch.equal(x8.double() * scale, rounded(x.double(), kind, 1 if row_wise else None))


def test_zeros_stay_zero_and_non_finite_values_become_nan() -> None:
    for row_wise in (False, True):
        x8, scale = float8.quantise(torch.zeros(3, 16), torch.float8_e4m3fn, row_wise=row_wise)
        assert not x8.float().any() and scale.isfinite().all()
        for bad in (torch.nan, torch.inf, -torch.inf):
            x = torch.ones(3, 16)
            x[1, 2] = bad
            x8, scale = float8.quantise(x, torch.float8_e4m3fn, row_wise=row_wise)
            assert (x8.float() * scale)[1].isnan().any()


@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.parametrize("T", [0, 1, 7, 64])
def test_linear_is_the_product_of_rounded_operands(row_wise: bool, T: int) -> None:
    x, w, dy = random_rows(T, 32, seed=0, spread=2), random_rows(48, 32, seed=1), random_rows(T, 48, seed=2, spread=2)
    leaves = [a.float().requires_grad_() for a in (x, w)]
    y = float8.linear(*leaves, row_wise=row_wise)
    y.backward(dy.float())
    assert y.shape == (T, 48)
    if not T:
        return
    narrow, wide = torch.float8_e4m3fn, torch.float8_e4m3fn if row_wise else torch.float8_e5m2
    x, w, dy = (a.float().double() for a in (x, w, dy))
    along, across = (1, 0) if row_wise else (None, None)
    expected = (
        rounded(x, narrow, along) @ rounded(w, narrow, along).T,
        rounded(dy, wide, along) @ rounded(w, narrow, across),
        rounded(dy, wide, across).T @ rounded(x, narrow, across),
    )
    exact = (x @ w.T, dy @ w, dy.T @ x)
    for got, rounded_result, exact_result in zip(
        (y.detach(), *(leaf.grad for leaf in leaves)), expected, exact, strict=True
    ):
        assert got is not None
        assert_same(got.double(), rounded_result, 1e-5)
        assert 1e-3 < (got - exact_result).norm() / exact_result.norm() < 0.1, (
            "the error shows rounding, of the expected size"
        )


@pytest.mark.parametrize("shape", [(32, 64, 48), (5, 32, 16), (16, 7, 32)], ids=str)
@pytest.mark.parametrize("row_wise", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_scaled_mm_equals_the_reference(shape: tuple[int, int, int], row_wise: bool) -> None:
    """Runs torch's CPU operator, whose layouts, scales and padding are the same as on a GPU."""
    M, K, N = shape
    a, a_scale = float8.quantise(random_rows(K, M, seed=0).bfloat16().T, torch.float8_e4m3fn, row_wise=row_wise)
    b, b_scale = float8.quantise(random_rows(N, K, seed=1).bfloat16(), torch.float8_e4m3fn, row_wise=row_wise)
    got, expected = (
        run(a, b, a_scale, b_scale, torch.bfloat16) for run in (scaled_mm.scaled_product, reference.scaled_product)
    )
    assert got.shape == (M, N) and got.dtype == torch.bfloat16
    assert (got.float() - expected.float()).norm() <= 4e-3 * expected.float().norm()


MODEL = ModelConfig(vocab_size=67, layers=2, width=32, heads=4, kv_heads=2, ffn_width=48, context=64, qkv_bias=True,
                    out_bias=True, ffn_bias=True)  # fmt: skip


def test_blocks_use_float8_and_the_output_head_does_not() -> None:
    outputs = []
    stream, attend, _ = ragged(MODEL)
    for scaling in (None, "tensorwise", "rowwise"):
        model = build(MODEL, dtype=torch.float32)
        if scaling:
            enable_float8(model.blocks, scaling)
        inside = [m for m in model.blocks.modules() if getattr(m, "float8", None)]
        assert len(inside) == (10 if scaling else 0) and model.unembed.float8 is None
        outputs.append(model(stream, attend, lambda x, *_: x))
    for x in outputs[1:]:
        assert 1e-3 < (x - outputs[0]).norm() / outputs[0].norm() < 0.1
    assert not torch.equal(outputs[1], outputs[2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scaling", "kind"),
    [
        ("tensorwise", "full"),
        ("rowwise", "none"),
        pytest.param("tensorwise", "none", marks=pytest.mark.long),
        pytest.param("rowwise", "full", marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor", "ignore:.*should not be instantiated")
def test_float8_compiles_as_one_graph(scaling: str, kind: str) -> None:
    torch._dynamo.reset()
    plain, model = (build(MODEL, dtype=torch.float32) for _ in range(2))
    for m in (plain, model):
        enable_float8(m.blocks, scaling)
    set_recompute(model.blocks, [kind] * 2)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    for lengths in ([16], [8, 8], [24]):
        for m in (plain, model):
            m.zero_grad()
            loss_of(m, lengths).backward()
        for name, p in model.named_parameters():
            assert_same(p.grad, plain.get_parameter(name).grad, 1e-5, what=name)
    torch._dynamo.reset()

"""Weight-only quantised GEMMs on a GPU: close to float64 at any number of rows, deterministic; whole models.

pytest -q tests/gpu/test_quantised_gpu.py        # about four minutes, most of it compiling
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from colonnade import api
from colonnade.checkpoint.hf.write import write_hf
from colonnade.compress.gptq import damped, error, gptq, nearest
from colonnade.compress.sparse24 import sparsegpt
from colonnade.config import ExpertsConfig, MoeConfig, ServeConfig
from colonnade.kernels import permute
from colonnade.kernels.experts import reference
from colonnade.kernels.experts import triton_quantised as experts_gpu
from colonnade.kernels.experts.quantised import QuantisedWeights
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.linear import cuda_ternary, gptq_columns, skinny_gemm, triton_gptq, triton_ternary
from colonnade.kernels.linear import reference as linear_reference
from colonnade.kernels.linear.gptq_columns import Rounding
from colonnade.kernels.linear.quantise import Quantised, dequantise, quantise
from colonnade.kernels.registry import choose
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import SamplingParams
from colonnade.serve.engine import Engine
from tests.experts import LOADS, Case, dequantise_experts, quantise_experts
from tests.serve import tiny

pytestmark = pytest.mark.filterwarnings("ignore")

KINDS = [("int8", 64), ("int4", 32), ("int4", 64), ("int4", 128), ("float8", 64)]
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 1e-4}
SHAPES = [(4096, 4096), (12288, 4096), (4096, 11008), (32000, 4096), (333, 1000), (1, 64), (17, 40)]


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_any_number_of_rows(kind: str, group: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    weight = quantise(torch.randn(*shape, generator=draw, device="cuda"), kind, group)
    bias = torch.randn(shape[0], generator=draw, device="cuda").to(dtype)
    for rows in (0, 1, 2, 7, 16, 33, 64, 65, 300):
        x = torch.randn(rows, shape[1], generator=draw, device="cuda").to(dtype)
        exact = linear_reference.quantised_linear(x.double(), weight, bias.double())
        got = skinny_gemm.linear(x, weight, bias)
        assert got.shape == exact.shape and got.dtype == dtype
        tolerance = TOLERANCE[dtype]
        if kind == "float8" and dtype == torch.bfloat16 and rows > 64 and shape[0] % 16 == shape[1] % 16 == 0:
            tolerance = 4e-2  # x is quantised to float8 too
        error = float((got.double() - exact).norm() / exact.norm().clamp(min=1e-9))
        assert error < tolerance, (rows, error)
        assert torch.equal(got, skinny_gemm.linear(x, weight, bias))


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_every_split_count(kind: str, group: int) -> None:
    weight = quantise(torch.randn(96, 5000, device="cuda"), kind, group)
    for rows in (1, 5):
        x = torch.randn(rows, 5000, device="cuda", dtype=torch.bfloat16)
        exact = linear_reference.quantised_linear(x.double(), weight)
        for splits in (1, 2, 3, 9):
            got = skinny_gemm.split_k(x, weight, splits=splits)
            assert (got.double() - exact).norm() < 4e-3 * exact.norm()


@pytest.mark.parametrize("weights", ["int8", "int4", "float8"])
@pytest.mark.parametrize("graphed", [False, True])
def test_model_generates_same_tokens_as_cpu(weights: str, graphed: bool, plain_cpu: None, tmp_path) -> None:
    write_hf(tiny.model(dtype=torch.float32), tmp_path / "m")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = []
    for device in ("cpu", "cuda"):
        model = api.load(tmp_path / "m", dtype="float32", device=device, weights=weights, weight_group=32)
        limits = ServeConfig(pages=24, page_tokens=4, max_requests=4, weights=weights)
        fixed = graphed and device == "cuda"
        engine = Engine(model.transformer, tiny.tokenizer(), limits.replace(graph_capture=fixed))
        outputs.append(engine.generate([[1, 2, 3], [50, 7], [9]], params))
    assert outputs[0] == outputs[1]


def test_memory_is_that_of_the_quantised_weights(tmp_path) -> None:
    """Also while loading: only one matrix at a time is on the device as stored."""
    shape = tiny.config(layers=8, width=1024, ffn_width=4096, heads=8, kv_heads=8, head_width=128, init_std=0.02)
    from colonnade.model import Transformer, initialise
    from colonnade.model.weight_only_quant import weight_bytes

    write_hf(initialise(Transformer(shape, dtype=torch.bfloat16), seed=0), tmp_path / "m")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = api.load(tmp_path / "m", dtype="bfloat16", device="cuda", weights="int4")
    allocated = torch.cuda.memory_allocated() - before
    assert allocated < 1.05 * weight_bytes(model.transformer) + 2**20
    # Quantising takes float32 copies and temporaries: up to a dozen times the largest matrix.
    assert torch.cuda.max_memory_allocated() - before < allocated + 12 * 4 * 4096 * 1024


LAYERS = [
    *(Case(300, 2, 8, 256, 192, load=load, biased=load == "even", gated=load != "one") for load in LOADS),
    Case(1, 8, 64, 256, 320), Case(33, 4, 64, 200, 100), Case(5000, 2, 8, 128, 256), Case(0, 2, 8, 64, 64),
    Case(17, 2, 4, 72, 40, biased=True, gated=False, activation="gelu_tanh"),
]  # fmt: skip
"""Few rows per expert, about sixty, many; widths that are multiples of the tiles and some that are not."""


@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("case", LAYERS, ids=lambda case: f"{case.T}x{case.A}of{case.E}-{case.load}")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_experts(kind: str, group: int, case: Case, dtype: torch.dtype) -> None:
    x, routing, *stacks = (None if w is None else w.detach() for w in case.leaves(dtype, "cuda"))
    packed = quantise_experts(Weights(*stacks), kind, group)
    order_R, ends_E = permute.sort(case.ids().cuda(), case.E, case.rows())
    plain = dequantise_experts(packed, torch.float64)
    exact = reference.routed(x.double(), order_R, ends_E, routing.double(), plain, case.activation)
    got = experts_gpu.routed(x, order_R, ends_E, routing, packed, case.activation)
    # The hidden units, and with int4 the weights, are rounded to the dtype of x too.
    assert got.dtype == dtype and (got.double() - exact).norm() <= 1.5 * TOLERANCE[dtype] * exact.norm()
    assert torch.equal(got, experts_gpu.routed(x, order_R, ends_E, routing, packed, case.activation))


@pytest.mark.parametrize("weights", ["int8", "int4", "float8"])
@pytest.mark.parametrize("how", ["plain", "graphs", "offloaded"])
def test_moe_generates_same_tokens_as_cpu(weights: str, how: str, plain_cpu: None, tmp_path) -> None:
    """Captured steps do not read expert loads; with offloading, experts of two layers are on the device."""
    moe = MoeConfig(experts=8, active=2, ffn_width=40, shared_width=12, shared_gate=True)
    whole = tiny.model(dtype=torch.float32, layers=4, moe=moe)
    api.save(api.Model(whole, None, DistributedContext.solo(torch.device("cpu")), "m"), tmp_path / "m")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = []
    for device in ("cpu", "cuda"):
        experts = ExpertsConfig(layers_on_device=2) if how == "offloaded" and device == "cuda" else ExpertsConfig()
        options = {"dtype": "float32", "device": device, "weights": weights, "weight_group": 32}
        model = api.load(tmp_path / "m", **options, experts=experts)
        limits = ServeConfig(pages=24, page_tokens=4, max_requests=4, weights=weights)
        fixed = how == "graphs" and device == "cuda"
        engine = Engine(model.transformer, tiny.tokenizer(), limits.replace(graph_capture=fixed))
        outputs.append([c.token_ids for c in engine.generate([[1, 2, 3], [50, 7], [9]], params)])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", ["int4", "int8", "float8", "sparse24"])
@pytest.mark.parametrize(("rows", "columns"), [(576, 128), (33, 36)])
def test_gptq_columns(kind: str, rows: int, columns: int) -> None:
    """Nearly all values are the reference's: a fused multiply-add may round a tie the other way."""
    draw = torch.Generator("cuda").manual_seed(0)
    w = torch.randn(rows, 3 * columns, generator=draw, device="cuda")[:, columns : 2 * columns]
    u = torch.randn(columns, columns, generator=draw, device="cuda").triu(1) * 0.1 + torch.eye(columns, device="cuda")
    scale = w.abs().amax(1, keepdim=True).expand(-1, columns) / {"int4": 7, "int8": 127}.get(kind, 448)
    rounding = Rounding(kind, None if kind == "sparse24" else scale, -8 * scale if kind == "int4" else None)
    run = choose("gptq_columns", "cuda", torch.float32, "triton")
    q, delta = run(w.clone(), u, rounding)
    exact_q, exact_delta = gptq_columns.round_columns(w.clone(), u, rounding)
    # The weights that sparse24 keeps are not rounded: there, the same ones must be kept.
    same = ((q != 0) == (exact_q != 0) if kind == "sparse24" else q == exact_q).all(1)
    assert same.float().mean() > 0.9
    torch.testing.assert_close(q[same], exact_q[same], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(delta[same], exact_delta[same], rtol=1e-3, atol=1e-4)
    assert abs(float(delta.norm() / exact_delta.norm()) - 1) < 1e-2


@pytest.mark.parametrize("kind", ["int4", "int8", "float8", "sparse24"])
def test_gptq_with_the_default_kernel_is_as_good_as_on_a_cpu(kind: str) -> None:
    """The kernel is the default on a GPU; the error tr(Δ H Δᵀ) is that of a CPU, whose H is in float64."""
    assert choose("gptq_columns", "cuda", torch.float32) is triton_gptq.round_columns
    draw = torch.Generator().manual_seed(0)
    w_FD, x_ND = torch.randn(96, 352, generator=draw), torch.randn(1024, 352, generator=draw)
    x_ND[:, 1:] += x_ND[:, :-1]
    h_DD = 2 / len(x_ND) * x_ND.T @ x_ND

    def compressed(device: str) -> float:
        w, h = w_FD.to(device), h_DD.to(device)
        got = sparsegpt(w, h) if kind == "sparse24" else dequantise(gptq(w, h, kind, 32), torch.float32)
        return error(got.cpu() - w_FD, damped(h_DD))

    on_gpu, on_cpu = compressed("cuda"), compressed("cpu")
    assert on_gpu == pytest.approx(on_cpu, rel=0.02)
    if kind != "sparse24":
        plain = dequantise(nearest(w_FD, kind, 32), torch.float32)
        assert on_gpu < 0.6 * error(plain - w_FD, damped(h_DD))


@pytest.mark.parametrize("trits", [18, 24, 32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_ternary_rows(trits: int, dtype: torch.dtype) -> None:
    """All kernels and tables, units of one, two and four words; beyond the kernels' rows the reference."""
    draw = torch.Generator("cuda").manual_seed(0)
    for outputs, inputs in ((333, 1000), (64, 4096), (512, 2048), (17, 40), (4240, 360), (40, 14336)):
        weight = quantise(torch.randn(outputs, inputs, generator=draw, device="cuda"), "ternary", trits)
        bias = torch.randn(outputs, generator=draw, device="cuda").to(dtype)
        for rows in (0, 1, 2, 8, 64, 65):
            x = torch.randn(rows, inputs, generator=draw, device="cuda").to(dtype)
            exact = linear_reference.quantised_linear(x.double(), weight)
            got = skinny_gemm.linear(x, weight, bias)
            assert got.shape == exact.shape and got.dtype == dtype
            assert (got.double() - exact - bias.double()).norm() <= 2 * TOLERANCE[dtype] * exact.norm()
            if 0 < rows <= triton_ternary.MAX_ROWS:
                in_cuda = dtype != torch.float32 and trits != 32 and outputs % 8 == 0
                assert cuda_ternary.supports(x, weight) or not in_cuda
                assert torch.equal(got[-1:], skinny_gemm.linear(x[-1:], weight, bias))
                for two_levels in (False, True):
                    tiles = triton_ternary.Tiles(32, 8, 1, 8, two_levels)
                    alone = triton_ternary.linear(x, weight, tiles)
                    assert (alone.double() - exact).norm() <= TOLERANCE[dtype] * exact.norm()


@pytest.mark.parametrize("case", [LAYERS[0], Case(1, 8, 64, 256, 320), Case(8, 4, 16, 200, 100), LAYERS[-1]], ids=str)
@pytest.mark.parametrize("trits", [18, 24, 32])
def test_ternary_experts(trits: int, case: Case) -> None:
    x, routing, *stacks = (None if w is None else w.detach() for w in case.leaves(torch.bfloat16, "cuda"))
    packed = quantise_experts(Weights(*stacks), "ternary", trits)
    order_R, ends_E = permute.sort(case.ids().cuda(), case.E, case.rows())
    exact = reference.routed(
        x.double(), order_R, ends_E, routing.double(), dequantise_experts(packed, torch.float64), case.activation
    )
    got = experts_gpu.routed(x, order_R, ends_E, routing, packed, case.activation)
    assert (got.double() - exact).norm() <= 6e-3 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_ternary_experts_in_cuda(gated: bool, dtype: torch.dtype) -> None:
    """Several tiles per block, experts without tokens, unused choices; as the kernel in Triton computes it."""
    draw = torch.Generator("cuda").manual_seed(0)
    E, T, A, F, D = 6, 5, 2, 8520, 520

    def stack(outputs: int, inputs: int) -> Quantised:
        drawn = torch.randn(E * outputs, inputs, generator=draw, device="cuda")
        flat = quantise(drawn, "ternary", 18)
        return flat._replace(values=flat.values.unflatten(0, (E, -1)), scales=flat.scales.unflatten(0, (E, -1)))

    packed = QuantisedWeights(stack(F, D), stack(D, F), stack(F, D) if gated else None)
    x = torch.randn(T, D, generator=draw, device="cuda").bfloat16()
    ids_TA = torch.tensor([[0, 3], [3, 4], [E, 0], [3, 0], [4, 3]], device="cuda")
    routing = torch.rand(T, A, generator=draw, device="cuda").to(dtype)
    order_R, ends_E = permute.sort(ids_TA, E)
    assert cuda_ternary.supports(x, packed.up, order=order_R, ends=ends_E, gate=packed.gate, activation="silu")
    rows = [order_R, ends_E, routing, packed, "silu"]
    got = triton_ternary.routed_rows(x, *rows)[: int(ends_E[-1])]
    other = triton_ternary.routed_rows(x, *rows, tiles=triton_ternary.Tiles(32, 8, 1, 8))[: int(ends_E[-1])]
    assert (got - other).norm() <= 4e-3 * other.norm()
    assert torch.equal(got, triton_ternary.routed_rows(x, *rows)[: int(ends_E[-1])])

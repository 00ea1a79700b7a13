"""Expert kernels on a GPU: every registered kernel is close to float64, deterministic, without synchronisation."""

from typing import get_args

import pytest
import torch

from colonnade.config import ModelConfig, MoeConfig
from colonnade.kernels import permute, triton_sort
from colonnade.kernels import registry as chosen
from colonnade.kernels.experts import reference
from colonnade.kernels.experts.reference import ACTIVATIONS, Weights
from colonnade.kernels.experts.tiles import OVERRIDES, GroupedTiles, Kernel
from colonnade.kernels.registry import KERNELS, choose
from colonnade.model.moe import LayerRouting, MixtureOfExperts
from colonnade.parallel.axis import SOLO_AXES
from tests.experts import LOADS, Case, experts_with_dropout, gradients, routed_experts

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Both the hidden units and the output are rounded."""
CASES = [
    Case(200, 2, 8, 256, 384),
    Case(333, 8, 64, 128, 96, load="skewed"),
    Case(77, 4, 40, 72, 56, load="one", biased=True, activation="gelu"),
    Case(150, 3, 16, 136, 264, load="some dropped", gated=False, activation="relu"),
    Case(90, 2, 8, 128, 200, load="bounded", biased=True, activation="gelu_tanh"),
    Case(40, 2, 8, 64, 64, load="all dropped"),
    Case(1, 8, 128, 512, 256),
    Case(1, 6, 64, 256, 192, load="some dropped", biased=True),
    Case(16, 8, 128, 512, 256, load="skewed"),
    Case(300, 1, 8, 256, 128, load="skewed", biased=True),
    Case(0, 2, 8, 64, 64),
    Case(2500, 2, 4, 512, 640, biased=True),
]
ROWS = [
    pytest.param(row, dtype, id=f"{row.operation}-{row.name}-{str(dtype).removeprefix('torch.')}")
    for row in KERNELS
    if row.operation in ("dropout_experts", "routed_experts")
    if row.name != "reference" and "cuda" in row.devices
    for dtype in row.dtypes
]


WRAPPERS = {"routed_experts": routed_experts, "dropout_experts": experts_with_dropout}


def wrapped(row: chosen.Kernel):
    return WRAPPERS[row.operation](row.run)


def assert_close(row: chosen.Kernel, case: Case, dtype: torch.dtype) -> None:
    exact_run = reference.routed if row.operation == "routed_experts" else reference.experts
    exact = gradients(WRAPPERS[row.operation](exact_run), case, torch.float64, "cuda", values=dtype)
    for name, got in gradients(wrapped(row), case, dtype, "cuda").items():
        error = float((got.double() - exact[name]).norm() / exact[name].norm().clamp(min=1e-3))
        assert error < TOLERANCE[dtype] * (1 if name == "y" else 2), (name, error)


def test_triton_kernels_are_the_default() -> None:
    for operation in ("routed_experts", "sort_by_expert", "gather_rows", "combine_rows"):
        assert choose(operation, "cuda", torch.bfloat16) is choose(operation, "cuda", torch.bfloat16, "triton")


@pytest.mark.parametrize(("row", "dtype"), ROWS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.T}x{case.A}of{case.E}-{case.load}")
def test_experts(row: chosen.Kernel, dtype: torch.dtype, case: Case) -> None:
    assert_close(row, case, dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation: str) -> None:
    for row in (row for row in KERNELS if row.operation == "routed_experts" and row.name == "triton"):
        assert_close(row, Case(100, 2, 8, 64, 128, activation=activation), torch.bfloat16)


TILE_OPTIONS = [
    {"programs_per_sm": 1}, {"programs_per_sm": 2, "GROUP": 1}, {"descriptors": True}, {"gather_first": True},
    {"library": True},    {"descriptors": True, "gather_first": True}, {"interleaved": True},
]  # fmt: skip


@pytest.mark.parametrize("options", TILE_OPTIONS, ids=str)
def test_every_tile_option(options: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    for kernel in get_args(Kernel):
        monkeypatch.setitem(OVERRIDES, kernel, GroupedTiles(64, 64, 64, 4, 3)._replace(**options))
    for row in (row for row in KERNELS if row.operation == "routed_experts" and row.name == "triton"):
        assert_close(row, Case(700, 4, 32, 256, 320, load="skewed"), torch.bfloat16)


@pytest.mark.parametrize("kernel", get_args(Kernel))
def test_each_product_with_torch_grouped_mm(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OVERRIDES, kernel, GroupedTiles(64, 64, 64, 4, 3, library=True))
    for row in (row for row in KERNELS if row.operation == "routed_experts" and row.name == "triton"):
        for load in ("skewed", "some dropped", "all dropped"):
            assert_close(row, Case(700, 4, 32, 256, 320, load=load, gated=kernel != "up"), torch.bfloat16)


@pytest.mark.parametrize("load", LOADS)
def test_sort_equals_reference(load: str) -> None:
    """Many choices, few (which use another counting kernel), and none."""
    for T, A, E in ((5000, 8, 128), (256, 8, 128), (17, 3, 512), (1, 8, 64), (0, 2, 8)):
        case = Case(T, A, E, 1, 1, load=load)
        ids_TA = case.ids().cuda()
        got = choose("sort_by_expert", "cuda", torch.bfloat16)(ids_TA, case.E, case.rows())
        for ours, exact in zip(got, permute.sort(ids_TA, case.E, case.rows()), strict=True):
            assert torch.equal(ours, exact)
        used = ids_TA < case.E
        ours, exact = (run(ids_TA, case.E)[used] for run in (triton_sort.positions, permute.positions))
        assert torch.equal(ours, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gather_and_combine(dtype: torch.dtype) -> None:
    """Gather then combine with unit weights gives A times each token; gradients equal the reference's."""
    T, A, D = 700, 4, 1100
    order_R, _ = permute.sort(Case(T, A, 16, 1, 1).ids().cuda(), 16)
    x, y = torch.randn(T, D, device="cuda").to(dtype), torch.randn(T * A, D, device="cuda").to(dtype)
    w, results = torch.rand(T, A, device="cuda"), []
    for kernels in ("triton", "reference"):
        leaves = [t.detach().clone().requires_grad_() for t in (x, y, w)]
        x_RD = choose("gather_rows", "cuda", dtype, kernels)(leaves[0], order_R, A)
        y_TD = choose("combine_rows", "cuda", dtype, kernels)(leaves[1], order_R, leaves[2])
        whole = choose("combine_rows", "cuda", dtype, kernels)(x_RD, order_R, torch.ones_like(w))
        assert torch.equal(whole, x * A)
        torch.autograd.backward([x_RD, y_TD], [y, x])
        results.append((x_RD, y_TD, *(leaf.grad for leaf in leaves)))
    for ours, exact in zip(*results, strict=True):
        assert float((ours - exact).float().norm() / exact.float().norm()) < TOLERANCE[dtype]


def test_runs_are_deterministic() -> None:
    for row in (row for row in KERNELS if row.operation == "routed_experts" and row.name == "triton"):
        case = Case(3000, 8, 64, 256, 192, load="skewed")
        first, second = (gradients(wrapped(row), case, torch.bfloat16, "cuda") for _ in range(2))
        assert all(torch.equal(first[name], second[name]) for name in first)


def test_captured_layer_replays_with_other_choices() -> None:
    """A captured layer is replayed with other choices, whose expert loads the host never reads."""
    T, E, A, D, F = 300, 16, 4, 128, 192
    draw = torch.Generator("cuda").manual_seed(0)
    stacks = [torch.randn(E, F, D, device="cuda", generator=draw).bfloat16() / 16 for _ in range(3)]
    x, w = torch.randn(T, D, device="cuda").bfloat16(), torch.rand(T, A, device="cuda")
    ids = torch.rand(T, E, device="cuda", generator=draw).argsort(1)[:, :A].contiguous()

    def layer(kernels: str) -> torch.Tensor:
        order_R, ends_E = choose("sort_by_expert", "cuda", x.dtype, kernels)(ids, E)
        weights = Weights(stacks[0], stacks[1], stacks[2])
        return choose("routed_experts", "cuda", x.dtype, kernels)(x, order_R, ends_E, w, weights, "silu")

    layer("triton")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer("triton")
    for replacement in (ids.flip(0), torch.full_like(ids, E - 1), torch.full_like(ids, E)):
        ids.copy_(replacement)
        graph.replay()
        exact = layer("reference").float()
        assert float((y.float() - exact).norm()) <= 1e-2 * float(exact.norm())


@pytest.mark.parametrize("backward", [False, True])
def test_one_compiled_graph(backward: bool) -> None:
    case = Case(64, 2, 8, 64, 96)
    x, routing, *stacks = case.leaves(torch.bfloat16, "cuda")
    assert x is not None
    ids = case.ids().cuda()

    def layer(x: torch.Tensor) -> torch.Tensor:
        order_R, ends_E = choose("sort_by_expert", "cuda", torch.bfloat16)(ids, case.E)
        return choose("routed_experts", "cuda", torch.bfloat16)(
            x,
            order_R,
            ends_E,
            routing,
            Weights(*stacks),
            case.activation,  # type: ignore[arg-type]
        )

    results = []
    for run in (layer, torch.compile(layer, fullgraph=True)):
        y = run(x)
        results.append(torch.autograd.grad(y.float().sum(), x)[0] if backward else y)
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(1, 8, 128, 2048, 768), Case(1, 8, 64, 2048, 1408), Case(4, 8, 16, 512, 96, "one"),
        Case(3, 2, 5, 1100, 264, "some dropped", gated=False, biased=True, activation="gelu"),
        Case(16, 2, 8, 1024, 512, biased=True), Case(2, 1, 3, 24, 8, "all dropped", biased=True), Case(0, 2, 4, 64, 64),
    ],
    ids=lambda case: f"{case.T}x{case.A}of{case.E}-{case.load}",
)  # fmt: skip
def test_few_token_experts_equal_reference(case: Case, dtype: torch.dtype) -> None:
    """Also with choices of experts on other ranks, which are ignored here."""
    x, routing, *stacks = (None if t is None else t.detach() for t in case.leaves(dtype, "cuda"))
    weights, ids = Weights(*stacks), case.ids().cuda()
    run, double = choose("few_token_experts", "cuda", dtype), weights.map(torch.Tensor.double)
    for some_ids in (ids, torch.where(torch.arange(case.A, device="cuda") % 2 == 1, case.E, ids)):
        got = run(x, some_ids, routing, weights, case.activation)
        exact = reference.routed_unsorted(x.double(), some_ids, routing.double(), double, case.activation)
        assert got.shape == exact.shape and got.dtype == dtype
        assert float((got.double() - exact).norm()) <= TOLERANCE[dtype] * float(exact.norm())
        assert torch.equal(run(x, some_ids, routing, weights, case.activation), got)


def test_few_token_experts_in_cuda_graph() -> None:
    """The second kernel is launched early (PDL), in a graph too; replays route tokens to other experts."""
    case = Case(2, 8, 64, 1024, 512, biased=True)
    x, routing, *stacks = (None if t is None else t.detach() for t in case.leaves(torch.bfloat16, "cuda"))
    weights, ids, run = Weights(*stacks), case.ids().cuda(), choose("few_token_experts", "cuda", torch.bfloat16)
    run(x, ids, routing, weights, "silu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(x, ids, routing, weights, "silu")
    for shift in (0, 7, 29):
        ids.add_(shift).remainder_(case.E)
        x.mul_(1 + shift)
        graph.replay()
        assert torch.equal(got, run(x, ids, routing, weights, "silu"))


@pytest.mark.parametrize("T", [1, 3, 40])
def test_layer_output_is_the_same_with_and_without_gradients(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, few tokens use the kernel that does not sort."""
    moe = MoeConfig(experts=16, active=4, ffn_width=96)
    config = ModelConfig(
        vocab_size=64, layers=1, width=128, heads=4, ffn_width=96, context=64, activation="silu", gated=True, moe=moe
    )
    torch.manual_seed(0)
    layer = MixtureOfExperts(config, moe, SOLO_AXES, device=torch.device("cuda"), dtype=torch.bfloat16)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x_TD, calls = torch.randn(T, 128, device="cuda").bfloat16(), []
    key = "few_token_experts", "cuda", torch.bfloat16, "auto"
    run = chosen.LOOKUP[key]
    monkeypatch.setitem(chosen.LOOKUP, key, lambda *args: calls.append(args) or run(*args))
    routed = LayerRouting(torch.zeros(T, dtype=torch.int64, device="cuda"), None, None)
    expected = layer(x_TD, T, routed)[0]
    assert not calls
    with torch.no_grad():
        got = layer(x_TD, T, routed)[0]
    assert len(calls) == (T * 4 <= 64)
    assert float((expected - got).float().norm()) <= 8e-3 * float(expected.float().norm())

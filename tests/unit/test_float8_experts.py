"""Float8 experts: equal to explicit rounding, close to exact results, and refused where unsupported."""

import pytest
import torch
from torch import Tensor

from colonnade.config import DataConfig, ModelConfig, MoeConfig, Plan, RunConfig, TrainConfig
from colonnade.errors import ConfigError, PlanError
from colonnade.kernels.experts import float8, grouped_mm, reference
from colonnade.kernels.experts.reference import ACTIVATIONS, Weights
from colonnade.kernels.registry import choose
from colonnade.model import tensor_parallel_linear
from colonnade.model.tensor_parallel_linear import enable_float8
from tests.experts import LOADS, Case, experts_of_rows, gradients, routed_experts
from tests.models import build, ragged
from tests.unit.test_float8 import rounded
from tests.worlds import assert_same

NARROW = torch.float8_e4m3fn
MAX_ERROR = 0.12
"""Allowed relative error: two or three products, each rounded by some 4%."""


def by_row(x: Tensor) -> Tensor:
    """``x`` rounded to float8 with one scale per row of the last dimension; zero rows stay zero."""
    flat = x.double().reshape(-1, x.shape[-1])
    zero = flat.abs().amax(1, keepdim=True) == 0
    return torch.where(zero, 0, rounded(torch.where(zero, 1.0, flat), NARROW, 1).nan_to_num()).view(x.shape)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("gated", "biased"), [(True, False), (False, True), (True, True)])
def test_forward_is_the_product_of_rounded_operands(load: str, gated: bool, biased: bool) -> None:
    """The forward pass by hand in float64: every operand is rounded along its summed dimension."""
    case = Case(21, 2, 5, 32, 48, load=load, gated=gated, biased=biased)
    x, routing, *stacks = (None if w is None else w.detach() for w in case.leaves(torch.float32, "cpu"))
    assert x is not None and routing is not None
    got = routed_experts(float8.routed)(case, x, routing, *stacks)

    def by_hand(x_RD: Tensor, ends_E: Tensor, weights: Weights, activation: str) -> Tensor:
        y_RD, start = torch.zeros_like(x_RD), 0
        for e, end in enumerate(ends_E.tolist()):
            up, down, gate, up_b, gate_b, down_b = weights.expert(e)
            act = ACTIVATIONS[activation]
            x8 = by_row(x_RD[start:end])
            u = x8 @ by_row(up).T + (0 if up_b is None else up_b)
            a = None if gate is None else x8 @ by_row(gate).T + (0 if gate_b is None else gate_b)
            # The products are float32, so round to float32 before the activation.
            h = act(u.float()) if a is None else act(a.float()) * u.float()
            y_RD[start:end] = by_row(h) @ by_row(down.T).T + (0 if down_b is None else down_b)
            start = end
        return y_RD

    expected = experts_of_rows(by_hand)(case, x.double(), routing.double(), *stacks)
    # A hidden unit halfway between two float8 values may round to the other one.
    assert (got.double() - expected).norm() <= 2e-3 * max(1.0, float(expected.norm()))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("gated", "biased"), [(True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_values_and_gradients_are_within_the_float8_error(
    load: str, gated: bool, biased: bool, dtype: torch.dtype
) -> None:
    case = Case(60, 2, 6, 64, 48, load=load, gated=gated, biased=biased, activation="silu" if gated else "gelu")
    exact = gradients(routed_experts(reference.routed), case, torch.float64, values=dtype)
    actual = gradients(routed_experts(float8.routed), case, dtype)
    assert actual.keys() == exact.keys()
    for name, got in actual.items():
        size = float(exact[name].norm())
        error = float((got.double() - exact[name]).norm())
        assert error <= MAX_ERROR * size, f"{name}: {error / max(size, 1e-9):.3f}"
        matrix = name in ("y", "x", "up_EFD")
        assert not matrix or not size or error > 5e-3 * size, f"{name} was rounded at all"


@pytest.mark.parametrize("shape", [(0, 2, 3, 16, 16), (1, 1, 4, 16, 32), (33, 3, 7, 48, 16)], ids=str)
def test_any_number_of_rows(shape: tuple[int, ...]) -> None:
    case = Case(*shape)
    exact = gradients(routed_experts(reference.routed), case, torch.float64)
    for name, got in gradients(routed_experts(float8.routed), case, torch.float32).items():
        if name != "routing" or case.T > 1:  # a single dot product may be small compared with its terms
            assert float((got.double() - exact[name]).norm()) <= MAX_ERROR * float(exact[name].norm()), name


def test_weight_gradients_are_not_rounded() -> None:
    """The weight gradient is Σ_r p_r ⊗ q_r of unrounded operands, exact to float32."""
    p, q = torch.randn(13, 16), torch.randn(13, 32)
    ends = torch.tensor([4, 4, 11])
    got = grouped_mm.wgrad_reference(p, q, ends)
    expected = torch.stack([p[a:b].double().T @ q[a:b].double() for a, b in ((0, 4), (4, 4), (4, 11))])
    assert_same(got.double(), expected, 1e-6)


def test_operands_of_the_grouped_operator_follow_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub checks the operator's Hopper rules for layouts, scales and offsets; results equal the reference."""

    def operator(a, b, scale_a, scale_b, *, offs, out_dtype, use_fast_accum):
        E, K, N = b.shape
        assert a.dtype == b.dtype == NARROW and a.stride() == (K, 1) and b.stride() == (K * N, 1, K)
        assert scale_a.shape == (len(a),) and scale_b.shape == (E, N) and scale_b.is_contiguous()
        assert scale_a.dtype == scale_b.dtype == torch.float32 and offs.dtype == torch.int32 and len(offs) == E
        assert K % 16 == N % 16 == 0 and out_dtype == torch.bfloat16 and use_fast_accum
        return grouped_mm.scaled_product_reference(
            a, b.transpose(1, 2), scale_a[:, None], scale_b[..., None], offs, out_dtype
        )

    monkeypatch.setattr(torch, "_scaled_grouped_mm", operator, raising=False)
    case = Case(30, 2, 4, 32, 48)
    plain = gradients(routed_experts(float8.routed), case, torch.bfloat16)
    fast = {"scaled_grouped_mm": grouped_mm.scaled_product}
    monkeypatch.setattr(float8, "choose", lambda op, device, dtype: fast.get(op) or choose(op, device, dtype))
    for name, got in gradients(routed_experts(float8.routed), case, torch.bfloat16).items():
        assert torch.equal(got, plain[name]), name


MOE = MoeConfig(experts=4, active=2, ffn_width=32, shared_width=16, shared_gate=True)
MODEL = ModelConfig(vocab_size=67, layers=2, width=32, heads=4, kv_heads=2, ffn_width=48, context=64, moe=MOE)


def test_experts_of_a_model_use_float8() -> None:
    stream, attend, _ = ragged(MODEL)
    plain, model = (build(MODEL, dtype=torch.float32) for _ in range(2))
    enable_float8(model.blocks, "tensorwise")
    layer = model.blocks.get_submodule("0.ffn")
    assert layer.experts.float8 == "tensorwise"  # type: ignore[union-attr]
    assert layer.shared_gate.float8 is None and layer.shared.up.float8 == "tensorwise"  # type: ignore[union-attr]
    for m in (plain, model):
        layer = m.blocks.get_submodule("1.ffn")
        layer.experts.float8 = "rowwise" if m is model else None  # type: ignore[union-attr]
    for module in model.blocks.modules():
        if isinstance(module, tensor_parallel_linear.Linear):
            module.float8 = None  # so that only the experts differ, and no routing decision before them
    x, y = (m(stream, attend, lambda x, *_: x) for m in (plain, model))
    assert 1e-3 < (x - y).norm() / x.norm() < 0.1


def test_unsupported_widths_plans_and_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    float8_train = TrainConfig(dtype="bfloat16", float8="rowwise")
    run = RunConfig(model=MODEL, data=DataConfig(sequence=32), train=float8_train)
    with pytest.raises(ConfigError, match=r"moe.ffn_width 24"):
        run.replace(model=MODEL.replace(moe=MOE.replace(ffn_width=24)))
    with pytest.raises(PlanError, match=r"etp=4 leaves each rank 8 of moe.ffn_width 32; use a lower etp"):
        run.replace(plan=Plan(dp=4, etp=4))
    with pytest.raises(ConfigError, match=r"moe.shared_width 24"):
        run.replace(model=MODEL.replace(moe=MOE.replace(shared_width=24)))
    # A GPU with float8 but without this grouped product.
    model = build(MODEL, dtype=torch.float32)

    class FakeParameter:
        device = torch.device("cuda")

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "B200")
    monkeypatch.setattr(type(model.blocks), "parameters", lambda _: iter([FakeParameter()]))
    with pytest.raises(ConfigError, match=r"Hopper.*B200 has 10.0.*set train.float8 none"):
        enable_float8(model.blocks, "rowwise")

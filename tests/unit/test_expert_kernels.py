"""The contract of the expert kernels: every registered kernel equals the reference, with gradients.

tests/interpreted.py runs the same cases on the Triton kernels.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.kernels import permute
from colonnade.kernels.dropout import CHOICES, HIDDEN, column_hash, lowbias32, row_hash
from colonnade.kernels.experts import grouped_mm, loop, reference
from colonnade.kernels.experts.reference import ACTIVATIONS, Weights
from colonnade.kernels.registry import KERNELS, Kernel, choose
from colonnade.model.moe.experts import sorting_costs_more
from tests.experts import LOADS, Case, experts_with_dropout, gradients, routed_experts
from tests.worlds import assert_same

ROWS = [
    pytest.param(row, dtype, id=f"{row.operation}-{row.name}-{str(dtype).removeprefix('torch.')}")
    for row in KERNELS
    if row.operation == "routed_experts" and row.name != "reference" and "cpu" in row.devices
    for dtype in ((torch.float64 if torch.float64 in row.dtypes else torch.float32),)
]
SHAPES = [(37, 2, 5, 24, 20), (9, 3, 8, 16, 32), (1, 2, 4, 7, 9), (0, 2, 3, 8, 8), (40, 1, 4, 10, 6)]
"""(tokens, choices, experts, width, hidden width)"""


def error(got: Tensor, exact: Tensor) -> float:
    """max|Δ| over max(1, ‖exact‖∞)."""
    return float((got.double() - exact).abs().max() / exact.abs().max().clamp(min=1)) if exact.numel() else 0.0


@pytest.mark.sample(84)
@pytest.mark.parametrize(("row", "dtype"), ROWS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("gated", "biased"), list(itertools.product([True, False], repeat=2)))
def test_experts_equal_the_reference(
    row: Kernel, dtype: torch.dtype, shape: tuple, load: str, gated: bool, biased: bool
) -> None:
    activation = list(ACTIVATIONS)[(shape[0] + gated + 2 * biased) % 4]
    case = Case(*shape, load=load, gated=gated, biased=biased, activation=activation)
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    exact = gradients(routed_experts(reference.routed), case, torch.float64)
    for name, got in gradients(routed_experts(row.run), case, dtype).items():
        assert error(got, exact[name]) <= tolerance, name


@pytest.mark.parametrize(("row", "dtype"), ROWS)
@pytest.mark.parametrize("T", [1, 40])
def test_any_memory_layout_of_the_weights(row: Kernel, dtype: torch.dtype, T: int) -> None:
    case = Case(T, 2, 4, 16, 24, across=True, biased=True)
    exact = gradients(routed_experts(reference.routed), case, torch.float64)
    for name, got in gradients(routed_experts(row.run), case, dtype).items():
        assert error(got, exact[name]) <= (1e-10 if dtype == torch.float64 else 1e-5), name


@pytest.mark.parametrize(("row", "dtype"), ROWS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_equals_the_reference(row: Kernel, dtype: torch.dtype, activation: str) -> None:
    case = Case(20, 2, 4, 12, 14, activation=activation)
    exact = gradients(routed_experts(reference.routed), case, torch.float64)
    for name, got in gradients(routed_experts(row.run), case, dtype).items():
        assert error(got, exact[name]) <= (1e-10 if dtype == torch.float64 else 1e-5), name


@pytest.mark.sample(103)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("shape", [*SHAPES, (300, 2, 5, 24, 32), (2, 2, 9, 16, 24), (7, 1, 20, 8, 16)], ids=str)
@pytest.mark.parametrize(("gated", "biased"), [(True, False), (False, False), (True, True)])
def test_bfloat16_inference_picks_a_path_by_load(
    shape: tuple, load: str, gated: bool, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batched product, a grouped one or the loop runs, by the load; with gradients always the loop."""
    case, calls = Case(*shape, load=load, gated=gated, biased=biased, across=shape[0] == 7), []
    parts = (loop, "padded_batch", "batched"), (grouped_mm, "product", "grouped"), (loop, "routed", "loop")
    for module, name, label in parts:
        monkeypatch.setattr(module, name, _recorded(getattr(module, name), calls, label))
    leaves = case.leaves(torch.bfloat16, "cpu")
    with torch.no_grad():
        got = routed_experts(loop.routed_bf16)(case, *leaves)
        exact = routed_experts(reference.routed)(case, *(None if x is None else x.double() for x in leaves))
    assert float((got.double() - exact).norm()) <= 1.5e-2 * float(exact.norm())
    _, ends_E = permute.sort(case.ids(), case.E, case.rows())
    sizes = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
    batched = 2 * sum(n > 0 for n in sizes) > len(sizes) and max(sizes) * len(sizes) <= 4 * sum(sizes)
    groupable = not biased and case.D % 8 == 0 and case.F % 8 == 0
    expected = "batched" if batched and max(sizes) <= 128 else "grouped" if groupable else "loop"
    assert not case.T or load == "bounded" or set(calls) == {expected} or not sum(sizes)
    calls.clear()
    routed_experts(loop.routed_bf16)(case, *leaves)
    assert set(calls) == {"loop"}


def _recorded(run: Callable[..., Tensor], calls: list[str], name: str) -> Callable[..., Tensor]:
    def recorded(*args: Any, **options: Any) -> Tensor:
        calls.append(name)
        return run(*args, **options)

    return recorded


DROPOUT = [
    pytest.param(row, torch.float64 if torch.float64 in row.dtypes else torch.float32, id=row.name)
    for row in KERNELS
    if row.operation == "dropout_experts" and row.name != "reference" and "cpu" in row.devices
]


@pytest.mark.sample(40)
@pytest.mark.parametrize(("row", "dtype"), DROPOUT)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(("gated", "biased"), [(True, False), (False, True), (True, True)])
def test_experts_with_dropout_equal_the_reference(
    row: Kernel, dtype: torch.dtype, shape: tuple, load: str, gated: bool, biased: bool
) -> None:
    activation = list(ACTIVATIONS)[(shape[0] + gated + 2 * biased) % 4]
    case = Case(*shape, load=load, gated=gated, biased=biased, activation=activation)
    exact = gradients(experts_with_dropout(reference.experts), case, torch.float64)
    for name, got in gradients(experts_with_dropout(row.run), case, dtype).items():
        assert error(got, exact[name]) <= (1e-10 if dtype == torch.float64 else 1e-5), name


def test_dropout_acts_on_hidden_units_of_each_choice() -> None:
    """The reference equals the formula element by element, and the rate is met."""
    case, rate = Case(300, 2, 3, 4, 50), 0.3
    x_TD, routing_TA, up_EFD, down_EFD, gate_EFD, *_ = case.leaves(torch.float64, "cpu")
    assert x_TD is not None
    assert routing_TA is not None
    assert up_EFD is not None
    assert down_EFD is not None
    assert gate_EFD is not None
    ids_TA = case.ids()
    keep_mask = torch.zeros(300, 2, 50, dtype=torch.bool)
    for j in range(2):
        row_T = lowbias32(row_hash(torch.tensor(77), torch.arange(300) + 5) ^ column_hash(CHOICES, torch.tensor([j])))
        column_F = column_hash(HIDDEN, torch.arange(3, 53))
        keep_mask[:, j] = lowbias32(row_T[:, None] ^ column_F).double() >= (rate - 0.5) * 2**32
    y_TD = torch.zeros_like(x_TD)
    for t, j in itertools.product(range(300), range(2)):
        e = ids_TA[t, j]
        h_F = torch.nn.functional.silu(gate_EFD[e] @ x_TD[t]) * (up_EFD[e] @ x_TD[t]) * keep_mask[t, j] / (1 - rate)
        y_TD[t] += (routing_TA[t, j] * (h_F @ down_EFD[e])).detach()
    got = experts_with_dropout(reference.experts, rate)(case, x_TD, routing_TA, up_EFD, down_EFD, gate_EFD)
    assert_same(got, y_TD)
    assert keep_mask.double().mean().item() == pytest.approx(1 - rate, abs=0.01)
    for name in ("triton", "fused"):
        with pytest.raises(ConfigError, match=f"no kernel '{name}' for dropout_experts"):
            choose("dropout_experts", "cpu", torch.float32, name)


@pytest.mark.parametrize("load", LOADS)
def test_loop_gathers_per_expert_for_many_tokens(load: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop's path for more choices than it gathers at once."""
    case = Case(30, 2, 6, 12, 14, load=load, biased=True)
    monkeypatch.setattr(loop, "GATHER_ONCE_MAX_ROWS", 0)
    exact = gradients(routed_experts(reference.routed), case, torch.float64)
    for name, got in gradients(routed_experts(loop.routed), case, torch.float64).items():
        assert error(got, exact[name]) <= 1e-10, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [1, 2, 40])
@pytest.mark.parametrize("biased", [True, False])
def test_few_tokens_in_the_dtypes_of_decoding(dtype: torch.dtype, T: int, biased: bool) -> None:
    case = Case(T, 2, 12, 64, 96, biased=biased)
    exact = gradients(routed_experts(reference.routed), case, torch.float64, values=dtype)
    for name, got in gradients(routed_experts(loop.routed), case, dtype).items():
        assert float((got - exact[name]).norm() / exact[name].norm()) < (1e-5 if dtype == torch.float32 else 1.5e-2), (
            name
        )


def test_weights_of_unused_experts_are_not_read() -> None:
    """In decoding one token, weights of experts that it did not choose are never read (they may be NaN)."""
    case = Case(1, 2, 8, 16, 12)
    x, routing, up, down, gate, *rest = (None if w is None else w.detach() for w in case.leaves(torch.float32, "cpu"))
    assert x is not None
    ids_TA = case.ids()
    order_R, ends_E = permute.sort(ids_TA, case.E)
    exact = loop.routed(x, order_R, ends_E, routing, Weights(up, down, gate, *rest), "silu")  # type: ignore[arg-type]
    for stack in (up, down, gate):
        assert stack is not None
        stack[[e for e in range(case.E) if e not in ids_TA]] = torch.nan
    got = loop.routed(x, order_R, ends_E, routing, Weights(up, down, gate, *rest), "silu")  # type: ignore[arg-type]
    assert torch.equal(got, exact)


@pytest.mark.parametrize(
    ("tokens", "active", "experts", "width", "hidden", "expected"),
    [
        (1, 8, 128, 2048, 768, True), (4, 8, 128, 2048, 768, True), (8, 8, 128, 2048, 768, False),
        (2, 8, 64, 2048, 1408, True), (4, 8, 64, 2048, 1408, False), (1, 2, 8, 4096, 14336, True),
        (2, 2, 8, 4096, 14336, False), (0, 2, 8, 64, 64, True), (65, 1, 4, 16, 16, False),
    ],
)  # fmt: skip
def test_sorting_is_skipped_for_few_tokens(
    tokens: int, active: int, experts: int, width: int, hidden: int, *, expected: bool
) -> None:
    """Sorting is used where tokens are expected to share large experts."""
    stack = torch.empty(experts, hidden, width, dtype=torch.bfloat16, device="meta")
    assert sorting_costs_more(tokens, active, experts, Weights(stack, stack, stack)) == expected


def test_fewer_local_experts_skip_sorting_for_more_tokens() -> None:
    """A rank with an eighth of the experts has an eighth of the repeated reads."""
    stack = torch.empty(128, 768, 2048, dtype=torch.bfloat16, device="meta")
    assert not sorting_costs_more(8, 8, 128, Weights(stack, stack, stack))
    assert sorting_costs_more(8, 8, 128, Weights(stack[:16], stack[:16], stack[:16]))

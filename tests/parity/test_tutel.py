"""The layer with Tutel's API equals a plain formula of what Tutel documents, in values and gradients.

The formula is written here token by token, from the description of slots and capacities, on all ranks' tokens at once;
the layer has its share of the experts and its own tokens.
"""

import itertools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.compat.tutel import moe, net
from colonnade.errors import PlanError
from colonnade.parallel import process_groups
from tests.worlds import assert_same, run

D, OUT, HIDDEN = 6, 5, 8


class Case(NamedTuple):
    """The options of one call of the layer."""

    factor: float = 1.0
    k: int = 2
    priority: bool = False
    normalise: bool = True
    postscore: bool = True
    gshard: bool = True
    load_input: str = "probabilities"


CASES = [
    Case(),
    Case(1.25, k=1),
    Case(0.5, k=3, normalise=False),
    Case(0.0, priority=True),
    Case(-0.6, priority=True),
    Case(-8.0, k=1, postscore=False),
    Case(2.0, postscore=False, priority=True),
    Case(0.0, gshard=False),
    Case(1.0, gshard=False, load_input="logits"),
]


def _double(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _ffn(w: dict[str, Tensor], e: int, x: Tensor) -> Tensor:
    if "fc3" in w:
        return (F.silu(w["fc1"][e].T @ x) * (w["fc2"][e].T @ x)) @ w["fc3"][e]
    return torch.tanh(w["fc1"][e] @ x + w["b1"][e]) @ w["fc2"][e] + w["b2"][e]


def _weights(kind: str, experts: int) -> dict[str, Tensor]:
    E = experts
    if kind == "llama_ffn":
        shapes = {"fc1": (E, D, HIDDEN), "fc2": (E, D, HIDDEN), "fc3": (E, HIDDEN, D)}
    else:
        shapes = {"fc1": (E, HIDDEN, D), "b1": (E, HIDDEN), "fc2": (E, HIDDEN, OUT), "b2": (E, OUT)}
    return {name: _double(*shape, seed=i).requires_grad_() for i, (name, shape) in enumerate(shapes.items())}


def _formula(
    xs: list[Tensor], gates: list[Tensor], w: dict[str, Tensor], case: Case, kind: str, multiple: int
) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """(y, l_aux, dropped) of each rank, each with its own copy of the gate."""
    E, tokens = len(gates[0]), max(len(x) for x in xs)
    scores = [torch.softmax(x @ gate.T, 1) for x, gate in zip(xs, gates, strict=True)]
    chosen = [[row.argsort(descending=True)[: case.k].tolist() for row in score] for score in scores]
    k, share = min(case.k, E), math.ceil(tokens / E)
    loads = [sum(e in row for row in rows) for rows in chosen for e in range(E)]
    bound = k * int(abs(case.factor) * share)
    C = bound if case.factor > 0 else max(loads) if case.factor == 0 else min(bound, max(loads))
    C = math.ceil(C / multiple) * multiple
    ys, losses, drops = [], [], []
    for x, gate, score, rows in zip(xs, gates, scores, chosen, strict=True):
        order = list(range(len(x)))
        if case.priority:
            order.sort(key=lambda t: -score[t].max().item())
        filled, kept = [0] * E, set()
        for j, t in itertools.product(range(k), order):
            e = rows[t][j]
            if filled[e] < C:
                kept.add((t, j))
            filled[e] += 1
        y = []
        for t in range(len(x)):
            g = torch.stack([score[t, e] for e in rows[t]])
            if k > 1 and case.normalise:
                g = g / g.sum()
            out = torch.zeros(D if kind == "llama_ffn" else OUT, dtype=torch.float64)
            for j, e in enumerate(rows[t]):
                if (t, j) in kept:
                    out = out + (g[j] * _ffn(w, e, x[t]) if case.postscore else _ffn(w, e, g[j] * x[t]))
            y.append(out)
        ys.append(torch.stack(y))
        losses.append(_gshard(score, rows) if case.gshard else _load_importance(x @ gate.T, rows, k, case.load_input))
        drops.append(len(x) * k - len(kept))
    return ys, losses, drops


def _gshard(score: Tensor, rows: list[list[int]]) -> Tensor:
    T, E = score.shape
    first = torch.tensor([sum(row[0] == e for row in rows) for e in range(E)], dtype=torch.float64)
    return (score.mean(0) * first / T).sum() * E


def _load_importance(logits: Tensor, rows: list[list[int]], k: int, compared: str) -> Tensor:
    """Tutel compares an expert's probability with the logit of the token's last choice; the paper compares
    its logit.
    """
    E, probabilities = logits.shape[1], logits.softmax(1)
    last = torch.stack([logits[t, row[k - 1]] for t, row in enumerate(rows)])
    inputs = logits if compared == "logits" else probabilities
    load = torch.distributions.Normal(0.0, 1.0 / E).cdf(inputs - last[:, None]).sum(0)
    importance = probabilities.sum(0)
    return torch.stack([v.var() / v.mean() ** 2 for v in (load, importance)]).sum() / 2


def _cut(name: str, w: Tensor, rank: int, n: int, etp: int, kind: str) -> Tensor:
    """What Tutel stores of ``w`` on ``rank``."""
    if etp == 1:
        mine = w[rank * n : (rank + 1) * n]
        return mine.flatten() if kind == "llama_ffn" else mine
    e, s = divmod(rank, etp)
    if kind == "llama_ffn":
        flat = F.pad(w[e].flatten(), (0, -w[e].numel() % etp))
        return flat.chunk(etp)[s]
    if name == "b2":
        return F.pad(w[e : e + 1], (0, -OUT % etp)).chunk(etp, 1)[s]
    return w[e : e + 1].chunk(etp, 1)[s]


NAMES = {
    "ffn": {"fc1": "batched_fc1_w", "b1": "batched_fc1_bias", "fc2": "batched_fc2_w", "b2": "batched_fc2_bias"},
    "llama_ffn": {"fc1": "W_fc1", "fc2": "W_fc2", "fc3": "W_fc3"},
}


def _layer(kind: str, local: float, case: Case, group: Any = None, **options: Any) -> moe.moe_layer:
    experts = {"type": kind, "num_experts_per_device": local, "hidden_size_per_expert": HIDDEN}
    if kind == "ffn":
        experts |= {"activation_fn": torch.tanh, "output_dim": OUT}
    noise = 0.0 if case.gshard else 1.0
    return moe.moe_layer(
        gate_type={"type": "top", "k": case.k, "capacity_factor": case.factor, "gate_noise": noise},
        model_dim=D,
        experts=experts,
        batch_prioritized_routing=case.priority,
        normalize_gate=case.normalise,
        is_postscore=case.postscore,
        is_gshard_loss=case.gshard,
        load_loss_input=case.load_input,
        group=group,
        **options,
    ).double()


def _check(
    kind: str,
    local: int,
    cases: list[Case],
    overlaps: tuple[int, ...],
    uneven: bool,
    in_group: bool = False,
    options: dict[str, Any] | None = None,
) -> list[int]:
    world, rank = net.get_world_size(), net.get_world_rank()
    group, first = None, 0
    if in_group:  # two groups of half the ranks, each with its own layer
        group = net.create_groups_from_world(2).model_group
        first = rank // (world // 2) * (world // 2)
        world, rank = world // 2, rank % (world // 2)
    counts = [13 - 4 * i if uneven else 13 for i in range(world)]
    dropped = []
    for case in cases:
        layer = _layer(kind, local, case, group, **(options or {})).eval()
        E, n, etp = layer.num_global_experts, layer.num_local_experts, layer.sharded_count
        w = _weights(kind, E)
        gate = _double(E, D, seed=9)
        state = {f"experts.{NAMES[kind][name]}": _cut(name, v.detach(), rank, n, etp, kind) for name, v in w.items()}
        layer.load_state_dict(state | {"gates.0.wg.weight": gate, "_num_global_experts": torch.tensor(E)})
        for r, p in itertools.product(layer.valid_rs, overlaps):
            what = f"{case}, r={r}, p={p}, {kind}, {local} experts, world {world}"
            xs = [_double(c, D, seed=20 + first + i).requires_grad_() for i, c in enumerate(counts)]
            mine = xs[rank].detach().clone().requires_grad_()
            gates = [gate.clone().requires_grad_() for _ in xs]
            ys, losses, drops = _formula(xs, gates, w, case, kind, etp * p)
            wanted = [_double(*y.shape, seed=40 + first + i) for i, y in enumerate(ys)]
            for v in w.values():
                v.grad = None
            total = sum((y * t).sum() + loss for y, t, loss in zip(ys, wanted, losses, strict=True))
            total.backward()

            layer.zero_grad()
            y = layer(mine, adaptive_r=r, a2a_ffn_overlap_degree=p)
            assert_same(y, ys[rank].detach(), what=f"y, {what}")
            assert_same(y.l_aux, losses[rank].detach(), what=f"l_aux, {what}")
            ((y * wanted[rank]).sum() + layer.l_aux).backward()
            assert_same(mine.grad, xs[rank].grad, what=f"gradient of x, {what}")
            assert_same(layer.gates[0].wg.weight.grad, gates[rank].grad, what=f"gradient of the gate, {what}")
            for name, v in w.items():
                found = layer.experts.get_parameter(NAMES[kind][name]).grad
                assert_same(found, _cut(name, v.grad, rank, n, etp, kind), what=f"gradient of {name}, {what}")
            dropped.append(drops[rank])
    return dropped


@pytest.mark.sample(1)
# Experts per rank; −k: an expert on k ranks.
@pytest.mark.parametrize(("world", "local"), [(1, 4), (4, 1), (2, 2), (2, -2), (4, -2), (4, -4)])
def test_layer_equals_the_formula(world: int, local: int) -> None:
    cases = CASES if world < 4 else CASES[::2]
    if local == -world:  # with a single expert there is a single choice
        cases = [case._replace(k=1) for case in cases if case.gshard]
    dropped = run(world, _check, "ffn", local, cases, (1, 3), False)
    if local > 0:
        assert any(n > 0 for n in dropped[0]), "no case drops tokens"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("world", "local"), [(1, 3), (2, 1), (4, -2), (4, -4)])
def test_gated_experts_at_every_degree(world: int, local: int) -> None:
    run(world, _check, "llama_ffn", local, [Case(k=1), Case(0.0, k=1)], (1, 2), False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("local", [1, -2])
def test_unequal_token_counts_per_rank(local: int) -> None:
    run(2, _check, "ffn", local, [Case(k=1), Case(0.0, k=1), Case(-1.0, k=1)], (1, 2), True)


def _two_step_exchange() -> None:
    process_groups.local_world_size, before = (
        (lambda: 2),
        process_groups.local_world_size,
    )  # as on two hosts of two ranks
    try:
        assert process_groups.make_all_to_all(None, two_steps=True)[0].intra_node is not None
        _check("ffn", 1, [Case()], (1, 2), False, options={"use_2dh": True})
        x = _double(4, 8, 3, seed=net.get_world_rank()).requires_grad_()
        for i, j in ((0, 1), (1, 0), (2, 1)):
            exchanged = net.all_to_all(x, i, j, use_2dh=True)
            assert torch.equal(exchanged, net.all_to_all(x, i, j))
            assert torch.equal(net.all_to_all(exchanged, j, i, use_2dh=True), x)
    finally:
        process_groups.local_world_size = before


def test_two_step_exchange() -> None:
    run(4, _two_step_exchange)


class _Widened(torch.nn.Module):
    """An expert with one unused parameter per rank number."""

    def __init__(self, **_: Any) -> None:
        super().__init__()
        self.unused = torch.nn.Parameter(torch.zeros(1 + net.get_world_rank()))

    def forward(self, x: Tensor, _: Any) -> Tensor:
        return 2 * x


def _experts_of_unequal_size() -> None:
    gate = {"type": "top", "k": 2, "capacity_factor": 0.0}
    layer = moe.moe_layer(gate_type=gate, model_dim=D, experts={"type": "custom", "module": _Widened}).double()
    x = _double(4, D, seed=net.get_world_rank())
    assert_same(layer(x, adaptive_r=1), 2 * x)
    with pytest.raises(PlanError, match="differ in parameters of experts: 1 to 2"):
        layer(x, adaptive_r=0)


def test_experts_of_unequal_size_are_refused_only_where_weights_are_gathered() -> None:
    run(2, _experts_of_unequal_size)


def test_layer_inside_a_group() -> None:
    run(4, _check, "ffn", -2, [Case(k=1), Case(0.0, k=1)], (1, 2), False, True)


def test_a_capacity_factor_of_zero_drops_nothing() -> None:
    scores = _double(40, 4, seed=1).softmax(1)
    for priority in (False, True):
        (_, _, locations, _, capacity, count), _ = moe.top_k_routing(
            scores, 2, capacity_factor=0, batch_prioritized_routing=priority
        )
        assert capacity == count.max() == max(int(places.max()) for places in locations) + 1


@pytest.mark.parametrize(("factor", "expected"), [(1, 8), (1.25, 10), (0, 55), (-2, 16), (-8, 55)])
def test_capacity_of_the_worked_example(factor: float, expected: int) -> None:
    counts = [55, 5, 0, 1, 1, 1, 0, 1]
    ids = torch.arange(8).repeat_interleave(torch.tensor(counts))
    scores = F.one_hot(ids, 8).double()
    crit, _ = moe.top_k_routing(scores, 1, capacity_factor=factor)
    assert crit[4] == expected
    assert sum(int((places >= crit[4]).sum()) for places in crit[2]) == sum(max(0, c - expected) for c in counts)

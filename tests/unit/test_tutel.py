"""Tutel's names, shapes and arguments: state dicts, refused settings, and attributes set by a call."""

import logging
import math
import os
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from colonnade.compat.tutel import moe, net, system
from colonnade.compat.tutel.gates import CosineTopKGate
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError, PlanError
from tests.worlds import assert_same, run

FFN: dict[str, Any] = {"type": "ffn", "num_experts_per_device": 2, "hidden_size_per_expert": 8}
TOP: dict[str, Any] = {"type": "top", "k": 2}


def _layer(gate: Any = None, experts: Any = None, **options: Any) -> moe.moe_layer:
    return moe.moe_layer(gate or TOP, options.pop("model_dim", 6), experts or FFN, **options)


def _shapes(local: int, experts: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    layer = _layer(experts={**experts, "num_experts_per_device": local})
    net.barrier()  # a rank that exits while others still connect would fail them
    return {name: tuple(value.shape) for name, value in layer.state_dict().items()}


def _ffn(n: int, f: int, o: int, E: int) -> dict[str, tuple[int, ...]]:
    return {
        "_num_global_experts": (),
        "experts.batched_fc1_w": (n, f, 6),
        "experts.batched_fc2_w": (n, f, 5),
        "experts.batched_fc1_bias": (n, f),
        "experts.batched_fc2_bias": (n, o),
        "gates.0.wg.weight": (E, 6),
    }


@pytest.mark.parametrize(
    ("world", "local", "expected"),
    [(1, 3, _ffn(3, 8, 5, 3)), (2, 2, _ffn(2, 8, 5, 4)), (2, -2, _ffn(1, 4, 3, 1)), (4, -2, _ffn(1, 4, 3, 2))],
)
def test_a_state_dict_on_each_rank(world: int, local: int, expected: dict[str, tuple[int, ...]]) -> None:
    experts = {**FFN, "output_dim": 5}
    assert run(world, _shapes, local, experts) == [expected] * world


def test_state_dicts_of_other_experts_and_gates() -> None:
    flat = {"_num_global_experts": (), "experts.W_fc1": (48,), "experts.W_fc2": (48,), "experts.W_fc3": (48,)}
    llama = {"type": "llama_ffn", "hidden_size_per_expert": 8}
    assert run(2, _shapes, -2, {**llama, "hidden_size_per_expert": 16})[1] == flat | {"gates.0.wg.weight": (1, 6)}
    gates = [{"type": "cosine_top", "proj_dim": 3}, TOP]
    bare = _layer(gates, {**FFN, "has_fc1_bias": False, "has_fc2_bias": False})
    assert set(bare.state_dict()) == {
        "_num_global_experts", "experts.batched_fc1_w", "experts.batched_fc2_w", "gates.0.temperature",
        "gates.0.sim_matrix", "gates.0.cosine_projector.weight", "gates.0.cosine_projector.bias", "gates.1.wg.weight",
    }  # fmt: skip
    assert bare.state_dict()["gates.0.sim_matrix"].shape == (3, 2)


def test_the_selected_gate_decides() -> None:
    layer = _layer([{"type": "top", "k": 1}, {"type": "cosine_top", "k": 2, "capacity_factor": 0}])
    x = torch.randn(7, 6)
    layer(x, gate_index=1).sum().backward()
    assert layer.gates[0].wg.weight.grad is None
    assert layer.gates[1].sim_matrix.grad is not None
    with pytest.raises(ConfigError, match="no gate 2 among 2"):
        layer(x, gate_index=2)


def test_a_cosine_gate_compares_directions() -> None:
    gate = CosineTopKGate(6, 4, k=1, fp32_gate=True, proj_dim=5).double()
    x = torch.randn(3, 6, dtype=torch.float64)
    assert gate.temperature.item() == pytest.approx(0.6931472)  # ln(1/0.5)
    sim = gate.sim_matrix.float()
    a = (x.float() @ gate.cosine_projector.weight.float().T) + gate.cosine_projector.bias.float()
    cosine = torch.stack([F.cosine_similarity(row[:, None], sim, dim=0) for row in a])
    assert_same(gate(x), 2.0 * cosine, 1e-6)
    gate.temperature.data.fill_(9.0)
    assert_same(gate(x), 100.0 * cosine, 1e-4)  # at most exp(ln 100)


def test_attributes_set_by_a_call() -> None:
    marked = []
    layer = _layer(scan_expert_func=lambda name, p: marked.append(name) or setattr(p, "skip_allreduce", True))
    assert marked == [name for name, _ in layer.get_parameter_iterator("local_experts")]
    assert [name for name, _ in layer.get_parameter_iterator(param_type="gate")] == ["0.wg.weight"]
    assert all(p.skip_allreduce and p._tutel_expert for p in layer.experts.parameters())
    y = layer(torch.randn(2, 5, 6), a2a_ffn_overlap_degree=3, adaptive_r=0)
    assert y.shape == (2, 5, 6)
    assert y.l_aux is layer.l_aux
    assert (layer.adaptive_degree, layer.a2a_ffn_overlap_degree, layer.valid_rs) == (0, 3, [0, 1])
    assert layer.dispatch_count.sum() == 20
    assert "Total-Experts = 2 [managed by 1 device(s)]" in repr(layer)
    assert FFN["type"] == "ffn"  # the user's dictionaries are not changed
    assert TOP == {"type": "top", "k": 2}
    assert _layer(result_func=lambda y: (y.shape, y.l_aux.dim()))(torch.randn(4, 6)) == ((4, 6), 0)


def test_call_arguments_override_the_layer() -> None:
    layer = _layer({"type": "top", "k": 1, "capacity_factor": 0.5}, {**FFN, "num_experts_per_device": 4}).eval()
    layer.gates[0].wg.weight.data.zero_()
    layer.gates[0].wg.weight.data[0] = 9.0
    x = torch.rand(16, 6)
    assert (layer(x) == 0).all(1).sum() == 14  # C = int(0.5·4)
    assert (layer(x, capacity_factor=0) == 0).all(1).sum() == 0
    assert layer(x, top_k=3) is not None
    assert layer.dispatch_count.sum() == 48


@pytest.mark.parametrize(("load_input", "of_logits"), [(None, False), ("probabilities", False), ("logits", True)])
def test_load_loss_of_a_noisy_gate(load_input: str | None, of_logits: bool) -> None:
    """Tutel's formula by default, value by value: Φ((p − the last noisy logit kept) · E / noise)."""
    chosen = {} if load_input is None else {"load_loss_input": load_input}
    experts = {**FFN, "num_experts_per_device": 4}
    layer = _layer({"type": "top", "k": 2, "gate_noise": 0.7}, experts, is_gshard_loss=False, **chosen).double()
    layer.gates[0].wg.weight.data.mul_(3)
    x = torch.randn(9, 6, dtype=torch.float64)
    torch.manual_seed(3)
    found = layer(x).l_aux
    logits = x @ layer.gates[0].wg.weight.T
    torch.manual_seed(3)
    noisy = logits + 0.7 / 4 * torch.randn_like(logits)
    importance, load = [0.0] * 4, [0.0] * 4
    for row, noisy_row in zip(logits.tolist(), noisy.tolist(), strict=True):
        total, second = sum(math.exp(z) for z in row), sorted(noisy_row)[-2]
        for e, z in enumerate(row):
            p = math.exp(z) / total
            importance[e] += p
            load[e] += (1 + math.erf(((z if of_logits else p) - second) * 4 / 0.7 / math.sqrt(2))) / 2
    variation = [statistics.variance(sums) / statistics.fmean(sums) ** 2 for sums in (importance, load)]
    assert found.item() == pytest.approx(sum(variation) / 2, rel=1e-9)


def test_rows_without_tokens_and_without_gradients() -> None:
    layer = _layer({"type": "top", "k": 2, "capacity_factor": 0})
    empty = layer(torch.zeros(0, 6, requires_grad=True))
    assert empty.shape == (0, 6)
    (empty.sum() + empty.l_aux).backward()
    with torch.no_grad():
        assert layer(torch.randn(3, 6), megablocks_size=2).shape == (3, 6)
    assert layer.megablocks_size == 2


def test_seeds_are_reproducible() -> None:
    first, second = _layer(seeds=(1, 5, 9)), _layer(seeds=(1, 5, 9))
    torch.manual_seed(9)
    after = torch.rand(1)
    _layer(seeds=(1, 5, 9))
    assert torch.equal(torch.rand(1), after)
    for name, p in first.named_parameters():
        assert torch.equal(p, second.get_parameter(name)), name
    other = _layer(seeds=(1, 6, 9))
    assert torch.equal(first.gates[0].wg.weight, other.gates[0].wg.weight)
    assert not torch.equal(first.experts.batched_fc1_w, other.experts.batched_fc1_w)
    torch.manual_seed(5)  # expert by expert, as nn.Linear begins
    fc1, fc2 = nn.Linear(6, 8), nn.Linear(8, 6)
    assert torch.equal(first.experts.batched_fc1_w[0], fc1.weight)
    assert torch.equal(first.experts.batched_fc2_w[0], fc2.weight.T)


def test_loading_state_dicts() -> None:
    layer, other = _layer(), _layer()
    state = layer.state_dict()
    other.load_state_dict(state)
    assert torch.equal(other.experts.batched_fc1_w, layer.experts.batched_fc1_w)
    old = {name: value for name, value in state.items() if name != "_num_global_experts"}
    other.load_state_dict(old | {"experts.batched_fc1_bias": state["experts.batched_fc1_bias"].view(2, 1, 8)})
    with pytest.raises(CheckpointError, match="4 experts at '', this layer 2"):
        other.load_state_dict(state | {"_num_global_experts": torch.tensor(4)})
    del old["experts.batched_fc1_w"]
    with pytest.raises(RuntimeError, match=r"Missing key.*experts.batched_fc1_w"):
        other.load_state_dict(old)


def test_autocast_computes_experts_in_16_bits_and_gates_in_32() -> None:
    layer = _layer()
    seen = []
    layer.experts.activation_fn = lambda h: (seen.append(h.dtype), F.relu(h))[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(torch.randn(8, 6))
    assert seen == [torch.bfloat16]
    assert y.dtype == torch.float32
    assert layer.l_aux.dtype == torch.float32
    y.sum().backward()
    assert layer.experts.batched_fc2_w.grad.abs().sum() > 0


def test_fast_dispatcher_round_trip() -> None:
    scores = torch.rand(20, 4, dtype=torch.float64).softmax(1)
    (E, ids, places, _, C, _), _ = moe.extract_critical(scores, 2, None, 1.0)
    dispatcher = moe.fast_dispatcher(E, C, 3, torch.float64)
    dispatcher.update(ids, places, [torch.ones(20, dtype=torch.float64)] * 2, capacity=C)
    x = torch.randn(20, 3, dtype=torch.float64)
    dispatched = dispatcher.encode(x)
    assert dispatched.shape == (E * C, 3)
    kept_count = torch.stack([p < C for p in places]).sum(0)
    assert 0 < kept_count.sum() < 40
    assert_same(dispatcher.decode(dispatched), x * kept_count[:, None])
    mask = torch.eye(3)[[0, 1, 0, 0]].long()
    assert (moe.fast_cumsum_sub_one(mask) * mask).sum(1).tolist() == [0, 0, 1, 2]


class _TwoDimensionalExpert(nn.Module):
    """An expert that sees the last two dimensions."""

    def __init__(self, model_dim: int, num_experts_per_device: int, sharded_count: int):
        super().__init__()
        self.w = nn.Parameter(torch.ones(num_experts_per_device, 1, 1, 1))

    def forward(self, x: torch.Tensor, ctx: Any) -> torch.Tensor:
        assert x.shape[2:] == (2, 3)
        return (x * self.w).flip(2)


def test_experts_may_take_several_dimensions() -> None:
    layer = _layer({"type": "top", "k": 1, "capacity_factor": 0}, {"type": "custom", "module": _TwoDimensionalExpert})
    x = torch.randn(4, 5, 2, 3)
    assert_same(layer(x, reserve_dims=2), x.flip(2), 1e-6)


def _draws(local: int) -> None:
    masks: list[torch.Tensor] = []

    def act(h: torch.Tensor) -> torch.Tensor:
        masks.append(torch.rand_like(h))
        return h * (masks[-1] > 0.5)

    layer = _layer({"type": "top", "k": 1}, {**FFN, "num_experts_per_device": local, "activation_fn": act})
    layer(torch.randn(8, 6), adaptive_r=1).sum().backward()
    assert len(masks) == 2, "gathered weights were not freed"
    assert torch.equal(masks[0], masks[1]), "recomputed with other random numbers"


def test_random_activations_are_recomputed_identically() -> None:
    run(2, _draws, -2)


def _automatic() -> list[int]:
    layer = _layer({"type": "top", "k": 1}, {**FFN, "num_experts_per_device": -2}, parallel_type="auto").eval()
    degrees = []
    for tokens in (2, 400):
        y = layer(torch.ones(tokens, 6))
        degrees.append(layer.adaptive_degree)
        for r in layer.valid_rs:
            other = _layer({"type": "top", "k": 1}, {**FFN, "num_experts_per_device": -2}).eval()
            other.load_state_dict(layer.state_dict())
            assert_same(other(torch.ones(tokens, 6), adaptive_r=r), y, 1e-5)
    layer(torch.ones(2, 6), adaptive_r=1)
    layer(torch.ones(2, 6))
    return [*degrees, layer.adaptive_degree]


def test_auto_chooses_the_smaller_transfer() -> None:
    # 2P = 236 for all weights; tokens 4·2·6·r + 236/r: 284 and 214 for 2 tokens, more than 9,600 for 400.
    assert run(2, _automatic) == [[2, 0, 1]] * 2


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"experts": {"type": "ffn"}}, ConfigError, "hidden_size_per_expert"),
        ({"experts": {**FFN, "hidden": 3}}, ConfigError, "no option 'hidden'"),
        ({"experts": {**FFN, "type": "fnn"}}, ConfigError, "no experts of type 'fnn'"),
        ({"experts": {"type": "custom"}}, ConfigError, "need a class"),
        ({"experts": {**FFN, "num_experts_per_device": 0}}, PlanError, "0 experts per device"),
        ({"experts": {**FFN, "num_experts_per_device": 1.5}}, PlanError, "1.5 experts per device"),
        ({"experts": {**FFN, "num_experts_per_device": -2}}, PlanError, "1 ranks are not divisible by 2"),
        ({"experts": {**FFN, "activation_fn": F.relu, "activation_fn_with_self": len}}, ConfigError, "pass only one"),
        ({"experts": {**FFN, "activation_fn": "gelu"}}, ConfigError, "activation_fn is 'gelu'; pass a function"),
        ({"gate": {"type": "topp"}}, ConfigError, "no gate of type 'topp'"),
        ({"gate": {"type": "top", "kk": 1}}, ConfigError, "no option 'kk'"),
        ({"gate": {"type": "custom"}}, ConfigError, "needs a class"),
        ({"gate": "Top2"}, ConfigError, "does not describe a gate"),
        ({"parallel_type": "date"}, ConfigError, "no parallel_type 'date'"),
        ({"is_gshard_loss": False}, ConfigError, "gate_noise above 0"),
        ({"load_loss_input": "logit"}, ConfigError, "no load_loss_input 'logit'; did you mean 'logits'"),
        ({"a2a_ffn_overlap_degree": 0}, ConfigError, "use 1 for no overlap"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_options_are_refused(options: dict[str, Any], kind: type[ColonnadeError], message: str) -> None:
    with pytest.raises(kind, match=message):
        _layer(**options)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        (
            (4, 5),
            {},
            r"last 1 dimensions \(reserve_dims\) of .* are 5 numbers, the layer's model_dim is 6; reshape",
        ),
        ((6,), {}, "an input of shape"),
        ((4, 6), {"adaptive_r": 2}, r"allow degrees \[0, 1\], not 2"),
        ((4, 6), {"top_k": 0}, "at least 1 expert"),
        ((4, 6), {"capacity_factor": 0.1}, "leaves no room for 4 tokens"),
    ],
)
def test_invalid_calls_are_refused(shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ColonnadeError, match=message):
        _layer()(torch.zeros(shape), **options)


def _unequal_hidden() -> None:
    net.barrier()
    with pytest.raises(PlanError, match="7 hidden units of an expert cannot be divided over its 2 ranks"):
        _layer(experts={**FFN, "num_experts_per_device": -2, "hidden_size_per_expert": 7})
    with pytest.raises(PlanError, match="use a divisor of 2"):
        moe.moe_layer.global_expert_count(-3)
    assert [moe.moe_layer.global_expert_count(n) for n in (3, 0.5, -2, -1)] == [6, 1, 1, 2]
    assert _layer(experts={**FFN, "num_experts_per_device": -2}, parallel_type="adaptive:9").adaptive_degree == 2
    assert _layer(experts={**FFN, "num_experts_per_device": -2}, parallel_type="model").adaptive_degree == 2
    assert _layer(experts={**FFN, "num_experts_per_device": -2}, parallel_type="data").adaptive_degree == 1


def test_experts_over_ranks() -> None:
    run(2, _unequal_hidden)


def test_old_names() -> None:
    layer = _layer("Top1Gate", {"type": "ffn", "count_per_node": 3, "hidden_size_per_expert": 8}, pad_samples=False)
    assert (layer.gates[0].top_k, layer.num_global_experts) == (1, 3)


def test_tutel_session(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_sessions", [])
    with pytest.raises(ConfigError, match="init_data_model_parallel"):
        system.record_time()
    assert system.record_time(is_cuda=False) > 1e9
    env = system.init_data_model_parallel(backend="gloo")
    assert system.get_local_session() is env
    assert (env.global_size, env.is_cuda, env.local_device.type) == (1, False, "cpu")
    assert system.record_time() > 1e9
    with pytest.raises(PlanError, match="no backend 'mpi'"):
        system.init_data_model_parallel(backend="mpi")
    path = system.apply_rank_size_from_pattern(f"{tmp_path}/a/{{rank}}-of-{{size}}.npy", 1, 4)
    assert path == f"{tmp_path}/a/1-of-4.npy"
    system.save(torch.arange(3.0), path)
    assert system.load(path).tolist() == [0, 1, 2]
    with caplog.at_level(logging.WARNING):
        assert system.apply_rank_size_from_pattern("x", 0, 1, create_dir=False) == "x"
    assert "all ranks will use the same file" in caplog.text
    system.cache().set("a", 1)
    assert (system.cache().get("a"), system.cache().get()) == (1, [1])
    system.cache().reset()
    assert system.cache().get() == []


def test_cpu_affinity_follows_local_rank_and_numa_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.sched_getaffinity(0)
    first, last = min(before), max(before)
    for node, core in ((0, first), (1, None), (2, last), (10, max(before) + 500)):
        (tmp_path / f"node{node}" / ("memory0" if core is None else f"cpu{core}")).mkdir(parents=True)
    monkeypatch.setattr(system, "NODES", tmp_path)

    def bound(rank: int, numa_type: int) -> set[int]:
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        try:
            system.init_affinity_at_program_beginning(numa_type)
            return os.sched_getaffinity(0)
        finally:
            os.sched_setaffinity(0, before)

    assert [bound(rank, 1) for rank in range(4)] == [{first}, {last}, {first}, {last}]
    assert [bound(rank, 2) for rank in range(4)] == [{first}, {first}, {last}, {last}]
    assert bound(1, 0) == before
    assert not caplog.records
    monkeypatch.setattr(system, "NODES", tmp_path / "none")
    assert bound(0, 1) == before
    assert "names no NUMA node of this process's cores; nothing is bound" in caplog.text


def test_every_exported_name_exists() -> None:
    for module in (moe, net):
        assert all(hasattr(module, name) for name in module.__all__)

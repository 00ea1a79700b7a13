"""Typical Tutel programs, with the import changed, run and learn on any number of processes.

The first one is also started by torchrun, as users start it.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from colonnade.compat.tutel import moe as tutel_moe
from colonnade.compat.tutel import net, system
from tests.worlds import assert_same, run

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, sys
import torch
import torch.nn.functional as F
from colonnade.compat.tutel import system
from colonnade.compat.tutel import moe as tutel_moe
from colonnade.compat.tutel import net

parallel_env = system.init_data_model_parallel(backend='gloo')
rank, world, dist_print = parallel_env.global_rank, parallel_env.global_size, parallel_env.dist_print
num_local_experts, checkpoint, dtype = int(sys.argv[1]), sys.argv[2], torch.get_default_dtype()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self._moe_layer = tutel_moe.moe_layer(
            gate_type = {'type': 'top', 'k': 2, 'fp32_gate': True, 'capacity_factor': 1.25},
            experts = {'type': 'ffn', 'count_per_node': num_local_experts,
                       'hidden_size_per_expert': 16, 'activation_fn': lambda x: F.relu(x)},
            model_dim = 8,
            scan_expert_func = lambda name, param: setattr(param, 'skip_allreduce', True),
            seeds = (1, rank + 1, 1),
            a2a_ffn_overlap_degree = 2,
            parallel_type = 'adaptive:1',
        )
        self.r_index = -1

    def forward(self, x):
        rs = self._moe_layer.valid_rs
        self.r_index += 1
        y = self._moe_layer(x, capacity_factor=2.0, adaptive_r=rs[self.r_index % len(rs)],
                            a2a_ffn_overlap_degree=self.r_index % 3 + 1)
        return F.log_softmax(torch.sum(y, dim=2), dim=1)

model = Model().to(parallel_env.local_device)
path = system.apply_rank_size_from_pattern(checkpoint, rank=rank, size=world)
if os.path.exists(path):
    model.load_state_dict(torch.load(path))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
torch.manual_seed(0)
x, y = torch.randn(4, 16, 8), torch.LongTensor(4).random_(1)
shared = [p for p in model.parameters() if not hasattr(p, 'skip_allreduce') and p.requires_grad]
losses = []
for i in range(12):
    t_start = system.record_time()
    optimizer.zero_grad()
    loss = F.nll_loss(model(x), y) + 0.01 * model._moe_layer.l_aux
    loss.backward()
    if world > 1:
        for p in shared:
            p.grad /= world
            p.grad = net.simple_all_reduce(p.grad)
    optimizer.step()
    losses.append(float(loss.data))
    dist_print('STEP-%s: loss = %.5f, step_time = %.6f sec' % (i, losses[-1], system.record_time() - t_start))
experts = tutel_moe.moe_layer.global_expert_count(num_local_experts, group=system.get_local_session().model_group)
torch.save(model.state_dict(), path)
dist_print('experts = %d' % experts)
"""


def _helloworld(folder: str, local: int) -> tuple[list[float], list[float]]:
    """The losses of a run, and of one that resumes from its checkpoint."""
    script = Path(folder) / f"program{net.get_world_rank()}.py"
    script.write_text(PROGRAM)
    before = sys.argv
    sys.argv = [str(script), str(local), f"{folder}/states/{{rank}}-of-{{size}}.ckpt"]
    try:
        return tuple(runpy.run_path(str(script))["losses"] for _ in range(2))
    finally:
        sys.argv = before


@pytest.mark.sample(1)
@pytest.mark.parametrize(("world", "local"), [(1, 2), (2, 2), (2, -2)])
def test_helloworld_learns_and_resumes(world: int, local: int, tmp_path: Path) -> None:
    for first, second in run(world, _helloworld, str(tmp_path), local):
        assert first[-1] < first[0] - 0.5
        assert second[0] < first[0] - 0.5
    assert sorted(p.name for p in (tmp_path / "states").iterdir()) == [f"{r}-of-{world}.ckpt" for r in range(world)]


@pytest.mark.slow
def test_torchrun_runs_the_program(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script), "1", "{rank}.ckpt"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "experts = 2" in done.stdout
    assert done.stdout.count("STEP-") == 12  # only rank 0 prints


# -- a custom layer from the building blocks -----------------------------------------------------------------------


class CustomMoE(nn.Module):
    def __init__(self, dim: int, hidden: int, local: int):
        super().__init__()
        torch.manual_seed(1)
        self.wg = nn.Parameter(torch.randn(dim, local * net.get_world_size()) * 0.1)
        torch.manual_seed(net.get_world_rank() + 1)
        self.fc1 = nn.Parameter(torch.randn(local, dim, hidden) * 0.3)
        self.fc2 = nn.Parameter(torch.randn(local, hidden, dim) * 0.3)
        for p in (self.fc1, self.fc2):
            p.skip_allreduce = True

    def forward(self, x: torch.Tensor, k: int = 2):
        scores = F.softmax(x @ self.wg, dim=-1)
        crit, l_aux = tutel_moe.top_k_routing(scores, top_k=k)
        y = tutel_moe.fast_encode(x, crit)
        y = net.all_to_all(y, 1, 0)
        y = F.relu(y @ self.fc1) @ self.fc2
        y = net.all_to_all(y, 0, 1)
        return tutel_moe.fast_decode(y, crit), l_aux


def _from_scratch() -> list[float]:
    env = system.init_data_model_parallel(backend="gloo")
    model = CustomMoE(8, 16, 2)
    torch.manual_seed(env.global_rank + 1)
    data, label = torch.randn(48, 8), torch.LongTensor(48).random_(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        result, l_aux = model(data)
        loss = F.nll_loss(F.log_softmax(result, dim=1), label) + 1e-4 * l_aux
        loss.backward()
        for p in model.parameters():
            if not hasattr(p, "skip_allreduce"):
                p.grad = net.simple_all_reduce(p.grad)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("world", [1, 2])
def test_custom_layer_learns(world: int) -> None:
    for losses in run(world, _from_scratch):
        assert losses[-1] < losses[0] - 0.5


# -- custom gates and experts -------------------------------------------------------------------------------------


class CustomGate(nn.Module):
    def __init__(self, model_dim: int, num_global_experts: int, my_k: int):
        super().__init__()
        self.top_k = my_k
        self.my_wg = nn.Linear(model_dim, num_global_experts, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.my_wg(x)


class CustomExpert(nn.Module):
    """Sharded flat over the ranks of an expert, in the way and with the names of older programs."""

    def __init__(self, model_dim: int, local_experts: int, sharded_count: int, my_config: str):
        super().__init__()
        self.sharded_count = sharded_count
        self.full_shape = torch.Size((local_experts, model_dim, model_dim))
        self.W = nn.Parameter(torch.randn(-(-self.full_shape.numel() // sharded_count)) * 0.3)
        self.my_activation = {"relu": F.relu, "none": lambda x: x}[my_config]

    def forward(self, x: torch.Tensor, ctx: Any) -> torch.Tensor:
        group = net.create_groups_from_world(group_count=-self.sharded_count, parent_group=ctx.group).model_group
        whole = net.zero_gather(self.W, group=group).view(-1).narrow(0, 0, self.full_shape.numel())
        return self.my_activation(x @ whole.view(self.full_shape))


def _custom(local: int) -> list[float]:
    layer = tutel_moe.moe_layer(
        gate_type={"type": "custom", "module": CustomGate, "my_k": 1, "capacity_factor": 2.0},
        experts={
            "type": "custom", "module": CustomExpert, "num_experts_per_device": local, "my_config": "relu",
        },
        model_dim=6,
        seeds=(3, net.get_world_rank() + 1),
        a2a_ffn_overlap_degree=2,
        result_func=lambda output: (output, output.l_aux),
    )  # fmt: skip
    assert [name for name, _ in layer.named_parameters()] == ["experts.W", "gates.0.my_wg.weight"]
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    torch.manual_seed(net.get_world_rank())
    x = torch.randn(3, 10, 6)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        y, l_aux = layer(x)
        assert y.shape == x.shape
        loss = (y - x).square().mean() + 0.01 * l_aux
        loss.backward()
        for p in layer.gates.parameters():
            p.grad = net.simple_all_reduce(p.grad, op=torch.distributed.ReduceOp.SUM)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("world", "local"), [(1, 2), (2, 1), (2, -2)])
def test_custom_gates_and_experts_learn(world: int, local: int) -> None:
    for losses in run(world, _custom, local):
        assert losses[-1] < losses[0]


# -- the sharded optimizer ---------------------------------------------------------------------------------------


def _model(rank: int) -> nn.ModuleDict:
    torch.manual_seed(7)
    dense = nn.Linear(8, 7)
    layer = tutel_moe.moe_layer(
        {"type": "top", "k": 1},
        8,
        {"type": "ffn", "num_experts_per_device": 1, "hidden_size_per_expert": 4, "output_dim": 8},
        seeds=(1, rank + 1, 1),
    )
    return nn.ModuleDict({"moe": layer, "dense": dense})


def _distributed_optimizer() -> None:
    world, rank = net.get_world_size(), net.get_world_rank()
    ours, plain = _model(rank), _model(rank)
    optimizer = net.TutelDistributedOptimizer(ours.parameters(), group=None, average_shared=True)
    optimizer = optimizer.warp_local(torch.optim.Adam, lr=0.05)
    reference = torch.optim.Adam(plain.parameters(), lr=0.05)
    torch.manual_seed(rank)
    x = torch.randn(9, 8)
    for step in range(3):
        for model in (ours, plain):
            model.zero_grad()
            model["dense"](model["moe"](x)).square().mean().backward()
        for p in plain.parameters():
            if not hasattr(p, "_tutel_expert"):
                p.grad = net.simple_all_reduce(p.grad) / world
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        for name, p in ours.named_parameters():
            assert_same(p.detach(), plain.get_parameter(name).detach(), 1e-6, what=f"{name} after step {step}")


@pytest.mark.parametrize("world", [1, 2])
def test_sharded_optimizer_equals_adam(world: int) -> None:
    run(world, _distributed_optimizer)


# -- torch's own data parallelism ----------------------------------------------------------------------------------


def _ddp() -> float:
    rank = net.get_world_rank()
    model = _model(rank)
    wrapped = nn.parallel.DistributedDataParallel(_Sequence(model))
    torch.manual_seed(rank)
    wrapped(torch.randn(9, 8)).square().mean().backward()
    return float(model["dense"].weight.grad.sum())


class _Sequence(nn.Module):
    def __init__(self, parts: nn.ModuleDict):
        super().__init__()
        self.parts = parts
        self._ddp_params_and_buffers_to_ignore = [n for n, p in self.named_parameters() if hasattr(p, "_tutel_expert")]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.parts["dense"](self.parts["moe"](x))


def test_works_under_torch_ddp() -> None:
    grads = run(2, _ddp)
    assert grads[0] == pytest.approx(grads[1])


# -- losses that Tutel publishes ---------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("k", "local", "published"),
    [(1, 1, [29.98500633239746, 28.761884689331055]), (2, 2, [24.08013153076172, 23.29282569885254])],
)
def test_losses_equal_tutels_published_baseline(k: int, local: int, published: list[float]) -> None:
    """tests/test_baseline.json of Tutel, float32: initial values, routing, loss and the first step are Tutel's."""
    experts = {"type": "ffn", "num_experts_per_device": local, "hidden_size_per_expert": 2048}
    layer = tutel_moe.moe_layer({"type": "top", "k": k}, 2048, experts, seeds=(1, 1, 1), parallel_type="data")
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-5)
    torch.manual_seed(0)
    x, y = torch.randn(16, 1024, 2048), torch.zeros(16, dtype=torch.int64)
    losses = []
    for _ in published:
        optimizer.zero_grad()
        loss = F.nll_loss(F.log_softmax(layer(x).sum(2), dim=1), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(published, abs=2e-4)

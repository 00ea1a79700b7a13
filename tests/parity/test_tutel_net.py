"""Tutel's collectives: values and gradients against their definitions over all ranks' inputs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from colonnade.compat.tutel import net
from colonnade.errors import ConfigError, PlanError
from tests.worlds import assert_same, run

Op = Callable[[Tensor], Tensor]
Definition = Callable[[list[Tensor]], list[Tensor]]


def _double(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _on_each_rank(world: int, what: Callable[[int], Tensor]) -> list[Tensor]:
    return [what(r) for r in range(world)]


def _sum(xs: list[Tensor]) -> Tensor:
    return torch.stack(xs).sum(0)


def _definitions(W: int) -> dict[str, tuple[Op, Definition]]:
    """For ranks with different losses: gradients are those of the sum of all ranks' losses."""
    return {
        "all_to_all 1 0": (
            lambda x: net.all_to_all(x, 1, 0),
            lambda xs: _on_each_rank(W, lambda r: torch.cat([x.chunk(W, 0)[r] for x in xs], 1)),
        ),
        "all_to_all 0 1": (
            lambda x: net.all_to_all(x, 0, 1),
            lambda xs: _on_each_rank(W, lambda r: torch.cat([x.chunk(W, 1)[r] for x in xs], 0)),
        ),
        "all_to_all 2 1 background": (
            lambda x: net.all_to_all(x, 2, 1, background=True)(),
            lambda xs: _on_each_rank(W, lambda r: torch.cat([x.chunk(W, 1)[r] for x in xs], 2)),
        ),
        "all_to_all 1 1": (lambda x: net.all_to_all(x, 1, 1), lambda xs: xs),
        "all_to_all_single": (
            net.all_to_all_single,
            lambda xs: _on_each_rank(W, lambda r: torch.cat([x.chunk(W, 0)[r] for x in xs])),
        ),
        "all_gather fused": (lambda x: net.all_gather(x, 1, fused=True), lambda xs: [torch.cat(xs, 1)] * W),
        "zero_gather": (
            lambda x: net.zero_gather(x, full_shape=(3, 5)),
            lambda xs: [torch.cat(xs).flatten()[:15].view(3, 5)] * W,
        ),
        "reduce_scatter": (lambda x: net.reduce_scatter(x, 1), lambda xs: list(_sum(xs).chunk(W, 1))),
    }


def _gradients() -> None:
    W, rank = net.get_world_size(), net.get_world_rank()
    for name, (op, meaning) in _definitions(W).items():
        xs = [_double(4, 8, 2, seed=r).requires_grad_() for r in range(W)]
        wanted = meaning(xs)
        ts = [_double(*y.shape, seed=50 + r) for r, y in enumerate(wanted)]
        sum((y * t).sum() for y, t in zip(wanted, ts, strict=True)).backward()
        x = xs[rank].detach().clone().requires_grad_()
        y = op(x)
        assert_same(y, wanted[rank].detach(), what=name)
        (y * ts[rank]).sum().backward()
        assert_same(x.grad, xs[rank].grad, what=f"gradient of {name}")


def _conjugates() -> None:
    """For ranks that all apply the same function to a result, or start from the same input."""
    W, rank = net.get_world_size(), net.get_world_rank()
    xs, same = [_double(4, 8, seed=r) for r in range(W)], _double(4, 8, seed=99)
    t = _double(4, 8 * W, seed=7)
    for name, op, of, value, weight, gradient in [
        ("all_gather", lambda x: net.all_gather(x, 1), xs[rank], torch.cat(xs, 1), t, t.chunk(W, 1)[rank]),
        ("allreduce_forward", net.allreduce_forward, xs[rank], _sum(xs), same, same),
        ("allreduce_backward", net.allreduce_backward, same, same, xs[rank], _sum(xs)),
        (
            "spatial_split",
            lambda x: net.spatial_split(x, 0),
            same,
            same.chunk(W)[rank],
            t.chunk(W)[rank][:, :8],
            t[:, :8],
        ),
    ]:
        x = of.clone().requires_grad_()
        y = op(x)
        assert_same(y, value, what=name)
        (y * weight).sum().backward()
        assert_same(x.grad, gradient, what=f"gradient of {name}")


def _values() -> None:
    W, rank = net.get_world_size(), net.get_world_rank()
    xs = [_double(4, 2, seed=r) for r in range(W)]
    x, ops = xs[rank], torch.distributed.ReduceOp
    assert_same(net.simple_all_reduce(x), _sum(xs))
    assert_same(net.simple_all_reduce(x, op=ops.MAX), torch.stack(xs).amax(0))
    assert torch.equal(x, xs[rank])
    y = x.clone()
    assert net.simple_all_reduce(y, inplace=True).data_ptr() == y.data_ptr()
    assert_same(y, _sum(xs))
    assert torch.equal(net.simple_all_gather(x), torch.cat(xs))
    assert torch.equal(net.simple_split(x), x.chunk(W)[rank])
    assert_same(net.simple_reduce_scatter(x), _sum(xs).chunk(W)[rank])
    expected = torch.cat([other.chunk(W)[rank] for other in xs])
    assert torch.equal(net.simple_all_to_all(x), expected)
    output, wait = net.simple_all_to_all(x, background=True)
    wait()
    assert torch.equal(output, expected)
    part, shape = net.zero_scatter(torch.arange(5.0), net.simple_split)
    assert shape == (5,)
    assert torch.equal(net.zero_gather(part, (5,)), torch.arange(5.0))
    sizes = [[(3 * a + b) % 4 for b in range(W)] for a in range(W)]  # a rank may send nothing to another
    data = [torch.arange(sum(row)) + 100.0 * a for a, row in enumerate(sizes)]
    (received,), counts = net.batch_all_to_all_v([data[rank]], torch.tensor(sizes[rank]))
    assert torch.equal(received, torch.cat([d.split(row)[rank] for d, row in zip(data, sizes, strict=True)]))
    assert counts.tolist() == [row[rank] for row in sizes]
    (received,), counts = net.batch_all_gather_v([data[rank]])
    assert torch.equal(received, torch.cat(data))
    assert counts.tolist() == [len(d) for d in data]
    net.barrier()
    if W > 1:
        with pytest.raises(PlanError, match="not divisible by"):
            net.simple_split(torch.zeros(2 * W + 1))
    with pytest.raises(ConfigError, match="right sum"):
        net.batch_all_to_all_v([data[rank]], [len(data[rank]) + 1] + [0] * (W - 1))
    with pytest.raises(ConfigError, match="only a sum"):
        net.allreduce_forward(x, op=ops.MAX)


def _groups() -> None:
    rank = net.get_world_rank()
    for count in (2, -2):
        found = net.create_groups_from_world(count)
        assert (found.global_size, found.global_rank, found.group_count) == (4, rank, 2)
        assert (found.data_rank, found.model_size, found.model_rank) == (rank // 2, 2, rank % 2)
        mine = torch.tensor([float(rank)])
        in_a_row, across = found.model_group, found.data_group
        assert net.simple_all_gather(mine, in_a_row).tolist() == [rank // 2 * 2, rank // 2 * 2 + 1]
        assert net.simple_all_gather(mine, across).tolist() == [rank % 2, rank % 2 + 2]
        assert net.create_groups_from_world(count).model_group is in_a_row  # groups are cached
        assert net.create_groups_from_world(-1, parent_group=across).model_size == 1
        assert net.create_groups_from_world(1, parent_group=across).model_group is across
    assert net.get_world_size(net.create_standalone_group()) == 1
    assert net.create_groups_from_world(-4).model_size == 4
    for count in (3, -3, 0, 8, -8):
        with pytest.raises(PlanError, match="4 ranks cannot be divided into"):
            net.create_groups_from_world(count)


@pytest.mark.sample(6)
@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("check", [_gradients, _conjugates, _values])
def test_collectives(world: int, check: Callable[[], None]) -> None:
    run(world, check)


def test_groups() -> None:
    run(4, _groups)


def test_single_process() -> None:
    found = net.create_groups_from_world(1)
    assert (found.global_size, found.model_size, found.is_distributed) == (1, 1, False)
    assert found.model_group is found.data_group is found.global_group is None
    x = torch.ones(3)
    assert net.simple_all_reduce(x) is x
    assert net.get_world_size() == 1
    assert net.get_world_rank() == 0

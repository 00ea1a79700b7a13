"""Conjugate pairs of collectives: values against plain torch, backward against the definition of the forward."""

import pytest
import torch

from colonnade.config import Plan
from colonnade.parallel.axis import SOLO, Axis
from colonnade.parallel.distributed_context import DistributedContext
from tests.worlds import assert_same, run

N = 7  # rows: not divisible by any world size but 1


def data(seed: int, rows: int = N) -> torch.Tensor:
    return torch.randn(rows, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _fan(world: int) -> None:
    with DistributedContext.build(Plan(tp=world)) as context:
        tp = context.axes.tp
        x = data(0).requires_grad_()
        weights = [data(1 + r) for r in range(world)]  # each rank multiplies by its own weights, then all are summed
        y = tp.fan_in(tp.fan_out(x) * weights[tp.rank])
        y.pow(2).sum().backward()
        z = data(0).requires_grad_()
        sum(z * w for w in weights).pow(2).sum().backward()
        assert_same(y, x * sum(weights))
        assert_same(x.grad, z.grad)


def _gather_and_scatter(world: int, dim: int) -> None:
    with DistributedContext.build(Plan(tp=world)) as context:
        tp = context.axes.tp
        whole = data(0).movedim(0, dim).contiguous()
        start, stop = tp.part(N)
        x = whole.narrow(dim, start, stop - start).clone().requires_grad_()
        weights = [data(1 + r).movedim(0, dim) for r in range(world)]
        y = tp.scatter_sum(tp.gather(x, dim, N) * weights[tp.rank], dim)
        (y**2).sum().backward()
        z = whole.clone().requires_grad_()
        reference = sum(z * w for w in weights)
        reference.pow(2).sum().backward()
        assert_same(y, reference.narrow(dim, start, stop - start))
        assert_same(x.grad, z.grad.narrow(dim, start, stop - start))


def _split_and_join(world: int, dim: int) -> None:
    with DistributedContext.build(Plan(tp=world)) as context:
        tp = context.axes.tp
        whole = data(0).movedim(0, dim).contiguous()
        x = whole.clone().requires_grad_()
        y = tp.join(tp.split(x, dim) ** 3, dim, N)  # every rank continues with the same full tensor
        (y**2).sum().backward()
        z = whole.clone().requires_grad_()
        (z**6).sum().backward()
        assert_same(y, whole**3)
        assert_same(x.grad, z.grad)


def _exchange(world: int) -> None:
    with DistributedContext.build(Plan(tp=world)) as context:
        tp = context.axes.tp
        counts = [[(r + 2 * s) % 3 for s in range(world)] for r in range(world)]  # r sends counts[r][s] rows to s
        send, receive = counts[tp.rank], [counts[r][tp.rank] for r in range(world)]
        parts = [[data(10 * r + s, counts[r][s]) for s in range(world)] for r in range(world)]
        x = torch.cat(parts[tp.rank]).requires_grad_()
        y = tp.exchange(x, send, receive)
        assert_same(y, torch.cat([parts[r][tp.rank] for r in range(world)]))
        (y**2).sum().backward()
        assert_same(x.grad, 2 * x.detach())


def _reductions(world: int) -> None:
    with DistributedContext.build(Plan(tp=world)) as context:
        tp = context.axes.tp
        x = data(tp.rank).requires_grad_()
        every = torch.stack([data(r) for r in range(world)])
        assert_same(tp.sum_(x), every.sum(0))
        assert_same(tp.max_(x), every.amax(0))
        assert not tp.sum_(x).requires_grad
        assert_same(tp.broadcast_(data(tp.rank), src=world - 1), data(world - 1))


def _compiled(world: int) -> None:
    with DistributedContext.build(Plan(tp=world)) as context:
        tp = context.axes.tp

        def work(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            y = tp.fan_in(tp.fan_out(x) * w)
            y = tp.scatter_sum(tp.gather(tp.split(y, 0), 0, N) * w, 0)
            return tp.join(y, 0, N).pow(2).sum()

        results = []
        for function in (work, torch.compile(work, backend="aot_eager", fullgraph=True)):
            x = data(0).requires_grad_()
            loss = function(x, data(1 + tp.rank))
            loss.backward()
            results.append((loss, x.grad))
        assert_same(results[1][0], results[0][0])
        assert_same(results[1][1], results[0][1])


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_conjugate_pairs_match_plain_torch(world: int) -> None:
    run(world, _every_pair, world)


def _every_pair(world: int) -> None:
    _fan(world)
    _exchange(world)
    _reductions(world)
    for dim in (0, 1):
        _gather_and_scatter(world, dim)
        _split_and_join(world, dim)


@pytest.mark.slow
def test_conjugate_pairs_compile_into_one_graph() -> None:
    run(2, _compiled, 2)


def test_gather_instead_of_join_doubles_the_gradient() -> None:
    """The tests can detect the mistake that the two names exist to prevent (layout rule f)."""
    ratios = run(2, _wrong_pair)
    assert ratios == [2.0, 2.0]


def _wrong_pair() -> float:
    with DistributedContext.build(Plan(tp=2)) as context:
        tp = context.axes.tp
        x = data(0).requires_grad_()
        tp.gather(tp.split(x, 0), 0, N).sum().backward()
        assert x.grad is not None
        return (x.grad / torch.ones_like(x)).mean().item()


@pytest.mark.parametrize(("n", "size"), [(7, 3), (5, 4), (1, 4), (8, 4), (0, 2), (50257, 4)])
def test_parts_follow_torch_chunk(n: int, size: int) -> None:
    chunks = [len(c) for c in torch.arange(n).chunk(size)]
    chunks += [0] * (size - len(chunks))
    if n == 0:
        chunks = [0] * size
    assert [stop - start for start, stop in (Axis("x", size, r).part(n) for r in range(size))] == chunks


def test_solo_returns_its_input() -> None:
    x = data(0)
    assert SOLO.fan_out(x) is x
    assert SOLO.fan_in(x) is x
    assert SOLO.gather(x, 0, N) is x
    assert SOLO.scatter_sum(x, 0) is x
    assert SOLO.split(x, 0) is x
    assert SOLO.join(x, 0, N) is x
    assert SOLO.exchange(x, [N], [N]) is x

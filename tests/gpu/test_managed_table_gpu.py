"""Managed-collision tables on a GPU: rows read ahead on a stream of their own give the same training bit for bit."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from colonnade.nn import ManagedTable, prefetched
from tests.unit.test_managed_table import batches, equal, train, uneven

BUCKETS = 64


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Gradients of a row that several ids share are added in one order."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("policy", ["lfu", "lru", "decay"])
@pytest.mark.parametrize("lengths", ["equal", "uneven"])
def test_prefetch_equals_none_bit_for_bit(policy: str, lengths: str) -> None:
    data = batches(15) if lengths == "equal" else uneven(batches(15))
    tables = [ManagedTable(4 * BUCKETS, 8, every=4, policy=policy, device="cuda") for _ in range(2)]  # type: ignore[arg-type]
    plain, ahead = (
        train(table, data, prefetch=prefetch) for table, prefetch in zip(tables, (False, True), strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, ahead, strict=True))
    assert equal(tables[0].state(), tables[1].state())
    assert tables[0].hits > 0


def test_large_batches_behind_a_busy_stream() -> None:
    """Reads and write-backs overlap long kernels: a missing wait or a buffer used too early changes the numbers."""
    random = torch.Generator().manual_seed(0)
    data = [(torch.rand(40_000, generator=random) ** 3 * 300_000).long() for _ in range(12)]
    numbers = torch.randn(1 << 26, device="cuda")
    tables = [ManagedTable(1024 * BUCKETS, 64, every=5, device="cuda") for _ in range(2)]
    results: list[list[Tensor]] = [[], []]
    for table, result, prefetch in zip(tables, results, (False, True), strict=True):
        pairs = prefetched(table, data, lambda ids: ids) if prefetch else ((ids, table(ids)) for ids in data)
        for _, x_ND in pairs:
            result.append(x_ND.detach().clone())
            for _ in range(50):
                numbers.sin_()
            (x_ND.square().sum() + x_ND.sum()).backward()
            table.step(0.1)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert equal(tables[0].state(), tables[1].state())
    assert tables[0].hits > 0


def test_the_table_of_a_gpu_continues_on_a_cpu() -> None:
    """The same ids keep their rows; weights agree up to rounding."""
    data = batches(10)
    gpu, cpu = (ManagedTable(4 * BUCKETS, 8, every=3, device=device) for device in ("cuda", "cpu"))
    assert torch.equal(gpu.state()["weight_RD"], cpu.state()["weight_RD"])
    train(gpu, data[:5], prefetch=True)
    cpu.load(gpu.state())
    train(gpu, data[5:], prefetch=True)
    train(cpu, data[5:])
    ours, theirs = gpu.state(), cpu.state()
    for name in ("hashes", "slots", "counts", "last", "history", "steps"):
        assert torch.equal(ours[name], theirs[name])
    assert torch.allclose(ours["weight_RD"], theirs["weight_RD"], atol=1e-5)

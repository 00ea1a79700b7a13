"""Managed collisions: the same table on any number of ranks, the share of hits, policies, prefetch, checkpoints."""

import numpy as np
import pytest
import torch
from torch import Tensor

from colonnade.config import Plan
from colonnade.errors import ConfigError
from colonnade.nn.managed_table import BUCKETS, ManagedTable
from colonnade.nn.table_prefetch import prefetched
from colonnade.parallel.axis import SOLO, Axis
from colonnade.parallel.distributed_context import DistributedContext
from tests.worlds import run as in_world

BATCH = 96


def batches(count: int, ids: int = 4000, seed: int = 0) -> list[Tensor]:
    """Ids by Zipf's law, signed and far apart."""
    random = np.random.default_rng(seed)
    weights = 1 / np.arange(1, ids + 1)
    names = random.integers(-(2**62), 2**62, ids)
    return [torch.from_numpy(names[random.choice(ids, BATCH, p=weights / weights.sum())]) for _ in range(count)]


def train(table: ManagedTable, data: list[Tensor], axis: Axis = SOLO, *, prefetch: bool = False) -> list[Tensor]:
    """The outputs of each step; the loss weights the numbers of the global batch differently."""
    outputs: list[Tensor] = []
    share = BATCH // axis.size
    mine = slice(axis.rank * share, (axis.rank + 1) * share)
    weight_N1 = torch.linspace(-1, 1, BATCH)[mine, None]

    def one(x_ND: Tensor) -> None:
        outputs.append(x_ND.detach().clone())
        (x_ND.square() * weight_N1 + 0.1 * x_ND).sum().backward()
        table.step(0.1)

    parts = [ids[mine] for ids in data]
    if prefetch:
        for _, x_ND in prefetched(table, parts, lambda ids: ids):
            one(x_ND)
    else:
        for ids in parts:
            one(table(ids))
    return outputs


def equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _on_ranks(ranks: int, prefetch: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
    with DistributedContext.build(Plan(dp=ranks)) as context:
        axis = context.axes.dp
        table = ManagedTable(4 * BUCKETS, 8, every=3, axis=axis)
        outputs = train(table, batches(10), axis, prefetch=prefetch)
        return table.state(), outputs


@pytest.mark.parametrize(("ranks", "prefetch"), [(2, False), (2, True), pytest.param(4, True, marks=pytest.mark.slow)])
def test_any_number_of_ranks_gives_the_same_table_bit_for_bit(ranks: int, prefetch: bool) -> None:
    table = ManagedTable(4 * BUCKETS, 8, every=3)
    outputs = train(table, batches(10))
    results = in_world(ranks, _on_ranks, ranks, prefetch)
    assert all(equal(state, table.state()) for state, _ in results)
    for step, whole in enumerate(outputs):
        assert torch.equal(torch.cat([theirs[step] for _, theirs in results]), whole)


@pytest.mark.parametrize("policy", ["lfu", "lru", "decay"])
def test_prefetch_equals_none_bit_for_bit(policy: str) -> None:
    """Rows that two batches share, and assignments between them."""
    tables = [ManagedTable(4 * BUCKETS, 8, every=4, policy=policy) for _ in range(2)]  # type: ignore[arg-type]
    data = batches(15)
    plain, ahead = (
        train(table, data, prefetch=prefetch) for table, prefetch in zip(tables, (False, True), strict=True)
    )
    assert all(torch.equal(a, b) for a, b in zip(plain, ahead, strict=True))
    assert equal(tables[0].state(), tables[1].state())
    assert tables[0].version == 3
    assert tables[0].hits > 0


def test_hit_share_is_near_the_best() -> None:
    """200,000 ids by Zipf's law on 20,032 rows: at least 0.9 of what the most frequent ids would get."""
    ids, rows, steps = 200_000, 20_032, 60
    random = np.random.default_rng(3)
    weights = 1 / np.arange(1, ids + 1) ** 1.1
    weights /= weights.sum()
    names = random.permutation(ids) * 7919
    table = ManagedTable(rows, 2, every=5)
    for step in range(steps):
        table.use(table.read(table.look_up(torch.from_numpy(names[random.choice(ids, 20_000, p=weights)]))))
        table.step(0.0)
        if step == steps - 11:
            table.looked_up = table.hits = 0
    assert table.hits / table.looked_up >= 0.9 * weights[: rows - BUCKETS].sum()


def test_policies_choose_whom_to_keep() -> None:
    """One bucket's two places: a frequent id of long ago, a rare recent one, and one between."""
    hashes, ids = {}, {}
    for candidate in range(4000):
        found = ManagedTable(2 * BUCKETS, 1).look_up(torch.tensor([candidate]))
        hashes[candidate] = int(found.hashes_M[0] >> np.uint64(58))
    for candidate, bucket in hashes.items():
        ids.setdefault(bucket, []).append(candidate)
    old, between, recent = ids[0][:3]
    steps = [[old] * 9, [between] * 4, [between], [recent] * 2]

    def kept(policy: str, decay: float = 1.0) -> set[int]:
        table = ManagedTable(3 * BUCKETS, 1, policy=policy, every=1, decay=decay)  # type: ignore[arg-type]
        for step in steps:
            table(torch.tensor(step))
            table.step(0.0)
        return {each for each in (old, between, recent) if table._rows(table.look_up(torch.tensor([each])).hashes_M)[1]}

    assert kept("lfu") == {old, between}
    assert kept("lru") == {between, recent}
    assert kept("decay", 2.0) == {between, recent}


def test_an_evicted_row_starts_anew() -> None:
    """Weights and optimizer state of a slot that changes hands are those of a new id."""
    table = ManagedTable(2 * BUCKETS, 4, policy="lru", every=1)
    first = batches(1)[0]
    train(table, [first])
    train(table, [first])
    assert table.state_R.max() > 0
    others = batches(1, seed=9)[0]
    train(table, [others])
    fresh = ManagedTable(2 * BUCKETS, 4, policy="lru", every=1)
    train(fresh, [others])
    _, hit = fresh._rows(fresh.look_up(others).hashes_M)
    assert hit.any()
    assert torch.equal(table(others)[torch.from_numpy(hit)], fresh(others)[torch.from_numpy(hit)])


def test_resumed_bit_for_bit() -> None:
    data, whole = batches(10), ManagedTable(4 * BUCKETS, 8, every=3)
    train(whole, data)
    table = ManagedTable(4 * BUCKETS, 8, every=3)
    train(table, data[:5])
    resumed = ManagedTable(4 * BUCKETS, 8, every=3)
    resumed.load(table.state())
    train(resumed, data[5:])
    assert equal(resumed.state(), whole.state())
    with pytest.raises(ConfigError, match=r"saved table has 256 rows of 8 numbers, and this one 512 of 8"):
        ManagedTable(8 * BUCKETS, 8, every=3).load(table.state())


def test_refusals() -> None:
    for rows in (100, BUCKETS):
        with pytest.raises(ConfigError, match="a multiple of 64 rows"):
            ManagedTable(rows, 4)

"""Managed collisions: the same table on any number of ranks, the share of hits, policies, prefetch, checkpoints."""

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor

from colonnade.config import Plan
from colonnade.errors import CapacityError, ConfigError, DataError
from colonnade.nn import host_rows
from colonnade.nn.host_rows import DeviceRows
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


def train(
    table: ManagedTable, data: list[Tensor], axis: Axis = SOLO, *, prefetch: bool = False, stop: int | None = None
) -> list[Tensor]:
    """The outputs of each step; the loss weights the numbers of the global batch differently."""
    outputs: list[Tensor] = []

    def share(count: int) -> slice:
        return slice(count * axis.rank // axis.size, count * (axis.rank + 1) // axis.size)

    def one(ids: Tensor, x_ND: Tensor) -> None:
        outputs.append(x_ND.detach().clone())
        weight_N1 = torch.linspace(-1, 1, len(ids))[share(len(ids)), None].to(x_ND.device)
        (x_ND.square() * weight_N1 + 0.1 * x_ND).sum().backward()
        table.step(0.1)

    if prefetch:
        for ids, x_ND in prefetched(table, data, lambda ids: ids[share(len(ids))]):
            one(ids, x_ND)
            if len(outputs) == stop:
                break
    else:
        for ids in data[:stop]:
            one(ids, table(ids[share(len(ids))]))
    return outputs


def uneven(data: list[Tensor]) -> list[Tensor]:
    """Batches of different lengths, the first and the last of them and one between empty."""
    return [data[0][:0], *(ids[: 1 + 7 * i] for i, ids in enumerate(data)), data[0][:0], *data[3:5], data[0][:0]]


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


def test_prefetch_equals_none_with_uneven_and_empty_batches() -> None:
    tables = [ManagedTable(4 * BUCKETS, 8, every=4) for _ in range(2)]
    plain, ahead = (
        train(table, uneven(batches(9)), prefetch=prefetch)
        for table, prefetch in zip(tables, (False, True), strict=True)
    )
    assert [len(x) for x in plain[:4]] == [0, 1, 8, 15]
    assert all(torch.equal(a, b) for a, b in zip(plain, ahead, strict=True))
    assert equal(tables[0].state(), tables[1].state())


@pytest.mark.parametrize("stop", [5, 6])
def test_resumed_with_reads_in_flight_bit_for_bit(stop: int) -> None:
    """The state is taken in the loop, while the next batch is read ahead; 6 is a step that reassigns rows."""
    data, whole = batches(10), ManagedTable(4 * BUCKETS, 8, every=3)
    train(whole, data)
    table, saved = ManagedTable(4 * BUCKETS, 8, every=3), dict[str, Tensor]()
    for number, (ids, x_ND) in enumerate(prefetched(table, data, lambda ids: ids), 1):
        (x_ND.square() * torch.linspace(-1, 1, len(ids))[:, None] + 0.1 * x_ND).sum().backward()
        table.step(0.1)
        if number == stop:
            saved = table.state()
    assert equal(table.state(), whole.state())
    resumed = ManagedTable(4 * BUCKETS, 8, every=3)
    resumed.load(saved)
    train(resumed, data[stop:], prefetch=True)
    assert equal(resumed.state(), whole.state())


def test_a_loop_that_ends_early_leaves_the_table_whole() -> None:
    data = batches(10)
    tables = [ManagedTable(4 * BUCKETS, 8, every=3) for _ in range(2)]
    for table, prefetch in zip(tables, (False, True), strict=True):
        train(table, data, prefetch=prefetch, stop=4)
        train(table, data[4:])
    assert equal(tables[0].state(), tables[1].state())


def test_errors_ahead_are_raised_at_their_batch() -> None:
    """The batches before it are trained; the error names the batch."""
    data = batches(5)

    def broken() -> Iterator[Tensor]:
        yield from data[:3]
        raise OSError("shard 7 is unreadable")

    def unknown(ids: Tensor) -> Tensor:
        if ids is data[3]:
            raise KeyError("no ids")
        return ids

    def failed(table: ManagedTable, source: Iterable[Tensor], ids_of: Callable[[Tensor], Tensor], error: type) -> int:
        ahead, before = prefetched(table, source, ids_of), table.steps
        for _, x_ND in islice(ahead, 3):
            x_ND.sum().backward()
            table.step(0.1)
        with pytest.raises(error) as raised:
            next(ahead)
        assert "batch 3 ahead" in raised.value.__notes__[0]
        return table.steps - before

    table = ManagedTable(4 * BUCKETS, 8)
    assert failed(table, broken(), lambda ids: ids, OSError) == 3
    assert failed(table, data, unknown, KeyError) == 3
    assert failed(table, [*data[:3], data[3].double()], lambda ids: ids, DataError) == 3

    read = table._host.read

    def unreadable(rows_U: Tensor) -> DeviceRows:
        if len(rows_U) == 1:
            raise MemoryError("pinned memory")
        return read(rows_U)

    table._host.read = unreadable  # type: ignore[method-assign]
    assert failed(table, [*data[:3], data[3][:1]], lambda ids: ids, MemoryError) == 3


def test_failed_write_back_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    table = ManagedTable(4 * BUCKETS, 8)

    def write(*_: object) -> None:
        raise MemoryError("pinned memory")

    monkeypatch.setattr(table._host, "write", write)
    with pytest.raises(MemoryError, match="pinned memory"):
        train(table, batches(6), prefetch=True)


def test_prefetch_needs_one_step_a_batch() -> None:
    table = ManagedTable(4 * BUCKETS, 8)
    ahead = prefetched(table, batches(3), lambda ids: ids)
    next(ahead)
    with pytest.raises(ConfigError, match="already being prefetched"):
        next(prefetched(table, batches(3), lambda ids: ids))
    with pytest.raises(ConfigError, match=r"table.step was called 0 times for batch 0"):
        next(ahead)
    table = ManagedTable(4 * BUCKETS, 8)
    for ids in batches(2):
        table(ids)
    with pytest.raises(ConfigError, match=r"2 batches were looked up since the last table.step"):
        table.step(0.1)


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
        hashes[candidate] = int(found.hashes[0] >> np.uint64(58))
    for candidate, bucket in hashes.items():
        ids.setdefault(bucket, []).append(candidate)
    old, between, recent = ids[0][:3]
    steps = [[old] * 9, [between] * 4, [between], [recent] * 2]

    def kept(policy: str, decay: float = 1.0) -> set[int]:
        table = ManagedTable(3 * BUCKETS, 1, policy=policy, every=1, decay=decay)  # type: ignore[arg-type]
        for step in steps:
            table(torch.tensor(step))
            table.step(0.0)
        return {each for each in (old, between, recent) if table.look_up(torch.tensor([each])).hits}

    assert kept("lfu") == {old, between}
    assert kept("lru") == {between, recent}
    assert kept("decay", 2.0) == {between, recent}


def test_an_evicted_row_starts_anew() -> None:
    """Weights and optimizer state of a slot that changes hands are those of a new id."""
    table = ManagedTable(2 * BUCKETS, 4, policy="lru", every=1)
    first = batches(1)[0]
    train(table, [first])
    train(table, [first])
    assert table.state()["state_R"].max() > 0
    others = batches(1, seed=9)[0]
    train(table, [others])
    fresh = ManagedTable(2 * BUCKETS, 4, policy="lru", every=1)
    train(fresh, [others])
    hit = torch.tensor([fresh.look_up(each).hits > 0 for each in others[:, None]])
    assert hit.any()
    assert torch.equal(table(others)[hit], fresh(others)[hit])


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


def test_memory_that_cannot_be_locked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rows, "map_memory", lambda x: "out of memory")
    with pytest.raises(
        CapacityError, match=r"0\.1 GB of host memory for the table could not be locked \(out of memory\)"
    ):
        host_rows.HostRows(torch.empty(1 << 18, 64), torch.empty(1 << 18, 1), torch.device("cuda"))


def test_refusals() -> None:
    for rows in (100, BUCKETS):
        with pytest.raises(ConfigError, match="a multiple of 64 rows"):
            ManagedTable(rows, 4)
    with pytest.raises(ConfigError, match="policy is 'lfo'; it must be 'lfu', 'lru' or 'decay'"):
        ManagedTable(128, 4, policy="lfo")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1; got width=4 and every=0"):
        ManagedTable(128, 4, every=0)
    with pytest.raises(ConfigError, match="lr=-1 is not a valid learning rate"):
        ManagedTable(128, 4).step(-1)
    with pytest.raises(DataError, match="got list"):
        ManagedTable(128, 4)([1, 2])  # type: ignore[arg-type]

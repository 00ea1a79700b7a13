"""Prefetch for a :class:`~colonnade.nn.managed_table.ManagedTable`: rows of batch i + 1 are read while i is computed.

    main thread      forward, backward, update and write-back of i | mend i + 1: rows that step i changed
    rows' thread     look up i + 1, copy its rows from host memory to the device
    loader's thread  batch i + 2 from the iterator

Rows that both batches have reach i + 1 updated, from the device's copies of i, and after a new assignment of rows i + 1
is looked up again. So the result equals that without prefetch bit for bit (on a GPU under
``torch.use_deterministic_algorithms``, as gradients of a row that several ids share are added there in any order).
Collectives stay in the main thread. On a GPU the main thread waits for no kernel; look-ups and copies have their own
streams.

    for batch, x_ND in prefetched(table, batches, lambda batch: batch.ids):
        loss(x_ND, batch).backward()
        table.step(lr)
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.nn.managed_table import LookUp, ManagedTable

Batch = TypeVar("Batch")


def prefetched(
    table: ManagedTable, batches: Iterable[Batch], ids_of: Callable[[Batch], Tensor]
) -> Iterator[tuple[Batch, Tensor]]:
    """(batch, x_ND) for each of ``batches``; call ``table.step`` once before the next one.

    ``ids_of`` gives a batch's ids. Every rank has the same number of batches. An exception from the iterator,
    ``ids_of`` or a read is raised when the batch is due, after the batches before it, with the batch's number as a
    note. Raises :class:`ConfigError` unless ``table.step`` is called once per batch.
    """
    source = iter(batches)
    with ThreadPoolExecutor(1, thread_name_prefix="table-loader") as loader, table.background() as rows:

        def load() -> "Future[list[Batch]]":
            """The next batch; none after the last one."""
            return loader.submit(lambda: list(islice(source, 1)))

        def begin(loading: "Future[list[Batch]]", before: LookUp | None) -> "Future[tuple[Batch, LookUp] | None]":
            """Start to read a batch's rows; None after the last batch."""
            ahead: Future[tuple[Batch, LookUp] | None] = Future()
            try:
                loaded = loading.result()
                if not loaded:
                    ahead.set_result(None)
                    return ahead
                ids_N = ids_of(loaded[0])
                routed = table.route(ids_N) if table.axis.size > 1 else None
            except Exception as error:  # noqa: BLE001 - raised when it is the batch's turn
                ahead.set_exception(error)
                return ahead
            return rows.submit(lambda: (loaded[0], table.read_ahead(routed or table.route(ids_N), before)))

        number, before = 0, None
        ahead, loading = begin(load(), None), load()
        while True:
            try:
                current = ahead.result()
            except Exception as error:
                error.add_note(f"raised while nn.prefetched read batch {number} ahead (counted from 0)")
                raise
            if current is None:
                return
            batch, found = current
            if before is not None:
                table.update_prefetched(found, before)
            ahead, loading = begin(loading, found), load()
            steps = table.steps
            yield batch, table.use(found)
            if table.steps != steps + 1:
                raise ConfigError(
                    f"table.step was called {table.steps - steps} times for batch {number} of nn.prefetched; call it "
                    "once for each batch"
                )
            number, before = number + 1, found

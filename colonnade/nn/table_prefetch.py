"""Prefetch for a :class:`~colonnade.nn.managed_table.ManagedTable`: rows of batch i + 1 are read while i is computed.

    main thread    look up i + 1 | use i, forward, backward, step i | mend i + 1: rows that step i changed
    reader         batch i + 2 from the iterator; rows of i + 1 from host memory to the device

Rows that both batches have reach i + 1 updated, and after a new assignment of rows i + 1 is looked up again. So the
result equals that without prefetch bit for bit. Collectives stay in the main thread.

    for batch, x_ND in prefetched(table, batches, lambda batch: batch.ids):
        loss(x_ND, batch).backward()
        table.step(lr)
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from torch import Tensor

from colonnade.nn.managed_table import LookUp, ManagedTable

Batch = TypeVar("Batch")


def prefetched(
    table: ManagedTable, batches: Iterable[Batch], ids_of: Callable[[Batch], Tensor]
) -> Iterator[tuple[Batch, Tensor]]:
    """(batch, x_ND) for each of ``batches``; call ``table.step`` once before the next one.

    ``ids_of`` gives a batch's ids. Every rank has as many batches.
    """
    source, done = iter(batches), object()
    with ThreadPoolExecutor(2, thread_name_prefix="table-prefetch") as readers:

        def following() -> "Future[Batch | object]":
            return readers.submit(next, source, done)

        def begin(batch: Batch) -> "tuple[LookUp, Future[LookUp]]":
            found = table.look_up(ids_of(batch))
            return found, readers.submit(table.read, found)

        batch, coming = following().result(), following()
        if batch is done:
            return
        current = begin(batch)  # type: ignore[arg-type]
        current[1].result()
        while batch is not done:
            ahead = coming.result()
            coming = following()
            nearest = None if ahead is done else begin(ahead)  # type: ignore[arg-type]
            steps = table.steps
            changed = np.unique(current[0].rows_U)
            yield batch, table.use(current[0])  # type: ignore[misc]
            assert table.steps == steps + 1, "one table.step for each batch"
            if nearest is not None:
                nearest[1].result()
                table.mend(nearest[0], changed)
                current = nearest
            batch = ahead

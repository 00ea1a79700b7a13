"""A shared prefix: read once, read by each request, and not shared (benchmarks/flash_decoding.py).

Each call reads another prefix, so that none is in the L2 cache. Requests have few own keys, as after a long document.
"""

import itertools
from typing import Any

from colonnade.kernels.attention import reference, triton_decode
from colonnade.kernels.attention.cascade import Cascade
from colonnade.kernels.attention.decode_plan import KernelLayout
from decoding.decode_cells import Cell, Run, Tensors, cell_seconds, peers, relative_error
from harness.rows import format_row, round_significant

OWN, PREFIXES = 100, 8
TOLERANCE = 6e-4


def rows(batch: int, prefix: int, device: str, read: float, *, page: int = 64) -> list[dict[str, Any]]:
    """Times of ``batch`` requests of ``prefix`` shared keys and :data:`OWN` own keys."""
    cell = Cell((prefix + OWN,) * batch, page=page)
    tensors = Tensors(cell, device)
    k, v = (x.flatten(0, 2).unflatten(0, (-1, page)) for x in (tensors.k, tensors.v))
    tables = []
    for i in range(min(PREFIXES, batch)):
        pages = tensors.scattered[:1].clone()
        pages[0, :, : prefix // page] = pages[0, i, : prefix // page]
        tables.append(tensors.table(0, pages))
    apart = [tensors.table(0, tensors.scattered[:1])]
    new = [1] * batch
    layout = KernelLayout.of(tensors.q_BNH, k, 1, shares=True)
    assert layout.shared is not None
    cascade = layout.plan(cell.lengths, new, tables=tables[0].host_pages, page_tokens=page)
    plain = layout.plan(cell.lengths, new)
    assert isinstance(cascade, Cascade) or device == "cpu", "sharing does not pay, by the costs in decode_tiles.json"

    def call(plan: Any, told: list) -> Run:
        turns = itertools.cycle(told)
        if device == "cuda":
            ready = layout.prepare(plan, device)
            return lambda _: triton_decode.attend(tensors.q_BNH, k, v, next(turns), ready).o
        if isinstance(plan, Cascade):
            shapes = layout.shape, layout.shared.shape
            return lambda _: reference.run_cascade(plan, *shapes, tensors.q_BNH, k, v, next(turns)).o
        return lambda _: reference.run_plan(plan, layout.shape, tensors.q_BNH, k, v, next(turns)).o

    runs = [
        ("colonnade, read once", cascade, tables), ("colonnade, shared pages read by each", plain, tables),
        ("colonnade, nothing shared", plain, apart),
    ]  # fmt: skip
    found = []
    for name, plan, told in runs:
        right = reference.paged(tensors.q_BNH.float(), k.float(), v.float(), told[0])
        mistake = relative_error(call(plan, told[:1]), right)
        assert mistake < TOLERANCE * (1 if device == "cuda" else 3), f"{name}: {mistake:.1e} off"
        found.append((name, cell_seconds(call(plan, told), tensors)))
    for name, run in peers(tensors) if device == "cuda" else ():
        try:
            found.append((f"{name}, nothing shared", cell_seconds(run, tensors)))
        except RuntimeError as why:
            print(f"{name}: {str(why).splitlines()[0][:90]}", flush=True)
    unshared = found[2][1]
    once = 2 * (prefix + batch * OWN) * cell.K * cell.H * cell.dtype.itemsize
    made = [
        {
            "B": batch, "prefix": prefix, "own": OWN, "page": page, "who": name, "us": round(took * 1e6, 2),
            "times_unshared": round_significant(unshared / took),
            "of_read": round_significant((once if name.endswith("once") else cell.bytes) / took / read),
        }
        for name, took in found
    ]  # fmt: skip
    print(*map(format_row, made), sep="\n", flush=True)
    return made

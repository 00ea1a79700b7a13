"""Attention kernels for many rows and shared prefixes, run by Triton's interpreter on a CPU.

``TRITON_INTERPRET=1 python -m tests.interpreted_cascade``.
"""

import itertools
import warnings
from dataclasses import replace

import pytest
import torch

from colonnade.errors import CapacityError, ConfigError
from colonnade.kernels.attention import decode_tiles, dispatch, reference, triton_decode
from colonnade.kernels.attention.cascade import Cascade
from colonnade.kernels.attention.decode_plan import KernelLayout
from colonnade.kernels.attention.decode_tiles import OVERRIDE, Tiles
from tests.decoding import Case, CaseTensors
from tests.interpreted_decode import same

HOW = [Tiles(16, 4, 2, 2, 8, 32), Tiles(32, 4, 2, 1, 4, 32)]
EVERYTHING = {"cap": 1.5, "slopes": True, "sinks": True}


def check_many_rows() -> int:
    """Prompt chunks with and without earlier tokens, fewer keys than queries; split and unsplit, all features."""
    batches = (([100, 70], [40, 70]), ([90, 3, 20, 0], [30, 2, 30, 0]), ([67], [67]))
    cases = (({}, 64), ({"window": 30}, 16), ({"window": 9, **EVERYTHING}, 4), (EVERYTHING, 16), ({"cap": 2.0}, 128))
    for i, (more, page) in enumerate(cases):
        OVERRIDE[:] = [HOW[1 - i // 4]]
        group, width = ((1, 16), (3, 20), (2, 32))[i % 3]
        same(Case(*batches[i % 3], K=1 + i % 2, group=group, H=width, page=page, many=True, **more))
    OVERRIDE[:] = [HOW[1]]
    half = {"dtype": torch.float16, "cache": torch.float8_e4m3fn}
    same(Case([90], [60], K=1, group=2, H=16, page=16, many=True, sinks=True, **half), 6e-4)
    return len(cases) + 1


SHARED = Case(
    [130, 40, 100, 130, 75, 97, 0], [1, 2, 3, 1, 1, 2, 0], K=2, group=3, H=16, page=16,
    prefixes=(((0, 3, 5), 80), ((2, 4), 64)),
)  # fmt: skip


def cascaded(case: Case, **options: bool | int) -> CaseTensors:
    made = case.made(**options)
    assert isinstance(made.plan, Cascade) and len(made.plan.groups) == len(case.prefixes), made.plan
    return made


def check_shared_prefixes() -> int:
    """Two interleaved groups and ungrouped requests equal float64 and the reference executor."""
    count = 0
    for i, more in enumerate((EVERYTHING, {"window": 50})):
        OVERRIDE[:] = [HOW[i % 2]]
        made = cascaded(replace(SHARED, **more))
        double = [x.double() for x in (made.q, made.k, made.v)]
        shapes = made.layout.shape, made.layout.shared.shape
        mods = {name: mod for name, mod in made.options.items() if name != "near_RN"}  # shared prefixes have none
        plain = reference.run_cascade(made.plan, *shapes, *double, made.table, **mods)
        for what, ours, theirs, exact in zip(("o", "lse"), made.run(), plain, made.exact(), strict=True):
            seen = exact.isfinite()
            assert torch.equal(ours.isfinite(), seen), what
            for right in (theirs, exact):
                assert (ours.double() - right)[seen].norm() < 1e-5 * right[seen].norm(), what
        count += 1
    OVERRIDE[:] = [HOW[1]]
    same(replace(SHARED, group=12, K=1, cache=torch.int8, page=32, prefixes=(((0, 3, 5), 64),)))
    return count + 1


def check_tiles_by_the_copy_engine() -> int:
    """TMA loads: 16-bit pages of whole tiles, chunks and groups, windows, all features, an invalid page."""
    OVERRIDE[:] = [HOW[1]]
    chunks = Case([100, 70, 0], [40, 70, 0], K=2, group=2, H=32, page=32, many=True, dtype=torch.float16)
    groups = replace(SHARED, dtype=torch.float16, page=32, prefixes=(((0, 3, 5), 64),))
    cases = [
        chunks, replace(chunks, page=64, **EVERYTHING), replace(chunks, page=96, window=50),
        groups, replace(groups, page=64, slopes=True),
    ]  # fmt: skip
    for case in cases:
        made = case.made()
        assert all(triton_decode.tma_descriptor(made.q, x, HOW[1].tile) for x in (made.k, made.v))
        same(case, 6e-4)
    for page in (10**6, -7):
        # Of 100 keys the second 32 are missing; the first of the 40 queries comes after them.
        made = replace(chunks, lengths=[100], queries=[36]).made()
        made.table.pages_RP[0, 1] = page
        keys, values = (x[made.table.pages_RP[0, [0, 2, 3]].long()].flatten(0, 1)[:68] for x in (made.k, made.v))
        exact = reference.attend(*(x.double() for x in (made.q, keys, values))).o
        assert (made.run().o.double() - exact).norm() < 6e-4 * exact.norm()
    narrow, mixed_types = replace(chunks, page=16).made(), replace(chunks, cache=torch.float8_e4m3fn).made()
    for made in (narrow, mixed_types):
        assert triton_decode.tma_descriptor(made.q, made.k, HOW[1].tile) is None
    return len(cases) + 4


def check_graph_arrays() -> int:
    """Plans updated in place: other groups, no groups, and lengths that have grown since planning."""
    OVERRIDE[:] = [HOW[1]]
    made = cascaded(SHARED, capacity=True, ahead=20)
    exact = made.exact().o
    assert (made.run().o.double() - exact).norm() < 1e-5 * exact.norm()
    grown = replace(SHARED, lengths=[n - 9 if n > 9 else 0 for n in SHARED.lengths])
    for case in (grown, replace(SHARED, prefixes=())):
        other = case.made(capacity=True, ahead=20)
        ready = made.ready
        ready.update(other.plan)
        other.ready, other.layout = ready, made.layout
        exact = other.exact().o
        assert (other.run().o.double() - exact).norm() < 1e-5 * exact.norm()
    return 3


def check_mixed_batches() -> int:
    """The registered kernel on mixed decodes, a shared prefix and prompt chunks; also without sharing."""
    OVERRIDE[:] = [HOW[1]]
    case = Case(
        [200, 200, 200, 90, 0, 200], [1, 1, 1, 80, 0, 1], K=1, group=8, H=16, page=16,
        prefixes=(((0, 1, 2, 5), 192),),
    )  # fmt: skip
    OVERRIDE[:] = [Tiles(32, 4, 2, 1, 4, 16)]
    costs = dict(decode_tiles.table()["costs"])
    decode_tiles.table()["costs"] |= {"start_ns": 0, "merge_ns": 0, "part_ns": 0, "row_ns": 0}
    for share in (True, False):
        made = case.made(prepared=False)
        made.layout = case.made().layout
        made.table = replace(made.table, share=share)
        got = triton_decode.paged(made.q, made.k, made.v, made.table)
        exact = made.exact().o
        assert (got.double() - exact).norm() < 1e-5 * exact.norm()
        ((few, many),) = made.table.plan_cache.values()
        assert many.layout.prefill and (few.shared is not None) == share
    decode_tiles.table()["costs"] |= costs
    fixed = KernelLayout.of(made.q, made.k, 1, chunk=64, shares=True)
    assert fixed.shared is None, "batch-invariant mode must not share prefixes"
    return 2


def check_long_prompts_apart() -> int:
    """Long whole prompts go to SDPA, the rest to our kernels, in any order; not with a window."""
    OVERRIDE[:] = [Tiles(32, 4, 2, 1, 4, 16)]
    dispatch.LONG_PROMPT, dispatch.PAD_TO = 40, 16
    batches = (
        ([200, 90, 70, 40], [1, 1, 70, 40], 2), ([90, 200, 64, 77, 30], [80, 1, 0, 2, 30], 0), ([48], [48], 1),
        ([90, 70, 3, 41], [60, 70, 3, 41], 2), ([30, 90, 31], [1, 60, 1], 0),
    )  # fmt: skip
    for (lengths, new, whole), window in itertools.product(batches, (None, 25, 500)):
        made = Case(lengths, new, K=2, group=4, H=16, page=16, window=window or 0).made(prepared=False)
        got = dispatch.paged(made.q, made.k, made.v, made.table, window=window)
        exact = reference.paged(*(x.double() for x in (made.q, made.k, made.v)), made.table, window=window)
        assert got.shape == exact.shape and (got.double() - exact).norm() < 1e-5 * exact.norm(), (lengths, new, window)
        assert len(made.table.plan_cache.get("parts", ())) == (0 if window == 25 else whole)
    return 3 * len(batches)


def check_bad_pages() -> int:
    """Invalid pages of a prompt and of a shared prefix count as missing keys for every sharer."""
    OVERRIDE[:] = [HOW[0]]
    made = Case([100], [70], K=1, group=2, H=16, page=16, many=True).made()
    made.table.pages_RP[0, 1] = 10**6
    o = made.run().o
    keys, values = (x[made.table.pages_RP[0, [0, 2, 3, 4, 5, 6]].long()].flatten(0, 1)[:84] for x in (made.k, made.v))
    exact = reference.attend(*(x.double() for x in (made.q, keys, values))).o
    # The first query's own position is among those keys; it saw one more before they were removed.
    assert (o.double() - exact)[1:].norm() < 1e-5 * exact.norm()
    apart, made = replace(SHARED, prefixes=()).made(), SHARED.made()
    made.table.pages_RP[:, 1] = -7
    apart.table = made.table
    o = apart.run().o
    assert (made.run().o - o).norm() < 1e-5 * o.norm()
    short = replace(made.table, pages_RP=made.table.pages_RP[:, :8])
    few = replace(made.table, pages_RP=made.table.pages_RP[:3])
    for table, kind, words in (
        (short, CapacityError, "request 0 has 130 keys, but its page table has room for 128"),
        (few, ConfigError, "3 rows of pages for 7 requests"),
    ):
        with pytest.raises(kind, match=words):
            triton_decode.paged(made.q, made.k, made.v, table)
    return 4


if __name__ == "__main__":
    warnings.simplefilter("error")
    checks = check_many_rows, check_shared_prefixes, check_graph_arrays, check_mixed_batches, check_bad_pages
    for check in (*checks, check_tiles_by_the_copy_engine, check_long_prompts_apart):
        print(f"{check.__name__}: {check()} cases", flush=True)

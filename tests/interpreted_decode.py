"""Flash-Decoding run by Triton's interpreter on a CPU: ``TRITON_INTERPRET=1 python -m tests.interpreted_decode``.

Tiles and splits are small, so that there are many, and piece counts are irregular.
"""

import math
import warnings
from dataclasses import replace

import torch

from colonnade.kernels.attention import reference, triton_decode, triton_kv8, triton_merge
from colonnade.kernels.attention.decode_plan import KernelLayout
from colonnade.kernels.attention.decode_tiles import OVERRIDE, Tiles
from tests.decoding import Case, CaseTensors, all_codes_case, attend_alone, extreme_queries, scaled
from tests.rounding import rows_alike

HOW = [Tiles(16, 4, 2, 2, 2, 32), Tiles(32, 4, 2, 4, 4, 16), Tiles(16, 4, 2, 8, 16, 64)]


SPLIT: list[bool] = []
"""For each case, whether any line was split."""


def same(case: Case, tolerance: float = 1e-5) -> None:
    """Compare output and log-sum-exp with float64 by norm; unwritten elements are NaN."""
    made = case.made()
    SPLIT.append(made.ready.capacity.slots > 0)
    state, exact = made.run(), made.exact()
    for what, got, right in zip(("o", "lse"), state, exact, strict=True):
        assert got.shape == right.shape
        seen = right.isfinite()
        assert torch.equal(got.isfinite(), seen), (case, what)
        error = float((got.double() - right)[seen].norm() / right[seen].norm().clamp(min=1))
        assert error < tolerance, (case, what, error)


def check_shapes() -> int:
    """Groups, widths, pages, queries, with each tiling."""
    count = 0
    lengths = ([70, 3, 0, 100], [1, 1, 0, 1])
    for i, (group, width) in enumerate(((1, 64), (5, 80), (7, 20), (12, 128), (71, 16))):
        OVERRIDE[:] = [HOW[i % 3]]
        lengths = ([40, 9], [1, 1]) if group > 16 else lengths
        same(Case(*lengths, K=1 + i % 3, group=group, H=width, page=(16, 64, 4)[i % 3]))
        count += 1
    for i, queries in enumerate(([1, 3, 2, 0], [5, 1, 1, 4], [25, 2, 7, 1])):
        OVERRIDE[:] = [HOW[i % 3]]
        same(Case([66, 3, 40, 4], queries, K=1, group=(1, 3, 5)[i], H=16, page=16, window=(None, 9, 40)[i]))
        count += 1
    OVERRIDE[:] = [HOW[0]]
    for width, page in ((96, 128), (112, 256), (192, 32), (256, 16)):
        same(Case([50, 3], [1, 2], K=1, group=4, H=width, page=page))
        count += 1
    same(Case([70], [64], K=1, group=1, H=16, page=16))
    return count + 1


def check_features() -> int:
    """Window, cap, slopes, sinks, relative biases, alone and combined, split and unsplit; more queries than keys."""
    count = 0
    for i, (window, cap, slopes, sinks) in enumerate(
        [(7, None, False, False), (None, 2.0, False, False), (None, None, True, False), (None, None, False, True),
         (33, 1.5, True, True)]
    ):  # fmt: skip
        for batch in (([90, 5], [2, 5]), ([2, 40, 0], [4, 1, 2])):
            OVERRIDE[:] = [HOW[i % 3]]
            same(Case(*batch, K=2, group=3, H=16, page=16, window=window, cap=cap, slopes=slopes, sinks=sinks))
            count += 1
    for near, many, more in ((5, False, {}), (40, True, {}), (7, False, {"cap": 2.0, "slopes": True, "sinks": True})):
        same(Case([90, 5], [2, 5], K=2, group=3, H=16, page=16, near=near, many=many, **more))
        count += 1
    return count


def check_types() -> int:
    """float16; 8-bit caches with float32 queries, which convert element by element."""
    OVERRIDE[:] = [HOW[0]]
    same(Case([90, 40], [1, 2], K=2, group=4, H=32, page=16, dtype=torch.float16), 6e-4)
    for cache in (torch.float8_e4m3fn, torch.int8):
        same(Case([90, 40], [1, 2], K=2, group=4, H=32, page=16, cache=cache, sinks=True))
    return 3


def kind(made: CaseTensors) -> str | None:
    return triton_kv8.kv8_kind(made.q, made.k, made.v)


def check_eight_bits() -> int:
    """8-bit caches read as float16: all shapes and features, and the cases that are not supported."""
    count = 0
    cases = (
        Case([90, 0, 40], [1, 0, 2], K=2, group=5, H=64, page=16),
        Case([70, 33], [3, 1], K=1, group=7, H=128, page=16, window=20),
        Case([50, 66], [1, 5], K=2, group=3, H=80, page=64, sinks=True),
        Case([66, 3], [2, 1], K=1, group=1, H=64, page=4, window=9, cap=1.5, slopes=True, sinks=True),
    )
    for i, case in enumerate(cases):
        for j, (dtype, near) in enumerate(((torch.float16, 6e-4), (torch.bfloat16, 4e-3))):
            OVERRIDE[:] = [HOW[i % 3]]
            cache, name = list(triton_kv8.KINDS.items())[(i // 2 + j) % 2]
            made = replace(case, dtype=dtype, cache=cache)
            assert kind(made.made()) == name
            same(made, near)
            count += 1
    case = Case([70, 33], [3, 1], K=2, group=2, H=64, page=16, dtype=torch.float16, cache=torch.float8_e4m3fn)
    for narrow in (replace(case, H=32), replace(case, H=65), replace(case, dtype=torch.float32)):
        assert kind(narrow.made()) is None
    same(replace(case, H=65), 6e-4)
    made = case.made()
    before, exact = made.run(), made.exact()
    odd = made.k.new_empty(*made.k.shape[:-1], 67)[..., 1:65]
    made.k = odd.copy_(made.k)
    assert kind(made) is None
    for got, same_way, right in zip(made.run(), before, exact, strict=True):
        assert (got.double() - right).norm() < 6e-4 * right.norm() > (same_way.double() - right).norm()
    return count + 5


def check_every_code() -> int:
    """Every code, subnormal and largest included: values bitwise, keys to float32 precision."""
    OVERRIDE[:] = [HOW[0]]
    for dtype in (torch.float16, torch.bfloat16):
        for cache, name in triton_kv8.KINDS.items():
            made = all_codes_case(cache, dtype)
            assert kind(made) == name
            assert torch.allclose(made.run().lse.double(), made.exact().lse, rtol=1e-6, atol=3e-6), cache
            made.q.zero_()
            assert torch.equal(made.run().o.double(), made.exact().o), cache
    return 4


def check_queries_far_apart() -> int:
    """Queries of one block above and below float16's range and zero; small weights that add up."""
    OVERRIDE[:] = [HOW[0]]
    case = Case([60, 40], [1, 2], K=1, group=4, H=64, page=16, dtype=torch.bfloat16, cache=torch.float8_e4m3fn)
    made = extreme_queries(case)
    made.q.zero_()
    made.scales = (torch.tensor([2.0**-40]), made.scales[1])
    o, exact = made.run().o, made.exact().o
    assert (o.double() - exact).norm() < 4e-3 * exact.norm()
    # One key of score 30 ln 2 and many of 0: a weight of 2^-30 underflows in float16.
    made = replace(case, lengths=[2000], queries=[1], cache=torch.int8, page=256).made()
    pages = made.table.pages_RP[0].long()
    made.scales = (torch.ones(1), torch.ones(1))
    made.q.fill_(0.0)[..., 0] = 8 * 30 / 100 * math.log(2)
    made.k.zero_()[pages[0], 0, 0, 0] = 100
    made.v.zero_()[pages, :, 0, 0] = 127
    made.v[pages[0], 0, 0, 0] = 0
    o, exact = made.run().o, made.exact().o
    assert (o.double() - exact).norm() < 4e-3 * exact.norm() > 0
    return 3


@rows_alike()
def check_fixed_cuts() -> int:
    """A request's bits do not depend on the batch or on other requests' query counts."""
    OVERRIDE[:] = [HOW[0]]
    alone = Case([100], [1], K=2, group=3, H=16, page=16, chunk=32)
    o, lse = alone.made().run()
    same(alone)
    others = [([5, 100, 200], [1, 1, 1]), ([70, 40, 100], [9, 3, 1])]
    for lengths, queries in others:
        at = lengths.index(100)
        among = Case(lengths, queries, K=2, group=3, H=16, page=16, chunk=32)
        got = among.made().run()
        row = sum(queries[:at])
        assert torch.equal(got.o[row : row + 1], o)
        assert torch.equal(got.lse[row : row + 1], lse)
    return len(others)


def check_runs_of_chunks() -> int:
    """Lengths around chunk boundaries; groups, queries, features, dtypes; larger blocks with single chunks."""
    around = [0, 1, 511, 512, 513, 1025]
    cases = [
        (HOW[2]._replace(tile=64, workers=1), Case(around, [1] * 6, K=1, group=2, H=16, page=16, chunk=512), 1e-5),
        (HOW[0], Case([600, 33, 0, 64], [1, 5, 2, 0], K=2, group=3, H=40, page=4, chunk=32), 1e-5),
        (HOW[0], Case([150, 96], [30, 1], K=1, group=1, H=16, page=64, chunk=16, sinks=True), 1e-5),
        (HOW[1], Case([400, 90], [1, 4], K=1, group=5, H=16, page=16, chunk=64, slopes=True, cap=2.0), 1e-5),
        (HOW[0], Case([300, 90], [1, 4], K=1, group=5, H=16, page=16, chunk=32, window=100, sinks=True), 1e-5),
        (HOW[0], Case([200, 90], [1, 2], K=1, group=17, H=16, page=16, chunk=32), 1e-5),
    ]
    eight = {"dtype": torch.float16, "sinks": True, "chunk": 32}
    cases += [
        (HOW[0], Case([200, 33], [1, 2], K=2, group=2, H=64, page=16, cache=cache, **eight), 6e-4)
        for cache in triton_kv8.KINDS
    ]
    runs = 0
    for how, case, near in cases:
        OVERRIDE[:] = [how._replace(workers=1)]
        same(case, near)
        # A plan made ahead has chunks that are still empty, also at the end of a run.
        made = case.made(ahead=70, capacity=True)
        assert made.layout.runs == (case.group <= 16)
        runs += len(made.plan.items) < len(made.plan.pieces)
        exact = made.exact()
        for got, right in zip(made.run(), exact, strict=True):
            seen = right.isfinite()
            assert torch.equal(got.isfinite(), seen), case
            assert (got.double() - right)[seen].norm() < near * right[seen].norm().clamp(min=1), case
    assert runs > len(cases) / 2
    return len(cases)


@rows_alike()
def check_bits_on_both_sides_of_few_chunks() -> int:
    """Summation order depends only on a row's chunk count: alone, in runs, planned ahead, in a batch."""
    how, few = {"K": 1, "group": 2, "H": 40, "page": 16, "chunk": 16}, triton_merge.FEW_CHUNKS
    OVERRIDE[:] = [HOW[0]]
    count = 0
    for length in (17, 16 * few + 1):
        # With 8 queries per block, some see one chunk more than others.
        made = Case([length], [12], **how).made()
        whole = made.run()
        for workers, ahead in ((1, 0), (8, 20)):
            layout = replace(made.layout, workers=workers)
            for t in (0, 2, 3, 11) if ahead else (2, 11):
                assert torch.equal(attend_alone(replace(made, layout=layout), t, ahead).o[0], whole.o[t])
                count += 1
        alone = Case([length], [1], **how).made().run()
        for at, others, queries in ((0, [300, 5], [1, 1]), (2, [40, 90], [9, 1]), (1, [16, 257], [1, 1])):
            lengths, new = [*others[:at], length, *others[at:]], [*queries[:at], 1, *queries[at:]]
            for ahead in (0, 20):
                among = Case(lengths, new, **how).made(ahead=ahead, capacity=ahead > 0).run()
                assert torch.equal(among.o[sum(new[:at])], alone.o[0])
                count += 1
    return count


def check_graph_arrays() -> int:
    """One capacity for several steps: plans for later lengths, fewer requests, and none."""
    OVERRIDE[:] = [HOW[1]]
    for lengths, queries, ahead in (
        ([40, 90, 0], [1, 1, 1], 0),
        ([38, 88, 3], [1, 1, 1], 20),
        ([9, 0, 0], [1, 0, 0], 0),
    ):
        case = Case(lengths, queries, K=2, group=3, H=16, page=16)
        made = case.made(ahead=ahead, capacity=True)
        state, exact = made.run(), made.exact()
        assert (state.o.double() - exact.o).norm() < 1e-5 * exact.o.norm().clamp(min=1)
        assert torch.equal(state.lse.isfinite(), exact.lse.isfinite())
    # A plan for longer requests: empty pieces, and lines in which only the first piece has keys.
    for workers in (1, 2):
        OVERRIDE[:] = [HOW[1]._replace(workers=workers)]
        case = Case([300, 90, 200], [1, 1, 1], K=2, group=3, H=16, page=16)
        short = replace(case, lengths=[5, 17, 1])
        made, ready = short.made(capacity=True), case.made(capacity=True).ready
        made.ready = ready
        state, exact = made.run(), made.exact()
        assert (state.o.double() - exact.o).norm() < 1e-5 * exact.o.norm()
        assert (state.lse.double() - exact.lse).abs().max() < 1e-5
    return 5


def check_bad_pages() -> int:
    """Keys of pages outside the cache or the table are ignored."""
    OVERRIDE[:] = [HOW[0]]
    made = Case([100, 60], [1, 1], K=1, group=2, H=16, page=16).made()
    table = made.table
    for wrong in (-1, 10**6, 2**31 - 1, -(2**31)):
        table.pages_RP[0, 2] = wrong
        o, _ = made.run()
        keys, values = (
            x[table.pages_RP[0, [0, 1, 3, 4, 5, 6]].long()].flatten(0, 1)[: 100 - 16] for x in (made.k, made.v)
        )
        exact = reference.attend(made.q[:1].double(), keys.double(), values.double(), causal=False).o
        assert (o[:1].double() - exact).norm() < 1e-5 * exact.norm()
    return 4


def check_plans() -> int:
    """Kernels and reference executor agree on the same plans; so does the registered kernel with its own plan."""
    count = 0
    for how, group in zip(HOW, (2, 17, 3), strict=True):
        OVERRIDE[:] = [how]
        made = Case([150, 0, 31, 90], [1, 1, 3, 2], K=2, group=group, H=16, page=16, window=70).made()
        shape = made.layout.shape
        ours = made.run()
        plain = reference.run_plan(made.plan, shape, made.q.double(), made.k.double(), made.v.double(), made.table)
        assert made.plan.slots
        assert (ours.o.double() - plain.o).norm() < 1e-5 * plain.o.norm()
        got = triton_decode.paged(made.q, made.k, made.v, made.table, window=70)
        assert (got - ours.o).norm() < 1e-5 * ours.o.norm()
        assert len(made.table.plan_cache) == 1
        count += 1
    wide = Case([20], [1], K=1, group=2, H=300, page=16).made(prepared=False)
    exact = reference.paged(wide.q, wide.k, wide.v, wide.table)
    assert torch.allclose(triton_decode.paged(wide.q, wide.k, wide.v, wide.table), exact, atol=1e-5)
    return count + 1


def check_strides() -> int:
    """Queries that are a slice of the joint projection; caches with strided heads."""
    OVERRIDE[:] = [HOW[0]]
    made = Case([70, 20], [1, 2], K=2, group=2, H=16, page=16).made()
    exact = made.exact().o
    made.q = torch.cat((made.q, made.q), 1)[:, : made.q.shape[1]]
    made.k, made.v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (made.k, made.v))
    assert isinstance(made.layout, KernelLayout)
    assert (made.run().o.double() - exact).norm() < 1e-5 * exact.norm()
    assert scaled(made.k, None) is made.k
    return 1


if __name__ == "__main__":
    warnings.simplefilter("error")
    checks = (
        check_shapes, check_features, check_types, check_fixed_cuts, check_runs_of_chunks,
        check_bits_on_both_sides_of_few_chunks, check_graph_arrays, check_bad_pages, check_plans,
        check_strides, check_eight_bits, check_every_code, check_queries_far_apart,
    )  # fmt: skip
    for check in checks:
        print(f"{check.__name__}: {check()} cases", flush=True)
    assert sum(SPLIT) > 0.7 * len(SPLIT), SPLIT

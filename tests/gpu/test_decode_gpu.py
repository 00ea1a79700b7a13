"""Flash-Decoding on a GPU: close to float64 for every width, page, group and dtype; deterministic.

pytest -q tests/gpu/test_decode_gpu.py        # about four minutes, most of it compiling
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from colonnade.kernels.attention import cuda_decode, sdpa
from colonnade.kernels.attention.decode_plan import KernelLayout
from colonnade.kernels.attention.triton_decode import attend
from colonnade.kernels.registry import choose
from tests.decoding import KERNELS, Case, CaseTensors, all_codes_case, attend_alone, extreme_queries
from tests.gpu.launches import launch_beside_full_gpu, launch_often, same

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}
"""Rounding the output alone costs 1.7e-3 in bfloat16. The log-sum-exp is float32, computed from rounded inputs."""
LENGTHS = [1, 4000, 300, 17, 1025, 0]


@pytest.fixture(params=["triton", "cuda"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run every test with both kernels; cases that the CUDA C++ kernel does not support are skipped."""
    KERNELS[:] = [request.param]
    yield request.param
    KERNELS[:] = ["auto"]


@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("queries", [1, 5])
def test_every_width(width: int, dtype: torch.dtype, queries: int) -> None:
    same(Case(LENGTHS, [queries] * 6, K=2, group=4, H=width, page=64, dtype=dtype).made("cuda"), TOLERANCE[dtype])


@pytest.mark.parametrize("page", [4, 16, 32, 48, 64, 128, 256])
def test_every_page(page: int) -> None:
    same(Case(LENGTHS, [1] * 6, K=2, group=8, H=128, page=page, dtype=torch.bfloat16).made("cuda"), 4e-3)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 17, 24, 32, 48, 64, 71])
def test_every_group(group: int) -> None:
    same(Case(LENGTHS, [1] * 6, K=3, group=group, H=128, page=16, dtype=torch.bfloat16).made("cuda"), 4e-3)


@pytest.mark.parametrize(("K", "group", "width"), [(8, 1, 128), (3, 5, 64), (1, 16, 256)])
def test_many_short_requests(K: int, group: int, width: int) -> None:
    """Each worker has dozens of pieces, some without keys; non-finite values stay within their request."""
    lengths = [(37 * i) % 150 for i in range(300)]
    made = Case(lengths, [1] * 300, K=K, group=group, H=width, page=16, dtype=torch.bfloat16, sinks=True).made("cuda")
    same(made, 4e-3)
    first = made.run()
    assert all(torch.equal(a, b) for a, b in zip(made.run(), first, strict=True))
    made.q[151] = torch.nan
    state = made.run()
    others = torch.arange(300, device="cuda") != 151
    assert state.o[151].isnan().all() and torch.equal(state.o[others], first.o[others])


@pytest.mark.parametrize("queries", [2, 3, 8, 16, 64])
def test_several_queries(queries: int) -> None:
    case = Case([4000, 64, 300, 90], [queries, 1, 0, queries], K=2, group=5, H=64, page=32, dtype=torch.float16)
    same(case.made("cuda"), 6e-4)


@pytest.mark.parametrize("window", [None, 1, 100, 1500])
@pytest.mark.parametrize(
    "more", [{}, {"cap": 5.0}, {"slopes": True}, {"sinks": True}, {"cap": 3.0, "slopes": True, "sinks": True}], ids=str
)
@pytest.mark.parametrize("queries", [1, 4])
def test_features(window: int | None, more: dict, queries: int) -> None:
    case = Case(LENGTHS, [queries] * 6, K=2, group=4, H=64, page=16, dtype=torch.float16, window=window, **more)
    same(case.made("cuda"), 6e-4)


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_relative_biases(dtype: torch.dtype, many: bool) -> None:
    """They run in Triton only."""
    queries = [70, 1, 0, 64, 3, 100] if many else [1] * 6
    case = Case(LENGTHS, queries, K=4, group=1, H=64, page=16, dtype=dtype, near=128, many=many)
    same(case.made("cuda"), TOLERANCE.get(dtype, 1e-5))


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("page", [16, 128])
def test_8_bit_caches(cache: torch.dtype, dtype: torch.dtype, page: int) -> None:
    """Compared with float64 on the stored 8-bit values: quantisation error is not the kernel's."""
    case = Case(LENGTHS, [1] * 6, K=2, group=8, H=128, page=page, dtype=dtype, cache=cache)
    same(case.made("cuda"), TOLERANCE[dtype])


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize(("group", "K", "width", "queries"), [(1, 3, 64, 1), (5, 2, 80, 3), (32, 1, 256, 2)])
def test_8_bit_cache_shapes(cache: torch.dtype, group: int, K: int, width: int, queries: int) -> None:
    case = Case([4000, 64, 300, 90], [queries, 1, 0, queries], K=K, group=group, H=width, page=16, window=1500)
    case = replace(case, dtype=torch.bfloat16, cache=cache, sinks=True)
    same(case.made("cuda"), 4e-3)
    same(replace(case, page=64, cap=5.0, slopes=True).made("cuda"), 4e-3)


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_8_bit_code(cache: torch.dtype, dtype: torch.dtype) -> None:
    made = all_codes_case(cache, dtype, "cuda")
    assert torch.allclose(made.run().lse.double(), made.exact().lse, rtol=1e-6, atol=1e-5)
    made.q.zero_()
    assert torch.equal(made.run().o.double(), made.exact().o)


def test_query_magnitudes_beyond_float16_with_8_bit_cache() -> None:
    """Heads of one group above and below float16's range; a non-finite head does not affect the others."""
    case = Case([4000, 300], [1, 2], K=1, group=4, H=128, page=16, dtype=torch.bfloat16, cache=torch.float8_e4m3fn)
    made = extreme_queries(case, "cuda")
    exact = made.exact()
    for wrong in (torch.inf, torch.nan):
        made.q[:, 3, 0] = wrong
        got = made.run().o
        assert got[:, 3].isnan().all()
        assert (got[:, :3].double() - exact.o[:, :3]).norm() < 4e-3 * exact.o[:, :3].norm()


def test_runs_are_deterministic() -> None:
    made = Case([20_000, 3, 700], [1, 1, 2], K=2, group=8, H=128, page=16, dtype=torch.bfloat16).made("cuda")
    assert made.plan.slots > 100
    first = made.run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(made.run(), first, strict=True))


def test_fixed_splits_are_batch_invariant() -> None:
    how = {"K": 2, "group": 4, "H": 128, "page": 16, "dtype": torch.bfloat16, "chunk": 512}
    alone = Case([3000], [1], **how).made("cuda").run()
    for others in (1, 7, 63, 255):
        for at in {0, others // 2, others}:
            lengths = [(37 * i) % 2000 for i in range(others)]
            lengths.insert(at, 3000)
            queries = [3 if i % 5 == 4 else 1 for i in range(others + 1)]
            queries[at] = 1
            among = Case(lengths, queries, **how).made("cuda").run()
            row = sum(queries[:at])
            assert torch.equal(among.o[row], alone.o[0])
            assert torch.equal(among.lse[row], alone.lse[0])


@pytest.mark.parametrize("cache", [None, torch.float8_e4m3fn], ids=str)
def test_fixed_splits_do_not_depend_on_teams(cache: torch.dtype | None, kernels: str) -> None:
    """Blocks of one, two or four teams, pieces of one chunk or of many, blocks of 8 or 16 rows."""
    if kernels == "triton":
        pytest.skip("the Triton kernel has no teams")
    how = {"K": 2, "group": 4, "H": 128, "page": 16, "dtype": torch.bfloat16, "chunk": 512, "cache": cache}
    alone = Case([3000], [1], **how).made("cuda").run()
    for others in (7, 255):
        for teams in (1, 2, 4):
            cuda_decode.TEAMS_OVERRIDE[:] = [teams]
            try:
                lengths = [*((37 * i) % 2000 for i in range(others)), 70_000, 3000]
                among = Case(lengths, [1] * len(lengths), **how).made("cuda").run()
            finally:
                cuda_decode.TEAMS_OVERRIDE.clear()
            assert torch.equal(among.o[-1], alone.o[0]) and torch.equal(among.lse[-1], alone.lse[0]), (others, teams)


@pytest.mark.parametrize("window", [None, 3000])
def test_fixed_splits_give_a_query_the_same_bits_alone_and_in_a_chunk(window: int | None) -> None:
    """With a window, queries of one block have their first key in different chunks."""
    case = Case([9000], [40], K=2, group=4, H=128, page=16, dtype=torch.bfloat16, chunk=128, window=window)
    made = case.made("cuda")
    whole = made.run().o
    for t in range(40):
        for ahead in (0, 16):
            assert torch.equal(attend_alone(made, t, ahead).o[0], whole[t]), (t, ahead)


@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 8, 17])
@pytest.mark.parametrize("ahead", [0, 600])
def test_runs_of_chunks(width: int, group: int, ahead: int) -> None:
    """Lengths around chunk boundaries; runs of a plan made ahead end in chunks that are still empty."""
    lengths = [0, 1, 511, 512, 513, 1023, 1024, 1025, 70_000, 8200]
    case = Case(lengths, [1] * 8 + [3, 20], K=2, group=group, H=width, page=64, dtype=torch.bfloat16, chunk=512)
    same(case.made("cuda", ahead=ahead), 4e-3)


def test_cuda_graph_reads_updated_plan() -> None:
    """Captured once; lengths change, and the plan is overwritten in place."""
    made = Case([500, 5000, 0], [1, 1, 1], K=2, group=4, H=128, page=64, dtype=torch.bfloat16).made(
        "cuda", capacity=True
    )
    flat, lengths = made.ready.flat, made.table.lengths_R
    attend(made.q, made.k, made.v, made.table, made.ready)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, lse = attend(made.q, made.k, made.v, made.table, made.ready)
    for step in ([500, 5000, 0], [64, 4999, 0], [1, 1, 0], [0, 4000, 0]):
        plan = made.layout.plan(step, [1, 1, 1])
        flat.copy_(torch.tensor(plan.flat(made.ready.capacity), dtype=torch.int32))
        lengths.copy_(torch.tensor(step, dtype=torch.int32))
        made.table.__dict__.pop("host_lengths", None)
        o.fill_(torch.nan)
        graph.replay()
        exact = made.exact()
        assert (o.double() - exact.o).norm() < 4e-3 * exact.o.norm()
        assert torch.equal(lse.isfinite(), exact.lse.isfinite())


@pytest.mark.parametrize("chunk", [None, 512])
@pytest.mark.parametrize("cache", [None, torch.int8], ids=str)
@pytest.mark.parametrize("queries", [1, 5])
def test_bad_pages_are_not_read(queries: int, cache: torch.dtype | None, chunk: int | None) -> None:
    how = {"K": 1, "group": 2, "H": 64, "page": 16, "dtype": torch.bfloat16}
    made = Case([3000, 60], [queries, 1], cache=cache, chunk=chunk, **how).made("cuda")
    good = made.run().o[-1]
    for wrong in (-1, 10**8, 2**31 - 1, -(2**31)):
        made.table.pages_RP[0, ::2] = wrong
        o = made.run().o
        assert o.isfinite().all()
        assert torch.equal(o[-1], good)
    torch.cuda.synchronize()


def test_cache_of_more_than_two_billion_elements() -> None:
    """Uses pages at the end of the cache, which need 64-bit offsets."""
    P, page, K, H = 2**31 // (256 * 8 * 128) + 64, 256, 8, 128
    k = torch.zeros(P, page, K, H, dtype=torch.float8_e4m3fn, device="cuda")
    small = Case([700, 300], [1, 1], K=K, group=2, H=H, page=page, dtype=torch.bfloat16, cache=torch.float8_e4m3fn)
    made = small.made("cuda")
    exact = made.run().o
    v, few = torch.zeros_like(k), len(made.k)
    k[-few:], v[-few:] = made.k, made.v
    made.table.pages_RP.add_(P - few)
    made.k, made.v = k, v
    assert torch.equal(made.run().o, exact)


@pytest.mark.parametrize("queries", [[1, 1, 1], [1, 4, 1], [300, 1, 1]], ids=str)
def test_registered_kernel_equals_sdpa(queries: list[int], kernels: str) -> None:
    """The kernel is chosen by name; a long prompt goes to the kernel for many rows."""
    made = Case([5000, 40, 900], queries, K=2, group=4, H=128, page=16, dtype=torch.bfloat16).made("cuda")
    made.k, made.v = made.k.nan_to_num(), made.v.nan_to_num()
    run = choose("paged_attention", "cuda", torch.bfloat16, kernels)
    exact = made.exact().o
    for window in (None, 100):
        made.layout = KernelLayout.of(made.q, made.k, max(queries), window=window)
        got, theirs = (f(made.q, made.k, made.v, made.table, window=window) for f in (run, sdpa.paged))
        exact = made.exact().o
        assert (got.double() - exact).norm() < 4e-3 * exact.norm()
        assert (theirs.double() - exact).norm() < 4e-3 * exact.norm()


def test_random_shapes() -> None:
    """A hundred random shapes like those of the benchmarks, but small; ragged lengths."""
    draw = torch.Generator().manual_seed(0)

    def pick(values: list) -> int:
        return values[int(torch.randint(len(values), (), generator=draw))]

    for _ in range(100):
        batch = pick([1, 2, 3, 9, 40])
        lengths = [int(torch.randint(1, pick([5, 300, 9000]) + 1, (), generator=draw)) for _ in range(batch)]
        case = Case(
            lengths, [1] * batch, K=pick([1, 2, 4, 8]), group=pick([1, 2, 4, 5, 7, 8, 16]), H=pick([64, 128, 256]),
            page=pick([16, 32, 64, 128, 256]), dtype=torch.bfloat16,
        )  # fmt: skip
        same(case.made("cuda"), 4e-3)


def test_every_tuning_candidate(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    if kernels == "cuda":
        pytest.skip("the CUDA kernel derives warps and stages from shared memory")
    from colonnade.kernels.attention import decode_tiles
    from decoding import tune

    for how, width in itertools.product(tune.CANDIDATES, (64, 128)):
        monkeypatch.setattr(decode_tiles, "OVERRIDE", [how])
        same(Case(LENGTHS, [1] * 6, K=2, group=8, H=width, page=16, dtype=torch.bfloat16).made("cuda"), 4e-3)


def test_shapes_the_cuda_kernel_supports(kernels: str) -> None:
    """The CUDA kernel supports these shapes, so the tests above are not skipped needlessly."""
    here = torch.cuda.get_device_capability() == cuda_decode.ARCH and cuda_decode.nvrtc.unavailable_reason() is None
    if kernels == "triton" or not here:
        pytest.skip("for the CUDA kernel only, or it cannot be compiled here")
    for width, group, cache in itertools.product(
        (64, 80, 96, 112, 128, 192, 256), (1, 5, 8), (torch.float16, torch.int8, torch.float8_e4m3fn)
    ):
        q = torch.empty(1, group, width, dtype=torch.float16, device="cuda")
        k = torch.empty(1, 16, 1, width, dtype=cache, device="cuda")
        assert KernelLayout.of(q, k, 1).cuda, (width, group, cache)
    q = torch.empty(1, 8, 128, dtype=torch.float16, device="cuda")
    k = torch.empty(1, 16, 1, 128, dtype=torch.float16, device="cuda")
    assert KernelLayout.of(q, k, 1, chunk=512, kernels="cuda").cuda
    for group, queries in ((16, 1), (8, 2)):
        k = torch.empty(1, 16, 4, 128, dtype=torch.float16, device="cuda")
        for requests in (3, 4):
            q = torch.empty(requests * queries, 4 * group, 128, dtype=torch.float16, device="cuda")
            assert KernelLayout.of(q, k, queries).cuda == (requests == 4)


@pytest.mark.parametrize("width", [64, 128, 192, 256])
@pytest.mark.parametrize("lines", [100, 140, 300, 600, 1100])
def test_every_team_count(width: int, lines: int) -> None:
    """With more lines than multiprocessors, blocks are split into teams, down to two or three warps."""
    lengths = [(31 * i) % 200 for i in range(lines - 1)] + [3000]
    same(Case(lengths, [1] * lines, K=1, group=5, H=width, page=16, dtype=torch.float16).made("cuda"), 6e-4)


@pytest.mark.parametrize(
    ("K", "width", "requests", "keys"), [(1, 64, 157, 1000), (2, 128, 71, 700), (1, 256, 140, 400)]
)
def test_whole_lines_and_pieces_of_others(K: int, width: int, requests: int, keys: int, kernels: str) -> None:
    """A few more lines than multiprocessors: the others are cut, and merged by one team while another reads."""
    lengths = [keys - i % 3 for i in range(requests)] + [3, 0]
    case = Case(lengths, [1] * len(lengths), K=K, group=5, H=width, page=16, dtype=torch.float16)
    made = case.made("cuda")
    made.plan = plan = made.layout.plan(lengths, [1] * len(lengths))
    made.ready = made.layout.prepare(plan, "cuda", plan.capacity)
    same(made, 6e-4)
    if kernels == "cuda" and cuda_decode.multiprocessors(made.q.device) == 132:
        assert sum(item.slot < 0 for item in plan.items) == 132 + K and plan.slots > 0  # and requests of 3 keys
    first = made.run()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(made.run(), first, strict=True))


def test_a_thousand_launches_of_random_cells_leak_no_memory() -> None:
    """Random heads, pages, caches and lengths, split and unsplit."""
    draw = torch.Generator().manual_seed(1)

    def pick(*values: Any) -> Any:
        return values[int(torch.randint(len(values), (), generator=draw))]

    def cell(i: int) -> CaseTensors:
        most, cache = (10_000, 1000, 30)[i % 3], pick(None, None, torch.float8_e4m3fn)
        batch = min(pick(1, 2, 3, 8, 40), 20_000 // most)
        lengths = torch.randint(0, most, (batch,), generator=draw).tolist()
        case = Case(
            lengths, [1] * batch, K=pick(1, 2, 4), group=pick(1, 5, 8), H=pick(64, 128), page=pick(16, 64),
            dtype=torch.bfloat16, cache=cache, chunk=pick(None, None, 512), sinks=pick(False, True),
        )  # fmt: skip
        return case.made("cuda")

    launch_often(cell, 200, partial(same, tolerance=4e-3))


def test_concurrent_streams_that_fill_the_gpu() -> None:
    cases = [
        Case([40_000, n], [1, 1], K=2, group=8, H=128, page=16, dtype=torch.bfloat16).made("cuda") for n in (9, 77)
    ]
    alone = [made.run().o for made in cases]

    def attend_pages(made: CaseTensors) -> torch.Tensor:
        return attend(made.q, made.k, made.v, made.table, made.ready).o

    launch_beside_full_gpu([partial(attend_pages, made) for made in cases], alone)


def test_capture_without_warm_up() -> None:
    """The graph itself resets its slots; they stay usable outside it."""
    made = Case([20_000, 0, 300], [1, 1, 1], K=2, group=8, H=64, page=16, dtype=torch.bfloat16).made("cuda")
    exact = made.run().o
    made.ready = replace(made.ready)  # drops buffers cached by the run above
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attend(made.q, made.k, made.v, made.table, made.ready).o
    assert torch.equal(made.run().o, exact)
    for _ in range(3):
        o.fill_(torch.nan)
        graph.replay()
        assert torch.equal(o, exact)

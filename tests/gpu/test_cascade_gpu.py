"""Chunked prefill, shared prefixes and latent attention on a GPU: close to float64, deterministic.

pytest -q tests/gpu/test_cascade_gpu.py        # about six minutes, most of it compiling
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from colonnade.config import CacheFormat, ServeConfig
from colonnade.kernels.attention import (
    cache_write,
    dispatch,
    reference,
    sdpa,
    triton_cache_write,
    triton_mla_decode,
)
from colonnade.kernels.attention.cascade import Cascade
from colonnade.kernels.attention.triton_decode import attend, paged
from colonnade.model import Transformer
from colonnade.serve import Engine, SamplingParams
from tests.decoding import Case
from tests.gpu.launches import launch_beside_full_gpu, launch_often, same
from tests.latent_decoding import LatentCase, LatentTensors
from tests.serve import tiny
from tests.serve.ranks import LATENT

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}
CHUNKS = {"lengths": [1500, 700, 70, 40, 0, 3], "queries": [600, 700, 65, 90, 0, 2]}
"""Chunks with and without earlier tokens, fewer keys than queries, and an empty request."""
EVERYTHING = {"cap": 3.0, "slopes": True, "sinks": True}


# -- chunked prefill ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_chunks_of_every_width(width: int, dtype: torch.dtype) -> None:
    same(Case(**CHUNKS, K=2, group=4, H=width, page=64, dtype=dtype, many=True).made("cuda"), TOLERANCE[dtype])


def test_chunks_in_float32() -> None:
    same(Case([300, 90], [150, 90], K=2, group=2, H=64, page=16, many=True).made("cuda"), 1e-5)


@pytest.mark.parametrize("page", [4, 16, 48, 128, 256])
@pytest.mark.parametrize("group", [1, 5, 8, 71])
def test_chunks_of_every_page_and_group(page: int, group: int) -> None:
    same(Case(**CHUNKS, K=2, group=group, H=128, page=page, dtype=torch.bfloat16, many=True).made("cuda"), 4e-3)


@pytest.mark.parametrize("window", [None, 1, 100, 900])
@pytest.mark.parametrize("more", [{}, {"cap": 3.0}, {"slopes": True}, {"sinks": True}, EVERYTHING], ids=str)
def test_chunks_with_features(window: int | None, more: dict) -> None:
    case = Case(**CHUNKS, K=2, group=4, H=64, page=16, dtype=torch.float16, many=True, window=window, **more)
    same(case.made("cuda"), 6e-4)


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_chunks_with_8_bit_cache(cache: torch.dtype) -> None:
    case = Case(**CHUNKS, K=2, group=8, H=128, page=16, dtype=torch.bfloat16, many=True, cache=cache)
    same(case.made("cuda"), 4e-3)


@pytest.mark.parametrize("queries", [512, 2048, 8192])
def test_long_chunks(queries: int) -> None:
    case = Case(
        [queries + 1000, queries], [queries, queries], K=1, group=2, H=128, page=256, dtype=torch.bfloat16, many=True
    )
    made = case.made("cuda")
    # The reference's score matrix would not fit in memory; compare with SDPA, which rounds no better.
    theirs = sdpa.paged(made.q.float(), *(x.nan_to_num().float() for x in (made.k, made.v)), made.table)
    assert (made.run().o.float() - theirs).norm() < 4e-3 * theirs.norm()


@pytest.mark.parametrize("window", [None, 200])
def test_mixed_step_of_chunks_and_decodes(window: int | None) -> None:
    case = Case(
        [5000, 5000, 900, 5000, 0, 64], [1, 3, 600, 1, 0, 64], K=2, group=4, H=128, page=16, dtype=torch.bfloat16,
        window=window, prefixes=(((0, 1, 3), 4800),),
    )  # fmt: skip
    made = case.made("cuda")
    for share in (True, False):
        table = replace(made.table, share=share)
        got = paged(made.q, made.k, made.v, table, window=window)
        exact = made.exact().o
        assert (got.double() - exact).norm() < 4e-3 * exact.norm()


# -- shared prefixes ---------------------------------------------------------------------------------------------------

SHARED = Case(
    [9000, 40, 4100, 8300, 4500, 8197, 0, 2000], [1, 2, 3, 1, 1, 2, 0, 1], K=2, group=4, H=128, page=16,
    dtype=torch.bfloat16, prefixes=(((0, 3, 5), 8192), ((2, 4), 4096)),
)  # fmt: skip


@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [1, 5, 8])
def test_shared_prefixes(width: int, dtype: torch.dtype, group: int) -> None:
    made = replace(SHARED, H=width, dtype=dtype, group=group).made("cuda")
    assert isinstance(made.plan, Cascade) and len(made.plan.groups) == 2
    same(made, TOLERANCE[dtype])


@pytest.mark.parametrize("page", [16, 64, 256])
@pytest.mark.parametrize("more", [{"window": 5000}, {"window": 900, **EVERYTHING}, EVERYTHING], ids=str)
def test_shared_prefixes_with_features(page: int, more: dict) -> None:
    same(replace(SHARED, page=page, dtype=torch.float16, H=64, **more).made("cuda"), 6e-4)


def test_many_requests_with_one_prefix() -> None:
    B = 200
    case = Case(
        [4096 + 1 + i for i in range(B)], [1] * B, K=1, group=8, H=128, page=16, dtype=torch.bfloat16,
        prefixes=((tuple(range(B)), 4096),),
    )  # fmt: skip
    made = case.made("cuda")
    assert isinstance(made.plan, Cascade)
    same(made, 4e-3)
    first = made.run()
    for _ in range(10):
        assert all(torch.equal(a, b) for a, b in zip(made.run(), first, strict=True))


def test_bad_pages_of_a_shared_prefix_are_not_read() -> None:
    made, apart = SHARED.made("cuda"), replace(SHARED, prefixes=()).made("cuda")
    for wrong in (-1, 10**8, 2**31 - 1, -(2**31)):
        made.table.pages_RP[:, :200:3] = wrong
        apart.table = made.table
        got, right = made.run().o, apart.run().o
        assert got.isfinite().all()
        assert (got.float() - right.float()).norm() < 8e-3 * right.float().norm()
    torch.cuda.synchronize()


def test_cuda_graph_reads_updated_groups() -> None:
    made = SHARED.made("cuda", capacity=True)
    attend(made.q, made.k, made.v, made.table, made.ready)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, _ = attend(made.q, made.k, made.v, made.table, made.ready)
    pages, lengths, k, v = made.table.pages_RP, made.table.lengths_R, made.k, made.v
    for prefixes in (((0, 3, 5), 8192), ((2, 4), 4096)), (((0, 4), 2048),), ():
        other = replace(SHARED, prefixes=prefixes).made("cuda", capacity=True)
        for buffer, new in (
            (pages, other.table.pages_RP),
            (lengths, other.table.lengths_R),
            (k, other.k),
            (v, other.v),
        ):
            buffer.copy_(new)
        made.ready.update(other.plan)
        o.fill_(torch.nan)
        graph.replay()
        exact = other.exact().o
        assert (o.double() - exact).norm() < 4e-3 * exact.norm()


# -- latents -----------------------------------------------------------------------------------------------------------

V2 = {"rank": 512, "rope": 64}
"""Sizes of DeepSeek-V2 and V3."""


@pytest.mark.parametrize("heads", [1, 5, 16, 128])
@pytest.mark.parametrize("page", [16, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_latents(heads: int, page: int, dtype: torch.dtype) -> None:
    case = LatentCase([3000, 1, 0, 65, 8000], [1, 1, 0, 3, 1], N=heads, page=page, dtype=dtype, **V2)
    same(case.made("cuda"), TOLERANCE[dtype])


@pytest.mark.parametrize("heads", [3, 8, 16])
@pytest.mark.parametrize("window", [None, 100])
def test_latents_in_cuda(heads: int, window: int | None) -> None:
    """The CUDA C++ kernel equals the Triton one, repeats its bits and reads no bad page."""
    lengths = [3000, 1, 0, 65, 8000, *(37 * i % 300 for i in range(200))]
    case = LatentCase(lengths, [1] * 205, N=heads, page=16, window=window, dtype=torch.bfloat16, **V2)
    case = replace(case, queries=[min(1, length) for length in lengths])
    made = case.made("cuda")
    if not made.layout.cuda:
        pytest.skip("the CUDA C++ kernel is for Hopper GPUs with NVRTC")
    same(made, 4e-3)
    assert not replace(case, kernels="triton").made("cuda").layout.cuda
    first = made.run()
    assert all(torch.equal(a, b) for a, b in zip(made.run(), first, strict=True))
    for wrong in (-1, 10**8, 2**31 - 1, -(2**31)):
        made.table.pages_RP[0, ::2] = wrong
        state = made.run()
        assert not state.o.isnan().any() and torch.equal(state.o[1:], first.o[1:])


def test_many_launches_of_latents_leak_no_memory() -> None:
    """Random lengths and heads, split and unsplit."""

    def cell(i: int) -> LatentTensors:
        lengths = [(7919 * i + 613 * r) % (9000, 700, 60)[i % 3] for r in range((3, 9, 40)[i % 3])]
        queries = [min(1, length) for length in lengths]
        case = LatentCase(lengths, queries, N=(16, 5, 8)[i // 3 % 3], page=16, dtype=torch.bfloat16, **V2)
        return case.made("cuda")

    launch_often(cell, 100, partial(same, tolerance=4e-3))


def test_latents_beside_a_stream_that_fills_the_gpu() -> None:
    how = {"N": 16, "page": 16, "dtype": torch.bfloat16, **V2}
    cases = [LatentCase([40_000, n], [1, 1], **how).made("cuda") for n in (9, 77)]
    alone = [made.run().o for made in cases]

    def attend_latents(made: LatentTensors) -> torch.Tensor:
        return triton_mla_decode.attend(made.q, made.k, made.rank, made.table, made.ready).o

    launch_beside_full_gpu([partial(attend_latents, made) for made in cases], alone)


@pytest.mark.parametrize(("rank", "rope"), [(256, 32), (128, 64), (20, 6)])
@pytest.mark.parametrize("window", [None, 100])
def test_latents_of_other_sizes(rank: int, rope: int, window: int | None) -> None:
    case = LatentCase([900, 70], [1, 70], N=16, rank=rank, rope=rope, page=16, window=window, dtype=torch.float16)
    same(case.made("cuda"), 6e-4)


def test_latents_in_float32() -> None:
    same(LatentCase([300], [1], N=4, rank=64, rope=16, page=16).made("cuda"), 1e-5)


def test_latents_with_fixed_splits_are_batch_invariant() -> None:
    how = {"N": 16, "page": 16, "dtype": torch.bfloat16, "chunk": 512, **V2}
    alone = LatentCase([3000], [1], **how).made("cuda").run()
    for others in (1, 7, 63):
        lengths = [3000, *[(37 * i) % 2000 for i in range(others)]]
        among = LatentCase(lengths, [1] * (others + 1), **how).made("cuda").run()
        assert torch.equal(among.o[0], alone.o[0]) and torch.equal(among.lse[0], alone.lse[0])


@pytest.mark.parametrize("cache", ["int8", "float8"])
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_latents_from_8_bit_cache(cache: cache_write.LatentKind, heads: int, dtype: torch.dtype) -> None:
    """Compared with float64 on the same 8-bit values; weights are rounded once more, with their token's scale."""
    for page in (16, 64):
        case = LatentCase([3000, 1, 0, 65, 8000], [1, 1, 0, 3, 1], N=heads, page=page, dtype=dtype, cache=cache, **V2)
        made = case.made("cuda")
        same(made, 1.5 * TOLERANCE[dtype])
        assert torch.equal(made.run().o, made.run().o)


@pytest.mark.parametrize("cache", ["int8", "float8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (20, 6)])
def test_latent_cache_write_equals_reference_bitwise(
    cache: cache_write.LatentKind, dtype: torch.dtype, rank: int, rope: int
) -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(3000, rank + rope, generator=draw, device="cuda")
    x *= torch.randn(3000, 1, generator=draw, device="cuda").exp() ** 2
    x[3], x[4, :rank], x[5, rank:] = 0, 0, 1e-7
    slots = torch.randperm(4096, generator=draw, device="cuda")[:3000]
    pools = []
    for run in (triton_cache_write.write_latents, cache_write.write_latents):
        pool = torch.zeros(64, 64, 1, rank + rope, device="cuda", dtype=cache_write.DTYPES[cache])
        scales = torch.zeros(64, 64, 2, device="cuda")
        run(x.to(dtype), slots, rank, pool, scales)
        pools.append((pool.view(torch.uint8), scales))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*pools, strict=True))
    x[7, 1], x[8, rank] = torch.inf, torch.nan
    triton_cache_write.write_latents(x.to(dtype), slots, rank, pool, scales)
    assert not scales.flatten(0, 1)[slots[7], 0].isfinite() and not scales.flatten(0, 1)[slots[8], 1].isfinite()


@pytest.mark.parametrize("cache", ["stored", "int8", "float8"])
@pytest.mark.parametrize("graphed", [False, True])
def test_latent_model_generates_same_tokens_as_cpu(cache: CacheFormat, graphed: bool) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = []
    for device in ("cpu", "cuda"):
        model = tiny.model(dtype=torch.float32, **LATENT)
        if device == "cuda":
            other = Transformer(model.config, device="cuda", dtype=torch.float32)
            other.load_state_dict(model.state_dict())
            model = other.requires_grad_(False)
        limits = ServeConfig(pages=24, page_tokens=4, max_requests=4, token_budget=7, cache=cache)
        fixed = graphed and device == "cuda"
        engine = Engine(model, tiny.tokenizer(), limits.replace(graph_capture=fixed))
        outputs.append([c.token_ids for c in engine.generate([[1, 2, 3], list(range(20)), [9]], params)])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_long_prompts_go_to_sdpa(dtype: torch.dtype, window: int | None) -> None:
    """Steps with and without whole prompts that SDPA handles; decodes before, between and after them."""
    for lengths, new in (
        ([5000, 900, 4500], [1, 1, 4500]),
        ([4097, 900, 4352, 700], [4097, 1, 4352, 700]),
        ([900, 3000, 640, 33], [800, 1, 0, 2]),
        ([30, 5000], [1, 4600]),
    ):
        made = Case(lengths, new, K=2, group=4, H=128, page=16, window=window or 0, dtype=dtype).made(
            "cuda", prepared=False
        )
        got = dispatch.paged(made.q, made.k, made.v, made.table, window=window)
        exact = reference.paged(*(x.double() for x in (made.q, made.k, made.v)), made.table, window=window)
        assert (got.double() - exact).norm() < TOLERANCE[dtype] * exact.norm()
        assert torch.equal(got, dispatch.paged(made.q, made.k, made.v, made.table, window=window))

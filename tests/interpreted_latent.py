"""The latent attention kernel, run by Triton's interpreter on a CPU.

``TRITON_INTERPRET=1 python -m tests.interpreted_latent``.
"""

import itertools
import warnings

import torch

from colonnade.kernels.attention import (
    cache_write,
    reference,
    sdpa,
    triton_cache_write,
    triton_decode,
    triton_mla_decode,
)
from colonnade.kernels.attention.decode_tiles import OVERRIDE, Tiles
from tests.latent_decoding import LatentCase

HOW = [Tiles(16, 4, 2, 1, 2, 32), Tiles(32, 4, 2, 2, 4, 32)]


def same(case: LatentCase, tolerance: float = 1e-5) -> None:
    """Compare output and log-sum-exp with float64; unwritten elements are NaN."""
    made = case.made()
    for got, right in zip(made.run(), made.exact(), strict=True):
        seen = right.isfinite()
        assert torch.equal(got.isfinite(), seen), case
        assert (got.double() - right)[seen].norm() < tolerance * right[seen].norm().clamp(min=1), case


def check_shapes() -> int:
    """Ranks, rotary widths, heads, pages, queries, windows; empty requests and more queries than keys."""
    cases = (
        LatentCase([70, 0, 33], [1, 0, 1], N=8, rank=32, rope=16, page=16),
        LatentCase([70, 3], [2, 5], N=5, rank=20, rope=6, page=4, window=9),
        LatentCase([90], [30], N=3, rank=16, rope=16, page=64),
        LatentCase([40, 65], [1, 1], N=70, rank=7, rope=4, page=32),
    )
    for i, case in enumerate(cases):
        OVERRIDE[:] = [HOW[i % 2]]
        same(case)
    same(LatentCase([60], [1], N=4, rank=32, rope=16, page=16, dtype=torch.float16), 6e-4)
    return len(cases) + 1


def check_eight_bits() -> int:
    """The same shapes with int8 and float8 caches; also through the registered kernel."""
    cases = (
        LatentCase([70, 0, 33], [1, 0, 1], N=8, rank=32, rope=16, page=16, cache="int8"),
        LatentCase([70, 3], [2, 5], N=5, rank=20, rope=6, page=4, window=9, cache="float8"),
        LatentCase([90], [30], N=3, rank=16, rope=16, page=64, cache="int8"),
        LatentCase([40, 65], [1, 1], N=70, rank=7, rope=4, page=32, cache="float8"),
    )
    for i, case in enumerate(cases):
        OVERRIDE[:] = [HOW[i % 2]]
        same(case)
    made, z = cases[1].made(), cases[1].rank
    for window in (None, 9):
        rows = triton_decode.paged, reference.paged, sdpa.paged
        (got, *others) = (
            run(made.q, made.k, made.k, made.table, window=window, values=z, scales_Pp2=made.scales) for run in rows
        )
        assert all((got - o).norm() < 1e-5 * o.norm() and o.shape == got.shape for o in others)
    for kind in ("int8", "float8"):
        same(LatentCase([60], [1], N=4, rank=32, rope=16, page=16, dtype=torch.float16, cache=kind), 1e-3)
    return len(cases) + 4


def check_cache_write() -> int:
    """Cache writes equal plain torch bitwise and touch only the given slots.

    Float8 inputs need no rounding, which the interpreter does differently from a GPU (tests/gpu/test_cascade_gpu.py).
    """
    draw = torch.Generator().manual_seed(0)
    count = 0
    for kind, dtype, (rank, rope) in itertools.product(
        ("int8", "float8"), (torch.float32, torch.bfloat16), ((32, 16), (20, 6))
    ):
        x = torch.randn(40, rank + rope + 5, generator=draw) * torch.randn(40, 1, generator=draw).exp() ** 6
        x[3], x[4, :rank], x[5, rank:] = 0, 0, 1e-30
        if kind == "float8":
            values, kept = cache_write.quantise_latents(x[:, : rank + rope], rank, kind)
            x[:, : rank + rope] = cache_write.dequantise_latents(values[:, None], kept, rank, torch.float32)[:, 0]
        x[6, 1], x[7, rank] = torch.inf, torch.nan
        slots = torch.randperm(48, generator=draw)[:40]
        pools = []
        for run in (triton_cache_write.write_latents, cache_write.write_latents):
            pool = torch.full((3, 16, 1, rank + rope), 99, dtype=torch.uint8).view(cache_write.DTYPES[kind])
            scales = torch.full((3, 16, 2), 7.0)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # numpy warns of non-finite values
                run(x.to(dtype)[:, : rank + rope], slots, rank, pool, scales)
            pools.append((pool.view(torch.uint8).flatten(0, 2), scales.flatten(0, 1)))
        (ours, our_scales), (theirs, their_scales) = pools
        finite = their_scales.isfinite()
        assert torch.equal(finite, our_scales.isfinite()) and (~finite).sum() == 2
        assert torch.equal(our_scales[finite], their_scales[finite])
        for part, columns in enumerate((slice(rank), slice(rank, None))):
            used = finite[:, part]
            assert torch.equal(ours[used, columns], theirs[used, columns]), (kind, dtype)
        count += 1
    return count


def check_bad_pages() -> int:
    """Keys of invalid pages are ignored."""
    OVERRIDE[:] = [HOW[0]]
    made = LatentCase([40], [1], N=3, rank=16, rope=8, page=16).made()
    made.table.pages_RP[0, 0] = 10**6
    o = made.run().o
    short = LatentCase([40], [1], N=3, rank=16, rope=8, page=16).made()
    short.table.pages_RP[0, :2] = short.table.pages_RP[0, 1:3].clone()
    short.table.lengths_R[0] = 24
    assert (o - short.exact().o).norm() < 1e-5 * o.norm()
    return 1


def check_registered_kernel() -> int:
    """The registry selects this kernel for latent caches; fixed splits are batch-invariant."""
    OVERRIDE[:] = [HOW[0]]
    case = LatentCase([50, 20], [1, 3], N=4, rank=16, rope=8, page=16)
    made = case.made()
    got = triton_decode.paged(made.q, made.k, made.k, made.table, values=16)
    assert got.shape == (4, 4, 16)
    assert (got - made.exact().o).norm() < 1e-5 * got.norm()
    how = {"N": 4, "rank": 16, "rope": 8, "page": 16, "chunk": 16}
    alone, among = (LatentCase(*batch, **how).made().run() for batch in (([50], [1]), ([9, 50, 80], [2, 1, 1])))
    assert torch.equal(alone.o[0], among.o[2])
    assert triton_mla_decode.attend(made.q[:0], made.k, 16, made.table, made.ready).o.shape == (0, 4, 16)
    return 3


if __name__ == "__main__":
    warnings.simplefilter("error")
    for check in (check_shapes, check_eight_bits, check_cache_write, check_bad_pages, check_registered_kernel):
        print(f"{check.__name__}: {check()} cases", flush=True)

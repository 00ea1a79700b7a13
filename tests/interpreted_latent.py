"""Latent attention's kernel, run by Triton's interpreter on a CPU; as ``tests.interpreted_decode``.

``TRITON_INTERPRET=1 python -m tests.interpreted_latent``.
"""

import warnings

import torch

from colonnade.kernels.attention import triton_decode, triton_latent
from colonnade.kernels.attention.decode_tiles import CHOSEN, Tiles
from tests.latent_decoding import LatentCase

HOW = [Tiles(16, 4, 2, 1, 2, 32), Tiles(32, 4, 2, 2, 4, 32)]


def same(case: LatentCase, tolerance: float = 1e-5) -> None:
    """Values and log-sum-exp against float64; what nobody writes is NaN."""
    made = case.made()
    for got, right in zip(made.run(), made.exact(), strict=True):
        seen = right.isfinite()
        assert torch.equal(got.isfinite(), seen), case
        assert (got.double() - right)[seen].norm() < tolerance * right[seen].norm().clamp(min=1), case


def check_shapes() -> int:
    """Ranks and rotary widths, heads, pages, queries, windows; requests of nothing, and more queries than keys."""
    cases = (
        LatentCase([70, 0, 33], [1, 0, 1], N=8, rank=32, rope=16, page=16),
        LatentCase([70, 3], [2, 5], N=5, rank=20, rope=6, page=4, window=9),
        LatentCase([90], [30], N=3, rank=16, rope=16, page=64),
        LatentCase([40, 65], [1, 1], N=70, rank=7, rope=4, page=32),
    )
    for i, case in enumerate(cases):
        CHOSEN[:] = [HOW[i % 2]]
        same(case)
    same(LatentCase([60], [1], N=4, rank=32, rope=16, page=16, dtype=torch.float16), 6e-4)
    return len(cases) + 1


def check_bad_pages() -> int:
    """Not read, as if their keys were not there."""
    CHOSEN[:] = [HOW[0]]
    made = LatentCase([40], [1], N=3, rank=16, rope=8, page=16).made()
    made.table.pages_RP[0, 0] = 10**6
    o = made.run().o
    short = LatentCase([40], [1], N=3, rank=16, rope=8, page=16).made()
    short.table.pages_RP[0, :2] = short.table.pages_RP[0, 1:3].clone()
    short.table.lengths_R[0] = 24
    assert (o - short.exact().o).norm() < 1e-5 * o.norm()
    return 1


def check_the_row_of_the_table() -> int:
    """Latents go to this kernel, by what the cache is; and fixed cuts give the same bits in any company."""
    CHOSEN[:] = [HOW[0]]
    case = LatentCase([50, 20], [1, 3], N=4, rank=16, rope=8, page=16)
    made = case.made()
    got = triton_decode.paged(made.q, made.k, made.k, made.table, values=16)
    assert got.shape == (4, 4, 16)
    assert (got - made.exact().o).norm() < 1e-5 * got.norm()
    how = {"N": 4, "rank": 16, "rope": 8, "page": 16, "chunk": 16}
    alone, among = (LatentCase(*batch, **how).made().run() for batch in (([50], [1]), ([9, 50, 80], [2, 1, 1])))
    assert torch.equal(alone.o[0], among.o[2])
    assert triton_latent.attend(made.q[:0], made.k, 16, made.table, made.ready).o.shape == (0, 4, 16)
    return 3


if __name__ == "__main__":
    warnings.simplefilter("error")
    for check in (check_shapes, check_bad_pages, check_the_row_of_the_table):
        print(f"{check.__name__}: {check()} cases", flush=True)

"""Small runs of every paged-attention kernel under compute-sanitizer (tests/gpu/test_sanitizer_gpu.py):

PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python -m tests.sanitizer_runs

Without torch's caching allocator each tensor is its own allocation, so that out-of-bounds accesses are detected.
With the argument ``cpu`` and ``TRITON_INTERPRET=1`` it checks that the program itself works, with ``cuda cpp`` it runs
the kernels in CUDA C++ alone.
"""

import sys
from dataclasses import replace

import torch

from colonnade.kernels import nvrtc
from colonnade.kernels.attention import cache_write, cuda_decode, triton_cache_write
from colonnade.kernels.attention.decode_tiles import OVERRIDE, Tiles
from tests.decoding import KERNELS, Case, CaseTensors
from tests.latent_decoding import LatentCase, LatentTensors

HALF = {"dtype": torch.float16}
EVERYTHING = {"cap": 1.5, "slopes": True, "sinks": True}
SMALL = Tiles(16, 4, 2, 1, 4, 32)
CASES: list[tuple[str, Case | LatentCase, Tiles]] = [
    ("decodes", Case([70, 3, 0, 100], [1, 1, 0, 1], K=2, group=5, H=80, page=16, **HALF, **EVERYTHING), SMALL),
    ("several queries", Case([66, 3, 40], [5, 4, 1], K=1, group=3, H=64, page=32, window=20, **HALF), SMALL),
    ("fixed cuts", Case([200, 17], [1, 2], K=2, group=2, H=64, page=16, chunk=32, **HALF), SMALL),
    ("many fixed cuts", Case([700, 17], [1, 2], K=2, group=2, H=64, page=16, chunk=32, sinks=True, **HALF), SMALL),
    ("8 bits", Case([90, 40], [1, 2], K=2, group=4, H=128, page=16, cache=torch.float8_e4m3fn, **HALF), SMALL),
    ("chunks in small pages", Case([90, 3], [60, 2], K=1, group=2, H=64, page=8, many=True, **HALF), SMALL),
    ("chunks", Case([90, 3, 67], [60, 2, 67], K=1, group=2, H=64, page=16, many=True, window=50, **HALF), SMALL),
    (
        "shared prefixes",
        Case([130, 40, 130, 75], [1, 2, 1, 1], K=2, group=3, H=64, page=16, prefixes=(((0, 2), 80),), **HALF),
        SMALL,
    ),
    ("latents", LatentCase([70, 0, 33], [1, 0, 2], N=8, rank=64, rope=16, page=16, **HALF), SMALL),
    ("latents of 8 bits", LatentCase([70, 33], [1, 1], N=8, rank=64, rope=16, page=16, cache="int8", **HALF), SMALL),
]  # fmt: skip


CUDA_CASES = ("decodes", "several queries", "fixed cuts", "many fixed cuts", "8 bits")
"""Cases that the CUDA C++ kernel supports too."""


def same(made: CaseTensors | LatentTensors, what: str) -> None:
    """Compare with float64 by norm."""
    got, exact = made.run().o.double(), made.exact().o
    assert float((got - exact).norm() / exact.norm()) < 1e-3, what


def cuda_cpp(device: str) -> None:
    """Run the kernels in CUDA C++, also with invalid pages."""
    KERNELS[:] = ["cuda"]
    for what in CUDA_CASES:
        same(next(case for name, case, _ in CASES if name == what).made(device), what)
        print(f"{what}, in CUDA C++", flush=True)
    same(Case([900, 0, 333], [1, 1, 1], K=2, group=8, H=64, page=16, sinks=True, **HALF).made(device), "cut lines")
    # With 57 parts of a line and 9 units to a worker, fewer lanes than parts share a unit.
    same(Case([900, 40], [1, 1], K=1, group=8, H=256, page=16, **HALF).made(device), "cut lines of wide heads")
    same(Case([40] * 200, [1] * 200, K=4, group=2, H=64, page=16, **HALF).made(device), "teams of warps")
    KERNELS[:] = ["auto"]
    lengths = [320] * 132 + [200] * 8
    same(Case(lengths, [1] * 140, K=1, group=2, H=64, page=16, **HALF).made(device), "whole lines and pieces")
    for most in (8, 10, 128, 256):  # the kernel for a few keys, of half a tile, one, eight and sixteen
        lengths = [(29 * i) % (most + 1) for i in range(150)]
        same(Case(lengths, [1] * 150, K=2, group=9, H=64, page=16, **HALF, **EVERYTHING).made(device), "few keys")
        print(f"{most} keys, in CUDA C++", flush=True)
    latents = LatentCase([700, 0, 33, 130], [1, 0, 2, 1], N=8, rank=512, rope=64, page=16, **HALF)
    made_latents = latents.made(device)
    same(made_latents, "latents")
    same(replace(latents, N=16, queries=[1, 0, 1, 1]).made(device), "latents of 16 heads")
    for wrong in (-1, 10**8, 2**31 - 1, -(2**31)):
        made_latents.table.pages_RP[0, ::2] = wrong
        assert not made_latents.run().o.isnan().any()
    print("latents, in CUDA C++", flush=True)
    made = Case([70, 3, 0, 100], [1] * 4, K=2, group=5, H=64, page=16, **HALF).made(device)
    for wrong in (-1, 10**8, 2**31 - 1, -(2**31)):
        made.table.pages_RP[0, ::2] = wrong
        assert not made.run().o.isnan().any()
    KERNELS[:] = ["cuda"]
    same(Case([900, 40], [1, 1], K=2, group=4, H=64, page=16, chunk=128, **HALF).made(device), "cut fixed lines")
    made = next(case for name, case, _ in CASES if name == "decodes").made(device)
    for wrong in (-1, 10**8, 2**31 - 1, -(2**31)):
        made.table.pages_RP[0, ::2] = wrong
        assert not made.run().o.isnan().any()
    KERNELS[:] = ["auto"]


def main(device: str, part: str = "all") -> None:
    """Run all cases, invalid pages and cache writes."""
    if part == "cpp":
        cuda_cpp(device)
        torch.cuda.synchronize()
        print("all", flush=True)
        return
    for what, case, tiles in CASES:
        OVERRIDE[:] = [tiles]
        same(case.made(device), what)
        print(what, flush=True)
    OVERRIDE.clear()
    if (
        device == "cuda"
        and torch.cuda.get_device_capability() == cuda_decode.ARCH
        and nvrtc.unavailable_reason() is None
    ):
        cuda_cpp(device)
    OVERRIDE[:] = [SMALL]
    named = {what: case for what, case, _ in CASES}
    for case in (named["decodes"], replace(named["decodes"], many=True), named["chunks"], named["shared prefixes"]):
        made = case.made(device)
        for wrong in (-1, 10**8, 2**31 - 1, -(2**31)):
            made.table.pages_RP[0, ::2] = wrong
            assert not made.run().o.isnan().any()
    print("bad pages", flush=True)
    on = {"device": device, "dtype": torch.float16}
    pools = [torch.zeros(4, 16, 2, 64, **on) for _ in range(2)]
    slots = torch.tensor([63, 0, -1, 64, 2**40], device=device)
    assert triton_cache_write.rope_and_kv_write(torch.randn(5, 2 * 5 * 64, **on), *pools, slots).shape == (5, 6, 64)
    pool, scales = torch.zeros(4, 16, 1, 80, device=device, dtype=torch.int8), torch.zeros(4, 16, 2, device=device)
    triton_cache_write.write_latents(torch.randn(2, 80, **on), slots[:2], 64, pool, scales)
    assert cache_write.latent_kind(pool) == "int8" and pool[3, 15].any() and pool[0, 0].any()
    print("writes", flush=True)
    if device == "cuda":
        torch.cuda.synchronize()
    print("all", flush=True)


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["cuda"]))

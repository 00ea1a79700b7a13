"""The transducer's Triton kernels in the interpreter: ``TRITON_INTERPRET=1 python -m tests.interpreted_transducer``.

The interpreter has no bfloat16, so float32 is split into parts of float16 here; tests/gpu has bfloat16.
"""

import torch

from colonnade.kernels.transducer import triton_joint, triton_lattice
from colonnade.kernels.transducer.triton_joint import Split
from tests.transducer import CASES, Kernels, compare

TRITON = Kernels(triton_joint.scores, triton_lattice.transducer_lattice, triton_joint.gradients)


def check_kernels() -> int:
    """Uneven, empty and single utterances, shards without the blank; chunks of one row and of all."""
    count = 0
    triton_joint.LOSS = triton_joint.GRADIENT = Split(2, torch.float16)
    for name, case in CASES.items():
        for rows in (9,) if name in ("uneven", "shard") else (8192,):
            triton_joint.CHUNK_ROWS = rows
            compare(TRITON, case, torch.float32, 2e-6)
            count += 1
    return count


def check_parts() -> int:
    """Three parts of 11 bits keep float32's 24; the pairs are those of the factors."""
    x, w = (torch.randn(9, 21, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    for parts, tolerance in ((1, 1e-3), (2, 1e-6), (3, 2e-7)):
        split = Split(parts, torch.float16)
        left = triton_joint._factors(x, split, left=True, stacked=False)
        right = triton_joint._factors(w, split, left=False, stacked=False)
        got, exact = (left.double() @ right.double().T)[:9, :9], x.double() @ w.double().T
        assert (got - exact).norm() < tolerance * exact.norm(), parts
    return 3


if __name__ == "__main__":
    for check in (check_kernels, check_parts):
        print(f"{check.__name__}: {check()} cases", flush=True)

"""Counter-based random keys that do not depend on the parallel layout.

What a stateful generator returns depends on who drew from it before. Here a random value is a pure function of

    seed, step, site     one 64-bit key for each site (say, each layer); the same on every rank
    index                a token's number in the step's global batch, over data ranks and micro-batches

and of its position within the token. Ranks that hold the same token agree without communication, ranks that hold
different tokens draw independently, a repeated step draws the same values, and recomputation is safe.

Initial weights are drawn by one generator per parameter name, with a seed of 128 bits. torch's CPU generator keeps only
the low 32 bits of a seed, with which two of 45,000 names are likely to collide; so it is numpy's.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def keys(seed: int, step: int, sites: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 (sites,): the key of each site in one step of a run."""
    step_key = _mix(_mix(seed) ^ step)
    unsigned = [_mix(step_key ^ site) for site in range(sites)]
    gpu = torch.device(device).type == "cuda"
    signed = [key - (key >> 63 << 64) for key in unsigned]
    # A copy from unpinned memory may wait for all queued work of the device.
    return torch.tensor(signed, dtype=torch.int64, pin_memory=gpu).to(device, non_blocking=gpu)


def name_seed(seed: int, name: str) -> int:
    """128 bits that depend only on the seed and the name, in any process."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "big")


def generator(seed: int, name: str) -> np.random.Generator:
    """The generator of the values called ``name`` in a run with this ``seed``."""
    return np.random.Generator(np.random.PCG64(name_seed(seed, name)))


def _mix(x: int) -> int:
    """splitmix64's first output for the seed ``x`` (Steele, Lea and Flood 2014, figure 16): a permutation."""
    x = (x + _GOLDEN) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31

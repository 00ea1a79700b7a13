"""Randomness that no layout can change: keys for what is drawn, and one number for each token of a step.

A generator has a state, so what it gives depends on who drew before. Here what is random is a pure function of

    seed, step, place    one key of 64 bits for each (say, each layer); the same on every rank
    index                a token's number in the step's global batch, over data ranks and micro-batches

and of what else tells its elements apart. Ranks that hold the same token agree about it without a word, ranks that hold
different ones are independent, a step that is taken again is the same step, and recomputation is safe.

Initial weights are drawn by a generator of their own for each name, whose seed has 128 bits. torch's generator for CPUs
keeps only the low 32 bits of a seed, of which among 45,000 names two are likely to be equal; so it is numpy's.
"""

import hashlib

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def keys(seed: int, step: int, places: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 (places,): the key of each place in one step of a run."""
    of_step = _mix(_mix(seed) ^ step)
    found = [_mix(of_step ^ place) for place in range(places)]
    gpu = torch.device(device).type == "cuda"
    signed = [key - (key >> 63 << 64) for key in found]
    # From memory that is not pinned a copy may wait for all that the device has to do before it.
    return torch.tensor(signed, dtype=torch.int64, pin_memory=gpu).to(device, non_blocking=gpu)


def name_seed(seed: int, name: str) -> int:
    """128 bits that depend on the seed and the name alone, in any process."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "big")


def generator(seed: int, name: str) -> np.random.Generator:
    """The generator that draws what is called ``name`` in a run of this ``seed``."""
    return np.random.Generator(np.random.PCG64(name_seed(seed, name)))


def _mix(x: int) -> int:
    """splitmix64's first output for the seed ``x`` (Steele, Lea and Flood 2014, figure 16): a permutation."""
    x = (x + _GOLDEN) & _MASK
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
    return x ^ x >> 31

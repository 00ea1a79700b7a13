"""Ternary weights under one bit: words of 16 bits that each hold n weights of −1, 0 and 1, few of which are not 0.

    w ≈ t s         t in −1, 0, 1; one s per row, bfloat16; at most k of n consecutive t are not 0

    n, k      18, 4    24, 3    32, 3
    words     56,137   17,345   41,729        Σ_(i ≤ k) C(n, i) 2^i, all below 2^16
    bits      0.889    0.667    0.500         per weight

QMoE (Frantar 2023, arXiv 2310.16795) also uses a table of words, of varying length, which must be decoded in order.
Words of equal length can be read and sharded anywhere. The table has n trits of 2 bits in an int64 for each word: 512
KB, which fit a level-2 cache. Its entries ascend as numbers, so that encoding is a binary search.
"""

import functools
from itertools import combinations, product

import torch
from torch import Tensor
from torch.nn import functional as F

NONZERO = {18: 4, 24: 3, 32: 3}
"""k by n."""
TABLE_WORDS = 1 << 16
ITERATIONS = 8
"""Iterations of :func:`choose_mask`."""


@functools.cache
def table(trits: int, device: torch.device | str = "cpu") -> Tensor:
    """int64 (65536,): trit i of each word in bits 2i and 2i + 1 (0, 1, or 2 for −1), ascending; zeros where unused."""
    codes = [0]
    for count in range(1, NONZERO[trits] + 1):
        for places in combinations(range(trits), count):
            for signs in product((1, 2), repeat=count):
                code = sum(sign << 2 * place for place, sign in zip(places, signs, strict=True))
                codes.append(code - (1 << 64) if code >> 63 else code)  # the last trit of 32 has the sign bit
    entries = torch.tensor(codes).sort().values
    return F.pad(entries, (0, TABLE_WORDS - len(entries))).to(device)


@functools.cache
def word_count(trits: int) -> int:
    """Words in use."""
    return 1 + int((table(trits) != 0).sum())


def encode(trits_FD: Tensor, trits: int) -> Tensor:
    """Words, int16 (…, D / n rounded up), of weights of −1, 0 and 1, with at most k of n consecutive ones not 0."""
    padded = F.pad(trits_FD.long(), (0, -trits_FD.shape[-1] % trits)).unflatten(-1, (-1, trits))
    assert int((padded != 0).sum(-1).max()) <= NONZERO[trits], "more than k of n trits are not 0"
    code = padded.new_zeros(padded.shape[:-1])
    for i in range(trits):
        code |= (padded[..., i] % 3) << 2 * i  # −1 is 2
    used = table(trits, code.device)[: word_count(trits)]
    return torch.searchsorted(used, code).to(torch.int16)  # the upper half wraps around


def decode(words: Tensor, trits: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """The weights −1, 0 and 1 of int16 ``words`` (…, D / n rounded up), (…, D)."""
    code = table(trits, words.device)[words.to(torch.int32) & 0xFFFF]
    pairs = torch.stack([code >> 2 * i & 3 for i in range(trits)], -1)
    values = torch.tensor([0, 1, -1, 0], dtype=dtype, device=words.device)
    return values[pairs].flatten(-2)[..., :inputs]


def choose_mask(w_FD: Tensor, trits: int, importance_D: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(allowed_FD bool, s_F1 float32): the mask of weights that may be ±1, at most k per word, and the scale.

    They minimise Σ_d h_d (w_d − ŵ_d)². Rounding a weight to ±s instead of 0 lowers it by h (2 s |w| − s²). Each
    iteration selects the k weights of a word that lower it most for the scale, then the best scale for the selected
    weights.
    """
    size = w_FD.abs()
    h_D = torch.ones_like(size[0]) if importance_D is None else importance_D.to(size.dtype)
    groups, k = -(-size.shape[1] // trits), NONZERO[trits]
    s_F1 = 2 * size.mean(1, keepdim=True)
    allowed = torch.zeros_like(size, dtype=torch.bool)
    for _ in range(ITERATIONS):
        gain = F.pad(h_D * (2 * s_F1 * size - s_F1.square()), (0, groups * trits - size.shape[1]), value=-1.0)
        best = gain.unflatten(1, (groups, trits)).topk(k, 2)
        mask = torch.zeros(len(size), groups, trits, dtype=torch.bool, device=size.device)
        mask.scatter_(2, best.indices, best.values > 0)
        allowed = mask.flatten(1)[:, : size.shape[1]]
        total = (h_D * allowed).sum(1, keepdim=True)
        s_F1 = torch.where(total > 0, (h_D * size * allowed).sum(1, keepdim=True) / total.clamp(min=1e-30), s_F1)
        s_F1 = s_F1.bfloat16().float()
    return allowed, s_F1

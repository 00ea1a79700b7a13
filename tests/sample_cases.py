"""Rows of logits and arguments for :func:`colonnade.kernels.sampling.sample`."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

INF = math.inf

FILTERS = [
    (0.0, 0, 1.0, -INF),
    (1.0, 0, 1.0, -INF),
    (0.7, 3, 1.0, -INF),
    (1.3, 0, 0.6, -INF),
    (1.0, 0, 0.97, math.log(0.05)),
    (1.0, 9, 0.5, -INF),
    (2.0, 1, 0.9, -INF),
    (1.0, 10_000_000, 0.0, -INF),
    (1.0, 0, 1.0, math.log(0.3)),
    (1e-5, 0, 0.9, -INF),
    (3.0, 40, 0.999, -INF),
]
"""Temperature, top-k, top-p, log min-p."""


def sample_cases(vocab: int, device: str = "cpu", rounds: int = 3) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits_RV, args_RA): continuous logits, logits with many ties, and rows that are partly or not finite."""
    draw = torch.Generator().manual_seed(vocab)
    for index in range(rounds):
        rows = [(*each, 123_456_789 * i, (1 << 31) - 20 + i, 1000 * index) for i, each in enumerate(FILTERS)]
        args_RA = torch.tensor(rows, dtype=torch.float64, device=device)
        logits_RV = (torch.randn(len(rows), 2 * vocab, generator=draw) * 3).to(device)[:, :vocab]
        yield logits_RV, args_RA
        yield logits_RV.round(), args_RA
        broken_RV = logits_RV.clone()
        broken_RV[0], broken_RV[1, -1], broken_RV[2, 0] = -INF, math.nan, INF
        broken_RV[3:, : vocab // 2] = -INF
        yield broken_RV, args_RA
        yield torch.zeros_like(logits_RV), args_RA

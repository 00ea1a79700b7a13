"""A :class:`Work` as whole numbers, for the ranks that follow rank 0.

    header  [kind, length of the payload]
    payload [slices, then start, place, tokens, pages, draws of each; then all tokens, all page tables, all draws]

Fixed int64 tensors and no pickling: what a rank receives can be a wrong plan of work at worst, never code.
"""

from collections.abc import Sequence
from itertools import chain, islice

import torch

from colonnade.parallel.axis import Axis
from colonnade.serve.sampling_params import Draw
from colonnade.serve.scheduler import Slice, Work

RUN, IDLE, STOP = 1, 2, 3
"""Kinds of message: run this work; nothing to do, but alive; go home."""


def pack(work: Work) -> list[int]:
    """The payload of ``work``; which request a slice belongs to is not said."""
    heads = ((s.start, s.place, len(s.tokens), len(s.pages), int(s.draw is not None)) for s in work.slices)
    tokens = chain.from_iterable(s.tokens for s in work.slices)
    pages = chain.from_iterable(s.pages for s in work.slices)
    draws = chain.from_iterable(s.draw.pack() for s in work.slices if s.draw is not None)
    return [len(work.slices), *chain.from_iterable(heads), *tokens, *pages, *draws]


def unpack(payload: Sequence[int]) -> Work:
    """The inverse of :func:`pack`."""
    count = payload[0]
    heads = [tuple(payload[1 + 5 * i : 6 + 5 * i]) for i in range(count)]
    rest = iter(payload[1 + 5 * count :])
    tokens = [tuple(islice(rest, n)) for *_, n, _, _ in heads]
    pages = [tuple(islice(rest, n)) for *_, n, _ in heads]
    draws = [Draw.unpack(tuple(islice(rest, len(Draw._fields)))) if drawn else None for *_, drawn in heads]
    return Work(tuple(Slice(h[0], t, p, d, h[1]) for h, t, p, d in zip(heads, tokens, pages, draws, strict=True)))


def send(axis: Axis, kind: int, work: Work | None = None) -> None:
    """From rank 0 of ``axis`` to all others, which call :func:`receive`; in a world of one nothing happens."""
    if axis.size > 1:
        payload = pack(work) if work else []
        axis.broadcast_(torch.tensor([kind, len(payload)], dtype=torch.int64))
        if payload:
            axis.broadcast_(torch.tensor(payload, dtype=torch.int64))


def receive(axis: Axis) -> tuple[int, Work | None]:
    """The next message of rank 0: its kind, and the work if there is any."""
    kind, length = axis.broadcast_(torch.zeros(2, dtype=torch.int64)).tolist()
    return kind, unpack(axis.broadcast_(torch.zeros(length, dtype=torch.int64)).tolist()) if length else None

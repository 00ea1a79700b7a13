"""Ranks that were started with other settings than their peers are told so, before anything of unequal shape is sent.

What differs between ranks (a width, a plan, a batch) makes collectives that do not match, and those wait for ever, or
give numbers that nobody meant. A digest of the settings is of the same size everywhere: one small exchange tells.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch

from colonnade.errors import PlanError
from colonnade.parallel.axis import Axis

SHOWN = 3
"""Settings that an error lists."""


def agree(settings: Mapping[str, Any], ranks: Axis) -> None:
    """Raise :class:`PlanError`, on all ``ranks`` alike, unless each was given the same ``settings`` (of plain values);
    it names the ranks that differ from the first one, and in what.
    """
    said = json.dumps(settings, sort_keys=True, default=str).encode()
    digest = int.from_bytes(hashlib.blake2b(said, digest_size=7).digest(), "big")
    digests = ranks.list_(digest)
    others = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if not others:
        return
    counts = ranks.list_(len(said))
    texts = ranks.lay_together_(torch.frombuffer(bytearray(said), dtype=torch.uint8), counts).split(counts)
    first, other = (json.loads(bytes(texts[rank].tolist())) for rank in (0, others[0]))
    differ = [name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name)]
    listed = ", ".join(f"{name} {_value(other, name)} instead of {_value(first, name)}" for name in differ[:SHOWN])
    more = f" and {len(differ) - SHOWN} more" if len(differ) > SHOWN else ""
    raise PlanError(
        f"rank {', '.join(map(str, others))} of {ranks.size} was started with other settings than rank 0: rank "
        f"{others[0]} has {listed}{more}; start all ranks with the same"
    )


def first_says(text: str, ranks: Axis) -> str:
    """The first rank's ``text``, on all ``ranks``."""
    said = text.encode()
    length = int(ranks.broadcast_(torch.tensor(len(said))))
    letters = torch.tensor(list(said if ranks.rank == 0 else bytes(length)), dtype=torch.uint8)
    return bytes(ranks.broadcast_(letters).tolist()).decode() if length else ""


def _value(settings: Mapping[str, Any], name: str) -> str:
    return str(settings[name]) if name in settings else "none"

"""Rendezvous under a name that no earlier attempt used, and a check that all ranks have the same settings.

torchrun keeps one key-value store for all its attempts. Processes that it restarts after a failure find the addresses
of the dead ones in it, and fail to connect or wait forever (seen with gloo and torch 2.13; its restart count does
not help, because it differs between machines). So the ranks first agree on a new name and put their keys below it:
each rank but 0 posts a random token, and rank 0 answers these tokens with the name until every rank has acknowledged
it. Keys left by earlier attempts are answered too, but never read.

Settings that differ between ranks (a width, a plan, a batch) give mismatched collectives, which hang or return wrong
numbers. :func:`check_same_settings` compares a digest of fixed size before anything of unequal shape is sent.
"""

import datetime
import hashlib
import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from colonnade.errors import PlanError, WorkerError
from colonnade.parallel.axis import Axis

POLL_S = 0.02
MAX_DIFFERENCES = 3
"""Settings that an error lists."""


def fresh_store(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """(store, rank, world) of a launched process; raises :class:`WorkerError` when ranks do not come in time."""
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(agree_on_name(store, rank, world, timeout), store), rank, world


def agree_on_name(store: dist.Store, rank: int, world: int, timeout: datetime.timedelta) -> str:
    """Return a name that is the same on all ranks of this attempt and was never used before."""
    token = uuid.uuid4().hex
    if rank:
        store.set(f"colonnade/token/{rank}", token)
        name = store.get(f"colonnade/name/{token}").decode()
        store.set(f"colonnade/ack/{name}/{rank}", "")
        return name
    awaited, until_s = set(range(1, world)), time.monotonic() + timeout.total_seconds()
    while awaited:
        for peer in sorted(awaited):
            if store.check([f"colonnade/ack/{token}/{peer}"]):
                awaited.remove(peer)
            elif store.check([f"colonnade/token/{peer}"]):
                store.set(f"colonnade/name/{store.get(f'colonnade/token/{peer}').decode()}", token)
        if time.monotonic() > until_s:
            raise WorkerError(f"ranks {sorted(awaited)} of {world} did not arrive within {timeout}; check their output")
        time.sleep(POLL_S)
    return token


def check_same_settings(settings: Mapping[str, Any], ranks: Axis) -> None:
    """Raise :class:`PlanError` on all ``ranks`` unless they have the same ``settings`` (of plain values).

    The error names the ranks that differ from rank 0, and the settings in which the first of them differs.
    """
    text = json.dumps(settings, sort_keys=True, default=str).encode()
    digest = int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "big")
    digests = ranks.all_gather_int(digest)
    others = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
    if not others:
        return
    counts = ranks.all_gather_int(len(text))
    texts = ranks.all_gather_uneven_(torch.frombuffer(bytearray(text), dtype=torch.uint8), counts).split(counts)
    first, other = (json.loads(bytes(texts[rank].tolist())) for rank in (0, others[0]))
    differ = [name for name in sorted(first.keys() | other.keys()) if first.get(name) != other.get(name)]
    shown = ", ".join(
        f"{name} {other.get(name, 'none')} instead of {first.get(name, 'none')}" for name in differ[:MAX_DIFFERENCES]
    )
    more = f" and {len(differ) - MAX_DIFFERENCES} more" if len(differ) > MAX_DIFFERENCES else ""
    raise PlanError(
        f"rank {', '.join(map(str, others))} of {ranks.size} was started with other settings than rank 0: rank "
        f"{others[0]} has {shown}{more}; start all ranks with the same"
    )


def broadcast_text(text: str, ranks: Axis) -> str:
    """Return the first rank's ``text`` on all ``ranks``."""
    encoded = text.encode()
    length = int(ranks.broadcast_(torch.tensor(len(encoded))))
    characters = torch.tensor(list(encoded if ranks.rank == 0 else bytes(length)), dtype=torch.uint8)
    return bytes(ranks.broadcast_(characters).tolist()).decode() if length else ""

"""A place to meet that no earlier attempt has used.

torchrun keeps one key-value store for all its attempts: processes that it starts again after a death find the
addresses of the dead in it, and connect to nobody, or wait for ever (seen with gloo and torch 2.13; its count of
restarts does not help, for it differs between machines). So the ranks first agree on a name that is new, and meet
below it: each but rank 0 asks under a word that only this process knows, and rank 0 answers those words with the name
until everybody has come. What earlier attempts left lying is answered too, and read by nobody.
"""

import datetime
import time
import uuid

import torch.distributed as dist

from colonnade.errors import WorkerError

PAUSE_S = 0.02


def fresh_store(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """(store, rank, world) of a process that a launcher started; raises :class:`WorkerError` when some do not come."""
    store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    return dist.PrefixStore(agree(store, rank, world, timeout), store), rank, world


def agree(store: dist.Store, rank: int, world: int, timeout: datetime.timedelta) -> str:
    """A name that is the same on all ranks of this attempt, and was never used before."""
    word = uuid.uuid4().hex
    if rank:
        store.set(f"colonnade/asks/{rank}", word)
        name = store.get(f"colonnade/answers/{word}").decode()
        store.set(f"colonnade/came/{name}/{rank}", "")
        return name
    awaited, until_s = set(range(1, world)), time.monotonic() + timeout.total_seconds()
    while awaited:
        for peer in sorted(awaited):
            if store.check([f"colonnade/came/{word}/{peer}"]):
                awaited.remove(peer)
            elif store.check([f"colonnade/asks/{peer}"]):
                store.set(f"colonnade/answers/{store.get(f'colonnade/asks/{peer}').decode()}", word)
        if time.monotonic() > until_s:
            raise WorkerError(f"ranks {sorted(awaited)} of {world} did not come within {timeout}; look at their output")
        time.sleep(PAUSE_S)
    return word

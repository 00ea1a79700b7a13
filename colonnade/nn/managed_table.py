"""An embedding table for any number of ids: the most used ones have their own row (managed collisions).

    h = mix(id)              a bijection of 64 bits; its top 6 bits are the id's bucket
    row = slot of h          by binary search among the kept ids, or the bucket's shared row for all others
    every k steps            ids seen since are merged with the kept ones, and the best of each bucket stay:
                             lfu: count;  lru: last step;  decay: count / (age + 1)^decay

(TorchRec's managed collisions and DistanceLFU, Ivchenko 2022, ACM RecSys.) A new id's row, and the optimizer's state of
it, start anew: from a hash of the id, so that neither its slot nor its history matters. Each of the 64 buckets is
managed independently, and ranks own whole buckets: the table is the same bit for bit on any number of ranks. Ids travel
to the rank of their bucket and rows back (two all-to-alls); gradients are added up in the order of the global batch.

    table = ManagedTable(1 << 20, 64, policy="lfu")
    x_ND = table(ids_N); loss(x_ND).backward(); table.step(lr=0.05)

The optimizer is row-wise Adagrad (Gupta 2014): only rows that were read have gradients, and one number of state.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from colonnade.config.base import check_choice
from colonnade.data.loader import GOLDEN_GAMMA, MASK64, splitmix64, splitmix64_mix
from colonnade.errors import ConfigError, DataError
from colonnade.nn.host_rows import DeviceRows, HostRows
from colonnade.nn.managed_ids import (
    BUCKET_BITS,
    BUCKETS,
    SIGN,
    ManagedIds,
    OwnRowIds,
    Policy,
    bucket_of,
    unsigned_hashes,
)
from colonnade.parallel.axis import SOLO, Axis

EPS = 1e-8
CHUNK_NUMBERS = 1 << 22
"""Initial weights are computed so many at a time."""


@dataclass
class LookUp:
    """Rows of one batch of ids, on the ranks that own them."""

    hashes: np.ndarray
    """Of the ids that this rank owns, in the order of the global batch."""
    send: list[int]
    receive: list[int]
    order_N: Tensor | None
    """The ids of this rank's batch in the order in which they were sent; None on one rank."""
    version: int = -1
    """Of the assignment of rows."""
    hits: int = 0
    """Number of ids with their own row."""
    hashes_M: Tensor | None = None
    """``hashes`` on the device."""
    rows_U: Tensor | None = None
    """Their rows, each once, in order; on the device, as the rest."""
    inverse_M: Tensor | None = None
    copy: DeviceRows | None = None
    """The rows' weights and optimizer state."""
    shared: tuple[Tensor, Tensor] | None = None
    """(whether each row is also in the batch before, where)."""

    def wait(self) -> DeviceRows:
        """The copy, for which the current stream waits."""
        assert self.copy is not None, "look up, read, use"
        assert self.hashes_M is not None
        assert self.rows_U is not None
        assert self.inverse_M is not None
        self.copy.wait(self.hashes_M, self.rows_U, self.inverse_M, *(self.shared or ()))
        return self.copy


class ManagedTable:
    """This rank's buckets of a table of ``rows`` rows of ``width`` numbers; ``rows`` is a multiple of 64.

    Rows are in host memory; those of a batch are copied to ``device``, updated there, and written back. Raises
    :class:`ConfigError` for settings that do not apply.
    """

    def __init__(
        self,
        rows: int,
        width: int,
        *,
        policy: Policy = "lfu",
        every: int = 100,
        decay: float = 1.0,
        seed: int = 0,
        axis: Axis = SOLO,
        device: torch.device | str = "cpu",
    ):
        check_choice("policy", policy, Policy)
        if rows % BUCKETS or rows < 2 * BUCKETS or axis.size > BUCKETS:
            raise ConfigError(
                f"a managed table needs a multiple of {BUCKETS} rows, at least {2 * BUCKETS}, on up to {BUCKETS} "
                f"ranks; got {rows} on {axis.size}"
            )
        if every < 1 or width < 1:
            raise ConfigError(f"width and every must be at least 1; got width={width} and every={every}")
        self.every, self.seed, self.axis, self.width = every, seed, axis, width
        self.device = torch.device(device)
        self.per_bucket = rows // BUCKETS
        self.first_bucket, self.stop_bucket = (-(-BUCKETS * r // axis.size) for r in (axis.rank, axis.rank + 1))
        local = (self.stop_bucket - self.first_bucket) * self.per_bucket
        self._scale = width**-0.5
        self.ids = ManagedIds(self.first_bucket, self.stop_bucket, self.per_bucket, policy=policy, decay=decay,
                              device=self.device)  # fmt: skip
        self._host = HostRows(torch.empty(local, width), torch.zeros(local, 1), self.device)
        # A shared row starts as if its number were an id.
        first = self.first_bucket * self.per_bucket
        self._start_rows(splitmix64_mix(np.arange(first, first + local).astype(np.uint64)), slice(None))
        self._history: list[Tensor] = []
        self._used: list[LookUp] = []
        self._worker: ThreadPoolExecutor | None = None
        self.steps = 0
        self.version = 0
        """How often rows have been reassigned."""
        self.looked_up = self.hits = 0
        """Ids of this rank's buckets in all batches, and those with their own row."""

    # -- one step ------------------------------------------------------------------------------------------------------

    def __call__(self, ids_N: Tensor) -> Tensor:
        """x_ND of this rank's part of the batch; all ranks call it together."""
        return self.use(self.read(self.look_up(ids_N)))

    def look_up(self, ids_N: Tensor) -> LookUp:
        """Send ids to the ranks that own them, and find their rows."""
        return self.find(self.route(ids_N))

    def route(self, ids_N: Tensor) -> LookUp:
        """Send ids to the ranks that own them; all ranks call it together. Raises :class:`DataError`."""
        if not isinstance(ids_N, Tensor):
            raise DataError(f"ids must be a tensor; got {type(ids_N).__name__}: torch.tensor(ids) converts a list")
        if ids_N.ndim != 1 or ids_N.dtype.is_floating_point or ids_N.dtype.is_complex:
            raise DataError(f"ids must be a vector of integers; got {ids_N.dtype} of shape {tuple(ids_N.shape)}")
        hashes = splitmix64_mix(ids_N.cpu().numpy().astype(np.uint64) + np.uint64(GOLDEN_GAMMA))
        if self.axis.size == 1:
            return LookUp(hashes, [len(hashes)], [len(hashes)], None)
        owner = (hashes >> np.uint64(64 - BUCKET_BITS)).astype(np.int64) * self.axis.size // BUCKETS
        order = np.argsort(owner, kind="stable")
        send = np.bincount(owner, minlength=self.axis.size).tolist()
        ones = [1] * self.axis.size
        receive = self.axis.exchange(torch.tensor(send), ones, ones).tolist()
        sent = torch.from_numpy(hashes[order].view(np.int64))
        owned = self.axis.exchange(sent, send, receive).numpy().view(np.uint64)
        return LookUp(owned, send, receive, torch.from_numpy(order))

    def find(self, found: LookUp) -> LookUp:
        """Set the rows of ``found`` by the current assignment."""
        with self._host.look_ups():
            if found.hashes_M is None:
                found.hashes_M = (torch.from_numpy(found.hashes.view(np.int64)) ^ SIGN).to(self.device)
            found.version = self.version
            rows_M, hit_M = self.ids.rows(found.hashes_M)
            found.rows_U, found.inverse_M = torch.unique(rows_M, return_inverse=True)
            found.hits, found.copy, found.shared = int(hit_M.sum()), None, None
        return found

    def read(self, found: LookUp) -> LookUp:
        """Copy the rows to the device."""
        assert found.rows_U is not None, "look up, read, use"
        found.copy = self._host.read(found.rows_U)
        return found

    def use(self, found: LookUp) -> Tensor:
        """x_ND of a batch that was looked up and read; its ids count from now on."""
        assert found.version == self.version, "rows have been reassigned since; look them up again"
        copy = found.wait()
        assert found.hashes_M is not None
        assert found.inverse_M is not None
        self._history.append(found.hashes_M)
        self._used.append(found)
        self.looked_up += len(found.hashes)
        self.hits += found.hits
        x_MD = copy.weight_UD.requires_grad_().index_select(0, found.inverse_M)
        if found.order_N is None:
            return x_MD
        x_ND = self.axis.exchange(x_MD, found.receive, found.send)
        back_N = torch.empty_like(found.order_N)
        back_N[found.order_N] = torch.arange(len(back_N))
        return x_ND.index_select(0, back_N.to(self.device))

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the rows that were used, and reassign rows at the configured interval."""
        if not 0 <= lr < math.inf:
            raise ConfigError(f"lr={lr} is not a valid learning rate; it must be at least 0")
        if len(self._used) > 1:
            raise ConfigError(
                f"{len(self._used)} batches were looked up since the last table.step, but only one is supported; call "
                "table.step after each batch, or look up their ids as one batch"
            )
        for found in self._used:
            copy = found.copy
            assert copy is not None
            if (grad_UD := copy.weight_UD.grad) is None:
                continue
            copy.weight_UD.grad = None
            copy.state_U1 += grad_UD.square().mean(1, keepdim=True)
            copy.weight_UD.addcdiv_(grad_UD, copy.state_U1.sqrt() + EPS, value=-lr)
            self._write(found)
        self._used.clear()
        self.steps += 1
        if self.steps % self.every == 0:
            self._flush()
            self._assign()

    def _write(self, found: LookUp) -> None:
        """Write the rows of ``found`` back."""
        assert found.rows_U is not None
        assert found.copy is not None
        self._host.write(found.rows_U, found.copy)

    # -- ahead of the computation --------------------------------------------------------------------------------------

    @contextmanager
    def background(self) -> "Iterator[ThreadPoolExecutor]":
        """A thread that looks up and reads rows."""
        if self._worker is not None:
            raise ConfigError("this table is already being prefetched; finish the other prefetched(...) loop first")
        with ThreadPoolExecutor(1, thread_name_prefix="table-rows") as worker:
            self._worker = worker
            try:
                yield worker
            finally:
                self._worker = None

    def _flush(self) -> None:
        """Wait for the worker and for the copies; afterwards host memory has all updates."""
        if self._worker is not None:
            self._worker.submit(int).result()
        self._host.synchronise()

    def read_ahead(self, found: LookUp, before: LookUp | None) -> LookUp:
        """Find and read rows while ``before`` is computed; :meth:`update_prefetched` follows its step."""
        self.find(found)
        assert found.rows_U is not None
        if before is not None and before.rows_U is not None and len(before.rows_U):
            with self._host.look_ups():
                at_U = torch.searchsorted(before.rows_U, found.rows_U).clamp_(max=len(before.rows_U) - 1)
                found.shared = before.rows_U[at_U] == found.rows_U, at_U
        return self.read(found)

    @torch.no_grad()
    def update_prefetched(self, found: LookUp, before: LookUp) -> None:
        """Bring ``found``, read ahead, up to date with the step of ``before``."""
        if found.version != self.version:
            self.read(self.find(found))
        elif found.shared is not None:
            ours, theirs, (shared_U, at_U) = found.wait(), before.wait(), found.shared
            for mine, other in ((ours.weight_UD, theirs.weight_UD), (ours.state_U1, theirs.state_U1)):
                torch.where(shared_U[:, None], other.index_select(0, at_U), mine, out=mine)

    # -- assignment ----------------------------------------------------------------------------------------------------

    def _assign(self) -> None:
        """Merge the history into the kept ids, keep the best of each bucket, and start new rows."""
        with self._host.look_ups():
            none = torch.empty(0, dtype=torch.int64, device=self.device)
            hashes, slots = self.ids.assign(torch.cat([*self._history, none]), self.steps)
            self._history.clear()
            slots = slots.cpu()
        self._start_rows(unsigned_hashes(hashes), slots)
        self.version += 1

    def _start_rows(self, hashes: np.ndarray, rows: "Tensor | slice") -> None:
        """Initialise rows: weights are uniform within ± width^-½, a function of seed, hash and column."""
        start = torch.from_numpy((hashes ^ np.uint64(splitmix64(self.seed & MASK64))).view(np.int64))
        column = np.arange(self.width).astype(np.uint64) * np.uint64(GOLDEN_GAMMA)
        column_D = torch.from_numpy(column.view(np.int64)).to(self.device)
        chunk = max(1, CHUNK_NUMBERS // self.width)
        for first in range(0, len(start), chunk):
            bits = _splitmix64_mix(start[first : first + chunk].to(self.device)[:, None] + column_D[None, :])
            fresh = (((_shift(bits, 40).float() + 0.5) / (1 << 23) - 1) * self._scale).cpu()
            if isinstance(rows, slice):
                self._host.weight_RD[first : first + chunk] = fresh
            else:
                self._host.weight_RD[rows[first : first + chunk]] = fresh
        self._host.state_R1[rows] = 0

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The whole table of all ranks, the same for any number of them; all ranks call it together."""
        self._flush()
        first, kept = self.first_bucket * self.per_bucket, self.ids.kept
        # Of the history only how often each id was seen matters.
        with self._host.look_ups():
            history = torch.cat([*self._history, kept.hashes[:0]]).cpu().sort().values
            kept = OwnRowIds(*(each.cpu() for each in kept))
        local = {
            "weight_RD": self._host.weight_RD, "state_R": self._host.state_R1[:, 0], "slots": kept.slots + first,
            "counts": kept.counts, "last": kept.last, "hashes": kept.hashes ^ SIGN, "history": history ^ SIGN,
        }  # fmt: skip
        whole = {
            name: self.axis.all_gather_uneven_(x.contiguous(), self.axis.all_gather_int(len(x))).clone()
            for name, x in local.items()
        }
        return whole | {"steps": torch.tensor(self.steps)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from :meth:`state` of any number of ranks; raises ConfigError for a table of a different size."""
        self._flush()
        rows, width = state["weight_RD"].shape
        if (rows, width) != (BUCKETS * self.per_bucket, self.width):
            raise ConfigError(
                f"the saved table has {rows} rows of {width} numbers, and this one {BUCKETS * self.per_bucket} of "
                f"{self.width}; create it with the saved sizes"
            )
        first, stop = self.first_bucket * self.per_bucket, self.stop_bucket * self.per_bucket
        self._host.weight_RD.copy_(state["weight_RD"][first:stop])
        self._host.state_R1[:, 0] = state["state_R"][first:stop]

        def mine(name: str) -> tuple[Tensor, Tensor]:
            """(hashes, which of them this rank owns)."""
            hashes = state[name] ^ SIGN
            bucket = bucket_of(hashes)
            return hashes, (bucket >= self.first_bucket) & (bucket < self.stop_bucket)

        with self._host.look_ups():
            hashes, keep = mine("hashes")
            slots, counts, last = (state[name][keep].to(self.device) for name in ("slots", "counts", "last"))
            self.ids.kept = OwnRowIds(hashes[keep].to(self.device), slots - first, counts, last)
            history, keep = mine("history")
            self._history = [history[keep].to(self.device)]
        self._used.clear()
        self.steps, self.version = int(state["steps"]), self.version + 1


def _shift(x: Tensor, bits: int) -> Tensor:
    """A logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix64_mix(x: Tensor) -> Tensor:
    """:func:`colonnade.data.loader.splitmix64_mix` on any device."""
    x = (x ^ _shift(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shift(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shift(x, 31)

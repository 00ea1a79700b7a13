"""An embedding table for any number of ids: the most used ones have a row of their own (managed collisions).

    h = mix(id)              a bijection of 64 bits; its top 6 bits are the id's bucket
    row = slot of h          by binary search among the kept ids, or the bucket's shared row for all others
    every k steps            ids seen since are merged with the kept ones, and the best of each bucket stay:
                             lfu: count;  lru: last step;  decay: count / (age + 1)^decay

(TorchRec's managed collisions and DistanceLFU, Ivchenko 2022, ACM RecSys.) A new id's row, and the optimizer's state of
it, start anew: from a hash of the id, so that neither its slot nor its history matters. Each of the 64 buckets decides
by itself, and ranks own whole ones: the table is the same bit for bit on any number of ranks. Ids travel to the rank of
their bucket and rows back (two all-to-alls); gradients are added up in the order of the global batch.

    table = ManagedTable(1 << 20, 64, policy="lfu")
    x_ND = table(ids_N); loss(x_ND).backward(); table.step(lr=0.05)

The optimizer is row-wise Adagrad (Gupta 2014): only rows that were read have gradients, and one number of state.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from colonnade.data.loader import GOLDEN_GAMMA, MASK64, splitmix64, splitmix64_mix
from colonnade.errors import ConfigError
from colonnade.parallel.axis import SOLO, Axis

Policy = Literal["lfu", "lru", "decay"]
BUCKET_BITS = 6
BUCKETS = 1 << BUCKET_BITS
EPS = 1e-8


@dataclass
class LookUp:
    """Rows of one batch of ids, on the ranks that own them."""

    hashes_M: np.ndarray
    """Of the ids that this rank owns, in the order of the global batch."""
    rows_U: np.ndarray
    """Their rows, each once, in order."""
    inverse_M: Tensor
    send: list[int]
    receive: list[int]
    order_N: Tensor
    """The ids of this rank's batch in the order in which they were sent."""
    version: int
    """Of the assignment of rows."""
    hits: int = 0
    """How many ids have rows of their own."""
    x_UD: Tensor | None = None
    """The rows on the device, a leaf whose gradient is theirs."""


class Kept(NamedTuple):
    """The ids with rows of their own, by ascending hash."""

    hashes: np.ndarray
    slots: np.ndarray
    counts: np.ndarray
    last: np.ndarray
    """The last step in which each was seen."""


class ManagedTable:
    """This rank's buckets of a table of ``rows`` rows of ``width`` numbers; ``rows`` is a multiple of 64.

    Rows are in host memory, and looked-up ones go to ``device``. Raises :class:`ConfigError` for settings that do not
    apply.
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
        if rows % BUCKETS or rows < 2 * BUCKETS or axis.size > BUCKETS or every < 1:
            raise ConfigError(
                f"a managed table has a multiple of {BUCKETS} rows, at least {2 * BUCKETS}, on up to {BUCKETS} ranks; "
                f"got {rows} on {axis.size}"
            )
        self.policy, self.every, self.decay, self.seed = policy, every, decay, seed
        self.axis, self.device, self.width = axis, torch.device(device), width
        self.per_bucket = rows // BUCKETS
        self.first_bucket, self.stop_bucket = (-(-BUCKETS * r // axis.size) for r in (axis.rank, axis.rank + 1))
        local = (self.stop_bucket - self.first_bucket) * self.per_bucket
        first = self.first_bucket * self.per_bucket
        self._scale = width**-0.5
        # A shared row starts as if its number were an id.
        self.weight_RD = self._initial(splitmix64_mix(np.arange(first, first + local).astype(np.uint64)))
        self.state_R = torch.zeros(local)
        none = np.empty(0, np.int64)
        self.kept = Kept(np.empty(0, np.uint64), none, none, none)
        self._history: list[np.ndarray] = []
        self._used: list[LookUp] = []
        self.steps = 0
        self.version = 0
        """How often rows were assigned anew."""
        self.looked_up = self.hits = 0
        """Ids of this rank's buckets in all batches, and those with a row of their own."""

    # -- one step ------------------------------------------------------------------------------------------------------

    def __call__(self, ids_N: Tensor) -> Tensor:
        """x_ND of this rank's part of the batch; all ranks call it together."""
        return self.use(self.read(self.look_up(ids_N)))

    def look_up(self, ids_N: Tensor) -> LookUp:
        """Send ids to the ranks that own them, and find their rows."""
        hashes = splitmix64_mix(ids_N.cpu().numpy().astype(np.uint64) + np.uint64(GOLDEN_GAMMA))
        send = receive = [len(hashes)]
        order, hashes_M = np.arange(len(hashes)), hashes
        if self.axis.size > 1:
            owner = (hashes >> np.uint64(64 - BUCKET_BITS)).astype(np.int64) * self.axis.size // BUCKETS
            order = np.argsort(owner, kind="stable")
            send = np.bincount(owner, minlength=self.axis.size).tolist()
            ones = [1] * self.axis.size
            receive = self.axis.exchange(torch.tensor(send), ones, ones).tolist()
            sent = torch.from_numpy(hashes[order].view(np.int64))
            hashes_M = self.axis.exchange(sent, send, receive).numpy().view(np.uint64)
        found = LookUp(hashes_M, np.empty(0, np.int64), torch.empty(0), send, receive, torch.from_numpy(order), -1)
        self._find(found)
        return found

    def _find(self, found: LookUp) -> None:
        """Set the rows of ``found`` by the present assignment."""
        rows_M, hit_M = self._rows(found.hashes_M)
        found.hits = int(hit_M.sum())
        found.rows_U, inverse = np.unique(rows_M, return_inverse=True)
        found.inverse_M, found.version, found.x_UD = torch.from_numpy(inverse).to(self.device), self.version, None

    def _rows(self, hashes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(row within this rank's, whether it is the id's own)."""
        bucket = (hashes >> np.uint64(64 - BUCKET_BITS)).astype(np.int64) - self.first_bucket
        shared = (bucket + 1) * self.per_bucket - 1
        if not len(self.kept.hashes):
            return shared, np.zeros(len(hashes), bool)
        at = np.minimum(np.searchsorted(self.kept.hashes, hashes), len(self.kept.hashes) - 1)
        hit = self.kept.hashes[at] == hashes
        return np.where(hit, self.kept.slots[at], shared), hit

    def read(self, found: LookUp) -> LookUp:
        """Copy the rows to the device; may run in another thread than :meth:`step` if :meth:`mend` follows."""
        rows = torch.from_numpy(found.rows_U)
        found.x_UD = self.weight_RD.index_select(0, rows).to(self.device, non_blocking=True)
        return found

    def mend(self, found: LookUp, updated_U: np.ndarray) -> None:
        """Bring ``found``, read before the last step, up to date; ``updated_U`` are the rows that this changed."""
        if found.version != self.version:
            self._find(found)
            self.read(found)
            return
        assert found.x_UD is not None, "rows are read before they are mended"
        stale = np.flatnonzero(np.isin(found.rows_U, updated_U, assume_unique=True))
        rows = torch.from_numpy(found.rows_U[stale])
        found.x_UD[torch.from_numpy(stale).to(self.device)] = self.weight_RD.index_select(0, rows).to(self.device)

    def use(self, found: LookUp) -> Tensor:
        """x_ND of a batch that was looked up and read; its ids count from now on."""
        assert found.version == self.version, "rows were assigned anew since; look them up again"
        assert found.x_UD is not None, "look up, read, use"
        self._history.append(found.hashes_M)
        self._used.append(found)
        self.looked_up += len(found.hashes_M)
        self.hits += found.hits
        x_MD = found.x_UD.requires_grad_().index_select(0, found.inverse_M)
        if self.axis.size == 1:
            return x_MD
        x_ND = self.axis.exchange(x_MD, found.receive, found.send)
        back_N = torch.empty_like(found.order_N)
        back_N[found.order_N] = torch.arange(len(back_N))
        return x_ND.index_select(0, back_N.to(self.device))

    @torch.no_grad()
    def step(self, lr: float) -> np.ndarray:
        """Update the rows that were used, and assign rows anew every so many steps; returns the updated rows."""
        updated: list[np.ndarray] = []
        assert len(self._used) <= 1, "one batch a step: gradients of several would need their sum"
        for found in self._used:
            assert found.x_UD is not None
            if found.x_UD.grad is None:
                continue
            rows, grad_UD = torch.from_numpy(found.rows_U), found.x_UD.grad.cpu()
            state_U = self.state_R[rows] + grad_UD.square().mean(1)
            self.state_R[rows] = state_U
            self.weight_RD[rows] -= lr * grad_UD / (state_U.sqrt() + EPS)[:, None]
            updated.append(found.rows_U)
        self._used.clear()
        self.steps += 1
        if self.steps % self.every == 0:
            self._assign()
        return updated[0] if updated else np.empty(0, np.int64)

    # -- assignment ----------------------------------------------------------------------------------------------------

    def _assign(self) -> None:
        """Merge the history into the kept ids, keep the best of each bucket, and start new rows."""
        kept, history = self.kept, np.concatenate([*self._history, np.empty(0, np.uint64)])
        self._history.clear()
        seen, seen_counts = np.unique(history, return_counts=True)
        hashes, inverse = np.unique(np.concatenate([kept.hashes, seen]), return_inverse=True)
        counts, last, slots = (np.zeros(len(hashes), np.int64) for _ in range(3))
        slots -= 1
        old, new = inverse[: len(kept.hashes)], inverse[len(kept.hashes) :]
        counts[old], last[old], slots[old] = kept.counts, kept.last, kept.slots
        counts[new] += seen_counts
        last[new] = self.steps
        bucket = (hashes >> np.uint64(64 - BUCKET_BITS)).astype(np.int64) - self.first_bucket
        # Among equals those with a row stay, then the lowest hash.
        order = np.lexsort((hashes, slots < 0, -self._scores(counts, last), bucket))
        place = np.arange(len(order)) - np.searchsorted(bucket[order], bucket[order])
        stays = np.sort(order[place < self.per_bucket - 1])
        hashes, counts, last, slots, bucket = (x[stays] for x in (hashes, counts, last, slots, bucket))
        fresh = np.flatnonzero(slots < 0)
        slots[fresh] = self._free(slots[slots >= 0], bucket[fresh])
        self.kept = Kept(hashes, slots, counts, last)
        self.weight_RD[slots[fresh]] = self._initial(hashes[fresh])
        self.state_R[slots[fresh]] = 0
        self.version += 1

    def _scores(self, counts: np.ndarray, last: np.ndarray) -> np.ndarray:
        if self.policy == "lfu":
            return counts
        if self.policy == "lru":
            return last
        return counts / (self.steps - last + 1.0) ** self.decay

    def _free(self, used: np.ndarray, bucket_of_new: np.ndarray) -> np.ndarray:
        """Free slots for new ids, which are in the order of their buckets: the lowest of each."""
        is_free = np.ones((self.stop_bucket - self.first_bucket, self.per_bucket), bool)
        is_free[:, -1] = False  # shared
        is_free.reshape(-1)[used] = False
        wanted = np.bincount(bucket_of_new, minlength=len(is_free))
        taken = is_free & (is_free.cumsum(1) <= wanted[:, None])
        return np.flatnonzero(taken)

    def _initial(self, hashes: np.ndarray) -> Tensor:
        """Uniform within ± width^-½, a function of seed, hash and column."""
        column = np.arange(self.width).astype(np.uint64) * np.uint64(GOLDEN_GAMMA)
        start = hashes ^ np.uint64(splitmix64(self.seed & MASK64))
        bits = splitmix64_mix(start[:, None] + column[None, :]) >> np.uint64(40)
        return torch.from_numpy(((bits.astype(np.float32) + 0.5) / (1 << 23) - 1) * np.float32(self._scale))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """The whole table of all ranks, the same for any number of them; all ranks call it together."""
        first = self.first_bucket * self.per_bucket
        history = np.concatenate([*self._history, np.empty(0, np.uint64)])
        # Of the history only how often each id was seen matters.
        seen, counts = np.unique(history, return_counts=True)
        local = {
            "weight_RD": self.weight_RD, "state_R": self.state_R, "slots": torch.from_numpy(self.kept.slots + first),
            "counts": torch.from_numpy(self.kept.counts), "last": torch.from_numpy(self.kept.last),
            "hashes": torch.from_numpy(self.kept.hashes.view(np.int64)),
            "history": torch.from_numpy(np.repeat(seen, counts).view(np.int64)),
        }  # fmt: skip
        whole = {
            name: self.axis.all_gather_uneven_(x.contiguous(), self.axis.all_gather_int(len(x))).clone()
            for name, x in local.items()
        }
        return whole | {"steps": torch.tensor(self.steps)}

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from :meth:`state` of any number of ranks; raises ConfigError for a table of another size."""
        rows, width = state["weight_RD"].shape
        if (rows, width) != (BUCKETS * self.per_bucket, self.width):
            raise ConfigError(
                f"the saved table has {rows} rows of {width} numbers, and this one {BUCKETS * self.per_bucket} of "
                f"{self.width}; make it with the saved sizes"
            )
        first, stop = self.first_bucket * self.per_bucket, self.stop_bucket * self.per_bucket
        self.weight_RD, self.state_R = (state[name][first:stop].clone() for name in ("weight_RD", "state_R"))

        def mine(name: str) -> np.ndarray:
            hashes = state[name].numpy().view(np.uint64)
            bucket = (hashes >> np.uint64(64 - BUCKET_BITS)).astype(np.int64)
            return (bucket >= self.first_bucket) & (bucket < self.stop_bucket)

        keep = mine("hashes")
        slots, counts, last = (state[name].numpy()[keep] for name in ("slots", "counts", "last"))
        self.kept = Kept(state["hashes"].numpy().view(np.uint64)[keep], slots - first, counts, last)
        self._history = [state["history"].numpy().view(np.uint64)[mine("history")]]
        self._used.clear()
        self.steps, self.version = int(state["steps"]), self.version + 1

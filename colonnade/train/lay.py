"""A micro-batch as a model takes it: the stream, who sees whom, the targets; or this context rank's share of them."""

from torch import Tensor

from colonnade.data import Batch
from colonnade.model import Packed, Ring, Stream
from colonnade.parallel.axis import Axis


def lay(batch: Batch, cp: Axis) -> tuple[Stream, Packed | Ring, Tensor]:
    """(stream, attend, targets_t) of ``batch`` on this rank of the context axis."""
    packed = Packed(batch.cu_seqlens, batch.longest, batch.equal)
    if cp.size == 1:
        return Stream(batch.tokens_T, batch.positions_T), packed, batch.targets_T
    ring = Ring.of(packed, len(batch.tokens_T), cp)
    mine_t = ring.index_t
    return Stream(batch.tokens_T[mine_t], batch.positions_T[mine_t]), ring, batch.targets_T[mine_t]

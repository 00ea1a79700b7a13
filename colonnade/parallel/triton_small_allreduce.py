"""A sum, or a gather, of small messages in one kernel that reads the peers' memory over NVLink.

    call i:   my message into slot i mod 2 of my buffer;  my flag i to every peer;  wait for every peer's flag i;
              read all peers' slots, in the order of ranks

A collective of a library costs tens of microseconds whatever its size: it is made of steps between ranks, each a round
trip. Here every rank reads everything in one, which is the least for messages so small that reading (ranks − 1) of them
costs nothing. Sums are in float32, in the order of ranks, rounded once: every rank has the same bits, each time.

Why two slots are enough, without a second barrier: whoever writes in call i has ended call i − 1, for which all peers
had begun theirs, and so ended i − 2, the last one that read this slot. Blocks of a message are independent of each
other, each with flags of its own. A flag may be one ahead of what is awaited, never more, and numbers may wrap around.
The number of the call is kept on the device, once for each block that there may be, so that a recorded graph goes on
counting; nothing here asks the host. Only plain loads and stores, and atomics on flags, touch a peer: no multicast.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

import triton
from torch import Tensor
from triton import language as tl


@triton.jit
def at_peer(table_ptr, r, kind: tl.constexpr):
    """The memory of rank ``r``, 16 bytes a unit at least."""
    return tl.multiple_of(tl.load(table_ptr + r).to(tl.pointer_type(kind), bitcast=True), 16)


@triton.jit
def _late(flags_ptr, call, others):
    """How many of the others have not come to this call."""
    ahead = tl.atomic_add(flags_ptr, 0, others, sem="acquire", scope="sys") - call
    return tl.sum((others & (ahead != 0) & (ahead != 1)).to(tl.int32), 0)


@triton.jit
def exchange(
    out_ptr, x_ptr, slots_ptr, flags_ptr, calls_ptr, n, slot_bytes,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """One block of ``n`` numbers: of the sum (n,), or of all ranks' (RANKS, n).

    ``slots_ptr`` and ``flags_ptr`` hold the addresses of every rank's two slots and of its flags (BLOCKS, RANKS), where
    rank r sets those of column r. ``calls_ptr`` counts, for each of BLOCKS blocks, all calls there were.
    """
    kind: tl.constexpr = x_ptr.dtype.element_ty
    block = tl.program_id(0)
    call = tl.load(calls_ptr + block) + 1
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n)
    slot = (call & 1) * (slot_bytes // (kind.primitive_bitwidth // 8))
    tl.store(at_peer(slots_ptr, RANK, kind) + slot + i, x, i < n)
    tl.debug_barrier()  # all threads have written before one of them tells
    peers = tl.arange(0, BLOCK_R)  # side by side: each of these takes as long as a message there and back
    others = (peers < RANKS) & (peers != RANK)
    theirs = tl.load(flags_ptr + peers, others, 0).to(tl.pointer_type(tl.int32), bitcast=True) + block * RANKS + RANK
    tl.atomic_xchg(theirs, call, others, sem="release", scope="sys")
    mine = at_peer(flags_ptr, RANK, tl.int32) + block * RANKS + peers
    while _late(mine, call, others) != 0:
        pass
    tl.debug_barrier()  # none reads before those that waited
    if SUM:
        total = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(RANKS):
            total += tl.load(at_peer(slots_ptr, r, kind) + slot + i, i < n).to(tl.float32)
        tl.store(out_ptr + i, total.to(kind), i < n)
    else:
        for r in tl.static_range(RANKS):
            tl.store(out_ptr + r * n + i, tl.load(at_peer(slots_ptr, r, kind) + slot + i, i < n), i < n)
    counted = block + tl.arange(0, BLOCKS) * tl.num_programs(0)
    tl.store(calls_ptr + counted, call, counted < BLOCKS)


def run(
    out: Tensor, x: Tensor, addresses: tuple[Tensor, Tensor], calls: Tensor, slot_bytes: int, rank: int, block: int,
    *, summed: bool,
) -> None:  # fmt: skip
    """The sum of all ranks' ``x`` into ``out``, or all of them (see
    :class:`colonnade.parallel.small_allreduce.SmallAllReduce`).
    """
    ranks = len(addresses[0])
    exchange[triton.cdiv(x.numel(), block),](
        out, x, *addresses, calls, x.numel(), slot_bytes, RANK=rank, RANKS=ranks, BLOCK_R=triton.next_power_of_2(ranks),
        BLOCK=block, BLOCKS=len(calls), SUM=summed,
    )  # fmt: skip

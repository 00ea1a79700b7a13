"""One-shot all-reduce and all-gather of small messages: one kernel that reads the peers' memory over NVLink.

    call i:   write my message into slot i mod 2 of my buffer; write flag i to every peer; wait for every peer's flag i;
              read all peers' slots in rank order

NCCL's collectives take tens of microseconds at any size, because they need several steps between ranks, each a round
trip. Here every rank reads all messages in one step, which is the minimum, and for small messages the extra reads cost
almost nothing. Sums are in float32, in rank order, rounded once: bitwise equal on every rank and in
every run.

Two slots are enough without a second barrier: a rank that writes in call i has finished call i − 1, for which all peers
had begun theirs, and so had finished i − 2, the last one that read this slot. The blocks of a message are independent;
each has its own flags. A flag may be one ahead of the awaited value, never more, and the counter may wrap around. The
call counter is kept on the device, one per possible block, so that a captured CUDA graph continues counting; nothing
synchronises with the host. Only plain loads and stores, and atomics on flags, access a peer: no multicast.
"""

import triton
from torch import Tensor
from triton import language as tl


@triton.jit
def peer_pointer(table_ptr, r, kind: tl.constexpr):
    """Rank ``r``'s memory, aligned to 16 bytes at least."""
    return tl.multiple_of(tl.load(table_ptr + r).to(tl.pointer_type(kind), bitcast=True), 16)


@triton.jit
def _pending_peers(flags_ptr, call, others):
    ahead = tl.atomic_add(flags_ptr, 0, others, sem="acquire", scope="sys") - call
    return tl.sum((others & (ahead != 0) & (ahead != 1)).to(tl.int32), 0)


@triton.jit
def exchange(
    out_ptr, x_ptr, slots_ptr, flags_ptr, calls_ptr, n, slot_bytes,
    RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """Compute one block of ``n`` elements: of the sum (n,), or of the gathered messages (RANKS, n).

    ``slots_ptr`` and ``flags_ptr`` hold the addresses of every rank's two slots and of its flags (BLOCKS, RANKS); rank
    r writes column r. ``calls_ptr`` counts all calls so far, for each of BLOCKS blocks.
    """
    kind: tl.constexpr = x_ptr.dtype.element_ty
    block = tl.program_id(0)
    call = tl.load(calls_ptr + block) + 1
    i = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, i < n)
    slot = (call & 1) * (slot_bytes // (kind.primitive_bitwidth // 8))
    tl.store(peer_pointer(slots_ptr, RANK, kind) + slot + i, x, i < n)
    tl.debug_barrier()  # all threads have written before one sets the flags
    peers = tl.arange(0, BLOCK_R)  # in parallel: each of these takes a round trip
    others = (peers < RANKS) & (peers != RANK)
    theirs = tl.load(flags_ptr + peers, others, 0).to(tl.pointer_type(tl.int32), bitcast=True) + block * RANKS + RANK
    tl.atomic_xchg(theirs, call, others, sem="release", scope="sys")
    mine = peer_pointer(flags_ptr, RANK, tl.int32) + block * RANKS + peers
    while _pending_peers(mine, call, others) != 0:
        pass
    tl.debug_barrier()  # no thread reads before the waiting ones are done
    if SUM:
        total = tl.zeros((BLOCK,), tl.float32)
        for r in tl.static_range(RANKS):
            total += tl.load(peer_pointer(slots_ptr, r, kind) + slot + i, i < n).to(tl.float32)
        tl.store(out_ptr + i, total.to(kind), i < n)
    else:
        for r in tl.static_range(RANKS):
            tl.store(out_ptr + r * n + i, tl.load(peer_pointer(slots_ptr, r, kind) + slot + i, i < n), i < n)
    counters = block + tl.arange(0, BLOCKS) * tl.num_programs(0)
    tl.store(calls_ptr + counters, call, counters < BLOCKS)


def run(
    out: Tensor, x: Tensor, addresses: tuple[Tensor, Tensor], calls: Tensor, slot_bytes: int, rank: int, block: int,
    *, summed: bool,
) -> None:  # fmt: skip
    """Write the sum of all ranks' ``x`` to ``out``, or all of them.

    See :class:`~colonnade.parallel.symmetric_memory.SmallAllReduce`.
    """
    ranks = len(addresses[0])
    exchange[triton.cdiv(x.numel(), block),](
        out, x, *addresses, calls, x.numel(), slot_bytes, RANK=rank, RANKS=ranks, BLOCK_R=triton.next_power_of_2(ranks),
        BLOCK=block, BLOCKS=len(calls), SUM=summed,
    )  # fmt: skip

"""Inter-rank Triton kernels, interpreted on a CPU: ``TRITON_INTERPRET=1 python -m tests.interpreted_ranks``.

Processes with shared memory stand in for GPUs with peer access. Blocks have 16 elements, so that there are many.
"""

import multiprocessing as mp
import tempfile
import warnings
from pathlib import Path

import torch
from torch import Tensor

from colonnade.kernels.attention import reference, triton_decode, triton_merge
from colonnade.kernels.attention.decode_tiles import OVERRIDE, Tiles
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.softmax_state import State
from colonnade.parallel.axis import Axis
from colonnade.parallel.symmetric_memory import SmallAllReduce

SLOT_BYTES, BLOCKS = 1024, 16
SIZES = ((50,), (9, 20), (7,), (4, 48), (1, 1))
CALLS = 2**31 - 8
"""Initial call counter, close to where it wraps around."""


def message(call: int, rank: int) -> Tensor:
    draw = torch.randn(SIZES[call % len(SIZES)], generator=torch.Generator().manual_seed(100 * call + rank))
    return draw.to((torch.float32, torch.float16)[call % 2])


def exchange(rank: int, ranks: int, folder: str) -> None:
    """On one rank: sums and gathers of many sizes and dtypes in sequence."""
    flags_bytes = 4 * BLOCKS * ranks
    size = 2 * SLOT_BYTES + flags_bytes
    held_by = [torch.from_file(f"{folder}/{r}", shared=True, size=size, dtype=torch.uint8) for r in range(ranks)]
    addresses = torch.tensor([memory.data_ptr() for memory in held_by])
    calls = torch.full((BLOCKS,), CALLS, dtype=torch.int32)
    small = SmallAllReduce(
        ranks, rank, addresses, addresses + 2 * SLOT_BYTES, calls, (SLOT_BYTES, SLOT_BYTES), held_by, SLOT_BYTES, 16
    )
    axis = Axis("ranks", ranks, rank, "nobody's", small)
    for call in range(5):
        x, *others = (message(call, (rank + r) % ranks) for r in range(ranks))
        parts = sorted(zip([(rank + r) % ranks for r in range(ranks)], [x, *others], strict=True), key=lambda p: p[0])
        total = torch.zeros_like(x, dtype=torch.float32)
        for _, part in parts:
            total += part.float()
        assert torch.equal(axis.fan_in(x), total.to(x.dtype)), (call, "the sum must be bitwise that in rank order")
        if x.nbytes % 4 == 0:
            whole = torch.stack([part for _, part in parts])
            assert torch.equal(axis.all_gather_(x), whole), call
            assert torch.equal(axis.join(x, 0, ranks * len(x)), whole.flatten(0, 1)), call
    assert not small.can_sum(torch.zeros(SLOT_BYTES))
    assert not small.can_sum(torch.zeros(0))
    assert not small.can_sum(torch.zeros(3, requires_grad=True))
    assert not small.can_sum(torch.zeros(3, dtype=torch.float64))
    assert not small.can_gather(torch.zeros(3, dtype=torch.float16))
    assert not small.can_gather(torch.zeros(3, dtype=torch.float16)[1:])
    assert len(set(calls.tolist())) == 1, "every block must count all calls"
    Path(folder, f"{rank}.done").touch()


def check_exchange() -> int:
    """Sums and gathers on three ranks."""
    ranks = 3
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            Path(folder, str(rank)).write_bytes(bytes(2 * SLOT_BYTES + 4 * BLOCKS * ranks))
        start = mp.get_context("fork").Process
        processes = [start(target=exchange, args=(rank, ranks, folder)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(60)
            process.kill()
        assert [Path(folder, f"{rank}.done").exists() for rank in range(ranks)] == [True] * ranks
    return ranks


def check_merge() -> int:
    """Merging with empty ranks, with all ranks empty, and with odd sizes."""
    count = 0
    for ranks, T, N, H in ((2, 3, 4, 16), (3, 1, 1, 5), (4, 0, 2, 8), (5, 7, 3, 80)):
        draw = torch.Generator().manual_seed(ranks)
        states = [State(torch.randn(T, N, H, generator=draw), torch.randn(T, N, generator=draw)) for _ in range(ranks)]
        states[1].lse[:], states[1].o[:] = -torch.inf, 0
        if T:
            for state in states:
                state.lse[0], state.o[0] = -torch.inf, 0
        each = torch.stack([reference.pack_state(state) for state in states])
        for dtype in (torch.float32, torch.float16):
            got, right = triton_merge.merge_states(each, [], dtype), reference.merge_states(each, [], dtype)
            assert got.dtype == right.dtype == dtype
            assert torch.allclose(got, right, atol=1e-6 if dtype == torch.float32 else 1e-3), (ranks, T, N, H)
        more = [State(states[0].o + 1, states[0].lse)]
        assert torch.equal(
            triton_merge.merge_states(each, more, torch.float32), reference.merge_states(each, more, torch.float32)
        )
        count += 1
    return count


def check_local_state() -> int:
    """A rank's partial state equals plain torch's, also without keys."""
    OVERRIDE[:] = [Tiles(16, 4, 2, 2, 2, 32)]
    lengths, page = [37, 0, 5, 16], 4
    draw = torch.Generator().manual_seed(0)
    pages_RP = torch.randperm(40, generator=draw).view(4, 10).int()
    k, v = torch.randn(2, 40, page, 2, 16, generator=draw)
    q = torch.randn(4, 6, 16, generator=draw)
    table = PageTable(pages_RP, torch.arange(5).int(), torch.tensor(lengths).int(), page, 1, 37)
    got, right = triton_decode.sharded_state(q, k, v, table), reference.sharded(q, k, v, table)
    for a, b in zip(got, right, strict=True):
        assert torch.equal(a.isfinite(), b.isfinite())
        assert torch.allclose(a[a.isfinite()], b[b.isfinite()], atol=1e-5)
    assert got.lse[1].isneginf().all()
    wide = [torch.randn(*shape, generator=draw) for shape in ((1, 2, 300), (40, page, 1, 300), (40, page, 1, 300))]
    alone = PageTable(pages_RP[:1], torch.arange(2).int(), torch.tensor([9]).int(), page, 1, 9)
    assert torch.equal(triton_decode.sharded_state(*wide, alone).o, reference.sharded(*wide, alone).o)
    latent = torch.randn(40, page, 1, 24, generator=draw)
    q = torch.randn(4, 6, 24, generator=draw)
    got, right = (
        attend(q, latent, latent, table, values=16) for attend in (triton_decode.sharded_state, reference.sharded)
    )
    for a, b in zip(got, right, strict=True):
        assert a.shape == b.shape
        assert torch.equal(a.isfinite(), b.isfinite())
        assert torch.allclose(a[a.isfinite()], b[b.isfinite()], atol=1e-5)
    return 3


if __name__ == "__main__":
    warnings.simplefilter("error")
    for check in (check_exchange, check_merge, check_local_state):
        print(f"{check.__name__}: {check()} cases", flush=True)

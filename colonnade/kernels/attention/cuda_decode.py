"""Flash-Decoding in CUDA C++ for Hopper (cuda_decode.cu): supported inputs, block sizes, launch.

It executes the same plans as the Triton kernel (:mod:`~colonnade.kernels.attention.triton_split_kv`), which handles
everything else: float32, more query rows per request than fit its registers, pages of less than 16 tokens, other GPUs,
and machines without NVRTC. The kernel is persistent, with one block per SM. Its speed depends on the bytes in flight,
not on arithmetic, so warps and stages of each warp's ring fill the shared memory.

Split lines are merged in the same launch (``MERGE``), unless a prefix is shared: then states go to slots and
:mod:`~colonnade.kernels.attention.triton_merge` adds them. With fixed splits (``FIXED``) all sums follow one tree over
the positions of the keys, so that their bits depend neither on the batch nor on rows, teams or pieces.

Latents of up to 16 query rows, as of one rank of eight, have their own kernel (cuda_decode_mla.cu), in which a block
rather than a warp owns the ring. Steps of a few keys per request have one that needs no plan (cuda_decode_short.cu):
each warp reads one tile. A captured graph, which must serve any lengths, does not use it.
"""

import functools
import logging
import struct
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from colonnade.kernels import nvrtc
from colonnade.kernels.attention.decode_tiles import Tiles, choose_tiles
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.split_plan import flat_offsets
from colonnade.kernels.device import multiprocessors, shared_memory_bytes
from colonnade.kernels.softmax_state import State

if TYPE_CHECKING:
    from colonnade.kernels.attention.decode_plan import DevicePlan

log = logging.getLogger(__name__)
SHARED_SOURCES = ("_common.cuh", "_tile.cuh", "_merge.cuh")
SOURCES = {
    "attend": (*SHARED_SOURCES, "_fixed.cuh", ".cu"),
    "attend_short": (*SHARED_SOURCES, "_short.cu"),
    "attend_mla": (*SHARED_SOURCES, "_mla.cu"),
}
"""Files of each kernel, compiled as one in this order."""
TOKENS = 16
"""Tokens of a tile; a tile belongs to one warp and lies within one page."""
STAGES = 4
"""Tiles in a warp's ring at most, including the one in use; with more, each load queues longer.

8-bit caches have 3, which are 1 to 3% faster than 4."""
ARCH = (9, 0)
CACHES = {torch.float8_e4m3fn: 1, torch.int8: 2}
ARGUMENTS = struct.Struct("15Q8q9i2fI")
HOPPER_BYTES = 227 * 1024
SIZES_OVERRIDE: list["BlockSizes"] = []
"""Replaces the computed sizes if not empty; for tuning and tests."""
FIXED_CHUNK = 128
"""Chunks of fixed splits are multiples of so many keys: a tile for each of 8 streams."""
FIXED_ROWS = 16
"""Rows of a block of several queries, with fixed splits; 32 take 1.6 times as long."""
TEAMS_OVERRIDE: list[int] = []
"""Replaces the computed number of teams if not empty; for tuning and tests."""
SHORT_KEYS, SHORT_MANY = 256, 128
"""Requests of at most so many keys may use the kernel without a plan, and with any number of lines..."""
SHORT_BYTES = 2**25
"""... if all keys and values have at most so many bytes, because its warps load nothing while they compute; half as
many for heads wider than 128."""
SHORT_NUMBERS = 300_000
"""With more than :data:`SHORT_MANY` keys, its warps times the width of a head are at most so many, about as many as
run at once."""
SHORT_TEAMS = (1, 2, 3, 4, 6, 8, 10, 12, 16)
"""Warps of a line: the least of these that has one for each tile."""
SHORT_WARPS = 4
"""Maximum warps of its blocks, except for those of one line, if there are more lines than multiprocessors."""
SHORT_HALF = 8
"""Of at most so many keys it reads half a tile."""


MLA_WARPS, MLA_STAGES, MLA_TOKENS = 8, 3, 64
"""Warps of a block of the kernel for latents, tiles of its ring, and tokens of a tile."""


class BlockSizes(NamedTuple):
    """Warps of a block and stages of each warp's ring."""

    warps: int
    stages: int


def shared_memory_size(width: int, cache_bytes: int, rows: int, sizes: BlockSizes, *, queries: bool = False) -> int:
    """Shared memory of a block in bytes, as in cuda_decode.cu; ``queries``: 8 rows are staged through it."""
    chunks = width * cache_bytes // 16
    row_bytes = 16 * (chunks if chunks % 8 == 0 else chunks | 1)
    ring = sizes.warps * sizes.stages * 2 * TOKENS * row_bytes
    odd = width // 8 % 8 != 0
    query_bytes = rows * (width * 2 + 4) if rows > 8 else queries * 16 * (8 * (width // 8 | odd) + odd)
    return ring + sizes.warps * (32 * (width + 4 * (width % 32 != 0)) + 64) + query_bytes


@functools.cache
def choose_sizes(
    width: int, cache_bytes: int, rows: int, max_bytes: int = HOPPER_BYTES, *, fixed: bool = False
) -> BlockSizes | None:
    """The most warps that have three stages each; None if not even three warps have.

    With ``fixed`` splits 8 or 4, so that they divide the streams of a chunk, and 8 with blocks of many rows, whose time
    is that of their products: two stages then do.
    """
    many = fixed and rows > 8
    small = rows == 8 and width * cache_bytes == 128 and cache_bytes == 2
    for warps in (8,) if many else (8, 4) if fixed else (12, 8, 6, 4, 3) if small else (8, 6, 4, 3):
        stages = [
            s
            for s in range(2 if many else 3, (STAGES if cache_bytes > 1 else 3) + 1)
            if shared_memory_size(width, cache_bytes, rows, BlockSizes(warps, s)) <= max_bytes
        ]
        if stages:
            return BlockSizes(warps, max(stages))
    return None


def choose_block(rows: int, width: int, cache_bytes: int, lines: int, blocks: int, *, fixed: bool = False) -> Tiles:
    """Sizes for plans and the slot merge, given the number of lines and of multiprocessors (``blocks``).

    If there are many lines, a block is divided into teams that read one line each: a team without a second line need
    not stop between two, which takes as long as reading 20 KB.
    """
    capability = SIZES_OVERRIDE[0] if SIZES_OVERRIDE else choose_sizes(width, cache_bytes, rows, fixed=fixed)
    assert capability is not None, "asked only for what is taken"
    teams = 1
    while rows == 8 and teams * blocks < lines and teams < 4 and capability.warps % (4 * teams) == 0:
        teams *= 2
    teams = TEAMS_OVERRIDE[0] if TEAMS_OVERRIDE else teams
    merge_tiles = choose_tiles(16, width, 2, cache_bytes)
    return merge_tiles._replace(tile=TOKENS, warps=capability.warps, stages=capability.stages, workers=teams)


@functools.cache
def _device_supported(device: torch.device) -> bool:
    """Whether this GPU is supported and NVRTC available; logs the reason once if not."""
    capability = torch.cuda.get_device_capability(device)
    reason = (
        nvrtc.unavailable_reason()
        if capability == ARCH
        else f"it is for compute capability 9.0, and {device} has {capability}"
    )
    if reason is not None:
        log.warning("decode attention runs in Triton, not in CUDA C++: %s", reason)
    return reason is None


def padded_rows(group: int, queries: int) -> int:
    """Rows of a block that holds all rows of a request, rounded up to 8."""
    return -(-group * queries // 8) * 8


def preferred(rows: int, width: int, lines: int) -> bool:
    """Whether this kernel is faster than the Triton one for ``lines`` lines in blocks of so many rows.

    With 16 rows combining and merging take twice as long: few lines are up to a fifth slower, 16 and more up to a fifth
    faster. 32 rows are always slower.
    """
    return rows == 8 or (rows == 16 and width <= 128 and lines >= 16)


def fixed_rows(group: int, queries: int) -> int:
    """Rows of a block with fixed splits: those of one query, or more if there are several."""
    return max(padded_rows(group, 1), min(padded_rows(group, queries), FIXED_ROWS))


def supports_fixed(q_TNH: Tensor, k_PpKH: Tensor) -> bool:
    """Whether the kernel supports fixed splits of this cache for decodes and for prompts, which must use one kernel."""
    group = q_TNH.shape[1] // k_PpKH.shape[2]
    return all(supports(q_TNH, k_PpKH, fixed_rows(group, queries), fixed=True) for queries in (1, FIXED_ROWS))


def supports(q_TNH: Tensor, k_PpKH: Tensor, rows: int, *, fixed: bool = False) -> bool:
    """Whether the kernel supports these queries and this cache, in blocks of ``rows`` rows, or ``fixed`` splits."""
    H, page_tokens, size = q_TNH.shape[2], k_PpKH.shape[1], k_PpKH.element_size()
    dtype_ok = k_PpKH.dtype == q_TNH.dtype or k_PpKH.dtype in CACHES
    # The accumulators of more than rows · H = 4096 elements do not fit the registers.
    size_ok = (
        H % 16 == 0
        and 64 <= H <= 256
        and rows * H <= 4096
        and rows <= 48
        and choose_sizes(H, size, rows, fixed=fixed) is not None
    )
    return (
        q_TNH.is_cuda and q_TNH.dtype in (torch.float16, torch.bfloat16) and dtype_ok and size_ok
        and page_tokens % TOKENS == 0 and _aligned(k_PpKH) and _device_supported(q_TNH.device)
    )  # fmt: skip


def supports_short(q_TNH: Tensor, k_PpKH: Tensor) -> bool:
    """Whether the kernel for a few keys supports these queries, one per request, and this cache."""
    group = q_TNH.shape[1] // k_PpKH.shape[2]
    whole = k_PpKH.dtype == q_TNH.dtype and q_TNH.shape[2] % 32 == 0
    return whole and group <= 16 and supports(q_TNH, k_PpKH, padded_rows(group, 1))


def _aligned(x: Tensor) -> bool:
    """Whether rows can be copied in 16-byte pieces."""
    size = x.element_size()
    whole = all(stride * size % 16 == 0 for stride in x.stride()[:-1])
    return x.stride(-1) == 1 and whole and x.data_ptr() % 16 == 0


@functools.cache
def source(name: str = "attend") -> str:
    """The CUDA C++ of a kernel."""
    here = Path(__file__)
    return "\n".join(here.with_name(f"cuda_decode{part}").read_text(encoding="utf-8") for part in SOURCES[name])


@functools.cache
def _kernel(name: str, constants: tuple[tuple[str, int], ...], shared: int, device: torch.device) -> nvrtc.Kernel:
    binary = nvrtc.compile_cubin(source(name), compiler_options(dict(constants)), "sm_{}{}".format(*ARCH))
    with torch.cuda.device(device):
        return nvrtc.Kernel(binary, name, shared)


def compiler_options(constants: dict[str, int]) -> list[str]:
    """Options for NVRTC: with fixed splits all variants must round identically, so the compiler may not fuse
    additions.
    """
    fixed = ["--fmad=false"] if constants["FIXED"] else []
    return ["--std=c++17", *fixed, *(f"-D{name}={value}" for name, value in constants.items())]


def compile_macros(
    q_TNH: Tensor, k_PpKH: Tensor, group: int, rows: int, tiles: Tiles, *, window: bool = False, cap: bool = False,
    slopes: bool = False, sinks: bool = False, scaled: bool = False, single: bool = True, merge: bool = True,
    early: bool = False, queries: bool = False, compute: bool = True, chunk: int | None = None, short: bool = False,
    half: bool = False, rank: int | None = None,
) -> dict[str, int]:  # fmt: skip
    """Macros of a kernel variant; ``rank`` is the width of latent values."""
    H = q_TNH.shape[2]
    return {
        "H": rank or H, "ROPE": H - rank if rank else 0, "GROUP": group, "NT": rows // 8, "PAGE": k_PpKH.shape[1],
        "WARPS": tiles.warps, "TEAM": tiles.warps // tiles.workers, "STAGES": tiles.stages,
        "BF16": int(q_TNH.dtype == torch.bfloat16), "CACHE": CACHES.get(k_PpKH.dtype, 0), "WINDOWED": int(window),
        "CAPPED": int(cap), "SLOPES": int(slopes), "SINKS": int(sinks), "SCALED": int(scaled), "SINGLE": int(single),
        "MERGE": int(merge), "EARLY": int(early), "SHARED_Q": int(queries), "COMPUTE": int(compute),
        "FIXED": chunk or 0, "SHORT": int(short), "HALF": int(half),
    }  # fmt: skip


ScoreMods = tuple[
    float | None, Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None, int | None, Tensor | None
]  # fmt: skip
"""Soft cap, ALiBi slopes, sinks, scales of keys and values, window, relative biases."""


def attend(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    state: State,
    slots: State | None,
    table: PageTable,
    ready: "DevicePlan",
    score_mods: ScoreMods,
    *,
    compute: bool = True,
) -> None:
    """Executes all pieces of a plan: whole lines are written to ``state``, states of split lines to ``slots``.

    Without ``slots`` split lines are merged here, and lines without keys written; blocks exchange states through
    :attr:`DevicePlan.mailboxes`, which belong to the plan, so a plan can be used on one stream at a time. Without
    ``compute`` only the loads run, to benchmark memory.
    """
    layout, shape = ready.layout, ready.layout.shape
    q_TNH, k_PpKH, v_PpKH = (x if _aligned(x) else x.contiguous().clone() for x in (q_TNH, k_PpKH, v_PpKH))
    (T, _, H), device = q_TNH.shape, q_TNH.device
    workers = ready.capacity.workers
    block_sizes = BlockSizes(layout.tiles.warps, layout.tiles.stages)
    limit, size = shared_memory_bytes(device), k_PpKH.element_size()
    queries = shape.rows == 8 and layout.tiles.workers == 1
    queries = queries and shared_memory_size(H, size, shape.rows, block_sizes, queries=True) <= limit
    shared = shared_memory_size(H, size, shape.rows, block_sizes, queries=queries)
    assert shared <= limit
    assert workers <= layout.tiles.workers * multiprocessors(device), "blocks that are not resident at once"
    macros = compile_macros(
        q_TNH, k_PpKH, shape.group, shape.rows, layout.tiles, **_mod_macros(score_mods),
        single=table.longest_query == 1 and len(table.lengths_R) == T, merge=slots is None,
        early=slots is not None and ready.overlaps_merge, queries=queries, compute=compute, chunk=layout.chunk,
    )  # fmt: skip
    mailboxes = (ready.mailboxes_for_launch(), None) if slots is None else slots
    _, items_at, merges_at, firsts_at, _ = flat_offsets(ready.capacity)
    arguments = _pack_arguments(
        q_TNH, k_PpKH, v_PpKH, state, (*mailboxes, ready.flat), table, score_mods, (items_at, firsts_at, merges_at), 0
    )
    kernel = _kernel("attend", tuple(macros.items()), shared, device)
    with torch.cuda.device(device):
        kernel.launch(workers // layout.tiles.workers, 32 * layout.tiles.warps, arguments, cooperative=slots is None)


def mla_shared_memory_size(width: int, rows: int) -> int:
    """Shared memory of a block of the kernel for latents in bytes, as in cuda_decode_mla.cu."""
    return MLA_STAGES * (MLA_TOKENS * width * 2 + MLA_WARPS) + 2 * rows * (MLA_TOKENS + 8) * 4 + 8 * rows


def supports_mla(q_TNH: Tensor, k_Pp1H: Tensor, rank: int, rows: int) -> bool:
    """Whether the kernel for latents supports these queries, this cache, and blocks of ``rows`` rows.

    A slot has room for scores and sums of each of rank / 2 parts of a line, and a line has at most one part per block.
    """
    H, page_tokens = q_TNH.shape[2], k_Pp1H.shape[1]
    size_ok = H % 64 == 0 and rank % (16 * MLA_WARPS) == 0 and rows <= 16
    return (
        q_TNH.is_cuda and q_TNH.dtype in (torch.float16, torch.bfloat16) and k_Pp1H.dtype == q_TNH.dtype
        and size_ok and mla_shared_memory_size(H, rows) <= HOPPER_BYTES
        and page_tokens % TOKENS == 0 and _aligned(k_Pp1H) and _device_supported(q_TNH.device)
        and 2 * multiprocessors(q_TNH.device) <= rank
    )  # fmt: skip


def mla_tiles(rows: int, width: int) -> Tiles:
    """Sizes for plans of the kernel for latents: pieces end at multiples of 16 tokens."""
    return choose_tiles(max(16, rows), width, 2, 2)._replace(
        tile=TOKENS, warps=MLA_WARPS, stages=MLA_STAGES, workers=1, overlap=False
    )


def attend_mla(q_TNH: Tensor, k_Pp1H: Tensor, rank: int, state: State, table: PageTable, ready: "DevicePlan") -> None:
    """Executes all pieces of a plan of latent attention and merges split lines; see :func:`attend`."""
    layout, shape = ready.layout, ready.layout.shape
    q_TNH, k_Pp1H = (x if _aligned(x) else x.contiguous().clone() for x in (q_TNH, k_Pp1H))
    (T, _, H), device, workers = q_TNH.shape, q_TNH.device, ready.capacity.workers
    shared = mla_shared_memory_size(H, shape.rows)
    assert workers <= multiprocessors(device), "blocks that are not resident at once"
    assert 2 * workers <= rank, "slots too small for so many parts"
    macros = compile_macros(
        q_TNH, k_Pp1H, shape.group, shape.rows, layout.tiles, window=bool(shape.window),
        single=table.longest_query == 1 and len(table.lengths_R) == T, rank=rank,
    )  # fmt: skip
    _, items_at, merges_at, firsts_at, _ = flat_offsets(ready.capacity)
    no_mods = (None, None, None, None, shape.window, None)
    arguments = _pack_arguments(
        q_TNH, k_Pp1H, k_Pp1H, state, (ready.mailboxes_for_launch(), None, ready.flat), table, no_mods,
        (items_at, firsts_at, merges_at), 0,
    )  # fmt: skip
    kernel = _kernel("attend_mla", tuple(macros.items()), shared, device)
    with torch.cuda.device(device):
        kernel.launch(workers, 32 * MLA_WARPS, arguments, cooperative=True)


def short_block(keys: int, lines: int, processors: int) -> tuple[int, int]:
    """Warps of a block of the kernel for a few keys, and of a line."""
    team = next(warps for warps in SHORT_TEAMS if warps * TOKENS >= keys)
    return (max(1, SHORT_WARPS // team) * team if lines > processors else team), team


def few_keys(keys: int, key_bytes: int, lines: int, width: int) -> bool:
    """Whether requests of at most ``keys`` keys use the kernel for a few keys, which is faster then.

    ``key_bytes`` are those of all keys and values, ``lines`` the number of blocks of 8 rows.
    """
    if keys > SHORT_KEYS or key_bytes > SHORT_BYTES // (2 if width > 128 else 1):
        return False
    team = short_block(max(1, keys), lines, 0)[1]
    return keys <= SHORT_MANY or lines * team * width <= SHORT_NUMBERS


def attend_short(
    q_TNH: Tensor, k_PpKH: Tensor, v_PpKH: Tensor, state: State, table: PageTable, keys: int, score_mods: ScoreMods
) -> None:
    """Writes ``state`` of requests with one query and at most ``keys`` keys each, without a plan."""
    q_TNH, k_PpKH, v_PpKH = (x if _aligned(x) else x.contiguous().clone() for x in (q_TNH, k_PpKH, v_PpKH))
    (T, N, H), K, device = q_TNH.shape, k_PpKH.shape[2], q_TNH.device
    lines = T * K * (padded_rows(N // K, 1) // 8)
    warps, team = short_block(max(1, keys), lines, multiprocessors(device))
    tiles = Tiles(TOKENS, warps, stages=1, workers=warps // team, pieces=1, part=1)
    macros = compile_macros(
        q_TNH, k_PpKH, N // K, 8, tiles, **_mod_macros(score_mods), short=True, half=keys <= SHORT_HALF
    )
    arguments = _pack_arguments(q_TNH, k_PpKH, v_PpKH, state, (None,) * 3, table, score_mods, (0,) * 3, lines)
    # Each warp's values, and then its state of 8 rows in float32 with the largest scores and sums.
    shared = warps * (32 * H + 64)
    kernel = _kernel("attend_short", tuple(macros.items()), shared, device)
    with torch.cuda.device(device):
        kernel.launch(-(-lines // tiles.workers), 32 * warps, arguments, overlaps=True)


def _mod_macros(score_mods: ScoreMods) -> dict[str, bool]:
    """Which score modifiers a kernel variant has."""
    cap, slopes_N, sinks_N, scales_K, window, near_RN = score_mods
    assert near_RN is None, "this kernel has no relative biases"
    return {
        "window": bool(window), "cap": cap is not None, "slopes": slopes_N is not None, "sinks": sinks_N is not None,
        "scaled": scales_K is not None,
    }  # fmt: skip


def _pack_arguments(
    q_TNH: Tensor, k_PpKH: Tensor, v_PpKH: Tensor, state: State, of_plan: tuple[Tensor | None, ...], table: PageTable,
    score_mods: ScoreMods, offsets: tuple[int, ...], lines: int,
) -> bytes:  # fmt: skip
    """The kernels' argument struct; ``of_plan`` are slots and the plan, with ``offsets`` of its parts."""
    T, N, H = q_TNH.shape
    pages_RP = table.pages_RP if table.pages_RP.stride(-1) == 1 else table.pages_RP.contiguous()
    cap, slopes_N, sinks_N, scales_K, window, near_RN = score_mods
    assert near_RN is None, "this kernel has no relative biases"
    slopes_N, sinks_N = (None if x is None else x.float().contiguous() for x in (slopes_N, sinks_N))
    pointers = (
        q_TNH, k_PpKH, v_PpKH, *state, *of_plan, pages_RP, table.cu_queries, table.lengths_R, slopes_N, sinks_N,
        *(scales_K or (None, None)),
    )  # fmt: skip
    q_bytes, k_bytes, v_bytes = (x.element_size() for x in (q_TNH, k_PpKH, v_PpKH))
    return ARGUMENTS.pack(
        *(0 if x is None else x.data_ptr() for x in pointers),
        *(stride * q_bytes for stride in q_TNH.stride()[:2]), *(stride * k_bytes for stride in k_PpKH.stride()[:3]),
        *(stride * v_bytes for stride in v_PpKH.stride()[:3]), pages_RP.stride(0), pages_RP.shape[1], len(k_PpKH),
        *offsets, N, window or 0, lines, H**-0.5, 1.0 if cap is None else cap,
        0 if lines <= T else -(-(2**32 * T) // lines),
    )  # fmt: skip

"""Grouped arguments of the paged attention kernels, as Triton takes them: NamedTuples.

A pointer or stride in a tuple is specialised like a separate argument. ``do_not_specialize`` however does not apply
to a tuple's members, so sizes that change from step to step stay separate arguments. A tuple of constants is one
``tl.constexpr`` argument.
"""

from typing import Any, NamedTuple


class Queries(NamedTuple):
    """Queries (T, N, H) and their strides."""

    ptr: Any
    token: Any
    head: Any


class Cache(NamedTuple):
    """A paged cache (P, page tokens, K, H) and its strides."""

    ptr: Any
    page: Any
    token: Any
    head: Any = None


class Output(NamedTuple):
    """Where results go: o and lse of whole lines, and the slots of split ones."""

    o: Any
    lse: Any
    slot_o: Any
    slot_lse: Any


class Batch(NamedTuple):
    """The tensors of a page table, and the membership of groups."""

    pages: Any
    cu_queries: Any
    lengths: Any
    members: Any = None


class SharedStates(NamedTuple):
    """The states of groups that share a prefix: slots, plan, and the membership of groups."""

    slot_o: Any
    slot_lse: Any
    plan: Any
    members: Any


class Mods(NamedTuple):
    """Score modifiers: softmax scale, soft cap, ALiBi slopes, sinks, an 8-bit cache's scales, relative biases."""

    scale: Any
    cap: Any
    slopes: Any
    sinks: Any
    k_scale: Any
    v_scale: Any
    near: Any
    """(2·NEAR + 1, N), the biases of the distances −NEAR to NEAR."""


class Config(NamedTuple):
    """Constants of the decode and prefill kernels."""

    N: int
    GROUP: int
    H: int
    BLOCK_H: int
    PAGE: int
    ROWS: int
    TILE: int
    STAGES: int
    WINDOW: int = 0
    CAPPED: bool = False
    SLOPES: bool = False
    SINKS: bool = False
    SCALED: bool = False
    NEAR: int = 0
    SAME_STRIDES: bool = False
    LAUNCH_MERGE: bool = False
    SINGLE: bool = False
    KV8: str | None = None
    ASM: bool = True
    CHUNK: int = 0
    PREFETCH: bool = True
    GROUPED: bool = False
    TMA: bool = False
    OVERLAP: bool = False


class MlaConfig(NamedTuple):
    """Constants of the MLA decode kernel."""

    N: int
    RANK: int
    ROPE: int
    BLOCK_C: int
    BLOCK_R: int
    PAGE: int
    ROWS: int
    TILE: int
    STAGES: int
    WINDOW: int = 0
    SCALED: bool = False
    LAUNCH_MERGE: bool = False


class MergeConfig(NamedTuple):
    """Constants of the kernels that merge split lines."""

    N: int
    GROUP: int
    H: int
    BLOCK_H: int
    ROWS: int
    SINKS: bool
    WAIT: bool
    PIECES: int = 1
    USED: int = 0
    SHARED_ROWS: int = 0
    SHARED_PIECES: int = 1
    CHUNK: int = 0
    FEW: int = 0
    WHOLE: int = 0

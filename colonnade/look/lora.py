"""Low-rank factors of the matrices of a head or layer: those of an adapter, or the best approximation of a given rank.

    wQ = wQ_base + wQ_A @ wQ_B          wQ_A = A_q' (D × r)      wQ_B = s · B_q' of the head (r × H)

with W ← W + s · B A as in :mod:`colonnade.model.lora`; the matrices of a scene are transposed, except wK_t.
"""

import torch
from torch import Tensor

from colonnade.checkpoint.peft import Adapter
from colonnade.config import ModelConfig
from colonnade.errors import RequestError

ATTENTION = {"wQ": "q", "wK_t": "k", "wV": "v", "wO": "out"}
"""A head's matrices, and the adapter's targets."""
FEED_FORWARD = ("up", "down", "gate")


def adapter_factors(adapter: Adapter, config: ModelConfig, layer: int, head: int) -> dict[str, tuple[Tensor, Tensor]]:
    """(left, right) factors of what the adapter adds to each matrix of the head ``head`` and of the layer."""
    lora = adapter.model.lora
    assert lora is not None
    found: dict[str, tuple[Tensor, Tensor]] = {}

    def pair(module: str) -> tuple[Tensor, Tensor] | None:
        a, b = (adapter.tensors.get(f"blocks.{layer}.{module}.{side}") for side in ("a", "b"))
        return None if a is None or b is None else (a.float(), lora.scale * b.float())

    if 0 <= head < config.heads:
        for name, part, n in (
            ("wQ", "q", head),
            ("wK_t", "k", head // config.group),
            ("wV", "v", head // config.group),
        ):
            if (both := pair(f"attention.qkv.adapter.{part}")) is not None:
                a, b = both[0], both[1].unflatten(0, (-1, config.head_width))[n]
                found[name] = (b, a) if name == "wK_t" else (a.T, b.T)
        if (both := pair("attention.out.adapter")) is not None:
            found["wO"] = both[0].unflatten(1, (config.heads, -1))[:, head].T, both[1].T
    for name in FEED_FORWARD:
        if (both := pair(f"ffn.{name}.adapter")) is not None:
            found[name] = both[0].T, both[1].T
    return found


def low_rank(x: Tensor, change: str) -> Tensor:
    """A factor of the best low-rank approximation of ``x`` (by SVD): "A8" (rows × 8) or "B8"."""
    side, rank = change[:1], change[1:]
    if side not in ("A", "B") or not rank.isdigit() or not 1 <= int(rank) <= min(x.shape):
        raise RequestError(
            f"'{change[:20]}' is not a factor; use A or B and a rank from 1 to {min(x.shape)}", param="name"
        )
    u, s, v = torch.linalg.svd(x.detach().double(), full_matrices=False)
    root, r = s[: int(rank)].sqrt(), int(rank)
    return u[:, :r] * root if side == "A" else root[:, None] * v[:r]

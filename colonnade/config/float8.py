"""Whether a model's matrices can be multiplied in float8 on this many tensor-parallel ranks.

The matrix units take float8 in blocks of 16 bytes along every dimension that is summed or written, and in the forward
and the two backward products of y = x Wᵀ each dimension of W is both at some time.
"""

from colonnade.config.model import ModelConfig
from colonnade.errors import ConfigError, PlanError

MULTIPLE = 16
"""Rows and columns of each rank's share of a weight must be multiples of this."""


def check(model: ModelConfig, tp: int, sh: int = 1) -> None:
    """Raise :class:`ConfigError` for a model that float8 cannot take, :class:`PlanError` when it is the fault of ``tp``
    or of ``sh``, which cuts experts.
    """
    kv, head, group = model.kv_heads, model.head_width, model.group
    if kv % tp or -(-model.ffn_width // tp) * (tp - 1) >= model.ffn_width:
        return  # Plan.check says so, with the remedy
    share = -(-model.ffn_width // tp)
    rows: dict[str, tuple[int, tuple[int, ...]]] = {
        "width": (model.width, (model.width,)),
        "rows of queries, keys and values": (kv * (group + 2) * head, (kv // tp * (group + 2) * head,)),
        "columns of heads": (kv * group * head, (kv // tp * group * head,)),
        "ffn_width": (model.ffn_width, (share, model.ffn_width - share * (tp - 1))),
    }
    cut = dict.fromkeys(rows, f"tp={tp}")
    if model.moe is not None:
        if model.moe.ffn_width % sh:
            return  # Plan.check says so
        rows["moe.ffn_width"] = model.moe.ffn_width, (model.moe.ffn_width // sh,)
        cut["moe.ffn_width"] = f"sh={sh}"
        shared = model.moe.shared_width
        if shared:
            each = -(-shared // tp)
            rows["moe.shared_width"] = shared, (each, max(0, shared - each * (tp - 1)))
            cut["moe.shared_width"] = f"tp={tp}"
    for what, (whole, parts) in rows.items():
        if whole % MULTIPLE:
            raise ConfigError(
                f"float8 needs multiples of {MULTIPLE}, and the model has {what} {whole}; change it, or set "
                "train.float8 none"
            )
        for part in parts:
            if part % MULTIPLE:
                raise PlanError(
                    f"float8 needs multiples of {MULTIPLE}, and {cut[what]} leaves a rank {part} of {what} {whole}; "
                    f"use a lower {cut[what][:2]}, or set train.float8 none"
                )

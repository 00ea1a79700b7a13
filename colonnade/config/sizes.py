"""How the sizes of a model follow from one another when one of them is changed.

A ratio of the model at hand is kept: heads a key/value head, hidden units a feature, an expert's width beside the
feed-forward part's. The rules are :class:`~colonnade.config.model.ModelConfig`'s ``RULES``.
"""

import math
from typing import TYPE_CHECKING

from colonnade.config.derive import KEEP, Rule, in_proportion

if TYPE_CHECKING:
    from colonnade.config.model import ModelConfig


def divisors(n: int) -> list[int]:
    """The divisors of ``n``, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return low + [n // d for d in reversed(low) if d * d != n]


WITH_EXPERTS: dict[str, str] = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
"""As what a dense family's models can be saved for Hugging Face when they have experts; others keep their name."""


def _family(was: "ModelConfig", now: "ModelConfig") -> object:
    if now.moe is not None:
        return WITH_EXPERTS.get(now.family, KEEP) if was.moe is None else KEEP
    dense = [one for one, family in WITH_EXPERTS.items() if family == now.family]
    return next((one for one in dense if (one == "mistral") == (now.window is not None)), KEEP)


def _kv_heads(was: "ModelConfig", now: "ModelConfig") -> object:
    """As many query heads a key/value head as before, or a few more where they do not divide."""
    most = max(1, now.heads // was.group)
    return max(d for d in divisors(now.heads) if d <= most)


def _head_width(was: "ModelConfig", _: "ModelConfig") -> object:
    """0, which means width / heads, where that was so before (Qwen3's and DeepSeek's heads have their own width)."""
    return 0 if was.head_width * was.heads == was.width else KEEP


def _ffn_width(was: "ModelConfig", now: "ModelConfig") -> object:
    return in_proportion(was.ffn_width, was.width, now.width)


def _expert_width(was: "ModelConfig", now: "ModelConfig") -> object:
    """In proportion to ffn_width where the two are equal or no layer is dense; otherwise to width."""
    if was.moe is None or now.moe is None:
        return KEEP if now.moe is None else now.ffn_width
    beside_dense = was.expert_layers < was.layers and was.moe.ffn_width != was.ffn_width
    source = "width" if beside_dense else "ffn_width"
    return in_proportion(was.moe.ffn_width, getattr(was, source), getattr(now, source))


def _first(was: "ModelConfig", now: "ModelConfig") -> object:
    """Some layer has experts, where one had."""
    return KEEP if was.moe is None or now.moe is None else min(was.moe.first, now.layers - 1)


MODEL_RULES = (
    Rule("family", ("moe",), _family),
    Rule("kv_heads", ("heads",), _kv_heads),
    Rule("head_width", ("width", "heads"), _head_width),
    Rule("ffn_width", ("width",), _ffn_width),
    Rule("moe.first", ("layers",), _first),
    Rule("moe.ffn_width", ("moe", "width", "ffn_width"), _expert_width),
)

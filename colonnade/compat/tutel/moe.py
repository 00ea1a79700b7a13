"""The layer, and the parts of which programs build their own."""

from colonnade.compat.tutel.layer import moe_layer
from colonnade.compat.tutel.routing import (
    extract_critical,
    fast_cumsum_sub_one,
    fast_decode,
    fast_dispatcher,
    fast_encode,
    top_k_routing,
)

__all__ = [
    "extract_critical",
    "fast_cumsum_sub_one",
    "fast_decode",
    "fast_dispatcher",
    "fast_encode",
    "moe_layer",
    "top_k_routing",
]

"""Serving: a paged KV cache, a scheduler, an engine, and an OpenAI-compatible server.

Names are imported when they are first used: sampling parameters are validated without importing torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colonnade.serve.engine import Engine
    from colonnade.serve.request import Completion, Output
    from colonnade.serve.sampling_params import SamplingParams
    from colonnade.serve.structured_outputs import StructuredOutputs

__all__ = ["Completion", "Engine", "Output", "SamplingParams", "StructuredOutputs"]

_MODULES = {
    "Completion": "request",
    "Engine": "engine",
    "Output": "request",
    "SamplingParams": "sampling_params",
    "StructuredOutputs": "structured_outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'colonnade.serve' has no attribute '{name}'")
    return getattr(importlib.import_module(f"colonnade.serve.{_MODULES[name]}"), name)

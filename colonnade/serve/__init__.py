"""Serving: a paged cache, a scheduler, an engine loop of three calls, and an OpenAI-compatible server around it.

The names are loaded when they are first used: sampling parameters are checked without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colonnade.serve.engine import Engine
    from colonnade.serve.output import Completion, Output
    from colonnade.serve.sampling_params import SamplingParams

__all__ = ["Completion", "Engine", "Output", "SamplingParams"]

_HOME = {"Completion": "output", "Engine": "engine", "Output": "output", "SamplingParams": "sampling_params"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'colonnade.serve' has no attribute '{name}'")
    return getattr(importlib.import_module(f"colonnade.serve.{_HOME[name]}"), name)

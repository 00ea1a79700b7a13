"""Colonnade trains and serves large transformers, dense and mixture-of-experts, with one model definition.

    model = colonnade.load("smollm2")           # or a checkpoint, a Hugging Face folder, a GGUF file, a hub id
    model.generate("Once", max_tokens=16, temperature=0)
    colonnade.save(model, "folder", format="hf")
    colonnade.Trainer(run_config).fit()
    colonnade.Engine(model).stream("Once", colonnade.SamplingParams(max_tokens=16))

The names are loaded when they are first used, so that ``import colonnade`` (and ``colonnade --help``) is instant.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colonnade.api import Engine, Model, load, save
    from colonnade.config import ModelConfig, Plan, RunConfig, ServeConfig
    from colonnade.serve.sampling import SamplingParams
    from colonnade.train.loop import Trainer

__all__ = [
    "Engine",
    "Model",
    "ModelConfig",
    "Plan",
    "RunConfig",
    "SamplingParams",
    "ServeConfig",
    "Trainer",
    "load",
    "save",
]

_HOME = {
    **dict.fromkeys(("Engine", "Model", "load", "save"), "colonnade.api"),
    **dict.fromkeys(("ModelConfig", "Plan", "RunConfig", "ServeConfig"), "colonnade.config"),
    "SamplingParams": "colonnade.serve.sampling",
    "Trainer": "colonnade.train.loop",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'colonnade' has no attribute '{name}'")
    return getattr(importlib.import_module(_HOME[name]), name)

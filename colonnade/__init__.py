"""Colonnade trains and serves large transformers, dense and mixture-of-experts, with one model definition.

    model = colonnade.load("smollm2")           # or a checkpoint, a Hugging Face folder, a GGUF file, a hub id
    model.generate("Once", max_tokens=16, temperature=0)
    model.chat("Why is the sky blue?")
    colonnade.save(model, "folder", format="hf")
    colonnade.Trainer(run_config).fit()
    colonnade.Engine(model).stream("Once", colonnade.SamplingParams(max_tokens=16))

Names are imported on first use, so ``import colonnade`` (and ``colonnade --help``) is instant.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from colonnade.api import Engine, Model, load, load_tokenizer, save
    from colonnade.config import (
        DataConfig,
        DistillConfig,
        EncoderConfig,
        ExpertsConfig,
        LatentConfig,
        LoraConfig,
        ModelConfig,
        MoeConfig,
        Plan,
        Recipe,
        RelativePositions,
        RopeScaling,
        RouterConfig,
        RunConfig,
        ServeConfig,
        SpeechConfig,
        TrainConfig,
        TuneConfig,
    )
    from colonnade.config.presets import preset
    from colonnade.data import Tokenizer
    from colonnade.errors import ColonnadeError
    from colonnade.serve.sampling_params import SamplingParams
    from colonnade.train.loop import Trainer
    from colonnade.tune.tuner import Tuner

    __version__: str

__all__ = [
    "ColonnadeError",
    "DataConfig",
    "DistillConfig",
    "EncoderConfig",
    "Engine",
    "ExpertsConfig",
    "LatentConfig",
    "LoraConfig",
    "Model",
    "ModelConfig",
    "MoeConfig",
    "Plan",
    "Recipe",
    "RelativePositions",
    "RopeScaling",
    "RouterConfig",
    "RunConfig",
    "SamplingParams",
    "ServeConfig",
    "SpeechConfig",
    "Tokenizer",
    "TrainConfig",
    "Trainer",
    "TuneConfig",
    "Tuner",
    "__version__",
    "load",
    "load_tokenizer",
    "preset",
    "save",
]

_MODULES = {
    **dict.fromkeys(("Engine", "Model", "load", "load_tokenizer", "save"), "colonnade.api"),
    **dict.fromkeys((name for name in __all__ if name.endswith("Config")), "colonnade.config"),
    **dict.fromkeys(("Plan", "Recipe", "RelativePositions", "RopeScaling"), "colonnade.config"),
    "ColonnadeError": "colonnade.errors",
    "SamplingParams": "colonnade.serve.sampling_params",
    "Tokenizer": "colonnade.data",
    "Trainer": "colonnade.train.loop",
    "Tuner": "colonnade.tune.tuner",
    "preset": "colonnade.config.presets",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("colonnade")
    if name not in _MODULES:
        raise AttributeError(f"module 'colonnade' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})

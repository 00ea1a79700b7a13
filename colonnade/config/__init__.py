"""Typed, frozen configurations; presets; TOML in and out; dotted overrides."""

from colonnade.config.base import (
    Config,
    check_choice,
    did_you_mean,
    differences,
    dtype_name,
    file_suffix,
    format_bytes,
    plural,
    short_repr,
)
from colonnade.config.expert_overrides import AS_TRAINED, ExpertsConfig
from colonnade.config.feature_checks import WeightFormat, WeightGroup
from colonnade.config.model import LatentConfig, ModelConfig, RopeScaling
from colonnade.config.moe import MoeConfig, RouterConfig
from colonnade.config.plan import Plan
from colonnade.config.run import DataConfig, Device, RunConfig, TrainConfig
from colonnade.config.serve import CacheFormat, ServeConfig
from colonnade.config.speech import SpeechConfig

__all__ = [
    "AS_TRAINED",
    "CacheFormat",
    "Config",
    "DataConfig",
    "Device",
    "ExpertsConfig",
    "LatentConfig",
    "ModelConfig",
    "MoeConfig",
    "Plan",
    "RopeScaling",
    "RouterConfig",
    "RunConfig",
    "ServeConfig",
    "SpeechConfig",
    "TrainConfig",
    "WeightFormat",
    "WeightGroup",
    "check_choice",
    "did_you_mean",
    "differences",
    "dtype_name",
    "file_suffix",
    "format_bytes",
    "plural",
    "short_repr",
]

"""Typed, frozen configurations; presets; TOML in and out; dotted overrides."""

from colonnade.config.base import (
    Config,
    check_choice,
    count,
    differences,
    dtype_name,
    file_suffix,
    nearest,
    shown,
    size,
)
from colonnade.config.experts import AS_TRAINED, ExpertsConfig
from colonnade.config.feature_checks import WeightGroup, Weights
from colonnade.config.model import LatentConfig, ModelConfig, RopeScaling
from colonnade.config.moe import MoeConfig, RouterConfig
from colonnade.config.plan import Plan
from colonnade.config.run import DataConfig, Device, RunConfig, TrainConfig
from colonnade.config.serve import Cache, ServeConfig

__all__ = [
    "AS_TRAINED",
    "Cache",
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
    "TrainConfig",
    "WeightGroup",
    "Weights",
    "check_choice",
    "count",
    "differences",
    "dtype_name",
    "file_suffix",
    "nearest",
    "shown",
    "size",
]

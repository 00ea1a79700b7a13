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
from colonnade.config.distill import DistillConfig
from colonnade.config.encoder import EncoderConfig, RelativePositions
from colonnade.config.encoder_tuning import EncoderTuning
from colonnade.config.expert_overrides import AS_TRAINED, ExpertsConfig
from colonnade.config.feature_checks import WeightFormat, WeightGroup
from colonnade.config.lora import LORA_TARGETS, LoraConfig, LoraTarget
from colonnade.config.model import LatentConfig, ModelConfig, RopeScaling
from colonnade.config.moe import MoeConfig, RouterConfig
from colonnade.config.plan import Plan
from colonnade.config.recipe import RECIPES, Recipe, read_recipe
from colonnade.config.run import DataConfig, Device, RunConfig, TrainConfig
from colonnade.config.serve import CacheFormat, ServeConfig
from colonnade.config.speech import SpeechConfig
from colonnade.config.tune import TuneConfig

__all__ = [
    "AS_TRAINED",
    "LORA_TARGETS",
    "RECIPES",
    "CacheFormat",
    "Config",
    "DataConfig",
    "Device",
    "DistillConfig",
    "EncoderConfig",
    "EncoderTuning",
    "ExpertsConfig",
    "LatentConfig",
    "LoraConfig",
    "LoraTarget",
    "ModelConfig",
    "MoeConfig",
    "Plan",
    "Recipe",
    "RelativePositions",
    "RopeScaling",
    "RouterConfig",
    "RunConfig",
    "ServeConfig",
    "SpeechConfig",
    "TrainConfig",
    "TuneConfig",
    "WeightFormat",
    "WeightGroup",
    "check_choice",
    "did_you_mean",
    "differences",
    "dtype_name",
    "file_suffix",
    "format_bytes",
    "plural",
    "read_recipe",
    "short_repr",
]

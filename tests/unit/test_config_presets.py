"""Presets have the sizes of the published models, by the parameter counts of the files on the Hub."""

from pathlib import Path

import pytest

from colonnade.config import Plan, presets
from colonnade.config.presets import PRESETS, preset
from colonnade.errors import ConfigError
from colonnade.model import Transformer

# Totals of the safetensors files: tied projections are counted once, the masks in GPT-2's old files are not counted.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "bert-base": 110_106_428,  # with both output heads, as bert-base-uncased is stored
    "bert-large": 336_226_108,
    "minilm-l6": 22_713_216,
    "code-llama-7b": 6_738_546_688,
    "code-llama-13b": 13_016_028_160,
    "code-llama-34b": 33_743_970_304,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    # Without the multi-token prediction module, and without 58 · 256 biases that get no gradient.
    "deepseek-v3": 671_026_419_200 - 14_848,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-v1_1-small": 76_961_152,
    "t5-v1_1-base": 247_577_856,
    "t5-v1_1-large": 783_150_080,
    "switch-base-8": 619_339_008,
    "switch-base-128": 7_415_217_408,
    "nllb-moe-54b": 54_500_569_088,
    # With biases of keys, which Whisper lacks (read as zeros): three per layer of both stacks.
    "whisper-tiny": 37_760_640 + 3 * 4 * 384,
    "whisper-tiny.en": 37_760_256 + 3 * 4 * 384,
    "whisper-base": 72_593_920 + 3 * 6 * 512,
    "whisper-small": 241_734_912 + 3 * 12 * 768,
    "whisper-medium": 763_857_920 + 3 * 24 * 1024,
    "whisper-large-v3": 1_543_490_560 + 3 * 32 * 1280,
}
# Rounded figures of the papers [billions], for models that were never released.
ROUNDED = {
    "gpt2-355m": 0.355, "gpt2-1.2b": 1.2, "gpt2-2.5b": 2.5, "gpt2-4.2b": 4.2, "gpt2-8.3b": 8.3,
    "gpt2-8.3b-24-heads": 8.3, "bert-336m": 0.336, "bert-1.3b": 1.3, "bert-3.9b": 3.9, "tour": 0.004,
    "bert-tour": 0.0044, "tour-moe": 0.0105, "gpt2-switch-8": 0.323, "gpt2-gshard-8": 0.323,
}  # fmt: skip
# Active parameters as published [billions].
ACTIVE = {
    "mixtral-8x7b": 12.9, "mixtral-8x22b": 39.0, "qwen1.5-moe-a2.7b": 2.7, "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22.0, "olmoe-1b-7b": 1.3, "deepseek-v2": 21.0, "deepseek-v3": 37.0,
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_the_published_number_of_parameters(name: str) -> None:
    count = preset(name).parameters
    if name in PUBLISHED:
        assert count == PUBLISHED[name]
    else:
        assert count / 1e9 == pytest.approx(ROUNDED[name], rel=0.02)


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", PRESETS)
def test_parameter_count_equals_that_of_the_built_model(name: str) -> None:
    config = preset(name)
    assert sum(p.numel() for p in Transformer(config, device="meta").parameters()) == config.parameters


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_those_published(name: str) -> None:
    assert preset(name).active_parameters / 1e9 == pytest.approx(ACTIVE[name], rel=0.02)


def test_active_parameters_of_lite_dense_and_switch_models() -> None:
    lite = preset("deepseek-v2-lite")
    # Its authors count 2.4 billion without the embedding.
    assert (lite.active_parameters - lite.vocab_size * lite.width) / 1e9 == pytest.approx(2.4, rel=0.03)
    assert preset("smollm2-135m").active_parameters == preset("smollm2-135m").parameters
    dense, switch = preset("gpt2"), preset("gpt2-switch-8")
    assert switch.active_parameters - dense.parameters == 6 * 8 * 768, "one expert a token, and six routers"
    assert dense.size == "124.44 M parameters"
    assert switch.size == "322.82 M parameters, 124.48 M of them active"


def test_shapes_of_the_megatron_paper() -> None:
    shapes = {
        "gpt2-355m": (24, 1024, 16), "gpt2-1.2b": (40, 1536, 16), "gpt2-2.5b": (54, 1920, 20),
        "gpt2-4.2b": (64, 2304, 24), "gpt2-8.3b": (72, 3072, 32), "gpt2-8.3b-24-heads": (72, 3072, 24),
        "bert-336m": (24, 1024, 16), "bert-1.3b": (24, 2048, 32), "bert-3.9b": (48, 2560, 40),
    }  # fmt: skip
    for name, shape in shapes.items():
        config = preset(name)
        assert (config.layers, config.width, config.heads) == shape
        assert config.head_width == 64 or not name.startswith("bert"), "the paper uses heads of width 64 for BERT"


def test_tour_preset_fits_the_plans_of_the_demo() -> None:
    for tp in (1, 2, 4):
        Plan(tp=tp).check(preset("tour"))


def test_every_file_of_presets_is_listed() -> None:
    folder = Path(presets.__file__).with_suffix("")
    assert sorted(file.stem for file in folder.glob("*.toml")) == sorted(presets.FILES)
    assert all(not name.startswith("_") for name in PRESETS), "tables that only serve as bases are not presets"


def test_a_misspelt_preset_suggests_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match=r"no preset 'smollm-135m'; did you mean 'smollm2-135m'\?"):
        preset("smollm-135m")

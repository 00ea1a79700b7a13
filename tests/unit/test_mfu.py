"""Throughput figures: the FLOP conventions, the GPU table, and no MFU for unknown GPUs."""

import pytest
import torch

from colonnade.config import ModelConfig
from colonnade.train.metrics import ACCELERATORS, accelerator_named, find_accelerator, throughput

GPT2_1B = ModelConfig(
    family="gpt2", vocab_size=50257, layers=40, width=1536, heads=16, ffn_width=6144, positions="learned", tied=True,
    gated=False, context=1024,
)  # fmt: skip


def test_megatron_flop_convention() -> None:
    """The two conventions bracket 6 FLOPs per weight, and differ by half the attention scores."""
    full, causal = (GPT2_1B.flops_per_token(1024, causal=half) for half in (False, True))
    weights = 40 * 12 * 1536**2 + 50257 * 1536
    assert full == 6 * (weights + 40 * 2 * 1024 * 1536)
    assert full - causal == 6 * 40 * 1024 * 1536


def test_mfu_of_a_known_gpu() -> None:
    h200 = accelerator_named("NVIDIA H200")
    speed = throughput(GPT2_1B, sequence=1024, tokens_per_s=68_976, ranks=1, accelerator=h200, dtype="bfloat16")
    assert speed.tflops == pytest.approx(554, rel=0.03)
    assert speed.mfu == pytest.approx(speed.tflops / 989)
    assert speed.mfu_causal == pytest.approx(speed.tflops_causal / 989) and speed.tflops_causal < speed.tflops
    two = throughput(GPT2_1B, sequence=1024, tokens_per_s=2 * 68_976, ranks=2, accelerator=h200, dtype="bfloat16")
    assert two.mfu == pytest.approx(speed.mfu)
    assert "mfu" in str(speed) and "%" in str(speed) and "causal" in str(speed)


def test_unknown_gpus_have_no_mfu() -> None:
    assert find_accelerator(torch.device("cpu")) is None
    assert accelerator_named("Imaginary Accelerator 9") is None
    speed = throughput(GPT2_1B, sequence=64, tokens_per_s=10, ranks=1, accelerator=None, dtype="float32")
    assert (speed.mfu, speed.mfu_causal) == (None, None)
    assert "mfu n/a" in str(speed)


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA A40", 149.7e12),
        ("NVIDIA GeForce RTX 4090", 165.2e12),
    ],
)
def test_device_names_of_drivers_are_recognised(name: str, peak: float) -> None:
    chip = accelerator_named(name)
    assert chip is not None
    assert chip.peak("bfloat16") == peak


def test_every_gpu_of_the_table_is_matched() -> None:
    assert [accelerator_named(f"NVIDIA {chip.match} 80GB") for chip in ACCELERATORS] == list(ACCELERATORS)

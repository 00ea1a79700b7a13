"""The profile of a decode step: kernels of a layer, bytes read, and gaps between kernels."""

import pytest
import torch

import step_profile
from colonnade.model import Transformer
from colonnade.model.transformer import Block
from step_profile import Kernel, layers_in


def test_layers_are_found_by_repetition() -> None:
    layer = ["norm", "gemm", "add", "norm", "gemm", "gemm", "add"]
    step = ["upload", "upload", "embed", *layer * 5, "norm", "gemm", "argmax"]
    period, starts = layers_in(step * 3, 5, 3)
    assert period == 7
    assert starts == [3 + s * len(step) + 7 * i for s in range(3) for i in range(5)]
    plans = ["upload", "embed", "norm", "plan", *layer[1:], *layer * 4, "argmax"]  # the first layer does more
    period, starts = layers_in(plans * 2, 5, 2)
    assert period == 7 and starts[:4] == [4, 11, 18, 25]
    with pytest.raises(ValueError, match="repeats 5 times in 2 steps"):
        layers_in([f"kernel{i}" for i in range(40)], 5, 2)


def test_times_gaps_and_bytes_of_a_layer() -> None:
    config = step_profile.TINY.replace(layers=3)
    block = Transformer(config, dtype=torch.bfloat16).blocks[0]
    assert isinstance(block, Block)
    layer = [("norm", 2.0), ("gemv", 4.0), ("attend", 8.0), ("gemv", 3.0), ("gemv", 5.0), ("gemv", 5.0), ("gemv", 6.0)]
    at, kernels = 0.0, []
    for name, us in [("embed", 1.0), *layer * 3, ("argmax", 7.0)] * 2:
        kernels.append(Kernel(name, at, us))
        at += us + 0.5
    rows = step_profile.rows_of(kernels, block, 3, 2, keys_bytes=800, bandwidth=1e9)
    inside = [row for row in rows if row["where"] == "layer"]
    assert [(row["kernel"], row["us"]) for row in inside] == layer
    assert all(row["gap_us"] == pytest.approx(0.5) for row in inside)
    width, hidden = config.width, config.ffn_width
    qkv, out, ffn = 2 * width * (width + 2 * width // 2), 2 * width * width, 2 * width * hidden
    assert [row["bytes"] for row in inside] == [None, qkv, 800, out, ffn, ffn, ffn]
    assert inside[2]["of_read"] == pytest.approx(800 / 8e-6 / 1e9, abs=1e-3)
    outside = {row["kernel"]: row for row in rows if row["where"] == "step"}
    assert outside["argmax"]["us"] == 7 and outside["argmax"]["count"] == 1


def test_profile_of_a_cpu_step(capsys: pytest.CaptureFixture[str]) -> None:
    step_profile.main(["--tiny", "--weights", "int4"])
    output = capsys.readouterr().out
    assert "tiny, int4, batch 1, 16 keys" in output and "whole step" in output

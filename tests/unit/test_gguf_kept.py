"""A GGUF file's 4-bit matrices, kept as they are: ``weights="file"``."""

from pathlib import Path

import pytest
import torch

from colonnade import api
from colonnade.cli import main
from colonnade.compress import Compression, compress
from colonnade.config import ModelConfig
from colonnade.errors import ConfigError
from colonnade.kernels.linear.quantise import dequantise
from colonnade.model.weight_only_quant import quantised_parameters, weight_bytes
from colonnade.parallel.distributed_context import DistributedContext
from tests.models import build
from tests.serve import tiny


def written(folder: Path, grid: str | None) -> Path:
    """A Llama in Q4_0 (symmetric), Q4_1 (affine) or F16 (None)."""
    tokenizer = tiny.tokenizer()
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, layers=2, width=64, heads=4, kv_heads=2, ffn_width=128, context=64
    )
    model = build(config, dtype=torch.float32).requires_grad_(False)
    if grid is not None:
        compress(model, Compression(by="nearest", weight_group=32, grid=grid))  # type: ignore[arg-type]
    whole = api.Model(model, tokenizer, DistributedContext.solo(torch.device("cpu")), "m")
    return api.save(whole, folder / "m.gguf", format="gguf")


@pytest.mark.parametrize("grid", ["symmetric", "affine"])
def test_bit_for_bit(grid, tmp_path) -> None:
    path = written(tmp_path, grid)
    with api.load(path, device="cpu", weights="file") as kept, api.load(path, device="cpu") as dense:
        plain = dict(dense.transformer.named_parameters())
        weights = {n: w for n, w in quantised_parameters(kept.transformer).items() if n.startswith("blocks.")}
        assert len(weights) == 10
        for name, weight in weights.items():
            assert (weight.kind, weight.group) == ("int4", 32)
            assert torch.equal(dequantise(weight, torch.float32), plain[name])
        assert weight_bytes(kept.transformer) < 0.5 * weight_bytes(dense.transformer)
        tokens = list(range(1, 20))
        torch.testing.assert_close(kept.logits(tokens), dense.logits(tokens), rtol=0, atol=1e-4)
        assert len(kept.generate(tokens, max_tokens=4, ignore_eos=True)) == 4


@pytest.mark.slow
def test_served_over_ranks(tmp_path, capfd) -> None:
    path, texts = written(tmp_path, "symmetric"), []
    for plan in ([], ["--plan.tp", "2"]):
        capfd.readouterr()
        words = ["--temperature", "0", "--max_tokens", "8", "--serve.weights", "file"]
        main(["generate", str(path), "a word", *words, *plan])
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1]


def test_a_file_without_such_matrices(tmp_path) -> None:
    with pytest.raises(ConfigError, match="has no 4-bit matrices"):
        api.load(written(tmp_path, None), device="cpu", weights="file")

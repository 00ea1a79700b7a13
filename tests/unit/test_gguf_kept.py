"""A GGUF file's Q4_0, Q4_1 and Q8_0 matrices, kept as they are: ``weights="file"``."""

from pathlib import Path

import pytest
import torch

from colonnade import api
from colonnade.cli import main
from colonnade.compress import Compression, compress
from colonnade.config import ModelConfig
from colonnade.config.feature_checks import check_quantised
from colonnade.errors import ConfigError, PlanError
from colonnade.kernels.linear.quantise import dequantise
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import StoredFormat, quantised_parameters, weight_bytes, weight_bytes_as
from colonnade.parallel.distributed_context import DistributedContext
from tests.models import build
from tests.serve import tiny


def written(folder: Path, grid: str | None) -> Path:
    """A Llama in Q4_0 (symmetric), Q4_1 (affine), Q8_0 (int8) or F16 (None)."""
    tokenizer = tiny.tokenizer()
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, layers=2, width=64, heads=4, kv_heads=2, ffn_width=128, context=64
    )
    model = build(config, dtype=torch.float32).requires_grad_(False)
    if grid == "int8":
        compress(model, Compression(weights="int8", by="nearest"))
    elif grid is not None:
        compress(model, Compression(by="nearest", weight_group=32, grid=grid))  # type: ignore[arg-type]
    whole = api.Model(model, tokenizer, DistributedContext.solo(torch.device("cpu")), "m")
    return api.save(whole, folder / "m.gguf", format="gguf")


@pytest.mark.parametrize("grid", ["symmetric", "affine", "int8"])
def test_bit_for_bit(grid, tmp_path) -> None:
    path = written(tmp_path, grid)
    with api.load(path, device="cpu", weights="file") as kept, api.load(path, device="cpu") as dense:
        plain = dict(dense.transformer.named_parameters())
        weights = {n: w for n, w in quantised_parameters(kept.transformer).items() if n.startswith("blocks.")}
        assert len(weights) == 10
        for name, weight in weights.items():
            assert (weight.kind, weight.group) == ("int8" if grid == "int8" else "int4", 32)
            assert weight.has_int8_groups == (grid == "int8")
            assert torch.equal(dequantise(weight, torch.float32), plain[name])
        assert weight_bytes(kept.transformer) < 0.5 * weight_bytes(dense.transformer)
        tokens = list(range(1, 20))
        torch.testing.assert_close(kept.logits(tokens), dense.logits(tokens), rtol=0, atol=1e-4)
        assert len(kept.generate(tokens, max_tokens=4, ignore_eos=True)) == 4


def test_int8_in_groups_is_saved_and_read_again(tmp_path) -> None:
    path = written(tmp_path, "int8")
    with api.load(path, device="cpu", weights="file") as kept:
        api.save(kept, tmp_path / "m")
        api.save(kept, tmp_path / "again.gguf", format="gguf")
        with pytest.raises(ConfigError, match="int8 in groups"):
            api.save(kept, tmp_path / "hf", format="hf")
        memory = weight_bytes(kept.transformer)
        formats = {name: StoredFormat.of(w) for name, w in quantised_parameters(kept.transformer).items()}
        shape = Transformer(kept.config, device="meta", dtype=kept.transformer.blocks[0].norm1.weight.dtype)
        assert weight_bytes_as(shape, "stored", 64, formats) == memory
        for other, weights in ((tmp_path / "m", "stored"), (tmp_path / "again.gguf", "file")):
            with api.load(other, device="cpu", weights=weights) as loaded:
                found = quantised_parameters(loaded.transformer)
                for name, weight in quantised_parameters(kept.transformer).items():
                    assert torch.equal(found[name].values, weight.values), name
                    assert torch.equal(found[name].scales, weight.scales), name
    with pytest.raises(PlanError, match=r"int8 has one scale for 32 inputs, and tp=4 leaves each rank 16"):
        check_quantised(kept.config, "int8", 32, tp=4, grouped=True)


@pytest.mark.slow
@pytest.mark.parametrize("grid", ["symmetric", "int8"])
def test_served_over_ranks(grid, tmp_path, capfd) -> None:
    path, texts = written(tmp_path, grid), []
    for plan in ([], ["--plan.tp", "2"]):
        capfd.readouterr()
        words = ["--temperature", "0", "--max_tokens", "8", "--serve.weights", "file"]
        main(["generate", str(path), "a word", *words, *plan])
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1]


def test_a_file_without_such_matrices(tmp_path) -> None:
    with pytest.raises(ConfigError, match="has no matrices that can stay in the file's format"):
        api.load(written(tmp_path, None), device="cpu", weights="file")

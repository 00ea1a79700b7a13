"""T5 1.0 and 1.1 against transformers: logits, loss, gradients, and files in both directions."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from colonnade.checkpoint.hf.read import HFFolder
from colonnade.checkpoint.hf.write import write_hf
from colonnade.errors import CheckpointError
from colonnade.model import Rows
from tests.encdec import SOURCES, TARGETS, inputs, texts
from tests.hf import load
from tests.hf_reference import same_loss_and_gradients
from tests.worlds import assert_same

SETTINGS: dict[str, Any] = {
    "vocab_size": 53, "d_model": 24, "d_kv": 5, "d_ff": 31, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "dropout_rate": 0.0,
}  # fmt: skip
VERSIONS: dict[str, dict[str, Any]] = {
    "1.0": {"feed_forward_proj": "relu"},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
}


def theirs(version: str) -> Any:
    """transformers' model in float64, its weights large enough for every part to matter."""
    config = transformers.T5Config(**SETTINGS, **VERSIONS[version])
    torch.manual_seed(3)
    model = transformers.T5ForConditionalGeneration(config).double()
    if version == "1.1":  # the released 1.1 models have an output projection of their own
        model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.2 + (1.0 if p.dim() == 1 else 0.0))
    return model.eval()


def save(model: Any, folder: Path, version: str) -> Path:
    """The folder as the model's authors published it: an untied projection is stored."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    if version == "1.1":
        tensors["lm_head.weight"] = model.lm_head.weight.detach().clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def logits(model: Any, sources: list[Tensor], targets: list[Tensor]) -> Tensor:
    pairs = zip(sources, targets, strict=True)
    return torch.cat([model(input_ids=s[None], decoder_input_ids=t[None]).logits[0] for s, t in pairs])


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_logits_loss_and_gradients(tmp_path: Path, version: str, kernels: str) -> None:
    model = theirs(version)
    ours = load(save(model, tmp_path, version))
    assert ours.config.tied == ours.config.scale_decoder_outputs == (version == "1.0")
    sources, targets = texts(SOURCES, 53), texts(TARGETS, 53, seed=2)
    labels = texts(TARGETS, 53, seed=3)
    stream, attend = inputs(sources, targets, kernels)
    expected = logits(model, sources, targets)
    assert_same(ours(stream, attend, Rows()), expected.detach(), 1e-6, "logits")
    same_loss_and_gradients(ours, model, (stream, attend), expected, torch.cat(labels))


@pytest.mark.parametrize("version", VERSIONS)
def test_files_both_ways_bit_for_bit(tmp_path: Path, version: str) -> None:
    folder = save(theirs(version), tmp_path / "theirs", version)
    write_hf(load(folder), tmp_path / "ours")
    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert HFFolder(tmp_path / "ours").config == HFFolder(folder).config
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours", dtype=torch.float64).eval()
    sources, targets = texts(SOURCES, 53), texts(TARGETS, 53, seed=2)
    stream, attend = inputs(sources, targets)
    with torch.no_grad():
        assert_same(load(folder)(stream, attend, Rows()), logits(again, sources, targets), 1e-6, "logits")


def test_older_files_and_wrong_tying(tmp_path: Path) -> None:
    """tie_word_embeddings decides the factor in older files; the tensors decide whether the projection is tied."""
    folder = save(theirs("1.0"), tmp_path, "1.0")
    raw = json.loads((folder / "config.json").read_text())
    del raw["scale_decoder_outputs"]
    for tie in (True, False):
        (folder / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": tie}))
        config = HFFolder(folder).config
        assert (config.tied, config.scale_decoder_outputs) == (True, tie)
    tensors = load_file(folder / "model.safetensors")
    copy = {"lm_head.weight": tensors["shared.weight"].clone(), "encoder.embed_tokens.weight": tensors["shared.weight"]}
    save_file(tensors | {name: x.clone() for name, x in copy.items()}, folder / "model.safetensors", {"format": "pt"})
    assert HFFolder(folder).config.tied
    load(folder)
    copy["lm_head.weight"][0, 0] += 1
    save_file(tensors | {name: x.clone() for name, x in copy.items()}, folder / "model.safetensors", {"format": "pt"})
    assert not HFFolder(folder).config.tied
    copy["encoder.embed_tokens.weight"] = copy["lm_head.weight"]
    save_file(tensors | {name: x.clone() for name, x in copy.items()}, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"contains a 'encoder.embed_tokens.weight' that differs from 'shared"):
        load(folder)

"""Adapters in PEFT's files: read and written, equal to the library where it is installed, hostile files refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import colonnade
from colonnade.api import save_adapter
from colonnade.checkpoint.adapters import read_adapter
from colonnade.checkpoint.hf.write import write_hf
from colonnade.checkpoint.peft import CONFIG, WEIGHTS, Adapter, read_peft, write_peft
from colonnade.cli import main
from colonnade.config import LoraConfig
from colonnade.errors import CheckpointError, ConfigError
from colonnade.model.lora import is_adapter
from colonnade.tune.chats import Conversations
from colonnade.tune.packing import sft_feed
from tests import tuning
from tests.models import build
from tests.parity.test_lora import DENSE, EXPERTS, drawn
from tests.parity.test_sft import conversations
from tests.worlds import assert_same

TOKENS = [5, 9, 2, 200, 17]


def adapter(lora: LoraConfig, base: str = "") -> Adapter:
    config = DENSE.replace(lora=lora)
    model = drawn(config, build(DENSE).state_dict())
    return Adapter(config, {name: p.detach() for name, p in model.named_parameters() if is_adapter(name)}, base)


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT reads a deprecated name
@pytest.mark.parametrize(
    "lora",
    [LoraConfig(rank=3, alpha=5.0), LoraConfig(rank=4, alpha=2.0, rslora=True, targets=("k", "out", "up"))],
    ids=["all", "some"],
)
def test_files_are_those_of_peft(lora: LoraConfig, tmp_path: Path) -> None:
    """Read back, merged by convert, and by the library itself where it is installed."""
    base, folder = tmp_path / "base", tmp_path / "adapter"
    write_hf(build(DENSE), base)
    written = adapter(lora, str(base))
    write_peft(folder, written)
    read = read_peft(folder, DENSE)
    assert read.model == written.model
    assert read.base == str(base)
    for name, x in written.tensors.items():
        assert torch.equal(read.tensors[name], x), name
    with colonnade.load(folder, device="cpu", dtype="float64") as merged:
        logits = merged.logits(TOKENS)
    model = drawn(written.model, build(DENSE).state_dict())
    stream = colonnade.load(base, device="cpu", dtype="float64")
    with stream:
        assert (stream.logits(TOKENS) - logits).abs().max() > 0.01
        stream.transformer = model
        assert_same(logits, stream.logits(TOKENS))
    main(["convert", str(base), str(tmp_path / "out"), "--adapter", str(folder), "--dtype", "float64"])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float64)
    with torch.no_grad():
        assert_same(theirs(torch.tensor([TOKENS])).logits[0], logits, 1e-6)
    peft = pytest.importorskip("peft")
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64)
    tuned = peft.PeftModel.from_pretrained(theirs, folder, autocast_adapter_dtype=False)
    with torch.no_grad():
        assert_same(tuned(torch.tensor([TOKENS])).logits[0], logits, 1e-6)
    tuned.save_pretrained(tmp_path / "theirs")
    again = read_peft(tmp_path / "theirs", DENSE)
    for name, x in written.tensors.items():
        assert torch.equal(again.tensors[name], x), name


def test_a_run_becomes_files_of_peft(tmp_path: Path) -> None:
    run = tuning.settings(tmp_path, tuning.start(tmp_path), DENSE.replace(lora=LoraConfig(rank=2)), steps=1)
    tuning.fit(run, sft_feed(conversations(), Conversations([])))
    main(["convert", str(run.folder), str(tmp_path / "out"), "--format", "peft"])
    with colonnade.load(run.folder, device="cpu", dtype="float64") as model:
        expected = model.logits(TOKENS)
    with colonnade.load(tmp_path / "out", device="cpu", dtype="float64") as model:
        assert_same(model.logits(TOKENS), expected)
    with pytest.raises(CheckpointError, match="exists"):
        save_adapter(run.folder, tmp_path / "out")
    with pytest.raises(CheckpointError, match="has no adapters"):
        save_adapter(tuning.start(tmp_path), tmp_path / "other")


def test_a_layer_without_an_adapter_gets_zeros(tmp_path: Path) -> None:
    written = adapter(LoraConfig(rank=2, targets=("q",)))
    write_peft(tmp_path / "a", written)
    tensors = load_file(tmp_path / "a" / WEIGHTS)
    save_file({name: x for name, x in tensors.items() if ".layers.1." in name}, tmp_path / "a" / WEIGHTS)
    read = read_peft(tmp_path / "a", DENSE)
    for name, x in read.tensors.items():
        assert bool(x.any()) == name.startswith("blocks.1."), name


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora = 'True'"),
    ({"bias": "all"}, "bias = 'all'"),
    ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"peft_type": "IA3"}, "describes no LoRA"),
    ({"r": "3"}, "describes no LoRA"),
    ({"r": 0}, "greater than or equal to 1"),
    ({"r": 10**9}, "less than or equal to"),
    ({"r": 5}, "of shape"),
    ({"lora_alpha": float("inf")}, "alpha"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES, ids=[message for _, message in CHANGES])
def test_other_configurations_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_peft(tmp_path / "a", adapter(LoraConfig(rank=3)))
    file = tmp_path / "a" / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        read_peft(tmp_path / "a", DENSE)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    write_peft(folder, adapter(LoraConfig(rank=3)))
    whole = (folder / WEIGHTS).read_bytes()
    with pytest.raises(CheckpointError, match="of shape"):
        read_peft(folder, DENSE.replace(ffn_width=40))
    with pytest.raises(CheckpointError, match="no adapter of a llama model"):
        read_peft(folder, DENSE.replace(layers=1))
    with pytest.raises(CheckpointError, match="need their base model"):
        read_adapter(folder)
    with pytest.raises(CheckpointError, match="which cannot be opened"):
        colonnade.load(folder)
    for damaged in (whole[:-9], b"\xff" * 8 + whole[8:], b""):
        (folder / WEIGHTS).write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            read_peft(folder, DENSE)
    save_file({"x": torch.zeros(1, dtype=torch.int64)}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="I64"):
        read_peft(folder, DENSE)
    (folder / CONFIG).write_text("[]")
    with pytest.raises(CheckpointError):
        read_peft(folder, DENSE)


def test_what_peft_cannot_store_is_refused(tmp_path: Path) -> None:
    config = EXPERTS.replace(lora=LoraConfig(rank=2))
    model = drawn(config, build(EXPERTS).state_dict())
    experts = {name: p.detach() for name, p in model.named_parameters() if is_adapter(name)}
    with pytest.raises(ConfigError, match="no place for"):
        write_peft(tmp_path / "a", Adapter(config, experts, ""))
    assert not (tmp_path / "a").exists()

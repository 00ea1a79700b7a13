"""Weight folders: missing, damaged or dangerous files give a one-line error that names file and tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from colonnade.checkpoint.hf.read import HFFolder
from colonnade.checkpoint.hf.write import plan_shards, write_hf
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError, DataError
from colonnade.model import Transformer
from tests.hf import load
from tests.models import build

LLAMA = ModelConfig(vocab_size=37, layers=2, width=12, heads=3, ffn_width=10, context=16, head_width=6, tied=True)
GPT2 = ModelConfig(
    family="gpt2", vocab_size=37, layers=2, width=12, heads=3, ffn_width=10, context=16, positions="learned",
    norm="layernorm", gated=False, qkv_bias=True, out_bias=True, ffn_bias=True, activation="gelu_tanh", tied=True,
)  # fmt: skip


def saved_folder(path: Path, config: ModelConfig = LLAMA, shard_bytes: int = 1 << 30) -> Path:
    write_hf(build(config), path, shard_bytes=shard_bytes)
    return path


def matches_fresh_model(model: Transformer, config: ModelConfig = LLAMA) -> bool:
    pairs = zip(model.parameters(), build(config).parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def edit_weights(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite the single weight file of a folder."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def assert_refused(path: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_saves_one_file_or_several_shards(tmp_path: Path) -> None:
    assert matches_fresh_model(load(saved_folder(tmp_path / "one")))
    many = saved_folder(tmp_path / "many", shard_bytes=6000)
    files = sorted(path.name for path in many.glob("*.safetensors"))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert all((many / file).stat().st_size < 7000 for file in files), "6,000 bytes of values and a header"
    index = json.loads((many / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(p.numel() * 8 for p in build(LLAMA).parameters())
    assert matches_fresh_model(load(many))


def test_shards_are_filled_in_order() -> None:
    sizes = {"a": 5, "b": 5, "c": 11, "d": 1}
    shards = plan_shards(sizes, 10)
    assert list(shards.values()) == [["a", "b"], ["c"], ["d"]]
    assert plan_shards(sizes, 22) == {"model.safetensors": ["a", "b", "c", "d"]}


def test_dtype_on_disk_and_in_memory(tmp_path: Path) -> None:
    write_hf(build(LLAMA), tmp_path / "half", dtype=torch.bfloat16)
    assert {t.dtype for t in load_file(tmp_path / "half" / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    model = load(tmp_path / "half", dtype=torch.float32)
    expected = [p.to(torch.bfloat16).float() for p in build(LLAMA).parameters()]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected, strict=True))


def test_unused_buffers_of_old_files_are_ignored(tmp_path: Path) -> None:
    path = saved_folder(tmp_path / "llama")
    edit_weights(path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}))
    edit_weights(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert matches_fresh_model(load(path))


def test_original_gpt2_without_prefix_and_with_masks_loads(tmp_path: Path) -> None:
    path = saved_folder(tmp_path / "gpt2", GPT2)
    tensors = load_file(path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 16, 16) for i in range(2)} | {"h.0.attn.masked_bias": torch.ones(1)}
    save_file(bare, path / "model.safetensors")
    assert matches_fresh_model(load(path), GPT2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.safetensors lacks the tensor 'model\.norm\.weight' \[12\]"),
        (
            lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"),
            r"lacks the tensor .*k_proj",
        ),
        (lambda t: t.update({"a.lora_A": torch.ones(2)}), r"contains 'a\.lora_A', which the model does not have"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(13)}),
            r"of shape \[13\].*makes it \[12\]",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(12, dtype=torch.int8)}),
            r"as I8, but only F64, F32, F16, BF16",
        ),
        (lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}), "'lm_head.weight' that differs"),
        (lambda t: t.update({"lm_head.weight": torch.ones(3, 3)}), "'lm_head.weight' that differs"),
        (lambda t: t.pop("model.embed_tokens.weight"), r"lacks the tensor 'model\.embed_tokens"),
    ],
)
def test_wrong_tensors_are_refused(change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path) -> None:
    edit_weights(saved_folder(tmp_path / "x"), change)
    assert_refused(tmp_path / "x", message)


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    assert_refused(tmp_path / "nowhere", r"nowhere/config\.json is missing")
    path = saved_folder(tmp_path / "x")
    weights, whole = path / "model.safetensors", (path / "model.safetensors").read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        weights.write_bytes(whole[:size])
        assert_refused(path, r"model\.safetensors is damaged or truncated")
    weights.unlink()
    assert_refused(path, r"has neither model\.safetensors nor model\.safetensors\.index\.json")
    (path / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    assert_refused(path, r"pytorch_model\.bin is a pickle, which can run code.*save_pretrained")
    for text in ("", "{", "[1]", "\0"):
        (path / "config.json").write_text(text)
        assert_refused(path, r"config\.json")


def test_implausible_config_is_refused_before_allocation(tmp_path: Path) -> None:
    path = saved_folder(tmp_path / "x")
    raw = json.loads((path / "config.json").read_text())
    for layers, says in (
        (10**6, "they belong to different models"),
        (10**12, "layers is 1000000000000: input should be"),
    ):
        (path / "config.json").write_text(json.dumps(raw | {"num_hidden_layers": layers}))
        assert_refused(path, says)


def test_inconsistent_shard_index_is_refused(tmp_path: Path) -> None:
    good = saved_folder(tmp_path / "good", shard_bytes=6000)
    index = json.loads((good / "model.safetensors.index.json").read_text())
    first = min(index["weight_map"].values())
    names = [name for name, file in index["weight_map"].items() if file == first]
    assert len(names) > 1

    def broken(change: Callable[[Path, dict[str, str]], object]) -> Path:
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        path = Path(shutil.copytree(good, tmp_path / "bad"))
        weight_map = dict(index["weight_map"])
        change(path, weight_map)
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        return path

    assert_refused(broken(lambda path, _: (path / first).unlink()), rf"{first} is missing, but .*index\.json lists it")
    assert_refused(broken(lambda path, _: (path / first).write_bytes(b"x" * 50)), f"{first} is damaged")
    assert_refused(
        broken(lambda _, m: m.update(dict.fromkeys(names, "../good/" + first))), "not a safetensors file of this folder"
    )
    assert_refused(
        broken(lambda _, m: m.update(dict.fromkeys(names, "/etc/passwd"))), "not a safetensors file of this folder"
    )
    assert_refused(broken(lambda _, m: m.pop(names[0])), rf"{first} contains the tensor '{names[0]}'.*says otherwise")
    assert_refused(broken(lambda _, m: m.update(ghost=first)), rf"{first} lacks the tensor 'ghost'.*says otherwise")
    assert_refused(broken(lambda _, m: m.clear()), "has no 'weight_map'")
    assert matches_fresh_model(load(broken(lambda _path, _map: None)))


class FailingTokenizer:
    """A tokenizer that cannot be saved."""

    bos_id, eos_ids = 1, (2, 3)

    def __init__(self, error: Exception | None):
        self.error = error

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text("{}")
        if self.error:
            raise self.error


def test_folder_is_written_atomically(tmp_path: Path) -> None:
    for error in (OSError("disk full"), DataError("no")):
        with pytest.raises(CheckpointError, match=str(error)):
            write_hf(build(LLAMA), tmp_path / "x", tokenizer=FailingTokenizer(error))
        assert list(tmp_path.iterdir()) == []
    write_hf(build(LLAMA), tmp_path / "x", tokenizer=FailingTokenizer(None))
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    ]  # fmt: skip
    for file in ("config.json", "generation_config.json"):
        raw = json.loads((tmp_path / "x" / file).read_text())
        assert (raw["bos_token_id"], raw["eos_token_id"]) == (1, [2, 3])
    before = (tmp_path / "x" / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="already exists"):
        write_hf(build(LLAMA, seed=1), tmp_path / "x")
    assert (tmp_path / "x" / "model.safetensors").read_bytes() == before


def test_model_of_another_config_is_an_internal_error(tmp_path: Path) -> None:
    files = HFFolder(saved_folder(tmp_path / "x"))
    with pytest.raises(KeyError):
        files.load_weights(build(GPT2))


def test_row_ranges_that_cut_through_heads_are_read(tmp_path: Path) -> None:
    """As FSDP reads: any range of rows of any parameter."""
    config = LLAMA.replace(heads=6, kv_heads=2, width=10)
    whole = build(config)
    write_hf(whole, tmp_path / "x")
    weights = HFFolder(tmp_path / "x")._weights
    for name, parameter in whole.named_parameters():
        n = parameter.shape[0]
        for start, stop in ((0, n), (1, n - 1), (n // 3, n // 2), (n // 2, n // 2), (n - 1, n)):
            box = ((start, stop), *((0, m) for m in parameter.shape[1:]))
            got = weights.mappings[name].read(weights.source, box, config)
            assert torch.equal(got, parameter[start:stop]), (name, start, stop)

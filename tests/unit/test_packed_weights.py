"""Packed weights: one file for all engines, the same numbers with and without it, and no trust in what is in it."""

import errno
import logging
import multiprocessing
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade import api
from colonnade.api import Model
from colonnade.checkpoint import packed_weights
from colonnade.config import ExpertsConfig, LatentConfig, MoeConfig, Plan, ServeConfig
from colonnade.kernels.cpu import kernels
from colonnade.model import Transformer
from colonnade.model.weight_only_quant import stored_quantised
from colonnade.model_spec import ModelSpec
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import SamplingParams
from colonnade.serve.engine import Engine
from tests.serve import tiny

MODELS: dict[str, dict[str, Any]] = {
    "llama": {"width": 64, "ffn_width": 96, "qkv_bias": True},
    "some rows": {"width": 64, "ffn_width": 99},  # cannot be stored in blocks
    "experts": {
        "width": 64,
        "latent": LatentConfig(kv_rank=32, rope_width=2, v_width=6),
        "kv_heads": 6,
        "moe": MoeConfig(experts=4, active=2, ffn_width=32, first_k_dense_replace=1),
    },
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    if not kernels.available(torch.float32):
        pytest.skip("needs the C++ kernels")
    monkeypatch.setattr(packed_weights, "FOLDER", tmp_path / "cache")
    monkeypatch.setattr(packed_weights, "MIN_PACKED_BYTES", 0)
    return tmp_path / "cache"


def saved(path: Path, seed: int = 1, **changes: Any) -> Path:
    model = tiny.initialise(Transformer(tiny.config(**changes)), seed=seed).requires_grad_(False)
    api.save(Model(model, tiny.tokenizer(), DistributedContext.solo(torch.device("cpu")), "m"), path, overwrite=True)
    return path


def load(path: Path, packed: Any, weights: Any = "int8") -> Model:
    return api.load(path, dtype="float32", device="cpu", weights=weights, weight_group=32, packed=packed)


def tokens(model: Model) -> list[Any]:
    engine = Engine(model.transformer, tiny.tokenizer(), ServeConfig(pages=40, page_tokens=4))
    return engine.generate([[1, 2, 3], [50, 7]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))


def all_tensors(model: Transformer) -> dict[str, Tensor]:
    found = dict((*model.named_parameters(), *model.named_buffers()))
    for name, weight in stored_quantised(model).items():
        found |= {f"{name}.values": weight.values, f"{name}.scales": weight.scales}
    return found


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == packed_weights.__name__]


def refuse(*_: object) -> None:
    raise AssertionError("the checkpoint is read again")


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", MODELS)
def test_engines_from_the_file_are_those_from_the_checkpoint(
    name: str, weights: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path / "m", **MODELS[name])
    expected = tokens(load(path, "never", weights))
    assert not folder.exists()
    first = load(path, "copied", weights)  # writes the file
    written = all_tensors(first.transformer)
    assert tokens(first) == expected and len(list(folder.glob("*.packed"))) == 1
    monkeypatch.setattr(api, "load_model", refuse)
    for use in ("copied", "mapped"):
        model = load(path, use, weights)
        again = all_tensors(model.transformer)
        assert again.keys() == written.keys()
        assert all(torch.equal(again[key], written[key]) for key in written)
        assert tokens(model) == expected


def test_another_checkpoint_format_or_config_is_another_file(tmp_path: Path, folder: Path) -> None:
    path = saved(tmp_path / "m", **MODELS["experts"])
    load(path, "copied")
    load(path, "mapped")
    assert len(list(folder.iterdir())) == 1
    load(path, "copied", "int4")
    api.load(path, dtype="bfloat16", device="cpu", weights="int8", packed="copied")
    fewer = ExpertsConfig(active=1)
    api.load(path, dtype="float32", device="cpu", weights="int8", weight_group=32, experts=fewer, packed="copied")
    assert len(list(folder.iterdir())) == 4
    before = tokens(load(path, "mapped"))
    saved(tmp_path / "m", seed=2, **MODELS["experts"])
    assert tokens(load(path, "mapped")) != before and len(list(folder.iterdir())) == 5


def test_other_code_is_another_file(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an update, a name map or a layer may arrange the same checkpoint in another way."""
    path = saved(tmp_path / "m", **MODELS["llama"])
    load(path, "copied")
    copy = tmp_path / "colonnade"
    shutil.copytree(packed_weights.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "static"))
    monkeypatch.setattr(packed_weights, "PACKAGE", copy)
    load(path, "copied")
    assert len(list(folder.iterdir())) == 1
    for number, source in enumerate(("checkpoint/hf/llama.py", "model/attention.py", "kernels/linear/quantise.py"), 2):
        other = tmp_path / str(number)
        shutil.copytree(copy, other)
        with (other / source).open("a") as file:
            file.write("# changed")
        monkeypatch.setattr(packed_weights, "PACKAGE", other)
        load(path, "copied")
        assert len(list(folder.iterdir())) == number


@pytest.mark.parametrize("damage", ["a bit", "truncated", "empty", "other bytes"])
@pytest.mark.parametrize("use", ["copied", "mapped"])
def test_a_damaged_file_is_made_again(
    use: str, damage: str, tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path / "m", **MODELS["llama"])
    expected = tokens(load(path, use))
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    changed = bytearray(whole)
    changed[len(whole) // 2] ^= 4
    file.write_bytes(
        {"a bit": changed, "truncated": whole[:-100], "empty": b"", "other bytes": os.urandom(9000)}[damage]
    )
    with caplog.at_level(logging.WARNING):
        assert tokens(load(path, use)) == expected
    (warning,) = warnings_of(caplog)
    assert "it is made again" in warning
    assert file.read_bytes() == whole


def test_a_swap_in_one_replica_changes_no_other(tmp_path: Path, folder: Path) -> None:
    path = saved(tmp_path / "m", **MODELS["llama"])
    expected = tokens(load(path, "mapped"))
    one, other = load(path, "mapped"), load(path, "mapped")
    for x in all_tensors(one.transformer).values():
        x.zero_()
    assert tokens(other) == expected == tokens(load(path, "mapped"))


def pack(cache: Path, path: Path, use: str) -> list[Any]:
    packed_weights.FOLDER, packed_weights.MIN_PACKED_BYTES = cache, 0
    torch.set_num_threads(1)
    return [one.token_ids for one in tokens(load(path, use))]


def test_processes_may_pack_at_the_same_time(tmp_path: Path, folder: Path) -> None:
    path = saved(tmp_path / "m", **MODELS["llama"])
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        texts = pool.starmap(pack, [(folder, path, use) for use in ("mapped", "mapped", "copied")])
    assert texts[0] == texts[1] == texts[2] == pack(folder, path, "mapped")
    assert [file.suffix for file in folder.iterdir()] == [".packed"]


@pytest.mark.parametrize("problem", ["full disk", "folder of others", "no folder"])
def test_without_the_file_engines_pack_for_themselves(
    problem: str, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path / "m", **MODELS["llama"])
    expected = tokens(load(path, "never"))
    if problem == "full disk":

        def full(_: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(packed_weights.os, "fsync", full)
    elif problem == "folder of others":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        (tmp_path / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING):
        assert tokens(load(path, "mapped")) == expected
    (warning,) = warnings_of(caplog)
    assert "each start packs them again" in warning
    reason = {"full disk": "No space left", "folder of others": "others may write", "no folder": "exists"}[problem]
    assert reason in warning
    assert problem == "no folder" or not list(folder.iterdir())


def test_files_that_nothing_uses_are_deleted(tmp_path: Path, folder: Path) -> None:
    folder.mkdir(mode=0o700)
    for name, days in (("old.packed", 31), ("recent.packed", 29), ("left.part", 2), ("written.part", 0)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - 86_400 * days,) * 2)
    load(saved(tmp_path / "m", **MODELS["llama"]), "copied")
    names = {file.name for file in folder.iterdir()}
    assert {"recent.packed", "written.part"} < names and len(names) == 3


def test_what_has_no_file(tmp_path: Path, folder: Path) -> None:
    path = saved(tmp_path / "m", **MODELS["llama"])
    api.load(path, dtype="float32", device="cpu", packed="copied")
    api.load(path, dtype="float32", device="cpu", weights="float8", packed="copied")
    assert not folder.exists()

    def use(**settings: Any) -> str:
        return ModelSpec(str(path), Plan(), ServeConfig(**settings), "cpu", "float32").packed_use

    assert use() == "copied" and use(replicas=2) == use(replicas="auto") == "mapped"
    assert use(batch_invariant=True) == "never"

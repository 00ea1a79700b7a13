"""Native checkpoints in one process: round trips, refusals with remedies, and safety against kills."""

import json
import multiprocessing as mp
import pickle
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from colonnade.checkpoint import atomic_folder as folders
from colonnade.checkpoint import native
from colonnade.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from colonnade.errors import CheckpointError
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import UnshardedMasters, masters
from colonnade.train.optimizer import AdamW

CONFIG = ModelConfig(vocab_size=61, layers=2, width=16, heads=4, kv_heads=2, ffn_width=17, context=32, qk_norm=True)
SOLO = DistributedContext.solo()


def make_state(
    config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32, seed: int = 1
) -> tuple[Any, Any, AdamW]:
    """A model, its masters and its optimizer with some state in it."""
    model = initialise(Transformer(config, dtype=dtype), seed)
    master_weights = masters(model, SOLO, dtype)
    optimizer = AdamW(master_weights.local, TrainConfig())
    generator = torch.Generator().manual_seed(seed)
    for tensor in optimizer.state.values():
        tensor.copy_(torch.rand(tensor.shape, generator=generator))
    optimizer.steps = 3
    return model, master_weights, optimizer


def write(folder: Path, seed: int = 1, config: ModelConfig = CONFIG) -> tuple[Any, Any, AdamW]:
    state = model, master_weights, optimizer = make_state(config, seed=seed)
    data = DataConfig(sequence=config.context)
    run = RunConfig(name="written", model=config, data=data, train=TrainConfig(clip=float("inf")))
    meta = native.Meta(model=config, run=run, step=3, cursor={"seen": 96})
    native.save(folder, model, meta, SOLO, masters=master_weights, optimizer=optimizer)
    return state


def read(folder: Path) -> tuple[Any, Any, AdamW]:
    state = model, master_weights, optimizer = make_state(seed=2)
    native.load(folder, model, SOLO, masters=master_weights, optimizer=optimizer)
    return state


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    write(tmp_path / "step-3")
    return tmp_path / "step-3"


def test_saving_and_loading_round_trips(saved: Path) -> None:
    _, master_weights, optimizer = make_state(seed=1)
    _, master_weights_2, optimizer_2 = read(saved)
    for name, weight in master_weights.local.items():
        assert torch.equal(weight, master_weights_2.local[name]), name
    for key, moment in optimizer.state.items():
        assert torch.equal(moment, optimizer_2.state[key]), key
    meta = native.read_meta(saved)
    assert (meta.step, meta.cursor, meta.model) == (3, {"seen": 96}, CONFIG)
    assert meta.run is not None and meta.run.train.clip == float("inf")
    assert meta.torch == torch.__version__
    assert not list(saved.parent.glob(".*")), "nothing hidden is left behind"


def test_tokenizer_is_saved_with_the_checkpoint(tmp_path: Path) -> None:
    class FakeTokenizer:
        size_bytes = 10

        def save(self, folder: Path) -> None:
            (folder / "tokenizer.json").write_text("{}")

    model, _, _ = make_state()
    native.save(tmp_path / "it", model, native.Meta(model=CONFIG), SOLO, tokenizer=FakeTokenizer())
    assert (tmp_path / "it" / "tokenizer" / "tokenizer.json").read_text() == "{}"
    assert "tokenizer/tokenizer.json" in folders.Manifest.read(tmp_path / "it").files


def flip_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    (file, damage, message)
    for file in ("weights-00000.safetensors", "exp_avg-00000.safetensors", "tensors.json", "checkpoint.json")
    for damage, message in ((flip_bit, "checksum"), (truncate, "bytes instead of"), (Path.unlink, "is missing"))
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("file", "damage", "message"), DAMAGES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_damage_error_names_the_file(saved: Path, file: str, damage: Callable[[Path], None], message: str) -> None:
    damage(saved / file)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(saved)
    assert str(saved / file) in str(caught.value)
    assert "\n" not in str(caught.value)


def _edit(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return edit


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "manifest.json cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "is not a JSON object"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json cannot be read"),
        (_edit(format="other"), "format 'other'"),
        (_edit(version=99), "upgrade Colonnade"),
        (_edit(files={"../../etc/passwd": {"bytes": 1, "sha256": "0" * 64}}), "outside its folder"),
        (_edit(files={}), "is not in manifest.json"),
        (_edit(files={"a": 1}), "damaged, or was not written by Colonnade"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_folders_of_other_formats_are_refused(saved: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(saved)
    with pytest.raises(CheckpointError, match=message) as caught:
        read(saved)
    assert str(saved) in str(caught.value)


def _alter(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda index: index["tensors"]["weights/norm.weight"]["pieces"][0].update(changes)


def _list_piece_twice(index: dict[str, Any]) -> None:
    entry = index["tensors"]["weights/norm.weight"]
    entry["pieces"] = [entry["pieces"][0] | {"sizes": [8]}] * 2


def _unknown_dtype(index: dict[str, Any]) -> None:
    index["tensors"]["weights/norm.weight"]["dtype"] = "float320"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_alter(offsets=[5]), r"a piece \(16,\) at \(5,\) in weights-00000.safetensors of 'weights/norm.weight' \(16"),
        (_alter(offsets=[-1]), r"a piece \(16,\) at \(-1,\)"),
        (_alter(offsets=[0, 0], sizes=[16, 1]), r"a piece \(16, 1\) at \(0, 0\)"),
        (_alter(file="exp_avg-00000.safetensors"), r"in exp_avg-00000.safetensors of 'weights/norm.weight'"),
        (_alter(file="weights-00001.safetensors"), r"weights-00001.safetensors is not in manifest.json"),
        (_list_piece_twice, r"lists a part of weights/norm.weight twice"),
        (_unknown_dtype, r"dtype is 'float320'"),
    ],
)  # fmt: skip
def test_an_inconsistent_index_is_refused(saved: Path, damage: Callable[[dict[str, Any]], None], message: str) -> None:
    """The checksum matches but the content is wrong; a misplaced piece would leave values unset."""
    index = json.loads((saved / "tensors.json").read_text())
    damage(index)
    (saved / "tensors.json").write_text(json.dumps(index))
    manifest = json.loads((saved / "manifest.json").read_text())
    manifest["files"]["tensors.json"] = folders.digest_of(saved / "tensors.json").model_dump()
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=message):
        read(saved)


def test_pieces_that_overlap_are_refused(saved: Path) -> None:
    """As many elements as the tensor has, but some twice, so others would stay unset."""
    index, name = json.loads((saved / "tensors.json").read_text()), "norm.weight"
    first = saved / "weights-00000.safetensors"
    tensors = load_file(first)
    save_file({name: tensors[name][4:12].clone()}, saved / "weights-00001.safetensors")
    save_file(tensors | {name: tensors[name][:8].clone()}, first)
    pieces = [{"offsets": [4 * i], "sizes": [8], "file": f"weights-0000{i}.safetensors"} for i in range(2)]
    index["tensors"][f"weights/{name}"]["pieces"] = pieces
    (saved / "tensors.json").write_text(json.dumps(index))
    manifest = json.loads((saved / "manifest.json").read_text())
    for path in saved.iterdir():
        if path.name != "manifest.json":
            manifest["files"][path.name] = folders.digest_of(path).model_dump()
    (saved / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"lists a part of weights/norm\.weight twice"):
        read(saved)


def test_a_hugging_face_folder_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="Hugging Face"):
        native.read_meta(tmp_path)


def test_nothing_is_unpickled(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a pickled ``.metadata`` of torch that someone added is read."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("unpickled")

    (saved / ".metadata").write_bytes(pickle.dumps(print))
    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    read(saved)


def test_types_and_sizes_must_agree(saved: Path) -> None:
    model, master_weights, optimizer = make_state(dtype=torch.float64)
    with pytest.raises(CheckpointError, match=r"in float32, but this run uses float64"):
        native.load(saved, model, SOLO, masters=master_weights, optimizer=optimizer)
    native.load(saved, model, SOLO)  # weights alone are cast to the model's dtype
    model, master_weights, optimizer = make_state(CONFIG.replace(ffn_width=18))
    with pytest.raises(CheckpointError, match=r"of another model \(model.ffn_width: 17 -> 18\); resume with"):
        native.load(saved, model, SOLO, masters=master_weights, optimizer=optimizer)


def test_weights_without_optimizer_do_not_resume(tmp_path: Path) -> None:
    model, master_weights, optimizer = make_state()
    native.save(tmp_path / "it", model, native.Meta(model=CONFIG), SOLO, masters=master_weights)
    with pytest.raises(CheckpointError, match="no optimizer state 'exp_avg/"):
        native.load(tmp_path / "it", model, SOLO, masters=master_weights, optimizer=optimizer)


def test_bfloat16_compute_keeps_float32_masters(saved: Path) -> None:
    model = Transformer(CONFIG)
    master_weights = masters(model, SOLO, torch.bfloat16)
    native.load(saved, model, SOLO, masters=master_weights)
    _, reference, _ = make_state(seed=1)
    assert isinstance(master_weights, UnshardedMasters)
    for name, parameter in model.named_parameters():
        assert torch.equal(master_weights.local[name], reference.local[name])
        assert torch.equal(parameter, reference.local[name].bfloat16())


def test_an_existing_folder_is_refused_and_unchanged(saved: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with pytest.raises(CheckpointError, match="already exists"):
        write(saved, seed=5)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert not list(saved.parent.glob(".*"))


def test_a_failed_write_leaves_no_files(saved: Path) -> None:
    """A file size limit makes the write fail, as a full disk would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"cannot be written|File too large"):
            write(saved.with_name("step-6"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in saved.parent.iterdir()] == ["step-3"]
    read(saved)


def test_newest_skips_incomplete_checkpoints(tmp_path: Path) -> None:
    assert native.newest(tmp_path / "nowhere") is None
    for name in ("step-3", "step-20", "step-100"):
        write(tmp_path / name)
    (tmp_path / "step-100" / "weights-00000.safetensors").unlink()
    (tmp_path / ".step-200.partial").mkdir()
    (tmp_path / "step-300").mkdir()
    (tmp_path / "step-4x").mkdir()
    assert native.newest(tmp_path) == tmp_path / "step-20"


def _save_forever(root: Path, config: ModelConfig) -> None:
    model, master_weights, _ = make_state(config)
    number = 1
    while True:
        native.save(
            root / f"step-{number}", model, native.Meta(model=config, step=number), SOLO, masters=master_weights
        )
        number += 1


def test_kill_during_a_save_loses_nothing(tmp_path: Path) -> None:
    """A process that only saves is killed at various moments; the newest folder always loads."""
    config = CONFIG.replace(width=128, heads=4, head_width=0, kv_heads=0, ffn_width=1000, layers=8)
    model, _, _ = make_state(config)
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["colonnade.checkpoint.native"])
    interrupted = 0
    for number in range(5):
        root = tmp_path / str(number)
        process = context.Process(target=_save_forever, args=(root, config))
        process.start()
        deadline = time.monotonic() + 60
        while not (root / "step-1").exists():
            assert process.is_alive() and time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(0.013 * number)
        process.kill()
        process.join()
        interrupted += bool(list(root.glob(".*.partial")))
        folder = native.newest(root)
        assert folder is not None
        assert native.load(folder, model, SOLO).step == int(folder.name.removeprefix("step-"))
        assert folder == folders.list_steps(root)[0][1], "every visible folder must be complete"
    assert interrupted, "no kill came during a save; the test proves nothing"

"""Weights that do not fit are refused before reading: in load, the commands that load, convert and upcycling."""

from pathlib import Path

import pytest
import torch

from colonnade import api, tune
from colonnade.cli.main import main
from colonnade.config import MoeConfig, Plan
from colonnade.config.presets import preset
from colonnade.errors import CapacityError
from colonnade.model.weight_memory import WeightMemory
from colonnade.model.weight_only_quant import weight_bytes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.tune.upcycle import upcycled_config
from tests.serve import tiny

GIB = 1 << 30
CPU, GPU = torch.device("cpu"), torch.device("cuda")
FREE = "colonnade.parallel.device_memory.free_host_bytes"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = api.Model(tiny.model(dtype=torch.float32), tiny.tokenizer(), DistributedContext.solo(CPU), "tiny")
    return api.save(model, tmp_path_factory.mktemp("weights") / "m")


@pytest.mark.parametrize("words", [["generate", "{}", "a"], ["eval", "{}", "--text", "{text}"],
                                   ["convert", "{}", "{out}"]], ids=lambda words: words[0])  # fmt: skip
def test_commands_refuse_before_reading(
    words: list[str], saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text").write_text("a column stands in a row")
    monkeypatch.setattr(FREE, lambda: 10_000)
    monkeypatch.setattr("colonnade.model.weight_memory.free_host_bytes", lambda: 10_000)
    monkeypatch.setattr("colonnade.checkpoint.native.load", None)
    arguments = [word.format(saved, text=tmp_path / "text", out=tmp_path / "out") for word in words]
    with pytest.raises(SystemExit):
        main([*arguments, "--device", "cpu"] if words[0] != "convert" else arguments)
    output = capsys.readouterr().err
    assert "CapacityError" in output and "does not fit" in output
    assert not (tmp_path / "out").exists()


def test_load_reports_sufficient_remedies(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with api.load(saved, dtype="float32", device="cpu") as model:
        needed = weight_bytes(model.transformer)
    monkeypatch.setattr(FREE, lambda: int(needed / 0.95) + 8)
    api.load(saved, dtype="float32", device="cpu").close()
    monkeypatch.setattr(FREE, lambda: int(needed * 0.75))
    with pytest.raises(
        CapacityError, match=r"nothing was read; any of these would be enough: --dtype bfloat16 \("
    ) as caught:
        api.load(saved, dtype="float32", device="cpu")
    assert "--plan.tp" not in str(caught.value), "ranks of one host share its memory"
    api.load(saved, dtype="bfloat16", device="cpu").close()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(CapacityError, match="does not fit"):
        api.load(saved, dtype="bfloat16", device="cpu")


def test_each_remedy_is_sufficient() -> None:
    whole = WeightMemory(preset("mixtral-8x7b"), torch.bfloat16, GPU)
    message = str(whole.refusal("it", 80 * GIB, 200 * GIB))
    assert "--experts.layers_on_device 2 (" in message and "--plan.tp 2 --plan.ep 2 on as many GPUs (" in message
    assert "--serve.weights int4 of generate and serve (" in message
    message = str(whole.refusal("it", 20 * GIB, 200 * GIB))
    assert (
        "--plan.tp 2" not in message
        and "--plan.tp 8 --plan.ep 8 on as many GPUs (" in message
        and "int8" not in message
    )
    assert "--experts.layers_on_device" not in str(whole.refusal("it", 80 * GIB, 50 * GIB)), (
        "they do not fit into host memory"
    )
    assert "use a smaller model" in str(WeightMemory(preset("llama-3-8b"), torch.bfloat16, CPU).refusal("it", GIB, GIB))
    on_device, on_host = WeightMemory(preset("mixtral-8x7b"), torch.bfloat16, GPU, layers_on_device=2).bytes()
    assert on_device + on_host == whole.bytes()[0]
    assert WeightMemory(preset("llama-3-8b"), torch.bfloat16, GPU, Plan(tp=2)).bytes()[0] < 0.51 * 2 * 8.1e9


@pytest.mark.slow
def test_upcycled_or_pruned_model_must_fit_beside_the_source(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense = tiny.model(dtype=torch.float32)
    experts = tiny.model(dtype=torch.float32, moe=MoeConfig(experts=4, active=2, ffn_width=6))
    monkeypatch.setattr(FREE, lambda: 20_000)
    with pytest.raises(CapacityError, match="the model with 8 experts does not fit"):
        tune.upcycle(dense, 8)
    with pytest.raises(CapacityError, match="the model with 2 experts does not fit"):
        tune.prune(experts, torch.ones(experts.config.layers, 4, dtype=torch.int64), 2)
    with pytest.raises(SystemExit):
        main(["convert", str(saved), str(tmp_path / "x"), "--upcycle", "8"])
    enough = sum(WeightMemory(config, torch.float32, CPU).bytes()[0] for config in (
        dense.config, upcycled_config(dense.config, 8),
    ))  # fmt: skip
    monkeypatch.setattr(FREE, lambda: int(1.02 * enough))
    with pytest.raises(SystemExit):
        main(["convert", str(saved), str(tmp_path / "x"), "--upcycle", "8"])
    assert not (tmp_path / "x").exists(), "the output file needs memory as well"
    monkeypatch.setattr(FREE, lambda: 3 * enough)
    main(["convert", str(saved), str(tmp_path / "x"), "--upcycle", "8"])

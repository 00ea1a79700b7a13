"""``colonnade verify`` of recognisers: layouts that equal one process, faults that it finds, and what it refuses."""

import json

import pytest
import torch

from colonnade.cli.main import main
from colonnade.config import Plan
from colonnade.config.speech import SpeechConfig
from colonnade.errors import PlanError
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.speech.model import SpeechModel
from colonnade.speech.verify import _compare, _texts, _train, plans_of
from tests.unit.test_conformer import TINY as CONFORMER

EMFORMER = SpeechConfig(
    layers=2, width=16, heads=2, ffn_width=24, joint_width=12, mels=10, segment=4, left=6, right=2, memory=1
)


@pytest.mark.parametrize("family", ["emformer", pytest.param("conformer", marks=pytest.mark.slow)])
def test_every_layout_equals_one_process(family, tmp_path, capfd):
    config = EMFORMER if family == "emformer" else CONFORMER.replace(heads=2)
    SpeechModel(config).save(tmp_path / "run" / "step-1")
    main(["verify", str(tmp_path / "run"), "--world", "2", "--out", str(tmp_path / "verify.json")])
    printed = " ".join("".join(capfd.readouterr()).split())
    assert "2 of 2 plans equal one process" in printed
    report = json.loads((tmp_path / "verify.json").read_text())
    assert [each["name"] for each in report["plans"]] == ["dp=2", "tp=2"]
    for each in report["plans"]:
        assert each["ok"]
        assert each["errors"]["words"] == 0
        assert 0 < each["errors"]["gradients"] < 1e-10


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", ["joint.bias", "out.weight", "predictor.embed.weight", "encoder.blocks.0.norm2.bias"])
def test_a_fault_is_found(fault):
    """A weight that differs in one element, as on a rank that holds a wrong share."""
    whole, model = (SpeechModel(EMFORMER, 0, torch.float64) for _ in range(2))
    for each in (whole, model):
        each.joint.bias.data[0] -= 2.0
    reference, texts = _train(whole), _texts(whole)
    assert len(texts[0]) > 5
    with DistributedContext.build(Plan(), "cpu") as context:
        same = _compare(model, context, reference, texts)
        assert same.ok
        assert same.errors == {"loss": 0.0, "gradients": 0.0, "words": 0.0}
        with torch.no_grad():
            model.get_parameter(fault).view(-1)[1] += 1e-3
        broken = _compare(model, context, reference, texts)
    assert not broken.ok
    assert broken.errors["gradients"] > 1e-10
    assert str(broken).startswith("MISS")


def test_layouts_and_refusals(tmp_path, capsys):
    model = SpeechModel(EMFORMER)
    assert [str(plan) for plan in plans_of(model, 4)] == ["dp=4", "dp=2 tp=2"]
    assert [str(plan) for plan in plans_of(model, 3)] == ["dp=3"]
    seeing = SpeechModel(EMFORMER.replace(front_end="resnet", picture=16))
    assert [str(plan) for plan in plans_of(seeing, 2)] == ["tp=2"]
    with pytest.raises(PlanError, match="no layout of 3 processes: 2 heads"):
        plans_of(seeing, 3)
    model.save(tmp_path / "step-1")
    for words, problem in (
        (["--device", "cuda"], "recognisers are verified on CPUs"), (["--world", "0"], "not from 1"),
    ):  # fmt: skip
        with pytest.raises(SystemExit):
            main(["verify", str(tmp_path / "step-1"), *words])
        assert problem in " ".join(capsys.readouterr().err.split())

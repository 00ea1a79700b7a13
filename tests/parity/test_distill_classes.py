"""A classifier imitates a fine-tuned one: losses and gradients equal plain torch, under any layout, and runs resume."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import colonnade
from colonnade.config import DistillConfig, MoeConfig, Plan, RunConfig
from colonnade.errors import ConfigError, PlanError
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import layout_of, local_part
from colonnade.train.memory_estimate import estimate
from colonnade.train.training_state import TrainingState
from colonnade.tune import Example, accuracy, fit
from colonnade.tune.classify import example_feed, pack_examples
from tests.parity import test_classify
from tests.parity.test_classify_settings import MODEL, TRAIN
from tests.worlds import assert_same
from tests.worlds import run as in_world

STUDENT = MODEL.replace(layers=1, width=16, heads=4, ffn_width=24)
EXPERTS = {"moe": MoeConfig(experts=4, active=2, ffn_width=12)}
CHOSEN = {
    "kl": DistillConfig(mix=0.3, temperature=2.0),
    "reverse": DistillConfig(loss="reverse", mix=0.25, temperature=1.5),
    "jsd": DistillConfig(loss="jsd", mix=0.5, temperature=1.3, beta=0.2),
    "dist": DistillConfig(loss="dist", mix=0.4, temperature=1.7),
    "dist_alone": DistillConfig(loss="dist", mix=0.0),
    "hidden": DistillConfig(mix=0.4, hidden=0.7),
    "cross_entropy": DistillConfig(loss="dist", mix=1.0),
}


def examples(count: int = 20) -> list[Example]:
    return test_classify.examples(count)


@pytest.fixture(scope="module")
def teachers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, configs = tmp_path_factory.mktemp("teachers"), {
        "large": MODEL, "equal": STUDENT.replace(layers=2), "four": MODEL.replace(classes=4),
        "encoder": MODEL.replace(task_head="encoder", classes=0), "one_segment": MODEL.replace(segments=1),
        "experts": STUDENT.replace(moe=MoeConfig(experts=4, active=2, ffn_width=12)),
    }  # fmt: skip
    for name, config in configs.items():
        model = initialise(Transformer(config, dtype=torch.float64), 3).requires_grad_(False)
        for parameter in model.parameters():
            parameter.mul_(3)  # a teacher with opinions
        if config.classes:
            model.top.classes.weight.mul_(10)
        context = DistributedContext.solo(torch.device("cpu"))
        colonnade.save(colonnade.Model(model, None, context, name), folder / name)
    return {name: str(folder / name) for name in configs}


def config(runs: Path, distill: DistillConfig, **train: object) -> RunConfig:
    return RunConfig(
        name="it", runs=runs, device="cpu", model=STUDENT, data=colonnade.config.DataConfig(sequence=32),
        train=TRAIN.replace(**{"batch": 8, "eval_every": 0, "clip": 1e9, **train}), distill=distill,
    )  # fmt: skip


def pearson(a: Tensor, b: Tensor, dim: int) -> Tensor:
    return F.cosine_similarity(a - a.mean(dim, keepdim=True), b - b.mean(dim, keepdim=True), dim, eps=1e-30)


def plain(settings: DistillConfig, z: Tensor, t: Tensor, labels: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """The mean loss, by the equations of class_distill_loss's docstring."""
    tau, N = settings.temperature, len(z)
    p, q = (t / tau).softmax(1), (z / tau).softmax(1)
    if settings.loss == "kl":
        d = (p * (p / q).log()).sum()
    elif settings.loss == "reverse":
        d = (q * (q / p).log()).sum()
    elif settings.loss == "jsd":
        m = settings.beta * p + (1 - settings.beta) * q
        d = (settings.beta * p * (p / m).log() + (1 - settings.beta) * q * (q / m).log()).sum()
    else:
        d = 2 * (1 - pearson(p, q, 1)).sum() + N * 2 * (1 - pearson(p, q, 0)).mean()
    total = settings.mix * F.cross_entropy(z, labels, reduction="sum") + (1 - settings.mix) * tau**2 * d
    if settings.hidden:
        total = total + settings.hidden * ((v - w).square().sum(1) / w.square().sum(1)).sum()
    return total / N


def forward(model: Transformer, given: list[Example]) -> tuple[Tensor, Tensor]:
    """(logits, pooled vectors) of texts, one at a time."""
    logits, pooled = [], []
    for example in given:
        stream, attend = pack_examples(model, [example])
        x = model(stream, attend, colonnade.model.Hidden())[:1]
        pooled.append(model.top.pooled(x))
        logits.append(model.top.classes(pooled[-1]))
    return torch.cat(logits), torch.cat(pooled)


def reference(run: RunConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """The first step's loss and gradients by plain torch, in one process."""
    numbers = _numbers(run)
    given = [examples()[i] for i in numbers]
    student = initialise(Transformer(run.model, dtype=torch.float64), run.train.seed)
    teacher = colonnade.load(run.distill.teacher, device="cpu", dtype="float64").transformer
    with torch.no_grad():
        t, w = forward(teacher, given)
    z, v = forward(student, given)
    loss = plain(run.distill, z, t, torch.tensor([example.label for example in given]), v, w)
    loss.backward()
    return loss.detach(), {n: p.grad if p.grad is not None else torch.zeros_like(p)
                           for n, p in student.named_parameters()}  # fmt: skip


def _numbers(run: RunConfig) -> list[int]:
    feed = example_feed(run, examples())(run, 0, 1)
    return feed.samples.numbers(0)


def _step(run: RunConfig) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """(loss, gradient norm, this rank's gradients, summed over its data ranks) of the first step."""
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=example_feed(run, examples())) as training,
    ):
        step, found = training._step, dict[str, Tensor]()
        inner = step.optimizer_step.optimizer.step

        def keep(*args: object) -> object:
            for name, holder in training.masters.gradient_holders.items():
                found[name] = holder.grad.detach().clone()
            return inner(*args)

        step.optimizer_step.optimizer.step = keep
        outcome = training.step()
        loss = context.axes.global_sum(outcome.loss_sum) / outcome.count
        gathered = {}
        for name, grad in found.items():
            parts = context.axes.dp.all_gather_uneven_(grad, context.axes.dp.all_gather_int(len(grad)))
            gathered[name] = parts if context.sharded else grad
        return loss, outcome.norm, gathered


def _check_step(run: RunConfig, loss: Tensor, grads: dict[str, Tensor]) -> None:
    ours, norm, found = _step(run)
    assert_same(ours, loss, what="loss")
    assert_same(norm, torch.stack([grad.norm() for grad in grads.values()]).norm(), what="norm")
    with DistributedContext.build(run.plan, "cpu") as context:
        layout = layout_of(Transformer(run.model, context.axes, dtype=torch.float64))
        for name, grad in found.items():
            assert_same(grad, local_part(grads[name], layout[name], context.axes), what=name)


@pytest.mark.parametrize("name", CHOSEN)
@pytest.mark.parametrize("micro", [8, 2])
def test_one_process_equals_plain_torch(name: str, micro: int, teachers: dict[str, str], tmp_path: Path) -> None:
    run = config(tmp_path, CHOSEN[name].replace(teacher=teachers["equal"]), micro_batch=micro)
    in_world(1, _check_step, run, *reference(run))


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", ["kl", "reverse", "jsd", "dist", "hidden"])
@pytest.mark.parametrize(
    ("plan", "micro"),
    [(Plan(tp=2), 4), (Plan(dp=2), 4), (Plan(dp=2), 1), (Plan(tp=2, dp=2, sequence_parallel=True), 2)],
    ids=str,
)
def test_every_layout_equals_plain_torch(
    name: str, plan: Plan, micro: int, teachers: dict[str, str], tmp_path: Path
) -> None:
    teacher = teachers["equal" if name == "hidden" else "large"]
    run = config(tmp_path, CHOSEN[name].replace(teacher=teacher), micro_batch=micro).replace(plan=plan)
    in_world(plan.world, _check_step, run, *reference(run.replace(plan=Plan())))


def _first_step(run: RunConfig) -> tuple[float, float]:
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=example_feed(run, examples())) as training,
    ):
        outcome = training.step()
        return float(context.axes.global_sum(outcome.loss_sum) / outcome.count), float(outcome.norm)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("teacher", "model", "plan"),
    [
        ("large", {}, Plan(dp=2)),
        ("experts", {}, Plan(tp=2)),
        ("experts", {"moe": MoeConfig(experts=4, active=2, ffn_width=12, balance_weight=0.0)}, Plan(dp=2, ep=2)),
    ],
    ids=str,
)
def test_dropout_and_experts_do_not_depend_on_the_layout(
    teacher: str, model: dict, plan: Plan, teachers: dict[str, str], tmp_path: Path
) -> None:
    """With dropout, dist's first pass computes the logits of the second."""
    dropped = {"dropout": 0.2, "attention_dropout": 0.1, "embedding_dropout": 0.1}
    whole = config(tmp_path, CHOSEN["dist"].replace(teacher=teachers[teacher]), micro_batch=8, **dropped)
    whole = whole.replace(model=STUDENT.replace(**model))
    (expected,) = in_world(1, _first_step, whole)
    small = whole.replace(train=whole.train.replace(micro_batch=2))
    for result in (in_world(1, _first_step, small)[0], *in_world(plan.world, _first_step, small.replace(plan=plan))):
        assert result == pytest.approx(expected, rel=1e-10)
    ((plain_loss, _),) = in_world(1, _first_step, whole.replace(train=config(tmp_path, whole.distill).train))
    assert plain_loss != pytest.approx(expected[0], rel=1e-3), "dropout has an effect"


def test_masked_experts_do_not_depend_on_micro_batches(teachers: dict[str, str], tmp_path: Path) -> None:
    """dist's first pass masks the same experts as the second."""
    moe = MoeConfig(experts=4, active=2, ffn_width=12, balance_weight=0.0, output_mask=0.4)
    whole = config(tmp_path, CHOSEN["dist"].replace(teacher=teachers["large"]), micro_batch=8)
    whole = whole.replace(model=STUDENT.replace(moe=moe, init_std=0.3))
    small = whole.replace(train=whole.train.replace(micro_batch=2))
    assert _first_step(small) == pytest.approx(_first_step(whole), rel=1e-10)


@pytest.mark.parametrize("loss", ["kl", "dist"])
def test_a_run_resumes_bit_for_bit(loss: str, teachers: dict[str, str], tmp_path: Path) -> None:
    run = config(tmp_path, DistillConfig(teacher=teachers["large"], loss=loss), steps=4, save_every=2, dropout=0.1)
    whole = fit(run, examples())
    half = run.replace(name="half")
    fit(half, examples())
    shutil.rmtree(tmp_path / "half" / "step-4")
    again = fit(half, examples())
    files = "weights-00000.safetensors"
    assert whole.checkpoint is not None and again.checkpoint is not None
    assert (again.checkpoint / files).read_bytes() == (whole.checkpoint / files).read_bytes()


@pytest.mark.slow
def test_the_student_learns_the_teachers_answers(tmp_path: Path) -> None:
    """From a teacher that was fine-tuned, without the labels."""
    settings = {"steps": 120, "batch": 10, "save_every": 0, "warmup": 4, "clip": 1.0, "dtype": "float32", "min_lr": 0}
    run = config(tmp_path, DistillConfig(), **settings).replace(name="teacher", model=MODEL.replace(layers=1))
    fit(run, examples())
    teacher = colonnade.load(run.folder, device="cpu").transformer
    assert accuracy(teacher, examples()) >= 0.65
    with torch.no_grad():
        answers = forward(teacher, examples())[0].argmax(1).tolist()
    assert len(set(answers)) > 1
    given = [example._replace(label=answer) for example, answer in zip(examples(), answers, strict=True)]
    for loss in ("kl", "dist"):
        imitate = DistillConfig(teacher=str(run.folder), loss=loss, mix=0)
        student = config(tmp_path, imitate, **settings).replace(name=loss)
        fit(student, [example._replace(label=0) for example in examples()])
        assert accuracy(colonnade.load(student.folder, device="cpu").transformer, given) >= 0.9


def _losses(run: RunConfig) -> tuple[list[float], bool, int]:
    """The losses of three steps, whether the teacher was loaded, and the examples in the cache."""
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=example_feed(run, examples())) as training,
    ):
        losses = []
        for _ in range(3):
            outcome = training.step()
            losses.append(float(context.axes.global_sum(outcome.loss_sum) / outcome.count))
        distiller = training._step.distiller
        assert distiller is not None
        return losses, distiller.teacher is not None, len(distiller.cache or ())


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["dist", "reverse"])
def test_a_cache_answers_in_place_of_the_teacher(loss: str, teachers: dict[str, str], tmp_path: Path) -> None:
    """At any temperature, under any layout, from single micro-batches or several."""
    plain_run = config(tmp_path, DistillConfig(teacher=teachers["large"], loss=loss, mix=0.2, temperature=2.0))
    ((expected, loaded, _),) = in_world(1, _losses, plain_run)
    assert loaded
    run = plain_run.replace(distill=plain_run.distill.replace(cache=str(tmp_path / "cache")))
    ((first, loaded, kept),) = in_world(1, _losses, run)
    assert loaded
    assert kept == 20
    assert first == pytest.approx(expected, rel=1e-6)
    for plan, micro in ((Plan(), 8), (Plan(tp=2), 2), (Plan(dp=2), 2)):
        split = run.replace(plan=plan, train=run.train.replace(micro_batch=micro))
        for losses, loaded, _ in in_world(plan.world, _losses, split):
            assert not loaded
            assert losses == pytest.approx(expected, rel=1e-6)
    other = run.replace(distill=run.distill.replace(temperature=1.0))
    ((losses, loaded, _),) = in_world(1, _losses, other)
    assert not loaded
    assert losses != pytest.approx(expected, rel=1e-2)


def test_a_shallower_student_starts_from_the_teachers_layers(teachers: dict[str, str], tmp_path: Path) -> None:
    run = config(
        tmp_path, DistillConfig(teacher=teachers["equal"], init="layers"), steps=1, lr=1e-12, min_lr=0, warmup=0
    )
    fit(run, examples())
    student = colonnade.load(run.folder, device="cpu", dtype="float64").transformer.state_dict()
    teacher = colonnade.load(teachers["equal"], device="cpu", dtype="float64").transformer.state_dict()
    for name, x in student.items():
        assert_same(x, teacher[name], 1e-9, name)


def test_the_teacher_is_in_the_memory_estimate(teachers: dict[str, str], tmp_path: Path) -> None:
    run = config(tmp_path, DistillConfig(teacher=teachers["large"]))
    alone = estimate(run.replace(distill=DistillConfig()), "cpu").device
    with_teacher = estimate(run, "cpu").device
    weights = sum(p.nbytes for p in colonnade.load(teachers["large"], dtype="float64").transformer.parameters())
    assert weights < with_teacher.pop("teacher") < weights + 2**16
    assert with_teacher == alone


def test_what_does_not_apply_is_refused(teachers: dict[str, str], tmp_path: Path) -> None:
    def refused(match: str, teacher: str = "large", plan: Plan = Plan(), model: dict | None = None, **changes) -> None:
        train = {"batch": changes.pop("batch", 8), "micro_batch": 1}
        run = config(tmp_path, DistillConfig(teacher=teachers[teacher], **changes), **train)
        with pytest.raises((ConfigError, PlanError), match=match) as raised:
            fit(run.replace(plan=plan, model=STUDENT.replace(**(model or {}))), examples())
        assert "\n" not in str(raised.value)

    refused("has 4 classes and the run's model 3; use a teacher with the same labels", "four")
    refused("has the output head 'encoder' and is not a classifier; fine-tune it first", "encoder")
    refused("has 1 segments and the run's model 2; set model.segments 1", "one_segment")
    refused("distill.on_policy generates text, which a classifier cannot do", on_policy=0.5)
    refused("distill.cache stores only the teacher's classes, but hidden compares", "equal", cache="c", hidden=0.5)
    refused("ep=2 with etp=1 runs it on all", "experts", plan=Plan(dp=2, ep=2), model=EXPERTS, cache="c")
    refused("compares the examples of a step, but train.batch is 1", loss="dist", batch=1)
    refused("equal widths, but the teacher has 32 and the model 16", hidden=1.0)
    refused("pp=1 and cp=2", plan=Plan(cp=2))
    refused("not spans or choices", model={"task_head": "spans", "classes": 0})
    refused("not spans or choices", model={"classes": 1})
    refused("distill.weights int8 is for teachers that generate text", weights="int8")


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    """The student's is that of the checkpoint it starts from; a student without one gets the teacher's."""
    lines = [f"column {i} bears {i % 3} loads" for i in range(12)]
    folders, vocab = dict[str, str](), 0
    for name, texts in {"ours": lines, "theirs": [line[::-1] for line in lines]}.items():
        tokenizer = colonnade.data.Tokenizer.train(texts, 300)
        context = DistributedContext.solo(torch.device("cpu"))
        model = initialise(Transformer(STUDENT.replace(vocab_size=tokenizer.vocab_size)), 0)
        folders[name] = str(colonnade.save(colonnade.Model(model, tokenizer, context, name), tmp_path / name))
        vocab = tokenizer.vocab_size
    tokenizer = colonnade.load(folders["ours"]).tokenizer
    given = [Example(tokenizer.encode(line), i % 3) for i, line in enumerate(lines)]
    run = config(tmp_path, DistillConfig(teacher=folders["theirs"]), steps=1, pretrained_checkpoint=folders["ours"])
    run = run.replace(model=STUDENT.replace(vocab_size=vocab))
    with pytest.raises(ConfigError, match=r"a different tokenizer from that of distill\.teacher"):
        fit(run, given)
    run = run.replace(distill=DistillConfig(teacher=folders["ours"]), train=run.train.replace(pretrained_checkpoint=""))
    fit(run, given)
    assert colonnade.load(run.folder).tokenizer.encode(lines[0]) == given[0].tokens

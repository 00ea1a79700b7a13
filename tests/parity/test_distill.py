"""Distillation as a section of training: every layout takes the step of one process; teachers of any kind."""

import shutil
from pathlib import Path

import pytest
import torch

from colonnade import api
from colonnade.checkpoint import native
from colonnade.cli import main
from colonnade.compress import Compression, compress
from colonnade.config import DataConfig, DistillConfig, ModelConfig, MoeConfig, Plan, RunConfig, TrainConfig
from colonnade.data import Corpus, build
from colonnade.errors import ConfigError, PlanError
from colonnade.model import Rows, Transformer, initialise
from colonnade.model.loss import IGNORE
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train import Trainer
from colonnade.train.distill import check_teacher
from colonnade.train.initial_weights import teacher_layer
from colonnade.train.memory_estimate import estimate
from colonnade.train.model_inputs import model_inputs
from colonnade.train.training_state import TrainingState
from colonnade.tune.on_policy import OnPolicyFeed, continued, is_chosen
from tests.corpora import TEXT
from tests.worlds import assert_same
from tests.worlds import run as in_world

STUDENT = ModelConfig(vocab_size=300, layers=1, width=16, heads=4, kv_heads=2, ffn_width=12, context=32)
TEACHER = STUDENT.replace(layers=2, width=32, heads=8, kv_heads=4, ffn_width=64, head_width=8)
EXPERTS = STUDENT.replace(family="mixtral", moe=MoeConfig(experts=4, active=2, ffn_width=12))


def save(folder: Path, config: ModelConfig, tokenizer, *, compressed: bool = False) -> Path:
    model = initialise(Transformer(config), 3).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(3)  # a teacher with opinions
    if compressed:
        compress(model, Compression(weights="int4", weight_group=32, by="nearest"))
    return api.save(api.Model(model, tokenizer, DistributedContext.solo(torch.device("cpu")), "teacher"), folder)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "corpus"
    build([(f"doc{i}", f"{i} {TEXT}") for i in range(30)], out, vocab_size=300, validation_share=0.2)
    return out


@pytest.fixture(scope="module")
def teachers(corpus, tmp_path_factory) -> dict[str, Path]:
    folder, tokenizer = tmp_path_factory.mktemp("teachers"), Corpus(corpus).tokenizer
    return {
        "dense": save(folder / "dense", TEACHER, tokenizer),
        "equal": save(folder / "equal", STUDENT.replace(layers=2), tokenizer),
        "experts": save(folder / "experts", EXPERTS, tokenizer),
        "int4": save(folder / "int4", TEACHER, tokenizer, compressed=True),
    }


def config(corpus: Path, runs: Path, distill: DistillConfig, model: ModelConfig = STUDENT, **train) -> RunConfig:
    settings = TrainConfig(
        steps=3, batch=8, micro_batch=2, lr=1e-2, min_lr=1e-3, warmup=0, dtype="float64", eval_every=0, save_every=0,
        log_every=1,
    )  # fmt: skip
    data = DataConfig(path=corpus, sequence=16)
    return RunConfig(
        name="r", runs=runs, device="cpu", model=model, data=data, train=settings.replace(**train), distill=distill
    )


def first_step(run: RunConfig) -> tuple[float, float]:
    """(loss, gradient norm) of the first step."""
    with DistributedContext.build(run.plan, "cpu") as context, TrainingState(run, context) as training:
        outcome = training.step()
        return float(context.axes.global_sum(outcome.loss_sum) / outcome.count), float(outcome.norm)


def settings(teachers, name="dense", **changes) -> DistillConfig:
    return DistillConfig(**{"teacher": str(teachers[name]), "mix": 0.3, "temperature": 1.5, **changes})


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("teacher", "changes", "plan", "micro"),
    [
        ("dense", {"loss": "kl"}, Plan(tp=2), 2),
        ("dense", {"loss": "reverse"}, Plan(tp=2, dp=2), 1),
        ("dense", {"loss": "dist"}, Plan(dp=2), 4),
        ("equal", {"loss": "jsd", "hidden": 0.5}, Plan(tp=2, sequence_parallel=True), 8),
        ("experts", {"loss": "dist"}, Plan(dp=2, ep=2), 2),
        ("int4", {"loss": "kl"}, Plan(tp=2), 2),
    ],
    ids=str,
)
def test_every_layout_takes_the_step_of_one_process(teacher, changes, plan, micro, corpus, teachers, tmp_path) -> None:
    run = config(corpus, tmp_path, settings(teachers, teacher, **changes))
    (alone,) = in_world(1, first_step, run)
    split = run.replace(plan=plan, train=run.train.replace(micro_batch=micro))
    for loss, norm in in_world(plan.world, first_step, split):
        assert_same(torch.tensor(loss), torch.tensor(alone[0]))
        assert_same(torch.tensor(norm), torch.tensor(alone[1]))
    ordinary = run.replace(distill=DistillConfig())
    (other,) = in_world(1, first_step, ordinary)
    assert abs(other[0] - alone[0]) > 1e-3


def _loss_and_reference(run: RunConfig) -> tuple[float, float]:
    """A step's loss, and that of plain torch from both models' logits."""
    with DistributedContext.build(run.plan, "cpu") as context, TrainingState(run, context) as training:
        batches = list(training._on_device(training.feed.samples.at(0)))
        tau, mix, total, count = run.distill.temperature, run.distill.mix, 0.0, 0
        with api.load(run.distill.teacher, weights="dense", dtype="float64", device="cpu", context=context) as teacher:
            for batch in batches:
                stream, attend, _ = model_inputs(batch, training.model)
                valid = batch.targets_T != IGNORE
                z, t = (model(stream, attend, Rows())[valid] for model in (training.model, teacher.transformer))
                cross = torch.nn.functional.cross_entropy(z, batch.targets_T[valid], reduction="sum")
                p, q = (t / tau).softmax(1), (z / tau).softmax(1)
                total += float(mix * cross + (1 - mix) * tau**2 * (p * (p / q).log()).sum())
                count += int(valid.sum())
        outcome = training.step()
        return float(outcome.loss_sum / outcome.count), total / count


def _on_policy(run: RunConfig) -> tuple[float, float, list]:
    """A step's loss, that of plain torch, and (text, trained on, sampled) of each sample."""
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=OnPolicyFeed) as training,
    ):
        text = torch.cat([batch.tokens_T for batch in training.feed.samples.at(0)]).view(-1, 16)
        training.feed.before_step(training.model, 0)
        batches, total, count = training.feed.samples.at(0), 0.0, 0
        with api.load(run.distill.teacher, weights="dense", dtype="float64", device="cpu", context=context) as teacher:
            for batch in batches:
                stream, attend, _ = model_inputs(batch, training.model)
                z, t = (model(stream, attend, Rows()) for model in (training.model, teacher.transformer))
                p, q = (t / 1.5).softmax(1), (z / 1.5).softmax(1)
                valid = batch.targets_T != IGNORE
                assert batch.sampled_T is not None
                text_T = valid & ~batch.sampled_T
                cross = torch.nn.functional.cross_entropy(z[text_T], batch.targets_T[text_T], reduction="sum")
                total += float(0.3 * cross + 0.7 * 1.5**2 * (p * (p / q).log())[valid].sum())
                count += int(valid.sum())
        tokens, sampled = (torch.cat([getattr(batch, name) for batch in batches]).view(-1, 16)
                           for name in ("tokens_T", "sampled_T"))  # fmt: skip
        outcome = training.step()
        assert outcome.extra == {"on_policy": float(sampled.double().mean())}
        return float(outcome.loss_sum / outcome.count), total / count, [text, tokens, sampled]


def test_on_policy_texts_end_as_the_model_says(corpus, teachers, tmp_path) -> None:
    run = config(corpus, tmp_path, settings(teachers, on_policy=0.5))
    ((loss, reference, (text, tokens, sampled)),) = in_world(1, _on_policy, run)
    assert loss == pytest.approx(reference, rel=1e-9)
    assert torch.equal(tokens.where(~sampled, 0), text.where(~sampled, 0))
    chosen = sampled.any(1)
    assert not (chosen & ~torch.tensor([is_chosen(run.train.seed, i, 0.5) for i in range(8)])).any()
    assert 0 < chosen.sum() < 8
    assert sampled[:, 8:].any(0).all()
    assert not sampled[:, :8].any()
    assert (tokens != text)[sampled].float().mean() > 0.5
    assert 0.2 < sum(is_chosen(0, i, 0.25) for i in range(2000)) / 2000 < 0.3
    with pytest.raises(ConfigError, match=r"pass feed=colonnade\.tune\.OnPolicyFeed"):
        Trainer(run).fit()
    for change in ({"plan": Plan(dp=2)}, {"distill": run.distill.replace(cache="c")}):
        with pytest.raises(ConfigError, match=r"distill\.on_policy"):
            OnPolicyFeed(run.replace(**change))


def test_the_document_in_the_middle_is_continued() -> None:
    assert continued(torch.arange(9)) == (slice(0, 4), slice(4, 9))
    assert continued(torch.tensor([0, 1, 0, 1, 2, 3, 0, 1])) == (slice(2, 4), slice(4, 6))
    assert continued(torch.tensor([0, 1, 2, 3, 0, 1, 2, 3])) == (slice(4, 5), slice(5, 8))
    assert continued(torch.tensor([0, 1, 2, 3, 0, 0, 1, 2])) is None


@pytest.mark.slow
def test_an_on_policy_run_resumes_with_the_same_texts(corpus, teachers, tmp_path) -> None:
    run = config(corpus, tmp_path, settings(teachers, on_policy=0.5), steps=4, save_every=2, dtype="float32")
    whole = Trainer(run, feed=OnPolicyFeed).fit()
    half = run.replace(name="half")
    Trainer(half, feed=OnPolicyFeed).fit()
    shutil.rmtree(tmp_path / "half" / "step-4")
    again = Trainer(half, feed=OnPolicyFeed).fit()
    files = "weights-00000.safetensors"
    assert (again.checkpoint / files).read_bytes() == (whole.checkpoint / files).read_bytes()


@pytest.mark.parametrize("teacher", ["dense", "int4"])
def test_a_step_is_what_both_models_logits_give(teacher, corpus, teachers, tmp_path) -> None:
    ((loss, reference),) = in_world(1, _loss_and_reference, config(corpus, tmp_path, settings(teachers, teacher)))
    assert loss == pytest.approx(reference, rel=1e-9 if teacher == "dense" else 1e-3)


@pytest.mark.slow
def test_a_run_learns_and_resumes(corpus, teachers, tmp_path) -> None:
    run = config(corpus, tmp_path, settings(teachers, mix=0.0), steps=12, save_every=6, lr=3e-2)
    summary = Trainer(run).fit()
    whole = native.read_meta(summary.checkpoint)
    assert whole.run is not None and whole.run.distill == run.distill
    half = run.replace(name="half")
    Trainer(half.replace(train=half.train.replace(steps=12, save_every=6))).fit()
    shutil.rmtree(tmp_path / "half" / "step-12")
    again = Trainer(half).fit()
    files = "weights-00000.safetensors"
    assert (again.checkpoint / files).read_bytes() == (summary.checkpoint / files).read_bytes()


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [Plan(), Plan(tp=2), Plan(dp=2)], ids=str)
def test_a_student_starts_from_the_teachers_layers(plan, corpus, teachers, tmp_path) -> None:
    run = config(corpus, tmp_path, settings(teachers, "equal", init="layers"), steps=1, lr=1e-30, min_lr=0)
    (loss,) = {loss for loss, _ in in_world(plan.world, first_step, run.replace(plan=plan))}
    teacher = api.load(teachers["equal"], dtype="float64", device="cpu").transformer
    student = Transformer(STUDENT, dtype=torch.float64).requires_grad_(False)
    for name, parameter in student.named_parameters():
        parameter.copy_(teacher.get_parameter(name))  # the first of two layers
    api.save(api.Model(student, None, DistributedContext.solo(torch.device("cpu")), "m"), tmp_path / "s")
    start = run.replace(
        distill=run.distill.replace(init="random"), train=run.train.replace(pretrained_checkpoint=str(tmp_path / "s"))
    )
    ((expected, _),) = in_world(1, first_step, start)
    assert loss == pytest.approx(expected, rel=1e-9)


def test_a_run_resumes_only_with_its_teacher_and_loss(corpus, teachers, tmp_path) -> None:
    run = config(corpus, tmp_path, settings(teachers), steps=1)
    Trainer(run).fit()
    longer = run.replace(train=run.train.replace(steps=2))
    for name, changes, message in (
        ("equal", {}, r"distill\.teacher: \S+dense -> \S+equal"),
        ("dense", {"loss": "dist"}, r"distill\.loss: kl -> dist"),
        ("dense", {"temperature": 2.0, "mix": 0.5}, r"distill\.mix: 0\.3 -> 0\.5, distill\.temperature: 1\.5 -> 2\.0"),
    ):
        with pytest.raises(
            ConfigError, match=rf"step-1 was trained with another teacher or loss \({message}\)"
        ) as error:
            Trainer(longer.replace(distill=settings(teachers, name, **changes)))
        assert f"--train.pretrained_checkpoint {tmp_path / 'r' / 'step-1'}" in str(error.value)
    with pytest.raises(ConfigError, match=r"distill\.teacher: \S+ -> none"):
        Trainer(longer.replace(distill=DistillConfig(mix=0.3, temperature=1.5)))
    other_storage = settings(teachers, cache=str(tmp_path / "cache"), weights="int8", weight_group=32)
    Trainer(longer.replace(distill=other_storage))  # not refused


def _losses(run: RunConfig, steps: int) -> tuple[list[float], bool, int]:
    """The losses of some steps, whether the teacher was loaded, and the samples in the cache."""
    with DistributedContext.build(run.plan, "cpu") as context, TrainingState(run, context) as training:
        losses = []
        for _ in range(steps):
            outcome = training.step()
            losses.append(float(context.axes.global_sum(outcome.loss_sum) / outcome.count))
        distiller = training._step.distiller
        assert distiller is not None
        return losses, distiller.teacher is not None, len(distiller.cache or ())


@pytest.mark.slow
def test_a_cache_answers_in_place_of_the_teacher(corpus, teachers, tmp_path) -> None:
    run = config(corpus, tmp_path, settings(teachers, cache=str(tmp_path / "cache")), dtype="float32")
    ((first, loaded, kept),) = in_world(1, _losses, run, 2)
    assert loaded
    assert kept == 16
    ((again, loaded, kept),) = in_world(1, _losses, run, 2)
    assert not loaded
    assert again == pytest.approx(first, rel=1e-6)
    for plan in (Plan(tp=2), Plan(dp=2)):  # any layout finds them
        for losses, loaded, _ in in_world(2, _losses, run.replace(plan=plan, name=str(plan.tp)), 2):
            assert not loaded
            assert losses == pytest.approx(first, rel=1e-5)
    ((third, loaded, kept),) = in_world(1, _losses, run, 3)
    assert loaded
    assert 16 < kept <= 24  # some texts are equal
    ((whole, _, _),) = in_world(1, _losses, run.replace(distill=run.distill.replace(cache="")), 3)
    assert third == pytest.approx(whole, rel=0.2)  # 64 of 300 tokens
    (part,) = (path for path in (tmp_path / "cache").glob("part-*.bin") if path.stat().st_size > 10 * 16 * 64 * 8)
    damaged = bytearray(part.read_bytes())
    damaged[200] ^= 1
    part.write_bytes(damaged[:-5])
    ((repaired, loaded, _),) = in_world(1, _losses, run, 2)
    assert loaded
    assert repaired == pytest.approx(first, rel=1e-6)
    with pytest.raises(AssertionError, match="belongs to another run: it differs in temperature"):
        in_world(1, _losses, run.replace(distill=run.distill.replace(temperature=3.0)), 1)


def test_the_command_line_takes_the_teachers_shape(corpus, teachers, capsys) -> None:
    words = ["--distill.teacher", str(teachers["dense"]), "--distill.init", "layers", "--model.layers", "1"]
    main(["distill", *words, "--data.path", str(corpus), "--dry_run"])
    printed = capsys.readouterr().out
    for line in ("layers = 1 #", "width = 32 #", 'init = "layers" #'):
        assert line in printed


def test_evenly_spaced_layers() -> None:
    assert [teacher_layer(i, 4, 10) for i in range(4)] == [0, 3, 6, 9]
    assert [teacher_layer(i, 3, 3) for i in range(3)] == [0, 1, 2]
    assert teacher_layer(0, 1, 9) == 0


def test_the_teacher_is_in_the_memory_estimate(corpus, teachers, tmp_path) -> None:
    run = config(corpus, tmp_path, settings(teachers), dtype="float32")
    alone = estimate(run.replace(distill=DistillConfig()), "cpu").device
    with_teacher = estimate(run, "cpu").device
    teacher = api.load(teachers["dense"], dtype="float32", device="cpu").transformer
    weights = sum(p.nbytes for p in teacher.parameters())
    assert weights < with_teacher.pop("teacher") < weights + 4 * 16 * 2 * 300 * 4 + 2**16
    assert with_teacher == alone
    int4 = estimate(config(corpus, tmp_path, settings(teachers, "int4"), dtype="float32"), "cpu").device["teacher"]
    assert int4 < estimate(run, "cpu").device["teacher"] - weights / 2
    halves = estimate(run.replace(plan=Plan(tp=2)), "cpu").device["teacher"]
    assert halves < 0.6 * estimate(run, "cpu").device["teacher"]


def test_refusals(corpus, teachers, tmp_path) -> None:
    def refused(match: str, model: ModelConfig = STUDENT, plan: Plan = Plan(), train=None, **changes) -> None:
        run = config(corpus, tmp_path, settings(teachers, **changes), model, **(train or {})).replace(plan=plan)
        with pytest.raises((ConfigError, PlanError), match=match):
            check_teacher(run, Corpus(corpus))

    refused("equal widths, but the teacher has 32 and the model 16", hidden=0.5)
    refused("both soften the targets", train={"label_smoothing": 0.1})
    refused("pp=2 and cp=1", plan=Plan(pp=2))
    refused("already stores its weights in int4", name="int4", weights="int8")
    refused("differs from the teacher in its layers only: width", init="layers")
    refused("only kl can use, not reverse", loss="reverse", cache="c")
    refused("ep=2 with etp=1 runs it on all", name="experts", cache="c", plan=Plan(dp=2, ep=2))
    refused("takes 3 of the teacher's 2 layers", STUDENT.replace(layers=3), name="equal", init="layers")
    refused("both set the initial weights", name="equal", init="layers", train={"pretrained_checkpoint": "x"})
    with pytest.raises(SystemExit):
        main(["distill", "--data.path", str(corpus)])


def test_a_teacher_of_another_vocabulary_is_refused(corpus, teachers, tmp_path, capsys) -> None:
    """Another size, and as many other tokens; the verb says so in one line before training starts."""
    run = config(corpus, tmp_path, settings(teachers))
    with pytest.raises(ConfigError, match=r"has a vocabulary of 300, .* model one of 301; use a teacher with the same"):
        check_teacher(run.replace(model=STUDENT.replace(vocab_size=301)), Corpus(corpus))
    other = tmp_path / "other"
    build([("a", TEXT[::-1] * 20)], other, vocab_size=300, validation_share=0.2)
    with pytest.raises(ConfigError, match=r"a different tokenizer from that of distill\.teacher"):
        check_teacher(run.replace(data=run.data.replace(path=other)), Corpus(other))
    with pytest.raises(SystemExit) as stop:
        main(["distill", "--data.path", str(other), "--distill.teacher", str(teachers["dense"]), "--device", "cpu"])
    assert stop.value.code == 1
    assert "a different tokenizer from that of distill.teacher" in " ".join(capsys.readouterr().err.split())

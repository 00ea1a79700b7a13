"""Fine-tuning a classifier equals transformers, is the same under any plan, and refuses bad input."""

import hashlib
import importlib.util
import re
import shutil
import statistics
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

import colonnade
from colonnade.checkpoint import native
from colonnade.checkpoint.hf.write import write_hf
from colonnade.checkpoint.load_model import find_packaged
from colonnade.config import DataConfig, MoeConfig, Plan, RouterConfig, RunConfig, TrainConfig
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.model import Hidden
from colonnade.model.initialise import replace_head
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import layout_of, local_part
from colonnade.train.loop import train
from colonnade.train.trackers import read_rows
from colonnade.train.training_state import TrainingState
from colonnade.tune import Example, accuracy, classifier, fit
from colonnade.tune.classify import Examples, LabelledSamples, example_feed
from tests.models import BERTS, build, pairs
from tests.worlds import assert_same
from tests.worlds import run as in_world

TRAIN = TrainConfig(
    steps=6, batch=6, micro_batch=6, lr=1e-2, min_lr=0, warmup=1, dtype="float64", schedule="linear", clip=0.5,
    save_every=3, eval_every=3, log_every=1,
)  # fmt: skip
DROPOUT = {"dropout": 0.1, "attention_dropout": 0.1, "embedding_dropout": 0.1, "label_smoothing": 0.1}


def examples(count: int = 20, classes: int = 3, *, paired: bool = True) -> list[Example]:
    """Texts of unequal lengths, in two segments if ``paired``; the class is that of the most frequent token."""
    generator = torch.Generator().manual_seed(5)
    examples_ = []
    for i in range(count):
        n = int(torch.randint(1, 12, (1,), generator=generator))
        noise = torch.randint(10, 60, (n,), generator=generator).tolist()
        tokens = [1, *[3 + i % classes] * (n + 1), *noise]
        examples_.append(Example(tokens, i % classes, [0] * (n + 2) + [1] * n if paired else None))
    return examples_


def start(folder: Path, name: str = "post_encoder") -> Path:
    """Write a small float64 encoder as a Hugging Face folder."""
    start_folder = folder / name
    if not start_folder.exists():
        write_hf(build(BERTS[name]), start_folder)
    return start_folder


def config(runs: Path, start_folder: Path, **train: object) -> RunConfig:
    return RunConfig(
        name="it", runs=runs, device="cpu", model=classifier(start_folder, classes=3), data=DataConfig(sequence=32),
        train=TRAIN.replace(pretrained_checkpoint=str(start_folder), **train),
    )  # fmt: skip


def weights(run: RunConfig) -> dict[str, Tensor]:
    return colonnade.load(run.folder, device="cpu", dtype="float64").transformer.state_dict()


def history(run: RunConfig) -> list[float]:
    return [row[key] for row in read_rows(run.folder) for key in ("loss", "grad_norm", "validation_loss") if key in row]


@pytest.mark.sample(3)
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(("name", "smoothing"), [("post_encoder", 0.0), ("pre_pretraining", 0.0), ("post_masked", 0.1)])
def test_losses_norms_and_weights_equal_transformers(name: str, smoothing: float, paired: bool, tmp_path: Path) -> None:
    """Single texts and pairs; transformers pads its batches, ours are packed."""
    given = examples(paired=paired)
    run = config(tmp_path, start(tmp_path, name), label_smoothing=smoothing, eval_every=0)
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=example_feed(run, given)) as training,
    ):
        write_hf(training.model, tmp_path / "drawn")
        auto = transformers.AutoModelForSequenceClassification
        theirs = auto.from_pretrained(tmp_path / "drawn", dtype=torch.float64, attn_implementation="eager").eval()
        groups = [[p for p in theirs.parameters() if (p.dim() >= 2) == matrix] for matrix in (True, False)]
        decays = [run.train.weight_decay, 0.0]
        optimizer = torch.optim.AdamW(
            [{"params": group, "weight_decay": decay} for group, decay in zip(groups, decays, strict=True)],
            betas=(run.train.beta1, run.train.beta2), eps=run.train.eps,
        )  # fmt: skip
        for number in range(4):
            loss = _their_loss(
                theirs, [given[i] for i in training.feed.samples.numbers(training.samples_seen)], smoothing
            )
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), run.train.clip)
            outcome = training.step()
            assert_same(outcome.loss_sum / outcome.count, loss.detach(), 1e-6, f"loss {number}")
            assert_same(outcome.norm, norm, 1e-6, f"gradient norm {number}")
            for group in optimizer.param_groups:
                group["lr"] = outcome.lr
            optimizer.step()
            optimizer.zero_grad()
        write_hf(training.model, tmp_path / "tuned")
    tuned = auto.from_pretrained(tmp_path / "tuned", dtype=torch.float64)
    for (what, ours), (_, parameter) in zip(tuned.named_parameters(), theirs.named_parameters(), strict=True):
        assert_same(ours.detach(), parameter.detach(), 1e-6, what)


def _their_loss(theirs: transformers.PreTrainedModel, given: list[Example], smoothing: float) -> Tensor:
    longest = max(len(example.tokens) for example in given)
    padded = lambda row: [*row, *[0] * (longest - len(row))]  # noqa: E731
    logits = theirs(
        input_ids=torch.tensor([padded(example.tokens) for example in given]),
        attention_mask=torch.tensor([padded([1] * len(example.tokens)) for example in given]),
        token_type_ids=torch.tensor([padded(example.segments or []) for example in given]),
    ).logits
    labels = torch.tensor([example.label for example in given])
    return torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)


def _fit(run: RunConfig) -> None:
    train(run, (), example_feed(run, examples(), examples(7)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "then"),
    [
        (Plan(tp=2), Plan(dp=2)),
        (Plan(tp=3), Plan(cp=2)),
        (Plan(tp=2, dp=2, sequence_parallel=True), Plan(pp=2)),
        (Plan(pp=2, cp=2), Plan()),
        (Plan(dp=3, reshard=False), Plan(tp=2, cp=2)),
    ],
    ids=str,
)
def test_any_plan_gives_the_same_fine_tuning(plan: Plan, then: Plan, tmp_path: Path) -> None:
    """With dropout and validations; the second half resumes under another plan."""
    alone = config(tmp_path / "alone", start(tmp_path), **DROPOUT)
    _fit(alone)
    several = alone.replace(runs=tmp_path / "several")
    for leg_plan in (plan, then):
        leg = several.replace(plan=leg_plan, train=alone.train.replace(micro_batch=1 if leg_plan.pp > 1 else 2))
        in_world(leg_plan.world, _fit, leg)
        if leg_plan is plan:
            shutil.rmtree(leg.folder / "step-6")
    assert len(history(alone)) == 6 + 6 + 2
    assert history(several) == pytest.approx(history(alone), rel=1e-9)
    mine = weights(several)
    for name, x in weights(alone).items():
        assert_same(mine[name], x, 1e-9, name)


@pytest.mark.slow
def test_moe_fine_tuning_is_the_same_on_any_grid(tmp_path: Path) -> None:
    moe = MoeConfig(
        experts=4, active=2, ffn_width=12, balance_weight=0.1, bias_rate=0.01, router=RouterConfig(noise=1.0)
    )
    alone = config(tmp_path / "alone", start(tmp_path))
    alone = alone.replace(
        model=alone.model.replace(moe=moe), train=alone.train.replace(pretrained_checkpoint="", expert_dropout=0.1)
    )
    _fit(alone)
    for number, plan in enumerate((Plan(dp=2, ep=2), Plan(tp=2, etp=2))):
        several = alone.replace(
            runs=tmp_path / str(number), plan=plan, train=alone.train.replace(micro_batch=6 // plan.data_ranks)
        )
        in_world(plan.world, _fit, several)
        assert history(several) == pytest.approx(history(alone), rel=1e-9)


@pytest.mark.slow
def test_tuned_model_loads_and_can_be_tuned_again(tmp_path: Path) -> None:
    """From our own format and from Hugging Face's; the classifier is kept only if the class count is the same."""
    run = config(tmp_path, start(tmp_path))
    _fit(run)
    with colonnade.load(run.folder, device="cpu", dtype="float64") as model:
        right = accuracy(model.transformer, examples())
        tuned = colonnade.save(model, tmp_path / "hf", format="hf")
    loaded = colonnade.load(tuned, device="cpu", dtype="float64").transformer
    assert accuracy(loaded, examples()) == right
    before = weights(run)
    for start_folder in (run.folder, tuned):
        for classes, kept in ((3, True), (5, False)):
            again = config(tmp_path, start_folder, steps=1, warmup=0, lr=1e-12, save_every=0, eval_every=0)
            again = again.replace(name=f"again-{start_folder.name}-{classes}", model=classifier(start_folder, classes))
            fit(again, examples())
            after = weights(again)
            assert (after["top.classes.weight"].shape == before["top.classes.weight"].shape) == kept
            for name in before.keys() - (set() if kept else {"top.classes.weight", "top.classes.bias"}):
                assert_same(after[name], before[name], 1e-9, name)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["pre_pretraining", "post_masked"])
@pytest.mark.parametrize("plan", [Plan(pp=2, tp=2), Plan(dp=2)], ids=str)
def test_start_checkpoint_loads_all_weights_under_any_plan(name: str, plan: Plan, tmp_path: Path) -> None:
    """From one of our checkpoints with another head; new weights are drawn from the seed."""
    whole = build(BERTS[name])
    start_folder = tmp_path / "start"
    native.save(start_folder, whole, native.Meta(model=whole.config), DistributedContext.solo())
    run = config(
        tmp_path, start_folder, steps=1, batch=4, micro_batch=1, warmup=0, lr=1e-12, save_every=0, eval_every=0
    )
    in_world(plan.world, _fit, run.replace(plan=plan))
    examples_, drawn = weights(run), replace_head(whole, "classes", classes=3, seed=run.train.seed).state_dict()
    for key, x in drawn.items():
        assert_same(examples_[key], x, 1e-9, key)


@pytest.mark.parametrize("name", ["post_encoder", "pre_classes", "post_pretraining"])
def test_replace_head_keeps_the_other_weights(name: str) -> None:
    model = build(BERTS[name])
    other = replace_head(model, "spans")
    stream, attend, _ = pairs(model.config)
    assert_same(other(stream, attend, Hidden()), model(stream, attend, Hidden()))
    assert {n for n, _ in other.named_parameters() if n.startswith("top.")} == {"top.spans.weight", "top.spans.bias"}
    one, two = (replace_head(model, "classes", classes=7, seed=seed) for seed in (0, 1))
    assert torch.equal(one.top.pooler.weight, model.top.pooler.weight)
    assert not torch.equal(one.top.classes.weight, two.top.classes.weight)
    with pytest.raises(ConfigError, match=r"task_head = 'classes' and classes = 0"):
        replace_head(model, "classes")


def _shares() -> None:
    with DistributedContext.build(Plan(tp=2)) as context:
        whole, mine = (
            replace_head(build(BERTS["post_masked"], axes), "classes", classes=2) for axes in (_solo(), context.axes)
        )
        layout = layout_of(mine)
        for name, p in whole.named_parameters():
            assert_same(mine.get_parameter(name), local_part(p, layout[name], context.axes), what=name)


def _solo():
    return DistributedContext.solo().axes


def test_replace_head_under_tensor_parallelism() -> None:
    in_world(2, _shares)


@pytest.mark.slow
def test_learns_a_toy_task(tmp_path: Path) -> None:
    """In float16 as well, with a loss scale."""
    settings = {"steps": 60, "batch": 10, "micro_batch": 10, "lr": 1e-2, "warmup": 4, "clip": 1.0, "seed": 1}
    losses = {}
    for dtype in ("float32", "float16"):
        run = config(tmp_path / dtype, start(tmp_path), dtype=dtype, save_every=0, eval_every=0, **settings)
        fit(run, examples())
        losses[dtype] = [row["loss"] for row in read_rows(run.folder) if "loss" in row]
        assert accuracy(colonnade.load(run.folder, device="cpu", dtype="float32").transformer, examples()) >= 0.9
    assert losses["float16"] == pytest.approx(losses["float32"], abs=0.1)


def test_fixed_shape_micro_batches_give_the_same_values() -> None:
    """Padding is not attended to by any example and counts for nothing."""
    given, options = Examples(examples(5)), {"config": DataConfig(sequence=32), "segments": True}
    exact, filled = (LabelledSamples(given, **options, fixed_shape=fixed) for fixed in (False, True))  # type: ignore[arg-type]
    order = torch.arange(5).numpy()
    one, other = exact.pack(order, order), filled.pack(order, order)
    T = len(one.tokens_T)
    assert len(other.tokens_T) == 5 * 32 and sum(len(example.tokens) for example in examples(5)) == T
    for name in ("tokens_T", "positions_T", "targets_T", "segments_T"):
        assert torch.equal(getattr(other, name)[:T], getattr(one, name)), name
    assert torch.equal(other.predicted_R, one.predicted_R) and (other.targets_T[T:] < 0).all()
    assert other.cu_seqlens[5] == T, "no sequence reaches into the padding"


def test_bad_examples_are_refused(tmp_path: Path) -> None:
    run = config(tmp_path, start(tmp_path))
    for wrong, message in (
        ([], "no examples"),
        ([Example([1], 0), Example([1], 3)], "example 1 has the label 3, and there are 3 classes"),
        ([Example([1] * 33, 0)], "example 0 has 33 tokens; each needs 1 to 32"),
        ([Example([], 0)], "example 0 has 0 tokens"),
        ([Example([1, 67], 0)], "example 0 has tokens from 1 to 67, and the vocabulary is 0 to 66"),
        ([Example([1, 2], 0, [0])], "example 0 has 1 segments for 2 tokens"),
        ([Example([1, 2], 0, [0, 2])], "segments from 0 to 2, and the model has 2; use 0 to 1"),
    ):
        with pytest.raises(DataError, match=message):
            fit(run, wrong)
    with pytest.raises(DataError, match="held-out example 0 has 0 tokens"):
        fit(run, examples(), [Example([], 0)])
    with pytest.raises(DataError, match=r"eval_every is 3, and no examples are held out"):
        fit(run, examples())
    fit(run, examples(), examples(7))
    with pytest.raises(DataError, match=r"this list of examples is not the data that .* was trained on"):
        fit(run.replace(train=run.train.replace(steps=9)), examples()[::-1], examples(7))
    with pytest.raises(DataError, match="no examples"):
        accuracy(colonnade.load(run.folder, device="cpu").transformer, [])


def _example():
    spec = importlib.util.spec_from_file_location(
        "example", Path(__file__).parents[2] / "examples/classify_speeches.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_example_splits_are_balanced_and_share_no_speech() -> None:
    train, test = _example().passages(20, 10)
    assert [sum(label == c for _, label in train) for c in range(3)] == [20] * 3
    assert [sum(label == c for _, label in test) for c in range(3)] == [10] * 3
    assert not {text for text, _ in train} & {text for text, _ in test}
    assert all(len(text.split()) == 64 for text, _ in train + test)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_example_classifies_speeches_by_century(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    try:
        find_packaged("minilm")
    except CheckpointError as why:
        pytest.skip(str(why))
    median = _example().main(["--per-class", "60", "--held-out", "40", "--runs", str(tmp_path)])
    output = capsys.readouterr().out
    accuracies = [float(each) / 100 for each in re.findall(r"^seed \d+: accuracy ([\d.]+)%$", output, re.MULTILINE)]
    assert len(accuracies) == 5
    assert median == pytest.approx(statistics.median(accuracies), abs=1e-3)
    assert median >= 0.65, f"chance is 0.33; measured {accuracies}"


def test_the_hash_covers_the_number_of_choices() -> None:
    """Also beyond a byte; 4 choices hash as they did, so that runs resume."""
    rows = [Example([i], 0) for i in range(1024)]
    hashes = {Examples(rows, choices).sha256 for choices in (1, 2, 4, 256, 512, 1024)}
    assert len(hashes) == 6
    digest = hashlib.sha256()
    given = Examples(rows, 4)
    for part in (given._starts, given._tokens_T, given._segments_T, given._labels, given._ends):
        digest.update(part.tobytes())
    digest.update(bytes([4]))
    assert given.sha256 == digest.hexdigest()

"""Fine-tuning encoders: choice and span losses equal transformers, under other plans too; data, scores, seeds."""

import json
import math
import random
import re
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
import torch
import transformers

from colonnade.api import load, save
from colonnade.checkpoint import native
from colonnade.checkpoint.hf.write import write_hf
from colonnade.checkpoint.load_model import open_model
from colonnade.cli import main
from colonnade.config import DataConfig, Plan, RunConfig, ServeConfig, TrainConfig
from colonnade.data import Tokenizer
from colonnade.errors import ConfigError, DataError
from colonnade.model import IGNORE
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve.resolve_pooler import resolve_pooler
from colonnade.train.training_state import TrainingState
from colonnade.tune.classify import Example, example_feed
from colonnade.tune.encoder_data import SpanQuestion, read_choices, read_spans, read_texts
from colonnade.tune.encoder_runs import EncoderTuning, SeedRun, finetune_encoder, make_task, median_run
from colonnade.tune.encoder_tasks import ChoiceTask, Pair
from colonnade.tune.spans import SpanPrediction, SpanTask, normalise_answer, squad_scores
from tests.models import BERTS, build
from tests.worlds import assert_same
from tests.worlds import run as in_world

TRAIN = TrainConfig(
    steps=4, batch=4, micro_batch=4, lr=1e-2, min_lr=0, warmup=1, dtype="float64", schedule="linear", clip=0.5,
    save_every=4, eval_every=0, log_every=1,
)  # fmt: skip
WORDS = re.findall(
    r"\S+", "the a an of in to was is who what when where red blue green king city river seven . , ? ' s"
)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small float64 encoder with a WordPiece vocabulary."""
    folder = tmp_path_factory.mktemp("start") / "encoder"
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *WORDS])}
    core = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    core.normalizer = tokenizers.normalizers.BertNormalizer()
    core.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer = Tokenizer(core, bos_id=1, eos_ids=[2])
    write_hf(build(BERTS["post_encoder"]), folder, tokenizer=tokenizer)
    return folder


def choice_examples(choices: int = 3, questions: int = 8) -> list[Example]:
    """Questions whose right answer begins with token 9."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for question in range(questions):
        for number in range(choices):
            n = int(torch.randint(3, 14, (1,), generator=generator))
            noise = torch.randint(10, 30, (n,), generator=generator).tolist()
            right = number == question % choices
            made.append(
                Example(
                    [1, 9 if right else 8, *noise, 2], question % choices if number == 0 else IGNORE, [0] * 3 + [1] * n
                )
            )
    return made


def span_examples(count: int = 8) -> list[Example]:
    generator = torch.Generator().manual_seed(4)
    made = []
    for _ in range(count):
        n = int(torch.randint(4, 20, (1,), generator=generator))
        first, last = sorted(torch.randint(0, n, (2,), generator=generator).tolist())
        made.append(Example(torch.randint(5, 30, (n,), generator=generator).tolist(), first, [0] * n, last))
    return made


def config(runs: Path, start: Path, method: str, **changes: object) -> RunConfig:
    model = open_model(start).config
    model = (
        model.replace(task_head="spans", tied=True)
        if method == "span"
        else model.replace(task_head="classes", classes=1, tied=True)
    )
    plan = changes.pop("plan", Plan())
    return RunConfig(
        name="it", runs=runs, device="cpu", model=model, data=DataConfig(sequence=32), plan=plan,
        train=TRAIN.replace(pretrained_checkpoint=str(start), **changes),
    )  # fmt: skip


def norms(run: RunConfig, method: str) -> list[float]:
    """Gradient norms of three steps: of all samples and all parameters, on every rank."""
    given, choices = (span_examples(), 1) if method == "span" else (choice_examples(), 3)
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=example_feed(run, given, choices=choices)) as training,
    ):
        return [float(training.step().norm) for _ in range(3)]


def test_choice_losses_and_norms_equal_transformers(start: Path, tmp_path: Path) -> None:
    run, given = config(tmp_path, start, "choice"), choice_examples()
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=example_feed(run, given, choices=3)) as training,
    ):
        write_hf(training.model, tmp_path / "drawn")
        options = {"dtype": torch.float64, "attn_implementation": "eager"}
        theirs = transformers.BertForMultipleChoice.from_pretrained(tmp_path / "drawn", **options).eval()
        numbers = training.feed.samples.numbers(training.samples_seen)
        rows = [given[int(i) * 3 + j] for i in numbers for j in range(3)]
        loss = theirs(
            **_padded(rows, (len(numbers), 3)), labels=torch.tensor([given[int(i) * 3].label for i in numbers])
        ).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1e9)
        outcome = training.step()
        assert_same(outcome.loss_sum / outcome.count, loss.detach(), 1e-6, "loss")
        assert_same(outcome.norm, norm, 1e-6, "gradient norm")
        assert outcome.count == 4


def test_span_losses_and_norms_equal_transformers(start: Path, tmp_path: Path) -> None:
    run, given = config(tmp_path, start, "span"), span_examples()
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=example_feed(run, given)) as training,
    ):
        write_hf(training.model, tmp_path / "drawn")
        options = {"dtype": torch.float64, "attn_implementation": "eager"}
        theirs = transformers.BertForQuestionAnswering.from_pretrained(tmp_path / "drawn", **options).eval()
        rows = [given[int(i)] for i in training.feed.samples.numbers(training.samples_seen)]
        inputs = _padded(rows, (len(rows),))
        logits = theirs(**inputs)
        padding = ~inputs["attention_mask"].bool()
        targets = [torch.tensor([each.label for each in rows]), torch.tensor([each.end for each in rows])]
        parts = [
            torch.nn.functional.cross_entropy(part.masked_fill(padding, -1e300), target)
            for part, target in zip((logits.start_logits, logits.end_logits), targets, strict=True)
        ]
        loss = sum(parts) / 2
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1e9)
        outcome = training.step()
        assert_same(outcome.loss_sum / outcome.count, loss.detach(), 1e-6, "loss")
        assert_same(outcome.norm, norm, 1e-6, "gradient norm")


def _padded(rows: list[Example], shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
    longest = max(len(each.tokens) for each in rows)
    pad = lambda row: [*row, *[0] * (longest - len(row))]  # noqa: E731
    return {
        "input_ids": torch.tensor([pad(each.tokens) for each in rows]).reshape(*shape, longest),
        "attention_mask": torch.tensor([pad([1] * len(each.tokens)) for each in rows]).reshape(*shape, longest),
        "token_type_ids": torch.tensor([pad(each.segments) for each in rows]).reshape(*shape, longest),
    }


@pytest.mark.slow
@pytest.mark.parametrize("method", ["choice", "span"])
@pytest.mark.parametrize(
    ("plan", "changes"),
    [(Plan(dp=2), {"micro_batch": 2}), (Plan(tp=2, sequence_parallel=True), {}), (Plan(pp=2), {"micro_batch": 2})],
    ids=["dp", "sp", "pp"],
)
def test_same_under_any_plan(method: str, plan: Plan, changes: dict, start: Path, tmp_path: Path) -> None:
    alone = in_world(1, norms, config(tmp_path / "one", start, method), method)[0]
    both = in_world(2, norms, config(tmp_path / "two", start, method, plan=plan, **changes), method)
    assert min(alone) > 1e-5
    for own in both:
        assert own == pytest.approx(alone, rel=1e-8, abs=1e-12)


def test_bad_examples_and_plans(start: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plan\.cp is 2, and the choices of a question"):
        example_feed(config(tmp_path, start, "choice", plan=Plan(cp=2)), choice_examples(), choices=3)
    with pytest.raises(DataError, match="23 examples are not whole questions of 3 choices"):
        example_feed(config(tmp_path, start, "choice"), choice_examples()[:-1], choices=3)
    with pytest.raises(DataError, match=r"example 0 has the label 7; the first of 3 choices"):
        example_feed(
            config(tmp_path, start, "choice"), [each._replace(label=7) for each in choice_examples()], choices=3
        )
    with pytest.raises(DataError, match="example 0 has the answer 3 to 99"):
        example_feed(config(tmp_path, start, "span"), [span_examples()[0]._replace(label=3, end=99)])


# -- data and scores --------------------------------------------------------------------------------------------------

MNLI = 'index\tsentence1\tsentence2\tgold_label\n0\tred king\tblue "city\tneutral\n1\ta\tb\t-\n2\tc\td\tcontradiction\n'
RACE = {
    "article": "the king was in the red city .", "questions": ["the city was _ .", "who was in the city ?"],
    "options": [["red", "blue"], ["the king", "the river"]], "answers": ["A", "B"], "id": "high1.txt",
}  # fmt: skip
PASSAGE = "The king was in the red city. The river was blue."
SQUAD = {
    "version": "v2.0",
    "data": [{"title": "t", "paragraphs": [{"context": PASSAGE, "qas": [
        {"id": "1", "question": "What was blue?", "is_impossible": False,
         "answers": [{"text": "The river", "answer_start": PASSAGE.index("The river")},
                     {"text": "river", "answer_start": 34}]},
        {"id": "2", "question": "Who was green?", "is_impossible": True, "answers": []},
    ]}]}],
}  # fmt: skip


def test_published_forms_are_read(tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text(MNLI)
    assert [tuple(each) for each in read_texts(tmp_path / "dev.tsv")] == [
        ("red king", 'blue "city', "neutral"), ("c", "d", "contradiction"),
    ]  # fmt: skip
    (tmp_path / "qqp.jsonl").write_text(
        '{"question1": "a", "question2": "b", "is_duplicate": 1}\n{"text": "c", "label": 0}\n'
    )
    assert [tuple(each) for each in read_texts(tmp_path / "qqp.jsonl")] == [("a", "b", "1"), ("c", None, "0")]
    lines = "".join(json.dumps({"text": f"a{c}b", "label": 1}, ensure_ascii=False) + "\n" for c in "\u2028\x85\u2029")
    (tmp_path / "separators.jsonl").write_text(lines, "utf-8")  # a line of JSON ends with \n only
    assert [each.first for each in read_texts(tmp_path / "separators.jsonl")] == ["a\u2028b", "a\x85b", "a\u2029b"]
    # The columns of GLUE's files.
    mnli = re.findall(
        r"\S+",
        "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
        "sentence1 sentence2 label1 label2 label3 label4 label5 gold_label",
    )
    row = [name.upper() if name.startswith("sentence") else "neutral" for name in mnli]
    (tmp_path / "dev_matched.tsv").write_text("\t".join(mnli) + "\n" + "\t".join(row) + "\n")
    assert [tuple(each) for each in read_texts(tmp_path / "dev_matched.tsv")] == [("SENTENCE1", "SENTENCE2", "neutral")]
    (tmp_path / "train.tsv").write_text(
        'id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n7\t1\t2\tIs "this\tthat?\t0\n'
    )
    assert [tuple(each) for each in read_texts(tmp_path / "train.tsv")] == [('Is "this', "that?", "0")]
    (tmp_path / "race" / "high").mkdir(parents=True)
    (tmp_path / "race" / "high" / "1.txt").write_text(json.dumps(RACE))
    first, second = read_choices(tmp_path / "race")
    assert (first.options, first.label, second.label) == (("red", "blue"), 0, 1)
    (tmp_path / "squad.json").write_text(json.dumps(SQUAD))
    answered, impossible = read_spans(tmp_path / "squad.json")
    assert answered.passage[answered.start :].startswith("The river was") and len(answered.answers) == 2
    assert impossible.answers == () and impossible.start == -1
    first = json.loads(json.dumps(SQUAD).replace('"is_impossible": false, ', ""))  # SQuAD 1.1 has no such key
    first["data"][0]["paragraphs"][0]["qas"].pop()
    (tmp_path / "squad1.json").write_text(json.dumps({**first, "version": "1.1"}))
    assert read_spans(tmp_path / "squad1.json") == [answered]


@pytest.mark.parametrize(
    ("reader", "content", "message"),
    [
        (read_texts, '{"texts": "a"}', "x.jsonl:1: a row needs a label"),
        (read_texts, "[1]", "x.jsonl:1: not a JSON object"),
        (read_texts, "", "has no examples"),
        (read_texts, '{"text": "a", "label": null}', "x.jsonl:1: 'label' is None, not a class"),
        (read_texts, '{"text": "a", "label": [1]}', r"x.jsonl:1: 'label' is \[1\], not a class"),
        (read_choices, json.dumps({**RACE, "answers": ["A", ""]}), "not RACE's form"),
        (read_choices, '{"article": "a"}', "x.jsonl:1: not RACE's form .* 'questions'"),
        (read_choices, json.dumps({**RACE, "answers": ["A", "C"]}), "the answer C is not among 2 options"),
        (read_spans, '{"data": 3}', "not SQuAD's form"),
        (read_spans, json.dumps(SQUAD).replace('"answer_start": 30', '"answer_start": 3'), "text at 3 is not"),
    ],
)  # fmt: skip
def test_other_forms_are_refused(reader, content: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / ("x.json" if reader is read_spans else "x.jsonl")
    file.write_text(content)
    with pytest.raises(DataError, match=message):
        reader(file)


def test_official_squad_scores() -> None:
    assert normalise_answer("The  King's, (an) apple!") == "kings apple"
    rows = [
        SpanQuestion(str(i), "", "", answers, 0)
        for i, answers in enumerate((("the king", "a red king"), ("seven",), ()))
    ]
    found = squad_scores(["red king", "three", ""], rows)
    assert found["exact_match"] == pytest.approx(200 / 3) and found["f1"] == pytest.approx(200 / 3)
    assert squad_scores(["king of the city", "seven", "x"], rows)["f1"] == pytest.approx(100 * (2 * 1 / 4 + 1 + 0) / 3)


def test_threshold_is_the_best_on_the_development_set(start: Path) -> None:
    task = SpanTask(Pair(Tokenizer.from_file(start), 24), impossible=True)
    rows = [SpanQuestion("1", "king", "", ("king",), 0), SpanQuestion("2", "city", "", (), -1)]
    predictions = [SpanPrediction({(0, 4): 0.5}, 0.4), SpanPrediction({(0, 4): 0.5}, 0.6)]
    assert task.score(predictions, rows) == {"f1": 100.0, "exact_match": 100.0, "threshold": 0.8}
    assert SpanTask(task.pair, impossible=False).score(predictions, rows)["f1"] == 50
    # A test set is scored at the threshold of the development set, not at its own best one.
    tested = [SpanPrediction({(0, 4): 0.5}, 0.55), SpanPrediction({(0, 4): 0.5}, 0.6)]
    assert task.score(tested, rows)["f1"] == 100 and task.score(tested, rows, {"threshold": 0.8})["f1"] == 50


def test_threshold_is_that_of_a_search(start: Path) -> None:
    """Of every threshold, also with equal ratios and questions without any span; in time that is not quadratic."""
    task, choose = SpanTask(Pair(Tokenizer.from_file(start), 24), impossible=True), random.Random(0)
    for _ in range(30):
        rows = [SpanQuestion(str(i), "king city", "", ("king",) * choose.randrange(2), 0) for i in range(12)]
        rows = [row if row.answers else row._replace(start=-1) for row in rows]
        predictions = [
            SpanPrediction(choose.choice([{}, {(0, 4): 0.5, (5, 9): 0.2}, {(5, 9): 0.25}]), choose.randrange(5) / 8)
            for _ in rows
        ]
        ratios = {0.0, math.inf, *(each.none_ratio for each in predictions)}
        best = max(squad_scores(task.answers(predictions, rows, ratio), rows)["f1"] for ratio in ratios)
        found = task.score(predictions, rows)
        assert found["f1"] == pytest.approx(best)
        again = squad_scores(task.answers(predictions, rows, found["threshold"]), rows)
        assert again == {name: pytest.approx(found[name]) for name in again}


def test_averages_of_predictions() -> None:
    task = SpanTask(cast(Any, None), impossible=True)
    predictions = [SpanPrediction({(0, 4): 0.5}, 0.4), SpanPrediction({(0, 4): 0.5}, 0.6)]
    mean = task.average([predictions, [SpanPrediction({(0, 4): 0.1}, 0.0), SpanPrediction({(1, 2): 0.2}, 0.0)]])
    assert mean[0].spans == {(0, 4): pytest.approx(0.3)} and mean[1].spans == {(0, 4): 0.25, (1, 2): 0.1}


def test_windows_cover_the_passage_and_find_the_answer(start: Path) -> None:
    passage = " ".join(WORDS[i % 20] for i in range(90))
    answer = " ".join(WORDS[i % 20] for i in range(61, 64))
    begin = len(" ".join(WORDS[i % 20] for i in range(61))) + 1
    task = SpanTask(Pair(Tokenizer.from_file(start), 32), impossible=False)
    row = SpanQuestion("1", passage, "what is red ?", (answer,), begin)
    windows = task.windows([row])
    seen = {place for window in windows for place in window.characters}
    assert len(seen) == 90 and all(len(window.example.tokens) <= 32 for window in windows)
    answered = [window for window in windows if window.example.label]
    assert answered and len(task.examples([row])) == len(answered) < len(windows)
    for window in answered:
        places = window.characters[window.example.label - window.offset :][: len(answer.split())]
        assert passage[places[0][0] : places[-1][1]] == answer


def test_choices_are_pairs_of_passage_and_answer(start: Path) -> None:
    tokenizer = Tokenizer.from_file(start)
    task = ChoiceTask(Pair(tokenizer, 16), 2)
    question = read_choices_of(RACE)[0]
    first, second = task.examples([question])
    assert tokenizer.decode(first.tokens, skip_special=False).endswith("[SEP] the city was red . [SEP]")
    assert first.segments[-1] == 1 and len(first.tokens) <= 16 and (first.label, second.label) == (0, IGNORE)
    long = question._replace(passage="king " * 600, question="who " * 200)
    for example in ChoiceTask(Pair(tokenizer, 512), 2).examples([long]):
        assert len(example.tokens) == 512 and sum(example.segments) == 128 + 1
    with pytest.raises(DataError, match="has 3 options, but others have 2"):
        task.examples([question._replace(options=("a", "b", "c"))])


def read_choices_of(record: dict) -> list:
    from colonnade.tune.encoder_data import Question

    return [
        Question(record["article"], question, tuple(options), "AB".index(answer))
        for question, options, answer in zip(record["questions"], record["options"], record["answers"], strict=True)
    ]


def test_median_of_seeds() -> None:
    runs = [SeedRun(seed, 1e-5, 8, Path(), {"accuracy": value}) for seed, value in enumerate((0.7, 0.9, 0.8, 0.6))]
    assert median_run(runs[:3]).seed == 2 and median_run(runs).seed == 0


def write_data(folder: Path, method: str) -> Path:
    """Tasks that a few steps learn: the first word decides."""
    if method == "classify":
        rows = [{"text": f"{('red', 'blue')[i % 2]} {WORDS[i % 20]}", "label": i % 2} for i in range(24)]
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif method == "choice":
        rows = [
            {"article": WORDS[i % 20], "questions": ["who ?"], "options": [["king", "river"][:: 1 if i % 2 else -1]],
             "answers": ["AB"[1 - i % 2]]}
            for i in range(24)
        ]  # fmt: skip
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        (folder / "data.json").write_text(json.dumps(SQUAD))
    return folder / ("data.json" if method == "span" else "data.jsonl")


@pytest.mark.sample(1)
@pytest.mark.parametrize("method", ["classify", "choice", "span"])
def test_command(method: str, start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write_data(tmp_path, method))
    arguments = ["finetune", str(start), "--method", method, "--data", file, "--held_out", file, "--test", file]
    arguments += [
        "--device",
        "cpu",
        "--runs",
        str(tmp_path / "runs"),
        "--epochs",
        "6",
        "--lrs",
        "1e-2",
        "--batches",
        "8",
    ]
    arguments += ["--seeds", "2", "--sequence", "24", "--train.dropout", "0", "--train.attention_dropout", "0"]
    main(arguments)
    printed = capsys.readouterr().out
    assert "median of 2: " in printed and "ensemble: " in printed and "test: " in printed
    results = json.loads((tmp_path / "runs" / method / "results.json").read_text())
    metric = "f1" if method == "span" else "accuracy"
    assert len(results["runs"]) == 2 and results["test"][metric] == results["median"][metric]
    if method != "span":
        assert results["median"]["accuracy"] == results["ensemble"]["accuracy"] == 1.0


@pytest.mark.slow
def test_command_with_a_teacher(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The student's runs learn from the median run of the teacher; choices have no teacher."""
    file = str(write_data(tmp_path, "classify"))
    words = ["finetune", str(start), "--data", file, "--held_out", file, "--device", "cpu", "--runs", str(tmp_path)]
    words += ["--epochs", "6", "--lrs", "1e-2", "--batches", "8", "--seeds", "1", "--sequence", "24", "--method"]
    main([*words, "classify", "--name", "teacher"])
    teacher = json.loads((tmp_path / "teacher" / "results.json").read_text())["median"]["folder"]
    learn = ["--distill.teacher", teacher, "--distill.loss", "dist", "--distill.mix", "0.2"]
    main([*words, "classify", "--name", "student", *learn])
    result = json.loads((tmp_path / "student" / "results.json").read_text())["median"]
    assert result["accuracy"] == 1.0
    newest = native.newest(Path(result["folder"]))
    assert newest is not None
    kept = native.read_meta(newest).run
    assert kept is not None and (kept.distill.teacher, kept.distill.loss) == (teacher, "dist")
    steps = kept.train.steps
    for flags, change in (
        (["--distill.teacher", teacher], "distill.loss: dist -> kl, distill.mix: 0.2 -> 0.5"),
        ([], f"distill.teacher: {teacher} -> "),
        ([*learn, "--epochs", "3"], f"steps: {steps} -> {steps // 2}"),
    ):
        with pytest.raises(SystemExit):
            main([*words, "classify", "--name", "student", *flags])
        said = " ".join(capsys.readouterr().err.split())
        assert f"has a run with other settings ({change}" in said and "use another --name" in said
    folder = tmp_path / "named"
    with load(teacher, device="cpu") as model:
        save(model, folder, format="hf")
    named = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(named | {"id2label": {"0": "1", "1": "0"}}))
    with pytest.raises(SystemExit):
        main([*words, "classify", "--name", "named", "--distill.teacher", str(folder)])
    said = " ".join(capsys.readouterr().err.split())
    assert "has the classes 1, 0 and the data 0, 1; use a teacher with the same labels in the same order" in said
    (tmp_path / "choice").mkdir()
    words[3] = words[5] = str(write_data(tmp_path / "choice", "choice"))
    with pytest.raises(SystemExit):
        main([*words, "choice", *learn])
    assert "distillation compares classes, not spans or choices" in " ".join(capsys.readouterr().err.split())


def test_class_names_are_kept(start: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The server, the Hugging Face folder and students know the labels of the data by name."""
    names = ("food", "sport", "weather")
    file = tmp_path / "data.jsonl"
    rows = [{"text": WORDS[i], "label": names[-1 - i % 3]} for i in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [
        "finetune",
        str(start),
        "--method",
        "classify",
        "--data",
        str(file),
        "--held_out",
        str(file),
        "--seeds",
        "1",
    ]
    words += ["--epochs", "0.5", "--batches", "6", "--sequence", "24", "--device", "cpu", "--runs", str(tmp_path)]
    main([*words, "--name", "teacher"])
    folder = json.loads((tmp_path / "teacher" / "results.json").read_text())["median"]["folder"]
    opened = open_model(folder)
    spec = resolve_pooler(opened.config, opened.path, ServeConfig(), "it", cp=1)
    assert spec is not None and spec.labels == names
    main(["convert", folder, str(tmp_path / "hf")])
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["id2label"] == {"0": "food", "1": "sport", "2": "weather"} and config["label2id"]["sport"] == 1
    capsys.readouterr()
    main([*words, "--name", "student", "--distill.teacher", folder])
    assert f"teacher {folder}: accuracy" in capsys.readouterr().err
    file.write_text("".join(json.dumps(row) + "\n" for row in rows if row["label"] != "food"))
    for learn, message in (
        (["--distill.teacher", folder], "has the classes food, sport, weather and the data sport, weather"),
        (
            ["--distill.teacher", str(start)],
            "has the output head 'encoder' and is not a classifier; fine-tune it first",
        ),
        (["--distill.teacher", folder, "--distill.init", "layers"], "here MODEL is its start"),
    ):
        with pytest.raises(SystemExit):
            main([*words, "--name", "other", *learn])
        assert message in " ".join(capsys.readouterr().err.split())


def test_settings(start: Path, tmp_path: Path) -> None:
    file = write_data(tmp_path, "classify")
    settings = {"model": str(start), "method": "classify", "data": file, "held_out": file, "runs": tmp_path}
    for changes, message in (
        ({"seeds": 0}, "--seeds 0 is not from 1"), ({"epochs": math.nan}, "--epochs nan"),
        ({"method": "rank"}, "not one of"),
        ({"lrs": ()}, "needs at least one learning rate"), ({"sequence": 5000}, "--sequence 5000 is more than"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            finetune_encoder(EncoderTuning(**settings | changes))
    rows = read_texts(file)
    with pytest.raises(DataError, match=r"the label '7' of 1 text, such as '.*', is not in the training data"):
        make_task("classify", Pair(Tokenizer.from_file(start), 24), rows, [rows[0]._replace(label="7")])
    with pytest.raises(DataError, match="all labels are '0'"):
        make_task("classify", Pair(Tokenizer.from_file(start), 24), rows[:1])

"""Reads the data of fine-tuning tasks in their published formats: GLUE's tables, RACE, SQuAD 1.1 and 2.0.

classify    JSON Lines {"text"} or {"first", "second"} with "label"; GLUE's TSV with its own column names (MNLI, QQP)
choice      RACE: {"article", "questions", "options", "answers"} per file or line
span        SQuAD: {"data": [{"paragraphs": [{"context", "qas": […]}]}]}
"""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from colonnade.config import did_you_mean, plural
from colonnade.errors import DataError

PAIRS = (
    ("first", "second"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"),
    ("question", "sentence"), ("text", None), ("sentence", None),
)  # fmt: skip
"""Names of the one or two text fields, in order of precedence."""
LABELS = ("gold_label", "label", "is_duplicate")


class Text(NamedTuple):
    """A text, or a pair of texts, with its class."""

    first: str
    second: str | None
    label: str


class Question(NamedTuple):
    """A question about a passage, with its options."""

    passage: str
    question: str
    options: tuple[str, ...]
    label: int


class SpanQuestion(NamedTuple):
    """A question with answers that are spans of a passage; an empty list if it has none."""

    id: str
    passage: str
    question: str
    answers: tuple[str, ...]
    start: int
    """Character of the passage where the first answer begins; -1 for none."""


def read_texts(path: Path) -> list[Text]:
    """The labelled texts of a JSON Lines or TSV file; rows without a gold label ("-" in MNLI) are skipped."""
    rows = _tsv(path) if path.suffix.lower() == ".tsv" else _jsonl(path)
    found: list[Text] = []
    for place, row in rows:
        label_name = next((name for name in LABELS if name in row), None)
        names = next(((a, b) for a, b in PAIRS if a in row and (b is None or b in row)), None)
        if label_name is None or names is None:
            texts = ", ".join(a if b is None else f"{a} and {b}" for a, b in PAIRS)
            raise DataError(
                f"{place}: a row needs a label ({', '.join(LABELS)}) and texts ({texts}); it has "
                f"{', '.join(map(str, row))}"
            )
        first, second = row[names[0]], None if names[1] is None else row[names[1]]
        if not isinstance(first, str) or not isinstance(second, str | None):
            raise DataError(f"{place}: '{names[0]}' or '{names[1]}' is not a string; fix or remove this row")
        label = row[label_name]
        if label is None or isinstance(label, list | dict):
            raise DataError(f"{place}: '{label_name}' is {label!r}, not a class; fix or remove this row")
        if str(label) not in ("-", ""):
            found.append(Text(first, second, str(label)))
    return _not_empty(found, path)


def read_choices(path: Path) -> list[Question]:
    """RACE's questions: a folder of its files, one file, or JSON Lines of the same objects."""
    found: list[Question] = []
    for place, record in _objects(path, (".txt", ".json", ".jsonl")):
        try:
            rows = list(zip(record["questions"], record["options"], record["answers"], strict=True))
            for question, options, answer in rows:
                label = list("ABCDEFGHIJ").index(answer)
                if label >= len(options):
                    raise DataError(f"{place}: the answer {answer} is not among {len(options)} options")
                found.append(Question(str(record["article"]), str(question), tuple(map(str, options)), label))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"{place}: not RACE's form (article, questions, options, answers A to D): "
                f"{type(error).__name__} {error}"
            ) from None
    if len({len(question.options) for question in found}) > 1:
        raise DataError(f"{path} has questions with different numbers of options; all must have the same number")
    return _not_empty(found, path)


def read_spans(path: Path) -> list[SpanQuestion]:
    """SQuAD's questions."""
    found: list[SpanQuestion] = []
    for place, record in _objects(path, (".json",)):
        try:
            for article in record["data"]:
                for paragraph in article["paragraphs"]:
                    found += [_span_question(paragraph["context"], each, place) for each in paragraph["qas"]]
        except (KeyError, TypeError) as error:
            raise DataError(
                f"{place}: not SQuAD's form (data, paragraphs, context, qas): {type(error).__name__} {error}"
            ) from None
    return _not_empty(found, path)


def _span_question(context: str, qa: dict[str, Any], place: str) -> SpanQuestion:
    answers = [] if qa.get("is_impossible") else qa["answers"]
    start = answers[0]["answer_start"] if answers else -1
    if answers and context[start : start + len(answers[0]["text"])] != answers[0]["text"]:
        raise DataError(
            f"{place}: question {qa['id']}: the text at {start} is not the answer {answers[0]['text'][:60]!r}"
        )
    return SpanQuestion(qa["id"], context, qa["question"].strip(), tuple(each["text"] for each in answers), start)


def label_names(texts: Sequence[Text], known: Sequence[str] = ()) -> list[str]:
    """The classes of ``texts``, sorted; raises :class:`DataError` for one that is not among the ``known`` ones."""
    names = sorted({text.label for text in texts})
    if known:
        for name in names:
            if name not in known:
                unknown = [text.first for text in texts if text.label == name]
                raise DataError(
                    f"the label '{name}' of {plural(len(unknown), 'text')}, such as {unknown[0][:40]!r}, is not in the "
                    f"training data{did_you_mean(name, list(known))}"
                )
        return list(known)
    if len(names) < 2:
        raise DataError(f"all labels are '{names[0]}'; a classifier needs at least two classes")
    return names


def _objects(path: Path, suffixes: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, object) of each JSON file of a folder, of a file, or of its lines."""
    files = sorted(file for file in path.rglob("*") if file.suffix in suffixes) if path.is_dir() else [path]
    for file in files:
        if file.suffix == ".jsonl":
            yield from _jsonl(file)
            continue
        try:
            record = json.loads(_text(file))
        except ValueError as error:
            raise DataError(f"{file}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise DataError(f"{file}: not a JSON object")
        yield str(file), record


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not JSON: {error}; use one object per line") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: not a JSON object; use one object per line")
        yield f"{path}:{number}", row


def _tsv(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = _text(path).split("\n")
    reader = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    for row in reader:
        yield f"{path}:{reader.line_num}", {name: value for name, value in row.items() if name is not None}


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from None


def _not_empty(found: list[Any], path: Path) -> list[Any]:
    if not found:
        raise DataError(f"{path} has no examples; use another file")
    return found

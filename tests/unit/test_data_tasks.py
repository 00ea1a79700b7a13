"""Task labels: by source or field, per token, in batches; documents without a label are refused."""

import json
from pathlib import Path

import numpy as np
import pytest

from colonnade.data import Corpus, build
from colonnade.data.batch import concatenate, pack
from colonnade.data.manifest import Manifest
from colonnade.errors import ConfigError, DataError

WORDS = ["we", "the", "people", "of", "this", "union", "hold", "that", "a", "column", "stands", "in", "a", "row"]


def text(i: int) -> str:
    return " ".join(WORDS[(i * j) % len(WORDS)] for j in range(3 + i % 9))


def jsonl(file: Path, numbers: range, **fields: object) -> Path:
    file.write_text("".join(json.dumps({"text": text(i), "lang": f"l{i % 3}", **fields}) + "\n" for i in numbers))
    return file


def document_tasks(corpus: Corpus, split: str) -> list[tuple[str, str]]:
    """(text, task) of each document, by the tasks of its tokens."""
    part, names, result, start = corpus.split(split), corpus.manifest.tasks, [], 0
    assert names is not None
    for number in range(part.documents):
        tokens = part.document(number)
        (task,) = set(part.tasks(start, start + len(tokens)).tolist())
        result.append((corpus.tokenizer.decode(tokens[:-1].tolist()), names[task]))
        start += len(tokens)
    return result


def test_tasks_by_source(tmp_path: Path) -> None:
    """Sources are a file, a folder of two files, and a document in memory."""
    (tmp_path / "web").mkdir()
    one, two = jsonl(tmp_path / "web" / "a.jsonl", range(20)), tmp_path / "web" / "b.txt"
    two.write_text(text(300))
    books = jsonl(tmp_path / "books.jsonl", range(20, 40))
    sources = [str(books), tmp_path / "web", ("speech", text(77) + " end")]
    manifest = build(
        sources, tmp_path / "corpus", vocab_size=280, tasks="source", shard_tokens=50, validation_share=0.3
    )
    assert manifest.tasks == (str(books), str(tmp_path / "web"), "speech")
    corpus = Corpus(tmp_path / "corpus", verify=True)
    expected = {text(i): str(books) for i in range(20, 40)} | {
        text(i): str(tmp_path / "web") for i in (*range(20), 300)
    }
    expected[text(77) + " end"] = "speech"
    documents = document_tasks(corpus, "train") + document_tasks(corpus, "validation")
    assert len(documents) == 42
    shared = {text(i) for i in range(20)} & {text(i) for i in range(20, 40)}
    assert all(expected[words] == task for words, task in documents if words not in shared)
    assert one.is_file()


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_tasks_by_field(format: str, tmp_path: Path) -> None:
    """The field is a name or a number; held-out documents and single-document corpora have tasks too."""
    rows = [{"text": text(i) + f" {i}", "kind": f"k{i % 3}", "number": i % 5} for i in range(40)]
    file = tmp_path / f"it.{format}"
    if format == "jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    for field in ("kind", "number"):
        out = tmp_path / field
        build([file], out, vocab_size=280, tasks=f"field:{field}", validation_share=0.3)
        corpus = Corpus(out, verify=True)
        documents = document_tasks(corpus, "train") + document_tasks(corpus, "validation")
        assert dict(documents) == {row["text"]: str(row[field]) for row in rows}
        assert corpus.split("validation").documents > 3
    with pytest.raises(DataError, match=r"no (field|column) 'topic', but .*; choose one with --tasks"):
        build([file], tmp_path / "no", vocab_size=280, tasks="field:topic")
    alone = jsonl(tmp_path / "alone.jsonl", range(7, 8))
    build([alone], tmp_path / "alone", vocab_size=280, tasks="field:lang", validation_share=0.4)
    assert {
        task for split in ("train", "validation") for _, task in document_tasks(Corpus(tmp_path / "alone"), split)
    } == {"l1"}


def test_batches_have_the_tasks_of_their_tokens(tmp_path: Path) -> None:
    """Each token has the task of its document, however samples cut and join documents."""
    file = jsonl(tmp_path / "it.jsonl", range(50))
    build([file], tmp_path / "corpus", vocab_size=280, tasks="field:lang", shard_tokens=64)
    split = Corpus(tmp_path / "corpus").split("train")
    ends = split.document_ends(0, split.tokens)
    of_token = split.tasks(0, split.tokens)
    assert (np.diff(of_token)[[e - 1 for e in range(1, split.tokens) if e not in ends]] == 0).all()
    for separate in (True, False):
        batch = pack(split, [3, 0, 5], 16, separate)
        assert batch.tasks_T is not None
        expected = np.concatenate([of_token[16 * i : 16 * i + 16] for i in (3, 0, 5)])
        assert batch.tasks_T.tolist() == expected.tolist()
        joined = concatenate([batch, pack(split, [1], 16, separate)])
        assert joined.tasks_T is not None
        assert joined.tasks_T.tolist() == [*expected, *of_token[16:32]]
        assert batch.to("cpu").keep_targets(1, 16).tasks_T is not None
    assert len(set(of_token.tolist())) == 3
    assert split.tasks(5, 5).tolist() == []


def test_a_corpus_has_no_tasks_by_default(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "it.jsonl", range(9))
    build([file], tmp_path / "corpus", vocab_size=280)
    assert "tasks" not in (tmp_path / "corpus" / "manifest.json").read_text()
    split = Corpus(tmp_path / "corpus").split("train")
    assert not split.has_tasks
    assert pack(split, [0], 8, True).tasks_T is None


def test_damaged_task_files_are_detected(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "it.jsonl", range(30))
    build([file], tmp_path / "corpus", vocab_size=280, tasks="field:lang")
    tasks = tmp_path / "corpus" / "train.tasks.bin"
    original = tasks.read_bytes()
    tasks.write_bytes(original[:-1] + bytes([original[-1] ^ 1]))
    with pytest.raises(DataError, match=r"train\.tasks\.bin is damaged"):
        Corpus(tmp_path / "corpus", verify=True)
    tasks.write_bytes(original[:-2])
    with pytest.raises(DataError, match=r"train\.tasks\.bin has \d+ bytes, not the"):
        Corpus(tmp_path / "corpus")
    tasks.unlink()
    with pytest.raises(DataError, match=r"train\.tasks\.bin is missing"):
        Corpus(tmp_path / "corpus")
    manifest = tmp_path / "corpus" / "manifest.json"
    record = json.loads(manifest.read_text())
    del record["tasks"]
    manifest.write_text(json.dumps(record))
    with pytest.raises(DataError, match="either all splits have tasks and the tasks have names"):
        Manifest.load(tmp_path / "corpus")


def test_invalid_task_settings_are_refused(tmp_path: Path) -> None:
    file, plain = jsonl(tmp_path / "it.jsonl", range(9)), tmp_path / "it.txt"
    plain.write_text(text(3))
    odd = jsonl(tmp_path / "odd.jsonl", range(3), kind=None)
    for sources, tasks, message in (
        ([file], "lang", "neither source nor field:NAME"),
        ([file], "field:", "neither source nor field:NAME"),
        ([plain], "field:lang", "is plain text, which has no field 'lang'; use --tasks source"),
        ([("a", text(1))], "field:lang", "is plain text, which has no field 'lang'"),
        ([odd], "field:kind", "field 'kind' is null, but a task is a name or a number"),
        ([file, tmp_path], "source", "which are two tasks; pass it once"),
    ):
        with pytest.raises((ConfigError, DataError), match=message):
            build(sources, tmp_path / "corpus", vocab_size=280, tasks=tasks)
    assert not (tmp_path / "corpus").exists()

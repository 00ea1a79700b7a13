"""Samples of encoder–decoder models: pairs, span corruption, and the corpora that they come from."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.config import DataConfig, RunConfig
from colonnade.data import Corpus, build
from colonnade.data.batch import concatenate
from colonnade.data.pairs import Pairs, SpanCorruption, SpanSizes, corrupt_spans, sentinel
from colonnade.errors import ColonnadeError, ConfigError, DataError
from colonnade.model import IGNORE
from colonnade.train.data_feed import CorpusFeed
from tests.encdec import nllb, t5

LINES = [f"one two {i}\tdeux un {i} !" for i in range(30)]


def test_sizes_are_those_of_t5() -> None:
    sizes = SpanSizes.for_source(512)
    assert (sizes.text, sizes.source, sizes.target) == (568, 512, 114)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 300), st.integers(0, 2**40))
def test_spans_restore_the_text(length: int, key: int) -> None:
    """Source and target together are the text; sizes are fixed by its length, the first span is never at the front."""
    text, marks, end = np.arange(1000, 1000 + length), list(range(900, 800, -1)), 7
    source, target = corrupt_spans(text, marks, end, key)
    sizes = SpanSizes.of_text(length)
    assert (len(source), len(target)) == (sizes.source, sizes.target)
    assert source[-1] == target[-1] == end
    assert source[0] == 1000
    spans: dict[int, list[int]] = {}
    for token in target[:-1].tolist():
        if token in marks:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    assert list(spans) == marks[: sizes.spans]
    assert all(spans.values())
    restored = [x for token in source[:-1].tolist() for x in spans.get(token, [token])]
    assert restored == text.tolist()


def test_places_differ_and_repeat() -> None:
    text, marks = np.arange(100, 300), list(range(50, 0, -1))
    first, again, other = (corrupt_spans(text, marks, 0, key)[1].tolist() for key in (1, 1, 2))
    assert first == again != other


def test_a_corpus_of_pairs(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").write_text("\n".join(LINES) + "\n\n")
    records = [dict(zip(("en", "fr"), line.split("\t"), strict=True)) for line in LINES]
    (tmp_path / "pairs.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    build([str(tmp_path / "pairs.tsv")], tmp_path / "a", objective="pairs", vocab_size=300, validation_share=0.2)
    build(
        [str(tmp_path / "pairs.jsonl")], tmp_path / "b", objective="pairs", vocab_size=300, validation_share=0.2,
        field="en,fr",
    )  # fmt: skip
    corpora = [Corpus(tmp_path / name, verify=True) for name in "ab"]
    assert corpora[0].manifest.fingerprint == corpora[1].manifest.fingerprint
    tokenizer, (end,) = corpora[0].tokenizer, corpora[0].tokenizer.eos_ids
    found = set()
    for name in ("train", "validation"):
        objective = Pairs(corpora[0].split(name), DataConfig(sequence=64), end, start=5)
        for number in range(objective.samples):
            source, target = objective.pair(number)
            assert source[-1] == target[-1] == end
            found.add("\t".join(tokenizer.decode(x[:-1].tolist()) for x in (source, target)))
    assert found == set(LINES)
    batch = objective.pack([0, 1, 2], [0, 1, 2])
    assert batch.source_tokens_S is not None
    assert batch.cu_sources is not None
    for r, (a, b) in enumerate(zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:], strict=True)):
        source, target = objective.pair(r)
        assert batch.tokens_T[a:b].tolist() == [5, *target[:-1].tolist()]
        assert batch.targets_T[a:b].tolist() == target.tolist()
        assert batch.source_tokens_S[batch.cu_sources[r] : batch.cu_sources[r + 1]].tolist() == source.tolist()
    parts = [objective.pack([i], [i]) for i in range(3)]
    joined = concatenate(parts)
    assert joined.cu_sources is not None
    assert joined.cu_sources.tolist() == batch.cu_sources.tolist()
    assert joined.first_R is not None
    assert joined.first_R.tolist() == batch.cu_seqlens[:-1].tolist()
    kept = batch.keep_targets(2, 64)
    assert (kept.targets_T[: batch.cu_seqlens[2]] != IGNORE).all()
    assert (kept.targets_T[batch.cu_seqlens[2] :] == IGNORE).all()
    short = Pairs(corpora[0].split("train"), DataConfig(sequence=3), end, start=5)
    assert [len(x) for x in short.pair(0)] == [3, 3]


def test_pairs_of_named_languages(tmp_path: Path) -> None:
    """Sources and targets begin with the tokens of their languages, in documents of many chunks too."""
    long = " ".join(f"word{i}" for i in range(40_000))
    (tmp_path / "pairs.tsv").write_text("\n".join([*LINES, f"{long}\tshort"]))
    how = {"objective": "pairs", "validation_share": 0.2, "languages": "eng_Latn,fra_Latn"}
    manifest = build([str(tmp_path / "pairs.tsv")], tmp_path / "c", vocab_size=300, **how)
    assert manifest.languages == ("eng_Latn", "fra_Latn")
    corpus = Corpus(tmp_path / "c")
    assert corpus.manifest.languages == manifest.languages
    tokenizer = corpus.tokenizer
    english, french = tokenizer.token_id("eng_Latn"), tokenizer.token_id("fra_Latn")
    assert (english, french) == (manifest.vocab_size - 2, manifest.vocab_size - 1)
    texts = set()
    for name in ("train", "validation"):
        objective = Pairs(corpus.split(name), DataConfig(sequence=1 << 20), tokenizer.eos_ids[0], start=2)
        for number in range(objective.samples):
            source, target = objective.pair(number)
            assert (source[0], target[0]) == (english, french)
            assert not np.isin(source[1:], [english, french]).any()
            texts.add("\t".join(tokenizer.decode(x[1:-1].tolist()) for x in (source, target)))
        batch = objective.pack([0], [0])
        assert batch.tokens_T[:2].tolist() == [2, french], "as in inference: the start, then the language"
        assert batch.targets_T[0] == french
    assert texts == {*LINES, f"{long}\tshort"}
    given = {**how, "tokenizer": tokenizer, "overwrite": True}
    again = build([str(tmp_path / "pairs.tsv")], tmp_path / "c", **given)
    assert again.fingerprint == manifest.fingerprint
    with pytest.raises(DataError, match="the tokenizer has no special token deu_Latn; name languages that it has"):
        build([str(tmp_path / "pairs.tsv")], tmp_path / "c", **{**given, "languages": "eng_Latn,deu_Latn"})


@pytest.mark.parametrize("of_model", [True, False])
def test_languages_must_be_those_of_the_model(tmp_path: Path, of_model: bool) -> None:
    (tmp_path / "pairs.tsv").write_text("\n".join(LINES))
    languages = None if of_model else "eng_Latn,fra_Latn"
    build([str(tmp_path / "pairs.tsv")], tmp_path / "c", objective="pairs", vocab_size=300, languages=languages)
    model = (nllb if of_model else t5)(vocab_size=302)
    run = RunConfig(name="it", model=model, data=DataConfig(path=tmp_path / "c", sequence=32), device="cpu")
    remedy = "build the corpus with --languages SOURCE,TARGET" if of_model else "set --model.encoder.languages true"
    with pytest.raises(ConfigError, match=remedy):
        CorpusFeed(run)


def test_a_corpus_for_span_corruption(tmp_path: Path) -> None:
    texts = [(str(i), " ".join(f"word{j} stands" for j in range(i + 20))) for i in range(20)]
    manifest = build(texts, tmp_path / "c", objective="spans", vocab_size=300)
    corpus = Corpus(tmp_path / "c")
    tokenizer = corpus.tokenizer
    assert tokenizer.token_id(sentinel(0)) == manifest.vocab_size - 1
    assert tokenizer.token_id(sentinel(99)) == manifest.vocab_size - 100
    objective = SpanCorruption(corpus.split("train"), DataConfig(sequence=64), tokenizer, start=0)
    batch = objective.pack([0, 3], [0, 1])
    assert batch.longest_source == SpanSizes.for_source(64).source <= 64
    assert int((batch.targets_T >= manifest.vocab_size - 100).sum()) == 2 * SpanSizes.for_source(64).spans


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a\tb\tc\n", {}, r"p.tsv:1: 3 columns, but a pair is a source, a tab and a target"),
        ("a\tb\nc\n", {}, r"p.tsv:2: 1 columns"),
        ("a\t \nc\td\n", {}, r"p.tsv:1: the target of a pair is empty"),
        ("a\tb\n", {}, r"there is only one pair"),
        ("a\tb\nc\td\n", {"separator": "x"}, r"pairs have neither a separator nor tasks"),
        ("a\tb\nc\td\n", {"field": "one"}, r"--field one does not name two fields"),
        ("a\tb\nc\td\n", {"languages": "eng_Latn"}, r"--languages eng_Latn does not name two"),
    ],
)
def test_bad_pairs(tmp_path: Path, text: str, options: dict[str, str], message: str) -> None:
    (tmp_path / "p.tsv").write_text(text)
    with pytest.raises(ColonnadeError, match=message) as caught:
        build([str(tmp_path / "p.tsv")], tmp_path / "c", objective="pairs", vocab_size=300, **options)
    assert isinstance(caught.value, DataError | ConfigError)

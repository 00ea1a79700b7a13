"""The parts of cleaning: shingles, signatures, which copies stay, what is cut, mending."""

import itertools
import random
import re
import string
import subprocess
import sys

import ftfy
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colonnade.config import Recipe, read_recipe
from colonnade.data import html_report
from colonnade.data.refine import signatures
from colonnade.data.refine.mend import MinTokens, mend
from colonnade.data.refine.near import label_components, near_copies, split_buckets
from colonnade.data.refine.overlap import count_grams, cut, evaluation_grams, overlap_grams
from colonnade.data.refine.shingles import jaccard, ngram_hashes, shingles, word_hashes, word_spans
from colonnade.data.refine.signatures import Signer, band_buckets, write_bands
from colonnade.data.refine.storage import document_id, merge_lines, part_of, read_part, write_unit
from colonnade.errors import ConfigError
from tests.passages import edited, grams, passages, similarity


def test_shingles_are_the_set_of_5_grams():
    for text in ("", "one", "one two three", "a b c d e", "A b, c D e; f a B c d e f", passages(3)[1]):
        assert len(shingles(text)) == len(grams(text))
    assert (shingles("The cat, the hat: sat flat.") == shingles("the CAT the\nhat sat flat")).all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from("abcd"), max_size=30), st.lists(st.sampled_from("abcd"), max_size=30))
def test_jaccard_is_that_of_sets(a, b):
    x, y = " ".join(a), " ".join(b)
    expected = similarity(x, y) if a or b else 0.0
    assert jaccard(shingles(x), shingles(y)) == expected


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60))
def test_words_and_their_places_agree(text):
    spans = word_spans(text)
    assert len(spans) == len(word_hashes(text))
    assert [text[a:b] for a, b in spans] == re.findall(r"\w+", text)


def test_ngrams_of_different_lengths_differ():
    words = word_hashes("a a a a a a a a a a")
    assert len({int(ngram_hashes(words, n)[0]) for n in range(1, 9)}) == 8
    assert not len(ngram_hashes(words, 11))


def test_hashes_are_the_same_in_each_process():
    code = "from colonnade.data.refine import shingles, signatures as s; x = shingles.shingles('a b c d e f g'); "
    code += "print(x.tolist(), s.Signer(3, 2).sign(x).tolist()); "
    code += "import sys, colonnade.data.refine.parts; assert 'torch' not in sys.modules"  # a worker needs no torch
    run = lambda: subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120)  # noqa: E731
    own = shingles("a b c d e f g")
    assert run().stdout == f"{own.tolist()} {Signer(3, 2).sign(own).tolist()}\n"


def test_signatures_share_bands_as_often_as_theory_says():
    text, random_, signer = passages(3, 400)[0], random.Random(1), Signer(200, 1)
    for changes in (5, 20, 60):
        other = edited(text, changes, random_.randrange(1000))
        expected = similarity(text, other)
        equal = (signer.sign(shingles(text)) == signer.sign(shingles(other))).mean()
        assert abs(equal - expected) < 4 * (expected * (1 - expected) / 200) ** 0.5


def test_signature_in_blocks_is_the_minimum():
    numbers = np.random.default_rng(0).integers(0, 1 << 63, 5000, np.uint64)
    signer = Signer(4, 3)
    whole = np.minimum(signer.sign(numbers[:2500]), signer.sign(numbers[2500:]))
    assert (signer.sign(numbers) == whole).all()


@pytest.mark.parametrize("rows_at_once", [1 << 20, 7])
def test_buckets_are_those_of_datatrove(tmp_path, monkeypatch, rows_at_once):
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets
    from datatrove.utils.hashing import HashConfig

    monkeypatch.setattr(signatures, "_CHUNK_ROWS", rows_at_once)
    signed = np.random.default_rng(3).integers(0, 3, (40, 2, 2)).astype(np.uint32)
    for part in range(2):
        write_bands(tmp_path / "bands", part, signed[20 * part : 20 * part + 20], np.arange(20))
    write_bands(tmp_path / "bands", 2, signed[:0], np.arange(0))
    config = MinhashConfig(n_grams=5, num_buckets=2, hashes_per_bucket=2, hash_config=HashConfig(precision=32))
    for band in range(2):
        MinhashDedupBuckets(str(tmp_path / "bands"), str(tmp_path / "dups"), config=config).run(None, band, 2)
        pairs = np.fromfile(tmp_path / "dups" / f"{band:05d}_00.dups", "<u4").reshape(-1, 2, 2).astype(np.int64)
        theirs = {frozenset((each[:, 0] << 32 | each[:, 1]).tolist()) for each in pairs}
        chunks = list(band_buckets(tmp_path / "bands" / f"bucket_{band:03d}", 2))
        ours = [each.tolist() for chunk in chunks for each in split_buckets(*chunk)]
        assert {frozenset(pair) for each in ours for pair in itertools.pairwise(each)} == theirs and theirs
        assert all(each == sorted(each) for each in ours) and (len(chunks) > 1) == (rows_at_once == 7)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 30), min_size=2, max_size=4, unique=True), max_size=25), st.integers(1, 9))
def test_labels_are_the_lowest_documents_of_components(buckets, at_once):
    def chunks():
        for start in range(0, len(buckets), at_once):
            own = buckets[start : start + at_once]
            yield np.array([len(each) for each in own]), np.array([document for each in own for document in each])

    labels = np.arange(31)
    label_components(labels, chunks)
    expected = [{document} for document in range(31)]
    for _ in range(31):
        for bucket in buckets:
            union = set().union(*(expected[document] for document in bucket))
            for document in bucket:
                expected[document] = union
    assert labels.tolist() == [min(each) for each in expected]


def _sets(texts):
    return {number: shingles(text) for number, text in enumerate(texts)}


def test_of_a_chain_the_far_end_stays():
    text = passages(3, 200)[2]
    words = text.split(" ")
    chain = [" ".join(words[a : a + 120]) for a in (0, 15, 30)]
    sets = _sets(chain)
    assert jaccard(sets[0], sets[1]) > 0.7 and jaccard(sets[1], sets[2]) > 0.7 and jaccard(sets[0], sets[2]) <= 0.7
    (copy,) = near_copies([[0, 1, 2]], sets.__getitem__, 0.7)
    assert (copy.document, copy.twin) == (1, 0)
    assert [each.document for each in near_copies([[0, 1, 2]], sets.__getitem__, 0.7, lambda d: -d)] == [1]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=2, max_size=9), st.floats(0.1, 0.9))
def test_greedy_rule(sets, threshold):
    arrays = {i: np.array(sorted(each), np.uint64) for i, each in enumerate(sets)}
    leaving = near_copies([list(arrays)], arrays.__getitem__, threshold)
    gone = {copy.document for copy in leaving}
    stays = [i for i in arrays if i not in gone]
    assert all(jaccard(arrays[a], arrays[b]) <= threshold for a in stays for b in stays if a < b)
    for copy in leaving:
        assert copy.twin in stays and copy.twin < copy.document
        assert jaccard(arrays[copy.document], arrays[copy.twin]) == copy.similarity > threshold


TEST = "Whoever plants this particular sentence in a corpus will find that it is cut out of it again."


def _document(sentence=TEST):
    filler = [f"Sentence number {i} talks about something else entirely, at length." for i in range(40)]
    return " ".join([*filler[:20], sentence, *filler[20:]])


def test_planted_text_is_cut_to_the_ends_of_sentences():
    found = evaluation_grams([TEST], 13)
    before, after = cut(_document(), found, 200) or []
    assert before.endswith("at length.") and after.lstrip().startswith("Sentence number")
    assert "plants" not in before + after
    whole = _document()
    start, stop = whole.index("Whoever"), whole.index("again.") + 6
    assert start - len(before) >= 200 and len(whole) - len(after) - stop >= 200
    assert start - len(before) < 300 and len(whole) - len(after) - stop < 300
    assert cut(_document("Nothing of it."), found, 200) is None


def test_a_short_evaluation_text_counts_as_a_whole():
    found = evaluation_grams(["eight words make the shortest text that counts", "seven words are too few for it"], 13)
    assert found.lengths == (8,) and len(found.hashes) == 1
    assert cut("x. EIGHT words, make the shortest text that counts! y.", found, 0) == ["x.", " y."]
    assert cut("seven words are too few for it.", found, 0) is None


def test_neighbouring_cuts_become_one():
    found = evaluation_grams([TEST], 13)
    pieces = cut(_document(f"{TEST} And. {TEST}"), found, 200)
    assert pieces is not None and len(pieces) == 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.sampled_from("abc"), max_size=40), st.lists(st.sampled_from("abc"), max_size=40))
def test_overlap_is_exact(test, corpus):
    tests, text = overlap_grams([" ".join(test)]), " ".join(corpus)

    def eight(words):
        return [tuple(words[i : i + 8]) for i in range(len(words) - 7)]

    counts = count_grams(tests, [text])
    assert len(counts) == len(set(eight(test)))
    assert (counts > 0).sum() == len(set(eight(test)) & set(eight(corpus)))
    assert counts.sum() == sum(gram in set(eight(test)) for gram in eight(corpus))


def test_lines_broken_inside_a_sentence_are_joined():
    assert (
        mend("It was a\ndark and,\n stormy night.\nthe end\n\nOf it\nAll")
        == "It was a dark and, stormy night.\nthe end\n\nOf it\nAll"
    )


def test_wrongly_decoded_characters_are_repaired():
    assert mend("The Mona Lisa doesnâ€™t have eyebrows.") == "The Mona Lisa doesn't have eyebrows."


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet=[c for c in string.printable if c not in "\r\x0b\x0c&"], max_size=80))
def test_texts_that_skip_ftfy_are_unchanged_by_it(text):
    assert ftfy.fix_text(text) == text


def test_tokens_are_counted_only_as_far_as_needed():
    counted = MinTokens(4, None)
    assert counted.count_if_fewer("one, two") == 3
    assert counted.count_if_fewer("one, two three") is None
    assert counted.count_if_fewer("word " * 10_000) is None
    assert MinTokens(20_000, None).count_if_fewer("word " * 10_000) == 10_000


def test_parts_are_ranges_of_ids(tmp_path):
    records = [{"id": document_id(str(i)), "text": "ü" * i} for i in range(50)]
    write_unit(tmp_path / "000000-0000", records[:30], 3)
    write_unit(tmp_path / "000001-0000", records[30:], 3)
    found = [[record["id"] for record in read_part(tmp_path, part)] for part in range(3)]
    assert all(part_of(document, 3) == part for part, each in enumerate(found) for document in each)
    assert sorted(itertools.chain(*found)) == sorted(record["id"] for record in records)
    assert max(found[0]) < min(found[1])
    assert document_id("A  b\n") == document_id("a B") != document_id("ab")


def test_many_files_are_merged_in_groups(tmp_path):
    for i in range(450):
        (tmp_path / f"{i:03d}").write_bytes(f"{(i * 7) % 450:03d}\n".encode())
    merge_lines(list(tmp_path.iterdir()), tmp_path / "out" / "all")
    assert (tmp_path / "out" / "all").read_text().split() == [f"{i:03d}" for i in range(450)]
    assert len(list((tmp_path / "out").iterdir())) == 1


def test_recipes(tmp_path):
    assert read_recipe("megatron") == Recipe()
    (tmp_path / "mine.toml").write_text("min_tokens = 5\nsimilarity = 0.8\n")
    assert read_recipe(str(tmp_path / "mine.toml")) == Recipe(min_tokens=5, similarity=0.8)
    (tmp_path / "mine.toml").write_text("min_token = 5\n")
    with pytest.raises(ConfigError, match=r"mine\.toml:1: Recipe has no key 'min_token'; did you mean 'min_tokens'"):
        read_recipe(str(tmp_path / "mine.toml"))
    with pytest.raises(ConfigError, match="no recipe 'megatorn'; did you mean 'megatron'"):
        read_recipe("megatorn")
    with pytest.raises(ConfigError, match="similarity is 0"):
        Recipe(similarity=0)


def test_report_page_escapes_names_and_draws_the_same_bytes():
    def draw(axes):
        axes.bar(["a"], [1])

    parts = [html_report.plot("x <y>", draw), html_report.table(("a",), [("<b>",)])]
    written = html_report.page("<t>", parts)
    assert "<b>" not in written and "<y>" not in written and "&lt;t&gt;" in written
    assert html_report.plot("x <y>", draw) == parts[0]

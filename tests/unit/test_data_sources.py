"""Reading documents from files: three formats, exact pieces, and errors with file and position."""

import itertools
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colonnade.data import readers, text_chunks
from colonnade.data.readers import ReadOptions, find_files, read_documents, total_bytes
from colonnade.errors import DataError
from tests import tokens


def read_texts(*sources: readers.Source, **options) -> list[str]:
    """The documents, with their pieces joined."""
    texts, current = [], ""
    for piece in read_documents(find_files(sources), ReadOptions(**options)):
        current += piece.text
        if piece.last:
            texts.append(current)
            current = ""
    assert current == "", "a document that never ends"
    return texts


def jsonl(path: Path, *records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def parquet(path: Path, **columns) -> Path:
    pyarrow.parquet.write_table(pa.table(columns), path)
    return path


# -- formats ----------------------------------------------------------------------------------------------------------


def test_every_format_yields_its_documents_in_order(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo".encode())
    jsonl(tmp_path / "b.jsonl", {"text": "three", "n": 1}, {"text": "fo\u00fcr"})
    parquet(tmp_path / "c.parquet", text=["five", "six"], n=[1, 2])
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.md").write_text("seven", encoding="utf-8")
    (tmp_path / ".hidden.txt").write_text("no", encoding="utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    expected = ["one\r\ntwo", "three", "foür", "five", "six", "seven"]
    assert read_texts(tmp_path) == expected
    assert read_texts(str(tmp_path / "b.jsonl"), ("name", "in memory")) == ["three", "foür", "in memory"]


def test_an_explicitly_named_file_is_read_as_text(tmp_path):
    file = tmp_path / "main.rs"
    file.write_text("fn main() {}", encoding="utf-8")
    assert read_texts(file) == ["fn main() {}"]


def test_field_selects_the_json_field_and_the_column(tmp_path):
    files = jsonl(tmp_path / "b.jsonl", {"body": "x"}), parquet(tmp_path / "c.parquet", body=["y"])
    assert read_texts(*files, field="body") == ["x", "y"]


def test_blank_documents_and_lines_are_skipped(tmp_path):
    (tmp_path / "a.txt").write_text(" \n\t", encoding="utf-8")
    (tmp_path / "b.jsonl").write_text('\n{"text": ""}\n\n{"text": "x"}\n', encoding="utf-8")
    assert read_texts(tmp_path) == ["x"]


def test_sizes_of_pieces_add_up_to_those_of_the_sources(tmp_path):
    files = [
        jsonl(tmp_path / "b.jsonl", {"text": "three"}, {"text": "fünf"}),
        parquet(tmp_path / "c.parquet", text=["five"]),
        tmp_path / "a.txt",
    ]
    files[-1].write_text("eins, zwei, fünf", encoding="utf-8")
    sources = [*files, ("name", "sechs ß")]
    assert sum(piece.size_bytes for piece in read_documents(sources, ReadOptions())) == total_bytes(sources)


# -- pieces and separators --------------------------------------------------------------------------------------------

words = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
prose = st.lists(st.one_of(words, st.sampled_from([" ", "\n", "\n\n", "don't", "x1", "...", "##"])), max_size=40).map(
    " ".join
)


@given(text=prose, limit=st.integers(40, 90), chunk=st.integers(1, 50), data=st.data())
def test_pieces_have_the_tokens_of_the_whole_text(text, limit, chunk, data):
    """Cuts between a letter and white space do not change GPT-2's tokens; any cuts keep the text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_chunks, "CHUNK_CHARACTERS", limit)
        chunks = [text[i : i + chunk] for i in range(0, len(text), chunk)]
        pieces = [piece.text for piece in text_chunks.split_chunks(chunks)]
        cuts = [text_chunks._WORD_END.search(a[-1:] + b[:1]) for a, b in itertools.pairwise(pieces)]
    assert "".join(pieces) == (text if text.strip() else "")
    if all(cuts):
        tokenizer = tokens.gpt2()
        assert [t for ids in tokenizer.encode_documents(pieces) for t in ids] == (
            tokenizer.encode_documents([text])[0] if text.strip() else []
        )


@given(
    parts=st.lists(st.text("ab <|>", max_size=30), max_size=6),
    separator=st.sampled_from(["<|>", "ab", " "]),
    chunk=st.integers(1, 20),
    limit=st.integers(4, 40),
)
def test_separators_are_found_across_chunks(parts, separator, chunk, limit):
    text = separator.join(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_chunks, "CHUNK_CHARACTERS", limit)
        documents, current = [], ""
        for piece in text_chunks.split_chunks([text[i : i + chunk] for i in range(0, len(text), chunk)], separator):
            current += piece.text
            if piece.last:
                documents.append(current)
                current = ""
    # Blank documents are ignored: a long one is known to be blank only after part of it was yielded.
    short = [part for part in text.split(separator) if part.strip()]
    assert [part for part in documents if part.strip()] == short


def test_long_files_come_in_pieces_of_bounded_size(tmp_path):
    file = tmp_path / "long.txt"
    text = "word " * (text_chunks.CHUNK_CHARACTERS // 2)
    file.write_text(text, encoding="utf-8")
    pieces = list(read_documents([file], ReadOptions()))
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert len(pieces) == 3
    assert max(len(piece.text) for piece in pieces) <= text_chunks.CHUNK_CHARACTERS
    assert "".join(piece.text for piece in pieces) == text


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 3, 7, 1 << 20])
def test_bytes_that_are_not_text_are_reported_with_their_offset(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(readers, "_READ_BYTES", chunk)
    file = tmp_path / "a.txt"
    for content, message in [
        (
            "héllo €".encode() + b"\xff after",
            rf"a\.txt is not UTF-8 text: byte 0xff at offset {len('héllo €'.encode())}",
        ),
        ("ab".encode("utf-16"), "byte 0xff at offset 0|NUL byte at offset 3"),
        (b"abc\0def", "NUL byte at offset 3"),
        ("cut €".encode()[:-1], "byte 0xe2 at offset 4"),
    ]:
        file.write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_texts(file)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"body": "x", "id": 1}', r"b\.jsonl:2: no field 'text', but 'body', 'id'; choose one with --field"),
        ("{}", r"b\.jsonl:2: no field 'text', but none at all"),
        ("{text}", r"b\.jsonl:2: not JSON"),
        ("[1]", r"b\.jsonl:2: a list, not an object"),
        ('{"text": null}', r"b\.jsonl:2: field 'text' is null, not text"),
        ('{"text": 3}', r"b\.jsonl:2: field 'text' is a number"),
        ('{"text": {}}', r"b\.jsonl:2: field 'text' is an object"),
        ('{"text": "a\\ud83d"}', r"b\.jsonl:2: field 'text': character 1 is a lone surrogate"),
    ],
)
def test_invalid_records_are_reported_with_their_line(tmp_path, line, message):
    file = tmp_path / "b.jsonl"
    file.write_text(f'{{"text": "fine"}}\n{line}\n', encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_texts(file)


def test_a_jsonl_line_that_is_not_utf8_is_refused(tmp_path):
    file = tmp_path / "b.jsonl"
    file.write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"b\.jsonl:1: not JSON"):
        read_texts(file)


def test_parquet_errors_name_the_file(tmp_path):
    with pytest.raises(DataError, match=r"c\.parquet: no column 'text', but 'body'"):
        read_texts(parquet(tmp_path / "c.parquet", body=["x"]))
    with pytest.raises(DataError, match=r"d\.parquet, row 1: column 'text' is null"):
        read_texts(parquet(tmp_path / "d.parquet", text=["x", None]))
    with pytest.raises(DataError, match=r"e\.parquet, row 0: column 'text' is a number"):
        read_texts(parquet(tmp_path / "e.parquet", text=[1]))
    (tmp_path / "f.parquet").write_text("not a table", encoding="utf-8")
    with pytest.raises(DataError, match=r"f\.parquet is not a readable Parquet file"):
        read_texts(tmp_path / "f.parquet")


def test_missing_paths_and_folders_without_text_are_refused(tmp_path):
    with pytest.raises(DataError, match="nowhere does not exist"):
        find_files([tmp_path / "nowhere"])
    (tmp_path / "main.rs").write_text("fn main() {}", encoding="utf-8")
    with pytest.raises(DataError, match=r"has no \.txt, .*\.parquet file \(1 others\); name its files"):
        find_files([tmp_path])


def test_a_file_that_disappears_is_reported(tmp_path):
    with pytest.raises(DataError, match=r"gone\.txt: No such file"):
        list(read_documents([tmp_path / "gone.txt"], ReadOptions()))

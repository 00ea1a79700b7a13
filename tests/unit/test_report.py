import json
import math

import pytest

import table
from harness import report


def record(folder, **changes):
    lines = [report.Headline("decode, batch 1", 1234.5, "tokens/s", "transformers", 987.6)]
    path = report.report(
        "decode",
        [{"batch": 1, "tokens_per_s": 1234.5}, {"batch": 8, "note": "a|b"}],
        "median of 5",
        headlines=lines,
        folder=folder,
    )
    return json.loads(path.read_text()) | {"file": path.name} | changes


def test_record_has_machine_date_and_command(tmp_path):
    found = record(tmp_path)
    assert found["rows"][0] == {"batch": 1, "tokens_per_s": 1234.5}
    assert found["notes"] == "median of 5"
    assert found["date"].endswith("UTC")
    assert found["machine"]["cpu"]
    assert found["versions"]["torch"]
    assert found["command"].startswith("python ")


def test_empty_and_non_numeric_records_are_refused(tmp_path):
    with pytest.raises(ValueError, match="measured nothing"):
        report.report("empty", [], folder=tmp_path)
    with pytest.raises(ValueError, match="JSON compliant"):
        report.report("nan", [{"x": math.nan}], folder=tmp_path)


def test_headlines_and_rows_are_rendered(tmp_path):
    machine = {"cpu": "A Processor", "cores": 2, "gpu": None}
    records = [record(tmp_path, machine=machine, date="2026-01-02 03:04 UTC")]
    topics = {"Serving": [("decode", 0, "one request"), ("missing", 0, "another")], "Training": [("missing", 1, "x")]}
    shown = table.headlines(records, topics)
    readme = table.between("before\n<!-- results:begin -->\nold\n<!-- results:end -->\nafter\n", "results", shown)
    assert "| **Serving** |  |  |  |" in shown and "Training" not in shown and "another" not in shown
    row = (
        "| one request | 1,234 tokens/s | transformers 987.6 tokens/s "
        "| [A Processor, 2 cores](benchmarks/results/decode.json) |"
    )
    assert row in readme.splitlines()
    assert "old" not in readme
    assert readme.startswith("before\n")
    assert readme.endswith("after\n")
    page = table.page(records)
    assert "| 8 |  | a\\|b |" in page
    assert "2026-01-02 03:04 UTC" in page


def test_shared_notes_of_one_script_are_rendered_once(tmp_path):
    of_all = "What all have in common.\n\n    python benchmarks/it.py --tiny    # how to run it\n\nHow."
    one, two, three = (
        record(tmp_path, notes=notes, command="python benchmarks/it.py", file=name)
        for notes, name in (
            (of_all, "it.json"),
            (f"Of the part.\n {of_all}", "it_part.json"),
            (of_all, "it_whole.json"),
        )
    )
    page = table.page([one, two, three, record(tmp_path, notes=of_all, command="python benchmarks/other.py")])
    assert "--tiny" not in page, "each section names its own command"
    sections = page.split("## ")[1:]
    assert ["What all have" in part for part in sections] == [True, False, False, True]
    assert "\n\nOf the part.\n\n" in sections[1] and "As in [it](#it)." in sections[2]


def test_command_omits_output_paths(monkeypatch):
    words = ["benchmarks/it.py", "--out", "/home/me/x", "--sweep", "0", "3", "--picture=y.png", "--keep", "k", "--tiny"]
    monkeypatch.setattr("sys.argv", words)
    assert report.command() == "python benchmarks/it.py --sweep 0 3 --tiny"
    for found in table.load():
        assert not {"--out", "--picture", "--keep"} & set(found["command"].split()), found["file"]


def test_tiny_runs_are_not_written_to_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert report.folder_of(None, toy=True).parent == tmp_path
    assert report.folder_of(None, toy=False) == report.RESULTS
    assert report.folder_of(tmp_path / "x", toy=True) == report.folder_of(tmp_path / "x", toy=False) == tmp_path / "x"


def test_ratios_are_rendered_as_speedups(tmp_path):
    found = record(tmp_path)
    rows = [("decode", 0, "Decoding", "transformers"), ("decode", 0, f"Decoding{table.LOWER}", "transformers")]
    shown = table.comparison([found], rows)
    assert "| Decoding | transformers | 1.25 × |" in shown and "| Decoding | transformers | 0.80 × |" in shown


def test_readme_shows_at_most_25_existing_rows():
    by_stem = {record["file"].removesuffix(".json"): record for record in table.load()}
    rows = [row for topic in table.TOPICS.values() for row in topic]
    assert len(rows) <= 25
    for stem, line, _ in rows:
        assert line < len(by_stem[stem]["headlines"]), stem


def test_committed_tables_match_the_results():
    expected = table.rendered()
    pages = {table.ROOT / "docs/howto" / name for name in ("clean.md", "cpu.md", "evaluate.md", "serve.md")}
    assert {table.README, table.PAGE} | pages <= set(expected)
    for path, text in expected.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python benchmarks/table.py"


def test_page_shows_the_requested_columns(tmp_path):
    text = "before\n<!-- record: decode tokens_per_s batch -->\nold\n<!-- record: end -->\nafter\n"
    shown = table.with_parts(text, [record(tmp_path)])
    head, row, last = "| tokens_per_s | batch |", "| 1,234 | 1 |", "|  | 8 |"
    assert f"-->\n\n{head}\n| --- | --- |\n{row}\n{last}\n\n<!-- record: end -->\nafter" in shown and "old" not in shown
    assert table.with_parts(shown, [record(tmp_path)]) == shown


@pytest.mark.parametrize("node", ["$Format:%H$", "0123456789" * 4, None])
def test_commit_of_an_archive(node, tmp_path, monkeypatch):
    """``git archive`` writes the commit into the file; in a checkout the file has a placeholder, and git is asked."""
    archive = tmp_path / ".git_archival.txt"
    if node is not None:
        archive.write_text(f"node: {node}\n")
    asked = report.commit()
    monkeypatch.setattr(report, "ARCHIVE", archive)
    assert report.commit() == ("012345678901" if node == "0123456789" * 4 else asked)

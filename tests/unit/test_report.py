import json
import math

import pytest

import _report
import table


def record(folder, **changes):
    lines = [_report.Headline("decode, batch 1", 1234.5, "tokens/s", "transformers", 987.6)]
    path = _report.report(
        "decode",
        [{"batch": 1, "tokens_per_s": 1234.5}, {"batch": 8, "note": "a|b"}],
        "median of 5",
        headlines=lines,
        folder=folder,
    )
    return json.loads(path.read_text()) | {"file": path.name} | changes


def test_a_record_says_where_when_and_how(tmp_path):
    found = record(tmp_path)
    assert found["rows"][0] == {"batch": 1, "tokens_per_s": 1234.5}
    assert found["notes"] == "median of 5"
    assert found["date"].endswith("UTC")
    assert found["machine"]["cpu"]
    assert found["versions"]["torch"]
    assert found["command"].startswith("python ")


def test_nothing_measured_or_not_a_number_is_refused(tmp_path):
    with pytest.raises(ValueError, match="measured nothing"):
        _report.report("empty", [], folder=tmp_path)
    with pytest.raises(ValueError, match="JSON compliant"):
        _report.report("nan", [{"x": math.nan}], folder=tmp_path)


def test_headlines_and_rows_are_rendered(tmp_path):
    machine = {"cpu": "A Processor", "cores": 2, "gpu": None}
    records = [record(tmp_path, machine=machine, date="2026-01-02 03:04 UTC")]
    readme = table.with_headlines(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n", records)
    row = (
        "| decode, batch 1 | 1,234 tokens/s | transformers 987.6 tokens/s | A Processor, 2 cores "
        "| [2026-01-02](benchmarks/results/decode.json) |"
    )
    assert row in readme.splitlines()
    assert "old" not in readme
    assert readme.startswith("before\n")
    assert readme.endswith("after\n")
    page = table.page(records)
    assert "| 8 |  | a\\|b |" in page
    assert "2026-01-02 03:04 UTC" in page


def test_the_tables_in_the_tree_are_what_the_results_say():
    records = table.load()
    assert table.README.read_text(encoding="utf-8") == table.with_headlines(
        table.README.read_text(encoding="utf-8"), records
    ), "run python benchmarks/table.py"
    assert table.PAGE.read_text(encoding="utf-8") == table.page(records), "run python benchmarks/table.py"

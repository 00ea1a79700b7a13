"""The example that translates numbers: its words, and that it runs."""

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

EXAMPLE = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "examples/translate_numbers.py")))


@pytest.mark.parametrize(
    ("n", "english", "german"),
    [
        (0, "zero", "null"),
        (1, "one", "eins"),
        (21, "twenty-one", "einundzwanzig"),
        (101, "one hundred one", "einhunderteins"),
        (1700, "one thousand seven hundred", "eintausendsiebenhundert"),
        (4321, "four thousand three hundred twenty-one", "viertausenddreihunderteinundzwanzig"),
    ],
)
def test_words(n: int, english: str, german: str) -> None:
    assert (EXAMPLE.english(n), EXAMPLE.german(n)) == (english, german)


@pytest.mark.slow
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert 0 <= EXAMPLE.main(["--steps", "2", "--held-out", "3", "--runs", str(tmp_path)]) <= 1
    assert "exactly right with 4 beams" in capsys.readouterr().out

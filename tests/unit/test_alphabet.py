"""Shape suffixes use only the letters listed in docs/alphabet.md."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUFFIX = re.compile(r"\w_([A-Za-z0-9]+)$")


def alphabet() -> set[str]:
    text = (ROOT / "docs/alphabet.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`\w` ?)+)\|", text, re.MULTILINE)
    return {letter for row in rows for letter in re.findall(r"`(\w)`", row)}


def suffixes(source: str) -> set[str]:
    """The shape suffixes of names in ``source``: q_TnH gives TnH; CONSTANTS, _Classes and plain_names give none."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
    result = set()
    for name in names:
        match = SUFFIX.search(name)
        if match and not name.isupper() and re.search("[A-Z]", match[1]):
            result.add(match[1])
    return result


def test_alphabet_and_suffixes_are_parsed():
    assert {"T", "D", "H", "n", "v", "p"} <= alphabet()
    assert suffixes("q_TnH = self.x_RV; BLOCK_N = 1; y = f(theta_base, _Live)") == {"TnH", "RV"}


def test_every_suffix_letter_is_in_the_alphabet():
    known = alphabet()
    unknown = {}
    for file in (ROOT / "colonnade").rglob("*.py"):
        for suffix in suffixes(file.read_text(encoding="utf-8")):
            if set(re.sub(r"\d", "", suffix)) - known:
                unknown.setdefault(file.relative_to(ROOT).as_posix(), []).append(suffix)
    assert not unknown, "a letter that docs/alphabet.md does not list"

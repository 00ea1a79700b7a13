"""Renders benchmarks/results/*.json: the last headline of each (the hardest case) into README.md, all of it into
docs/results.md, and some columns of a record where a page asks for them.

    python benchmarks/table.py            writes them
    python benchmarks/table.py --check    fails when one is not what the JSON files say

The README's table stands between two comments, ``<!-- results:begin -->`` and ``<!-- results:end -->``; that of another
page between ``<!-- record: NAME COLUMN … -->`` and ``<!-- record: end -->``.
"""

import json
import re
import sys
from pathlib import Path
from typing import Any

from _report import RESULTS, ROOT

README, PAGE = ROOT / "README.md", ROOT / "docs" / "results.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
PART = re.compile(r"(<!-- record: (\S+) ([\w ]+) -->\n).*?(<!-- record: end -->)", re.DOTALL)
EMPTY = "No results are recorded yet: `make bench` measures this machine and fills this table."


def load(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The records of all result files, by name; of a machine's, the one whose name says no more comes first."""
    paths = sorted(folder.glob("*.json"), key=lambda path: path.stem.removesuffix("_h200"))
    return [json.loads(path.read_text(encoding="utf-8")) | {"file": path.name} for path in paths]


def headlines(records: list[dict[str, Any]]) -> str:
    """The README's table: one line a record, with the peer of the same run, machine, date and file."""
    lines = [
        [
            *measured(record["headlines"][-1]),
            where(record["machine"]),
            f"[{record['date'][:10]}](benchmarks/results/{record['file']})",
        ]
        for record in records
        if record["headlines"]
    ]
    return table(["Measured", "Colonnade", "Beside it, same run", "On", "Record"], lines) if lines else EMPTY


def measured(line: dict[str, Any]) -> list[str]:
    """What a headline says: of what, how much, and how much beside it."""
    beside = f"{line['peer']} {number(line['peer_value'])} {line['unit']}" if line["peer_value"] is not None else ""
    return [line["what"], f"{number(line['value'])} {line['unit']}", beside]


def page(records: list[dict[str, Any]]) -> str:
    """docs/results.md: each file whole, with its command, so that anyone can repeat it."""
    parts = [
        "# Results",
        "Every number here is rendered from a file of `benchmarks/results/` by `benchmarks/table.py`; none is typed. "
        "Each section names the command that repeats it.",
    ]
    firsts, told = dict[str, str](), dict[str, set[str]]()
    for record in records:
        columns = list(dict.fromkeys(key for row in record["rows"] for key in row))
        cells = [[number(row.get(key)) for key in columns] for row in record["rows"]]
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        parts += [f"## {record['file'].removesuffix('.json')}", f"`{record['command']}`"]
        first = firsts.setdefault(script(record), record["file"].removesuffix(".json"))
        new = said(record["notes"], told.setdefault(first, set()))
        parts += new or ([f"As in [{first}](#{first})."] if record["notes"] else [])
        heads = [measured(line) for line in record["headlines"]]
        parts += [table(["Measured", "Colonnade", "Beside it, same run"], heads)] if heads else []
        parts += [table(columns, cells)]
        parts += [f"{where(record['machine'])}; {versions}; commit {record['commit'] or 'unknown'}; {record['date']}."]
    if not records:
        parts.append(EMPTY)
    return "\n\n".join(parts) + "\n"


def script(record: dict[str, Any]) -> str:
    """Which program measured a record."""
    return next((word for word in record["command"].split() if word.endswith(".py")), "")


def said(notes: str, told: set[str]) -> list[str]:
    """The paragraphs of a record's notes that are not among those ``told`` already, of a record of the same script;
    ``told`` has them then. A list of command lines is not one of them: the section names its own.
    """
    # A line that begins with one space: notes of several parts, put one behind the other.
    found = [part.strip("\n ") for part in re.split(r"\n\n|\n (?! )", notes) if not part.startswith("    ")]
    new = [part for part in found if part and part not in told]
    told.update(new)
    return new


def table(head: list[str], body: list[list[str]]) -> str:
    """A Markdown table."""
    rows = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def where(machine: dict[str, Any]) -> str:
    """The machine in a few words."""
    return machine["gpu"] or f"{machine['cpu']}, {machine['cores']} cores"


def number(value: Any) -> str:
    """Four significant figures and thousands separated; integers and words as they are."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def with_headlines(readme: str, records: list[dict[str, Any]]) -> str:
    """``readme`` with the text between the two marks replaced."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{headlines(records)}\n{END}{after}"


def with_parts(text: str, records: list[dict[str, Any]]) -> str:
    """``text`` with the columns of records that it asks for."""
    rows_of = {record["name"]: record["rows"] for record in records}

    def made(found: re.Match[str]) -> str:
        columns = found[3].split()
        cells = [[number(row.get(key)) for key in columns] for row in rows_of[found[2]]]
        return f"{found[1]}\n{table(columns, cells)}\n\n{found[4]}"

    return PART.sub(made, text)


def rendered() -> dict[Path, str]:
    """What every page that shows results should be."""
    records = load()
    wanted = {README: with_headlines(README.read_text(encoding="utf-8"), records), PAGE: page(records)}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text(encoding="utf-8")
        if path != PAGE and PART.search(text):
            wanted[path] = with_parts(text, records)
    return wanted


def main() -> None:
    """Write the files, or with --check say which of them is stale."""
    wanted = rendered()
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv[1:]:
        if stale:
            names = ", ".join(path.relative_to(ROOT).as_posix() for path in stale)
            sys.exit(f"{names}: not what benchmarks/results says; run python benchmarks/table.py")
        return
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")


if __name__ == "__main__":
    main()

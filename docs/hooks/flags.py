"""Tables of flags in docs/reference/cli.md, generated from each verb's --help.

    python docs/hooks/flags.py            writes them
    python docs/hooks/flags.py --check    fails if they differ from --help

A table is between two comments. The first selects the flags: ``<!-- flags: eval -->`` all of a verb's, ``<!-- flags:
chat beyond generate -->`` those that the other verb lacks or explains differently, ``<!-- flags: serve of plan device
-->`` those with these names or prefixes; ``finetune:span`` means those of a method, ``speech:train`` those of a
subcommand. The second is ``<!-- flags: end -->``.
"""

import io
import os
import re
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).parents[1] / "reference" / "cli.md"
TABLE = re.compile(
    r"<!-- flags: (?P<verb>\w+(?::\w+)?)(?: (?P<how>of|beyond) (?P<what>[\w ]+))? -->\n.*?<!-- flags: end -->",
    re.DOTALL,
)


class Flag(NamedTuple):
    """One flag of a verb."""

    name: str
    takes: str
    meaning: str
    default: str
    off: str | None
    """The flag that turns it off, if it is on by default."""


def flags(verb: str) -> list[Flag]:
    """The flags that ``colonnade VERB --help`` lists."""
    from colonnade import cli

    said, columns = io.StringIO(), os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = "120"  # wider, and boxes would be side by side
    try:
        with redirect_stdout(said), suppress(SystemExit):
            name, _, method = verb.partition(":")
            option = () if not method or name in cli.SUBCOMMANDS else ("--method",)
            cli.parse([name, *option, *([method] if method else []), "--help"])
    finally:
        del os.environ["COLUMNS"]
        if columns is not None:
            os.environ["COLUMNS"] = columns
    entries = list[list[str]]()
    for line in said.getvalue().splitlines():
        text = line.strip(" │")
        if re.match(r"[ │]{1,3}--\w", line):
            entries.append([text])
        elif entries and entries[-1] and re.match(r"[ │]{5}", line):
            entries[-1].append(text)
        else:
            entries.append([])  # a heading: what follows is no part of the flag before
    return [_flag(" ".join(entry)) for entry in entries if entry]


def _flag(entry: str) -> Flag:
    parts = re.match(
        r"(?P<name>--[\w.]+)(?:, (?P<off>--[\w.]*no_\w+))?"
        r"(?: (?P<takes>\[[A-Z]+ .*?\]\]|\{\S+|[A-Z]{3,}\S*))?(?:\s+(?P<meaning>.*))?$",
        entry.strip(),
    )
    assert parts is not None, f"--help is not what it was: {entry!r}"
    name, takes, meaning = parts["name"], parts["takes"] or "", parts["meaning"] or ""
    found = re.search(r"\s*\((?:default: (.*)|(required))\)$", meaning)
    default = (found[1] or found[2] or "") if found else ""
    meaning = " ".join(meaning[: found.start() if found else None].split())
    takes = takes.removeprefix("{None}|").replace("|", " or ")
    return Flag(name, takes, meaning, "" if default == "None" else default, parts["off"] if default == "True" else None)


def table(verb: str, how: str | None, what: str | None) -> str:
    """The flags that a comment asks for, as a Markdown table."""
    chosen, words = flags(verb), (what or "").split()
    if how == "of":
        chosen = [flag for flag in chosen if re.split(r"\.", flag.name[2:])[0] in words]
    elif how == "beyond":
        known = {flag for other in words for flag in flags(other)}
        chosen = [flag for flag in chosen if flag not in known]
    lines = ["| Flag | Default | Meaning |", "|---|---|---|"]
    for flag in chosen:
        default = f"`{flag.default}`" if flag.default not in ("", "False") else ""
        off = f", `{flag.off}`" if flag.off else ""
        meaning = flag.meaning.replace("|", "\\|").replace("<", "\\<")
        lines.append(f"| `{' '.join((flag.name, flag.takes)).strip()}`{off} | {default} | {meaning} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """``text`` with its tables regenerated."""

    def made(found: re.Match[str]) -> str:
        head = found[0].partition("\n")[0]
        return f"{head}\n\n{table(found['verb'], found['how'], found['what'])}\n\n<!-- flags: end -->"

    return TABLE.sub(made, text)


if __name__ == "__main__":
    has = PAGE.read_text(encoding="utf-8")
    made = page(has)
    if "--check" in sys.argv[1:] and made != has:
        sys.exit("docs/reference/cli.md is not what --help says; run python docs/hooks/flags.py")
    PAGE.write_text(made, encoding="utf-8")

"""The documentation works: Python blocks run, commands parse, and the site builds with --strict.

A block is skipped only with a reason in a comment on the line before it: <!-- not run: needs a GPU -->. A page with
<!-- slow --> has its Python marked slow.
"""

import contextlib
import io
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from colonnade import cli
from colonnade.cli.main import _pop_imports
from colonnade.errors import ColonnadeError

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w+-]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```\s*$", re.DOTALL | re.MULTILINE
)
SHELLS = ("console", "bash", "sh")
SKIP = re.compile(r"<!-- not run: .+ -->\s*$")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    body: str
    line: int
    skipped: bool


def blocks(text: str) -> list[Block]:
    results = []
    for match in FENCE.finditer(text):
        before = text[: match.start()].rstrip("\n").rsplit("\n", 1)[-1]
        line = text.count("\n", 0, match.start("body")) + 1
        results.append(Block(match["language"], textwrap.dedent(match["body"]), line, bool(SKIP.search(before))))
    return results


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def pages_with(*languages: str) -> list:
    chosen = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if any(block.language in languages and not block.skipped for block in blocks(text)):
            marks = [pytest.mark.slow] if "<!-- slow -->" in text and "python" in languages else []
            chosen.append(pytest.param(page, id=name(page), marks=marks))
    return chosen


@pytest.mark.sample(1)
@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "page"}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "python" and not block.skipped:
            # Leading blank lines make a traceback name the page's own line.
            exec(compile("\n" * (block.line - 1) + block.body, name(page), "exec"), namespace)


def commands(block: Block) -> list[list[str]]:
    """The ``colonnade`` commands of a block, as argument lists; in console blocks only lines with a prompt."""
    if block.language not in SHELLS:
        return []
    text = block.body.replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines()]
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    results = []
    for line in lines:
        for part in re.split(r"\s(?:&&|\|\||\||&|;)(?:\s|$)", line):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words = words[1:]
            if words[:1] == ["torchrun"] and "-m" in words:
                words = words[words.index("-m") + 1 :]
            if words and words[0].removeprefix(".venv/bin/") == "colonnade":
                results.append(list(itertools.takewhile(lambda word: not re.match(r"\d?[<>]", word), words[1:])))
    return results


def inline(text: str) -> list[list[str]]:
    """The commands in prose, such as `colonnade train --help`."""
    prose = FENCE.sub("", text)
    return [shlex.split(command) for command in re.findall(r"`colonnade ([a-z-][^`]*)`", prose)]


def command_error(argv: list[str]) -> str | None:
    """The error of parsing ``argv``, or None; nothing runs (training is a dry run)."""
    argv = [word for word in argv if word != "--debug"]
    _pop_imports(argv)  # the modules are examples
    if argv == ["--version"]:
        return None
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            call = cli.parse([*argv, "--dry_run"] if argv[0] == "train" else argv)
            if argv[0] == "train":
                call()
    except SystemExit as end:
        return output.getvalue() if end.code else None
    except ColonnadeError as error:
        return str(error)
    return None


@pytest.mark.sample(10)
@pytest.mark.parametrize("page", [pytest.param(page, id=name(page)) for page in PAGES])
def test_documented_commands_parse(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = page.read_text(encoding="utf-8")
    all_commands = [words for block in blocks(text) for words in commands(block)] + inline(text)
    for block in blocks(text):
        # The first line of a TOML block names its file: # run.toml
        if block.language == "toml" and (title := re.match(r"# (\S+\.toml)\n", block.body)):
            Path(title[1]).write_text(block.body, encoding="utf-8")
    errors = {shlex.join(words): output for words in all_commands if (output := command_error(words)) is not None}
    assert not errors


def test_wrong_commands_are_detected():
    assert "Unrecognized" in (command_error(["train", "--train.learning_rate", "1"]) or "")
    assert "cannot be divided" in (command_error(["train", "--plan.tp", "3"]) or "")
    assert command_error(["frobnicate"]) is not None
    assert command_error(["serve", "tiny", "--serve.port", "0"]) is None


def test_flags_in_the_reference_exist(capsys):
    """Each verb has a section, whose flags are all in its --help."""
    text = (ROOT / "docs/reference/cli.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))
    assert list(sections) == list(cli.VERBS)
    for verb, section in sections.items():
        option = [] if verb in cli.SUBCOMMANDS else ["--method"]
        for words in [[], *([*option, name] for name in re.findall(rf"flags: {verb}:(\w+)", section))]:
            with pytest.raises(SystemExit):
                cli.main([verb, *words, "--help"])
        known = set(re.findall(r"--[\w.]+", capsys.readouterr().out))
        assert set(re.findall(r"--[\w.]+", section)) <= known, verb


def test_tables_of_flags_match_the_help():
    """The tables are generated from --help, and complete for every verb but train and distill (train's flags)."""
    hook = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/hooks/flags.py")))
    text = hook.PAGE.read_text(encoding="utf-8")
    assert hook.page(text) == text, "run python docs/hooks/flags.py"
    verbs = {match["verb"] for match in hook.TABLE.finditer(text)}
    assert {verb.partition(":")[0] for verb in verbs} == {*cli.VERBS} - {"train"}
    for verb, subcommands in cli.SUBCOMMANDS.items():
        assert all(re.search(rf"\$ colonnade {verb} {name}\b", text) for name in subcommands)
    names = [flag.name for flag in hook.flags("serve")]
    assert len(names) == len(set(names)) and {"--plan.cp", "--serve.weights", "--serve.cache", "--dtype"} <= set(names)
    assert all(flag.meaning for verb in verbs - {"distill"} for flag in hook.flags(verb))
    assert hook.page(text.replace("| `--plan.cp INT` | `1` |", "| `--plan.cp INT` | `2` |")) == text


def _rows(page: str, heading: str) -> set[str]:
    """The names in the first column of the tables under a heading."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`([^`]+)`", " ".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))))


def test_reference_of_requests_and_metrics_is_complete():
    """The page lists exactly the server's request fields, metrics and flags."""
    from colonnade.config import ServeConfig
    from colonnade.serve.api import chat_schemas, request_schemas
    from colonnade.serve.api.metrics import Metrics
    from colonnade.serve.request import Stats
    from colonnade.serve.served_models import ServedModels

    page = "docs/reference/serve.md"
    known = {
        *request_schemas.CompletionBody.model_fields,
        *chat_schemas.ChatBody.model_fields,
        *request_schemas.UNSUPPORTED,
    }
    assert _rows(page, "Request fields") == known
    text = (ROOT / page).read_text(encoding="utf-8")
    assert {name for name in request_schemas.IGNORED if f"`{name}`" not in text} == set()
    engine = SimpleNamespace(stats=Stats(), replicas={0: True}, resident_bytes=lambda: 1)
    metrics = Metrics(ServedModels({"it": engine}))  # type: ignore[arg-type]
    metrics.count_shadow("compared")
    exposition = metrics.text().decode()
    names = {name for name in re.findall(r"^# TYPE colonnade:(\w+)", exposition, re.MULTILINE) if "created" not in name}
    assert _rows(page, "Metrics") == names
    flags = {
        name.removeprefix("--serve.").removeprefix("no_") for name in _rows("docs/howto/serve.md", "Server options")
    }
    assert flags | {"weight_group"} == set(ServeConfig.model_fields)


def test_commands_are_extracted_from_blocks():
    text = (
        "$ A=1 colonnade train --plan.tp 2 \\\n    --train.lr 1e-3  # why\n"
        "colonnade printed this\n"
        "$ ls && .venv/bin/colonnade demo | tee x\n"
        "$ torchrun --nproc-per-node 2 -m colonnade train --dry_run > run.toml\n"
    )
    assert commands(Block("console", text, 1, False)) == [
        ["train", "--plan.tp", "2", "--train.lr", "1e-3"],
        ["demo"],
        ["train", "--dry_run"],
    ]


def test_blocks_have_their_line_and_skip_mark():
    text = "a\n\n```python\nx = 1\n```\n\n<!-- not run: needs a GPU -->\n```python\ny = 2\n```\n"
    assert [(b.body, b.line, b.skipped) for b in blocks(text)] == [("x = 1\n", 4, False), ("y = 2\n", 9, True)]


def test_local_links_of_the_readme_exist():
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        text = page.read_text(encoding="utf-8")
        targets = re.findall(r"\]\(([^)#\s]+)", text) + re.findall(r'(?:src|srcset|href)="([^"#]+)"', text)
        missing = [target for target in targets if "://" not in target and not (ROOT / target).exists()]
        assert not missing, name(page)


@pytest.mark.parametrize("variant", ["light", "dark"])
def test_pictures_equal_the_output_of_their_script(variant):
    script = runpy.run_path(str(ROOT / "docs/assets/dataflow.py"))
    drawn = script["draw"](script[variant.upper()])
    assert (ROOT / f"docs/assets/dataflow-{variant}.svg").read_text(encoding="utf-8") == drawn


@pytest.mark.slow
def test_site_builds_strictly(tmp_path):
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    quicker = os.environ | {"DOCS_SOURCE": "false", "DOCS_SEARCH": "false"}
    ran = subprocess.run(build, check=False, cwd=ROOT, env=quicker, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stderr
    page = (tmp_path / "site/ideas/attention-is-a-fold.html").read_text(encoding="utf-8")
    assert "<math" in page
    assert "arithmatex" not in page

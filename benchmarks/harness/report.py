"""Benchmark records: one JSON file per result, with all that is needed to judge or repeat it.

    report("decode", rows, notes="median of 5", headlines=[Headline("SmolLM2, batch 1", 31.2, "tokens/s", ...)])

writes ``results/decode.json``: date, command, machine, versions, commit, the rows, and the few numbers (headlines)
that the README shows. ``table.py`` renders all files; no number is copied by hand. Results of different machines have
different names ("train_cpu", "train_h200"), so that neither overwrites the other.
"""

import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from colonnade.bench.ceilings import machine_name

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
ARCHIVE = ROOT / ".git_archival.txt"
PEERS = (
    "torch",
    "transformers",
    "triton",
    "numpy",
    "tokenizers",
    "openai",
    "llama-cpp-python",
    "torchao",
    "compressed-tensors",
    "flashinfer-python",
    "trl",
    "peft",
    "torchrec",
    "faster-whisper",
    "ctranslate2",
    "pocketsphinx",
)

Cell = str | int | float | bool | None


@dataclass(frozen=True)
class Headline:
    """One line of the README's table: a measured value and its peer's in the same run."""

    what: str
    """What was measured, in a few words, with the sizes."""
    value: float
    """Colonnade's number."""
    unit: str
    """Its unit, such as tokens/s."""
    peer: str = ""
    """The peer, such as transformers; empty without one."""
    peer_value: float | None = None
    """The peer's number, in the same unit and from the same run."""


def report(
    name: str,
    rows: Sequence[Mapping[str, Cell]],
    notes: str = "",
    *,
    headlines: Sequence[Headline] = (),
    folder: Path = RESULTS,
) -> Path:
    """Write ``results/NAME.json``, print its path and return it; rows are flat records whose keys carry their units."""
    if not rows:
        raise ValueError(f"the benchmark '{name}' measured nothing; give at least one row")
    record = {
        "name": name,
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command(),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "notes": notes,
        "headlines": [asdict(line) for line in headlines],
        "rows": [dict(row) for row in rows],
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
    print(path, flush=True)
    return path


def folder_of(out: Path | None, *, toy: bool) -> Path:
    """The folder of results: ``out`` if given, a new temporary folder for toy sizes, else :data:`RESULTS`."""
    return out or (Path(tempfile.mkdtemp(prefix="colonnade-")) if toy else RESULTS)


PLACES = ("--out", "--keep", "--picture")
"""Options that name local paths, which are omitted from records."""


def command() -> str:
    """The command line of this process, as typed at the root of the repository, without :data:`PLACES`; other paths
    outside it lose their folders.
    """
    words, arguments = [], iter(sys.argv)
    for word in arguments:
        if word in PLACES:
            next(arguments, None)
        elif word.partition("=")[0] not in PLACES:
            words.append(_local(word))
    return shlex.join(["python", *words])


def _local(word: str) -> str:
    path = Path(word)
    if not path.is_absolute():
        return word
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name


def commit() -> str | None:
    """The commit that was measured, with a plus when the tree differs from it; None outside a checkout.

    In a tree that ``git archive`` wrote, it is the archive's commit (.git_archival.txt).
    """
    node = ARCHIVE.read_text(encoding="utf-8").partition("node: ")[2].strip() if ARCHIVE.exists() else ""
    if re.fullmatch("[0-9a-f]{40}", node):
        return node[:12]
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip()


def machine() -> dict[str, Cell]:
    """What the benchmark ran on; no host or user names."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": machine_name("cpu"),
        "cores": usable,
        "threads": torch.get_num_threads(),
        "gpu": f"{len(gpus)} x {gpus[0]}" if gpus else None,
        "cuda": torch.version.cuda if gpus else None,
    }


def versions() -> dict[str, str]:
    """Versions of Python and the installed packages of :data:`PEERS`."""
    found = {"python": platform.python_version()}
    for package in PEERS:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found

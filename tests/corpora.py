"""A small corpus for tests of whole training runs, and reading of their checkpoints."""

from pathlib import Path

from colonnade.data import build

TEXT = "we the people of this union hold that a column stands in a row and bears its share of the weight"


def small(folder: Path, text: str = TEXT) -> Path:
    """Build 120 documents of 5 to 44 words, a vocabulary of 300, a fifth for validation; returns ``folder``."""
    words = text.split()
    texts = [(str(i), " ".join(words[(i * j) % len(words)] for j in range(5 + i % 40))) for i in range(120)]
    build(texts, folder, vocab_size=300, validation_share=0.2)
    return folder


def tensors(folder: Path) -> dict[str, bytes]:
    """The bytes of every file of weights and moments of a checkpoint."""
    files = {path.name: path.read_bytes() for path in folder.glob("*.safetensors")}
    assert files
    return files

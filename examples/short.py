"""A reward: the capital is named, in few words (docs/howto/finetune.md)."""

from collections.abc import Mapping
from typing import Any


def reward(_prompt: str, answer: str, row: Mapping[str, Any]) -> float:
    """1 for the row's capital, less 0.05 for each word after the third."""
    named = str(row["capital"]).lower() in answer.lower()
    return named - 0.05 * max(0, len(answer.split()) - 3)

"""The routing of a training run, step by step, from its routing.jsonl (:mod:`colonnade.train.trackers`)."""

import json
from pathlib import Path
from typing import Any

from colonnade.config import ModelConfig
from colonnade.look.routing_board import History, entropy

FILE = "routing.jsonl"
STEPS = 200
"""Maximum number of training steps that are drawn."""


def read_history(checkpoint: Path, config: ModelConfig) -> History:
    """The routing of logged steps of the run that wrote ``checkpoint``; empty if there is none."""
    path = checkpoint.parent / FILE
    if config.moe is None or not path.is_file():
        return {}
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break  # the run is writing this line
    found: dict[str, dict[str, list]] = {}
    for row in rows[:: max(1, -(-len(rows) // STEPS))]:
        for layer, stats in row.items():
            load = stats["load"] if isinstance(stats, dict) else []
            if len(load) != config.moe.experts:
                continue
            columns = found.setdefault(layer, {"step": [], "load": [], "dropped": [], "entropy": []})
            for name, value in (("step", row["step"]), ("load", load), ("dropped", stats["dropped"])):
                columns[name].append(value)
            columns["entropy"].append(entropy(load))
    return found

"""Compares two servers' responses to the same request, and summarises comparisons.

A comparison holds statuses, lengths, latencies and similarities, and no text:

    {"time": "2026-11-23T15:02:11.871Z", "id": "5f0c…", "route": "/v1/completions", "status": 200,
     "shadow_status": 200, "latency_s": 0.41, "shadow_latency_s": 0.39, "characters": 118, "shadow_characters": 118,
     "common_prefix": 118}

Embeddings have ``cosine``, the least of all texts; classes have ``class`` and ``shadow_class``. ``shadow_status`` is
null if the shadow did not respond.
"""

import json
import math
from array import array
from binascii import a2b_base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import mul
from statistics import median
from typing import Any

Comparison = dict[str, Any]

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""The exceptions raised by reading a malformed response."""


def compare(answer: bytes, shadow: bytes) -> Comparison:
    """The fields that compare two responses with status 200; raises one of :data:`UNREADABLE`."""
    if answer.startswith(b"{") and "data" in (whole := json.loads(answer)):
        other = json.loads(shadow)
        if "embedding" in whole["data"][0]:
            pairs = zip(_vectors(whole), _vectors(other), strict=True)
            return {"cosine": round(min(_cosine(x, y) for x, y in pairs), 6)}
        if "label" in whole["data"][0]:
            return {"class": _classes(whole), "shadow_class": _classes(other)}
        return {}
    texts, others = _texts(answer), _texts(shadow)
    return {
        "characters": sum(map(len, texts)),
        "shadow_characters": sum(map(len, others)),
        "common_prefix": sum(_common_prefix(*pair) for pair in zip(texts, others, strict=True)),
    }


def differs(it: Comparison, min_cosine: float) -> bool:
    """Whether the shadow's response differs; embeddings may differ down to ``min_cosine``."""
    if it["status"] != it["shadow_status"]:
        return True
    lengths = {it.get("characters"), it.get("shadow_characters"), it.get("common_prefix")}
    return len(lengths) > 1 or it.get("class") != it.get("shadow_class") or it.get("cosine", 1.0) < min_cosine


@dataclass
class RouteSummary:
    """All comparisons of one route."""

    requests: int = 0
    differ: int = 0
    unanswered: int = 0
    prefix_shares: list[float] = field(default_factory=list)
    """Common prefix of the texts, relative to the longer one."""
    cosines: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    shadow_latencies_s: list[float] = field(default_factory=list)

    def add(self, it: Comparison, min_cosine: float) -> None:
        """Count one comparison."""
        self.requests += 1
        self.differ += differs(it, min_cosine)
        self.unanswered += it["shadow_status"] is None
        if "common_prefix" in it:
            self.prefix_shares.append(it["common_prefix"] / max(1, it["characters"], it["shadow_characters"]))
        if "cosine" in it:
            self.cosines.append(it["cosine"])
        self.latencies_s.append(it["latency_s"])
        if it["shadow_status"] is not None:
            self.shadow_latencies_s.append(it["shadow_latency_s"])

    def row(self) -> list[str]:
        """requests, differ, unanswered, mean common prefix, lowest cosine, median latency, the shadow's median
        latency.
        """
        return [
            f"{self.requests:,}", f"{self.differ:,} ({self.differ / self.requests:.1%})", f"{self.unanswered:,}",
            f"{sum(self.prefix_shares) / len(self.prefix_shares):.1%}" if self.prefix_shares else "",
            f"{min(self.cosines):.6f}" if self.cosines else "",
            f"{median(self.latencies_s):.3f} s",
            f"{median(self.shadow_latencies_s):.3f} s" if self.shadow_latencies_s else "",
        ]  # fmt: skip


def summarise(comparisons: Iterable[Comparison], min_cosine: float) -> dict[str, RouteSummary]:
    """A summary for each route."""
    summaries: dict[str, RouteSummary] = {}
    for it in comparisons:
        summaries.setdefault(it["route"], RouteSummary()).add(it, min_cosine)
    return summaries


def _texts(answer: bytes) -> list[str]:
    """The text of each choice, with its tool calls, of a response or a stream."""
    texts: dict[int, str] = {}
    for event in [json.loads(answer)] if answer.startswith(b"{") else _events(answer):
        for choice in event["choices"]:
            message = choice.get("message") or choice.get("delta") or choice
            calls = (call["function"] for call in message.get("tool_calls") or ())
            called = "".join(f"{call.get('name') or ''}{call.get('arguments') or ''}" for call in calls)
            text = message.get("text") or message.get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text + called
    return [texts[index] for index in sorted(texts)]


def _common_prefix(a: str, b: str) -> int:
    """Its length [characters]."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _events(stream: bytes) -> list[Any]:
    """The objects of server-sent events; raises ValueError for one that is an error, or an end that is missing."""
    data = [line[5:].strip() for line in stream.splitlines() if line.startswith(b"data:")]
    if not data or data[-1] != b"[DONE]":
        raise ValueError("the stream ended early")
    return [json.loads(each) for each in data[:-1]]


def _vectors(reply: Comparison) -> list[Sequence[float]]:
    found = [each["embedding"] for each in reply["data"]]
    return [array("f", a2b_base64(each)) if isinstance(each, str) else each for each in found]


def _classes(reply: Comparison) -> list[str]:
    return [each["label"] for each in reply["data"]]


def _cosine(x: Sequence[float], y: Sequence[float]) -> float:
    if len(x) != len(y):
        return 0.0
    norm = math.sqrt(sum(map(mul, x, x)) * sum(map(mul, y, y)))
    return sum(map(mul, x, y)) / norm if norm else 0.0

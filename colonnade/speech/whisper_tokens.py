"""Whisper's special tokens, and the rules for the positions of text and timestamps (arXiv 2212.04356).

Times are tokens of 0.02 s. The authors' rules (section 3.8 and their code) keep them in order:

- A target begins with a time, of at most 1 s. Times come in pairs, the end of a segment and the start of the next.
- No time is before an earlier one.
- If all times together are more probable than the most probable word, the next token is a time.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from colonnade.checkpoint.load_model import locate
from colonnade.config import ModelConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, RequestError
from colonnade.model import Transformer

FIRST_TIME = 50
"""The latest first time, in steps of 0.02 s."""


class Model(Protocol):
    """The part of a loaded model that this module uses (:class:`colonnade.api.Model`)."""

    transformer: Transformer
    source: str

    @property
    def config(self) -> ModelConfig:
        """The model's sizes."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Its tokenizer."""
        ...


@dataclass(frozen=True)
class WhisperTokens:
    """Whisper's special tokens; times are all ids from :attr:`first_time` on."""

    end: int
    start: int
    no_times: int
    silence: int
    first_time: int
    times: int
    prompt: tuple[int, ...]
    """The tokens after the start: language and task, in a multilingual model."""
    suppressed: tuple[int, ...]
    """Tokens that are not speech: marks of speakers, music, and all special ones."""
    first_suppressed: tuple[int, ...]
    """Tokens that begin no text: a space, the end."""
    alignment: tuple[tuple[int, int], ...] = ()
    """(layer, head) of the heads whose cross attention follows the sound, if the model's files list them."""

    @staticmethod
    def of(model: Model, language: str) -> "WhisperTokens":
        """Those of ``model``; raises :class:`RequestError` for an unknown language."""
        tokenizer, encoder = model.tokenizer, model.config.encoder
        assert encoder is not None

        def required(*names: str) -> int:
            for name in names:
                if (number := tokenizer.token_id(name)) is not None:
                    return number
            raise CheckpointError(f"{model.source} has no token {names[0]}; it is not a Whisper tokenizer")

        no_times, end = required("<|notimestamps|>"), required("<|endoftext|>")
        prompt: tuple[int, ...] = ()
        multilingual = model.config.vocab_size >= 51865
        if multilingual:
            spoken = tokenizer.token_id(f"<|{language}|>")
            if spoken is None:
                raise RequestError(
                    f"language '{language}' is unknown to {model.source}; use a code such as en, de or fr"
                )
            prompt = spoken, required("<|transcribe|>")
        elif language != "en":
            raise RequestError(f"language '{language}' is unknown to {model.source}, which supports English only (en)")
        settings: dict[str, list[int]] = {}
        alignment: list[list[int]] = []
        path = locate(model.source, weights=False)
        for name, keys in (("config.json", ("suppress_ids", "suppress_ids_begin")),
                           ("generation_config.json", ("suppress_tokens", "begin_suppress_tokens"))):  # fmt: skip
            file = path / name
            if file.is_file():
                raw = json.loads(file.read_text("utf-8"))
                for key, ours in zip(keys, ("all", "first"), strict=True):
                    settings.setdefault(ours, [int(i) for i in raw.get(key) or []])
                alignment = alignment or raw.get("alignment_heads") or []
        special = range(end + 1, no_times + 1)
        return WhisperTokens(
            end, encoder.start_token, no_times, required("<|nospeech|>", "<|nocaptions|>"), no_times + 1,
            model.config.vocab_size - no_times - 1, prompt, (*settings.get("all", ()), *special),
            tuple(settings.get("first", (end,))), tuple((int(layer), int(head)) for layer, head in alignment),
        )  # fmt: skip


def mask_forbidden(logits_V: Tensor, ids: Sequence[int], v: WhisperTokens) -> Tensor:
    """``logits_V`` of the token after ``ids``, −∞ where the rules for text and times forbid one."""
    logits_V = logits_V.clone()
    logits_V[list(v.suppressed)] = -torch.inf
    times = [token - v.first_time for token in ids if token >= v.first_time]
    last_is_time = bool(ids) and ids[-1] >= v.first_time
    before_is_time = len(ids) < 2 or ids[-2] >= v.first_time
    if not ids:
        logits_V[list(v.first_suppressed)] = -torch.inf
        logits_V[: v.first_time] = -torch.inf
        logits_V[v.first_time + FIRST_TIME + 1 :] = -torch.inf
    elif last_is_time and before_is_time:
        logits_V[v.first_time :] = -torch.inf
    elif last_is_time:
        logits_V[: v.end] = -torch.inf
    if times:
        # The start of the next segment may be the end of the last; an end is later than its start.
        earliest = times[-1] if last_is_time and not before_is_time else times[-1] + 1
        logits_V[v.first_time : v.first_time + earliest] = -torch.inf
    logp_V = logits_V.log_softmax(0)
    if logp_V[v.first_time :].logsumexp(0) > logp_V[: v.first_time].max():
        logits_V[: v.first_time] = -torch.inf
    return logits_V

"""Transcribes recordings with Whisper (arXiv 2212.04356): windows of 30 s, with times.

A window's spectrogram is encoded once, into pages of a KV cache; then each step decodes a token. Times are tokens of
0.02 s. The authors' rules (section 3.8 and their code) keep them in order:

- A target begins with a time, of at most 1 s. Times come in pairs, the end of a segment and the start of the next.
- No time is before an earlier one.
- If all times together are more probable than the most probable word, the next token is a time.

The next window begins at the end of the last whole segment. A window is silent where the no-speech token has more than
0.6 and the text's mean log-probability is below −1. Padding of the last window is attended to, as in training.
"""

import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from colonnade.checkpoint.load_model import locate
from colonnade.config import ModelConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, RequestError
from colonnade.model import Crossed, InPages, KVCache, Packed, Paged, Rows, Source, Stream, Transformer, fused_block
from colonnade.model.cross_attention import Memory
from colonnade.speech.log_mel import HOP, RATE, log_mel
from colonnade.speech.token_times import FRAME_S, WatchedMemory, Word, alignment_heads, split_words, token_starts

Format = Literal["txt", "srt", "vtt", "json"]
WINDOW_S, TIME_S = 30, 0.02
FIRST_TIME = 50
"""The latest first time, in steps of :data:`TIME_S`."""
SILENCE, LEAST_LOGPROB, MOST_COMPRESSION = 0.6, -1.0, 2.4
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""A window is decoded again at the next one while its text is improbable or repeats itself (section 4.5)."""
PAGE_TOKENS = 16


class Model(Protocol):
    """What this module needs of a loaded model (:class:`colonnade.api.Model`)."""

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


class Segment(NamedTuple):
    """A stretch of speech."""

    start_s: float
    end_s: float
    text: str
    tokens: tuple[int, ...]
    mean_logprob: float
    """Of the tokens of its window."""
    temperature: float = 0.0
    """At which its window was sampled; 0: greedy."""
    compression_ratio: float = 1.0
    """Bytes of its window's text over those that zlib makes of it: high where the text repeats itself."""
    silence: float = 0.0
    """The probability that its window has no speech."""
    words: tuple[Word, ...] = ()
    """Its words with their times, if they were asked for."""


@dataclass(frozen=True)
class _Vocabulary:
    """Whisper's special tokens; times are all ids from :attr:`first_time` on."""

    end: int
    start: int
    no_times: int
    silence: int
    first_time: int
    times: int
    prompt: tuple[int, ...]
    """What follows the start: language and task, in a multilingual model."""
    suppressed: tuple[int, ...]
    """Tokens that are no speech: marks of speakers, music, and all special ones."""
    first_suppressed: tuple[int, ...]
    """Tokens that begin no text: a space, the end."""
    alignment: tuple[tuple[int, int], ...] = ()
    """(layer, head) of the heads whose cross attention follows the sound, if the model's files list them."""

    @staticmethod
    def of(model: Model, language: str) -> "_Vocabulary":
        """Those of ``model``; raises :class:`RequestError` for an unknown language."""
        tokenizer, encoder = model.tokenizer, model.config.encoder
        assert encoder is not None

        def required(*names: str) -> int:
            for name in names:
                if (number := tokenizer.token_id(name)) is not None:
                    return number
            raise CheckpointError(f"{model.source} has no token {names[0]}; it is no Whisper's tokenizer")

        no_times, end = required("<|notimestamps|>"), required("<|endoftext|>")
        prompt: tuple[int, ...] = ()
        multilingual = model.config.vocab_size >= 51865
        if multilingual:
            spoken = tokenizer.token_id(f"<|{language}|>")
            if spoken is None:
                raise RequestError(
                    f"language '{language}' is unknown to {model.source}; give a code such as en, de or fr"
                )
            prompt = spoken, required("<|transcribe|>")
        elif language != "en":
            raise RequestError(f"language '{language}' is unknown to {model.source}, which knows English only (en)")
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
        return _Vocabulary(
            end, encoder.start_token, no_times, required("<|nospeech|>", "<|nocaptions|>"), no_times + 1,
            model.config.vocab_size - no_times - 1, prompt, (*settings.get("all", ()), *special),
            tuple(settings.get("first", (end,))), tuple((int(layer), int(head)) for layer, head in alignment),
        )  # fmt: skip


def allow(logits_V: Tensor, ids: Sequence[int], v: _Vocabulary) -> Tensor:
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


class Window:
    """Decoding over one encoded window: pages of the target, then pages of the source, in order."""

    def __init__(self, model: Model, mel_MF: Tensor):
        self.model, config, encoder = model.transformer, model.config, model.config.encoder
        assert encoder is not None
        weight = next(self.model.parameters())
        self.device, self.frames = weight.device, encoder.context
        self.own = list(range(-(-config.context // PAGE_TOKENS)))
        pages = len(self.own) + -(-self.frames // PAGE_TOKENS)
        self.far = list(range(len(self.own), pages))
        self.cache = KVCache(
            config, self.model.axes, pages=pages, page_tokens=PAGE_TOKENS, dtype=weight.dtype, device=self.device
        )
        self.kernels = fused_block.enable(self.model)
        self.mel_MF: Tensor | None = mel_MF.to(self.device, weight.dtype)
        self.length = 0

    @torch.inference_mode()
    def align(self, tokens: Sequence[int], heads: dict[int, list[int]], frames: int) -> tuple[Tensor, Tensor]:
        """(weights_NTS, logits_TV) of a whole target: cross attention of ``heads`` to the first ``frames`` frames."""
        self.length, weights = 0, list[Tensor]()
        logits_TV = self.next_logits(tokens, lambda memory: WatchedMemory(
            memory, heads, torch.tensor(self.far, device=self.device), frames, weights
        ))  # fmt: skip
        return torch.stack(weights).cpu(), logits_TV

    def next_logits(self, tokens: Sequence[int], watch: Callable[[InPages], Memory] | None = None) -> Tensor:
        """float32 logits_TV after each of ``tokens``, which continue the target; the first call encodes the window.

        ``watch`` wraps the memory that cross attention reads.
        """
        T, device = len(tokens), self.device
        positions_T = torch.arange(self.length, self.length + T, device=device)
        stream, source, slots = Stream(torch.tensor(list(tokens), device=device), positions_T), None, range(0)
        if self.mel_MF is not None:
            stream = stream._replace(source=Source(self.mel_MF[None], torch.arange(self.frames, device=device)))
            source = Packed.of([self.frames], device, causal=False)
            slots = range(self.far[0] * PAGE_TOKENS, self.far[0] * PAGE_TOKENS + self.frames)
            self.mel_MF = None
        self.length += T
        memory = InPages.of(
            self.cache, torch.tensor(slots, dtype=torch.int64, device=device), [self.far], [self.frames], [T]
        )
        memory = replace(memory, kernels=self.kernels)
        own = Paged(
            self.cache,
            torch.tensor([self.own], dtype=torch.int32, device=device),
            positions_T,
            torch.tensor([0, T], dtype=torch.int32, device=device),
            torch.tensor([self.length], dtype=torch.int32, device=device),
            T,
            self.length,
            self.kernels,
            known=([T], [self.length]),
            known_pages=[self.own],
        )
        return self.model(stream, Crossed(own, source, memory if watch is None else watch(memory)), Rows()).float()


class _Decoded(NamedTuple):
    """How a window was decoded: the last fields of its segments."""

    mean_logprob: float
    temperature: float
    compression_ratio: float
    silence: float


class Transcriber:
    """Transcribes recordings with a loaded Whisper; ``language`` is a code such as en.

    Raises :class:`RequestError` for another kind of model and an unknown language.
    """

    def __init__(self, model: Model, language: str = "en", *, temperature: float = 0.0, words: bool = False):
        """``temperature`` above 0 samples every window at it; 0 is greedy, with :data:`TEMPERATURES` as fallback.

        ``words`` gives the time of each word, for one more pass of the decoder a window.
        """
        encoder = model.config.encoder
        if encoder is None or encoder.reads != "audio":
            raise RequestError(f"{model.source} reads no audio; use whisper-tiny.en, or the folder of another Whisper")
        if encoder.context * 2 * HOP != WINDOW_S * RATE:
            raise CheckpointError(
                f"{model.source} reads {encoder.context * 2 * HOP / RATE:g} s of audio, and Whisper reads {WINDOW_S} s"
            )
        self.model, self.encoder = model, encoder
        self._vocabulary = _Vocabulary.of(model, language)
        self._temperatures = (temperature,) if temperature else TEMPERATURES
        self._language, self._words = language, words
        self._heads = alignment_heads(self._vocabulary.alignment, model.config.layers, model.config.heads)

    def transcribe(self, samples: Tensor) -> Iterator[Segment]:
        """The segments of 16 kHz mono audio, in order, as soon as their window is decoded."""
        for segments in self.windows(samples):
            yield from segments

    def windows(self, samples: Tensor) -> Iterator[list[Segment]]:
        """The segments of one window after another; empty for one without speech."""
        at, whole = 0, WINDOW_S * RATE
        while at < len(samples):
            window = samples[at : at + whole]
            seconds = len(window) / RATE
            padded = torch.nn.functional.pad(window, (0, whole - len(window)))
            encoded = Window(self.model, log_mel(padded, self.encoder.mels))
            ids, decoded = self._decode_window(encoded, at)
            if decoded.silence > SILENCE and decoded.mean_logprob < LEAST_LOGPROB:
                at += whole
                yield []
                continue
            segments, advance_s = self._segments(ids, at / RATE, seconds, decoded)
            yield self._with_words(segments, encoded, at / RATE, seconds) if self._words else segments
            at += round(advance_s * RATE) if advance_s > 0 else whole

    def _with_words(self, segments: list[Segment], window: "Window", offset_s: float, seconds: float) -> list[Segment]:
        """``segments`` of one window with the times of their words."""
        v, texts = self._vocabulary, [split_words(s.tokens, self.model.tokenizer, self._language) for s in segments]
        tokens = [token for words in texts for word in words for token in word]
        if not tokens:
            return segments
        prompt = [v.start, *v.prompt, v.no_times]
        weights_NTS, logits_TV = window.align(
            [*prompt, *tokens, v.end], self._heads, max(1, min(window.frames, round(seconds / FRAME_S)))
        )
        # Row i of these is where token i is predicted; the last one is where the end is.
        rows = slice(len(prompt) - 1, -1)
        starts = token_starts(weights_NTS[:, rows])
        prob_TV = logits_TV[rows][:, : v.first_time].softmax(-1).cpu()
        probabilities = prob_TV[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
        found, at = list[Segment](), 0
        for segment, words in zip(segments, texts, strict=True):
            timed: list[Word] = []
            for word in words:
                stop = at + len(word)
                start_s, end_s = (round(offset_s + min(starts[i] * FRAME_S, seconds), 2) for i in (at, stop))
                mean = sum(probabilities[at:stop]) / len(word)
                timed.append(Word(self.model.tokenizer.decode(word).strip(), start_s, end_s, round(mean, 4)))
                at = stop
            found.append(segment._replace(words=tuple(each for each in timed if each.text)))
        return found

    def _decode_window(self, window: "Window", at: int) -> tuple[list[int], "_Decoded"]:
        """(tokens after the prompt, how they were found), at the first temperature whose text is plausible."""
        ids, decoded = list[int](), _Decoded(0.0, 0.0, 1.0, 0.0)
        for temperature in self._temperatures:
            ids, mean_logprob, silence = self._decode(window, temperature, at)
            text = self.model.tokenizer.decode([i for i in ids if i < self._vocabulary.first_time]).encode()
            decoded = _Decoded(mean_logprob, temperature, len(text) / len(zlib.compress(text)), silence)
            plausible = mean_logprob >= LEAST_LOGPROB and decoded.compression_ratio <= MOST_COMPRESSION
            if plausible or (silence > SILENCE and mean_logprob < LEAST_LOGPROB):
                break
        return ids, decoded

    @torch.inference_mode()
    def _decode(self, window: "Window", temperature: float, seed: int) -> tuple[list[int], float, float]:
        """(tokens after the prompt, their mean log-probability, the probability of silence)."""
        v, window.length = self._vocabulary, 0
        generator = torch.Generator().manual_seed(seed)
        logits_TV = window.next_logits([v.start, *v.prompt])
        silence = logits_TV[0].softmax(0)[v.silence].item()
        ids: list[int] = []
        total, logits_V = 0.0, logits_TV[-1]
        most = self.model.config.context // 2
        while True:
            logp_V = allow(logits_V, ids, v).log_softmax(0)
            if temperature:
                probs_V = (logp_V / temperature).softmax(0).cpu()
                token = int(torch.multinomial(probs_V, 1, generator=generator))
            else:
                token = int(logp_V.argmax())
            total += logp_V[token].item()
            if token == v.end or len(ids) == most:
                return ids, total / (len(ids) + 1), silence
            ids.append(token)
            logits_V = window.next_logits([token])[-1]

    def _segments(
        self, ids: list[int], offset_s: float, seconds: float, decoded: "_Decoded"
    ) -> tuple[list[Segment], float]:
        """The segments of one window, and how far to advance [s]."""
        first = self._vocabulary.first_time
        found: list[Segment] = []
        start_s, words, end_s = 0.0, list[int](), 0.0
        for token in ids:
            if token < first:
                words.append(token)
                continue
            time_s = (token - first) * TIME_S
            if words:
                end_s = min(time_s, seconds)
                found.append(self._segment(words, offset_s + start_s, offset_s + end_s, decoded))
                words = []
            start_s = time_s
        if words:  # no end: all of the window is used
            found.append(self._segment(words, offset_s + start_s, offset_s + seconds, decoded))
            return [each for each in found if each.text.strip()], seconds
        # A single time at the end says that nothing follows; two, that a segment begins which the window cuts.
        cut = len(ids) > 1 and ids[-1] >= first and ids[-2] >= first
        return [each for each in found if each.text.strip()], end_s if cut and end_s else seconds

    def _segment(self, words: list[int], start_s: float, end_s: float, decoded: "_Decoded") -> Segment:
        text = self.model.tokenizer.decode(words)
        return Segment(round(start_s, 2), round(max(end_s, start_s), 2), text, tuple(words), *decoded)


def write_transcript(segments: Sequence[Segment], format: Format) -> str:
    """The text of a transcript: plain lines, SubRip, WebVTT, or JSON with times and log-probabilities."""
    if format == "json":
        rows = [
            {"start": s.start_s, "end": s.end_s, "text": s.text.strip(), "mean_logprob": round(s.mean_logprob, 4)}
            | ({"words": word_rows(s.words)} if s.words else {})
            for s in segments
        ]
        text = " ".join(s.text.strip() for s in segments)
        return json.dumps({"text": text, "segments": rows}, ensure_ascii=False, indent=1) + "\n"
    if format == "txt":
        return "".join(f"{s.text.strip()}\n" for s in segments)
    blocks = ["WEBVTT\n\n"] if format == "vtt" else []
    mark = "." if format == "vtt" else ","
    for number, s in enumerate(segments, 1):
        # An arrow within a text would be read as a line of times.
        text = s.text.strip().replace("-->", "->")
        number_line = f"{number}\n" if format == "srt" else ""
        blocks.append(f"{number_line}{_clock(s.start_s, mark)} --> {_clock(s.end_s, mark)}\n{text}\n\n")
    return "".join(blocks)


def word_rows(words: Sequence[Word]) -> list[dict[str, str | float]]:
    """Words for JSON."""
    return [{"word": w.text, "start": w.start_s, "end": w.end_s, "probability": w.probability} for w in words]


def _clock(seconds: float, mark: str) -> str:
    """``00:01:02,500``."""
    ms = round(seconds * 1000)
    return f"{ms // 3_600_000:02}:{ms // 60_000 % 60:02}:{ms // 1000 % 60:02}{mark}{ms % 1000:03}"

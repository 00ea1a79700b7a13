"""Transcribes recordings with Whisper (arXiv 2212.04356): windows of 30 s, with times.

A window's spectrogram is encoded once, into pages of a KV cache; then each step decodes a token, by the rules of
:mod:`colonnade.speech.whisper_tokens`. Times are tokens of 0.02 s.

The next window begins at the end of the last whole segment. A window is silent where the no-speech token has more than
0.6 and the text's mean log-probability is below −1. Padding of the last window is attended to, as in training.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.errors import CheckpointError, RequestError
from colonnade.model import EncoderDecoderAttend, KVCache, Packed, Paged, PagedMemory, Rows, Source, Stream, fused_block
from colonnade.model.cross_attention import Memory
from colonnade.speech.log_mel import HOP, RATE, log_mel
from colonnade.speech.token_times import FRAME_S, RecordingMemory, Word, alignment_heads, split_words, token_starts
from colonnade.speech.transcript import Segment
from colonnade.speech.whisper_tokens import Model, WhisperTokens, mask_forbidden

WINDOW_S, TIME_S = 30, 0.02
SILENCE, LEAST_LOGPROB, MOST_COMPRESSION = 0.6, -1.0, 2.4
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
"""A window is decoded again at the next one while its text is improbable or repeats itself (section 4.5)."""
PAGE_TOKENS = 16


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
        self.step_memory = self._memory(range(0), 1)
        """That of a step of one token, the same for each."""
        self.mel_MF: Tensor | None = mel_MF.to(self.device, weight.dtype)
        self.length = 0

    def _memory(self, slots: range, T: int) -> PagedMemory:
        """Cross attention of ``T`` tokens to the source; its new keys and values go to ``slots``."""
        slots_S = torch.tensor(slots, dtype=torch.int64, device=self.device)
        return replace(PagedMemory.of(self.cache, slots_S, [self.far], [self.frames], [T]), kernels=self.kernels)

    @torch.inference_mode()
    def align(self, tokens: Sequence[int], heads: dict[int, list[int]], frames: int) -> tuple[Tensor, Tensor]:
        """(weights_NTS, logits_TV) of a whole target: cross attention of ``heads`` to the first ``frames`` frames."""
        self.length, weights = 0, list[Tensor]()
        logits_TV = self.next_logits(tokens, lambda memory: RecordingMemory(
            memory, heads, torch.tensor(self.far, device=self.device), frames, weights
        ))  # fmt: skip
        return torch.stack(weights).cpu(), logits_TV

    def next_logits(self, tokens: Sequence[int], watch: Callable[[PagedMemory], Memory] | None = None) -> Tensor:
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
        memory = self.step_memory if source is None and T == 1 else self._memory(slots, T)
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
        return self.model(
            stream, EncoderDecoderAttend(own, source, memory if watch is None else watch(memory)), Rows()
        ).float()


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

        ``words`` gives the time of each word, at the cost of one more decoder pass per window.
        """
        encoder = model.config.encoder
        if encoder is None or encoder.reads != "audio":
            raise RequestError(
                f"{model.source} does not read audio; use whisper-tiny.en, or the folder of another Whisper model"
            )
        if encoder.context * 2 * HOP != WINDOW_S * RATE:
            raise CheckpointError(
                f"{model.source} reads {encoder.context * 2 * HOP / RATE:g} s of audio, and Whisper reads {WINDOW_S} s"
            )
        self.model, self.encoder = model, encoder
        self._vocabulary = WhisperTokens.of(model, language)
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
            logp_V = mask_forbidden(logits_V, ids, v).log_softmax(0)
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

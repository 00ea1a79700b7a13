"""Turns sampled tokens into outputs: text, log-probabilities, and whether and why a request ends.

    token -> grammar and penalties advance -> detokenizer -> stop strings -> :class:`~colonnade.serve.request.Output`

The first output also has what was requested for the prompt: its text (``echo``), its ids and its log-probabilities.
Nothing here ends a request: the engine does, when an output has a finish reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from colonnade.data.tokenizer import Tokenizer
from colonnade.serve.model_runner import HostScore
from colonnade.serve.request import Alternative, FinishReason, Output, Request, Timing, TokenLogprob
from colonnade.serve.sample_args import NOT_FINITE
from colonnade.serve.text_stream import TextStream


@dataclass(slots=True)
class Generation:
    """A request with its text and its times."""

    request: Request
    text: TextStream
    arrived_s: float
    first_token_s: float = 0.0
    prompt_scores: list[HostScore] = field(default_factory=list)
    """Of the prompt's tokens but the first."""
    echoed: int = 0
    """Characters of the prompt's text, if it is echoed."""

    def timing(self, now_s: float) -> Timing:
        """The times of a request that ends now."""
        admitted_s = now_s if self.request.admitted_s is None else self.request.admitted_s
        return Timing(admitted_s - self.arrived_s, self.first_token_s - admitted_s, now_s - self.first_token_s)


def failed_output(live: Generation, reason: FinishReason, now_s: float) -> Output:
    """The only output of a request that has generated nothing here, for a ``reason`` that is a failure."""
    timing = Timing(now_s - live.arrived_s, 0.0, 0.0)
    return Output(live.request.id, "", None, reason, live.request.input_tokens, 0, timing)


class OutputProcessor:
    """Makes the outputs of all requests of an engine."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer

    def start(self, request: Request, now_s: float) -> Generation:
        """The text of a new request; of a resumed one in the state after its last token, with penalties and grammar."""
        params = request.params
        text = TextStream(self.tokenizer.detokenizer(params.skip_special_tokens), params.stop)
        live = Generation(request, text, arrived_s=now_s)
        if request.resume and params.echo:
            live.echoed = len(self._prompt_text(request.prompt)[0])
        for count, token in enumerate(request.resume or (), 1):
            if request.processor is not None:
                request.processor.accept(token)
            text.push(token, may_stop=count >= params.min_tokens)
        return live

    def advance(self, live: Generation, token: int, score: HostScore | None, now_s: float, version: int) -> Output:
        """The output for one new token: the text that it completes, and whether the request ends.

        ``version`` is that of the weights.
        """
        request, params = live.request, live.request.params
        echo, prompt_logprobs, prompt_ids = "", None, None
        generated = request.generated
        if live.first_token_s == 0.0:
            live.first_token_s = now_s
        if generated == 1:
            echo, prompt_logprobs = self._prompt_outputs(live)
            prompt_ids = (request.source or request.prompt) if params.return_prompt_ids else None
            if params.max_tokens == 0:  # the token was sampled only because a pass ends with one
                return Output(
                    request.id, echo, None, "error" if token == NOT_FINITE else "length", request.input_tokens, 0,
                    live.timing(now_s), None, prompt_logprobs, request.cached_tokens or 0, prompt_ids, version,
                )  # fmt: skip
        logprobs = None
        if score is not None and token != NOT_FINITE:
            logprobs = self._token_logprob(token, score, params.logprobs or 0, live.echoed + live.text.characters)

        matcher = None
        if request.processor is not None and token != NOT_FINITE:
            request.processor.accept(token)
            matcher = request.processor.matcher
        is_end = token in params.stop_token_ids or (token in self.tokenizer.eos_ids and not params.ignore_eos)
        may_stop = generated >= params.min_tokens
        text = "" if is_end or token == NOT_FINITE else live.text.push(token, may_stop=may_stop)
        reason: FinishReason | None = None
        if token == NOT_FINITE:
            reason = "error"
        elif matcher is not None and matcher.error:
            reason = "grammar_error"
        elif is_end or live.text.stopped or (matcher is not None and matcher.finished):
            reason = "stop"
        elif generated == request.limit_tokens:
            reason = "length"
        timing = None
        if reason:
            text += live.text.finish()
            reason = "stop" if live.text.stopped else reason
            timing = live.timing(now_s)
        return Output(
            request.id, echo + text, token, reason, request.input_tokens, generated, timing, logprobs,
            prompt_logprobs, request.cached_tokens or 0, prompt_ids, version,
        )  # fmt: skip

    def _prompt_outputs(self, live: Generation) -> tuple[str, tuple[TokenLogprob, ...] | None]:
        """The prompt's text, if it is echoed, and its tokens' log-probabilities, if they are wanted."""
        prompt, params = live.request.prompt, live.request.params
        text, offsets = self._prompt_text(prompt) if params.echo else ("", [0] * len(prompt))
        live.echoed = len(text)
        if params.prompt_logprobs is None:
            return text, None
        first = TokenLogprob(prompt[0], self.tokenizer.token_bytes(prompt[0]), None, 0, ())
        rows = zip(prompt[1:], live.prompt_scores, offsets[1:], strict=True)
        rest = [self._token_logprob(token, score, params.prompt_logprobs, offset) for token, score, offset in rows]
        live.prompt_scores = []
        return text, (first, *rest)

    def _prompt_text(self, prompt: Sequence[int]) -> tuple[str, list[int]]:
        """The text of a prompt, and the number of its characters before each token."""
        text, offsets, detokenizer = "", list[int](), self.tokenizer.detokenizer()
        for token in prompt:
            offsets.append(len(text))
            text += detokenizer.push(token)
        return text + detokenizer.flush(), offsets

    def _token_logprob(self, token: int, score: HostScore, count: int, offset: int) -> TokenLogprob:
        data = self.tokenizer.token_bytes
        top = zip(score.top_ids[:count], score.top_logp[:count], strict=True)
        alternatives = tuple(Alternative(other, data(other), logprob) for other, logprob in top)
        return TokenLogprob(token, data(token), score.logp, offset, alternatives)

"""Changes logits before sampling: penalties, biases, banned tokens and grammars, as functions of the ids alone.

In this order, as in vLLM: repetition, frequency and presence penalty, ``logit_bias``, ``min_tokens``, ``bad_words``,
then the grammar's mask. The scheduler asks for the changes of each token, and each rank applies them to its share of
the vocabulary (:mod:`colonnade.serve.logits_changes`).
"""

from collections import Counter
from collections.abc import Sequence

from colonnade.data.tokenizer import Tokenizer
from colonnade.serve.grammar import Matcher
from colonnade.serve.sample_args import LogitsChanges
from colonnade.serve.sampling_params import SamplingParams

BANNED = -1e9
"""Bias of a banned token. It is finite: where a grammar allows no other token, it is generated all the same."""


class LogitsProcessor:
    """The changes to one request's logits, token by token."""

    def __init__(
        self, prompt: Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None, matcher: Matcher | None
    ):
        """Without a ``tokenizer`` there are no end tokens but those of ``params``, and no bad words."""
        self.matcher = matcher
        self._params, self._end_ids, self._bad = params, {*params.stop_token_ids}, list[tuple[int, ...]]()
        if tokenizer is not None:
            self._end_ids |= {*tokenizer.eos_ids}
            self._bad = [ids for word in params.bad_words for ids in _spellings(word, tokenizer)]
        self._static = {token: (1.0, bias) for token, bias in params.logit_bias.items()}
        for ids in self._bad:
            if len(ids) == 1:
                self._static[ids[0]] = (1.0, BANNED)
        self._bad = [ids for ids in self._bad if len(ids) > 1]
        self._prompt = frozenset(prompt) if params.repetition_penalty != 1 else frozenset()
        self._counts: Counter[int] = Counter()

    @staticmethod
    def of(
        prompt: Sequence[int], params: SamplingParams, tokenizer: Tokenizer | None, matcher: Matcher | None
    ) -> "LogitsProcessor | None":
        """The processor of a request; None if its logits are sampled unchanged."""
        if matcher or _penalised(params) or params.logit_bias or params.min_tokens or params.bad_words:
            return LogitsProcessor(prompt, params, tokenizer, matcher)
        return None

    @property
    def needs_history(self) -> bool:
        """True if the changes depend on the tokens generated so far, not only on their number."""
        return self.matcher is not None or _penalised(self._params) or bool(self._bad)

    def accept(self, token: int) -> None:
        """Record a generated token."""
        self._counts[token] += 1
        if self.matcher is not None:
            self.matcher.accept(token)

    def changes(self, ids: Sequence[int], index: int) -> LogitsChanges | None:
        """The changes for token ``index`` of the output; ``ids`` are the prompt's and the output's so far.

        With :attr:`needs_history`, all tokens before it must have been accepted.
        """
        params, entries = self._params, dict(self._static)
        if params.repetition_penalty != 1:
            for token in self._prompt | self._counts.keys():
                entries[token] = (params.repetition_penalty, entries.get(token, (1.0, 0.0))[1])
        if params.frequency_penalty or params.presence_penalty:
            for token, count in self._counts.items():
                scale, bias = entries.get(token, (1.0, 0.0))
                entries[token] = (scale, bias - params.frequency_penalty * count - params.presence_penalty)
        banned = {*self._end_ids} if index < params.min_tokens else set()
        banned |= {word[-1] for word in self._bad if list(ids[1 - len(word) :]) == list(word[:-1])}
        entries |= dict.fromkeys(banned, (1.0, BANNED))
        mask = None if self.matcher is None else self.matcher.mask()
        if not entries and mask is None:
            return None
        scales, biases = (tuple(pair[i] for pair in entries.values()) for i in (0, 1))
        return LogitsChanges(tuple(entries), scales, biases, mask)


def _penalised(params: SamplingParams) -> bool:
    return params.repetition_penalty != 1 or bool(params.frequency_penalty or params.presence_penalty)


def _spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """The ids of ``word`` at the start of a text, and those after a space if they differ."""
    spaced = tokenizer.encode_documents([word, f" {word.lstrip()}"])
    return list(dict.fromkeys(tuple(ids) for ids in spaced if ids))

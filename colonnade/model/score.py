"""Perplexity of a text: the negative log-likelihood of each token given the ones before it.

    perplexity = exp(Σ nll / number of scored tokens)

A text longer than the context is cut into windows of ``context`` tokens that start ``stride`` apart; a window scores
only tokens that no earlier window scored, so every token but the first is scored exactly once. ``stride = context`` is
the cheapest; a smaller stride gives each token more context.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from colonnade.errors import RequestError
from colonnade.model.attend import Packed
from colonnade.model.embedding import Stream
from colonnade.model.loss import IGNORE
from colonnade.model.output_heads import Loss
from colonnade.model.transformer import Transformer

BATCH_TOKENS = 4096
"""Tokens in one forward pass; more would only take memory."""


class Score(NamedTuple):
    """The summed negative log-likelihood [nats] of ``tokens`` scored tokens."""

    nll: float
    tokens: int

    @property
    def perplexity(self) -> float:
        """exp of the mean."""
        return math.exp(self.nll / self.tokens)


@torch.no_grad()
def score(
    model: Transformer,
    tokens: list[int],
    *,
    context: int | None = None,
    stride: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Score:
    """Score ``tokens`` as one text; ``progress(done, total)`` is called with numbers of windows, from 0 done.

    Raises :class:`~colonnade.errors.RequestError` for fewer than two tokens, or an impossible context or stride.
    """
    context = model.config.context if context is None else context
    stride = context if stride is None else stride
    if not model.config.causal:
        raise RequestError(
            "perplexity needs a causal model, but this one attends in both directions (causal = False) and sees the "
            "token to predict; use hidden(tokens) or logits(tokens)"
        )
    if model.config.encoder is not None:
        raise RequestError(
            "perplexity of a text needs a decoder-only model, but this model has an encoder; use generate"
        )
    if len(tokens) < 2:
        raise RequestError(f"{len(tokens)} tokens cannot be scored: the first is never predicted; use a longer text")
    if not 0 < stride <= context <= model.config.context:
        raise RequestError(
            f"windows of {context} tokens, {stride} apart, do not fit the model's context of {model.config.context}; "
            "choose 0 < stride <= context <= that"
        )
    device = next(model.parameters()).device
    starts = window_starts(len(tokens) - 1, context, stride)
    nll, count = 0.0, 0
    batch = max(1, BATCH_TOKENS // context)
    for i in range(0, len(starts), batch):
        progress(i, len(starts))
        windows = [_window(tokens, start, context, stride, device) for start in starts[i : i + batch]]
        lengths = [len(inputs) for inputs, _ in windows]
        stream = Stream(
            torch.cat([inputs for inputs, _ in windows]),
            torch.cat([torch.arange(n, device=device) for n in lengths]),
        )
        loss, valid = model(stream, Packed.of(lengths, device), Loss(torch.cat([targets for _, targets in windows])))
        nll, count = nll + loss.item(), count + int(valid.item())
    return Score(nll, count)


def window_starts(predictions: int, context: int, stride: int) -> list[int]:
    """Starts of the windows that together predict ``predictions`` tokens."""
    starts = [0]
    while starts[-1] + context < predictions:
        starts.append(starts[-1] + stride)
    return starts


def _window(tokens: list[int], start: int, context: int, stride: int, device: torch.device) -> tuple[Tensor, Tensor]:
    stop = min(start + context, len(tokens) - 1)
    inputs = torch.tensor(tokens[start:stop], device=device)
    targets = torch.tensor(tokens[start + 1 : stop + 1], device=device)
    if start:
        targets[: context - stride] = IGNORE  # scored by the window before
    return inputs, targets

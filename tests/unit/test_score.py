"""Scoring a long text in windows."""

import pytest
import torch

from colonnade.errors import RequestError
from colonnade.model import Packed, Rows, Stream
from colonnade.model.score import score
from tests.models import CONFIGS, build

MODEL = build(CONFIGS["llama"])
TOKENS = torch.randint(101, (150,), generator=torch.Generator().manual_seed(0)).tolist()


def by_hand(context: int, stride: int) -> float:
    """One forward pass per token, each with its own window."""
    total = 0.0
    for t in range(1, len(TOKENS)):
        start = 0
        while start + context < t:
            start += stride
        seen = torch.tensor(TOKENS[start:t])
        logits = MODEL(
            Stream(seen, torch.arange(len(seen))), Packed.of([len(seen)]), Rows(torch.tensor([t - start - 1]))
        )
        total -= logits.log_softmax(-1)[0, TOKENS[t]].item()
    return total


@pytest.mark.parametrize(("context", "stride"), [(64, 64), (40, 13), (64, 1)])
def test_each_token_is_scored_once(context: int, stride: int) -> None:
    result = score(MODEL, TOKENS, context=context, stride=stride)
    assert result.tokens == len(TOKENS) - 1
    assert result.nll == pytest.approx(by_hand(context, stride), rel=1e-10)


def test_text_shorter_than_the_window() -> None:
    assert score(MODEL, TOKENS[:2]).tokens == 1
    with pytest.raises(RequestError, match="1 tokens cannot be scored"):
        score(MODEL, TOKENS[:1])


def test_invalid_windows_are_refused() -> None:
    with pytest.raises(RequestError, match="context of 64"):
        score(MODEL, TOKENS, context=65)

"""Alignment of tokens with frames, and how a text is split into words."""

import itertools

import numpy as np
import pytest
import torch

from colonnade.cli import main
from colonnade.speech.token_times import Word, alignment_heads, dtw_path, median_filter, split_words, token_starts
from colonnade.speech.transcript import Segment, write_transcript
from tests.serve import tiny


def cheapest(cost_TS: np.ndarray) -> float:
    """By enumeration of all monotone paths."""
    T, S = cost_TS.shape
    best = np.inf

    def go(i: int, j: int, total: float) -> None:
        nonlocal best
        total += cost_TS[i, j]
        if (i, j) == (T - 1, S - 1):
            best = min(best, total)
        for a, b in ((i + 1, j + 1), (i + 1, j), (i, j + 1)):
            if a < T and b < S:
                go(a, b, total)

    go(0, 0, 0.0)
    return best


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 5), (4, 1), (3, 6), (5, 5), (6, 4)])
def test_the_path_is_the_cheapest_of_all(T: int, S: int) -> None:
    for seed in range(5):
        cost = np.random.default_rng(seed).standard_normal((T, S))
        rows, columns = dtw_path(cost)
        assert (rows[0], columns[0], rows[-1], columns[-1]) == (0, 0, T - 1, S - 1)
        steps = {(int(b - a), int(d - c)) for (a, b), (c, d) in zip(
            itertools.pairwise(rows), itertools.pairwise(columns), strict=True)}  # fmt: skip
        assert steps <= {(1, 1), (1, 0), (0, 1)}
        assert cost[rows, columns].sum() == pytest.approx(cheapest(cost))


def test_a_diagonal_is_found() -> None:
    """Three tokens that look at frames 0–3, 4–8 and 9–11."""
    weights = torch.full((2, 3, 12), 0.01)
    for token, frames in enumerate(((0, 4), (4, 9), (9, 12))):
        weights[:, token, slice(*frames)] = 0.2
    assert token_starts(weights) == [0, 4, 9]


def test_medians_take_out_single_frames() -> None:
    x = torch.zeros(1, 1, 20)
    x[..., 7] = 9.0
    assert not median_filter(x).any()
    x[..., 7:13] = 9.0
    assert median_filter(x)[0, 0].nonzero().flatten().tolist() == list(range(7, 13))
    assert torch.equal(median_filter(x[..., :3]), x[..., :3])


def test_words_keep_characters_whole() -> None:
    tokenizer = tiny.tokenizer()
    text = " The quick Übermut 你好, fox."
    tokens = tokenizer.encode(text)
    found = split_words(tokens, tokenizer, "en")
    assert [token for word in found for token in word] == tokens
    assert [tokenizer.decode(word) for word in found] == [" The", " quick", " Übermut", " 你好,", " fox."]
    characters = split_words(tokenizer.encode("你好"), tokenizer, "zh")
    assert [tokenizer.decode(each) for each in characters] == ["你", "好"]


def test_without_a_list_the_upper_half_of_the_layers_is_used() -> None:
    assert alignment_heads(None, 4, 2) == {2: [0, 1], 3: [0, 1]}
    assert alignment_heads([[1, 0], [3, 1], [1, 5]], 4, 6) == {1: [0, 5], 3: [1]}


def test_words_in_json_and_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    segment = Segment(0, 1.5, " One two", (1,), -0.25, words=(Word("One", 0.1, 0.5, 0.9), Word("two", 0.5, 1.2, 0.8)))
    assert '"word": "two"' in write_transcript([segment], "json")
    with pytest.raises(SystemExit):
        main(["speech", "transcribe", "a.wav", "--words"])
    assert "--words needs --format json, not txt" in capsys.readouterr().err

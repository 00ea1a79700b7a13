"""Expert specialisation by token class, from the tokens' texts and the routers' choices."""

import math

import pytest
import torch

from colonnade.look import TOKEN_CLASSES, classify_tokens
from colonnade.model import Packed, Rows
from colonnade.model.moe.expert_specialization import record_choices, specializations, top_tokens
from tests.models import MOES, build, ragged


def test_token_classes():
    pieces = [
        "The", " old", " Pres", "ident", " Lincoln", " was", " walking", ",", " in", " 18", "65", ".", "\n", "We",
        " saw", "!",
    ]  # fmt: skip
    assert classify_tokens(pieces) == [
        "function word", "word", "name", "part of a word", "name", "verb", "verb", "punctuation", "function word",
        "number", "number", "punctuation", "white space", "function word", "verb", "punctuation",
    ]  # fmt: skip
    assert set(classify_tokens(pieces)) == set(TOKEN_CLASSES)


def test_capital_at_a_sentence_start_is_not_a_name():
    assert classify_tokens(["Lawyers", " met", ".", " Lawyers", " met", " Lawyers"])[::3] == ["word", "word"]
    assert classify_tokens(["Lawyers", " met", " Lawyers"])[2] == "name"
    assert classify_tokens(["", " ", "x"]) == ["white space", "white space", "word"]


def test_specialised_and_unspecialised_experts():
    kinds = ["number"] * 6 + ["verb"] * 6
    specialised = torch.tensor([[0]] * 6 + [[2]] * 6)
    even = torch.tensor([[0], [1], [2]] * 4)
    result = specializations({3: specialised, 5: even}, kinds, experts=4)
    assert result[3].mutual_information == pytest.approx(1)
    assert result[3].counts == [[6, 0, 0, 0], [0, 0, 6, 0]]
    assert result[3].preferred_experts("verb") == [(2, 2.0)]
    assert result[5].mutual_information == pytest.approx(0, abs=1e-12)
    assert result[5].lifts == [[1.0, 1.0, 1.0, 0.0]] * 2
    assert result[5].preferred_experts("number") == []


def test_mutual_information_by_definition():
    """By the definition, from counts: 3 of 4 numbers to expert 0, 1 of 4 verbs; id 9 means no expert."""
    ids_TA = torch.tensor([[0, 9], [0, 9], [0, 9], [1, 9], [0, 9], [1, 9], [1, 9], [1, 9]])
    result = specializations({0: ids_TA}, ["number"] * 4 + ["verb"] * 4, experts=2)[0]
    cells = [3 / 8, 1 / 8, 1 / 8, 3 / 8]
    information = sum(p * math.log(p / 0.25) for p in cells)
    assert result.mutual_information == pytest.approx(information / math.log(2))
    assert result.lifts == [[1.5, 0.5], [0.5, 1.5]]


def test_top_tokens_exceed_an_experts_share():
    pieces = [" the", ",", " the", ",", " the", " the"]
    ids_TA = torch.tensor([[0], [1], [0], [1], [0], [1]])
    assert top_tokens(ids_TA, pieces, experts=3) == [["the"], [","], []]


def test_choices_are_recorded_by_block_inside_the_context_only():
    model = build(MOES["biased_shared"])
    stream, attend, _ = ragged(MOES["biased_shared"])
    T = len(stream.tokens_T)
    assert isinstance(attend, Packed)
    with torch.no_grad(), record_choices(model) as ids:
        model(stream, attend, Rows())
        assert list(ids) == [1], "the first block is dense"
        assert ids[1].shape == (T, 3)
        model(stream, attend, Rows())
    assert torch.equal(ids[1][:T], ids[1][T:])
    with torch.no_grad():
        model(stream, attend, Rows())
    assert len(ids[1]) == 2 * T


def test_no_choices_give_no_specialisation():
    result = specializations({0: torch.full((2, 1), 4)}, ["verb", "number"], experts=4)[0]
    assert result.mutual_information == 0
    assert sum(map(sum, result.counts)) == 0

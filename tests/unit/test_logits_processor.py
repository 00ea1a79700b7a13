"""Penalties, biases, banned tokens and masks equal a plain loop over the vocabulary, on any number of ranks."""

import math
import random

import pytest
import torch

from colonnade.errors import RequestError
from colonnade.serve import SamplingParams
from colonnade.serve.logits_changes import apply_changes
from colonnade.serve.logits_processor import LogitsProcessor
from colonnade.serve.sample_args import LogitsChanges, SampleArgs
from colonnade.serve.sampling_params import choice_seed
from tests.serve import tiny

V = 301


def changed(logits_V: list[float], ids: list[int], prompt: list[int], params: SamplingParams) -> list[float]:
    """The definition, one token after another; ``ids`` are those of the prompt and of the output."""
    output, result = ids[len(prompt) :], []
    ends = {*params.stop_token_ids, *tiny.tokenizer().eos_ids}
    bad = [tiny.tokenizer().encode(text) for word in params.bad_words for text in (word, " " + word)]
    for token, logit in enumerate(logits_V):
        value = logit
        if token in ids:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        value -= params.frequency_penalty * output.count(token) + params.presence_penalty * (token in output)
        value += params.logit_bias.get(token, 0.0)
        banned = token in ends and len(output) < params.min_tokens
        banned |= any([*ids, token][-len(word) :] == word for word in bad)
        result.append(-math.inf if banned else value)
    return result


CASES = {
    "repetition": SamplingParams(repetition_penalty=1.7),
    "frequency": SamplingParams(frequency_penalty=0.8, presence_penalty=-0.5),
    "all": SamplingParams(
        repetition_penalty=0.6, frequency_penalty=-1.1, presence_penalty=2, logit_bias={5: 3.5, 7: -100, 300: 1},
        min_tokens=3, stop_token_ids=[9], bad_words=["the", "dog sleeps"],
    ),
    "ends": SamplingParams(min_tokens=5),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_changes_follow_the_definition(name: str):
    params, rng = CASES[name], random.Random(name)
    prompt = [5, 5, 40, *tiny.tokenizer().encode("and the do")]
    words = tiny.tokenizer().encode(" dog sleeps on the")
    processor = LogitsProcessor.of(prompt, params, tiny.tokenizer(), None)
    assert processor is not None
    ids = list(prompt)
    for step in range(12):
        logits_V = [rng.uniform(-3, 3) for _ in range(V)]
        x_RV = torch.tensor([[0.0] * V, logits_V], dtype=torch.float64)
        args = [SampleArgs.of(params, 1, step), SampleArgs.of(params, 1, step, processor.changes(ids, step))]
        got_RV = apply_changes(x_RV, args, 0)
        assert x_RV[1].tolist() == logits_V, "raw logits are kept for the log-probabilities"
        assert got_RV[0].eq(0).all(), "the other row"
        expected = changed(logits_V, ids, prompt, params)
        got = [-math.inf if value < -1e8 else value for value in got_RV[1].tolist()]
        assert got == pytest.approx(expected, abs=1e-12)
        shards = [apply_changes(x_RV[:, a:b], args, a) for a, b in ((0, 151), (151, 301), (301, 301))]
        assert torch.cat(shards, 1).equal(got_RV)
        token = words[step // 2 % len(words)] if step % 2 else rng.randrange(V)
        ids.append(token)
        processor.accept(token)


def test_masks_follow_penalties_and_leave_other_rows():
    mask = bytearray(-(-V // 8))
    for token in (0, 7, 8, 300):
        mask[token // 8] |= 1 << token % 8
    plain = SampleArgs.of(SamplingParams(), 0, 0)
    args = [plain, plain._replace(changes=LogitsChanges((7, 9), (1.0, 1.0), (-1e9, 5.0), bytes(mask))), plain]
    x_RV = torch.randn(3, V, dtype=torch.bfloat16)
    got_RV = apply_changes(x_RV, args, 0)
    assert got_RV.dtype == torch.float32 and got_RV[[0, 2]].equal(x_RV[[0, 2]].float())
    assert got_RV[1].isfinite().nonzero().flatten().tolist() == [0, 7, 8, 300]
    assert got_RV[1, 7] < -1e8, "a banned token that the grammar allows stays possible"
    assert torch.cat([apply_changes(x_RV[:, :200], args, 0), apply_changes(x_RV[:, 200:], args, 200)], 1).equal(got_RV)
    assert (
        apply_changes(x_RV[[0]], [plain], 0).data_ptr() == x_RV[[0]].data_ptr()
        or apply_changes(x_RV, [plain] * 3, 0) is x_RV
    )


def test_requests_without_changes_have_no_processor():
    assert LogitsProcessor.of([1], SamplingParams(temperature=0.3, top_k=4), tiny.tokenizer(), None) is None
    static = LogitsProcessor.of([1], SamplingParams(logit_bias={1: 2.0}, min_tokens=2), tiny.tokenizer(), None)
    assert static is not None and not static.needs_history


def test_choices_have_seeds_of_their_own():
    assert choice_seed(7, 0) == 7
    seeds = [choice_seed(seed, choice) for seed in (-1, 0, 1, 2**63 - 1) for choice in range(1, 16)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("frequency_penalty", 2.1, "from -2 to 2"),
        ("presence_penalty", float("nan"), "from -2 to 2"),
        ("repetition_penalty", 0, "from 0.001 to 1000"),
        ("repetition_penalty", 5e-324, "from 0.001 to 1000"),  # its inverse is infinite: 0 times it is no number
        ("repetition_penalty", float("inf"), "from 0.001 to 1000"),
        ("logit_bias", {1: 101}, "from -100 to 100"),
        ("logit_bias", {"a": 1}, "from token ids"),
        ("logit_bias", dict.fromkeys(range(1025), 1), "at most 1,024 tokens"),
        ("min_tokens", -1, "from 0 to max_tokens"),
        ("min_tokens", None, "a whole number"),
        ("bad_words", [""], "strings of 1 to 512 characters"),
        ("bad_words", "word", "a list of strings"),
        ("bad_words", ["a"] * 65, "at most 64 strings"),
    ],
)
def test_bad_values_are_refused(name: str, value: object, words: str):
    with pytest.raises(RequestError, match=words) as refused:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert refused.value.param == name


def test_min_tokens_is_at_most_max_tokens():
    with pytest.raises(RequestError, match="from 0 to max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)

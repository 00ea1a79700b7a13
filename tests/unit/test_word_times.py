"""Times of words: letter targets from known times, words from spans, and the loss that uses both."""

import pytest
import torch

from colonnade.config.speech import SpeechConfig
from colonnade.errors import DataError
from colonnade.kernels.ctc import Span, align
from colonnade.speech.model import LETTER_WEIGHT, SpeechModel
from colonnade.speech.word_times import PARTS, UNKNOWN, letter_targets, word_times
from tests.worlds import assert_same

TINY = SpeechConfig(layers=1, width=16, heads=2, ffn_width=24, joint_width=12, mels=10, segment=4, left=6)
HIGHER = 1.1
"""The pitch of recordings without times."""
A, B, SPACE = (TINY.letters.index(x) + 1 for x in "ab ")


def test_letters_share_the_time_of_their_word():
    """Words of 40 to 120 ms and 120 to 200 ms: a space of 20 ms is between them."""
    targets = letter_targets([A, B, SPACE, B], SPACE, [(0.04, 0.12), (0.12, 0.2)], frames=6)
    expected = [0] * 4 + [A] * 4 + [B] * 3 + [SPACE] * 2 + [B] * 7 + [0] * 4
    assert targets.tolist() == expected
    assert len(targets) == PARTS * 6


def test_a_space_fills_a_pause():
    targets = letter_targets([A, SPACE, B], SPACE, [(0.0, 0.04), (0.1, 0.14)], frames=4)
    assert targets.tolist() == [A] * 4 + [SPACE] * 6 + [B] * 4 + [0] * 2


def test_words_outside_of_the_recording_are_cut():
    targets = letter_targets([A, SPACE, B], SPACE, [(-0.02, 0.04), (0.06, 0.4)], frames=2)
    assert targets.tolist() == [A] * 4 + [SPACE] * 2 + [B] * 2
    assert letter_targets([A], SPACE, [(0.05, 0.05)], frames=2).tolist() == [0] * 8


def test_times_must_be_those_of_the_words():
    with pytest.raises(DataError, match="1 word times, but the text has 2"):
        letter_targets([A, SPACE, B], SPACE, [(0.0, 0.1)], frames=4)


def test_alignment_to_exact_probabilities_gives_back_the_times():
    text, words = "ab ba b", [(0.05, 0.25), (0.25, 0.43), (0.6, 0.71)]
    targets = letter_targets(TINY.labels(text), SPACE, words, frames=20)
    logprobs_PV = torch.full((80, TINY.vocab_size), 1e-4).scatter_(1, targets[:, None], 0.9).log()
    found = word_times(text, align(logprobs_PV, TINY.labels(text)))
    assert [each.word for each in found] == text.split()
    for each, (start, end) in zip(found, words, strict=True):
        assert abs(each.start_s - start) <= 0.011
        assert abs(each.end_s - end) <= 0.011
        assert each.score == pytest.approx(0.9, abs=1e-3)


def test_double_spaces_have_no_word():
    spans = [Span(i, i + 1, 0.5) for i in range(4)]
    assert [each.word for each in word_times("a  b", spans)] == ["a", "b"]


def test_the_loss_takes_times_where_they_are_known():
    """Cross-entropy for the first recording, CTC for the second; gradients of both."""
    model, lengths, labels = SpeechModel(TINY, 0, torch.float64), [9, 8], [[A, SPACE, B], [B]]
    x_TD = torch.randn(17, 16, dtype=torch.float64)
    free = model.loss(x_TD, lengths, labels)
    known = letter_targets(labels[0], SPACE, [(0.02, 0.15), (0.15, 0.3)], 9)
    letters_P = torch.cat((known, torch.full((PARTS * 8,), UNKNOWN)))
    mixed = model.loss(x_TD, lengths, labels, letters_P)
    y_TD = model.encode(x_TD, lengths)
    entropy = -model.letter_logprobs(y_TD)[torch.arange(PARTS * 9), known].sum() / PARTS
    frames = model.letters(y_TD)[:9].view(9, PARTS, -1).mean(1).log_softmax(1)
    ctc = torch.nn.functional.ctc_loss(
        frames[:, None], torch.tensor([labels[0]]), torch.tensor([9]), torch.tensor([3]), reduction="sum"
    )
    assert_same(mixed - free, LETTER_WEIGHT * (entropy - ctc) / 4)
    mixed.backward()
    assert model.letters.weight.grad is not None


@pytest.mark.slow
@pytest.mark.parametrize("untimed", [False, True])
def test_training_learns_the_times_of_words(untimed):
    """A model that hears four letters as tones places them within 20 ms after 150 steps.

    ``untimed``: every other recording has higher tones and no times; they are placed within 60 ms by what the head
    learns from the others.
    """
    config = TINY.replace(width=32, ffn_width=64, joint_width=16, right=1, audio_history=4)
    model = SpeechModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    generator = torch.Generator().manual_seed(0)

    def example(pitch: float = 1.0) -> tuple[torch.Tensor, str, list[tuple[float, float]]]:
        start_s, samples, words, letters = 0.1, [torch.zeros(1600)], [], []
        for _ in range(3):
            letter = int(torch.randint(4, (1,), generator=generator))
            count = int(torch.randint(2400, 4800, (1,), generator=generator))
            samples.append(0.3 * torch.sin(torch.arange(count) * 2 * torch.pi * pitch * (400 + 500 * letter) / 16000))
            words.append((start_s, start_s + count / 16000))
            letters.append("abcd"[letter])
            start_s += count / 16000
        return torch.cat((*samples, torch.zeros(1600))), " ".join(letters), words

    for _ in range(150):
        batch = [example(HIGHER if untimed and i % 2 else 1.0) for i in range(4)]
        mels = [model.features(samples) for samples, _, _ in batch]
        labels = [config.labels(text) for _, text, _ in batch]
        targets = [
            torch.full((PARTS * len(mel),), UNKNOWN)
            if untimed and i % 2
            else letter_targets(own, SPACE, words, len(mel))
            for i, (own, (_, _, words), mel) in enumerate(zip(labels, batch, mels, strict=True))
        ]
        x_TD = model.frames(torch.cat(mels))
        loss = model.loss(x_TD, [len(mel) for mel in mels], labels, torch.cat(targets))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    errors = [
        abs(found - true)
        for samples, text, words in (example(HIGHER if untimed else 1.0) for _ in range(10))
        for each, bounds in zip(model.align(samples, text), words, strict=True)
        for found, true in zip(each[1:3], bounds, strict=True)
    ]
    assert sum(error <= (0.06 if untimed else 0.02) for error in errors) >= 0.9 * len(errors)

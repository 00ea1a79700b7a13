"""Sentence-order pairs on real text: surface features do not reveal which segment came first."""

import numpy as np
import pytest
import torch

from colonnade.config import DataConfig
from colonnade.data import Corpus, MaskingVocabulary, SentencePairs, Tokenizer, build
from colonnade.data.bert_samples import Sample, derive_key, sentence_starts
from colonnade.data.readers import sotu_documents

BOUNDARY_TOKENS = 60
"""The number of frequent boundary tokens given to the classifier as features."""
SAMPLES = 6000


@pytest.fixture(scope="module")
def speeches(tmp_path_factory) -> Corpus:
    """Every eighth sample speech, with a cased vocabulary."""
    documents = sotu_documents()[::8]
    tokenizer = Tokenizer.train_wordpiece((text for _, text in documents), 3000, lowercase=False)
    folder = tmp_path_factory.mktemp("pairs") / "speeches"
    build(documents, folder, tokenizer=tokenizer, validation_share=0.05)
    return Corpus(folder)


def pairs(corpus: Corpus, sequence: int, **config) -> SentencePairs:
    return SentencePairs(
        corpus.split("train"), DataConfig(sequence=sequence, **config), MaskingVocabulary.of(corpus.tokenizer)
    )


def draw(objective: SentencePairs, count: int = SAMPLES) -> list[Sample]:
    """Samples spread evenly over the split in order, so the two halves are of different text."""
    return [objective.sample(i * objective.samples // count, derive_key(3, i)) for i in range(count)]


def segments(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    cut = int(sample.segments.argmax())
    return sample.tokens[1 : cut - 1], sample.tokens[cut:-1]


def surface_features(samples: list[Sample], corpus: Corpus, vocabulary: MaskingVocabulary) -> dict[str, np.ndarray]:
    """Possible shortcuts: marks and capitals at the segments' four ends, their lengths, and the cut."""
    tokenizer = corpus.tokenizer
    capital_V = np.array([(tokenizer.token(i) or "")[:1].isupper() for i in range(tokenizer.vocab_size)])
    features: dict[str, np.ndarray] = {}
    halves = [segments(sample) for sample in samples]
    for name, segment in (("A", [a for a, _ in halves]), ("B", [b for _, b in halves])):
        first, last = (np.array([one[at] for one in segment]) for at in (0, -1))
        features |= {
            f"{name} ends a sentence": vocabulary.ends_V[last],
            f"{name} ends with a quote": vocabulary.closes_V[last],
            f"{name} begins with a capital": capital_V[first],
            f"{name} begins within a word": vocabulary.continues_V[first],
            f"{name} begins with a mark": vocabulary.ends_V[first] | vocabulary.closes_V[first],
            f"tokens of {name}": np.array([len(one) for one in segment]),
        }
    for what in list(features):
        if what.startswith("A ") or what.endswith(" A"):
            features[f"{what}, less B's"] = features[what].astype(int) - features[what.replace("A", "B")].astype(int)
    lengths = [features[f"tokens of {name}"] for name in "AB"]
    return features | {"position of the cut": lengths[0] / sum(lengths), "tokens": sum(lengths)}


def best_rule(feature: np.ndarray, order: np.ndarray) -> float:
    """The held-out accuracy of the threshold and direction that fit the other half best."""
    train, held_out = slice(len(order) // 2), slice(len(order) // 2, None)
    correct = [(((feature[train] > bound) == order[train]).mean(), bound) for bound in np.unique(feature[train])]
    bound, above = max(((max(share, 1 - share), bound, share >= 0.5) for share, bound in correct))[1:]
    return float(((feature > bound) == (order if above else ~order))[held_out].mean())


def classifier(features_NF: np.ndarray, order: np.ndarray) -> float:
    """The held-out accuracy of a small network on all features together."""
    torch.manual_seed(0)
    x_NF = torch.tensor(features_NF, dtype=torch.float32)
    x_NF = (x_NF - x_NF.mean(0)) / x_NF.std(0).clamp(min=1e-3)
    y_N, half = torch.tensor(order, dtype=torch.float32), len(order) // 2
    net = torch.nn.Sequential(torch.nn.Linear(x_NF.shape[1], 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for _ in range(120):
        loss = torch.nn.functional.binary_cross_entropy_with_logits(net(x_NF[:half])[:, 0], y_N[:half])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(((net(x_NF[half:])[:, 0] > 0) == (y_N[half:] > 0)).float().mean())


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [32, 128, 512])
def test_no_surface_feature_reveals_the_order(speeches: Corpus, sequence: int) -> None:
    vocabulary, objective = MaskingVocabulary.of(speeches.tokenizer), pairs(speeches, sequence)
    samples = draw(objective)
    order = np.array([sample.order for sample in samples]) == 1
    assert abs(order.mean() - 0.5) < 0.03

    features = surface_features(samples, speeches, vocabulary)
    for what, feature in features.items():
        assert best_rule(feature, order) < 0.55, what
    decided = features["A ends a sentence, less B's"] != 0  # a rule that was once right in 97% of samples
    correct = (features["A ends a sentence, less B's"][decided] < 0) == order[decided]
    assert abs(correct.mean() - 0.5) < 0.05 + 2 / len(correct) ** 0.5

    ends = np.array([[half[at] for half in segments(sample) for at in (0, -1)] for sample in samples])
    frequent = np.bincount(ends.flatten()).argsort()[-BOUNDARY_TOKENS:]
    named = (ends[:, :, None] == frequent).reshape(len(samples), -1)
    assert classifier(np.column_stack([*features.values(), named]), order) < 0.55


def test_segments_are_whole_sentences(speeches: Corpus) -> None:
    """Segments are whole sentences, or whole words where one or two sentences exceed a sample."""
    vocabulary, split, objective = (
        MaskingVocabulary.of(speeches.tokenizer),
        speeches.split("train"),
        pairs(speeches, 256),
    )
    stream, ends = split.read(0, split.tokens), split.document_ends(0, split.tokens)
    starts = {0, *ends.tolist(), *sentence_starts(stream, vocabulary).tolist(), *(ends - 1).tolist()}
    text = stream.astype(np.int32).tobytes()
    whole = 0
    for sample in draw(objective, 300):
        first, second = segments(sample)[:: -1 if sample.order else 1]
        assert not vocabulary.continues_V[first[0]] and not vocabulary.continues_V[second[0]]
        at = text.find(np.concatenate([first, second]).astype(np.int32).tobytes())
        bounds = {at // 4, at // 4 + len(first), at // 4 + len(first) + len(second)}
        whole += at >= 0 and bounds <= starts
        assert len(sample.tokens) <= 256
    assert whole > 0.9 * 300


def test_segments_that_just_fit_are_not_truncated(speeches: Corpus) -> None:
    """Also where a segment begins within a word, as in the middle of a word longer than a sample."""
    objective, vocabulary = pairs(speeches, 64), MaskingVocabulary.of(speeches.tokenizer)
    within, begins = (np.flatnonzero(vocabulary.continues_V == inside)[-1] for inside in (True, False))
    first, second = np.array([within] * 10 + [begins] * 20), np.full(31, begins)
    kept = objective._truncate(first, second, np.array([0.9, 0.9]))
    assert len(first) + len(second) == 64 - 3
    assert [half.tolist() for half in kept] == [first.tolist(), second.tolist()]


@pytest.mark.slow
def test_short_sequences_have_their_probability(speeches: Corpus) -> None:
    lengths = {
        share: np.array([len(one.tokens) for one in draw(pairs(speeches, 256, short_seq_prob=share), 1000)])
        for share in (0, 0.1, 1)
    }
    below = {share: (lengths_N < 128).mean() for share, lengths_N in lengths.items()}
    assert below[0] < 0.02 and 0.35 < below[1] < 0.65
    assert below[0.1] == pytest.approx(0.1 * below[1] + 0.9 * below[0], abs=0.03)


def test_a_sample_reads_at_most_five_times_its_length(speeches: Corpus, monkeypatch) -> None:
    """Finding a sample's sentences does not read its whole document."""
    objective, split, sizes = pairs(speeches, 64), speeches.split("train"), []
    read = split.read
    monkeypatch.setattr(split, "read", lambda start, stop: sizes.append(stop - start) or read(start, stop))
    draw(objective, 100)
    assert len(sizes) == 100 and max(sizes) <= 5 * 64 < max(np.diff(split.document_ends(0, split.tokens)))


def test_sentences_end_at_closing_punctuation(speeches: Corpus) -> None:
    tokenizer, vocabulary = speeches.tokenizer, MaskingVocabulary.of(speeches.tokenizer)
    sentences = [
        "Mr. Smith paid 3.5 dollars to the U. S. Treasury.",
        "(Was it so?)",
        'He said "the second of May."',
        "No!",
        "and no more",
    ]
    ids = [tokenizer.encode(one, special=False) for one in sentences]
    starts = np.cumsum([len(one) for one in ids])[:-1]
    assert sentence_starts(np.concatenate(ids), vocabulary).tolist() == starts.tolist()

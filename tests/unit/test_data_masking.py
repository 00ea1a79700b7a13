"""BERT masks and pairs: whole words, BERT's shares, independent of ranks, batches and resumes."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config import DataConfig
from colonnade.data import Corpus, Loader, MaskingVocabulary, SentencePairs, Tokenizer, build
from colonnade.data.bert_samples import derive_key, mask_budget, mask_tokens, uniform_floats, word_spans
from colonnade.data.train_tokenizer import CLS, MASK, SEP
from colonnade.errors import ConfigError, DataError
from colonnade.model import IGNORE
from tests import tokens

S = 32
TEXT = "colonnade columns bear the weight of a long entablature . unbearable weights ! extraordinarily so ?"
WORDS = TEXT.split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    """Documents of one to a few hundred words, some of several pieces each."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    rng = np.random.default_rng(0)
    documents = [("", " ".join(rng.choice(WORDS, int(n)))) for n in [1, 2, 3, 30, 31, 90, *rng.integers(1, 300, 30)]]
    build(documents, folder, wordpiece=True, vocab_size=256, validation_share=0.2)
    return Corpus(folder)


@pytest.fixture(scope="module")
def vocabulary(corpus: Corpus) -> MaskingVocabulary:
    return MaskingVocabulary.of(corpus.tokenizer)


def pairs(corpus: Corpus, **config) -> SentencePairs:
    return SentencePairs(
        corpus.split("train"), DataConfig(sequence=S, **config), MaskingVocabulary.of(corpus.tokenizer)
    )


def loader(corpus: Corpus, batch: int, micro: int, rank: int = 0, ranks: int = 1, **config) -> Loader:
    objective = pairs(corpus, **config)
    return Loader(corpus.split("train"), DataConfig(sequence=S, **config), batch, micro, rank, ranks, objective)


def read(batches, name: str) -> list[list[int]]:
    """A field of each sample, without padding."""
    results = []
    for batch in batches:
        value, count = getattr(batch, name), len(batch.first_R)
        ends = batch.cu_seqlens.tolist()
        results += [
            [int(value[i])] if name == "orders_R" else value[ends[i] : ends[i + 1]].tolist() for i in range(count)
        ]
    return results


# -- the vocabulary ------------------------------------------------------------------------------------------------


def test_a_trained_vocabulary_begins_with_berts_control_tokens(tmp_path) -> None:
    tokenizer = Tokenizer.train_wordpiece([" ".join(WORDS) * 5], 300)
    tokenizer.save(tmp_path)
    for one in (tokenizer, Tokenizer.from_file(tmp_path)):
        assert [one.token(i) for i in range(5)] == ["[PAD]", "[UNK]", CLS, SEP, MASK]
        ids = one.encode("Unbearable Wéights!")
        assert (ids[0], ids[-1], one.bos_id, one.eos_ids) == (2, 3, 2, (3,))
        assert one.decode(ids) == "unbearable weights!"
        ids, segments = one.encode_pair("the weight", "so")
        assert segments == [int(at > ids.index(3)) for at in range(len(ids))]


def test_a_vocabulary_too_small_and_a_tokenizer_without_masks_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="WordPiece vocabulary of 100 is too small"):
        Tokenizer.train_wordpiece([""], 100)
    with pytest.raises(DataError, match=r"no \[CLS\], \[MASK\], \[SEP\], which masking needs; .*--wordpiece"):
        MaskingVocabulary.of(tokens.byte_level())
    with pytest.raises(ConfigError, match="remove one of them"):
        build([("", "a")], tmp_path / "c", tokenizer=tokens.byte_level(), wordpiece=True)


# -- masks ---------------------------------------------------------------------------------------------------------


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], int]:
    """Words by their number of pieces (0 stands for a control token), and a key."""
    return draw(st.lists(st.integers(0, 4), min_size=1, max_size=60)), draw(st.integers(0, 2**64 - 1))


TOY = MaskingVocabulary(
    cls=0, sep=1, mask=2,
    continues_V=np.arange(20) >= 10, special_V=np.arange(20) < 3, ordinary=np.arange(3, 20),
    **dict.fromkeys(("ends_V", "stops_V", "closes_V", "abbreviates_V", "digits_V"), np.zeros(20, bool)),
)  # fmt: skip


@given(sequences(), st.floats(0.01, 0.9), st.integers(1, 6))
def test_whole_words_are_masked_within_the_budget(drawn, share: float, longest: int) -> None:
    sizes, key = drawn
    # A word of n pieces is a token of 3..9 and n - 1 continuations; size 0 is a [SEP].
    tokens_S = np.array(
        [t for i, n in enumerate(sizes) for t in ([1] if n == 0 else [3 + i % 7, *[10 + i % 10] * (n - 1)])]
    )
    masked, chosen = mask_tokens(tokens_S, TOY, key, share=share, longest=longest)
    is_chosen = np.zeros(len(tokens_S), bool)
    is_chosen[chosen] = True
    assert not is_chosen[tokens_S < 3].any(), "control tokens are never chosen"
    assert (masked[~is_chosen] == tokens_S[~is_chosen]).all(), "tokens that are not chosen stay"
    ordinary = int((tokens_S >= 3).sum())
    assert len(chosen) <= mask_budget(ordinary, share)
    at = 0
    for n in sizes:
        assert n == 0 or len(set(is_chosen[at : at + n].tolist())) == 1, "all pieces of a word are chosen, or none"
        at += max(n, 1)
    if ordinary and max(sizes) <= 1:
        assert len(chosen) == mask_budget(ordinary, share), "words of one piece fill the budget"
    again = mask_tokens(tokens_S, TOY, key, share=share, longest=longest)
    assert (again[0] == masked).all() and (again[1] == chosen).all()


def test_shares_and_run_lengths_are_those_of_the_paper(corpus: Corpus) -> None:
    """15% of the tokens in runs: 80% masked, 10% replaced, 10% unchanged; lengths 1, 2, 3 weighted 1/n."""
    tokens_S = np.tile(np.arange(3, 10), 40)  # one-piece words
    outcomes, lengths, total_chosen = Counter(), Counter(), 0
    rounds = 400
    for key in range(rounds):
        masked, chosen = mask_tokens(tokens_S, TOY, derive_key(key))
        total_chosen += len(chosen)
        for run in np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1):
            lengths[len(run)] += 1
        for t, m in zip(tokens_S[chosen], masked[chosen], strict=True):
            outcomes["mask" if m == TOY.mask else "unchanged" if m == t else "other"] += 1
    assert total_chosen == rounds * mask_budget(len(tokens_S), 0.15)
    share = {outcome: n / total_chosen for outcome, n in outcomes.items()}
    assert share["mask"] == pytest.approx(0.8, abs=0.02)
    assert share["other"] == pytest.approx(0.1 * 16 / 17, abs=0.015), "a random token may equal the original"
    drawn = np.searchsorted(np.array([6, 9]) / 11, uniform_floats(7, 100_000), side="right") + 1
    assert Counter(drawn.tolist())[2] / 100_000 == pytest.approx(3 / 11, abs=0.01)
    # Adjacent runs merge into longer ones, so only the order of the frequencies is certain.
    assert lengths[1] > lengths[2] > lengths[3] > lengths[4]


def test_longest_1_masks_single_words() -> None:
    tokens_S = np.tile(np.arange(3, 10), 40)
    runs = Counter()
    for key in range(100):
        _, chosen = mask_tokens(tokens_S, TOY, key, share=0.02, longest=1)
        for run in np.split(chosen, np.flatnonzero(np.diff(chosen) != 1) + 1):
            runs[len(run)] += 1
    assert runs[1] > 0.9 * sum(runs.values())


def test_words_end_at_control_tokens_and_at_the_next_word() -> None:
    tokens_S = np.array([0, 3, 10, 11, 4, 1, 12, 13, 5, 1])
    starts, stops, run = word_spans(tokens_S, TOY)
    assert [(int(a), int(b)) for a, b in zip(starts, stops, strict=True)] == [(1, 4), (4, 5), (6, 8), (8, 9)]
    assert run[0] == run[1] != run[2] == run[3]


def test_hashed_floats_are_uniform_and_prefixes_agree() -> None:
    many = uniform_floats(derive_key(1, 2), 100_000)
    assert many.min() >= 0 and many.max() < 1
    counts = np.bincount((many * 20).astype(int), minlength=20)
    assert ((counts - 5000) ** 2 / 5000).sum() < 43.8, "0.1% quantile of chi squared with 19 degrees of freedom"
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.01
    assert (uniform_floats(derive_key(1, 2), 10) == many[:10]).all()
    assert derive_key(1, 2) != derive_key(2, 1) != derive_key(1, 3)


# -- pairs ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_sample_is_two_adjacent_segments_of_one_document(corpus: Corpus, vocabulary: MaskingVocabulary) -> None:
    objective, split = pairs(corpus), corpus.split("train")
    documents = [split.document(i)[:-1] for i in range(split.documents)]
    seen = [np.zeros(len(document), bool) for document in documents]
    owners = [
        i for i, document in enumerate(documents) if len(document) >= 2 for _ in range(-(-len(document) // (S - 3)))
    ]
    assert objective.samples == len(owners)
    orders = Counter()
    for drawn in range(40 * len(owners)):  # forty epochs
        owner = owners[drawn % len(owners)]
        tokens_S, segments, order = objective.sample(drawn % len(owners), derive_key(5, drawn))
        assert len(tokens_S) <= min(S, len(documents[owner]) + 3)
        one, two = np.flatnonzero(tokens_S == vocabulary.sep)
        assert tokens_S[0] == vocabulary.cls and two == len(tokens_S) - 1 and 1 < one < two
        assert segments.tolist() == [0] * (one + 1) + [1] * (two - one)
        first, second = tokens_S[1:one], tokens_S[one + 1 : two]
        window = np.concatenate([second, first] if order else [first, second])
        text, neighbours = documents[owner].tobytes(), documents[owner].tobytes().find(window.tobytes()) >= 0
        assert neighbours or len(window) >= S - 8, (
            "only truncated segments may be apart, and they nearly fill the sample"
        )
        for segment in [window] if neighbours else [first, second]:
            at = text.find(segment.tobytes()) // segment.itemsize
            assert at >= 0
            seen[owner][at : at + len(segment)] = True
        assert not vocabulary.continues_V[first[0]] and not vocabulary.continues_V[second[0]], (
            "segments begin with a word"
        )
        orders[order] += 1
    assert all(one.all() for one in seen if len(one) >= 2), "every token of every document must be in some sample"
    assert abs(orders[0] - orders[1]) < 4 * sum(orders.values()) ** 0.5


def test_a_batch_marks_what_was_masked(corpus: Corpus, vocabulary: MaskingVocabulary) -> None:
    objective = pairs(corpus)
    samples = np.arange(objective.samples)
    batch = objective.pack(samples, samples + 1000)
    T = len(batch.tokens_T)
    lengths = np.diff(batch.cu_seqlens.numpy())
    lengths = lengths[lengths > 0]
    assert lengths.sum() == T == S * len(samples), "every batch has the same number of tokens"
    assert not batch.equal and batch.longest == S == lengths.max()
    used = int(batch.cu_seqlens[len(samples)])
    assert used < T and (batch.targets_T[used:] == IGNORE).all(), "padding has no targets"
    assert batch.first_R.tolist() == [0, *np.cumsum(lengths)[: len(samples) - 1]]
    assert (batch.tokens_T[batch.first_R] == vocabulary.cls).all()
    assert batch.positions_T.tolist() == [i for n in lengths for i in range(n)]
    with_target = (batch.targets_T != IGNORE).nonzero()[:, 0]
    named = batch.predicted_R[batch.targets_T[batch.predicted_R] != IGNORE]
    assert sorted(named.tolist()) == with_target.tolist(), "each row with a target appears once"
    changed = (batch.tokens_T != batch.targets_T) & (batch.targets_T != IGNORE)
    assert (batch.tokens_T[changed] == vocabulary.mask).float().mean() > 0.7
    for i, first in enumerate(batch.first_R.tolist()):
        alone = objective.pack([i], [i + 1000])
        here = slice(first, first + int(lengths[i]))
        for name in ("tokens_T", "targets_T", "segments_T"):
            assert torch.equal(getattr(alone, name)[: lengths[i]], getattr(batch, name)[here]), (
                "a sample does not depend on the batch"
            )


@pytest.mark.slow
@given(st.integers(0, 500), st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([1, 2, 5, 12]))
def test_masks_do_not_depend_on_ranks_or_resumes(corpus: Corpus, seen: int, ranks: int, micro: int) -> None:
    whole = loader(corpus, 12, 12).at(seen)
    shares = [loader(corpus, 12, micro, rank, ranks).at(seen) for rank in range(ranks)]
    parts = [batch for together in zip(*shares, strict=True) for batch in together]
    steps = [batch for first in (seen, seen + 6) for batch in loader(corpus, 6, 3).at(first)]
    for name in ("tokens_T", "targets_T", "segments_T", "positions_T", "orders_R"):
        assert read(parts, name) == read(whole, name) == read(steps, name)


def test_masks_change_with_epoch_and_seed_but_not_in_validation(corpus: Corpus) -> None:
    one = loader(corpus, 4, 4)
    n = one.samples
    objective = pairs(corpus)
    first, second = (objective.pack([3], [number]) for number in (3, 3 + n))
    assert first.targets_T.tolist() != second.targets_T.tolist()
    other = pairs(corpus, seed=1).pack([3], [3])
    assert first.targets_T.tolist() != other.targets_T.tolist()
    sweeps = [list(loader(corpus, 4, 4).validation_batches(7)) for _ in range(2)]
    assert read(sweeps[0], "targets_T") == read(sweeps[1], "targets_T")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_validation_counts_each_sample_once(corpus: Corpus, ranks: int) -> None:
    results = [batch for rank in range(ranks) for batch in loader(corpus, 12, 2, rank, ranks).validation_batches(7)]
    alone = list(loader(corpus, 12, 7).validation_batches(7))
    count = lambda batches, name: sum(int((getattr(batch, name) != IGNORE).sum()) for batch in batches)  # noqa: E731
    assert count(results, "orders_R") == 7
    assert count(results, "targets_T") == count(alone, "targets_T")


def test_unpairable_data_is_refused(tmp_path, corpus: Corpus) -> None:
    with pytest.raises(ConfigError, match=r"data.sequence 4 is too short for a pair of segments"):
        SentencePairs(corpus.split("train"), DataConfig(sequence=4), MaskingVocabulary.of(corpus.tokenizer))
    build([("", "."), ("", "!")], tmp_path / "c", tokenizer=corpus.tokenizer, validation_share=0)
    alone = Corpus(tmp_path / "c").split("train")
    assert alone.tokens == 4, "one token and one end token each"
    with pytest.raises(DataError, match="no document of two tokens or more"):
        SentencePairs(alone, DataConfig(sequence=S), MaskingVocabulary.of(corpus.tokenizer))

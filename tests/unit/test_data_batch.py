"""Batches equal the documents token by token, are the same on any number of ranks, and start at any step."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.config import DataConfig
from colonnade.data import Batch, Corpus, Loader, build
from colonnade.data.batch import count_samples, pack
from colonnade.data.corpus import Split
from colonnade.errors import ConfigError, DataError
from colonnade.model import IGNORE
from tests import tokens

S = 16


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Split:
    """Documents of 2 to 90 tokens, in shards whose borders split documents."""
    folder = tmp_path_factory.mktemp("data") / "corpus"
    words = tokens.TEXT.split()
    documents = [("", " ".join(words[i % 9 : i % 9 + 1 + (i * 7) % 23])) for i in range(60)]
    build(documents, folder, tokenizer=tokens.byte_level(), validation_share=0, shard_tokens=97)
    return Corpus(folder).split("train")


def loader(split: Split, batch: int = 8, micro_batch: int = 8, rank: int = 0, ranks: int = 1, **config) -> Loader:
    return Loader(split, DataConfig(**{"sequence": S, **config}), batch, micro_batch, rank, ranks)


def expected(split: Split, samples: list[int], separate: bool) -> tuple[list[int], list[int], list[int], list[int]]:
    """(tokens, positions, targets, lengths of the sequences), one token at a time."""
    stream, end = split.read(0, split.tokens).tolist(), tokens.byte_level().eos_ids[0]
    sample_tokens, positions, targets, lengths = [], [], [], []
    for sample in samples:
        position = 0
        for at in range(sample * S, (sample + 1) * S):
            sample_tokens.append(stream[at])
            positions.append(position)
            position += 1
            closes = separate and stream[at] == end
            targets.append(IGNORE if closes else stream[at + 1])
            if closes or at == (sample + 1) * S - 1:
                lengths.append(position)
                position = 0
    return sample_tokens, positions, targets, lengths


def check(batch: Batch, split: Split, samples: list[int], separate: bool) -> None:
    sample_tokens, positions, targets, lengths = expected(split, samples, separate)
    assert batch.tokens_T.tolist() == sample_tokens
    assert batch.positions_T.tolist() == positions
    assert batch.targets_T.tolist() == targets
    cu = batch.cu_seqlens.tolist()
    assert [b - a for a, b in itertools.pairwise(cu)][: len(lengths)] == lengths
    assert set(cu[len(lengths) :]) == {len(sample_tokens)}
    assert batch.equal == (set(lengths) == {S})
    assert batch.longest == S
    assert {t.dtype for t in (batch.tokens_T, batch.positions_T, batch.targets_T)} == {torch.int64}
    assert batch.cu_seqlens.dtype == torch.int32


@given(st.data(), st.booleans())
def test_a_batch_equals_the_documents(split, data, separate):
    samples = data.draw(st.lists(st.integers(0, count_samples(split, S) - 1), min_size=1, max_size=6))
    check(pack(split, samples, S, separate), split, samples, separate)


def test_joined_batches_use_every_target_and_separated_ones_skip_ends(split):
    everything = range(count_samples(split, S))
    joined, separated = pack(split, everything, S, False), pack(split, everything, S, True)
    assert (joined.targets_T != IGNORE).all()
    ends = (separated.tokens_T == tokens.byte_level().eos_ids[0]).sum()
    assert (separated.targets_T == IGNORE).sum() == ends > 20
    assert joined.equal
    assert len(joined.cu_seqlens) == len(everything) + 1
    assert not separated.equal


def test_batches_have_at_most_two_shapes(split):
    batches_of_8 = loader(split)
    shapes = {len(micro.cu_seqlens) for step in range(40) for micro in batches_of_8.at(step * 8)}
    assert len(shapes) <= 2
    assert all((n - 1).bit_count() == 1 for n in shapes)


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batch", [1, 3, 8])
def test_all_ranks_together_have_the_global_batch(split, ranks, micro_batch):
    one = loader(split).at(24)[0]
    shares = [loader(split, 8, micro_batch, rank, ranks).at(24) for rank in range(ranks)]
    for name in ("tokens_T", "positions_T", "targets_T"):
        joined = torch.cat([getattr(micro, name) for together in zip(*shares, strict=True) for micro in together])
        assert torch.equal(joined, getattr(one, name))
    each = [micro for together in zip(*shares, strict=True) for micro in together]
    indices = [torch.arange(len(micro.tokens_T)) + micro.first for micro in each]
    assert torch.equal(torch.cat(indices), torch.arange(8 * S)), "a token's index in the global batch"
    assert len({tuple(len(micro.tokens_T) for micro in share) for share in shares}) == 1
    assert max(len(micro.tokens_T) for micro in shares[0]) <= micro_batch * S


def test_a_resume_neither_repeats_nor_skips_samples(split):
    """After three steps of 8, a resume with another batch size and rank count repeats and skips nothing."""
    epoch = count_samples(split, S)
    before = [loader(split).at(seen)[0] for seen in (0, 8, 16)]
    after = [loader(split, 6, 3, rank, 2).at(seen) for seen in range(24, epoch, 6) for rank in range(2)]
    rows = torch.cat([b.tokens_T for b in before] + [m.tokens_T for share in after for m in share]).view(-1, S)
    in_order = pack(split, range(epoch), S, True).tokens_T.view(-1, S)
    assert sorted(rows[:epoch].tolist()) == sorted(in_order.tolist())


def test_the_order_depends_on_the_seed_and_the_epoch(split):
    epoch = count_samples(split, S)
    orders = [loader(split, epoch, epoch, seed=seed).at(seen)[0] for seed in (0, 1) for seen in (0, epoch)]
    assert len({tuple(batch.tokens_T.tolist()) for batch in orders}) == 4
    assert len({tuple(sorted(map(tuple, batch.tokens_T.view(-1, S).tolist()))) for batch in orders}) == 1


@pytest.mark.parametrize("samples", [1, 5, 7, 12, 10_000])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_validation_is_the_same_on_any_number_of_ranks(split, samples, ranks):
    alone = list(loader(split, ranks, 4).validation_batches(samples))
    loaders = [loader(split, ranks, 4, rank, ranks, seed=rank) for rank in range(ranks)]
    shares = [list(one.validation_batches(samples)) for one in loaders]
    assert len({len(share) for share in shares}) == 1, "every rank must enter the collectives equally often"
    count = min(samples, count_samples(split, S))

    def counted(batches: list[Batch]) -> list[tuple[list[int], list[int]]]:
        rows = [(b.tokens_T.view(-1, S).tolist(), b.targets_T.view(-1, S).tolist()) for b in batches]
        pairs = [(t, y) for tokens_BS, targets_BS in rows for t, y in zip(tokens_BS, targets_BS, strict=True)]
        return [row for row in pairs if set(row[1]) != {IGNORE}]

    # In the order of a step: the first micro-batches of all ranks, then the second ones.
    assert counted([b for together in zip(*shares, strict=True) for b in together]) == counted(alone)
    assert len(counted(alone)) == count
    spread = [i * count_samples(split, S) // count for i in range(count)]
    check(pack(split, spread, S, True), split, spread, True)
    assert [row[0] for row in counted(alone)] == pack(split, spread, S, True).tokens_T.view(-1, S).tolist()


def test_to_moves_every_tensor_of_a_batch(split):
    batch = loader(split).at(0)[0]
    copy = batch.to("cpu")
    assert vars(copy).keys() == vars(batch).keys()
    assert all(torch.equal(getattr(copy, n), t) for n, t in vars(batch).items() if isinstance(t, torch.Tensor))
    assert (copy.longest, copy.equal) == (batch.longest, batch.equal)
    assert batch.to("meta").tokens_T.device.type == "meta"


def test_error_messages_contain_the_numbers(split):
    with pytest.raises(ConfigError, match="8 samples is not divisible by 3 data ranks; use a multiple, such as 9"):
        loader(split, 8, 8, 0, 3)
    too_long = split.tokens
    with pytest.raises(DataError, match=f"the train split has {split.tokens} tokens, .* needs {too_long + 1};") as it:
        loader(split, sequence=too_long)
    fits = int(str(it.value).split("data.sequence ")[1].split(" ")[0])
    assert loader(split, sequence=fits).samples == 1

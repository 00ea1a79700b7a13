"""A mask slice computed by itself equals that slice of the full mask, along any dimension, in any order."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from colonnade.kernels.dropout import AttentionDropout, recomputed_dropout
from colonnade.model import Dropout, DropoutRates, Packed
from colonnade.parallel.axis import Axis

T, D, N = 24, 10, 6
KEY = torch.tensor(-(2**61) + 12345)
X_TD = torch.randn(T, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def indices(n: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, n - 1), max_size=n)


@given(
    st.integers(0, 2**33), indices(T), st.integers(0, D), st.integers(0, D), st.integers(0, 5), st.floats(0.01, 0.99)
)
def test_slices_of_tokens_and_features(first, tokens, a, b, site, rate):
    index_T = torch.arange(first, first + T)
    start, stop = min(a, b), max(a, b)
    whole = recomputed_dropout(X_TD, KEY, index_T, site=site, rate=rate)
    part = recomputed_dropout(X_TD[tokens, start:stop], KEY, index_T[tokens], site=site, rate=rate, start=start)
    assert torch.equal(part, whole[tokens, start:stop])


@given(st.integers(0, 2**33), indices(T), indices(T), st.integers(0, N - 1), st.integers(0, N), st.floats(0.01, 0.99))
def test_slices_of_heads_queries_and_keys(first, queries, keys, head, heads, rate):
    index_T = torch.arange(first, first + T)
    whole = AttentionDropout(KEY, index_T, index_T, rate)
    heads = min(heads, N - head)
    part = whole.select(torch.tensor(queries, dtype=torch.int64), torch.tensor(keys, dtype=torch.int64))._replace(
        head=head
    )
    assert torch.equal(part.keep_mask(heads), whole.keep_mask(N)[head : head + heads][:, queries][:, :, keys])


@given(st.integers(1, 7), st.integers(0, 40), st.booleans())
def test_masks_of_all_ranks_form_the_full_mask(ranks, tokens, reverse):
    """Over an axis of any size, as sequence parallelism shards the residual stream; also in another order."""
    noise = Dropout.of(1, 2, 3, torch.arange(tokens) + 17, DropoutRates(residual=0.5))
    x = torch.ones(tokens, 8)
    whole = noise.at(2).drop(x, 1, 0.5)
    shares = [slice(*Axis("tp", ranks, rank).part(tokens)) for rank in range(ranks)]
    assert torch.equal(torch.cat([noise.rows(part).at(2).drop(x[part], 1, 0.5) for part in shares]), whole)
    order = torch.arange(tokens).flip(0) if reverse else torch.arange(tokens)
    assert torch.equal(noise.rows(order).at(2).drop(x, 1, 0.5), whole[order])


@given(st.lists(st.integers(0, 6), max_size=5))
def test_attention_mask_of_a_document_is_independent_of_packing(lengths):
    """The mask depends on the tokens, not on the stream that contains them."""
    total = sum(lengths)
    draw = torch.Generator().manual_seed(total)
    q, k, v = (torch.randn(total, 2, 4, generator=draw, dtype=torch.float64) for _ in range(3))
    noise = Dropout.of(0, 0, 1, torch.arange(total), DropoutRates(attention=0.4))
    whole = Packed.of(lengths, dropout=noise).at(0, None)(q, k, v)
    at = 0
    for length in lengths:
        rows = slice(at, at + length)
        alone = Packed.of([length], dropout=noise.rows(rows)).at(0, None)(q[rows], k[rows], v[rows])
        assert torch.equal(alone, whole[rows])
        at += length

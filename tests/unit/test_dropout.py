"""Counter-based dropout: exact masks, statistics, gradients, and memory for the backward pass."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from colonnade.kernels import dropout
from colonnade.kernels.dropout import HEADS, KEYS, AttentionDropout, HiddenDropout, keep_mask
from colonnade.kernels.registry import KERNELS, Kernel
from colonnade.model.dropout import keys

DROPOUT = [row for row in KERNELS if row.operation == "dropout" and "cpu" in row.devices]
MAX_DEVIATION = 4.5
"""Allowed deviation in standard deviations. All seeds are fixed, so a passing test stays passing."""


def key(seed: int = 0, step: int = 0, layer: int = 0) -> Tensor:
    return keys(seed, step, layer + 1)[layer]


def mask(T: int, D: int, k: Tensor | None = None, *, site: int = 1, rate: float = 0.5, start: int = 0) -> Tensor:
    return keep_mask(key() if k is None else k, torch.arange(T), start, start + D, site=site, rate=rate)


def mix_one(x: int) -> int:
    """lowbias32 in Python integers."""
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


# -- masks and gradients -----------------------------------------------------------------------------------------------


def test_each_element_follows_the_documented_hash() -> None:
    k = 0xFEDCBA9876543210
    index_T, site, rate = torch.tensor([0, 1, 2**31 + 5, 2**32 + 1, 77]), 3, 0.37
    mask_TD = keep_mask(torch.tensor(k - 2**64), index_T, 250, 270, site=site, rate=rate)
    for t, i in enumerate(index_T.tolist()):
        row = mix_one(mix_one(i % 2**32 ^ k % 2**32) ^ k >> 32)
        for c, j in enumerate(range(250, 270)):
            column = mix_one(mix_one(j) ^ site)
            signed = (mix_one(row ^ column) + 2**31) % 2**32 - 2**31
            assert bool(mask_TD[t, c]) == (signed >= round(rate * 2**32) - 2**31)


def test_attention_masks_follow_the_documented_hash() -> None:
    k = key(5, 6, 7)
    queries, ks = torch.tensor([9, 4, 100]), torch.tensor([3, 9])
    mask_NTS = AttentionDropout(k, queries, ks, 0.4, head=2).keep_mask(3)
    for n, (t, q), (s, j) in itertools.product(range(3), enumerate(queries), enumerate(ks)):
        row = dropout.lowbias32(dropout.row_hash(k, q) ^ dropout.column_hash(HEADS, torch.tensor(n + 2)))
        column = dropout.column_hash(KEYS, j)
        assert mask_NTS[n, t, s] == (dropout.lowbias32(row ^ column) >= dropout.threshold(0.4))


def test_hash_equal_to_the_threshold_is_kept() -> None:
    row_R, column_F = (torch.tensor([value], dtype=torch.int32) for value in (3, 5))
    mixed = int(dropout.lowbias32(row_R ^ column_F))
    rate = (mixed + 2**31) / 2**32
    assert dropout.threshold(rate) == mixed
    assert HiddenDropout(row_R, column_F, rate).drop(torch.ones(1, 1)).item() > 0


def _masks(k: Tensor, queries: Tensor, ks: Tensor) -> tuple[Tensor, ...]:
    pairs = AttentionDropout(k, queries, ks, 0.3, head=2)
    return (
        pairs.keep_mask(3),
        keep_mask(k, queries, 5, 24, site=3, rate=0.3),
        keep_mask(k, queries, 5, 24, site=3, rate=0.3).T.contiguous(),  # here its columns are the outer loop
        dropout.choice_hash(k, queries, 2),
        dropout.uniform(k, queries, 5, 9),
        dropout.hidden_hash(torch.arange(7))[:, None] ^ ks.to(torch.int32),
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of the compiler's own
def test_compiled_masks_are_bitwise_equal() -> None:
    """Regression: int32 products wrap in torch, but in compiled C++ they did not for the heads."""
    inputs = key(5, 6, 7), torch.arange(11) + 5, torch.arange(13) + 2
    for actual, expected in zip(torch.compile(_masks)(*inputs), _masks(*inputs), strict=True):
        assert torch.equal(actual, expected)


def test_mix_is_a_permutation() -> None:
    x = torch.randint(-(2**31), 2**31, (100_000,), generator=torch.Generator().manual_seed(0)).unique()
    mixed = dropout.lowbias32(x.int())
    assert len(mixed.unique()) == len(x)
    assert mixed.tolist()[:100] == [(mix_one(i % 2**32) + 2**31) % 2**32 - 2**31 for i in x.tolist()[:100]]


def test_keys_are_distinct_and_stable() -> None:
    actual = torch.cat([keys(seed, step, 13) for seed in (0, 1, -1, 2**40) for step in range(50)])
    assert len(actual.unique()) == 4 * 50 * 13
    assert torch.equal(keys(3, 4, 13)[:5], keys(3, 4, 5))
    # Runs started with an earlier version must resume with the same keys.
    assert keys(0, 0, 2).tolist() == GOLDEN


GOLDEN = [2558736989570252433, 3400964856525257824]


@pytest.mark.parametrize("row", DROPOUT, ids=lambda row: row.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "D"), [(7, 13), (0, 4), (3, 0), (1, 1)])
def test_values_and_gradients_follow_the_mask(row: Kernel, dtype: torch.dtype, T: int, D: int) -> None:
    x, g = torch.randn(2, T, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    index_T = torch.arange(T) * 5
    x.requires_grad_()
    y = row.run(x, key(), index_T, site=1, rate=0.25, start=100)
    y.backward(g)
    mask_TD = keep_mask(key(), index_T, 100, 100 + D, site=1, rate=0.25)
    assert torch.equal(y, torch.where(mask_TD, x * (1 / 0.75), 0.0))
    assert torch.equal(x.grad, torch.where(mask_TD, g * (1 / 0.75), 0.0))
    assert not T * D > 50 or 0 < mask_TD.sum() < mask_TD.numel()


def test_no_mask_is_saved_for_the_backward_pass() -> None:
    saved_sizes: list[int] = []
    x = torch.randn(32, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved_sizes.append(t.numel()) or t, lambda t: t):
        dropout.recomputed_dropout(x, key(), torch.arange(32), site=1, rate=0.1)
    assert sorted(saved_sizes) == [1, 32]


def test_recomputation_drops_the_same_elements() -> None:
    x = torch.randn(8, 16, dtype=torch.float64, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return dropout.recomputed_dropout(x.sin(), key(), torch.arange(8), site=1, rate=0.5).exp()

    grads = []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        x.grad = None
        run(x).sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of the compiler's own
def test_compiled_dropout_is_bitwise_equal_and_stores_no_mask() -> None:
    from torch._inductor.utils import run_and_get_code

    x, g = torch.randn(2, 33, 100, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    index_T = torch.arange(33) + 9
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()  # reset() does not clear them
    compiled = torch.compile(dropout.recomputed_dropout, fullgraph=True)

    def forward_backward(run, step: int) -> tuple[Tensor, Tensor | None]:
        x.grad = None
        y = run(x, key(0, step), index_T, site=1, rate=0.1)
        y.backward(g)
        return y.detach(), x.grad

    _, codes = run_and_get_code(forward_backward, compiled, 0)
    assert [code.count("empty_strided_cpu((33, 100)") for code in codes] == [1, 1], "y, and the gradient of x"
    for step in range(3):  # the key is a tensor, so another step does not recompile
        for ours, theirs in zip(
            forward_backward(compiled, step), forward_backward(dropout.recomputed_dropout, step), strict=True
        ):
            assert torch.equal(ours, theirs)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch._dynamo.reset()


# -- statistics --------------------------------------------------------------------------------------------------------


def z_of_mean(m: Tensor, rate: float) -> float:
    n = m.numel()
    return float((m.double().mean() - (1 - rate)) / (rate * (1 - rate) / n) ** 0.5)


def z_of_correlation(a: Tensor, b: Tensor, rate: float) -> float:
    """Sum of products of standardised elements; it has variance 1 for independent masks."""
    a, b = ((m.double() - (1 - rate)) / (rate * (1 - rate)) ** 0.5 for m in (a, b))
    return float((a * b).sum() / a.numel() ** 0.5)


@pytest.mark.parametrize("rate", [1e-3, 0.1, 0.5, 0.9])
def test_the_dropout_rate_is_met(rate: float) -> None:
    for step in range(5):
        assert abs(z_of_mean(mask(1024, 512, key(0, step), rate=rate), rate)) < MAX_DEVIATION
    assert mask(64, 64, rate=2**-40).all()
    assert mask(300, 300, rate=1 - 2**-40).sum() == 0


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_neighbouring_elements_are_independent(rate: float) -> None:
    m = mask(1024, 512, rate=rate)
    for dt, dd in itertools.product((0, 1, 2, 16, 512), (0, 1, 2, 3, 64, 256)):
        if (dt, dd) != (0, 0):
            assert abs(z_of_correlation(m[dt:, dd:], m[: 1024 - dt, : 512 - dd], rate)) < MAX_DEVIATION, (dt, dd)
    assert abs(z_of_correlation(m[1:, :-1], m[:-1, 1:], rate)) < MAX_DEVIATION


def test_masks_of_seeds_steps_layers_and_sites_are_independent() -> None:
    """Masks of small seeds, steps, layers and sites are independent, also when shifted by some tokens."""
    masks = {
        (seed, step, layer, site): mask(256, 128, key(seed, step, layer), site=site)
        for seed, step, layer, site in itertools.product((0, 1), (0, 1, 2), (0, 1, 2), (0, 1, 2))
    }
    scores = [
        z_of_correlation(a[shift:], b[: 256 - shift], 0.5)
        for a, b in itertools.combinations(masks.values(), 2)
        for shift in (0, 1, 4)
    ]
    assert max(map(abs, scores)) < 5.5  # the maximum of 4293 scores
    assert abs(torch.tensor(scores).std() - 1) < 0.05


def test_rows_and_columns_are_uncorrelated() -> None:
    rate = 0.2
    m = mask(2048, 1024, rate=rate).double()
    for dim, n in ((1, 1024), (0, 2048)):
        assert abs(m.mean(dim).var() / (rate * (1 - rate) / n) - 1) < 0.2
    z = (m - (1 - rate)) / (rate * (1 - rate)) ** 0.5
    for rows in (z[:512], z.T[:512]):
        pairs = (rows @ rows.T / rows.shape[1] ** 0.5)[torch.ones(512, 512).triu(1) == 1]
        assert abs(pairs.mean()) < 0.02
        assert abs(pairs.var() - 1) < 0.03
        assert pairs.abs().max() < 6.5  # the maximum of 130,816 pairs


def test_each_byte_of_the_hash_is_uniform() -> None:
    row, column = dropout.row_hash(key(), torch.arange(1024)), dropout.column_hash(1, torch.arange(256))
    hashes = dropout.lowbias32(row[:, None] ^ column)
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((hashes >> shift & 0xFF).flatten().long(), minlength=256).double()
        expected = hashes.numel() / 256
        assert 0.7 < ((counts - expected) ** 2 / expected).sum() / 255 < 1.3


def test_heads_queries_and_keys_are_independent() -> None:
    index_T = torch.arange(128) + 1000
    m = AttentionDropout(key(), index_T, index_T, 0.3).keep_mask(6)
    assert abs(z_of_mean(m, 0.3)) < MAX_DEVIATION
    for a, b in itertools.combinations(range(6), 2):
        assert abs(z_of_correlation(m[a], m[b], 0.3)) < MAX_DEVIATION
        assert abs(z_of_correlation(m[a], m[b].T, 0.3)) < MAX_DEVIATION
    for a in range(6):
        upper = torch.ones(128, 128).triu(1) == 1
        assert abs(z_of_correlation(m[a][upper], m[a].T[upper], 0.3)) < MAX_DEVIATION, (
            "a pair (query, key) and its transpose are independent"
        )
        assert abs(z_of_correlation(m[a][1:], m[a][:-1], 0.3)) < MAX_DEVIATION
        assert abs(z_of_correlation(m[a][:, 1:], m[a][:, :-1], 0.3)) < MAX_DEVIATION
    other = AttentionDropout(key(0, 1), index_T, index_T, 0.3).keep_mask(6)
    assert abs(z_of_correlation(m, other, 0.3)) < MAX_DEVIATION

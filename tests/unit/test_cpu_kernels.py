"""The C++ kernels of a CPU compute the same as their references, for each instruction set of this machine."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.config import ServeConfig
from colonnade.errors import ConfigError
from colonnade.kernels import norm as norm_reference
from colonnade.kernels import rotary
from colonnade.kernels.attention import cache_write
from colonnade.kernels.attention import reference as attention_reference
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.cpu import calls, kernels, library
from colonnade.kernels.linear import reference
from colonnade.kernels.linear.quantise import Quantised, can_block, dequantise, quantise, to_blocks, to_rows
from colonnade.kernels.linear.reference import Gate, NormWeights
from colonnade.model.weight_only_quant import quantisable_modules
from colonnade.serve import Engine, SamplingParams
from tests.guard_pages import guarded
from tests.serve import tiny

FORMATS = [("stored", 0), ("int8", 0), ("int4", 32), ("int4", 64), ("int4", 128)]
DTYPES = [torch.float32, torch.bfloat16]
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def instruction_sets() -> list[str]:
    try:
        best = library.best_instruction_set(Path("/proc/cpuinfo"))
    except library.BuildError:
        return []
    names = list(library.INSTRUCTION_SETS)
    return names[names.index(best) :]


@pytest.fixture(params=instruction_sets())
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    loaded = library.load_for(request.param)
    monkeypatch.setattr(library, "load", lambda: loaded)
    # Without fast integer products torch multiplies more than MAX_ROWS rows; here the library does.
    monkeypatch.setattr(kernels, "_is_fast", lambda: True)
    return request.param


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weight_of(format: str, group: int, outputs: int, inputs: int, dtype: torch.dtype, seed: int) -> Tensor | Quantised:
    w = rows(outputs, inputs, seed=seed)
    if format == "stored":
        return guarded(w.to(dtype))
    q = quantise(w, format, group or 64)
    if can_block(q):  # sizes below are such that some can and some cannot
        q = to_blocks(q)
    return q._replace(values=guarded(q.values), scales=guarded(q.scales))


def exact_linear(x: Tensor, w: Tensor | Quantised, bias: Tensor | None) -> Tensor:
    """In float64, of the rows that the kernel multiplies."""
    bias = None if bias is None else bias.double()
    if isinstance(w, Quantised):
        return reference.quantised_linear(kernels.round_inputs(x.float(), w).double(), w, bias)
    return reference.linear(x.double(), w.double(), bias)


def assert_close(got: Tensor, exact: Tensor) -> None:
    limit = LIMITS[got.dtype] * max(1.0, float(exact.abs().max()))
    assert float((got.double() - exact).abs().max()) < limit


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("format", "group"), FORMATS)
def test_products_match_the_oracle(native: str, format: str, group: int, dtype: torch.dtype) -> None:
    for seed, (T, D, F) in enumerate(((1, 64, 16), (2, 70, 37), (5, 3, 1), (16, 200, 144), (70, 92, 32), (9, 70, 9))):
        x, bias = guarded(rows(T, D, seed=seed).to(dtype)), guarded(rows(F, seed=1).to(dtype))
        w = weight_of(format, group, F, D, dtype, seed)
        run = kernels.quantised_linear if isinstance(w, Quantised) else kernels.linear
        assert_close(run(x, w), exact_linear(x, w, None))
        assert_close(run(x, w, bias), exact_linear(x, w, bias))


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("activation", [None, "silu", "gelu", "gelu_tanh", "relu"])
def test_fused_products_match_the_oracle(native: str, format: str, group: int, activation: str | None) -> None:
    for seed, (T, D, F) in enumerate(((1, 64, 48), (6, 70, 131))):
        x, gain, residual = rows(T, D, seed=seed), 1 + 0.1 * rows(D, seed=3), rows(T, F, seed=4)
        w, bias = weight_of(format, group, F, D, x.dtype, seed), rows(F, seed=6)
        gate = None
        normed = norm_reference.norm(x, gain, None, 1e-5)
        exact = exact_linear(normed, w, bias)
        if activation is not None:
            gate = Gate(weight_of(format, group, F, D, x.dtype, seed + 9), rows(F, seed=7), activation)
            act = kernels.ACTIVATIONS[activation]
            exact = act(exact_linear(normed, gate.weight, gate.bias_F)) * exact
        exact += residual
        options: dict[str, Any] = {"norm": NormWeights(gain, 1e-5), "gate": gate}
        got = kernels.fused_linear(x, w, bias, **options, residual_TF=residual)
        # A norm that differs in its last bit may round another way: one step of a group's 127.
        step = 1e-5 if format == "stored" else 2e-3
        assert float((got - exact).abs().max()) < step * float(exact.abs().max())
        in_place = kernels.fused_linear(x, w, bias, **options, residual_TF=residual, inplace=True)
        assert in_place is residual and torch.equal(in_place, got)


@pytest.mark.parametrize(("format", "group"), FORMATS)
def test_a_row_does_not_depend_on_other_rows_or_threads(native: str, format: str, group: int, threads: None) -> None:
    T, D, F = 16 if format == "stored" else 150, 200, 144
    x, gain = rows(T, D), NormWeights(rows(D, seed=3), 1e-5)
    w, gate = (weight_of(format, group, F, D, x.dtype, seed) for seed in (1, 2))
    torch.set_num_threads(1)
    together = kernels.fused_linear(x, w, norm=gain, gate=Gate(gate, None, "silu"))
    for count in (1, 2, 3, 64):
        torch.set_num_threads(count)
        for t, size in ((0, 1), (1, 4), (5, 6), (0, T)):
            part = kernels.fused_linear(x[t : t + size].clone(), w, norm=gain, gate=Gate(gate, None, "silu"))
            assert torch.equal(part, together[t : t + size])


@pytest.mark.parametrize(("format", "group"), FORMATS)
def test_pieces_of_large_weights_do_not_change_bits(native: str, format: str, group: int, threads: None) -> None:
    """Threads take pieces of a large weight as they get to them; whoever computes an output, its bits are the same."""
    T, D = 7, 1032
    x, gain = rows(T, D), NormWeights(rows(D, seed=3), 1e-5)
    for F in (1616, 1610):  # in blocks and by row
        w, gate = (weight_of(format, group, F, D, x.dtype, seed) for seed in (1, 2))
        torch.set_num_threads(1)
        together = kernels.fused_linear(x, w, norm=gain, gate=Gate(gate, None, "silu"))
        for count in (2, 3, 5):
            torch.set_num_threads(count)
            for size in (1, T):
                part = kernels.fused_linear(x[:size], w, norm=gain, gate=Gate(gate, None, "silu"))
                assert torch.equal(part, together[:size])


@pytest.mark.parametrize(("format", "group"), FORMATS[1:])
def test_blocks_are_the_same_weights_and_rows_come_back(format: str, group: int) -> None:
    for D in (64, 76, 300):
        q = quantise(rows(48, D), format, group or 64)
        blocks = to_blocks(q)
        assert torch.equal(to_rows(blocks).values, q.values) and torch.equal(to_rows(blocks).scales, q.scales)
        assert not torch.equal(blocks.values, q.values) and torch.equal(
            dequantise(blocks, torch.float32), dequantise(q, torch.float32)
        )
        x = rows(3, D)
        assert torch.equal(reference.quantised_linear(x, blocks), reference.quantised_linear(x, q))
    assert not can_block(quantise(rows(9, 64), format, group or 64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize(("format", "group"), FORMATS)
def test_values_that_are_not_finite_stay_visible(native: str, format: str, group: int, bad: float) -> None:
    x = rows(3, 72)
    x[1, 66] = bad
    y = kernels.fused_linear(x, weight_of(format, group, 16, 72, x.dtype, 0))
    assert not y[1].isfinite().any() and y[[0, 2]].isfinite().all()


def test_rows_of_zeros_give_zeros(native: str) -> None:
    for format, group in FORMATS:
        assert torch.equal(kernels.fused_linear(torch.zeros(2, 72), weight_of(format, group, 16, 72, torch.float32, 0)),
                           torch.zeros(2, 16))  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_embeddings_and_rotary_factors(native: str, dtype: torch.dtype) -> None:
    for T, D in ((1, 64), (5, 37), (3, 1)):
        x, gain, bias = (rows(*shape, seed=D).to(dtype) for shape in ((T, D), (D,), (D,)))
        for b in (None, bias):
            exact = norm_reference.norm(x.double(), gain.double(), None if b is None else b.double(), 1e-5)
            assert_close(kernels.norm(guarded(x), gain, b, 1e-5), exact)
    table, tokens = rows(50, 37).to(dtype), torch.tensor([0, 49, 3, 3])
    assert torch.equal(kernels.embedding(tokens, guarded(table), dtype), table[tokens])
    residual = rows(4, 37, seed=2).to(dtype)
    assert torch.equal(kernels.embedding(tokens, table, dtype, residual_TD=residual), residual + table[tokens])
    q = quantise(rows(64, 36), "int8")
    for each in (q, to_blocks(q)):
        assert_close(kernels.embedding(tokens, each, dtype), reference.embedding(tokens, q, torch.float64))
    positions, theta = torch.tensor([0, 1, 4000]), 1 / 10000 ** (torch.arange(8) / 8)
    for got, exact in zip(kernels.rotation(positions, theta, 1.5, dtype),
                          rotary.rotation(positions, theta, 1.5, torch.float32), strict=True):  # fmt: skip
        assert got.shape == exact.shape
        assert_close(got, exact.double())


def random_batch(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """Requests with few new tokens each, pages in any order, some of them empty or longer than a task's keys."""
    pick = random.Random(seed)
    page, K, group, H = pick.choice([1, 5, 16]), pick.choice([1, 2, 3]), pick.choice([1, 3]), pick.choice([8, 20, 64])
    new = [pick.choice([1, 1, 1, 3]) for _ in range(pick.choice([1, 3, 4]))]
    lengths = [n + pick.choice([0, 7, 30, 255, 700]) for n in new]
    if pick.random() < 0.3:
        new, lengths = [*new, 0], [*lengths, 0]
    counts = [-(-length // page) for length in lengths]
    numbers = list(range(sum(counts) + 3))
    pick.shuffle(numbers)
    widest, tables, at = max(counts) + 1, [], 0
    for count in counts:
        tables.append(numbers[at : at + count] + [numbers[-1]] * (widest - count))
        at += count
    table = PageTable(
        torch.tensor(tables, dtype=torch.int32),
        torch.tensor([0, *new]).cumsum(0).int(),
        torch.tensor(lengths, dtype=torch.int32),
        page, max(new), max(lengths),
    )  # fmt: skip
    T, P = sum(new), len(numbers)
    k, v = (rows(P, page, K, H, seed=seed + i).to(dtype) for i in (1, 2))
    return {"q": rows(T, K * group, H, seed=seed).to(dtype), "k": k, "v": v, "table": table,
            "window": pick.choice([None, None, 1, 10, 300])}  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paged_attention_matches_the_reference(native: str, dtype: torch.dtype, threads: None) -> None:
    for seed in range(20):
        case = random_batch(seed, dtype)
        q, k, v, table, window = case.values()
        exact = attention_reference.paged(q.double(), k.double(), v.double(), table, window=window)
        outputs = []
        for count in (1, 3):
            torch.set_num_threads(count)
            outputs.append(kernels.paged(guarded(q), guarded(k), guarded(v), table, window=window))
        assert_close(outputs[0], exact)
        assert torch.equal(*outputs)
        new, lengths = table.host_lengths
        t = 0
        for r, n in enumerate(new):  # each row alone, as the only token of its request
            for i in range(n):
                alone = PageTable(
                    table.pages_RP[r : r + 1], torch.tensor([0, 1], dtype=torch.int32),
                    torch.tensor([lengths[r] - n + 1 + i], dtype=torch.int32), table.page_tokens, 1, lengths[r],
                )  # fmt: skip
                assert torch.equal(kernels.paged(q[t : t + 1], k, v, alone, window=window)[0], outputs[0][t])
                t += 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_that_are_read_together_do_not_change_bits(native: str, dtype: torch.dtype, threads: None) -> None:
    """Five (bfloat16: ten) heads of 200 fit the bytes of a key that are read at once; threads cut within a group."""
    K, group, H, page, length = 11, 3, 200, 16, 300
    pages = -(-length // page)
    table = PageTable(
        torch.arange(pages, dtype=torch.int32)[None], torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32), page, 1, length,
    )  # fmt: skip
    q = rows(1, K * group, H).to(dtype)
    k, v = (rows(pages, page, K, H, seed=i).to(dtype) for i in (1, 2))
    assert_close(
        whole := kernels.paged(q, guarded(k), guarded(v), table),
        attention_reference.paged(q.double(), k.double(), v.double(), table),
    )
    for count in (2, 5, 16, 64):
        torch.set_num_threads(count)
        assert torch.equal(kernels.paged(q, k, v, table), whole)
    for i in range(K):
        own = slice(i * group, (i + 1) * group)
        one = kernels.paged(
            q[:, own].contiguous(), k[:, :, i : i + 1].contiguous(), v[:, :, i : i + 1].contiguous(), table
        )
        assert torch.equal(one, whole[:, own])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_and_cache_write_match_the_reference(native: str, dtype: torch.dtype) -> None:
    for seed, (T, K, group, H) in enumerate(((1, 1, 1, 2), (4, 3, 2, 10), (6, 2, 4, 64))):
        qkv, slots = rows(T, K * (group + 2) * H, seed=seed).to(dtype), torch.randperm(5 * 4)[:T]
        pools = [rows(5, 4, K, H, seed=9).to(dtype) for _ in range(2)]
        turn = rotary.rotation(torch.arange(T) * 7, 1 / 100 ** (torch.arange(H // 2) / H), 1.0, dtype)
        gains = NormWeights(rows(H, seed=1).to(dtype), 1e-5), NormWeights(rows(H, seed=2).to(dtype), 1e-5)
        for norms in (None, gains):
            for rotation in (None, turn):
                ours = [x.clone() for x in pools]
                exact = [x.double() for x in pools]
                q = kernels.rope_and_kv_write(guarded(qkv), *ours, slots, turn=rotation, norms=norms)
                wide = norms and tuple(NormWeights(each.weight_D.double(), each.eps) for each in norms)
                by = rotation and rotary.Rotation(rotation.own.double(), rotation.other.double())
                exact_q = cache_write.rope_and_kv_write(qkv.double(), *exact, slots, turn=by, norms=wide)
                for got, want in zip((q, *ours), (exact_q, *exact), strict=True):
                    assert_close(got, want)


def test_bad_inputs_are_refused_before_the_library(native: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise AssertionError("the library was called")

    monkeypatch.setattr(calls, "run", unreachable)
    x, w, q8, q4 = rows(2, 70), rows(9, 70), quantise(rows(9, 70), "int8"), quantise(rows(9, 70), "int4", 32)
    pool, slots, qkv = rows(3, 4, 2, 8), torch.tensor([0, 1]), rows(2, 2 * 3 * 8)
    bad: list[tuple[str, Any]] = [
        ("rows of 70 inputs for a weight of 71", lambda: kernels.fused_linear(x, rows(9, 71))),
        ("a bias", lambda: kernels.fused_linear(x, w, rows(8))),
        ("a bias", lambda: kernels.fused_linear(x, w, rows(9).bfloat16())),
        ("a residual", lambda: kernels.fused_linear(x, w, residual_TF=rows(2, 8))),
        ("a norm", lambda: kernels.fused_linear(x, w, norm=NormWeights(rows(69), 1e-5))),
        ("a gate of 8 outputs", lambda: kernels.fused_linear(x, w, gate=Gate(rows(8, 70), None, "silu"))),
        ("int8 weights", lambda: kernels.fused_linear(x, q8._replace(scales=q8.scales[:8]))),
        ("int8 weights", lambda: kernels.fused_linear(x, q8._replace(values=q8.values[:, :60]))),
        ("int4 weights", lambda: kernels.fused_linear(x, q4._replace(values=q4.values[:, :-1]))),
        ("int4 weights", lambda: kernels.fused_linear(x, q4._replace(scales=q4.scales.half()))),
        ("a projection of 48", lambda: kernels.rope_and_kv_write(qkv, rows(3, 4, 2, 10), rows(3, 4, 2, 10), slots)),
        ("a cache of 2 × 0", lambda: kernels.rope_and_kv_write(qkv, pool[..., :0], pool[..., :0], slots)),
        ("a cache of 0 × 8", lambda: kernels.rope_and_kv_write(qkv, pool[:, :, :0], pool[:, :, :0], slots)),
        ("slots", lambda: kernels.rope_and_kv_write(qkv, pool, pool, slots[:1])),
        ("slots", lambda: kernels.rope_and_kv_write(qkv, pool, pool, slots.int())),
        ("rotary factors", lambda: kernels.rope_and_kv_write(qkv, pool, pool, slots, turn=rotary.Rotation(x, x))),
    ]
    for message, run in bad:
        with pytest.raises(ConfigError, match=message):
            run()
    case = random_batch(0, torch.float32)
    q, k, v, table, _ = case.values()
    for message, run in (
        ("queries for a cache", lambda: kernels.paged(q[..., :-1], k, v, table)),
        ("queries for a cache", lambda: kernels.paged(q[..., :0], k[..., :0], v[..., :0], table)),
        ("queries for a cache", lambda: kernels.paged(q[:, :0], k[:, :, :0], v[:, :, :0], table)),
        ("pages of", lambda: kernels.paged(q, k[:, :-1].contiguous(), v[:, :-1].contiguous(), table)),
    ):
        with pytest.raises(ConfigError, match=message):
            run()


def test_values_that_change_between_steps_are_checked_by_the_library(native: str) -> None:
    with pytest.raises(ConfigError, match="a token is not in the vocabulary"):
        kernels.embedding(torch.tensor([0, 50]), rows(50, 8), torch.float32)
    pool, qkv = torch.zeros(3, 4, 2, 8), rows(2, 2 * 3 * 8)
    for bad in (-1, 12):
        with pytest.raises(ConfigError, match="a slot is not in the cache"):
            kernels.rope_and_kv_write(qkv, pool, pool.clone(), torch.tensor([0, bad]))
    q, k, v, table, _ = random_batch(0, torch.float32).values()
    for name, value, message in (("pages_RP", len(k), "a page"), ("pages_RP", -1, "a page"),
                                 ("lengths_R", 10**6, "longer"), ("lengths_R", -5, "longer")):  # fmt: skip
        broken = getattr(table, name).clone()
        broken.view(-1)[0] = value
        with pytest.raises(ConfigError, match=message):
            kernels.paged(q, k, v, replace(table, **{name: broken}))


@pytest.mark.parametrize(("format", "group"), FORMATS)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_products_without_a_gate_match_the_oracle(native: str, format: str, group: int, activation: str) -> None:
    """act(W LayerNorm(x) + b) + r, as in GPT-2."""
    for seed, (T, D, F) in enumerate(((1, 64, 48), (6, 70, 131))):
        x, gain, shift, residual = rows(T, D, seed=seed), 1 + 0.1 * rows(D, seed=3), rows(D, seed=5), rows(T, F, seed=4)
        w, bias = weight_of(format, group, F, D, x.dtype, seed), rows(F, seed=6)
        exact = exact_linear(norm_reference.norm(x, gain, shift, 1e-5), w, bias)
        exact = kernels.ACTIVATIONS[activation](exact) + residual
        options: dict[str, Any] = {"norm": NormWeights(gain, 1e-5, shift), "activation": activation}
        got = kernels.fused_linear(x, w, bias, **options, residual_TF=residual)
        step = 1e-5 if format == "stored" else 2e-3
        assert float((got - exact).abs().max()) < step * float(exact.abs().max())
        plain = reference.fused_linear(x, w, bias, **options, residual_TF=residual)
        if format == "stored":
            assert float((got - plain).abs().max()) < 1e-5 * float(exact.abs().max())


@pytest.mark.parametrize("weights", ["stored", "int8", "int4"])
def test_serving_with_the_kernels_gives_the_same_tokens(native: str, weights: str, monkeypatch) -> None:
    """Rows of a batch get the bits that they get alone."""
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    prompts = [[1, 2, 3], [50, 7], [9, *range(20, 23)], [4] * 5]

    def outputs(most: int) -> list[Any]:
        model = tiny.model(width=64, ffn_width=96).float()
        if weights != "stored":
            for layer in quantisable_modules(model).values():
                layer.quantise(layer.weight.detach(), weights, 32, lambda x: x)
        engine = Engine(model, tiny.tokenizer(), ServeConfig(pages=60, page_tokens=4, max_requests=most))
        return engine.generate(prompts, params)

    together = outputs(4)
    assert together == outputs(1)
    if weights == "stored":
        monkeypatch.setattr(library, "load", lambda: None)
        assert together == outputs(4)

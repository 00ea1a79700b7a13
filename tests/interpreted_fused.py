"""Skinny GEMMs with fused prologue and epilogue, and RoPE with KV-cache write, by Triton's interpreter.

``TRITON_INTERPRET=1 python -m tests.interpreted_fused``; see interpreted.py. Tiles are small, so that inputs and
outputs end within a tile, there are more blocks than programs, and inputs take one step or several.
"""

import itertools
import warnings

import torch
from torch import Tensor

from colonnade.kernels import rotary as rotary_reference
from colonnade.kernels import sampling as sample_reference
from colonnade.kernels import triton_rotary, triton_sampled_tokens, triton_sampling
from colonnade.kernels.attention import cache_write, triton_cache_write
from colonnade.kernels.linear import reference, skinny_gemm, skinny_gemm_tiles
from colonnade.kernels.linear.quantise import quantise
from colonnade.kernels.linear.reference import Gate, Matrix, NormWeights
from colonnade.kernels.linear.skinny_gemm_tiles import SkinnyTiles
from colonnade.kernels.rotary import Rotation
from tests.guard_pages import guarded
from tests.sample_cases import sample_cases

DRAW = torch.Generator().manual_seed(0)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=DRAW)


def as_float64(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.double()


def case(
    kind: str, shape: tuple[int, int], rows: int, tiles: SkinnyTiles, *, parts: str, dtype: torch.dtype = torch.float32
) -> None:
    (F, D), made = shape, [(draw(*shape) / shape[1] ** 0.5).to(dtype) for _ in range(2)]
    weights: list[Matrix] = [w if kind == "plain" else quantise(w, kind, 32 if F % 2 else 64) for w in made]
    exact: list[Matrix] = [w.double() if isinstance(w, Tensor) else w for w in weights]
    biases = [draw(F).to(dtype) if "b" in parts else None for _ in range(2)]
    x, gain = draw(rows, 2 * D).to(dtype)[:, :D], draw(D).to(dtype)
    more = draw(rows, F).to(dtype) if "r" in parts else None
    act = "silu" if rows % 2 else "gelu_tanh"
    got = skinny_gemm.launch(
        x, weights[0], biases[0], tiles=tiles, norm=NormWeights(gain, 1e-5) if "n" in parts else None,
        gate=Gate(weights[1], biases[1], act) if "g" in parts else None, residual_TF=more,
    )  # fmt: skip
    wanted = reference.fused_linear(
        x.double(), exact[0], as_float64(biases[0]), norm=NormWeights(gain.double(), 1e-5) if "n" in parts else None,
        gate=Gate(exact[1], as_float64(biases[1]), act) if "g" in parts else None, residual_TF=as_float64(more),
    )  # fmt: skip
    error = float((got.double() - wanted).norm() / wanted.norm())
    # Nibbles are summed with an offset of 2048 times x.
    tolerance = 1e-3 if dtype == torch.float16 else 3e-4 if kind == "int4" else 1e-6
    assert got.dtype == dtype and error < tolerance, (kind, shape, rows, tiles, parts, error)


def check_products() -> int:
    count = 0
    shapes = [(20, 96), (33, 150)]
    ways = ["", "n", "r", "ng", "gb", "nbr", "ngbr"]
    for i, (kind, shape) in enumerate(itertools.product(("plain", "int8", "float8", "int4"), shapes)):
        for j, parts in enumerate(ways[i % 2 :: 2]):
            BK = (16, 128, 32)[(i + j) % 3]  # many steps, one, and a few
            dtype = torch.float16 if (i + j) % 4 == 3 else torch.float32
            case(kind, shape, 1 + (i + j) % 4, SkinnyTiles(4, BK, 1, 2, (i + j) % 2), parts=parts, dtype=dtype)
            count += 1
    return count


def check_bits() -> int:
    """Deterministic for any number of programs."""
    w, x = draw(50, 90), draw(2, 90)
    for weight in (w, quantise(w, "int4", 32)):
        one, two, all_at_once = (
            skinny_gemm.launch(x, weight, tiles=SkinnyTiles(4, 32, 1, 2, programs)) for programs in (1, 2, 0)
        )
        assert torch.equal(one, two) and torch.equal(one, all_at_once)
    return 2


def check_registered_kernels() -> int:
    """Any number of rows, none, more dimensions; a table that prefers torch's GEMM."""
    count = 0
    w = draw(24, 70) / 70**0.5
    for weight in (w, quantise(w, "int4", 32)):
        exact = weight.double() if isinstance(weight, Tensor) else weight
        bias, gate = draw(24), Gate(weight, draw(24), "silu")
        for rows in (0, 1, 3, skinny_gemm_tiles.MAX_ROWS + 1):
            x, more, norm = draw(rows, 70), draw(rows, 24), NormWeights(draw(70), 1e-6)
            for parts in ({}, {"norm": norm}, {"residual_TF": more}, {"gate": gate, "norm": norm, "residual_TF": more}):
                b = bias if "gate" in parts or not parts else None
                got = skinny_gemm.fused_linear(x, weight, b, **parts)
                doubled = {
                    "norm": NormWeights(norm.weight_D.double(), 1e-6), "residual_TF": more.double(),
                    "gate": Gate(exact, as_float64(gate.bias_F), "silu"),
                }  # fmt: skip
                wanted = reference.fused_linear(x.double(), exact, as_float64(b), **{k: doubled[k] for k in parts})
                assert got.shape == wanted.shape and (got - wanted).norm() <= 1e-4 * wanted.norm(), (rows, parts)
                count += 1
        for rows in (1, 9):  # the residual may be overwritten
            x, more = draw(rows, 70), draw(rows, 24)
            wanted = reference.fused_linear(x.double(), exact, residual_TF=more.double())
            assert (
                skinny_gemm.fused_linear(x, weight, residual_TF=more, inplace=True) - wanted
            ).norm() < 1e-4 * wanted.norm()
        x = draw(2, 1, 70)
        wanted = reference.fused_linear(x.double(), exact)
        assert (skinny_gemm.linear(x, weight) - wanted).norm() < 1e-4 * wanted.norm()
    wants = draw(2, 70).requires_grad_()
    skinny_gemm.fused_linear(wants, draw(3, 70)).sum().backward()
    assert wants.grad is not None
    return count + 3


def check_rope_and_kv_write() -> int:
    """Groups of one and several heads, odd widths, non-contiguous pools, with and without norms."""
    count = 0
    for (group, K, H), turned, normed, pool in itertools.product(
        ((1, 3, 8), (4, 2, 6), (5, 1, 20)), (True, False), (True, False), (torch.float32, torch.float16)
    ):
        T, page = 3, 4
        qkv = draw(T, K * (group + 2) * H + 2)[:, :-2]
        turn = Rotation(draw(T, 1, H), draw(T, 1, H)) if turned else None
        norms = (NormWeights(draw(H), 1e-5), NormWeights(draw(H), 1e-3)) if normed else None
        slots = torch.tensor([13, 0, 6])
        pools = [torch.zeros(5, page, 2 * K, H, dtype=pool)[:, :, ::2] for _ in range(4)]
        q = triton_cache_write.rope_and_kv_write(qkv, pools[0], pools[1], slots, turn=turn, norms=norms)
        wanted = cache_write.rope_and_kv_write(
            qkv, pools[2].contiguous(), pools[3].contiguous(), slots, turn=turn, norms=norms
        )
        k, v = torch.zeros(5, page, K, H, dtype=pool), torch.zeros(5, page, K, H, dtype=pool)
        cache_write.rope_and_kv_write(qkv, k, v, slots, turn=turn, norms=norms)
        near = {"atol": 1e-5 if pool == torch.float32 else 4e-3, "rtol": 1e-5 if pool == torch.float32 else 2e-3}
        assert torch.allclose(q, wanted, atol=1e-5)
        assert torch.allclose(pools[0], k, **near) and torch.equal(pools[1], v)
        count += 1
    # A slot outside the pool, and no tokens.
    k, v = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    triton_cache_write.rope_and_kv_write(draw(2, 24), k, v, torch.tensor([-1, 8]))
    assert not k.any() and not v.any()
    assert triton_cache_write.rope_and_kv_write(draw(0, 24), k, v, torch.tensor([], dtype=torch.int64)).shape == (
        0,
        1,
        8,
    )
    return count + 2


def check_greedy() -> int:
    """Ties, infinities, NaN, odd sizes, several blocks, strided rows."""
    count = 0
    for R, V in ((3, 7), (1, triton_sampling.MAX_BLOCK + 5), (2, 1), (0, 9)):
        logits = draw(R, 2 * V)[:, :V]
        assert torch.equal(triton_sampling.greedy(logits, -5), sample_reference.greedy(logits, -5))
        count += 1
    inf = float("inf")
    rows = [[1.0, 3, 3, 2], [1, inf, 3, inf], [1, 2, float("nan"), 3], [-inf] * 4, [-inf, -7, -inf, -7]]
    for run in (triton_sampling.greedy, sample_reference.greedy):
        assert run(torch.tensor(rows), -5).tolist() == [1, -5, -5, -5, 1]
    return count + 1


def check_sampled() -> int:
    """Each filter, ties at the limits, several blocks, rows that are not finite, strided rows."""
    triton_sampled_tokens.MAX_BLOCK = triton_sampled_tokens.MAX_DRAW_BLOCK = 128
    cases = [*sample_cases(150, rounds=1), *sample_cases(7, rounds=1)]
    for logits_RV, args_RA in cases:
        ours = triton_sampled_tokens.sample(logits_RV, args_RA, -5)
        assert torch.equal(ours, sample_reference.sample(logits_RV, args_RA, -5))
    return len(cases)


def check_write_next_tokens() -> int:
    for T, R in ((1, 1), (300, 7), (5, 300), (0, 3)):
        last = torch.randint(0, 50_000, (R,))
        last[R // 2] = -7  # none: the request has ended
        ids = torch.where(torch.rand(T) < 0.6, -1 - torch.randint(0, R, (T,)), torch.randint(0, 50_000, (T,)))
        ours, theirs = ids.clone(), ids.clone()
        triton_sampling.write_next_tokens_(ours, last)
        sample_reference.write_next_tokens_(theirs, last)
        assert torch.equal(ours, theirs) and (ours >= 0).all()
    return 4


def check_rotation() -> int:
    cases = [(1, 64), (7, 40), (3, 3), (0, 8)]
    for T, half in cases:
        positions, theta = torch.randint(0, 4096, (T,)), 1.0 / 10_000 ** (torch.arange(half) / half)
        theirs = rotary_reference.rotation(positions, theta, 1.3, torch.float32)
        for within in (guarded(theta), guarded(theta)):  # one ends at a guard page, one begins at it
            ours = triton_rotary.rotation(positions, within, 1.3, torch.float32)
            assert all(torch.allclose(a, b, rtol=0, atol=1e-5) for a, b in zip(ours, theirs, strict=True))
            assert ours.own.shape == (T, 1, 2 * half)
    return len(cases)


if __name__ == "__main__":
    warnings.simplefilter("error")
    checks = (
        check_products,
        check_bits,
        check_registered_kernels,
        check_rope_and_kv_write,
        check_greedy,
        check_sampled,
        check_write_next_tokens,
        check_rotation,
    )
    for check in checks:
        print(f"{check.__name__}: {check()} cases", flush=True)

"""The C++ kernels of latent attention compute what its absorbed form computes in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.errors import ConfigError
from colonnade.kernels import norm as norm_reference
from colonnade.kernels import rotary
from colonnade.kernels.attention import reference as attention_reference
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.cpu import calls, kernels, latent
from colonnade.kernels.linear.reference import NormWeights
from tests.guard_pages import guarded
from tests.unit.test_cpu_kernels import DTYPES, LIMITS, native, random_batch, rows, threads  # noqa: F401 - fixtures

WIDTHS = ((6, 5, 4, 20, 3), (3, 9, 2, 37, 16), (16, 32, 8, 128, 32), (1, 4, 6, 300, 7))
"""(heads, plain, rope, rank, value width)."""
FACTOR = 1.3


def case_of(seed: int, dtype: torch.dtype) -> dict[str, Any]:
    """Requests with few new tokens each, the slots of these, and weights."""
    n, plain, rope, rank, value_width = WIDTHS[seed % len(WIDTHS)]
    batch = random_batch(seed, dtype)
    table: PageTable = batch["table"]
    P, page, T = len(batch["k"]), table.page_tokens, len(batch["q"])
    slots, (new, lengths) = [], table.host_lengths
    for r, (count, length) in enumerate(zip(new, lengths, strict=True)):
        places = range(length - count, length)
        slots += [int(table.pages_RP[r, at // page]) * page + at % page for at in places]
    positions = torch.arange(T) * 7
    return {
        "q": rows(T, n * (plain + rope), seed=seed).to(dtype),
        "kv": rows(T, rank + rope, seed=seed + 1).to(dtype),
        "up": (rows(n * (plain + value_width), rank, seed=seed + 2) / rank**0.5).to(dtype),
        "pool": rows(P, page, 1, rank + rope, seed=seed + 3).to(dtype),
        "slots": torch.tensor(slots),
        "turn": rotary.rotation(positions, 1 / 100 ** (torch.arange(rope // 2) / rope), 1.0, dtype),
        "norm": NormWeights((1 + 0.1 * rows(rank, seed=5)).to(dtype), 1e-5),
        "table": table,
        "widths": {"plain": plain, "value_width": value_width},
    }


def step(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """(values of all heads, the cache after the step)."""
    pool = guarded(case["pool"].clone())
    q_Tnz = latent.queries(
        guarded(case["q"]), guarded(case["kv"]), guarded(case["up"]), pool, case["slots"], case["turn"], case["norm"],
        **case["widths"], factor=FACTOR,
    )  # fmt: skip
    rank = case["up"].shape[1]
    o_TnR = kernels.paged(q_Tnz, pool, pool, case["table"], values=rank)
    return latent.values(o_TnR, guarded(case["up"]), **case["widths"]), pool


def exact_step(case: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The same in float64 (:meth:`colonnade.model.attention.LatentAttention._absorbed`)."""
    plain, value_width = case["widths"].values()
    up_nzR = case["up"].double().unflatten(0, (-1, plain + value_width))
    rank, pool = up_nzR.shape[-1], case["pool"].double()
    turn = rotary.Rotation(*(x.double() for x in case["turn"]))
    q_Tnz, kv_Tz = case["q"].double().unflatten(1, (len(up_nzR), -1)), case["kv"].double()
    c_TR = norm_reference.norm(kv_Tz[:, :rank], case["norm"].weight_D.double(), None, case["norm"].eps)
    pool.view(-1, pool.shape[-1])[case["slots"]] = torch.cat(
        (c_TR, rotary.rotate(kv_Tz[:, None, rank:], turn)[:, 0]), 1
    )
    absorbed_TnR = torch.einsum("tnh,nhr->tnr", q_Tnz[..., :plain], up_nzR[:, :plain])
    q_Tnz = torch.cat((absorbed_TnR, rotary.rotate(q_Tnz[..., plain:], turn)), -1) * FACTOR
    o_TnR = attention_reference.paged(q_Tnz, pool, pool, case["table"], values=rank)
    return torch.einsum("tnr,nhr->tnh", o_TnR, up_nzR[:, plain:]).flatten(1), pool


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_matches_the_oracle(native: str, dtype: torch.dtype, threads: None) -> None:  # noqa: F811
    for seed in range(12):
        case = case_of(seed, dtype)
        got, exact = step(case), exact_step(case)
        # In bfloat16 queries and sums are rounded between the kernels, so scores of a large norm move by a few steps.
        limit = LIMITS[dtype] if dtype == torch.float32 else 4 * LIMITS[dtype]
        for ours, want in zip(got, exact, strict=True):
            assert float((ours.double() - want).abs().max()) < limit * max(1.0, float(want.abs().max()))
        untouched = torch.ones(case["pool"].shape[:2], dtype=torch.bool).flatten()
        untouched[case["slots"]] = False
        flat = got[1].flatten(0, 1)
        assert torch.equal(flat[untouched], case["pool"].flatten(0, 1)[untouched])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_other_rows_or_threads(native: str, dtype: torch.dtype, threads: None) -> None:  # noqa: F811
    for seed in (0, 2, 3):
        case = case_of(seed, dtype)
        torch.set_num_threads(1)
        together, pool = step(case)
        for count in (2, 3, 7, 64):
            torch.set_num_threads(count)
            assert all(map(torch.equal, step(case), (together, pool)))
        table, t = case["table"], 0
        new, lengths = table.host_lengths
        for r, count in enumerate(new):  # each row alone, as the only token of its request, alongside the others' keys
            for i in range(count):
                length = lengths[r] - count + 1 + i
                alone = PageTable(
                    table.pages_RP[r : r + 1], torch.tensor([0, 1], dtype=torch.int32),
                    torch.tensor([length], dtype=torch.int32), table.page_tokens, 1, length,
                )  # fmt: skip
                row, turn = slice(t, t + 1), rotary.Rotation(*(x[t : t + 1] for x in case["turn"]))
                parts = {name: case[name][row].clone() for name in ("q", "kv", "slots")}
                one = case | parts | {"pool": pool, "turn": turn, "table": alone}
                assert torch.equal(step(one)[0][0], together[t])
                t += 1


def test_bad_inputs_are_refused_before_the_library(native: str, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    case = case_of(2, torch.float32)
    plain = case["widths"]["plain"]

    def queries(**changes: Any) -> None:
        got = case | changes
        latent.queries(
            *(got[name] for name in ("q", "kv", "up", "pool", "slots", "turn", "norm")), **got["widths"], factor=1.0
        )

    with pytest.raises(ConfigError, match="a slot is not in the cache"):
        queries(slots=case["slots"] + case["pool"].shape[0] * case["pool"].shape[1])

    def unreachable(*_: object) -> None:
        raise AssertionError("the library was called")

    monkeypatch.setattr(calls, "run", unreachable)
    bad: list[tuple[str, dict[str, Any]]] = [
        ("rows for heads of", {"up": case["up"][:-1]}),
        ("queries of", {"q": case["q"][:, :-1].contiguous()}),
        ("compressed vectors", {"kv": case["kv"][:, :-1].contiguous()}),
        ("compressed vectors", {"kv": case["kv"].double()}),
        ("slots", {"slots": case["slots"][:-1]}),
        ("slots", {"slots": case["slots"].int()}),
        ("rotary factors", {"turn": rotary.Rotation(*(x[:, :, :-1] for x in case["turn"]))}),
        ("a norm of", {"norm": NormWeights(case["norm"].weight_D[:-1], 1e-5)}),
        ("a cache of 2 heads", {"pool": case["pool"].repeat(1, 1, 2, 1)}),
    ]
    for message, changes in bad:
        with pytest.raises(ConfigError, match=message):
            queries(**changes)
    with pytest.raises(ConfigError, match="heads of 0"):
        latent.queries(*(case[name] for name in ("q", "kv", "up", "pool", "slots", "turn", "norm")),
                       plain=0, value_width=0, factor=1.0)  # fmt: skip
    with pytest.raises(ConfigError, match="empty"):  # the library would divide by 0
        latent.values(rows(2, 16, 128), case["up"][:0], plain=0, value_width=0)
    with pytest.raises(ConfigError, match="an up-projection"):
        latent.values(rows(2, 16, 128), case["up"][:-1], plain=plain, value_width=32)
    pool, table = case["pool"], case["table"]
    q_Tnz = rows(len(case["q"]), 16, pool.shape[-1])
    with pytest.raises(ConfigError, match="values of"):
        kernels.paged(q_Tnz, pool, pool.clone(), table, values=128)
    with pytest.raises(ConfigError, match="values of"):
        kernels.paged(q_Tnz, pool, pool, table, values=pool.shape[-1] + 1)


def test_what_it_does_not_support_is_left_to_torch(native: str) -> None:  # noqa: F811
    case = case_of(0, torch.float32)
    assert latent.fits(case["q"], case["up"], case["pool"], 4)
    assert not latent.fits(case["q"].bfloat16(), case["up"], case["pool"], 4)
    assert not latent.fits(case["q"], case["up"], case["pool"].to(torch.int8), 4)
    assert not latent.fits(case["q"].requires_grad_(), case["up"], case["pool"], 4)

"""`colonnade verify` passes correct layouts, and finds injected faults with the right check and tensor."""

import functools
import gc
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from colonnade import verify as it
from colonnade.checkpoint import native
from colonnade.cli import main
from colonnade.config import ModelConfig, Plan
from colonnade.config.presets import preset
from colonnade.model import Transformer, initialise
from colonnade.parallel.axis import world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.verify import CHECKS, TOLERANCE, Result, all_plans, covering, shrink
from colonnade.verify import run as verifying
from tests.parity import layout_faults as faults
from tests.worlds import run

MODEL = ModelConfig(
    family="qwen3", vocab_size=53, layers=3, width=24, heads=4, kv_heads=4, head_width=4, ffn_width=29, context=64,
    qk_norm=True, tied=True, window=7, window_from_layer=1,
)  # fmt: skip
BERT = shrink(preset("bert-tour"), 3)


@functools.cache
def _one(model: ModelConfig, world: int, merged: int) -> verifying._Reference:
    """The reference run of one process, cached: workers live on from test to test."""
    return verifying._Reference.of(model, world, merged)


def compared(model: ModelConfig, plans: list[Plan], folder: Path, fault: Callable | None) -> list[Result]:
    """The comparison that a worker makes, in an existing world."""
    results = []
    with pytest.MonkeyPatch.context() as patch:
        if fault is not None:
            fault(patch)
        for plan in plans:
            merged = verifying._merged(model, plan)
            one, saved = _one(model, plan.world, merged), folder / f"one-{merged}"
            with DistributedContext.build(plan) as context:
                if context.rank == 0 and not saved.exists():
                    one.trial.save(saved)
                world_axis().max_(one.trial.masters.local["norm.weight"])  # all ranks wait until it is written
                results.append(verifying._compare(model, context, one, saved, one)[0])
    return results


# -- faults are found by the right check, which names the tensor ------------------------------------------------------

SP, RING = Plan(tp=2, sequence_parallel=True), Plan(cp=2)
FAULTS = [
    (faults.partial_gradients_not_summed, SP, "gradients", "norm"),
    (faults.partial_gradients_not_summed, Plan(tp=2), "gradients", r"[qk]_norm"),
    (faults.replicated_counted_by_all, Plan(tp=2), "norm", ""),
    (faults.tied_gradients_not_summed, Plan(pp=2), "gradients", "embed.tokens.weight"),
    (faults.copies_counted, Plan(pp=2), "norm", ""),
    (faults.ring_backward_by_chunks, RING, "gradients", ""),
    (faults.tokens_counted_by_data_rank, Plan(dp=2), "gradients", ""),
    (faults.tokens_counted_by_context_rank, RING, "gradients", ""),
    (faults.fsdp_takes_the_mean, Plan(dp=2), "gradients", ""),
    (faults.fsdp_takes_the_mean, RING, "gradients", ""),
    (faults.dropout_by_local_row, RING, "loss", ""),
    (faults.dropout_by_local_row, SP, "loss", ""),
    (faults.smoothing_over_own_vocabulary, Plan(tp=2), "gradients", ""),
    (faults.logits_joined_in_another_order, Plan(tp=2), "tokens", ""),
    (faults.second_moment_not_loaded, Plan(dp=2), "load", "exp_avg_sq/embed.tokens.weight"),
    (faults.a_gradient_missing, Plan(tp=2), "gradients", "blocks.0.norm1.weight"),
    (faults.not_a_number, Plan(dp=2), "loss", ""),
]  # fmt: skip
ONLY_CHECK = {
    faults.replicated_counted_by_all: {"norm", "step", "loss"},
    faults.copies_counted: {"norm", "step", "loss"},
    faults.logits_joined_in_another_order: {"tokens"},
    faults.second_moment_not_loaded: {"load"},
}
"""Faults that no other check may report: `step` and `loss` of the second step follow from a wrong clip."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("fault", "plan", "check", "where"), FAULTS, ids=[f"{fault.__name__}-{plan}" for fault, plan, *_ in FAULTS]
)
def test_broken_layout_is_found(fault: Callable, plan: Plan, check: str, where: str, tmp_path: Path) -> None:
    every_rank = run(2, compared, MODEL, [plan], tmp_path, fault)
    for (result,) in every_rank:
        failed = {name for name, error in result.errors.items() if not error <= TOLERANCE}
        assert not result.ok
        assert check in failed, result.errors
        assert re.search(where, result.where[check]), result.where
        assert failed <= ONLY_CHECK.get(fault, set(CHECKS)), result.errors
    assert every_rank[0][0].where == every_rank[1][0].where, "all ranks name the same tensor"


@pytest.mark.slow
def test_same_comparison_passes_without_a_fault(tmp_path: Path) -> None:
    """Control: otherwise the tests above would prove nothing."""
    plans = list(dict.fromkeys(plan for _, plan, *_ in FAULTS))
    for results in run(2, compared, MODEL, plans, tmp_path, None):
        assert [result.plan for result in results if not result.ok] == []
        assert all(set(result.errors) == set(CHECKS) for result in results)


def test_nan_counts_as_a_miss(tmp_path: Path) -> None:
    result = Result(Plan())
    result.note("loss", 1e-16)
    assert result.ok
    result.note("loss", float("nan"))
    result.note("loss", 1e-16)
    assert not result.ok
    verifying.write_results([result], MODEL, tmp_path / "verify.json")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    (row,) = json.loads((tmp_path / "verify.json").read_text(), parse_constant=refuse)["plans"]
    assert row["errors"] == {"loss": None} and not row["ok"]


# -- correct layouts pass ----------------------------------------------------------------------------------------------


@pytest.mark.long  # test_verify_moe runs a few plans of four processes for a MoE model
def test_first_covering_plans_of_four_processes(tmp_path: Path) -> None:
    """The plans that combine the most choices; the full covering set is below."""
    plans = covering(all_plans(4, MODEL.replace(layers=4)))[:6]
    plans += [Plan(dp=2, cp=2), Plan(pp=2, tp=2, sequence_parallel=True)]
    in_parts(4, MODEL, plans, tmp_path, 4)


@pytest.mark.slow
def test_bidirectional_decoder(tmp_path: Path) -> None:
    model = MODEL.replace(causal=False, window=None)
    plans = [Plan(tp=2, sequence_parallel=True), Plan(cp=2), Plan(pp=2), Plan(dp=2)]
    for results in run(2, compared, model, plans, tmp_path, None):
        assert {str(result.plan): result.errors for result in results if not result.ok} == {}
        assert all(set(result.errors) == set(CHECKS) - {"tokens"} for result in results)


@pytest.mark.slow
def test_three_processes(tmp_path: Path) -> None:
    """16 micro-batches do not divide by 3: one data rank would wait for ever for the others' gathers."""
    plans = [Plan(dp=3), Plan(pp=3, schedule="interleaved", stages=2), Plan(cp=3)]
    for results in run(3, compared, MODEL.replace(layers=7), plans, tmp_path, None):
        assert {str(result.plan): result.errors for result in results if not result.ok} == {}


def in_parts(world: int, model: ModelConfig, plans: list[Plan], folder: Path, size: int) -> None:
    """Run a few plans at a time: a call of a world times out after two minutes."""
    model = model.replace(layers=1 + max(plan.total_stages for plan in plans))
    for first in range(0, len(plans), size):
        (here := folder / str(first)).mkdir()
        for results in run(world, compared, model, plans[first : first + size], here, None):
            assert {str(result.plan): result.errors for result in results if not result.ok} == {}


@pytest.mark.long
@pytest.mark.timeout(900)
def test_covering_set_of_four_processes(tmp_path: Path) -> None:
    plans = covering(all_plans(4, MODEL.replace(layers=8)))
    assert len(plans) > 30
    in_parts(4, MODEL, plans, tmp_path, 4)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_encoder_over_four_processes(tmp_path: Path) -> None:
    in_parts(4, BERT, covering(all_plans(4, BERT.replace(layers=8)))[:8], tmp_path, 4)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_eight_processes(tmp_path: Path) -> None:
    in_parts(8, MODEL, covering(all_plans(8, MODEL.replace(layers=16)))[:4], tmp_path, 1)


# -- the command -------------------------------------------------------------------------------------------------------


def _verify(*words: str | Path) -> int:
    """The command's exit code."""
    try:
        main(["verify", *map(str, words)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _read(out: Path, plans: int) -> dict:
    found = json.loads(out.read_text())
    assert found["tolerance"] == TOLERANCE and found["checks"] == CHECKS
    assert len(found["plans"]) == plans
    return found


@pytest.mark.slow
def test_every_plan_of_two_processes_for_a_decoder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "verify.json"
    assert _verify("tour", "--world", "2", "--all", "--out", out) == 0
    plans = all_plans(2)
    found = _read(out, len(plans))
    assert {row["name"] for row in found["plans"]} == {str(plan) for plan in plans}
    assert all(row["ok"] and set(row["errors"]) == set(CHECKS) for row in found["plans"])
    assert found["model"]["heads"] == preset("tour").heads
    output = capfd.readouterr()
    assert output.out.count("ok  ") == len(plans)
    assert f"{len(plans)} of {len(plans)} plans equal one process" in output.err


@pytest.mark.slow
@pytest.mark.exec
def test_encoder_compares_no_generated_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "verify.json"
    monkeypatch.setattr(it, "covering", lambda plans: [plan for plan in plans if plan in (SP, RING, Plan(pp=2))])
    assert _verify("bert-tour", "--world", "2", "--out", out) == 0
    found = _read(out, 3)
    assert all(row["ok"] and set(row["errors"]) == set(CHECKS) - {"tokens"} for row in found["plans"])
    assert "leaked" not in capfd.readouterr().err, "workers leak no objects"


def _checkpoint(folder: Path, **changes: object) -> Path:
    config = MODEL.replace(**changes)
    native.save(folder, initialise(Transformer(config), 0), native.Meta(model=config), DistributedContext.solo())
    return folder


@pytest.mark.exec  # a program started by fork ends without leak checks
@pytest.mark.slow
def test_checkpoint_is_verified_by_its_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One key/value head allows no tensor parallelism, so no such plan is tried."""
    allowed: list[Plan] = []

    def two(plans: list[Plan]) -> list[Plan]:
        allowed.extend(plans)
        return [plan for plan in plans if plan in (RING, Plan(dp=2))]

    monkeypatch.setattr(it, "covering", two)
    out = tmp_path / "verify.json"
    assert _verify(_checkpoint(tmp_path / "tiny", kv_heads=1, layers=2), "--world", "2", "--out", out) == 0
    assert {plan.tp for plan in allowed} == {1} and {plan.pp for plan in allowed} == {1, 2}
    found = _read(out, 2)["model"]
    assert (found["kv_heads"], found["qk_norm"], found["window"]) == (1, True, 7)
    assert "leaked" not in capfd.readouterr().err, "no output of leak checks"


def test_one_process_is_a_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert _verify("bert-tour", "--world", "1") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["runs"], "results are written to the folder of runs"
    assert _read(tmp_path / "runs" / "verify.json", 1)["plans"][0]["name"] == "one process"
    assert gc.get_freeze_count() == 0


def test_miss_exits_with_1_and_names_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "verify.json"
    broken = functools.partial(faults.work, faults.tied_gradients_not_summed)
    monkeypatch.setattr(verifying, "_work", broken)
    monkeypatch.setattr(it, "all_plans", lambda *_: [Plan(pp=2), Plan(dp=2)])
    assert _verify(_checkpoint(tmp_path / "tiny", layers=4), "--world", "2", "--all", "--out", out) == 1
    broke, correct = _read(out, 2)["plans"]
    assert (broke["ok"], correct["ok"]) == (False, True)
    assert broke["where"]["gradients"] == "embed.tokens.weight"
    output = capfd.readouterr()
    miss, fine = output.out.splitlines()
    assert miss.startswith("MISS pp=2 1f1b ") and fine.startswith("ok   dp=2 "), (
        "the broken plan's checkpoint is not used by the next"
    )
    assert re.search(r"gradients \de(-01|\+00) in embed.tokens.weight", miss)
    assert "1 of 2 plans equal one process" in output.err


def test_more_ranks_than_gpus_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Before any process starts."""
    gpus = torch.cuda.device_count()
    assert _verify("tour", "--world", str(gpus + 2), "--device", "cuda") == 1
    assert f"{gpus + 2} ranks on this machine, which has {gpus} GPUs; use --device cpu" in capsys.readouterr().err


def test_world_size_zero_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert _verify("tour", "--world", "0") == 1
    assert "ConfigError: --world 0 is not from 1 to 64" in capsys.readouterr().err

"""Ranks with different settings all raise an error at once; none waits for a message of another shape."""

from pathlib import Path

import pytest
import torch

from colonnade.compat.tutel import moe
from colonnade.config import DataConfig, ModelConfig, MoeConfig, Plan, RunConfig, TrainConfig
from colonnade.errors import PlanError
from colonnade.parallel.axis import SOLO, world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.rendezvous import check_same_settings
from colonnade.train.loop import train
from tests.corpora import TEXT, small
from tests.worlds import run


def _agree(by_rank: list[dict[str, object]]) -> str:
    world = world_axis()
    try:
        check_same_settings(by_rank[world.rank], world)
    except PlanError as error:
        return str(error)
    return "agreed"


def test_error_on_all_ranks_names_the_differing_rank_and_setting() -> None:
    same = {"width": 8, "lr": 1e-3}
    assert set(run(3, _agree, [same, dict(reversed(same.items())), same])) == {"agreed"}
    (error_text,) = set(run(3, _agree, [same, same, {"width": 9, "layers": 2, "lr": 1e-3}]))
    assert error_text == (
        "rank 2 of 3 was started with other settings than rank 0: rank 2 has layers 2 instead of none, width 9 instead "
        "of 8; start all ranks with the same"
    )
    (error_text,) = set(run(3, _agree, [{str(i): rank for i in range(5)} for rank in range(3)]))
    assert error_text.startswith("rank 1, 2 of 3") and "2 1 instead of 0 and 2 more;" in error_text
    check_same_settings(same, SOLO)


def _build_plan(plans: list[Plan]) -> str:
    with pytest.raises(PlanError) as refused, DistributedContext.build(plans[world_axis().rank]):
        pass
    return str(refused.value)


def test_different_plans_are_refused() -> None:
    (error_text,) = set(run(2, _build_plan, [Plan(dp=2), Plan(dp=2, ep=2)]))
    assert "rank 1 has ep 2 instead of 1" in error_text


def _train(runs: list[RunConfig]) -> str:
    with pytest.raises(PlanError) as refused:
        train(runs[world_axis().rank])
    return str(refused.value)


def test_different_run_configs_are_refused(tmp_path: Path) -> None:
    """Only the width of the experts differs, and with it the shape of every exchanged tensor."""
    corpus = small(tmp_path / "corpus", TEXT)
    moe = MoeConfig(experts=4, active=2, ffn_width=8)
    model = ModelConfig(vocab_size=300, layers=1, width=16, heads=4, ffn_width=20, context=32, moe=moe)
    one = RunConfig(
        name="it", runs=tmp_path, device="cpu", model=model, data=DataConfig(path=corpus, sequence=16),
        plan=Plan(dp=2, ep=2), train=TrainConfig(steps=1, batch=4),
    )  # fmt: skip
    other = one.replace(model=model.replace(moe=moe.replace(ffn_width=12)))
    (error_text,) = set(run(2, _train, [one, other]))
    assert "rank 1 has model.moe.ffn_width 12 instead of 8" in error_text


def _run_layer(by_rank: list[dict[str, float]]) -> str:
    mine = {"model_dim": 8, "local": 1, "k": 2, "capacity_factor": 1.0, "adaptive_r": 1, "a2a_ffn_overlap_degree": 1}
    mine |= {"hidden": 4} | by_rank[world_axis().rank]
    layer = moe.moe_layer(
        gate_type={"type": "top", "k": mine["k"]},
        model_dim=int(mine["model_dim"]),
        experts={"type": "ffn", "num_experts_per_device": mine["local"], "hidden_size_per_expert": mine["hidden"]},
    )
    call = {name: mine[name] for name in ("capacity_factor", "adaptive_r", "a2a_ffn_overlap_degree")}
    x = torch.randn(3 + world_axis().rank, int(mine["model_dim"]))
    try:
        layer(x, **call)
    except PlanError as error:
        return str(error)
    return "agreed"


@pytest.mark.parametrize(
    ("name", "other", "error_text"),
    [
        ("model_dim", 9, "model_dim: 8 to 9"),
        ("local", 2, "num_experts_per_device: 1 to 2"),
        ("k", 1, "top_k: 1 to 2"),
        ("capacity_factor", 2.5, "capacity_factor: 1 to 2.5"),
        ("hidden", 6, "parameters of experts: 38 to 55"),
        ("adaptive_r", 0, "adaptive_r: 0 to 1"),
        ("a2a_ffn_overlap_degree", 3, "a2a_ffn_overlap_degree: 1 to 3"),
    ],
)
def test_tutel_layer_with_different_settings_per_rank_is_refused(name: str, other: float, error_text: str) -> None:
    assert run(2, _run_layer, [{}, {}]) == ["agreed", "agreed"], "numbers of tokens may differ"
    one = {"local": -2} if name == "hidden" else {}  # slices of one expert
    for message in run(2, _run_layer, [one, one | {name: other}]):
        assert f"differ in {error_text}, " in message

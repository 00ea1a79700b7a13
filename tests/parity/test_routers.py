"""Routing over ranks with slices of the tokens equals one process: choices, weights, drops and losses.

The slices are uneven and unordered, and one is empty; every router meets every kind of dropping and every loss.
tests/unit/test_routers.py checks that one process does what the papers say.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.config import DataConfig, MoeConfig, Plan, RunConfig, TrainConfig
from colonnade.data import Corpus
from colonnade.model.moe import Routing, TokenGroups
from colonnade.model.moe.capacity import apply_capacity, capacity
from colonnade.model.moe.losses import balance_losses, expert_load
from colonnade.parallel.axis import Axes, Axis, ExpertAxes, world_axis
from colonnade.train import Trainer
from colonnade.train.loop import train
from colonnade.train.trackers import read_rows
from tests.corpora import TEXT, small
from tests.routers import EXPERTS, KINDS, TOKENS, config_of, moe_of, noise_for, router_of, tokens
from tests.worlds import assert_same, run

WAYS: dict[str, dict[str, Any]] = {
    "dropless": {"capacity": None},
    "tight": {"capacity": 1.0},
    "tight_priority": {"capacity": 1.0, "priority": True},
    "none_dropped": {"capacity": 0.0, "priority": True},
    "bounded": {"capacity": -1.5},
}
BALANCES = ("gshard", "switch", "choices", "sequence", "importance")


def slices(world: int) -> list[Tensor]:
    """The tokens of each rank: uneven slices of a shuffled list, one of them empty from 3 ranks on."""
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(world))
    sizes = {1: [29], 2: [8, 21], 3: [17, 0, 12], 4: [3, 15, 0, 11]}[world]
    return list(order.split(sizes))


def shuffled_noise(moe: MoeConfig, index_T: Tensor):
    noise = noise_for(moe, index_T)
    return None if noise is None else replace(noise, index_T=index_T)


def forward_and_backward(moe: MoeConfig, over: Axis, mine: Tensor) -> dict[str, Tensor]:
    """The routing of a rank with the tokens ``mine``; its weights' gradients are summed over the ranks."""
    x_TD, tokens_T, index_T, units = tokens()
    router = router_of(moe, Axes(experts=ExpertAxes(tokens=over)))
    x_tD, index_t, units_t = x_TD[mine].requires_grad_(), index_T[mine], units.rows(mine)
    choice, logits_tE = router(
        x_tD, tokens_T[mine], index_t, shuffled_noise(moe, index_t), training=True, token_groups=units_t
    )
    admitted = apply_capacity(choice, index_t, moe, over)
    load_E = expert_load(choice.ids_TA, EXPERTS)
    surrogate, balance, z = balance_losses(choice, load_E, logits_tE, moe, over, units_t)
    # A function that depends on choices, experts and tokens.
    weighed = admitted.weights_TA * (admitted.ids_TA + 1).double().sqrt() * (index_t[:, None] % 7 - 2)
    total = weighed.sum() + surrogate
    if total.requires_grad:  # a hash router has no parameters
        total.backward()
    result = {
        "ids": choice.ids_TA, "weights": choice.weights_TA.detach(), "kept": admitted.ids_TA,
        "kept weights": admitted.weights_TA.detach(), "balance": balance.detach(), "z": z.detach(),
        "load": over.sum_(load_E), "x": torch.zeros_like(x_tD) if x_tD.grad is None else x_tD.grad,
    }  # fmt: skip
    for name, p in router.named_parameters():
        result[f"gradient of {name}"] = over.sum_(torch.zeros_like(p) if p.grad is None else p.grad)
    return result


def check_all_options(name: str) -> None:
    world = world_axis()
    mine = slices(world.size)[world.rank]
    own_balance = moe_of(name).balance
    cases = [(option, changes, own_balance) for option, changes in WAYS.items()]
    cases += [("dropless", WAYS["dropless"], balance) for balance in BALANCES]
    for option, changes, balance in cases:
        moe = moe_of(name, **changes, balance=balance)
        whole = forward_and_backward(moe, Axes().dp, torch.arange(TOKENS))
        part = forward_and_backward(moe, world, mine)
        for what, everywhere in whole.items():
            per_token = what in ("ids", "weights", "kept", "kept weights", "x")
            reference = everywhere[mine] if per_token else everywhere
            if what in ("ids", "kept", "load"):
                assert torch.equal(part[what], reference), f"{option}, {balance}: {what}"
            else:
                assert_same(part[what], reference, what=f"{option}, {balance}: {what}")
        even = name in ("expert_choice", "noisy_all")
        if option.startswith("tight") and not even:
            assert (whole["kept"] == EXPERTS).sum() > (whole["ids"] == EXPERTS).sum(), "nothing to drop"


@pytest.mark.sample(3)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("name", KINDS)
def test_routing_over_ranks_equals_one_process(name, world):
    run(world, check_all_options, name)


def check_capacity_per_rank() -> None:
    """Tutel's rule: C counts the tokens of the largest rank, and each rank fills the slots separately."""
    world = world_axis()
    mine = slices(world.size)[world.rank]
    moe = moe_of("softmax", capacity=1.0, capacity_over="rank")
    result = forward_and_backward(moe, world, mine)
    C = capacity(1.0, 2, max(map(len, slices(world.size))), EXPERTS)
    filled = [0] * EXPERTS
    order = tokens()[2][mine].argsort().tolist()
    for j in range(2):
        for t in order:
            e = int(result["ids"][t, j])
            assert int(result["kept"][t, j]) == (e if filled[e] < C else EXPERTS)
            filled[e] += 1


def test_capacity_per_rank():
    run(4, check_capacity_per_rank)


def check_numbering() -> None:
    world = world_axis()
    cu_seqlens = torch.tensor([[0, 2, 5, 5], [0, 5, 5, 5]][world.rank], dtype=torch.int32)
    units = TokenGroups.sequences(cu_seqlens, 5, world)
    assert units.count == 6
    assert units.group_T.tolist() == [[0, 0, 1, 1, 1], [3, 3, 3, 3, 3]][world.rank]
    routing = Routing(torch.arange(5), token_groups=units).rows(torch.tensor([4, 0]))
    assert routing.token_groups.group_T.tolist() == [[1, 0], [3, 3]][world.rank]


def test_sequence_numbers_continue_over_the_ranks():
    run(2, check_numbering)


def check_refusal() -> str:
    world = world_axis()
    mine = slices(world.size)[world.rank]
    try:
        forward_and_backward(moe_of("softmax", capacity=0.1), world, mine)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_capacity_of_zero_slots_is_refused_on_all_ranks():
    messages = set(run(3, check_refusal))
    assert len(messages) == 1
    assert "ConfigError: a capacity of 0.1 leaves int(0.1·⌈29/6⌉) = 0 slots" in messages.pop()


# -- full runs -------------------------------------------------------------------------------------------------------

KEYS = ("loss", "grad_norm", "validation_loss", "moe/balance")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("data") / "corpus", TEXT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "changes", "plan"),
    [
        ("sequence", {}, Plan(cp=2, dp=2, ep=2)),
        ("expert_choice", {}, Plan(dp=2, ep=2)),
        ("noisy", {"capacity": 1.0, "priority": True}, Plan(tp=2, ep=2, sequence_parallel=True)),
        ("gshard", {"jitter": 0.1}, Plan(pp=2, dp=2, etp=2)),
        ("topology", {"balance": "sequence"}, Plan(tp=2, dp=2, ep=2)),
        ("softmax", {"balance": "choices", "balance_over": "model", "mlp_only_layers": (1,)}, Plan(pp=2, dp=2, ep=2)),
    ],
)
def test_run_is_the_same_under_any_plan(
    name: str, changes: dict[str, Any], plan: Plan, corpus: Path, tmp_path: Path
) -> None:
    """Packed documents, micro-batches, and a stream that is sharded over tensor, context, data or pipeline ranks."""
    model = config_of(moe_of(name, **changes)).replace(vocab_size=Corpus(corpus).manifest.vocab_size, layers=2)
    train_config = TrainConfig(
        steps=3, batch=8, micro_batch=4, lr=1e-2, min_lr=1e-3, warmup=1, dtype="float64", eval_every=3, eval_samples=8
    )
    alone = RunConfig(
        name="it", runs=tmp_path / "alone", device="cpu", model=model, data=DataConfig(path=corpus, sequence=16),
        train=train_config,
    )  # fmt: skip
    with_plan = alone.replace(
        runs=tmp_path / "laid", plan=plan, train=train_config.replace(micro_batch=4 // plan.data_ranks)
    )
    Trainer(alone).fit()
    run(plan.world, train, with_plan)
    values, expected = (
        [row[key] for row in read_rows(of.folder) for key in KEYS if key in row] for of in (with_plan, alone)
    )
    assert len(expected) == 8
    assert values == pytest.approx(expected, rel=1e-9)

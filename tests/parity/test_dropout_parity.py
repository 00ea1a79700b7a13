"""Training with dropout is the same under every plan and when repeated."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from colonnade.config import DataConfig, ModelConfig, Plan, RunConfig, TrainConfig
from colonnade.data import Batch
from colonnade.model import Dropout, DropoutRates, Loss, Packed, Transformer
from colonnade.parallel.axis import SOLO
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train import Trainer
from colonnade.train.model_inputs import global_token_ids
from colonnade.train.train_step import evaluate
from tests import corpora
from tests.corpora import tensors
from tests.models import CONFIGS, ragged
from tests.models import build as build_model
from tests.parity.train_cases import CASES, PLANS, TRAIN, Run, alone, micro_batches, raw, raw_alone
from tests.worlds import assert_same, run

RATES = {"dropout": 0.2, "attention_dropout": 0.3, "embedding_dropout": 0.1}
WITH = TRAIN.replace(**RATES)


def _same_training(plan: Plan, case: str, steps: int) -> None:
    one, expected = alone(CASES[case], steps, WITH)
    with DistributedContext.build(plan) as context:
        several = Run.start(CASES[case], context, WITH)
        for (loss, norm), (loss_1, norm_1) in zip(several.go(0, steps), expected, strict=True):
            assert abs(loss - loss_1) <= 1e-10 * max(1, loss_1)
            assert abs(norm - norm_1) <= 1e-10 * max(1, norm_1)
        for name, weight in several.masters.local.items():
            assert_same(weight, several.shard_of(name, one.masters.local[name]), what=f"{plan} {name}")


def _same_gradients(plan: Plan, case: str) -> None:
    """Every gradient of one step, before clipping."""
    one = raw_alone(CASES[case], 3, WITH)
    with DistributedContext.build(plan) as context:
        several = raw(CASES[case], context, 3, WITH)
        for name, weight in several.masters.local.items():
            whole = one.masters.local[name].grad
            assert whole.abs().max() > 0, name
            assert_same(weight.grad, several.shard_of(name, whole), what=f"{plan} {name}")


def _check_training(plan: Plan, cases: list[str], steps: int) -> None:
    for case in cases:
        _same_gradients(plan, case)
    _same_training(plan, "gpt2", steps)


def plans() -> list:
    found = [plan for world in (1, 2, 3, 4) for plan in PLANS[world]] + [
        Plan(tp=3, sequence_parallel=True),
        Plan(pp=2),
        Plan(pp=2, tp=2, sequence_parallel=True),
        Plan(pp=2, cp=2, schedule="gpipe"),
    ]
    slow = [plan for plan in found if plan.world == 4 and plan.cp * plan.replicate * plan.pp > 1]
    return [pytest.param(plan, id=str(plan), marks=[pytest.mark.slow] if plan in slow else []) for plan in found]


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", plans())
def test_every_plan_draws_the_same_masks(plan: Plan) -> None:
    """Every family over two processes, where each axis is tested by itself; two families in turn where axes are
    combined.
    """
    cases, steps = list(CASES), 4
    if plan.world > 2:
        turn = [param.values[0] for param in plans()].index(plan)
        cases, steps = [cases[(2 * turn + i) % len(cases)] for i in range(2)], 2
    run(plan.world, _check_training, plan, cases, steps)


def _twenty_steps(plan: Plan) -> None:
    _same_training(plan, "gpt2", 20)


def long_run_plans() -> list:
    quick = [Plan(tp=2, sequence_parallel=True), Plan(dp=2)]
    every = [param.values[0] for param in plans()]
    return [pytest.param(plan, id=str(plan), marks=[] if plan in quick else [pytest.mark.long]) for plan in every]


@pytest.mark.slow
@pytest.mark.parametrize("plan", long_run_plans())
def test_twenty_steps_equal_one_process(plan: Plan) -> None:
    """Errors that accumulate over steps would show; the learning rate schedule ends meanwhile."""
    run(plan.world, _twenty_steps, plan)


def join(batches: list[Batch]) -> Batch:
    """Concatenate micro-batches into one."""
    lengths = [int(n) for batch in batches for n in batch.cu_seqlens.diff()]
    packed = Packed.of(lengths)
    tokens, positions, targets = (
        torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens_T", "positions_T", "targets_T")
    )
    return Batch(tokens, positions, targets, packed.cu_seqlens, packed.longest, packed.equal, batches[0].first)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", [name for name, config in CASES.items() if config.causal])
def test_micro_batch_size_changes_no_mask(case: str) -> None:
    runs = [Run.start(CASES[case], DistributedContext.solo(), WITH) for _ in range(3)]
    for step in range(3):
        four = micro_batches(step, SOLO, CASES[case])
        outs = [
            it.step(step, batches)
            for it, batches in zip(runs, (four, [join(four)], [join(four[:3]), four[3]]), strict=True)
        ]
        for out in outs[1:]:
            assert_same(out.loss_sum, outs[0].loss_sum)
    for name, weight in runs[0].masters.local.items():
        for other in runs[1:]:
            assert_same(other.masters.local[name], weight, what=name)


def test_token_indices_of_pairs_depend_on_the_sample_only() -> None:
    """Encoders pad a batch at its end, so a token's row depends on the micro-batch; its index must not."""
    ids, cu = torch.arange(12), torch.tensor([0, 5, 8, 12], dtype=torch.int32)
    both = Batch(ids, ids, ids, cu, 5, equal=False, first=12, first_R=torch.tensor([0, 5]))
    one = Batch(ids[:6], ids[:6], ids[:6], cu[:2], 5, equal=False, first=12, first_R=torch.tensor([0]))
    other = Batch(ids[:6], ids[:6], ids[:6], cu[:2], 5, equal=False, first=18, first_R=torch.tensor([0]))
    assert global_token_ids(both)[:5].tolist() == global_token_ids(one)[:5].tolist() == [12, 13, 14, 15, 16]
    assert global_token_ids(both)[5:8].tolist() == global_token_ids(other)[:3].tolist() == [18, 19, 20]


def test_rates_token_indices_step_and_seed_change_the_loss() -> None:
    """Otherwise the parity tests would also pass if nothing were dropped, or the same everywhere."""

    def loss(train: TrainConfig, step: int = 0, shift: int = 0) -> float:
        it = Run.start(CASES["gpt2"], DistributedContext.solo(), train)
        batches = [replace(b, first=b.first + shift) for b in micro_batches(0, SOLO, CASES["gpt2"])]
        return it.step(step, batches).loss_sum.item()

    plain = loss(TRAIN)
    assert plain == loss(TRAIN, step=1) == loss(TRAIN.replace(seed=1))
    found = [plain, loss(WITH), loss(WITH, step=1), loss(WITH, shift=1), loss(WITH.replace(seed=1))]
    found += [loss(TRAIN.replace(**{name: rate})) for name, rate in RATES.items()]
    assert len(set(found)) == len(found)
    assert all(abs(other / plain - 1) < 0.05 for other in found), "dropout keeps the mean"


def test_validation_applies_no_dropout() -> None:
    runs = [Run.start(CASES["gpt2"], DistributedContext.solo(), train) for train in (TRAIN, WITH)]
    batches = micro_batches(0, SOLO, CASES["gpt2"])
    assert evaluate(runs[0].model, batches) == evaluate(runs[1].model, batches)


def noisy(config: ModelConfig, T: int, **rates: float) -> Dropout:
    return Dropout.of(0, 5, config.layers, torch.arange(T) + 40, DropoutRates(**rates))


@pytest.mark.parametrize("name", CONFIGS)
def test_recomputed_blocks_draw_the_same_masks(name: str) -> None:
    """torch's checkpoint does not restore generators here: there is no generator state to restore."""
    config = CONFIGS[name]
    model = build_model(config)
    stream, attend, targets = ragged(config)
    noise = noisy(config, len(targets), residual=0.2, attention=0.3, embedding=0.1)
    stream, attend = stream._replace(dropout=noise), replace(attend, dropout=noise)

    def gradients(model: Transformer) -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(stream, attend, Loss(targets))[0].backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    plain = gradients(model)
    for block in model.blocks:
        whole: Callable = block.forward
        block.forward = lambda *args, whole=whole: checkpoint(
            whole, *args, use_reentrant=False, preserve_rng_state=False
        )
    again = gradients(model)
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def test_dropped_embeddings_get_no_gradient() -> None:
    config = CONFIGS["llama"]
    model = build_model(config)
    stream, attend, targets = ragged(config)
    stream = stream._replace(tokens_T=torch.arange(len(targets)))
    noise = noisy(config, len(targets), embedding=0.5)
    model(stream._replace(dropout=noise), attend, Loss(targets.clamp(min=0)))[0].backward()
    dropped = ~noise.at_embedding.drop(torch.ones(len(targets), config.width), 0, 0.5).bool()
    assert 0.4 < dropped.double().mean() < 0.6
    assert torch.equal(model.embed.tokens.weight.grad[: len(targets)] == 0, dropped)


# -- whole runs --------------------------------------------------------------------------------------------------------

TEXT = "a column stands in a row and bears its share of the weight of the roof"
MODEL = ModelConfig(vocab_size=300, layers=2, width=16, heads=4, kv_heads=2, ffn_width=24, context=32, tied=True)
SHORT = TrainConfig(
    steps=6, batch=4, micro_batch=2, lr=1e-2, warmup=2, schedule="constant", eval_every=0, dtype="float64", **RATES
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpora.small(tmp_path_factory.mktemp("data") / "corpus", TEXT)


@pytest.mark.slow
def test_repeated_and_resumed_runs_are_bitwise_equal(corpus: Path, tmp_path: Path) -> None:
    data = DataConfig(path=corpus, sequence=16)
    base = RunConfig(runs=tmp_path, device="cpu", model=MODEL, data=data, train=SHORT)
    one, two, stopped = (base.replace(name=name) for name in ("one", "two", "stopped"))
    for config in (one, two, stopped.replace(train=SHORT.replace(steps=3))):
        Trainer(config).fit()
    assert tensors(stopped.folder / "step-3") != tensors(one.folder / "step-6")
    Trainer(stopped).fit()
    last = [tensors(run.folder / "step-6") for run in (one, two, stopped)]
    assert last[0] == last[1] == last[2]
    other = base.replace(name="other", train=SHORT.replace(micro_batch=1))
    dry = base.replace(name="dry", train=SHORT.replace(dropout=0, attention_dropout=0, embedding_dropout=0))
    losses = [Trainer(config).fit().loss for config in (other, dry)]
    again = Trainer(one.replace(name="again")).fit().loss
    assert losses[0] == pytest.approx(again, abs=1e-12)
    assert losses[1] != pytest.approx(again, abs=1e-3)

"""Mistakes that today's frameworks made when parallelisms are combined, one test each.

Each test also shows that the mistake would be visible: the wrong result is far from the right one. test_dropout_parity
checks 20 steps with dropout under every plan; test_verify injects these mistakes, and others, into ``colonnade
verify``.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from colonnade.checkpoint import native
from colonnade.config import DataConfig, ModelConfig, MoeConfig, Plan, RunConfig, TrainConfig
from colonnade.data import Batch, Corpus, Loader
from colonnade.errors import PlanError
from colonnade.model import IGNORE, Transformer
from colonnade.model.loss import cross_entropy_sum
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import PARTIAL, WHOLE, Experts, layout_of, local_part
from colonnade.train.loop import train
from colonnade.train.train_step import evaluate
from tests import corpora
from tests.parity.train_cases import CASES, TRAIN, Run, micro_batches, ragged, raw, raw_alone
from tests.worlds import assert_same, run


def _cross_entropy(V: int, smoothing: float) -> tuple[float, float]:
    """Our loss over the ranks against torch's in one process, with all gradients; (this rank's loss, torch's)."""
    with DistributedContext.build(Plan(tp=torch.distributed.get_world_size())) as context:
        tp = context.axes.tp
        draw = torch.Generator().manual_seed(V)
        x_TD, weight_VD = (torch.randn(n, 6, generator=draw, dtype=torch.float64) for n in (10, V))
        targets_T = torch.randint(V, (10,), generator=draw).index_fill(0, torch.tensor([3]), IGNORE)
        whole = [x.clone().requires_grad_() for x in (x_TD, weight_VD)]
        theirs = F.cross_entropy(
            whole[0] @ whole[1].T, targets_T, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing
        )
        theirs.backward()
        mine = slice(*tp.part(V))
        parts = [x_TD.clone().requires_grad_(), weight_VD[mine].clone().requires_grad_()]
        ours = cross_entropy_sum(tp.fan_out(parts[0]), parts[1], targets_T, tp=tp, vocab_size=V, smoothing=smoothing)
        ours.backward()
        assert_same(ours, theirs, what=f"{V=} {smoothing=}")
        assert_same(parts[0].grad, whole[0].grad, what=f"{V=} {smoothing=}: gradient of x")
        assert_same(parts[1].grad, whole[1].grad[mine], what=f"{V=} {smoothing=}: gradient of W")
        return ours.item(), theirs.item()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_label_smoothing_is_equal_on_all_ranks(world: int) -> None:
    """Trap: each rank spreads ε over its own part of the vocabulary, and so has its own loss."""
    plain = run(world, _cross_entropy, 37, 0.0)
    smooth = run(world, _cross_entropy, 37, 0.2)
    assert len({loss for loss, _ in smooth}) == 1, "bitwise equal"
    assert abs(smooth[0][0] - plain[0][0]) > 0.1, "smoothing has an effect"


def _zero_weights(V: int) -> float:
    with DistributedContext.build(Plan(tp=2)) as context:
        tp = context.axes.tp
        start, stop = tp.part(V)
        zero = torch.zeros(stop - start, 4, dtype=torch.float64)
        return cross_entropy_sum(
            torch.ones(1, 4, dtype=torch.float64), zero, torch.tensor([V - 1]), tp=tp, vocab_size=V
        ).item()


def test_loss_is_not_off_by_the_logarithm_of_tp() -> None:
    """Trap: each rank sums over its own vocabulary only. The loss of V equal logits is log V, not log V/tp."""
    for loss in run(2, _zero_weights, 64):
        assert loss == pytest.approx(math.log(64), abs=1e-12)
        assert abs(loss - math.log(64 / 2)) > 0.6


def _uneven(case: str, V: int, tp: int) -> list[int]:
    """Two steps with a vocabulary that does not divide; returns the number of rows on each rank."""
    config = CASES[case].replace(vocab_size=V)
    one = Run.start(config, DistributedContext.solo())
    expected = one.go(0, 2)
    with DistributedContext.build(Plan(tp=tp)) as context:
        it = Run.start(config, context)
        for found, wanted in zip(it.go(0, 2), expected, strict=True):
            assert found == pytest.approx(wanted, abs=1e-10)
        for name, weight in it.masters.local.items():
            assert_same(weight, it.shard_of(name, one.masters.local[name]), what=name)
        rows = len(it.masters.local["embed.tokens.weight"])
        assert int(context.axes.tp.sum_(torch.tensor(rows))) == V, "no padding for the plan"
        return [rows]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("V", "rows"), [(101, [34, 34, 33]), (7, [3, 3, 1])])
def test_uneven_vocabularies_are_not_padded(V: int, rows: list[int]) -> None:
    """Trap: padding by the plan changes the softmax's sum, or the checkpoint, from layout to layout."""
    assert [n for (n,) in run(3, _uneven, "gpt2", V, 3)] == rows
    assert [n for (n,) in run(3, _uneven, "llama", V, 3)] == rows


def test_rank_without_vocabulary_is_refused() -> None:
    with pytest.raises(PlanError, match="5 vocabulary rows leave the last of 4 tensor-parallel ranks empty"):
        Plan(tp=4).check(CASES["gpt2"].replace(vocab_size=5))


def _partly_masked(seed: int, config: ModelConfig, valid: slice) -> Batch:
    """A micro-batch in which only the tokens in ``valid`` have a target."""
    batch = ragged(seed, config)
    mask = torch.zeros(len(batch.targets_T), dtype=torch.bool)
    mask[valid] = True
    return replace(batch, targets_T=batch.tokens_T.where(mask, IGNORE))


def _uneven_targets(plan: Plan) -> None:
    config, none = CASES["gpt2"], slice(0, 0)
    # All tokens of the first micro-batch count, one of the second, none of the third.
    whole = [_partly_masked(i, config, valid) for i, valid in enumerate((slice(None), slice(0, 1), none, slice(5, 8)))]
    whole = [replace(batch, first=13 * i) for i, batch in enumerate(whole)]
    one = Run.start(config, DistributedContext.solo(), TRAIN.replace(clip=float("inf")))
    alone = one.step(0, whole)
    with DistributedContext.build(plan) as context:
        it = Run.start(config, context, TRAIN.replace(clip=float("inf")))
        mine = whole[slice(*context.axes.dp.part(4))]
        out = it.step(0, mine)
        assert int(out.count) == int(alone.count) == 13 + 1 + 3
        assert_same(context.axes.global_sum(out.loss_sum) / out.count, alone.loss_sum / alone.count, what="loss")
        assert_same(out.norm, alone.norm, what="norm")
        for name, weight in it.masters.local.items():
            assert_same(weight, it.shard_of(name, one.masters.local[name]), what=name)
    # With the weights after the step, which show the mistake as well.
    means = [(one.model, [batch]) for batch in whole if int((batch.targets_T != IGNORE).sum())]
    mean_of_means = sum(evaluate(*each).item() for each in means) / len(means)
    assert abs(mean_of_means - evaluate(one.model, whole).item()) > 1e-3, "the mistake would be visible"


@pytest.mark.parametrize("plan", [Plan(cp=2), Plan(dp=2), Plan(pp=2)], ids=str)
def test_loss_is_divided_by_the_global_token_count(plan: Plan) -> None:
    """Trap: each context or data rank, or each micro-batch, divides by its own count of tokens."""
    run(2, _uneven_targets, plan)


def _norm(plan: Plan, case: str) -> None:
    config = CASES[case]
    one = Run.start(config, DistributedContext.solo())
    one.optimizer.step = lambda *_, **__: None
    one.step.optimizer_step.train = TRAIN.replace(clip=float("inf"))
    right = one.step(0, micro_batches(0, DistributedContext.solo().axes.dp, config)).norm
    gradients = {name: weight.grad for name, weight in one.masters.local.items()}
    assert_same(torch.cat([grad.flatten() for grad in gradients.values()]).norm(), right, what="one process")
    with DistributedContext.build(plan) as context:
        it = Run.start(config, context)
        out = it.step(0, micro_batches(0, context.axes.dp, config))
        assert_same(out.norm, right, what=f"{plan} {case}")
        layout = layout_of(it.model)
        shared = [grad for name, grad in gradients.items() if layout.get(name) in (WHOLE, PARTIAL)]
        twice = (right**2 + sum(grad.square().sum() for grad in shared)).sqrt()
        assert plan.tp == 1 or abs(twice / right - 1) > 1e-8, "counting twice would be visible"


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "plan", [Plan(tp=2), Plan(tp=2, sequence_parallel=True), Plan(pp=2), Plan(replicate=2)], ids=str
)
@pytest.mark.parametrize("case", ["gpt2", "qwen3"])
def test_gradient_norm_counts_each_parameter_once(plan: Plan, case: str) -> None:
    """Trap: replicated parameters, tied copies or replicas of shards are counted once per rank that holds them."""
    run(2, _norm, plan, case)


# -- experts -----------------------------------------------------------------------------------------------------------

EXPERTS = CASES["llama"].replace(
    ffn_bias=True,
    moe=MoeConfig(experts=4, active=2, ffn_width=8, first_k_dense_replace=1, balance_weight=0, z_weight=0),
)
"""Dropless and without a balance loss, so that a token's experts do not depend on the other tokens."""
GRIDS = [
    Plan(dp=4),  # each rank has all experts
    Plan(dp=4, ep=2),  # two ranks have the same experts
    Plan(dp=2, tp=2, ep=4),  # sharded over other ranks than the rest
    Plan(dp=2, tp=2, etp=2),  # hidden units are sharded, the output bias is not
    Plan(dp=2, cp=2, ep=2, etp=2),
]


def _experts_norm(plan: Plan) -> None:
    one = raw_alone(EXPERTS, 0)
    gradients = {name: weight.grad for name, weight in one.masters.local.items()}
    right = torch.cat([grad.flatten() for grad in gradients.values() if grad is not None]).norm()
    twice = (right**2 + sum(grad.square().sum() for name, grad in gradients.items() if "experts." in name)).sqrt()
    assert abs(twice / right - 1) > 1e-4, "counting experts twice would be visible"
    with DistributedContext.build(plan) as context:
        it = Run.start(EXPERTS, context, TRAIN.replace(clip=float("inf")))
        out = it.step(0, micro_batches(0, context.axes.dp, EXPERTS))
        assert_same(out.norm, right, what=str(plan))


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", GRIDS, ids=str)
def test_gradient_norm_counts_each_expert_once(plan: Plan) -> None:
    """Trap: every copy of an expert is counted, or only those of the first ranks."""
    run(4, _experts_norm, plan)


def _expert_gradients(plan: Plan) -> None:
    one = raw_alone(EXPERTS, 0)
    with DistributedContext.build(plan) as context:
        it = raw(EXPERTS, context, 0)
        layout = layout_of(it.model)
        compared = [name for name in it.masters.local if isinstance(layout[name], Experts)]
        assert any(name.endswith("down_bias") for name in compared), "replicated on each rank of an expert"
        for name in compared:
            whole = one.masters.local[name].grad
            assert_same(
                it.masters.local[name].grad, local_part(whole, layout[name], context.axes), what=f"{plan} {name}"
            )
            assert whole.abs().max() > 1e-6, "a factor of 2 would be visible"


@pytest.mark.sample(2)
@pytest.mark.parametrize("plan", GRIDS, ids=str)
def test_expert_gradients_are_summed_over_their_ranks(plan: Plan) -> None:
    """Trap: expert gradients are scaled by the number of data ranks, not all of which hold or feed the expert."""
    run(4, _expert_gradients, plan)


# -- resuming ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpora.small(
        tmp_path_factory.mktemp("data") / "corpus", "a column stands in a row and bears its share of weight"
    )


RESUMES = st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6])), min_size=1, max_size=5)


@settings(max_examples=30)
@given(RESUMES)
def test_no_sample_is_repeated_or_skipped_when_data_ranks_change(corpus: Path, resumes: list[tuple[int, int]]) -> None:
    """Trap: a resume at another data-parallel degree repeats samples, skips some, or reorders them."""
    split, batch = Corpus(corpus).split("train"), 12
    config = DataConfig(path=corpus, sequence=16)
    seen, found = 0, []
    for steps, ranks in resumes:  # each item is a resume on this many data ranks, for this many steps
        loaders = [Loader(split, config, batch, 2, rank, ranks) for rank in range(ranks)]
        for _ in range(steps):
            shares = [loader.at(seen) for loader in loaders]
            found += [micro.tokens_T for together in zip(*shares, strict=True) for micro in together]
            seen += batch
    alone = Loader(split, config, batch, batch)
    expected = [alone.at(at)[0].tokens_T for at in range(0, seen, batch)]
    assert torch.equal(torch.cat(found), torch.cat(expected))
    order = np.concatenate([alone.numbers(at) for at in range(0, seen, batch)])
    epoch = order[: alone.samples]
    assert len(set(epoch.tolist())) == len(epoch), "within an epoch each sample occurs once"


MODEL = ModelConfig(vocab_size=300, layers=2, width=16, heads=4, kv_heads=2, ffn_width=24, context=32, tied=True)
SHORT = TrainConfig(
    steps=6, batch=4, micro_batch=1, lr=1e-2, warmup=2, schedule="constant", eval_every=0, dtype="float64", dropout=0.2,
    attention_dropout=0.3, embedding_dropout=0.1,
)  # fmt: skip


def _runs(corpus: Path, folder: Path, plan: Plan) -> tuple[RunConfig, RunConfig]:
    """The uninterrupted run, and the one that will be interrupted."""
    base = RunConfig(
        runs=folder, device="cpu", model=MODEL, data=DataConfig(path=corpus, sequence=16), train=SHORT, plan=plan
    )
    return base.replace(name="whole"), base.replace(name="stopped")


def _losses(config: RunConfig) -> list[float]:
    rows = [json.loads(line) for line in (config.folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [Plan(cp=2), Plan(dp=2), Plan(pp=2)], ids=str)
def test_resumed_run_is_bitwise_the_uninterrupted_one(corpus: Path, tmp_path: Path, plan: Plan) -> None:
    """Trap: the checkpoint lacks state: a moment, Adam's step count, the data position, a generator."""
    whole, stopped = _runs(corpus, tmp_path, plan)
    for config in (whole, stopped.replace(train=SHORT.replace(steps=3)), stopped):
        run(2, train, config)
    files = [path.name for path in (whole.folder / "step-6").glob("*.safetensors")]
    assert len(files) == 2 * 3, "one file of weights and two of moments per rank"
    for name in files:
        assert (whole.folder / "step-6" / name).read_bytes() == (stopped.folder / "step-6" / name).read_bytes(), name
    assert _losses(whole) == _losses(stopped)
    assert len(_losses(whole)) == 6


@pytest.mark.slow
def test_run_resumed_on_other_data_ranks_is_the_same(corpus: Path, tmp_path: Path) -> None:
    """2 data ranks, then 1 process, then 2 context ranks, compared with one process throughout."""
    whole, stopped = _runs(corpus, tmp_path, Plan())
    train(whole)
    for steps, plan in ((2, Plan(dp=2)), (4, Plan()), (6, Plan(cp=2))):
        run(plan.world, train, stopped.replace(plan=plan, train=SHORT.replace(steps=steps)))
    assert _losses(stopped) == pytest.approx(_losses(whole), abs=1e-10)
    assert len(set(_losses(whole))) == 6
    one, other = (_weights(config.folder / "step-6") for config in (whole, stopped))
    for name, weight in one.items():
        assert_same(other[name], weight, what=name)


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    model = Transformer(MODEL, dtype=torch.float64)
    native.load(folder, model, DistributedContext.solo())
    return {name: p.detach() for name, p in model.named_parameters()}

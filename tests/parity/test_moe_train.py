"""``colonnade train`` with experts: any grid and degree gives the same run, also resumed, and logs its routing."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import colonnade
from colonnade.config import DataConfig, ModelConfig, MoeConfig, Plan, RouterConfig, RunConfig, TrainConfig
from colonnade.data import Corpus
from colonnade.errors import ConfigError, PlanError
from colonnade.model import Transformer, initialise
from colonnade.model.moe import DispatchOptions
from colonnade.train import Trainer, moe_autotune, training_state
from colonnade.train.loop import train
from colonnade.train.run_log import ProgressDisplay
from colonnade.train.trackers import ROUTING, read_rows
from tests.corpora import TEXT, small
from tests.worlds import assert_same
from tests.worlds import run as in_world

MOE = MoeConfig(
    experts=4, active=2, ffn_width=12, shared_width=5, first_k_dense_replace=1, balance_weight=0.1, z_weight=0.01,
    bias_rate=0.01,     router=RouterConfig(noise=1.0),
)  # fmt: skip
TRAIN = TrainConfig(
    steps=8, batch=8, micro_batch=4, lr=1e-2, min_lr=1e-3, warmup=2, dtype="float64", eval_every=4, eval_samples=5,
    save_every=4, dropout=0.1, expert_dropout=0.2,
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small(tmp_path_factory.mktemp("data") / "corpus", TEXT)


def config(corpus: Path, runs: Path, **train: object) -> RunConfig:
    model = ModelConfig(
        vocab_size=Corpus(corpus).manifest.vocab_size, layers=3, width=16, heads=4, ffn_width=20, context=32, moe=MOE
    )
    return RunConfig(
        name="it", runs=runs, device="cpu", model=model, data=DataConfig(path=corpus, sequence=16),
        train=TRAIN.replace(**train),
    )  # fmt: skip


LOSSES = ("loss", "grad_norm", "validation_loss")


def history(run: RunConfig, keys: tuple[str, ...] = (*LOSSES, "moe/balance")) -> list[float]:
    return [row[key] for row in read_rows(run.folder) for key in keys if key in row]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("plan", "then", "over"),
    [
        (Plan(tp=2, dp=2, ep=4, sequence_parallel=True, overlap=2), Plan(tp=2, etp=2, adaptive_r=2), "layer"),
        (Plan(dp=4, ep=2, etp=2, adaptive_r=0), Plan(), "model"),
        (Plan(dp=2, ep=2), Plan(dp=2), "layer"),
        (Plan(pp=2, dp=2, etp=2, adaptive_r=2), Plan(replicate=2, dp=2, ep=2), "model"),
        (Plan(cp=2, replicate=2, ep=2, reshard=False), Plan(pp=2, schedule="gpipe"), "layer"),
    ],
    ids=str,
)
def test_any_plan_gives_the_same_run(plan: Plan, then: Plan, over: str, corpus: Path, tmp_path: Path) -> None:
    """The second half resumes under another plan; with a balance loss per layer or over all layers."""
    alone = config(corpus, tmp_path / "alone")
    alone = alone.replace(model=alone.model.replace(moe=MOE.replace(balance_over=over)))
    Trainer(alone).fit()
    several = alone.replace(runs=tmp_path / "several")
    for leg_plan in (plan, then):
        # The pooled balance loss is over the micro-batches of all data ranks.
        kept = "full" if leg_plan.overlap > 1 or leg_plan.adaptive_r == 0 else "none"
        leg = several.replace(
            plan=leg_plan, train=alone.train.replace(micro_batch=4 // leg_plan.data_ranks, recompute=kept)
        )
        if leg.plan.world == 1:
            Trainer(leg).fit()
        else:
            in_world(leg.plan.world, train, leg)
        if leg_plan is plan:
            shutil.rmtree(leg.folder / "step-8")  # the run continues from step 4
    assert history(several) == pytest.approx(history(alone), rel=1e-9)
    mine, theirs = (
        colonnade.load(run.folder, device="cpu", dtype="float64").transformer.state_dict() for run in (several, alone)
    )
    for name, x in theirs.items():
        assert_same(mine[name], x, 1e-9, name)
    assert mine["blocks.1.ffn.router.bias_E"].abs().max() > 0, "the load changed the bias"
    reported = {
        row["step"]: [(row[i]["adaptive_r"], row[i]["overlap"]) for i in "12"]
        for row in read_rows(several.folder, ROUTING)
    }
    assert reported == {4: [(plan.adaptive_r, plan.overlap)] * 2, 8: [(then.adaptive_r, then.overlap)] * 2}


def test_expert_loads_are_logged(corpus: Path, tmp_path: Path) -> None:
    run = config(corpus, tmp_path, log_every=2)
    Trainer(run).fit()
    routing = read_rows(run.folder, ROUTING)
    assert [row["step"] for row in routing] == [2, 4, 6, 8]
    rows = {row["step"]: row for row in read_rows(run.folder) if "moe/busiest" in row}
    for row in routing:
        for layer in ("1", "2"):
            assert sum(row[layer]["load"]) == 8 * 16 * 2, "every choice of every token in the step"
            share = max(row[layer]["load"]) / (8 * 16 * 2)
            assert rows[row["step"]][f"moe/{layer}/busiest"] == pytest.approx(4 * share)
        assert row.keys() == {"step", "1", "2"} and row["1"]["dropped"] == 0
        assert (row["1"]["adaptive_r"], row["1"]["overlap"]) == (1, 1)
        assert rows[row["step"]]["moe/balance"] == pytest.approx((row["1"]["balance"] + row["2"]["balance"]) / 2)
    events = EventAccumulator(str(run.folder / "tensorboard"), {"scalars": 0, "histograms": 0}).Reload()
    shown = {event.step: event.histogram_value.bucket for event in events.Histograms("moe/1/load")}
    assert shown == {row["step"]: row["1"]["load"] for row in routing}, "tokens per expert"
    assert [event.value for event in events.Scalars("moe/2/adaptive_r")] == [1.0] * 4


@pytest.mark.slow
def test_adaptive_run_gives_the_same_values(corpus: Path, tmp_path: Path) -> None:
    """It chooses new options after every step; the values do not change."""
    alone = config(corpus, tmp_path / "alone")
    Trainer(alone).fit()
    plan = Plan(dp=2, etp=2, adaptive_r="auto")
    several = alone.replace(runs=tmp_path / "several", plan=plan, train=alone.train.replace(micro_batch=2, log_every=1))
    messages, _ = in_world(2, _adapting, several)
    assert history(several, LOSSES) == pytest.approx(history(alone, LOSSES), rel=1e-9)
    # The options of each step (the two layers alternate), and the message about each decision.
    ways = [(2, 4), (0, 1), (1, 2)]
    turns = [ways[i % 3] for i in range(2 * 8)]
    expected = [((1, 1), (1, 1)), *zip(turns[::2], turns[1::2], strict=True)][:8]
    rows = [row for row in read_rows(several.folder) if "moe/1/adaptive_r" in row]
    assert [tuple((row[f"moe/{i}/adaptive_r"], row[f"moe/{i}/overlap"]) for i in (1, 2)) for row in rows] == expected
    assert messages[0].startswith("layer 1: adaptive_r 1 -> 2, overlap 1 -> 4 (")
    assert messages[1].startswith("layer 2: adaptive_r 1 -> 0, overlap 1 -> 1 (") and len(messages) == 16


def _adapting(run: RunConfig) -> list[str]:
    """Each measurement finds other options faster; returns the messages printed."""
    ways = [DispatchOptions(2, 4), DispatchOptions(0), DispatchOptions(1, 2)]
    turns, messages = itertools.cycle(ways), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_autotune, "candidates", lambda now, *_: [now, *ways])
        patch.setattr(moe_autotune, "pick_spread", lambda *_: next(turns))
        patch.setattr(training_state, "CHECK_INTERVAL", 1)
        patch.setattr(ProgressDisplay, "line", lambda self, text: messages.append(text))
        train(run)
    return [line for line in messages if line.startswith("layer")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("freeze", "plan", "dtype"),
    [
        ("experts", Plan(), "bfloat16"),
        ("experts", Plan(dp=2, ep=2), "bfloat16"),
        ("rest", Plan(dp=2, ep=2), "float64"),
        ("rest", Plan(pp=2), "float64"),
    ],
)
def test_frozen_parameters_stay_unchanged(freeze: str, plan: Plan, dtype: str, corpus: Path, tmp_path: Path) -> None:
    """Bitwise, in any compute dtype; all other parameters change, and the run can resume."""
    run = config(corpus, tmp_path, freeze=freeze, dtype=dtype, micro_batch=2, save_every=2, steps=4).replace(plan=plan)
    if plan.world == 1:
        Trainer(run).fit()
    else:
        in_world(plan.world, train, run)
    shutil.rmtree(run.folder / "step-4")
    if plan.world == 1:
        Trainer(run).fit()
    else:
        in_world(plan.world, train, run)
    kind = "float64" if dtype == "float64" else "float32"
    found = colonnade.load(run.folder, device="cpu", dtype=kind).transformer
    before = initialise(Transformer(run.model, dtype=getattr(torch, kind)), run.train.seed)
    for name, was in before.named_parameters():
        unchanged = torch.equal(found.get_parameter(name), was)
        assert unchanged == ((".experts." in name) == (freeze == "experts")), name
    for name, bias_E in found.named_buffers():
        assert bool(bias_E.any()) == (freeze == "experts"), f"{name} is not an expert's"


def test_dropped_tokens_are_logged(corpus: Path, tmp_path: Path) -> None:
    run = config(corpus, tmp_path, steps=2, log_every=1)
    run = run.replace(model=run.model.replace(moe=MOE.replace(capacity=0.5)))
    Trainer(run).fit()
    assert all(row["1"]["dropped"] > 0 for row in read_rows(run.folder, ROUTING))


def test_trained_moe_model_loads_and_generates(corpus: Path, tmp_path: Path) -> None:
    run = config(corpus, tmp_path, steps=2)
    Trainer(run).fit()
    model = colonnade.load(run.folder, device="cpu")
    assert json.loads((run.folder / "step-2" / "checkpoint.json").read_text())["model"]["moe"]["experts"] == 4
    tokens = model.tokenizer.encode("we the people")
    expected = list(tokens)
    for _ in range(5):
        expected.append(int(model.logits(expected)[-1].argmax()))
    assert model.generate(tokens, max_tokens=5, temperature=0) == expected[len(tokens) :]


@pytest.mark.parametrize(
    ("make_settings", "message"),
    [
        (lambda: MOE.replace(active=5), "cannot go to 5 of 4 experts"),
        (lambda: MOE.replace(capacity=float("inf")), "capacity is inf: input should be a finite number"),
        (lambda: TRAIN.replace(eval_capacity=float("nan")), "eval_capacity.* is nan"),
        (lambda: MOE.replace(router=RouterConfig(groups=3)), "4 experts cannot be divided into 3 groups"),
        (lambda: Plan(dp=2, ep=3), "does not divide the 2 ranks of a pipeline stage .* set --plan.dp 3"),
        (lambda: Plan(dp=4, etp=4, adaptive_r=3), "adaptive_r=3 does not divide the etp=4 ranks"),
        (lambda: RunConfig(model=ModelConfig(vocab_size=9, layers=1, width=8, heads=2, ffn_width=8),
                           train=TrainConfig(expert_dropout=0.1)), "expert_dropout 0.1 applies to experts"),
        (lambda: RunConfig(model=ModelConfig(vocab_size=9, layers=1, width=8, heads=2, ffn_width=8, moe=MOE),
                           train=TrainConfig(expert_dropout=0.1, float8="rowwise", dtype="bfloat16")),
         "kernels of experts do not support dropout"),
        (lambda: Plan(dp=3, ep=3).check(ModelConfig(vocab_size=9, layers=1, width=8, heads=2, ffn_width=8, moe=MOE)),
         "4 experts cannot be divided over ep=3"),
        (lambda: Plan(dp=5, etp=5).check(ModelConfig(vocab_size=9, layers=1, width=8, heads=2, ffn_width=8, moe=MOE)),
         "12 hidden units of an expert cannot be divided over etp=5"),
        (lambda: Plan(dp=2, ep=2).check(ModelConfig(vocab_size=9, layers=1, width=8, heads=2, ffn_width=8)),
         "this model has none"),
        (lambda: Plan(overlap=2).check(ModelConfig(vocab_size=9, layers=1, width=8, heads=2, ffn_width=8)),
         "plan.overlap 2 applies to experts, and this model has none"),
    ],
)  # fmt: skip
def test_inconsistent_settings_are_refused(make_settings, message: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=message):
        make_settings()


@pytest.mark.slow
def test_inference_is_deterministic(corpus: Path, tmp_path: Path) -> None:
    run = config(corpus, tmp_path, steps=2)
    Trainer(run).fit()
    model = colonnade.load(run.folder, device="cpu")
    assert torch.equal(model.logits([1, 2, 3]), model.logits([1, 2, 3]))

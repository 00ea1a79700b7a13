"""Low-rank adapters equal plain torch under any plan; merged equals unmerged; only adapters are trained and saved."""

import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

import colonnade
from colonnade.checkpoint import native
from colonnade.cli import main
from colonnade.config import LoraConfig, ModelConfig, MoeConfig, Plan
from colonnade.errors import CheckpointError, ConfigError
from colonnade.kernels.linear.quantise import dequantise
from colonnade.model import Packed, Rows, Stream, Transformer, initialise
from colonnade.model.lora import is_adapter, merged_delta
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import layout_of, local_part
from colonnade.train.memory_estimate import estimate
from colonnade.train.training_state import TrainingState
from colonnade.tune.chats import Conversations
from colonnade.tune.packing import sft_feed
from tests import tuning
from tests.models import build
from tests.parity.test_sft import ROWS, conversations
from tests.serve import tiny
from tests.worlds import assert_same
from tests.worlds import run as in_world

LORA = LoraConfig(rank=3, alpha=5.0)
SOME = LoraConfig(rank=2, alpha=1.0, rslora=True, targets=("q", "v", "down"))
DENSE = tuning.MODEL
EXPERTS = DENSE.replace(moe=MoeConfig(experts=4, active=2, ffn_width=12, shared_width=10, balance_weight=0, z_weight=0))
MODELS = {"dense": DENSE, "experts": EXPERTS}


def drawn(config: ModelConfig, base: dict[str, Tensor]) -> Transformer:
    """A model with the weights ``base`` and random adapters, B included."""
    model = initialise(Transformer(config, dtype=torch.float64), 1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * 0.1 if is_adapter(name) else base[name])
    return model


@pytest.mark.parametrize("lora", [LORA, SOME], ids=["all", "some"])
@pytest.mark.parametrize("name", MODELS)
def test_merged_equals_unmerged(name: str, lora: LoraConfig) -> None:
    config = MODELS[name].replace(lora=lora)
    base = build(MODELS[name])
    model = drawn(config, base.state_dict())
    adapters = {name: p.detach() for name, p in model.named_parameters() if is_adapter(name)}
    changed = 0
    with torch.no_grad():
        tokens_T = torch.arange(30) * 7 % 301
        stream, attend = Stream(tokens_T, torch.arange(30)), Packed.of([30])
        before = base(stream, attend, Rows())
        for weight_name, p in base.named_parameters():
            if (delta := merged_delta(weight_name, adapters, config)) is not None:
                p.add_(delta)
                changed += 1
        assert (model(stream, attend, Rows()) - before).abs().max() > 0.01
        assert_same(model(stream, attend, Rows()), base(stream, attend, Rows()))
    per_layer = {"dense": (5, 2), "experts": (8, 3)}[name][lora is SOME]
    assert changed == 2 * per_layer


def _merged_and_sharded(name: str, world: int) -> None:
    config, base = MODELS[name].replace(lora=LORA), build(MODELS[name])
    whole = drawn(config, base.state_dict())
    adapters = {name: p.detach() for name, p in whole.named_parameters() if is_adapter(name)}
    with DistributedContext.build(Plan(tp=world)) as context, torch.no_grad():
        mine = Transformer(config, context.axes, dtype=torch.float64)
        layout = layout_of(mine)
        for own, p in mine.named_parameters():
            p.copy_(local_part(whole.get_parameter(own), layout[own], context.axes))
        for own, p in base.named_parameters():
            if (delta := merged_delta(own, adapters, config)) is not None:
                p.add_(delta)
        stream, attend = Stream(torch.arange(30) * 7 % 301, torch.arange(30)), Packed.of([30])
        assert_same(mine(stream, attend, Rows()), base(stream, attend, Rows()))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_merged_equals_unmerged_over_ranks(name: str, world: int) -> None:
    in_world(world, _merged_and_sharded, name, world)


def test_new_adapters_change_nothing() -> None:
    model = initialise(Transformer(DENSE.replace(lora=LORA)), 0)
    for name, p in model.named_parameters():
        if is_adapter(name):
            assert (name.endswith(".b")) == (not p.any())
            if name.endswith(".a"):
                assert 0.9 * p.shape[1] ** -0.5 < p.abs().max() <= p.shape[1] ** -0.5


@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_plain_torch(name: str, tmp_path: Path) -> None:
    """Of a model whose weights are W + s·BA, computed by plain torch, at the second step, when B is not 0."""
    config = MODELS[name].replace(lora=LORA)
    start = tuning.start(tmp_path, MODELS[name])
    run, data = tuning.settings(tmp_path, start, config, micro_batch=3), conversations()
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=sft_feed(data, Conversations([]))) as training,
    ):
        training.step()
        state = {key: p.detach().clone() for key, p in training.model.named_parameters()}
        rows = [data.at(i) for i in training.feed.samples.numbers(training.samples_seen)]
        outcome = training.step()
    base = build(MODELS[name])
    for key, p in base.named_parameters():
        assert torch.equal(p, state[key]), f"{key} is frozen"
    adapters = {key: p.requires_grad_() for key, p in state.items() if is_adapter(key)}
    merged = {
        key: p.detach() if (delta := merged_delta(key, adapters, config)) is None else p.detach() + delta
        for key, p in base.named_parameters()
    }

    def reference(tokens: Tensor) -> Tensor:
        inputs = Stream(tokens, torch.arange(len(tokens))), Packed.of([len(tokens)]), Rows()
        return torch.func.functional_call(base, merged, inputs)

    total, count = torch.zeros((), dtype=torch.float64), 0
    for tokens, counts in rows:
        tokens_T, counted = torch.from_numpy(tokens), torch.from_numpy(counts[1:])
        logp = reference(tokens_T).log_softmax(1)[:-1].gather(1, tokens_T[1:, None]).squeeze(1)
        total, count = total - logp[counted].sum(), count + int(counted.sum())
    (total / count).backward()
    assert_same(outcome.loss_sum / outcome.count, total.detach() / count)
    grads = [p.grad.norm() for p in adapters.values() if p.grad is not None]
    assert len(grads) == len(adapters)
    assert_same(outcome.norm, torch.stack(grads).norm())


PLANS = [
    Plan(tp=2, sequence_parallel=True),
    *(
        pytest.param(plan, marks=pytest.mark.slow)
        for plan in (Plan(tp=4), Plan(tp=2, dp=2, sequence_parallel=True), Plan(dp=2, cp=2), Plan(pp=2))
    ),
]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_any_plan_gives_the_same_losses(plan: Plan, tmp_path: Path) -> None:
    _check_plan(plan, DENSE, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, ep=2),
        *(pytest.param(plan, marks=pytest.mark.slow) for plan in (Plan(tp=2, etp=2), Plan(dp=2, etp=2, adaptive_r=1))),
    ],
    ids=str,
)
def test_experts_under_any_plan(plan: Plan, tmp_path: Path) -> None:
    _check_plan(plan, EXPERTS, tmp_path)


def _check_plan(plan: Plan, model: ModelConfig, tmp_path: Path) -> None:
    config = model.replace(lora=LORA)
    feed = sft_feed(conversations(), conversations(5))
    alone = tuning.settings(tmp_path / "alone", tuning.start(tmp_path, model), config, eval_every=2, steps=3)
    tuning.fit(alone, feed)
    several = alone.replace(runs=tmp_path / "several", plan=plan, train=alone.train.replace(micro_batch=1))
    in_world(plan.world, tuning.fit, several, feed)
    assert tuning.history(several)[:2] == pytest.approx(tuning.history(alone)[:2], rel=1e-10)
    assert tuning.history(several) == pytest.approx(tuning.history(alone), rel=1e-9)
    mine = tuning.weights(several)
    for name, x in tuning.weights(alone).items():
        assert_same(mine[name], x, 1e-9, name)


def test_resumed_bit_for_bit_from_adapters_alone(tmp_path: Path) -> None:
    feed = sft_feed(conversations(), Conversations([]))
    whole = tuning.settings(tmp_path / "whole", tuning.start(tmp_path), DENSE.replace(lora=LORA))
    tuning.fit(whole, feed)
    resumed = whole.replace(runs=tmp_path / "resumed")
    shutil.copytree(whole.folder / "step-2", resumed.folder / "step-2")
    stored = sum(path.stat().st_size for path in resumed.folder.glob("step-2/*.safetensors"))
    assert stored < 8 * DENSE.parameters, "the base and its moments are not saved"
    tuning.fit(resumed, feed)
    ours = tuning.weights(resumed)
    for name, x in tuning.weights(whole).items():
        assert torch.equal(x, ours[name]), name


@pytest.mark.slow
def test_a_run_with_adapters_is_used_like_a_model(tmp_path: Path) -> None:
    """Loaded merged, at tp=2 too, and written in another format."""
    start = tuning.start(tmp_path)
    run = tuning.settings(tmp_path, start, DENSE.replace(lora=LORA))
    tuning.fit(run, sft_feed(conversations(), Conversations([])))
    with colonnade.load(run.folder, device="cpu", dtype="float64") as model:
        assert model.config.lora is None
        logits = model.logits([1, 2, 3])
        main(["convert", str(run.folder), str(tmp_path / "merged"), "--dtype", "float64"])
    with colonnade.load(tmp_path / "merged", device="cpu", dtype="float64") as model:
        assert_same(model.logits([1, 2, 3]), logits)
    with colonnade.load(start, device="cpu", dtype="float64") as model:
        assert (model.logits([1, 2, 3]) - logits).abs().max() > 1e-3
    for got in in_world(2, _logits, run.folder):
        assert_same(got, logits)
    with pytest.raises(ConfigError, match="is a run with adapters; merge them first"):
        tuning.fit_checked(tuning.settings(tmp_path / "more", run.folder))
    shutil.rmtree(start)
    with pytest.raises(CheckpointError, match="which cannot be opened"):
        colonnade.load(run.folder)


def _logits(folder: Path) -> Tensor:
    with DistributedContext.build(Plan(tp=2), "cpu") as context:
        from colonnade.checkpoint.load_model import load_model, open_for_plan

        opened = open_for_plan(folder, Plan(tp=2))
        model = load_model(opened, context, "float64", "it", None, "stored", 64)
        return model(Stream(torch.tensor([1, 2, 3]), torch.arange(3)), Packed.of([3]), Rows()).clone()


def test_adapters_that_name_themselves_are_refused(tmp_path: Path) -> None:
    config = DENSE.replace(lora=LORA)
    run = tuning.settings(tmp_path, tmp_path / "loop", config)
    model = initialise(Transformer(config), 0)
    native.save(tmp_path / "loop", model, native.Meta(model=config, run=run), DistributedContext.solo())
    with pytest.raises(CheckpointError, match="names no model without adapters"):
        colonnade.load(tmp_path / "loop")


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, file = tuning.start(tmp_path), tuning.write_rows(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    flags = ["--device", "cpu", "--lora.rank", "4", "--lora.targets", "q", "v", "--train.steps", "2"]
    main(["finetune", str(start), "--data", str(file), *flags])
    meta = native.read_meta(tmp_path / "runs" / "sft" / "step-2")
    assert meta.model.lora == LoraConfig(rank=4, targets=("q", "v"))
    assert meta.run is not None
    assert meta.run.train.lr == pytest.approx(2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_gradients_over_a_quantised_base_equal_plain_torch(kind: str, tmp_path: Path) -> None:
    """The losses and norms are those over a base that was dequantised before; bit for bit after a resume."""
    model = DENSE.replace(head_width=16, ffn_width=64, width=64)
    run = tuning.settings(tmp_path / "a", tuning.start(tmp_path, model), model.replace(lora=LORA.replace(base=kind)))
    feed = sft_feed(conversations(), Conversations([]))
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=feed) as training,
    ):
        assert all("weight" in name or is_adapter(name) for name in training.masters.frozen | training.masters.local)
        quantised = [module for module in training.model.modules() if getattr(module, "quantised", None) is not None]
        assert len(quantised) == 5 * model.layers + 1
        plain = build(model)
        with torch.no_grad():
            for name, module in training.model.named_modules():
                if (matrix := getattr(module, "quantised", None)) is not None:
                    plain.get_parameter(f"{name}.weight").copy_(dequantise(matrix, torch.float64))
    folder = tmp_path / "plain" / "start"
    native.save(folder, plain, native.Meta(model=model), DistributedContext.solo(), tokenizer=tiny.tokenizer())
    reference = tuning.settings(tmp_path / "b", folder, model.replace(lora=LORA))
    tuning.fit(run, feed)
    tuning.fit(reference, feed)
    assert tuning.history(run) == pytest.approx(tuning.history(reference), rel=1e-9)
    before = tuning.history(run)[-2:]
    shutil.rmtree(run.folder / "step-4")
    tuning.fit(run, feed)
    assert tuning.history(run)[-2:] == before
    tp = run.replace(runs=tmp_path / "tp", plan=Plan(tp=2))
    in_world(2, tuning.fit, tp, feed)
    assert tuning.history(tp) == pytest.approx(tuning.history(reference), rel=1e-9)
    dp = run.replace(runs=tmp_path / "dp", plan=Plan(dp=2), train=run.train.replace(micro_batch=2))
    in_world(2, tuning.fit, dp, feed)
    assert tuning.history(dp) == pytest.approx(tuning.history(reference), rel=1e-9)


def test_a_frozen_base_has_no_masters(tmp_path: Path) -> None:
    config = DENSE.replace(lora=LORA)
    run = tuning.settings(tmp_path, tuning.start(tmp_path), config, dtype="bfloat16")
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=sft_feed(conversations(), Conversations([]))) as training,
    ):
        training.step()
        assert {str(w.dtype) for w in training.masters.frozen.values()} == {"torch.bfloat16"}
        assert {str(w.dtype) for w in training.masters.local.values()} == {"torch.float32"}
        assert all(is_adapter(name) for name in training.masters.local)
        state = training.optimizer.state
        assert len(state) == 2 * len(training.masters.local)
        estimated = estimate(run, "cpu").device["master weights"]
        held = sum(w.nbytes for w in (training.masters.local | training.masters.frozen).values())
        assert estimated == held

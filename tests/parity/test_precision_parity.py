"""Recomputation, float8, float16 and offloaded moments on several ranks, compared with one process."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from colonnade.checkpoint.dtensor_view import storage_view
from colonnade.config import ModelConfig, Plan, TrainConfig
from colonnade.model import Loss, Transformer, initialise
from colonnade.model.activation_checkpointing import RECOMPUTE_KINDS, RecomputeKind, set_recompute
from colonnade.model.tensor_parallel_linear import enable_float8
from colonnade.parallel.axis import SOLO_AXES, Axes, world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import masters
from colonnade.parallel.layout import layout_of, local_part
from colonnade.train.loss_scaler import LossScaler
from colonnade.train.optimizer import AdamW, OffloadedAdamW
from colonnade.train.train_step import TrainStep
from tests.models import CONFIGS, build, ragged
from tests.parity.train_cases import CASES, TRAIN, Run, micro_batches
from tests.worlds import assert_same, run


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives that are executed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "_c10d_functional" and "wait" not in str(func)
        return func(*args, **(kwargs or {}))


def _backward(config: ModelConfig, axes: Axes, kind: RecomputeKind):
    """(gradients, collectives in the forward pass, collectives in the backward pass)."""
    model = build(config, axes)
    set_recompute(model.blocks, [kind] * config.layers)
    stream, attend, targets = ragged(config)
    with CollectiveCounter() as forward:
        loss, _ = model(stream, attend, Loss(targets))
    with CollectiveCounter() as backward:
        loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, forward.count, backward.count


def _recomputed(plan: Plan) -> None:
    with DistributedContext.build(plan) as context:
        for case in ("gpt2", "qwen3_window_tied"):
            config = CONFIGS[case]
            grads, forward, backward = _backward(config, context.axes, "none")
            assert forward > backward > 0
            for kind in RECOMPUTE_KINDS[1:]:
                again, same, behind = _backward(config, context.axes, kind)
                assert same == forward
                # Of a block's two entries and two exits all but the last exit are repeated: nothing depends on that
                # one.
                entries = 4 if plan.sequence_parallel else 2
                assert behind - backward == (config.layers * (entries - 1) if kind == "full" else 0), kind
                for name, grad in grads.items():
                    assert torch.equal(again[name], grad), f"{name} with {kind} recomputation"


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(tp=2, sequence_parallel=True)], ids=str)
def test_recomputation_repeats_only_needed_collectives(plan: Plan) -> None:
    run(2, _recomputed, plan)


def _trained(plan: Plan) -> None:
    """Recomputation with FSDP and tensor parallelism, and offloaded moments: bitwise the same run."""
    with DistributedContext.build(plan) as context:
        for case, kinds in (("gpt2", ["full", "attention"]), ("qwen3", ["none", "full"])):
            plain, other = (Run.start(CASES[case], context) for _ in range(2))
            set_recompute(other.model.blocks, kinds)
            other.optimizer = other.step.optimizer_step.optimizer = OffloadedAdamW(
                other.masters.local, TRAIN, bucket_bytes=1 << 13
            )
            assert len(other.optimizer._buckets) > 3, "several buckets"
            assert plain.go(0, 3) == other.go(0, 3)
            for name, weight in plain.masters.local.items():
                assert torch.equal(weight, other.masters.local[name]), name
            for key, moment in plain.optimizer.state.items():
                assert torch.equal(moment, other.optimizer.state[key]), key
            assert other.optimizer.steps == 3


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(dp=2), Plan(tp=2, dp=2)], ids=str)
def test_recomputed_and_offloaded_training_is_bitwise_equal(plan: Plan) -> None:
    run(plan.world, _trained, plan)


def _viewed(plan: Plan) -> None:
    """The storage view of a moment in host memory equals that of one on the device."""
    with DistributedContext.build(plan) as context:
        it = Run.start(CASES["gpt2"], context)
        it.go(0, 1)
        layout, whole = layout_of(it.model), it.model.global_shapes()
        views = []
        for key, moment in it.optimizer.state.items():
            name = key.partition("/")[2]
            view = storage_view(moment, layout[name], whole[name], context, sharded=True)
            host = type(view).from_local(
                moment, context.host_storage_mesh, view.placements, run_check=False,
                shape=whole[name], stride=view.stride(),
            )  # fmt: skip
            assert host.to_local().data_ptr() == moment.data_ptr() or not moment.numel()
            assert torch.equal(host.full_tensor(), view.full_tensor()), key
            views.append(host)
        assert views


@pytest.mark.parametrize("plan", [Plan(tp=2, dp=2)], ids=str)
def test_checkpoint_contains_moments_in_host_memory(plan: Plan) -> None:
    run(plan.world, _viewed, plan)


WIDE = ModelConfig(vocab_size=67, layers=2, width=32, heads=4, kv_heads=4, head_width=8, ffn_width=64, context=64)


def _in_float8(plan: Plan, scaling: str) -> float:
    """The largest relative difference of a gradient from that of one process, in float32 around float8."""
    with DistributedContext.build(plan) as context:
        found = {}
        for where, axes in (("one", SOLO_AXES), ("several", context.axes)):
            model = build(WIDE, axes, dtype=torch.float32)
            enable_float8(model.blocks, scaling)
            stream, attend, targets = ragged(WIDE, [7, 1, 13, 11])
            loss, count = model(stream, attend, Loss(targets))
            (loss / count).backward()
            found[where] = loss, {name: p.grad for name, p in model.named_parameters()}
        assert_same(found["several"][0], found["one"][0], 1e-4)
        layout = layout_of(model)
        errors = []
        for name, grad in found["several"][1].items():
            whole = local_part(found["one"][1][name], layout[name], context.axes)
            errors.append(float((grad - whole).norm() / whole.norm()))
        return max(errors)


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_float8_gradients_hardly_depend_on_the_layout(scaling: str) -> None:
    """Ranks scale by their own maxima; powers of two make no difference (any other scale does: 5e-2 and 1e-1)."""
    errors = run(2, _in_float8, Plan(tp=2), scaling)
    assert max(errors) < 1e-5


def _skips(plan: Plan) -> tuple[list[float], list[float]]:
    t = TrainConfig(steps=20, warmup=2, lr=3e-3, dtype="float16", loss_scale=2.0**24, loss_scale_steps=3)
    with DistributedContext.build(plan) as context:
        model = initialise(Transformer(WIDE, context.axes), 7)
        weights_ = masters(model, context, torch.float16)
        scaler = LossScaler(t, context.device)
        step = TrainStep(model, weights_, AdamW(weights_.local, t), t, world_axis(), scaler=scaler)
        scales, losses = [], []
        for number in range(12):
            out = step(number, micro_batches(number % 2, context.axes.dp, WIDE))
            scales.append(float(out.loss_scale))
            losses.append(float(context.axes.dp.sum_(out.loss_sum) / out.count))
        return scales, losses


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_float16_ranks_skip_the_same_steps(world: int) -> None:
    (one, expected), *_ = run(1, _skips, Plan())
    assert len(set(one)) > 3 and one != sorted(one, reverse=True), "the scale decreases, then increases again"
    for plan in [Plan(tp=2), Plan(dp=2)] if world == 2 else [Plan(tp=2, dp=2)]:
        every_rank = run(world, _skips, plan)
        for scales, losses in every_rank:
            assert scales == one, plan
            assert losses == pytest.approx(expected, rel=2e-2)
        assert len({tuple(scales) for scales, _ in every_rank}) == 1

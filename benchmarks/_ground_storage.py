"""Part (a): training under tp and FSDP2 equals one process, and any plan loads any checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.fsdp import fully_shard

from _ground import EXACT, MODELS, Batch, Table, build, difference, exact, first_line, ragged
from colonnade.checkpoint import atomic_folder as folders
from colonnade.checkpoint import native
from colonnade.checkpoint.dcp_storage import Writer
from colonnade.checkpoint.dtensor_view import storage_view
from colonnade.config import ModelConfig, Plan, TrainConfig
from colonnade.model import Transformer
from colonnade.parallel.axis import SOLO, Axis, world_axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters, ShardedMasters, masters
from colonnade.parallel.layout import layout_of, local_part
from colonnade.train.optimizer import AdamW
from colonnade.train.train_step import Step

TRAIN = TrainConfig(steps=20, warmup=2, lr=3e-3, min_lr=1e-4, clip=0.1, label_smoothing=0.05)
STEPS = 3
PLANS = {1: [Plan()], 2: [Plan(tp=2), Plan(dp=2)], 4: [Plan(tp=4), Plan(tp=2, dp=2), Plan(dp=4)]}


@dataclass
class Run:
    """A model in training."""

    model: Transformer
    masters: Masters
    optimizer: AdamW
    step: Step
    context: DistributedContext
    total: int

    @staticmethod
    def start(
        config: ModelConfig, context: DistributedContext, total: int, compute: torch.dtype = torch.float64
    ) -> "Run":
        """``total`` micro-batches make a step, over all data ranks."""
        kept = torch.float64 if compute == torch.float64 else torch.float32
        model = build(config, context.device, context.axes, dtype=kept)
        held = masters(model, context, compute)
        optimizer = AdamW(held.local, TRAIN)
        world: Axis = world_axis() if context.world > 1 else SOLO
        return Run(model, held, optimizer, Step(model, held, optimizer, TRAIN, world), context, total)

    def go(self, first: int, stop: int) -> list[tuple[float, float]]:
        """(mean loss, gradient norm) of steps ``first`` to ``stop``."""
        found = []
        for number in range(first, stop):
            mine = range(*self.context.axes.dp.part(self.total))
            out = self.step(number, [self._batch(100 * number + i) for i in mine])
            loss = self.context.axes.dp.sum_(out.loss_sum) / out.count
            found.append((loss.item(), out.norm.item()))
        return found

    def _batch(self, seed: int) -> Batch:
        return ragged(self.model.config.vocab_size, seed).to(self.context.device)

    def against(self, one: "Run") -> float:
        """The largest difference of this rank's shards of weights and moments from one process's."""
        pairs = [(name, weight, one.masters.local[name]) for name, weight in self.masters.local.items()]
        moments = one.optimizer.state
        pairs += [(key.partition("/")[2], mine, moments[key]) for key, mine in self.optimizer.state.items()]
        return max(difference(mine, self._shard(name, whole)) for name, mine, whole in pairs)

    def _shard(self, name: str, whole: Tensor) -> Tensor:
        part = local_part(whole.detach(), layout_of(self.model)[name], self.context.axes)
        start, stop = self.context.axes.dp.part(part.shape[0])
        return part[start:stop]


def spread(got: list[tuple[float, float]], want: list[tuple[float, float]]) -> float:
    """The largest difference of losses and norms."""
    return max(abs(a - b) for pair, other in zip(got, want, strict=True) for a, b in zip(pair, other, strict=True))


def check(table: Table) -> None:
    """All of part (a) in this world."""
    context = table.context
    total = 2 * context.world  # at least two micro-batches on every data rank
    ones: dict[str, tuple[Run, list[tuple[float, float]]]] = {}
    for name, config in MODELS.items():
        one = Run.start(config, DistributedContext.solo(context.device), total)
        ones[name] = one, one.go(0, STEPS)
        for plan in PLANS[context.world]:
            table.run("a", f"{name}: {STEPS} steps, {_label(plan)}", lambda p=plan, n=name: _trains(p, n, ones, table))
    if context.device.type == "cuda":
        for name, config in MODELS.items():
            rotary = config.positions == "rotary"
            what = f"{name}: one process, GPU against CPU" + (" (rotary angles are float32)" if rotary else "")
            tolerance = 1e-6 if rotary else EXACT
            table.run("a", what, lambda c=config, t=tolerance: _gpu_against_cpu(c, total, t))
    if context.world == 1:
        table.run("a", "FSDP2 over one rank against plain parameters", lambda: _one_rank(table))
    pairs = (len(PLANS[context.world]) + (context.world > 1)) ** 2
    table.run("a", f"save -> load, {pairs} pairs of plans, {STEPS} more steps", lambda: _pairs(table, total))
    if context.world > 1:
        table.run("a", "async_save while training goes on, loaded by one process", lambda: _async(table, total))
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            for setting in ("factor 1, force sum", "factor 1", "force sum", "neither"):
                what = f"FSDP2 gradient of {_short(dtype)} over its sum: {setting}"
                table.run("a", what, lambda d=dtype, s=setting: _reduction(table, d, s))
    for plan in PLANS[context.world]:
        for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 3e-2)):
            what = f"{_short(dtype)} compute against float64 in one process, losses of {STEPS} steps, {_label(plan)}"
            table.run("a", what, lambda p=plan, d=dtype, t=tolerance: _low(table, p, d, t, total))


def _label(plan: Plan) -> str:
    return f"tp{plan.tp} dp{plan.dp}"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _trains(plan: Plan, name: str, ones: dict[str, tuple[Run, list[tuple[float, float]]]], table: Table):
    one, want = ones[name]
    context = table.on(plan)
    several = Run.start(MODELS[name], context, one.total)
    got = several.go(0, STEPS)
    assert all(norm > TRAIN.clip for _, norm in want), "the clip must be active"
    return exact(max(spread(got, want), several.against(one)))


def _gpu_against_cpu(config: ModelConfig, total: int, tolerance: float):
    gpu, cpu = (Run.start(config, DistributedContext.solo(device), total) for device in ("cuda", "cpu"))
    losses = [run.go(0, STEPS) for run in (gpu, cpu)]
    moved = (difference(w.cpu(), cpu.masters.local[name]) for name, w in gpu.masters.local.items())
    return exact(max(spread(*losses), *moved), tolerance)


def _one_rank(table: Table):
    """FSDP2 itself, which Colonnade does not use over one rank."""
    context, config = table.context, MODELS["gpt2, tied, biases"]
    gradients = []
    for sharded in (False, True):
        model = build(config, context.device)
        held = (
            ShardedMasters(model, context.fsdp_mesh, torch.float64)
            if sharded
            else masters(model, context, torch.float64)
        )
        out = Step(model, held, AdamW(held.local, TRAIN), TRAIN, SOLO)(
            0, [ragged(257, i).to(context.device) for i in (1, 2)]
        )
        gradients.append((out.norm, held.local))
    (norm, plain), (norm_1, shards) = gradients
    return exact(max(difference(norm_1, norm), *(difference(shards[name], w) for name, w in plain.items())))


def _pairs(table: Table, total: int):
    """Every plan of this world and one process save after 3 steps, and each loads them all and goes on."""
    world, device, root = table.context.world, table.context.device, Path(table.scratch)
    plans: list[Plan | None] = [*PLANS[world]] + ([None] if world > 1 else [])
    worst, configs = 0.0, list(MODELS.values())

    def on(plan: Plan | None, work: Callable[[DistributedContext], float]) -> float:
        return work(DistributedContext.solo(device) if plan is None else table.on(plan))

    after: dict[tuple[int, int], list[tuple[float, float]]] = {}

    def save(number: int, which: int, context: DistributedContext) -> float:
        it = Run.start(configs[which], context, total)
        it.go(0, STEPS)
        # In a world of several, the run of one process is rank 0's, which the others repeat without writing.
        if plans[number] is not None or table.context.rank == 0:
            meta = native.Meta(model=it.model.config, step=STEPS)
            native.save(root / f"{which}-{number}", it.model, meta, context, masters=it.masters, optimizer=it.optimizer)
        table.everybody("")
        after[number, which] = it.go(STEPS, 2 * STEPS)
        return 0.0

    def load(number: int, which: int, context: DistributedContext) -> float:
        it = Run.start(configs[which], context, total)
        it.go(0, 1)  # something to overwrite
        native.load(root / f"{which}-{number}", it.model, context, masters=it.masters, optimizer=it.optimizer)
        return spread(it.go(STEPS, 2 * STEPS), after[number, which])

    for which in range(len(configs)):
        for number, plan in enumerate(plans):
            on(plan, lambda context, n=number, w=which: save(n, w, context))
        for plan in plans:
            for number in range(len(plans)):
                worst = max(worst, on(plan, lambda context, n=number, w=which: load(n, w, context)))
    return exact(worst)


def _async(table: Table, total: int):
    """torch's asynchronous save of the storage view through our own writer; the optimizer moves meanwhile."""
    config, path = MODELS["gpt2, tied, biases"], Path(table.scratch) / "async"
    plan = PLANS[table.context.world][-2]
    context = table.on(plan)
    it = Run.start(config, context, total)
    it.go(0, STEPS)
    layout, whole, sharded = layout_of(it.model), it.model.whole_shapes(), plan.dp > 1
    local = {f"weights/{name}": w for name, w in it.masters.local.items()} | it.optimizer.state

    def view(key: str, tensor: Tensor) -> Tensor:
        name = key.partition("/")[2]
        return storage_view(tensor.detach(), layout[name], whole[name], context, sharded=sharded)

    meta = native.Meta(model=it.model.config, step=STEPS)
    writing = state_dict_saver.async_save(
        {key: view(key, tensor) for key, tensor in local.items()},
        storage_writer=Writer(
            path, lambda place: folders.write_json(place / native.META, meta.model_dump(mode="json"))
        ),
        planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        # A group of its own: the writing thread's messages must not fall between those of training.
        process_group=dist.new_group(backend="gloo"),
    )
    want = it.go(STEPS, 2 * STEPS)
    writing.result()
    table.everybody("")
    one = Run.start(config, DistributedContext.solo(table.context.device), total)
    native.load(path, one.model, one.context, masters=one.masters, optimizer=one.optimizer)
    return exact(spread(one.go(STEPS, 2 * STEPS), want))


def _reduction(table: Table, dtype: torch.dtype, setting: str):
    """The gradient of a weight under FSDP2, whose every rank contributes (rank + 1), over the true sum."""
    context = table.on(Plan(dp=table.context.world))
    world = context.world
    layer = nn.Linear(4, 6, bias=False, device=context.device, dtype=dtype)
    shards = fully_shard(layer, mesh=context.fsdp_mesh)
    if "factor" in setting:
        shards.set_gradient_divide_factor(1.0)
    if "force" in setting:
        shards.set_force_sum_reduction_for_comms(True)
    x = torch.full((1, 4), float(context.rank + 1), dtype=dtype, device=context.device)
    try:
        layer(x).sum().backward()
    except RuntimeError as why:
        # Known of gloo: the reason why Colonnade forces a sum.
        return first_line(why), "ok" if "PREMUL_SUM" in str(why) and setting == "factor 1" else "WRONG"
    found = layer.weight.grad.full_tensor() / (world * (world + 1) / 2)
    ratio = found.mean().item()
    return f"{ratio:.4g}", "ok" if abs(ratio - (1.0 if setting.startswith("factor") else 1 / world)) < 1e-3 else "WRONG"


def _low(table: Table, plan: Plan, dtype: torch.dtype, tolerance: float, total: int):
    """Heads of 8, which a GPU's 16-bit kernels take as they are."""
    worst = 0.0
    for config in (config.but(head_width=8) for config in MODELS.values()):
        want = Run.start(config, DistributedContext.solo(table.context.device), total).go(0, STEPS)
        got = Run.start(config, table.on(plan), total, dtype).go(0, STEPS)
        worst = max(worst, *(abs(a - b) / b for (a, _), (b, _) in zip(got, want, strict=True)))
    return exact(worst, tolerance)

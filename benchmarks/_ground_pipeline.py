"""Part (c): torch's pipeline schedules over our blocks equal one process, with tensor parallelism and FSDP2 inside.

Each microbatch's own things (document boundaries, positions, targets) must reach every stage. Torch cuts the tensors
among the arguments into microbatches and hands everything else to all of them, so an index tensor goes through
``step``, and what it points into stands on the stage, or travels as an opaque object:

    stage.batches = batches;  schedule.step(tokens, i=torch.arange(M))
    schedule.step(tokens, i=torch.arange(M), batches=Feed(batches))
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from _ground import GPT2, QWEN3, Batch, Table, batch_of, build, difference, exact, whole_of
from colonnade.config import ModelConfig
from colonnade.model import IGNORE, Loss, Stream, Transformer
from colonnade.model.head import Projection
from colonnade.parallel.axis import Axes, Axis, group_name
from colonnade.parallel.layout import PARTIAL, layout_of, local_part

MICROBATCHES = 4
LENGTHS = [5, 1, 7, 3]
DOUBLE = {ScheduleInterleaved1F1B, ScheduleZBVZeroBubble}
"""Two stages on each rank."""


@dataclass(frozen=True)
class Case:
    """One schedule on one grid of ranks."""

    schedule: type
    pp: int
    tp: int = 1
    fsdp: bool | None = None
    """reshard_after_forward, or None without FSDP2."""
    config: ModelConfig = QWEN3
    times: int = 1
    """Over how many stream lengths, each with new stages and a new schedule."""
    keyword: bool = False
    """The batches travel through ``step``."""
    plain: bool = False
    """torch's own warm-up, in which the rank at the bottom of a V sends itself a message (torch 2.11)."""

    def label(self, world: int) -> str:
        """For the table."""
        name = self.schedule.__name__.removeprefix("Schedule")
        parts = [f"{name} pp{self.pp} tp{self.tp} dp{world // self.pp // self.tp}"]
        parts += [f"FSDP2 reshard_after_forward={self.fsdp}"] if self.fsdp is not None else []
        parts += ["known to be WRONG"] if self.fsdp and self.schedule is ScheduleZBVZeroBubble else []
        parts += ["tied"] if self.config.tied else []
        parts += ["Feed through step"] if self.keyword else []
        parts += ["warm-up with messages to oneself"] if self.plain else []
        parts += [f"{self.times} stream lengths, a schedule each"] if self.times > 1 else []
        return ", ".join(parts)


def cases(world: int) -> list[Case]:
    """What can be laid over this many ranks."""
    single, v = (ScheduleGPipe, Schedule1F1B, ScheduleInterleaved1F1B), ScheduleZBVZeroBubble
    found = []
    if world > 1:
        found += [Case(schedule, 2) for schedule in single] if world == 2 else []
        found += [Case(schedule, 2, fsdp=reshard) for schedule in single[1:] for reshard in (False, True)]
        found += [
            Case(Schedule1F1B, 2, config=GPT2),
            Case(Schedule1F1B, 2, keyword=True),
            Case(Schedule1F1B, 2, times=3),
        ]
    if world == 4:
        found += [Case(schedule, 2, tp=2) for schedule in single]
        found += [Case(schedule, 4) for schedule in single]
        found += [Case(v, 2, tp=2), Case(v, 4)]
    # The likeliest to fail come last: a failure between two messages leaves the group unusable.
    found += [Case(v, 1, fsdp=reshard) for reshard in (False, True)]
    if world > 1:
        found += [Case(v, 2), Case(v, 2, config=GPT2)] + [Case(v, 2, fsdp=reshard) for reshard in (False, True)]
    found += [Case(v, 1, fsdp=False, keyword=True)]
    return found + ([Case(v, 2, plain=True)] if world == 2 else [])


def check(table: Table) -> None:
    """All of part (c) in this world."""
    for case in cases(table.context.world):
        table.run("c", case.label(table.context.world), lambda c=case: _equals_one_process(table, c))


class Feed:
    """Something torch's pipelining does not look into."""

    def __init__(self, batches: Sequence[Batch]):
        self.batches = batches

    def __getitem__(self, i: int) -> Batch:
        return self.batches[i]


class Stage(PipelineStage):
    """Sends itself no message before the first step: gloo cannot, and nothing needs it."""

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.peer != dist.get_rank()]


class Part(nn.Module):
    """Some blocks of a Transformer, under the names they have there, with its ends where they belong."""

    def __init__(self, whole: Transformer, number: int, parts: int, count: Tensor, batches: Sequence[Batch]):
        super().__init__()
        self.batches = Feed(batches)
        first, last = number == 0, number == parts - 1
        each = len(whole.blocks) // parts
        mine = range(number * each, (number + 1) * each)
        self.axes, self.config, self.turn, self.count = whole.axes, whole.config, whole._turn, count
        self.embed = whole.embed if first else None
        self.blocks = nn.ModuleDict({str(i): whole.blocks[i] for i in mine})
        self.norm = whole.norm if last else None
        self.output = None
        if last:
            # Tied weights are two parameters under pipelining, whose gradients are summed (layout rule 9).
            weight = whole.embed.tokens if whole.unembed is None else whole.unembed
            self.output = copy.deepcopy(weight)

    def forward(self, x: Tensor, i: Tensor, batches: Feed | None = None) -> Tensor:
        """Token ids or x_TD to x_TD, or to the summed loss of the microbatch over the count of all."""
        batch = (batches or self.batches)[int(i)]
        if self.embed is not None:
            x = self.embed(Stream(x, batch.positions_T))
        T, turn = len(batch.positions_T), self.turn(batch.positions_T, x.dtype)
        for number, block in self.blocks.items():
            x = block(x, T, turn, batch.attend.at(int(number), None))
        if self.norm is None or self.output is None:
            return x
        loss, _ = Loss(batch.targets_T)(
            self.norm(x), T, Projection(self.output.weight, self.axes, self.config.vocab_size)
        )
        return (loss / self.count).reshape(1)

    def gradient(self, name: str) -> Tensor | None:
        """This part's gradient of a parameter of the whole model, both copies of a tied one together."""
        names = [name] + (
            ["output.weight"] if name == ("embed.tokens.weight" if self.config.tied else "unembed.weight") else []
        )
        mine = dict(self.named_parameters())
        found = [whole_of(mine[n].grad) for n in names if n in mine and mine[n].grad is not None]
        return sum(found[1:], found[0]) if found else None


@functools.cache
def _mesh(device: str, pp: int, dp: int, tp: int) -> DeviceMesh:
    return DeviceMesh(device, torch.arange(pp * dp * tp).view(pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))


def _equals_one_process(table: Table, case: Case) -> tuple[str, str]:
    context, config = table.context, case.config.but(layers=8)
    dp = context.world // case.pp // case.tp
    mesh = _mesh(context.device.type, case.pp, dp, case.tp)
    pp, data, tp = (
        Axis(n, mesh[n].size(), mesh[n].get_local_rank(), group_name(mesh.get_group(n))) for n in ("pp", "dp", "tp")
    )
    worst = 0.0
    for extra in range(case.times):
        lengths = [*LENGTHS, *[2] * extra]
        batches = [batch_of(lengths, config.vocab_size, seed).to(context.device) for seed in range(MICROBATCHES * dp)]
        count = torch.stack([(b.targets_T != IGNORE).sum() for b in batches]).sum()
        one = build(config, context.device)
        want = torch.zeros((), dtype=torch.float64, device=context.device)
        for b in batches:
            loss, _ = one(Stream(b.tokens_T, b.positions_T), b.attend, Loss(b.targets_T))
            (loss / count).backward()
            want += loss.detach() / count
        axes = Axes(tp=tp)
        start = MICROBATCHES * mesh["dp"].get_local_rank()
        parts, loss = _pipeline(table, case, mesh, axes, batches[start : start + MICROBATCHES], count)
        layout = layout_of(build(config, context.device, axes))
        total = loss.clone()
        dist.all_reduce(total)
        worst = max(worst, difference(total / case.tp, want))
        for name, parameter in one.named_parameters():
            expected = local_part(parameter.grad, layout[name], axes)
            found = [g for part in parts if (g := part.gradient(name)) is not None]
            mine = sum(found[1:], found[0]) if found else torch.zeros_like(expected)
            mine = pp.sum_(mine if case.fsdp is not None else data.sum_(mine))  # FSDP2 has summed over data ranks
            worst = max(worst, difference(axes.tp.sum_(mine) if layout[name] is PARTIAL else mine, expected))
    figure, verdict = exact(max(table.everybody(worst)))
    if case.fsdp and case.schedule is ScheduleZBVZeroBubble:
        return figure, "ok" if verdict != "ok" else "right, though it was wrong before (layout rule 8)"
    return figure, verdict


def _pipeline(
    table: Table, case: Case, mesh: DeviceMesh, axes: Axes, batches: list[Batch], count: Tensor
) -> tuple[list[Part], Tensor]:
    """One step; this rank's parts, with gradients, and its loss (0 where the last part is elsewhere)."""
    device, config, rank = table.context.device, case.config.but(layers=8), mesh["pp"].get_local_rank()
    number = case.pp * (2 if case.schedule in DOUBLE else 1)
    v = case.schedule is ScheduleZBVZeroBubble
    mine = [rank, number - 1 - rank] if v else list(range(rank, number, case.pp))
    parts = [Part(build(config, device, axes), i, number, count, batches) for i in mine]
    for part in parts:
        if case.fsdp is not None:
            _shard(part, mesh["dp"], case.fsdp)
    stages = [
        (PipelineStage if case.plain else Stage)(part, i, number, device, group=mesh.get_group("pp"))
        for i, part in zip(mine, parts, strict=True)
    ]
    loss_fn: Callable[[Tensor, Tensor], Tensor] = lambda out, _: out.sum()  # noqa: E731
    held = stages if case.schedule in DOUBLE else stages[0]
    schedule = case.schedule(held, MICROBATCHES, loss_fn=loss_fn, scale_grads=False)
    tokens = torch.cat([b.tokens_T for b in batches])
    losses: list[Tensor] = []
    rest = {"i": torch.arange(MICROBATCHES), "losses": losses} | ({"batches": Feed(batches)} if case.keyword else {})
    target = torch.zeros(MICROBATCHES, device=device)
    schedule.step(*([tokens] if 0 in mine else []), target=target, **rest)
    zero = torch.zeros((), dtype=torch.float64, device=device)
    return parts, torch.stack(losses).sum().detach().reshape(()) if losses else zero


def _shard(part: Part, mesh: DeviceMesh, reshard: bool) -> None:
    for block in part.blocks.values():
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(part, mesh=mesh, reshard_after_forward=reshard)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

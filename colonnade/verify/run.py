"""Plan after plan on the same processes, each compared with one process, number by number.

    error = max|Δ| / ‖reference‖∞        in float64, where rounding leaves about 1e-15 and a fault does not

Every process works out for itself what one process alone computes, and compares its own parts of every tensor with the
same parts of that; the worst of all ranks is the result. It does so on its own device: angles of rotary positions are
float32, and a GPU's cosine differs from a CPU's in the last place of that. Each plan also loads the checkpoint that the
plan before it wrote (the first one that of one process, one process that of the last), so that every plan's files are
read by another; but for those of a plan that trained wrongly.
"""

import gc
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from colonnade.config import ModelConfig, Plan
from colonnade.parallel.axis import Axis, world_axis
from colonnade.parallel.distributed_context import DistributedContext, choose_device, file_process_group, local_device
from colonnade.parallel.launch import launch
from colonnade.train.optimizer import MOMENTS
from colonnade.verify.trial import Trial

TOLERANCE = 1e-10
CHECKS = {
    "loss": "the mean losses of two steps",
    "gradients": "every gradient of the first step",
    "norm": "the global gradient norms before the clip",
    "step": "every weight and moment after two steps, the second one clipped",
    "load": "every weight and moment from the checkpoint that another plan wrote",
    "tokens": "how many of the greedy tokens differ",
}
"""What is compared, in the order of the columns."""


@dataclass
class Result:
    """One plan's errors."""

    plan: Plan
    errors: dict[str, float] = field(default_factory=dict)
    """By check."""
    where: dict[str, str] = field(default_factory=dict)
    """The tensor in which a check's error is largest."""

    @property
    def ok(self) -> bool:
        """Whether the plan computes what one process computes."""
        return all(error <= TOLERANCE for error in self.errors.values())

    def note(self, check: str, error: float, where: str = "") -> None:
        """Keep the larger error of a check; one that is no number is infinite."""
        if math.isnan(error):
            error = math.inf
        if error > self.errors.get(check, -1.0):
            self.errors[check], self.where[check] = error, where


OnResult = Callable[[Result], None]


def verify(
    model: ModelConfig, plans: Sequence[Plan], shown: OnResult | None = None, device: str = "cpu"
) -> list[Result]:
    """Compare each of ``plans``, all of one world, with one process, on local processes.

    ``device`` is "cpu" (gloo) or "cuda" (NCCL, a GPU a rank). ``shown`` is told each result as it comes, in the process
    of rank 0. Raises :class:`~colonnade.errors.PlanError` for a plan that ``model`` does not allow, and for more ranks
    than there are GPUs.
    """
    for plan in plans:
        plan.check(model)
    world = plans[0].world
    assert all(plan.world == world for plan in plans), "plans of one world share their processes"
    choose_device(plans[0], device)
    with tempfile.TemporaryDirectory(prefix="colonnade-verify-") as folder:
        return launch(_work, (model, tuple(plans), Path(folder), shown, device), Plan(dp=world))


@dataclass(frozen=True)
class _Reference:
    """What one process computes."""

    trial: Trial
    tokens: list[int]

    @staticmethod
    def of(model: ModelConfig, processes: int, data_ranks: int = 1, device: torch.device | str = "cpu") -> "_Reference":
        """``data_ranks`` of which each takes one of what is one micro-batch here, where that makes a difference."""
        trial = Trial.start(model, DistributedContext.solo(device), processes, merged=data_ranks).train()
        return _Reference(trial, trial.greedy())


def _work(
    model: ModelConfig, plans: Sequence[Plan], folder: Path, shown: OnResult | None, device: str = "cpu"
) -> list[Result]:
    """On every rank."""
    gc.freeze()  # what is imported stays: each ground is collected at its end, and that looks at the rest only
    try:
        return _one_after_another(model, plans, folder, shown, device)
    finally:
        gc.unfreeze()  # or the interpreter's end would not collect it either, and extensions would report their leaks


def _one_after_another(
    model: ModelConfig, plans: Sequence[Plan], folder: Path, shown: OnResult | None, device: str
) -> list[Result]:
    """One plan after the other."""
    world = plans[0].world
    own = local_device(device)
    ones = {
        ranks: _Reference.of(model, world, ranks, own) for ranks in sorted({_merged(model, plan) for plan in plans})
    }
    writer, saved = next(iter(ones.values())), folder / "one"
    results: list[Result] = []
    for number, plan in enumerate(plans):
        with file_process_group(folder / f"meet-{number}", device), DistributedContext.build(plan, device) as ground:
            if number == 0:
                if ground.rank == 0:
                    writer.trial.save(saved)
                world_axis().sum_(torch.zeros(()))  # nobody reads before it is written
            try:
                one = ones[_merged(model, plan)]
                result, trial = _compare(model, ground, one, saved, writer)
                trained = result.errors["step"] <= TOLERANCE
                if trained:  # what went wrong here must not be blamed on the plan that loads next
                    writer, saved = one, folder / f"plan-{number}"
                    trial.save(saved)
            except Exception as why:
                why.add_note(f"under the plan: {plan}")
                raise
        results.append(result)
        if number + 1 == len(plans) and trained:
            last = Trial.start(model, one.trial.ground, world, seed=1)
            last.load(saved)
            result.note("load", *_states_differ(last, writer.trial))
        if shown is not None and ground.rank == 0:
            shown(result)
    return results


def _merged(model: ModelConfig, plan: Plan) -> int:
    """How many data ranks' micro-batches are one of the one process: all, where experts are balanced among them."""
    return 1 if model.moe is None else plan.data_ranks


def _compare(
    model: ModelConfig, ground: DistributedContext, one: _Reference, saved: Path, writer: _Reference
) -> tuple[Result, Trial]:
    """All checks of one plan; the worst of all ranks, the same on each. ``saved`` holds what ``writer`` computed."""
    result, mine = Result(ground.plan), Trial.start(model, ground, ground.world).train()
    for check, here, there in (("loss", mine.losses, one.trial.losses), ("norm", mine.norms, one.trial.norms)):
        pair = torch.tensor([here, there], dtype=torch.float64)
        result.note(check, ((pair[0] - pair[1]).abs() / pair[1].abs()).max().item())
    result.note("gradients", *_gradients_differ(mine, one.trial))
    result.note("step", *_states_differ(mine, one.trial))
    other = Trial.start(model, ground, ground.world, seed=1)
    other.load(saved)
    result.note("load", *_states_differ(other, writer.trial))
    if model.causal:
        result.note("tokens", float(sum(a != b for a, b in zip(mine.greedy(), one.tokens, strict=True))))
    return _worst_of_all(result, world_axis(), _names(one.trial)), mine


def _names(one: Trial) -> list[str]:
    """Of all that is compared."""
    return [*one.masters.local, *one.optimizer.state, *(name for name, _ in one.model.named_buffers())]


def _gradients_differ(mine: Trial, one: Trial) -> tuple[float, str]:
    """The largest error of the first step's gradients, and where it is; one that is missing is a miss."""
    for name, weight in mine.masters.local.items():
        if weight.numel() and (name in mine.gradients) != (name in one.gradients):
            return float("inf"), name
    return _differ(mine, mine.gradients, one.gradients)


def _states_differ(mine: Trial, one: Trial) -> tuple[float, str]:
    """The largest error of the weights and of each kind of moment, and where it is."""
    pairs = [(mine.masters.local, one.masters.local)]
    pairs += [(_of_kind(mine, kind), _of_kind(one, kind)) for kind in MOMENTS]
    worst = max(_differ(mine, parts, whole) for parts, whole in pairs)
    for name, state in mine.model.named_buffers():
        worst = max(worst, ((state - one.model.get_buffer(name)).abs().max().item(), name))
    return worst


def _of_kind(trial: Trial, kind: str) -> dict[str, Tensor]:
    return {key: moment for key, moment in trial.optimizer.state.items() if key.startswith(f"{kind}/")}


@torch.no_grad()
def _differ(mine: Trial, parts: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> tuple[float, str]:
    """The largest error among this rank's ``parts`` of the tensors ``whole``, and where it is.

    The unit is the largest number in any of them: a gradient that should be 0 is compared with its neighbours.
    """
    worst = (0.0, "")
    unit = torch.stack([reference.abs().max() for reference in whole.values()]).max()
    for key, part in parts.items():
        reference = whole[key]
        expected = mine.mine(key.rpartition("/")[2], reference)
        if part.shape != expected.shape:
            return float("inf"), key
        if part.numel():
            error = ((part - expected).abs().max() / unit).nan_to_num(nan=torch.inf).item()
            worst = max(worst, (error, key))
    return worst


def _worst_of_all(result: Result, world: Axis, names: list[str]) -> Result:
    """The largest error of any rank for each check, and where it is: one of ``names``, by its number."""
    checks = list(result.errors)
    mine = torch.tensor([result.errors[check] for check in checks], dtype=torch.float64)
    worst = world.max_(mine)
    where = torch.tensor([names.index(at) if (at := result.where[check]) else -1 for check in checks])
    where = world.max_(where.where(mine == worst, -1))
    for check, error, at in zip(checks, worst.tolist(), where.tolist(), strict=True):
        result.errors[check], result.where[check] = error, names[at] if at >= 0 else ""
    return result

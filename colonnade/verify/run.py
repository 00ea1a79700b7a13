"""Runs plan after plan on the same processes and compares each with one process, element by element.

    error = max|Δ| / ‖reference‖∞        in float64, where rounding leaves about 1e-15, and a fault much more

Every rank computes the reference of one process by itself and compares its own shard of every tensor with the same
shard of the reference; the worst rank counts. The reference is computed on the rank's own device, because rotary angles
are float32 and a GPU's cosine differs from a CPU's in the last bit. Each plan also loads the checkpoint that the
previous plan wrote (the first plan that of one process, one process that of the last), so every plan's files are read
under another plan. Checkpoints of plans that trained wrongly are not used.

The reports are a line per plan, a table, and JSON.
"""

import gc
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.table import Table
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
"""The checks, in column order."""


@dataclass
class Result:
    """One plan's errors."""

    plan: Plan
    errors: dict[str, float] = field(default_factory=dict)
    """The worst error of each check."""
    where: dict[str, str] = field(default_factory=dict)
    """The tensor with the worst error of each check."""

    @property
    def ok(self) -> bool:
        """Whether all errors are within the tolerance."""
        return all(error <= TOLERANCE for error in self.errors.values())

    def note(self, check: str, error: float, where: str = "") -> None:
        """Record the larger error of a check; NaN counts as infinite."""
        if math.isnan(error):
            error = math.inf
        if error > self.errors.get(check, -1.0):
            self.errors[check], self.where[check] = error, where


OnResult = Callable[[Result], None]


def verify(
    model: ModelConfig, plans: Sequence[Plan], shown: OnResult | None = None, device: str = "cpu"
) -> list[Result]:
    """Compare each of ``plans``, all of one world, with one process, on local processes.

    ``device`` is "cpu" (gloo) or "cuda" (NCCL, a GPU per rank). ``shown`` is called with each result as it comes, in
    rank 0's process. Raises :class:`~colonnade.errors.PlanError` for a plan that ``model`` does not allow, and for more
    ranks than there are GPUs.
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
    """The results of one process."""

    trial: Trial
    tokens: list[int]

    @staticmethod
    def of(model: ModelConfig, processes: int, data_ranks: int = 1, device: torch.device | str = "cpu") -> "_Reference":
        """Train on one process; a micro-batch here is one on each of ``data_ranks``, where experts are balanced."""
        trial = Trial.start(model, DistributedContext.solo(device), processes, merged=data_ranks).train()
        return _Reference(trial, trial.greedy())


def _work(
    model: ModelConfig, plans: Sequence[Plan], folder: Path, shown: OnResult | None, device: str = "cpu"
) -> list[Result]:
    """Run on every rank."""
    gc.freeze()  # each context ends with a collection, which need not scan the imported modules
    try:
        return _run_plans(model, plans, folder, shown, device)
    finally:
        gc.unfreeze()  # otherwise they are not collected at exit either, and extensions report leaks


def _run_plans(
    model: ModelConfig, plans: Sequence[Plan], folder: Path, shown: OnResult | None, device: str
) -> list[Result]:
    world = plans[0].world
    own_device = local_device(device)
    merged = sorted({_merged(model, plan) for plan in plans})
    references = {ranks: _Reference.of(model, world, ranks, own_device) for ranks in merged}
    writer, saved = next(iter(references.values())), folder / "one"
    results: list[Result] = []
    for number, plan in enumerate(plans):
        with (
            file_process_group(folder / f"rendezvous-{number}", device),
            DistributedContext.build(plan, device) as context,
        ):
            if number == 0:
                if context.rank == 0:
                    writer.trial.save(saved)
                world_axis().sum_(torch.zeros(()))  # a barrier: no rank reads before it is written
            try:
                reference = references[_merged(model, plan)]
                result, trial = _compare(model, context, reference, saved, writer)
                trained = result.errors["step"] <= TOLERANCE
                if trained:  # otherwise the next plan, which loads it, would be blamed
                    writer, saved = reference, folder / f"plan-{number}"
                    trial.save(saved)
            except Exception as error:
                error.add_note(f"under the plan: {plan}")
                raise
        results.append(result)
        if number + 1 == len(plans) and trained:
            last = Trial.start(model, reference.trial.context, world, seed=1)
            last.load(saved)
            result.note("load", *_states_differ(last, writer.trial))
        if shown is not None and context.rank == 0:
            shown(result)
    return results


def _merged(model: ModelConfig, plan: Plan) -> int:
    """How many data ranks' micro-batches one process merges: all with experts, which are balanced over them."""
    return 1 if model.moe is None else plan.data_ranks


def _compare(
    model: ModelConfig, context: DistributedContext, reference: _Reference, saved: Path, writer: _Reference
) -> tuple[Result, Trial]:
    """Run all checks of one plan; returns the worst of all ranks. ``saved`` is the checkpoint of ``writer``."""
    result, mine = Result(context.plan), Trial.start(model, context, context.world).train()
    whole = reference.trial
    for check, ours, exact in (("loss", mine.losses, whole.losses), ("norm", mine.norms, whole.norms)):
        pair = torch.tensor([ours, exact], dtype=torch.float64)
        result.note(check, ((pair[0] - pair[1]).abs() / pair[1].abs()).max().item())
    result.note("gradients", *_gradients_differ(mine, whole))
    result.note("step", *_states_differ(mine, whole))
    other = Trial.start(model, context, context.world, seed=1)
    other.load(saved)
    result.note("load", *_states_differ(other, writer.trial))
    if model.causal:
        result.note("tokens", float(sum(a != b for a, b in zip(mine.greedy(), reference.tokens, strict=True))))
    return _reduce_result(result, world_axis(), _names(whole)), mine


def _names(one: Trial) -> list[str]:
    return [*one.masters.local, *one.optimizer.state, *(name for name, _ in one.model.named_buffers())]


def _gradients_differ(mine: Trial, one: Trial) -> tuple[float, str]:
    """The largest error of the first step's gradients and its tensor; a missing gradient is infinite."""
    for name, weight in mine.masters.local.items():
        if weight.numel() and (name in mine.gradients) != (name in one.gradients):
            return float("inf"), name
    return _differ(mine, mine.gradients, one.gradients)


def _states_differ(mine: Trial, one: Trial) -> tuple[float, str]:
    """The largest error of weights, moments and buffers, and its tensor."""
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
    """The largest error among this rank's ``parts`` of the tensors ``whole``, and its tensor.

    Errors are relative to the largest element of all tensors, so that a gradient of 0 has a scale too.
    """
    worst = (0.0, "")
    scale = torch.stack([reference.abs().max() for reference in whole.values()]).max()
    for key, part in parts.items():
        reference = whole[key]
        expected = mine.shard_of(key.rpartition("/")[2], reference)
        if part.shape != expected.shape:
            return float("inf"), key
        if part.numel():
            error = ((part - expected).abs().max() / scale).nan_to_num(nan=torch.inf).item()
            worst = max(worst, (error, key))
    return worst


def _reduce_result(result: Result, world: Axis, names: list[str]) -> Result:
    """Reduce ``result`` over ranks: the largest error of each check, and its tensor, one of ``names``."""
    checks = list(result.errors)
    mine = torch.tensor([result.errors[check] for check in checks], dtype=torch.float64)
    worst = world.max_(mine)
    where = torch.tensor([names.index(at) if (at := result.where[check]) else -1 for check in checks])
    where = world.max_(where.where(mine == worst, -1))
    for check, error, at in zip(checks, worst.tolist(), where.tolist(), strict=True):
        result.errors[check], result.where[check] = error, names[at] if at >= 0 else ""
    return result


def format_result(result: Result) -> str:
    """Format one plan's result, with the tensor of each miss."""
    words = []
    for check in (check for check in CHECKS if check in result.errors):
        words.append(f"{check} {_format_error(check, result.errors[check])}")
        if _missed(result, check) and result.where[check]:
            words[-1] += f" in {result.where[check]}"
    return f"{'ok  ' if result.ok else 'MISS'} {result.plan!s:48} {'  '.join(words)}"


def _format_error(check: str, error: float) -> str:
    return f"{error:.0f}" if check == "tokens" or error == 0 else f"{error:.0e}"


def _missed(result: Result, check: str) -> bool:
    return not result.errors[check] <= TOLERANCE


def print_result(result: Result) -> None:
    """Print :func:`format_result`; flushes, because it runs in a worker."""
    print(format_result(result), flush=True)


def result_table(results: Sequence[Result]) -> Table:
    """Tabulate the worst error by plan and check."""
    grid = Table("plan", *CHECKS, title=f"worst error against one process; a miss is above {TOLERANCE:.0e}")
    for result in results:
        cells = []
        for check in CHECKS:
            text = _format_error(check, result.errors[check]) if check in result.errors else "-"
            cells.append(f"[bold red]{text}[/]" if check in result.errors and _missed(result, check) else text)
        grid.add_row(str(result.plan), *cells)
    return grid


def write_results(results: Sequence[Result], model: ModelConfig, file: Path, device: str = "cpu") -> None:
    """Write ``results`` to ``file`` as JSON; an infinite error is null."""
    report = {
        "tolerance": TOLERANCE,
        "checks": CHECKS,
        "torch": torch.__version__,
        "device": device if device == "cpu" else torch.cuda.get_device_name(),
        "model": model.model_dump(mode="json"),
        "plans": [
            {
                "plan": result.plan.model_dump(mode="json"),
                "name": str(result.plan),
                "ok": result.ok,
                "errors": {check: e if math.isfinite(e) else None for check, e in result.errors.items()},
                "where": result.where,
            }
            for result in results
        ],
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")

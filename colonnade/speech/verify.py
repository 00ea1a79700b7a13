"""``colonnade verify`` of a recogniser: every layout of its own weights against one process.

    error = max|Δ| / ‖reference‖∞        in float64, where rounding leaves about 1e-15

The layouts are data and tensor parallelism, dp · tp processes. Each rank computes the whole reference: loss and
gradients of a few recordings, the text of one recording and of a stream, greedy and by a beam. Over dp the recordings
are divided, and summed as training sums the parts of a batch. The recordings are noise, so the blank's bias is lowered
until there is text to compare.
"""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from colonnade.config import Plan
from colonnade.errors import PlanError
from colonnade.parallel.axis import Axes, world_axis
from colonnade.parallel.distributed_context import DistributedContext, file_process_group
from colonnade.parallel.launch import launch
from colonnade.parallel.layout import WHOLE, local_part, placements
from colonnade.speech.features import RATE
from colonnade.speech.fit import Part, combine
from colonnade.speech.listen import listen
from colonnade.speech.model import SpeechModel

TOLERANCE = 1e-10
CHECKS = {
    "loss": "the loss per label of all recordings",
    "gradients": "every gradient",
    "words": "how many of the texts differ: whole and streamed, greedy and by a beam",
}
"""The checks, in column order."""
RECORDINGS_S = (1.3, 0.4, 2.1, 0.9, 1.6)
"""Lengths of the recordings of the loss."""
SPOKEN_S, CHUNK, BEAM, LEAST_TEXT = 2.5, 999, 4, 6
LOWER = (0.0, 2.0, 4.0, 8.0, 16.0)
"""Subtracted from the blank's bias until LEAST_TEXT characters are recognised."""


@dataclass
class Outcome:
    """One layout's errors, the worst of all ranks."""

    plan: Plan
    errors: dict[str, float] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether all errors are within the tolerance."""
        return all(error <= TOLERANCE for error in self.errors.values())

    def __str__(self) -> str:
        words = [
            f"{check} {error:.0e}" if check != "words" else f"{check} {error:.0f}"
            for check, error in self.errors.items()
        ]
        return f"{'ok  ' if self.ok else 'MISS'} {self.plan!s:24} {'  '.join(words)}"


def plans_of(model: SpeechModel, world: int) -> list[Plan]:
    """The layouts of ``world`` processes that this recogniser allows; raises PlanError if there are none."""
    config = model.config
    sizes = [tp for tp in range(1, world + 1) if world % tp == 0 and config.heads % tp == 0]
    # Batch norm takes its statistics from the recordings of one rank.
    plans = [Plan(dp=world // tp, tp=tp) for tp in sizes if world == tp or config.front_end != "resnet"]
    if not plans:
        raise PlanError(
            f"no layout of {world} processes: {config.heads} heads cannot be divided over tp={world}, and a front end "
            "with batch norm cannot be sharded over dp; use a number of processes that divides the heads"
        )
    return plans


def verify(folder: Path, plans: Sequence[Plan], shown: Callable[[Outcome], None] | None = None) -> list[Outcome]:
    """Compare each of ``plans``, all of one world, with one process, on local processes.

    ``shown`` is called with each outcome in rank 0's process.
    """
    with tempfile.TemporaryDirectory(prefix="colonnade-verify-") as scratch:
        return launch(_work, (folder, tuple(plans), Path(scratch), shown), Plan(dp=plans[0].world))


def write_outcomes(outcomes: Sequence[Outcome], folder: Path, file: Path) -> None:
    """Write ``outcomes`` to ``file`` as JSON."""
    plans = [
        {"plan": each.plan.model_dump(mode="json"), "name": str(each.plan), "ok": each.ok, "errors": each.errors}
        for each in outcomes
    ]
    report = {
        "tolerance": TOLERANCE, "checks": CHECKS, "torch": torch.__version__, "recogniser": str(folder), "plans": plans,
    }  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(report, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _work(folder: Path, plans: Sequence[Plan], scratch: Path, shown: Callable[[Outcome], None] | None) -> list[Outcome]:
    """Run on every rank."""
    whole = SpeechModel.load(folder, dtype=torch.float64)
    lowered = _lower_blank(whole)
    reference = _train(whole)
    texts = _texts(whole)
    outcomes: list[Outcome] = []
    for number, plan in enumerate(plans):
        with (
            file_process_group(scratch / f"rendezvous-{number}"),
            DistributedContext.build(plan, "cpu") as context,
        ):
            model = SpeechModel.load(folder, context.axes, torch.float64)
            _lower(model, lowered)
            outcome = _compare(model, context, reference, texts)
        outcomes.append(outcome)
        if shown is not None and context.rank == 0:
            shown(outcome)
    return outcomes


def _compare(
    model: SpeechModel, context: DistributedContext, reference: tuple[float, dict[str, Tensor]], texts: list[str]
) -> Outcome:
    loss, gradients = _train(model, context.axes)
    expected, whole = reference
    layout, scale = placements(model), max(float(x.abs().max()) for x in whole.values())
    differences = [
        float((own - local_part(whole[name], layout.get(name, WHOLE), context.axes)).abs().max()) / scale
        for name, own in gradients.items()
        if own.numel()
    ]
    words = float(sum(a != b for a, b in zip(_texts(model), texts, strict=True)))
    errors = torch.tensor([abs(loss - expected) / abs(expected), max(differences), words], dtype=torch.float64)
    worst = world_axis().max_(errors.nan_to_num(nan=torch.inf)).tolist()
    return Outcome(context.plan, dict(zip(CHECKS, worst, strict=True)))


def _train(model: SpeechModel, axes: Axes | None = None) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradients by name) over all recordings; each data rank computes its own."""
    dp = (axes or model.axes).dp
    names, parameters = zip(*model.named_parameters(), strict=True)
    parts: list[Part] = []
    for i in range(dp.rank, len(RECORDINGS_S), dp.size):
        sound_TA = model.features(_noise(RECORDINGS_S[i], i))
        labels = np.random.default_rng(i).integers(1, model.config.vocab_size, 2 + i).tolist()
        loss = len(labels) * model.loss(model.frames(sound_TA), [len(sound_TA)], [labels])
        own = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
        parts.append(Part(loss.item(), len(labels), list(own)))
    loss, gradients = combine(parts, parameters, dp)
    return loss, dict(zip(names, gradients, strict=True))


@torch.inference_mode()
def _texts(model: SpeechModel) -> list[str]:
    """Whole and streamed, greedy and by a beam."""
    samples = _noise(SPOKEN_S, 99)
    found: list[str] = []
    for beam in (None, BEAM):
        found += [model.recognise(samples, beam=beam), "".join(listen(model, samples.split(CHUNK), beam=beam))]
    return found


def _noise(seconds: float, seed: int) -> Tensor:
    """Noise whose loudness and colour change, so that frames differ."""
    random, n = np.random.default_rng(seed), round(seconds * RATE)
    loudness = np.interp(np.arange(n), np.arange(0, n + 1600, 1600), random.uniform(0, 0.3, -(-n // 1600) + 1))
    return torch.from_numpy(np.convolve(random.normal(0, 1, n), random.normal(0, 0.5, 8), "same") * loudness)


def _lower_blank(model: SpeechModel) -> float:
    """Lower the blank's bias until there is text; returns by how much."""
    done = 0.0
    for much in LOWER:
        _lower(model, much - done)
        done = much
        if len(model.recognise(_noise(SPOKEN_S, 99))) >= LEAST_TEXT:
            break
    return done


@torch.no_grad()
def _lower(model: SpeechModel, much: float) -> None:
    """Subtract ``much`` from the blank's bias, on the rank that has it."""
    start, stop = model.axes.tp.part(model.config.vocab_size)
    if start == 0 < stop:
        model.joint.bias[0] -= much

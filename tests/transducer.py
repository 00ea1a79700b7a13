"""Transducer lattices of uneven lengths, and what kernels compute of them beside the reference in float64."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from colonnade.kernels.transducer import joint, lattice
from colonnade.kernels.transducer.cells import Cells
from colonnade.kernels.transducer.joint import Posteriors

BLANK = 2


class Case(NamedTuple):
    """Sizes of a batch; the vocabulary's rows from ``start`` on are this rank's."""

    frames: list[int]
    labels: list[int]
    V: int
    D: int
    start: int = 0
    rows: int | None = None


CASES = {
    "uneven": Case([5, 1, 17, 2], [3, 0, 4, 1], 29, 20),
    "equal": Case([6, 6], [2, 2], 33, 40),
    "one cell": Case([1], [0], 3, 1),
    "shard": Case([7, 3], [2, 5], 50, 24, 17, 9),
    "no blank": Case([7, 3], [2, 5], 50, 24, 0, 2),
}


class Kernels(NamedTuple):
    """The three operations of a transducer's loss."""

    scores: Any
    lattice: Any
    gradients: Any


REFERENCE = Kernels(joint.scores, lattice.transducer_lattice, joint.gradients)


def draw(case: Case, device: str = "cpu") -> tuple[list[torch.Tensor], list[list[int]], torch.Tensor]:
    """(e, p, W and b; labels; gradients of the losses) in float64."""
    generator = torch.Generator().manual_seed(len(case.frames) * 100 + case.V)
    rows = case.V - case.start if case.rows is None else case.rows
    shapes = [(sum(case.frames), case.D), (sum(n + 1 for n in case.labels), case.D), (rows, case.D), (rows,)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64).to(device) for shape in shapes]
    tensors[2] *= 2 * case.D**-0.5
    labels = [torch.randint(0, case.V, (n,), generator=generator).tolist() for n in case.labels]
    return tensors, labels, torch.randn(len(case.frames), generator=generator, dtype=torch.float64).to(device)


def compute(
    kernels: Kernels, case: Case, tensors: Sequence[torch.Tensor], labels: list[list[int]], grad_B: torch.Tensor
) -> dict[str, torch.Tensor]:
    """All that the kernels compute of the cells inside, as if no other rank had labels."""
    cells = Cells.of(case.frames, labels, case.V, tensors[0].device)
    at = {"blank": BLANK, "start": case.start}
    stats = kernels.scores(*tensors, cells, **at)
    lse = stats[1].log() + stats[0]
    blank, label = ((x - lse).transpose(1, 2) for x in stats[2:])
    found = kernels.lattice(blank, label, cells.frames_B, cells.labels_B)
    posts = (x.transpose(1, 2).to(lse.dtype) for x in (found.blank_BTU, found.label_BTU))
    grads = kernels.gradients(*tensors, cells, Posteriors(lse, *posts, grad_B.to(lse.dtype)), **at)
    place_M = cells.cell_indices()
    inside = {name: x.reshape(-1)[place_M] for name, x in zip(("top", "sum", "blank", "label"), stats, strict=True)}
    posteriors = {"blank posterior": found.blank_BTU, "label posterior": found.label_BTU}
    return inside | posteriors | {"loss": found.loss_B} | grads._asdict()


def compare(kernels: Kernels, case: Case, dtype: torch.dtype, tolerance: float, device: str = "cpu") -> None:
    """Asserts that all is near the reference in float64, by norm (relative above 1)."""
    tensors, labels, grad_B = draw(case, device)
    exact = compute(REFERENCE, case, [x.to(dtype).double() for x in tensors], labels, grad_B)
    found = compute(kernels, case, [x.to(dtype) for x in tensors], labels, grad_B)
    for name, x in exact.items():
        error = float((found[name].double() - x).norm() / x.norm().clamp(min=1))
        assert error < tolerance, (case, dtype, name, error)

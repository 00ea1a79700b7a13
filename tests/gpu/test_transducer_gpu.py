"""The transducer's kernels on a GPU against the reference in float64: values, gradients, dead cells, determinism."""

import pytest
import torch

from colonnade.kernels.registry import choose
from colonnade.kernels.transducer import triton_joint, triton_lattice
from colonnade.model.transducer_loss import Joint
from tests.transducer import CASES, Case, Kernels, compare

pytestmark = pytest.mark.filterwarnings("ignore")

LARGE = {
    "long": Case([300, 1, 177], [61, 0, 90], 1024, 512),
    "odd": Case([75, 33, 50, 64], [20, 9, 0, 31], 1000, 300),
    "letters": Case([120, 90], [40, 77], 29, 128),
}
TRITON = Kernels(triton_joint.scores, triton_lattice.transducer_lattice, triton_joint.gradients)


@pytest.mark.parametrize("name", [*CASES, *LARGE])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 8e-3)], ids=str)
def test_kernels_match_the_reference(name: str, dtype: torch.dtype, tolerance: float) -> None:
    compare(TRITON, (CASES | LARGE)[name], dtype, tolerance, "cuda")


@pytest.mark.parametrize("rows", [64, 1000])
def test_chunks_do_not_matter(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_joint, "CHUNK_ROWS", rows)
    compare(TRITON, LARGE["odd"], torch.float32, 1e-5, "cuda")


def test_triton_kernels_are_the_default() -> None:
    for operation in ("transducer_scores", "transducer_gradients", "transducer_lattice"):
        assert choose(operation, "cuda", torch.float32) is choose(operation, "cuda", torch.float32, "triton")
        assert choose(operation, "cuda", torch.float64) is choose(operation, "cuda", torch.float64, "reference")


def _losses(frames: list[int], labels: list[list[int]], sharpness: float, kind: torch.dtype) -> list[torch.Tensor]:
    """Losses and the gradients of their sum."""
    draw = torch.Generator().manual_seed(3)
    joint = Joint(64, 40, device="cuda", dtype=kind)
    with torch.no_grad():
        joint.weight.copy_(sharpness * torch.randn(40, 64, generator=draw))
    e = torch.randn(sum(frames), 64, generator=draw).to("cuda", kind).requires_grad_()
    p = torch.randn(sum(len(x) + 1 for x in labels), 64, generator=draw).to("cuda", kind).requires_grad_()
    losses = joint.loss(e, p, frames, labels)
    return [losses.detach(), *torch.autograd.grad(losses.sum(), (e, p, joint.weight, joint.bias))]


def test_cells_left_out_do_not_change_gradients() -> None:
    """A sharp joint network, so that most cells are dead; the reference in float64 keeps them all."""
    frames, labels = [200, 150], [[1 + i % 39 for i in range(n)] for n in (50, 33)]
    exact = _losses(frames, labels, 0.5, torch.float64)
    found = _losses(frames, labels, 0.5, torch.float32)
    for x, y in zip(found, exact, strict=True):
        assert float((x.double() - y).norm() / y.norm()) < 2e-5


def test_loss_is_deterministic() -> None:
    frames, labels = [200, 150], [[1 + i % 39 for i in range(n)] for n in (50, 33)]
    first, second = (_losses(frames, labels, 0.2, torch.float32) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_scans_of_thousands_of_frames() -> None:
    """Several warps a scan, and the reference beyond MAX_FRAMES."""
    for frames in (3000, triton_lattice.MAX_FRAMES + 8):
        labels = [[1, 2, 3, 2, 1] * 2]
        found, exact = (_losses([frames], labels, 0.1, kind) for kind in (torch.float32, torch.float64))
        for x, y in zip(found, exact, strict=True):
            assert float((x.double() - y).norm() / y.norm()) < 2e-5

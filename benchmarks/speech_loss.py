"""The transducer loss compared with others: time and memory of forward and backward, joint network included.

    python benchmarks/speech_loss.py                   # needs a CUDA GPU and torchaudio with rnnt_loss, the peer there
    python benchmarks/speech_loss.py --device cpu      # beside a loss that keeps all logits, one thread
    python benchmarks/speech_loss.py --tiny            # a smoke test on the CPU

Both start at the encoder's and the predictor's outputs, width J, and end with the gradients of both and of the joint
network, in float32. torchaudio's loss takes the logits of every cell; ours computes them in chunks and again in the
backward pass, on tensor cores: float32 as three bfloat16 parts for losses, as two for gradients. ``products`` is what
torch may do in torchaudio's GEMMs: float32, or tf32 (``torch.set_float32_matmul_precision("high")``); ours are the same
in both. Medians of turns; memory is the peak over what was there before. ``*_loss_error`` is the largest error of a
loss, ``*_gradient_error`` that of the gradients by norm, relative, compared with this project's reference in float64.

On a CPU the peer is torch's: one product for the logits of all cells, log_softmax, and this project's recursions over
the lattice; torchaudio's library has no loss there without CUDA. Times are CPU times, the least of all turns too.
Weights are random (``scale`` 1: a quarter to two fifths of the cells are dead), or three times as large, whose
alignments are sharper, as those of a trained recogniser.
"""

import argparse
import copy
import importlib
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from colonnade.kernels.transducer.lattice import transducer_lattice
from colonnade.model.transducer_loss import Joint
from harness.report import Cell, Headline, folder_of, report

SHAPES = ((4, 75, 20, 1024, 512), (16, 150, 40, 1024, 512), (32, 250, 60, 1024, 512))
"""(utterances, frames, labels, V, J)."""
CPU_SHAPES = ((4, 75, 20, 1024, 512), (8, 100, 30, 1024, 512), (16, 75, 20, 29, 128))


class _Paths(torch.autograd.Function):
    """The losses from all log-probabilities, (B, T, U + 1, V)."""

    @staticmethod
    def forward(ctx, logprobs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        B, T, U1, _ = logprobs.shape
        next_ = torch.nn.functional.pad(labels, (0, 1))[:, None, :, None].expand(B, T, U1, 1)
        own = logprobs.gather(3, next_).squeeze(3)
        lattice = transducer_lattice(logprobs[..., 0], own, torch.full((B,), T), torch.full((B,), U1 - 1))
        ctx.save_for_backward(lattice.blank_BTU, lattice.label_BTU, next_)
        ctx.shape = logprobs.shape
        return lattice.loss_B.to(logprobs.dtype)

    @staticmethod
    def backward(ctx, grad_B: torch.Tensor):
        blank, label, next_ = ctx.saved_tensors
        grad = torch.zeros(ctx.shape)
        grad[..., 0] = -blank * grad_B[:, None, None]
        grad.scatter_add_(3, next_, (-label * grad_B[:, None, None]).float()[..., None])
        return grad, None


def measure(
    shape: tuple[int, ...], rounds: int, device: str, precision: str = "highest", scale: float = 1.0
) -> dict[str, Cell]:
    """Both losses on one batch."""
    torch.set_float32_matmul_precision(precision)
    B, T, U, V, J = shape
    torch.manual_seed(0)
    joint = Joint(J, V, device=device)
    torch.nn.init.normal_(joint.weight, std=scale * J**-0.5)
    e = torch.randn(B * T, J, device=device, requires_grad=True)
    p = torch.randn(B * (U + 1), J, device=device, requires_grad=True)
    labels = torch.randint(1, V, (B, U))
    lists, inputs = labels.tolist(), (e, p, joint.weight, joint.bias)

    def ours() -> torch.Tensor:
        return joint.loss(e, p, [T] * B, lists)

    runs: dict[str, Callable[[], torch.Tensor]] = {"ours": ours}
    peer = _peer()
    if peer is not None and device == "cuda":
        targets, ts, us = (x.int().to(device) for x in (labels, torch.full((B,), T), torch.full((B,), U)))

        def theirs() -> torch.Tensor:
            cells = torch.relu(e.view(B, T, 1, J) + p.view(B, 1, U + 1, J))
            return peer(cells @ joint.weight.T + joint.bias, targets, ts, us, blank=0, reduction="none")

        runs["torchaudio"] = theirs
    if device == "cpu":

        def materialised() -> torch.Tensor:
            cells = torch.relu(e.view(B, T, 1, J) + p.view(B, 1, U + 1, J))
            return _Paths.apply((cells @ joint.weight.T + joint.bias).log_softmax(-1), labels)

        runs["materialised"] = materialised
    spent: dict[str, list[float]] = {name: [] for name in runs}
    peak: dict[str, int] = {}
    errors = _errors(runs, inputs, joint, [T] * B, lists)
    clock = time.perf_counter if device == "cuda" else time.process_time
    for i in range(rounds):
        for name, run in list(runs.items())[:: 1 if i % 2 else -1]:
            _wait(device)
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated() if device == "cuda" else 0
            start_s = clock()
            torch.autograd.grad(run().sum(), inputs)
            _wait(device)
            spent[name].append(clock() - start_s)
            peak[name] = torch.cuda.max_memory_allocated() - before if device == "cuda" else 0
    products = "float32" if precision == "highest" else "tf32"
    row: dict[str, Cell] = {
        "products": products, "utterances": B, "frames": T, "labels": U, "vocabulary": V, "width": J
    }  # fmt: skip
    if device == "cpu":
        row |= {"scale": scale, "threads": torch.get_num_threads()}
    for name in runs:
        row |= {f"{name}_ms": round(1000 * statistics.median(spent[name]), 2)}
        row |= (
            {f"{name}_mb": round(peak[name] / 1e6, 1)}
            if device == "cuda"
            else {f"{name}_least_ms": round(1000 * min(spent[name]), 2)}
        )
        row |= dict(zip((f"{name}_loss_error", f"{name}_gradient_error"), errors[name], strict=True))
    return row


def run_cpu(args: argparse.Namespace) -> None:
    """The record of a CPU."""
    rows: list[dict[str, Cell]] = []
    for scale in (1.0,) if args.tiny else (1.0, 3.0):
        for shape in ((2, 9, 3, 17, 8),) if args.tiny else CPU_SHAPES:
            rows.append(measure(shape, args.rounds, "cpu", scale=scale))
            print(rows[-1], flush=True)
    heads = [
        Headline(
            f"transducer loss of {row['utterances']} × {row['frames']} frames, {row['labels']} labels, "
            f"{row['vocabulary']} in the vocabulary, one thread",
            float(row["ours_ms"] or 0), "ms", "all logits stored", float(row["materialised_ms"] or 0),
        )
        for row in rows
        if row["scale"] == 1
    ]  # fmt: skip
    report("speech_loss_cpu", rows, notes=__doc__ or "", headlines=heads, folder=folder_of(args.out, toy=args.tiny))


def _errors(
    runs: dict[str, Callable[[], torch.Tensor]],
    inputs: tuple[torch.Tensor, ...],
    joint: Joint,
    frames: list[int],
    labels: list[list[int]],
) -> dict[str, tuple[float, float]]:
    """(largest error of a loss, largest relative error of a gradient) of each, compared with float64."""
    exact_joint = copy.deepcopy(joint).double()
    e, p = (x.detach().double().requires_grad_() for x in inputs[:2])
    exact = exact_joint.loss(e, p, frames, labels)
    exact_grads = torch.autograd.grad(exact.sum(), (e, p, exact_joint.weight, exact_joint.bias))
    exact = exact.detach()
    found: dict[str, tuple[float, float]] = {}
    for name, run in runs.items():
        losses = run()
        grads = torch.autograd.grad(losses.sum(), inputs)
        pairs = zip(grads, exact_grads, strict=True)
        worst = max(float((x.double() - y).norm() / y.norm()) for x, y in pairs)
        found[name] = float(f"{float((losses.detach() - exact).abs().max()):.2g}"), float(f"{worst:.2g}")
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _peer():
    try:
        return importlib.import_module("torchaudio.functional").rnnt_loss
    except (ImportError, OSError, AttributeError):
        return None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    parser.add_argument("--tiny", action="store_true", help="a small shape on the CPU")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    args = parser.parse_args(argv)
    if args.tiny or args.device == "cpu":
        torch.set_num_threads(1)
        run_cpu(args)
        return
    rows: list[dict[str, Cell]] = []
    for precision in ("highest", "high"):
        for shape in SHAPES:
            rows.append(measure(shape, args.rounds, "cuda", precision))
            print(rows[-1], flush=True)
    heads: list[Headline] = []
    for row in rows:
        if "torchaudio_ms" in row and row["frames"] == SHAPES[-1][1]:
            own, peer = (float(row[f"{name}_ms"] or 0) for name in ("ours", "torchaudio"))
            what = f"transducer loss of 32 × 250 frames, 60 labels, peer's products in {row['products']}"
            heads.append(Headline(what, own, "ms", "torchaudio", peer))
    report("speech_loss_gpu", rows, notes=__doc__ or "", headlines=heads, folder=folder_of(args.out, toy=False))


if __name__ == "__main__":
    main()

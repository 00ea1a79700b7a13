"""Counter-based dropout against torch's own: forward and backward, time and saved bytes.

    python benchmarks/dropout.py                   # on the GPU if there is one, else on the CPU
    python benchmarks/dropout.py --device cpu --rounds 30

Elementwise: dropout of x (tokens × width) and an addition, eager and compiled (which fuses the two). ``kept_bytes`` are
the bytes saved for the backward pass, counted by autograd's hooks. Attention, on a GPU only: FlashAttention without
dropout and with its own, and our kernel. All alternate.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.kernels.dropout import AttentionDropout
from colonnade.kernels.registry import choose
from colonnade.model.dropout import keys
from harness.paired_timing import OtherProcesses, run_interleaved, wall_clock
from harness.report import Headline, report

RATE = 0.1


def theirs(x_TD: Tensor, add_TD: Tensor) -> Tensor:
    return add_TD + F.dropout(x_TD, RATE)


def kept_bytes(run: Callable[[], Tensor]) -> int:
    """Bytes that autograd saves in a forward pass."""
    kept = 0

    def count(x: Tensor) -> Tensor:
        nonlocal kept
        kept += x.numel() * x.element_size()
        return x

    with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
        run()
    return kept


def elements(device: str, dtype: torch.dtype, T: int, D: int) -> dict[str, Callable[[int], Tensor]]:
    """Forward passes by name; each takes the round's number."""
    x_TD, add_TD = (torch.randn(T, D, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    index_T, all_keys = torch.arange(T, device=device), keys(0, 0, 64, device)
    drop = choose("dropout", device, dtype)

    def ours(x_TD: Tensor, add_TD: Tensor, key: Tensor) -> Tensor:
        return add_TD + drop(x_TD, key, index_T, site=1, rate=RATE)

    ours_compiled, theirs_compiled = torch.compile(ours), torch.compile(theirs)
    return {
        "torch": lambda i: theirs(x_TD, add_TD),
        "colonnade": lambda i: ours(x_TD, add_TD, all_keys[i % 64]),
        "torch, compiled": lambda i: theirs_compiled(x_TD, add_TD),
        "colonnade, compiled": lambda i: ours_compiled(x_TD, add_TD, all_keys[i % 64]),
    }


def attention(dtype: torch.dtype, sequences: int, S: int, N: int, H: int) -> dict[str, Callable[[int], Tensor]]:
    """Causal attention over equal sequences."""
    T = sequences * S
    q_TNH, k_TNH, v_TNH = (torch.randn(T, N, H, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
    index_T, all_keys = torch.arange(T, device="cuda"), keys(0, 0, 64, "cuda")
    cu = torch.arange(0, T + 1, S, device="cuda", dtype=torch.int32)
    run = choose("dropout_attention", "cuda", dtype)

    def sdpa(rate: float) -> Tensor:
        heads = [x.unflatten(0, (-1, S)).transpose(1, 2) for x in (q_TNH, k_TNH, v_TNH)]
        return F.scaled_dot_product_attention(*heads, dropout_p=rate, is_causal=True)

    def ours(i: int) -> Tensor:
        pairs = AttentionDropout(all_keys[i % 64], index_T, index_T, RATE)
        return run(q_TNH, k_TNH, v_TNH, cu, longest=S, equal=True, dropout=pairs)

    return {
        "attention, torch, no dropout": lambda i: sdpa(0.0),
        "attention, torch": lambda i: sdpa(RATE),
        "attention, colonnade": ours,
    }


def forward_backward(forward: Callable[[int], Tensor], device: str) -> Callable[[int], None]:
    def run(i: int) -> None:
        out = forward(i)
        out.backward(torch.ones_like(out))
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--tokens", type=int, default=0, help="rows of x; 0 takes 2048 on a CPU and 32768 on a GPU")
    parser.add_argument("--width", type=int, default=1024, help="columns of x")
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="torch threads")
    parser.add_argument("--no-report", action="store_true", help="print only; write no result")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    gpu = args.device == "cuda"
    T, D, dtype = args.tokens or (32768 if gpu else 2048), args.width, torch.bfloat16 if gpu else torch.float32
    forwards = elements(args.device, dtype, T, D)
    if gpu:
        forwards |= attention(dtype, 8, 2048, 16, 128)

    neighbours = OtherProcesses()
    runs = {name: wall_clock(forward_backward(forward, args.device)) for name, forward in forwards.items()}
    times = run_interleaved(runs, args.rounds, warm_up=5)
    rows = [
        {
            "what": name,
            "forward_backward_ms": round(1e3 * statistics.median(took), 4),
            "kept_bytes": kept_bytes(lambda name=name: forwards[name](0)),
        }
        for name, took in times.items()
    ]
    for row in rows:
        print(row)
    if args.no_report:
        return
    median = {row["what"]: row["forward_backward_ms"] for row in rows}
    heads = [
        Headline(
            f"dropout of {T} x {D} and an addition, compiled, forward and backward",
            median["colonnade, compiled"],
            "ms",
            "torch.nn.functional.dropout, compiled",
            median["torch, compiled"],
        )
    ]
    if gpu:
        heads.append(
            Headline(
                "causal attention with dropout, 8 x 2048 tokens, 16 heads of 128, forward and backward",
                median["attention, colonnade"],
                "ms",
                "torch's FlashAttention with its own dropout",
                median["attention, torch"],
            )
        )
    notes = (
        f"{str(dtype).removeprefix('torch.')}, rate {RATE}, {args.threads} threads; medians of {args.rounds} "
        f"alternating rounds; {neighbours}."
    )
    machine = torch.cuda.get_device_name().split()[-1].lower() if gpu else "cpu"
    report(f"dropout_{machine}", rows, notes, headlines=heads)


if __name__ == "__main__":
    main()

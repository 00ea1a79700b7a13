"""Training attention on a GPU: forward and backward times of torch's kernels on whole sequences.

    python benchmarks/attention.py               # one GPU, a minute
    python benchmarks/attention.py --tiny        # toy sizes on a CPU: a smoke test

Causal, bfloat16, random inputs, cold caches; medians. ``chosen`` is what a model calls
(:func:`colonnade.kernels.attention.sdpa.packed`, where torch picks the kernel). The other rows select a kernel by name:
once with grouped heads, and once with keys and values repeated for each query head, whose gradients are then summed.
TFLOP/s count the lower triangle: 2 · 2 · B · N · S² / 2 · H forward, 2.5 times that backward.
"""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from colonnade.kernels.attention import sdpa
from harness.clock import Clock
from harness.report import Headline, folder_of, report
from harness.rows import format_row

SHAPES = {
    "GPT-2 1.2B": (32, 1024, 16, 16, 96),
    "GPT-2 355M": (16, 1024, 16, 16, 64),
    "Llama-3-8B": (2, 8192, 32, 8, 128),
    "Llama-3.2-1B, one sequence": (1, 131072, 32, 8, 64),
}
"""B, S, N, K, H."""
TINY = {"tiny": (2, 32, 4, 2, 8)}
KERNELS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def plain(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor, *, repeated: bool) -> Tensor:
    """o_BSNH by torch's scaled_dot_product_attention."""
    group = q_BSNH.shape[2] // k_BSKH.shape[2]
    if repeated:
        k_BSKH, v_BSKH = (x.repeat_interleave(group, 2) for x in (k_BSKH, v_BSKH))
    q, k, v = (x.transpose(1, 2) for x in (q_BSNH, k_BSKH, v_BSKH))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=group > 1 and not repeated).transpose(1, 2)


def chosen(q_BSNH: Tensor, k_BSKH: Tensor, v_BSKH: Tensor) -> Tensor:
    """o_BSNH by the function that a model calls."""
    B, S = q_BSNH.shape[:2]
    ends = torch.arange(0, B * S + 1, S, device=q_BSNH.device)
    flat = (x.flatten(0, 1) for x in (q_BSNH, k_BSKH, v_BSKH))
    return sdpa.packed(*flat, ends, longest=S, equal=True).unflatten(0, (B, S))


def measured(name: str, shape: tuple[int, int, int, int, int], device: str) -> list[dict[str, Any]]:
    """A row for each variant that runs."""
    B, S, N, K, H = shape
    dtype, clock = torch.bfloat16 if device == "cuda" else torch.float32, Clock(device)
    q, k, v = (torch.randn(B, S, n, H, device=device).to(dtype).requires_grad_() for n in (N, K, K))
    do = torch.randn(B, S, N, H, device=device).to(dtype)
    ways: dict[str, tuple[Any, Callable[[], Tensor]]] = {"chosen": (nullcontext(), lambda: chosen(q, k, v))}
    for kernel, backend in KERNELS.items() if device == "cuda" else ():
        for repeated in (False, True)[: 1 + (N > K)]:
            way = f"{kernel}, repeated" if repeated else kernel
            ways[way] = sdpa_kernel(backend), lambda repeated=repeated: plain(q, k, v, repeated=repeated)
    rows, flops = [], 2 * B * N * S * S * H
    for way, (context, run) in ways.items():
        try:
            with context:
                forward_s = clock.median(run, 0.4)
                o = run()
                backward_s = clock.median(lambda o=o: torch.autograd.grad(o, (q, k, v), do, retain_graph=True), 0.6)
        except RuntimeError as why:
            print(f"{name} {way}: {str(why).splitlines()[0][:90]}", flush=True)
            continue
        rows.append(
            {
                "shape": name, "B": B, "S": S, "heads": N, "kv_heads": K, "width": H, "way": way,
                "forward_ms": round(1e3 * forward_s, 3), "backward_ms": round(1e3 * backward_s, 3),
                "forward_tflops": round(flops / forward_s / 1e12, 1),
                "backward_tflops": round(2.5 * flops / backward_s / 1e12, 1),
            }
        )  # fmt: skip
        print(format_row(rows[-1]), flush=True)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="toy sizes on a CPU")
    parser.add_argument(
        "--out", type=Path, help="folder of the JSON file; benchmarks/results, with --tiny a temporary one"
    )
    args = parser.parse_args(argv)
    device = "cpu" if args.tiny else "cuda"
    rows = [row for name, shape in (TINY if args.tiny else SHAPES).items() for row in measured(name, shape, device)]
    heads = []
    for name in dict.fromkeys(row["shape"] for row in rows):
        took = {row["way"]: row["forward_ms"] + row["backward_ms"] for row in rows if row["shape"] == name}
        others = {way: ms for way, ms in took.items() if way != "chosen"}
        if others:
            best = min(others, key=others.__getitem__)
            what = f"attention, forward and backward, {name} (lower is better)"
            heads.append(Headline(what, round(took["chosen"], 3), "ms", best, round(others[best], 3)))
    folder = folder_of(args.out, toy=args.tiny)
    report(f"attention_{'tiny' if args.tiny else 'h200'}", rows, __doc__ or "", headlines=heads, folder=folder)


if __name__ == "__main__":
    main()

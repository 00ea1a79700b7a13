"""Prefill of a long prompt: tokens/s, and FLOP/s as a share of a large GEMM in the same run.

    python benchmarks/prefill.py                       # Llama-2-7B's shape, 8192 tokens, one GPU, bfloat16
    python benchmarks/prefill.py --tiny                # toy sizes on a CPU: a smoke test

One request in one engine step: the forward pass, writing keys and values into pages, and sampling the next token. FLOPs
count the GEMMs (2 per weight and token) and the causal half of the scores. The peer is ``transformers``' forward pass
on the same tokens, with logits of the last one only.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from colonnade.config import ModelConfig
from colonnade.config.presets import preset
from colonnade.model import KVCache, Transformer
from colonnade.serve.model_runner import ModelRunner
from colonnade.serve.sample_args import SampleArgs
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.work import Slice, Work
from harness.clock import Clock
from harness.report import RESULTS, Cell, Headline, report
from harness.rows import format_row

TINY = ModelConfig(vocab_size=97, layers=2, width=32, heads=4, kv_heads=2, ffn_width=48, context=128, family="llama")
PAGE = 64


def flops(config: ModelConfig, tokens: int) -> float:
    """FLOPs of the forward pass, with the output projection of one token only."""
    forward = config.flops_per_token(tokens, causal=True) / 3
    return forward * tokens - 2 * config.width * config.vocab_size * (tokens - 1)


def ours(config: ModelConfig, tokens: int, device: str, dtype: torch.dtype) -> Callable[[], Any]:
    model = Transformer(config, device=device, dtype=dtype).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.normal_(std=0.02)
    pages = -(-tokens // PAGE)
    cache = KVCache(config, model.axes, pages=pages, page_tokens=PAGE, dtype=dtype, device=device)
    run, draw = ModelRunner(model, cache), SampleArgs.of(SamplingParams(temperature=0), 0, 0)
    ids = tuple(i % config.vocab_size for i in range(tokens))
    work = Work((Slice(0, ids, tuple(range(pages)), draw),))
    return lambda: run(work)


def theirs(config: ModelConfig, tokens: int, device: str, dtype: torch.dtype) -> Callable[[], Any]:
    shape = LlamaConfig(
        vocab_size=config.vocab_size, hidden_size=config.width, intermediate_size=config.ffn_width,
        num_hidden_layers=config.layers, num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
        max_position_embeddings=tokens, attn_implementation="sdpa",
    )  # fmt: skip
    with torch.device(device):
        model = LlamaForCausalLM(shape).to(dtype).eval()
        ids = (torch.arange(tokens) % config.vocab_size)[None]

    @torch.inference_mode()
    def run() -> Any:
        return model(ids, logits_to_keep=1).logits.argmax()

    return run


def product(clock: Clock, n: int, device: str, dtype: torch.dtype) -> float:
    """FLOP/s of a large GEMM of random matrices."""
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    return 2 * n**3 / clock.median(lambda: a @ b, 1.0)


def measure(name: str, tokens: int, device: str) -> tuple[list[dict[str, Cell]], list[Headline]]:
    gpu = device == "cuda"
    dtype = torch.bfloat16 if gpu else torch.float32
    config = (TINY if name == "tiny" else preset(name)).replace(context=tokens)
    clock = Clock(device)
    ceiling = product(clock, 8192 if gpu else 64, device, dtype)
    rows: list[dict[str, Cell]] = []
    for who, make in (("colonnade", ours), ("transformers", theirs)):
        began = time.perf_counter()
        run = make(config, tokens, device, dtype)
        seconds = clock.median(run, 5.0)
        del run
        rate = flops(config, tokens) / seconds
        rows.append(
            {
                "who": who,
                "model": name,
                "tokens": tokens,
                "ms": round(1e3 * seconds, 2),
                "tokens_per_s": round(tokens / seconds),
                "tflops": round(rate / 1e12, 1),
                "of_product": round(rate / ceiling, 4),
                "product_tflops": round(ceiling / 1e12, 1),
            }
        )
        print(format_row(rows[-1]), f"({time.perf_counter() - began:.0f} s)", flush=True)
    speed = [float(row["tokens_per_s"] or 0) for row in rows]
    return rows, [Headline(f"Prefill {name}, {tokens} tokens", speed[0], "tokens/s", "transformers", speed[1])]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-2-7b", help="a preset of the Llama family")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the JSON file")
    parser.add_argument("--tiny", action="store_true", help="a small model on a CPU; writes no record")
    args = parser.parse_args(argv)
    if args.tiny:
        measure("tiny", 96, "cpu")
        return
    rows, heads = measure(args.model, args.tokens, "cuda")
    report("prefill_h200", rows, notes=__doc__ or "", headlines=heads, folder=args.out)


if __name__ == "__main__":
    main()

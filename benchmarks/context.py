"""Ring context parallelism at 131,072 tokens: one sequence over 1, 2 and 4 GPUs.

    python benchmarks/context.py                 needs 4 GPUs; --worlds 1 2 with two
    python benchmarks/context.py --tiny          toy sizes on a CPU

Llama-3.2-1B's shape (16 x 2048, 32 query heads on 8 KV heads, vocabulary 128,256), batch 1, bfloat16 compute, blocks
compiled. Every block is recomputed in all runs, because one GPU needs it: otherwise the activations of a block are
7.75 D + 3 F = 40,448 values of 2 bytes per token, which for 131,072 tokens and 16 blocks is 170 GB. With recomputation
there are 8.6 GB of block inputs, 11 GB for one block, and 22 GB of weights and moments. On one rank attention is
cuDNN's over the whole sequence; on several, each rank merges the chunks that it receives (zig-zag order, fully masked
pairs skipped). The total number of tokens is constant: ``share_of_linear`` is tokens/s over n times those of one GPU.
"""

from collections.abc import Sequence

from colonnade.config import ModelConfig, Plan
from colonnade.config.presets import preset
from harness.report import Headline, report
from harness.training_jobs import (
    FAST,
    PLAIN,
    Job,
    Row,
    device_and_folder,
    has_gpus,
    make_parser,
    run_jobs,
    share_of_linear,
)

TINY = ModelConfig(vocab_size=211, layers=2, width=32, heads=4, kv_heads=2, ffn_width=48, context=256)


def jobs(tiny: bool, worlds: Sequence[int], sequence: int) -> list[Job]:
    """One sequence over each number of ranks."""
    if tiny:
        train, config = PLAIN.replace(recompute="full"), TINY
        return [Job("in small", config, Plan(cp=n), 256, 1, train, 1, 2) for n in worlds]
    config, train = preset("llama-3.2-1b"), FAST.replace(recompute="full")
    return [Job(f"Llama-3.2-1B, {sequence:,} tokens", config, Plan(cp=n), sequence, 1, train, 2, 3) for n in worlds]


def heads_of(rows: Sequence[Row]) -> list[Headline]:
    """Speed of the largest world against the smallest, and its share of linear."""
    first, last = rows[0], rows[-1]
    what = f"context parallel, {last['what']} on {last['ranks']} GPUs"
    return [
        Headline(what, last["tokens_per_s"], "tokens/s", f"on {first['ranks']}", first["tokens_per_s"]),
        Headline(f"{what}: share of linear", round(100 * last["share_of_linear"], 1), "%"),
    ]


def main(argv: list[str] | None = None) -> None:
    options = make_parser(__doc__)
    options.add_argument("--worlds", type=int, nargs="+", help="numbers of ranks; 1 2 4, with --tiny 1 2")
    options.add_argument("--sequence", type=int, default=131072, help="tokens")
    args = options.parse_args(argv)
    worlds = args.worlds or ([1, 2] if args.tiny else [1, 2, 4])
    if not has_gpus(args, max(worlds)):
        return
    device, folder, name = device_and_folder(args)
    rows = share_of_linear(run_jobs(jobs(args.tiny, worlds, args.sequence), device, args.keep))
    report(f"context_{name}", rows, __doc__ or "", headlines=heads_of(rows), folder=folder)


if __name__ == "__main__":
    main()

"""FSDP2 on several GPUs: Llama-3-8B at 8,192 tokens in bfloat16 and float8, and scaling over ranks.

    python benchmarks/fsdp.py                    needs 4 GPUs; --part llama or --part scaling runs one half
    python benchmarks/fsdp.py --tiny             toy sizes on a CPU

llama: 4 ranks (--ranks), 2 sequences each, sharded float32 masters, each block compiled. torchtitan's published numbers
for this shape on 8 H100s: 6,667 tokens/s per GPU in bfloat16, 10,938 in tensorwise float8.

scaling: equal work per rank. GPT-2 1.2B (40 x 1536, sequence 1024, 32 sequences per rank) on 1, 2 and 4 ranks; one rank
shards nothing. Llama-3-8B (1 sequence of 8,192 per rank) on 2 and 4 ranks, with the share of linear relative to 2: on
one GPU masters, gradients, moments and the bfloat16 copy are 18 bytes x 8.03 G = 145 GB of its 150.

Recomputation is off. Memory [bytes per rank, Llama-3-8B on 4 ranks, 2 sequences]:
    masters, gradients, two moments   16 x 8.03 G / 4                                             32 GB
    activations                       7.75 D + 3 F = 74,752 values of 2 bytes per token and block, before the
                                      compiler drops some: 16,384 tokens x 32 blocks             <78 GB
    gathered embedding and head, their gradients, the loss's (4 + 4 + 2 x 2.1 GB), chunks of logits, two blocks  <14 GB
In total less than 124 GB, 116 GiB of 139. On 2 ranks with 1 sequence 64 + 39 + 14 GB.
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

TINY_LLAMA = ModelConfig(vocab_size=211, layers=2, width=32, heads=4, kv_heads=2, ffn_width=48, context=64)
TINY_GPT2 = preset("gpt2").replace(vocab_size=211, layers=2, width=32, heads=4, ffn_width=64, context=64)


def llama_jobs(tiny: bool, ranks: int) -> list[Job]:
    """Jobs in bfloat16 and float8 (on a CPU float32 twice)."""
    if tiny:
        return [Job(f"tiny, {name}", TINY_LLAMA, Plan(dp=ranks), 32, 2, PLAIN, 1, 2) for name in ("once", "again")]
    config, plan = preset("llama-3-8b"), Plan(dp=ranks)
    kinds = {
        "bfloat16": FAST,
        "float8, one scale per tensor": FAST.replace(float8="tensorwise"),
        "float8, one scale per row": FAST.replace(float8="rowwise"),
    }
    return [
        Job(f"Llama-3-8B, sequence 8192, {name}", config, plan, 8192, 2, train, 3, 5) for name, train in kinds.items()
    ]


def scaling_jobs(tiny: bool, worlds: Sequence[int]) -> list[Job]:
    """Jobs with equal work per rank."""
    if tiny:
        return [Job("GPT-2 in small", TINY_GPT2, Plan(dp=n), 32, 2, PLAIN, 1, 2) for n in worlds]
    gpt2, llama = preset("gpt2-1.2b"), preset("llama-3-8b")
    jobs = [Job("GPT-2 1.2B, 32 x 1024 tokens per rank", gpt2, Plan(dp=n), 1024, 32) for n in worlds]
    return jobs + [
        Job("Llama-3-8B, 8192 tokens per rank", llama, Plan(dp=n), 8192, 1, FAST, 3, 5) for n in worlds if n > 1
    ]


def llama_heads(rows: Sequence[Row]) -> list[Headline]:
    """Tokens per second of one rank."""
    return [
        Headline(f"train {row['what']}, FSDP on {row['ranks']} GPUs", row["tokens_per_s_per_rank"], "tokens/s per GPU")
        for row in rows
    ]


def scaled(rows: Sequence[Row]) -> tuple[list[Row], list[Headline]]:
    """Rows with their share of linear, and a headline for each model's largest world."""
    scaled_rows: list[Row] = []
    heads = []
    for name in dict.fromkeys(row["what"] for row in rows):
        mine = share_of_linear([row for row in rows if row["what"] == name])
        scaled_rows += mine
        if len(mine) > 1:
            first, last = mine[0]["ranks"], mine[-1]["ranks"]
            what = f"FSDP, {name}: speed per GPU on {last}, relative to {first}"
            heads.append(Headline(what, round(100 * mine[-1]["share_of_linear"], 1), "%"))
    return scaled_rows, heads


def main(argv: list[str] | None = None) -> None:
    options = make_parser(__doc__)
    options.add_argument("--part", choices=["llama", "scaling"], help="run one half only")
    options.add_argument("--ranks", type=int, help="of the llama part; 4, with --tiny 2")
    options.add_argument("--worlds", type=int, nargs="+", help="of the scaling part; 1 2 4, with --tiny 1 2")
    args = options.parse_args(argv)
    ranks, worlds = args.ranks or (2 if args.tiny else 4), args.worlds or ([1, 2] if args.tiny else [1, 2, 4])
    if not has_gpus(args, max(ranks, *worlds)):
        return
    device, folder, name = device_and_folder(args)
    if args.part != "scaling":
        rows = run_jobs(llama_jobs(args.tiny, ranks), device, args.keep)
        report(f"fsdp_llama_{name}", rows, __doc__ or "", headlines=llama_heads(rows), folder=folder)
    if args.part != "llama":
        rows, heads = scaled(run_jobs(scaling_jobs(args.tiny, worlds), device, args.keep))
        report(f"fsdp_scaling_{name}", rows, __doc__ or "", headlines=heads, folder=folder)


if __name__ == "__main__":
    main()

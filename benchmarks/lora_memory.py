"""GPU memory of LoRA on a quantised base: Llama-2-7B's shape with random weights.

    python benchmarks/lora_memory.py                    # 7B on a GPU; --write and --model DIR: write the base before
    python benchmarks/lora_memory.py --toy --device cpu

The base is written once in bfloat16, in the files of Hugging Face, and read into int4 or bfloat16. Adapters of rank 16
are at all seven matrices. A step is one conversation of 1,024 tokens; blocks are not compiled. Peak: the most that
torch's allocator has reserved while the base was read and in the steps, the adapters' gradients and moments included;
on a CPU there is none.
"""

import argparse
import gc
import json
import math
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import tokenizers
import torch
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerFast

from colonnade.config import LoraConfig, TrainConfig
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.training_state import TrainingState
from colonnade.tune.tuner import Tuner, tuned_run
from harness.report import Cell, Headline, folder_of, report
from harness.rows import format_row

SHAPES = {"7b": (32, 4096, 11008, 32, 32000), "toy": (2, 64, 172, 2, 512)}
"""Layers, width, feed-forward width, heads, vocabulary."""


def write_base(folder: Path, size: str) -> None:
    """A Llama with random weights, one file per layer, and a word tokenizer."""
    layers, width, ffn, heads, vocabulary = SHAPES[size]
    torch.manual_seed(0)
    noise = (torch.randn(vocabulary * width + (1 << 20)) * 0.02).bfloat16()

    def random(*shape: int) -> torch.Tensor:
        start = int(torch.randint(1 << 20, ()))
        return noise[start : start + math.prod(shape)].view(shape).clone()

    files: dict[str, str] = {}

    def write(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        files.update(dict.fromkeys(tensors, name))

    write("ends.safetensors", {
        "model.embed_tokens.weight": random(vocabulary, width), "lm_head.weight": random(vocabulary, width),
        "model.norm.weight": torch.ones(width, dtype=torch.bfloat16),
    })  # fmt: skip
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors = {f"{at}.self_attn.{name}_proj.weight": random(width, width) for name in "qkvo"}
        tensors |= {f"{at}.mlp.{name}_proj.weight": random(ffn, width) for name in ("gate", "up")}
        tensors[f"{at}.mlp.down_proj.weight"] = random(width, ffn)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
        write(f"layer-{layer}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "intermediate_size": ffn,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads, "hidden_act": "silu",
        "vocab_size": vocabulary, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    words = {word: i for i, word in enumerate(["<unk>", "<eos>", *(f"w{i}" for i in range(vocabulary - 2))])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)


def measure(folder: Path, base: str, device: str, tokens: int, steps: int) -> dict[str, Cell]:
    """Peak memory and the time of a step with one form of the base."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    train = TrainConfig(steps=steps, batch=1, micro_batch=1, lr=1e-4, dtype="bfloat16", compile=False, save_every=0)
    lora = LoraConfig(rank=16, base=base)  # type: ignore[arg-type]
    run = tuned_run(folder, runs=folder / base, device=device, sequence=tokens, train=train, lora=lora)  # type: ignore[arg-type]
    tuner = Tuner(run, folder / "rows.jsonl")
    began = time.perf_counter()
    seconds: list[float] = []
    with (
        DistributedContext.build(run.plan, device) as context,
        TrainingState(tuner.run, context, feed=tuner.data.feed) as state,
    ):
        ready_s = time.perf_counter() - began
        for _ in range(steps):
            began = time.perf_counter()
            float(state.step().norm)
            seconds.append(time.perf_counter() - began)
    peak = torch.cuda.max_memory_reserved() if device == "cuda" else 0
    return {
        "base": base, "tokens": tokens, "peak_gib": round(peak / (1 << 30), 2), "read_s": round(ready_s, 1),
        "step_s": round(statistics.median(seconds[1:]), 3),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--model", type=Path, help="folder of the base, which is created if it does not exist")
    parser.add_argument("--write", action="store_true", help="write the base only")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args(argv)
    tokens = 64 if args.toy else 1024
    rows: list[dict[str, Cell]] = []
    with TemporaryDirectory() as name:
        folder = args.model or Path(name)
        if not (folder / "config.json").exists():
            folder.mkdir(exist_ok=True)
            write_base(folder, "toy" if args.toy else "7b")
        if args.write:
            return
        text = " ".join(f"w{i % 500}" for i in range(tokens - 9))
        data = [{"prompt": "w1 w2 w3 w4", "completion": f" w{i} {text}"} for i in range(args.steps)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
        for base in ("int4", "stored"):
            rows.append(measure(folder, base, args.device, tokens, args.steps))
            print(format_row(rows[-1]), flush=True)
    head = Headline("LoRA on a 7B base in int4, 1,024 tokens: peak memory", float(rows[0]["peak_gib"] or 0), "GiB")
    report("lora_memory_gpu", rows, notes=__doc__ or "", headlines=[head], folder=folder_of(args.out, toy=args.toy))


if __name__ == "__main__":
    main()

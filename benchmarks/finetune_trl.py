"""Fine-tuning against TRL in the same run: SFT in tokens/s, GRPO in seconds per step, the engine's refresh and
``exact``.

    python benchmarks/finetune_trl.py --device cpu          # a Llama of 6 layers and width 384, float32
    python benchmarks/finetune_trl.py --device cuda         # of 16 layers and width 2048, bfloat16

Both sides read one random model from the same Hugging Face folder, train all weights with AdamW, and see the same rows.
SFT: completions of 20 to 200 tokens, 8 in a batch; TRL pads them, ours are packed; "lora" is the same with adapters of
rank 16 at all matrices of the blocks, TRL's by PEFT. GRPO: 4 prompts with 8 completions of 64 tokens each, on a GPU
also of 256, rewarded by length; TRL samples with transformers' generate. A step's time is the median over the later
steps, with everything that a step does; ``exact_s`` is that with ``--tune.exact``. Tokens of the padding do not count.
Nothing is compiled, except for ``compiled_s`` of SFT on a GPU, the default there, which pads batches to one shape. Each
side has its own process: ours with the OpenMP settings of the command line, TRL's with the defaults and as many
threads.
"""

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback

from colonnade.config import LoraConfig, TrainConfig, TuneConfig
from colonnade.cores import child_placement, read_machine
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.training_state import TrainingState
from colonnade.tune.grpo import RewardFeed
from colonnade.tune.rollout_engine import copy_weights
from colonnade.tune.tuner import Tuner, tuned_run
from harness.report import Cell, Headline, folder_of, report
from harness.rows import format_row

SIZES = {"toy": (2, 64, 2), "cpu": (6, 384, 6), "cuda": (16, 2048, 16)}
"""Layers, width, heads."""
RANK = 16
WORDS = [f"word{i}" for i in range(1990)]
REWARD = "def length(prompt, answer, row):\n    return float(len(answer) % 97)\n"


def write_model(folder: Path, size: str, device: str = "cpu") -> None:
    """A random Llama and a tokenizer of words."""
    layers, width, heads = SIZES[size]
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=512, eos_token_id=1,
        pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device(device):
        LlamaForCausalLM(config).save_pretrained(folder)


def conversations(count: int) -> list[dict[str, str]]:
    """Prompts of 8 words and completions of 20 to 200."""

    def words(seed: int, length: int) -> str:
        return " ".join(WORDS[(seed * 31 + 7 * j) % len(WORDS)] for j in range(length))

    return [{"prompt": words(i, 8), "completion": " " + words(i + 1, 20 + i * 53 % 181)} for i in range(count)]


def ours(
    folder: Path,
    data: Path,
    method: str,
    steps: int,
    device: str,
    batch: int,
    *,
    exact: bool = False,
    compiled: bool | None = None,
    answer: int = 64,
) -> tuple[list[float], float, float]:
    """(seconds of each step, mean tokens of a step, seconds of one refresh)."""
    train = TrainConfig(steps=steps, batch=batch, micro_batch=batch // 2 if method == "grpo" else batch,
                        dtype="float32" if device == "cpu" else "bfloat16", lr=1e-5, save_every=0,
                        compile=compiled)  # fmt: skip
    runs = folder / f"runs-{method}-{answer}-{exact}-{compiled}"
    lora = LoraConfig(rank=RANK) if method == "lora" else None
    run = tuned_run(folder, runs=runs, device=device, sequence=192 + answer, train=train, lora=lora)  # type: ignore[arg-type]
    reward = f"{folder / 'reward.py'}:length"
    tune = TuneConfig(reward=reward, group=8, max_tokens=answer, exact=exact) if method == "grpo" else TuneConfig()
    tuner = Tuner(run, data, "grpo" if method == "grpo" else "sft", tune)
    seconds: list[float] = []
    refresh_s = 0.0
    with (
        DistributedContext.build(run.plan, device) as context,
        TrainingState(tuner.run, context, feed=tuner.data.feed) as state,
    ):
        tokens = 0.0
        for _ in range(steps):
            began = time.perf_counter()
            float(state.step().norm)
            seconds.append(time.perf_counter() - began)
            used = state.feed.samples.at(state.samples_seen - batch)
            tokens += sum(len(each.tokens_T) for each in used) / steps
        if isinstance(state.feed, RewardFeed):
            engine = state.feed._engine.engine
            assert engine is not None
            began = time.perf_counter()
            engine.update_weights(lambda own: copy_weights(state.model, own))
            float(next(engine.model.parameters()).sum())
            refresh_s = time.perf_counter() - began
    return seconds, tokens, refresh_s


class _Clock(TrainerCallback):
    def __init__(self) -> None:
        self.at: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.at.append(time.perf_counter())

    on_train_begin = on_step_end


def theirs(
    folder: Path, rows: list[dict[str, Any]], method: str, steps: int, device: str, batch: int, answer: int
) -> list[float]:
    """Seconds of each step of TRL's trainer."""
    from datasets import Dataset
    from trl import (  # pyrefly: ignore[missing-import] - a peer, installed only for this comparison
        GRPOConfig,
        GRPOTrainer,
        SFTConfig,
        SFTTrainer,
    )

    clock = _Clock()
    common: dict[str, Any] = {
        "output_dir": str(folder / "trl"), "max_steps": steps, "learning_rate": 1e-5, "report_to": [],
        "save_strategy": "no", "logging_steps": 1, "use_cpu": device == "cpu", "bf16": device != "cpu", "seed": 0,
        "disable_tqdm": True, "gradient_checkpointing": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    model = str(folder)
    if method != "grpo":
        config: Any = SFTConfig(**common, per_device_train_batch_size=batch, max_length=256)
        adapters = None
        if method == "lora":
            from peft import LoraConfig as PeftConfig

            adapters = PeftConfig(r=RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        trainer: Any = SFTTrainer(
            model, args=config, train_dataset=Dataset.from_list(rows), callbacks=[clock], peft_config=adapters
        )
    else:
        config = GRPOConfig(
            **common, per_device_train_batch_size=batch // 2, gradient_accumulation_steps=2, num_generations=8,
            max_completion_length=answer, beta=0.0, temperature=1.0,
        )  # fmt: skip

        def length(completions: list[str], **_: Any) -> list[float]:
            return [float(len(each) % 97) for each in completions]

        trainer = GRPOTrainer(
            model, reward_funcs=length, args=config, train_dataset=Dataset.from_list(rows), callbacks=[clock]
        )
    trainer.train()
    return [b - a for a, b in zip(clock.at, clock.at[1:], strict=False)]


class Side:
    """A separate process for one side; it starts with the environment of this one."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        self._pool.submit(gc.collect).result()

    def run(self, measured: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """The result of ``measured``, whose memory is freed."""
        result = self._pool.submit(measured, *args, **options).result()
        self._pool.submit(_free).result()
        return result

    def close(self) -> None:
        self._pool.shutdown()


def _free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def measure(size: str, device: str, steps: int) -> tuple[list[dict[str, Cell]], list[Headline]]:
    rows: list[dict[str, Cell]] = []
    heads: list[Headline] = []
    os.environ.setdefault("OMP_NUM_THREADS", str(read_machine().usable))
    peer_side = Side()
    with child_placement(None, os.environ):
        our_side = Side()
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder, size, device)
        (folder / "reward.py").write_text(REWARD)
        jobs = [("sft", 8, 64), ("lora", 8, 64), ("grpo", 32, 64)]
        for method, batch, answer in [*jobs, ("grpo", 32, 256)] if device == "cuda" else jobs:
            data = conversations(batch * steps)
            file = folder / f"{method}.jsonl"
            file.write_text("\n".join(json.dumps(row) for row in data))
            common = folder, file, method, steps, device, batch
            mine, tokens, refresh_s = our_side.run(ours, *common, compiled=False, answer=answer)
            peer = peer_side.run(theirs, folder, data, *common[2:], answer)
            late: Callable[[list[float]], float] = lambda s: statistics.median(s[len(s) // 3 :])  # noqa: E731
            row: dict[str, Cell] = {
                "method": method, "model": f"{SIZES[size][0]} layers, width {SIZES[size][1]}", "device": device,
                "ours_s": round(late(mine), 4), "trl_s": round(late(peer), 4),
                "trl_over_ours": round(late(peer) / late(mine), 2),
            }  # fmt: skip
            if method == "grpo":
                row |= {
                    "answer_tokens": answer,
                    "refresh_s": round(refresh_s, 4),
                    "refresh_share": round(refresh_s / late(mine), 4),
                }
                exact_s = late(our_side.run(ours, *common, exact=True, answer=answer)[0])
                row |= {"exact_s": round(exact_s, 4), "exact_over_ours": round(exact_s / late(mine), 2)}
                heads.append(Headline(f"GRPO step, 32 answers of {answer} tokens", late(mine), "s", "TRL", late(peer)))
            else:
                if device == "cuda" and method == "sft":
                    row["compiled_s"] = round(late(our_side.run(ours, *common)[0]), 4)
                rates = tokens / late(mine), tokens / late(peer)  # both see all rows once, in another order
                row |= {"ours_tokens_per_s": round(rates[0]), "trl_tokens_per_s": round(rates[1])}
                what = "SFT with LoRA" if method == "lora" else "SFT"
                heads.append(Headline(f"{what}, 8 conversations per step", rates[0], "tokens/s", "TRL", rates[1]))
            rows.append(row)
            print(format_row(row), flush=True)
    our_side.close()
    peer_side.close()
    return rows, heads


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", choices=tuple(SIZES), help="by default that of the device")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args(argv)
    size = args.size or args.device
    rows, heads = measure(size, args.device, args.steps)
    name = "finetune_cpu" if args.device == "cpu" else "finetune_gpu"
    report(name, rows, notes=__doc__ or "", headlines=heads, folder=folder_of(args.out, toy=size == "toy"))


if __name__ == "__main__":
    main()

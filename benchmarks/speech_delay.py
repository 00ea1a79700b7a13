"""Delay against accuracy: one recogniser whose streams choose segment and look-ahead, compared with whole sentences.

    python benchmarks/speech_delay.py                     # speaks sentences, trains speech-tiny, measures
    python benchmarks/speech_delay.py --run runs/delay    # keeps the run there, and continues it
    python benchmarks/speech_delay.py --run runs/delay --checkpoint runs/delay/step-500    # measures only
    python benchmarks/speech_delay.py --tiny              # a smoke test
    python benchmarks/speech_delay.py --draw              # only the plot, from the record

``speech-tiny`` (sound only) is trained with a segment S of 4, 8, 16, 32 or 128 frames of 40 ms and a look-ahead R of 0,
2 or 4, drawn for each step. One checkpoint then gives all rows. S = 128 is longer than every sentence of the test: the
encoder reads the whole sentence at once, and its text comes when the sentence has ended. Noise is babble of 8 to 20
voices. Sentences and voices of the test are not in training. Word errors are of all sentences of the test; delays are
those of ``speech.py``: of the words of right sentences without noise, computing included.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import cast

import torch

from colonnade.checkpoint.atomic_folder import read_json
from colonnade.config.speech import SPEECH_PRESETS
from colonnade.errors import DataError
from colonnade.speech.corpus import Corpus
from colonnade.speech.data import read_manifest
from colonnade.speech.features import FRAME, RATE
from colonnade.speech.fit import FitSettings, fit, word_error_rate
from colonnade.speech.model import SpeechModel
from harness.report import RESULTS, ROOT, Cell, Headline, folder_of, report
from speech import STREAMED, label_axes, speak, streams, timed

WHOLE = 128
"""S of a whole sentence."""
SEGMENTS, LOOKAHEADS = (4, 8, 16, 32, WHOLE), (0, 2, 4)
MARKERS = {4: "o", 8: "s", 16: "^", 32: "D"}
"""Markers of the plot, by length of segments [frames]."""
NOISY = 5.0
"""Babble [dB]."""
PICTURE = ROOT / "docs" / "assets" / "speech_delay.png"
CLEAN_COLUMN, NOISY_COLUMN = "word_errors", "word_errors_5_db"


def measure(model: SpeechModel, corpus: Corpus, streamed: int) -> list[dict[str, Cell]]:
    """A row for each segment and look-ahead."""
    longest = max(corpus.frames(i) for i in range(len(corpus.samples)))
    if longest > WHOLE:
        raise DataError(f"a sentence of {longest} frames is longer than a segment of {WHOLE}; make another test set")
    rows: list[dict[str, Cell]] = []
    for sizes in model.all_sizes:
        whole = sizes.segment == WHOLE
        if whole and sizes.right:
            continue  # nothing follows a whole sentence
        clean, noisy = (word_error_rate(model, corpus, snr, False, sizes=sizes) for snr in (None, NOISY))
        found = streams(model, corpus, None, False, sizes, streamed)
        row: dict[str, Cell] = {
            "what": "whole sentences" if whole else "streams",
            "segment": sizes.segment,
            "lookahead": sizes.right,
            CLEAN_COLUMN: round(clean, 4),
            NOISY_COLUMN: round(noisy, 4),
            "worst_algorithmic_latency_s": None if whole else FRAME / RATE * (sizes.right + sizes.segment),
        }
        kept = ("recordings", "equal_to_whole", "word_delay_p50_s", "word_delay_p90_s", "rtf", "threads")
        row |= {"mean_algorithmic_latency_s": None if whole else found["mean_algorithmic_latency_s"]}
        row |= {key: found[key] for key in kept}
        print(row, flush=True)
        rows.append(row)
    return rows


def draw(path: Path, rows: list[dict[str, Cell]]) -> None:
    """Wrong words by the delay of words, without and with babble."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = zip(figure.subplots(1, 2), (CLEAN_COLUMN, NOISY_COLUMN), ("no noise", "babble at 5 dB"), strict=True)
    for axes, column, title in panels:
        for lookahead, colour in zip(LOOKAHEADS, ("#d1495b", "#e8a33d", "#2f6fb3"), strict=True):
            own = [
                row
                for row in rows
                if row["what"] == "streams" and row["lookahead"] == lookahead and row["word_delay_p90_s"] is not None
            ]
            x = [float(cast("float", row["word_delay_p90_s"])) for row in own]
            y = [100 * float(cast("float", row[column])) for row in own]
            axes.plot(x, y, "-", color=colour, label=f"look-ahead {lookahead * 40} ms")
            for row, *place in zip(own, x, y, strict=True):  # labels at the points would overlap: markers instead
                axes.plot(*place, MARKERS[cast("int", row["segment"])], color=colour, markersize=7)
        for row in rows:
            if row["what"] == "whole sentences":
                level = 100 * float(cast("float", row[column]))
                axes.axhline(level, color="#555b63", linestyle="--", linewidth=1, label="whole sentences")
        label_axes(axes, title, "delay of words, 90th percentile [s]")
    for segment, marker in MARKERS.items():
        figure.axes[0].plot([], [], marker, color="#555b63", label=f"segments of {segment * 40} ms")
    figure.axes[0].legend(frameon=False, ncols=2, fontsize=9, loc="lower left")
    figure.savefig(path, dpi=150)
    print(path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of the run and its data; by default a temporary one")
    parser.add_argument("--checkpoint", type=Path, help="measure this recogniser instead of training one")
    parser.add_argument("--streamed", type=int, default=STREAMED, help="sentences of the test that are streamed")
    parser.add_argument("--train", type=int, default=4000, help="sentences to train on")
    parser.add_argument("--test", type=int, default=200, help="sentences to test on")
    parser.add_argument("--steps", type=int, default=1600)
    parser.add_argument("--threads", type=int, default=1, help="of the measurement; training uses two")
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="file of the plot")
    parser.add_argument("--draw", action="store_true", help="only draw the plot, from the record")
    parser.add_argument("--tiny", action="store_true", help="few sentences and steps; writes to a temporary folder")
    args = parser.parse_args(argv)
    if args.draw:
        record = json.loads(((args.out or RESULTS) / "speech_delay_cpu.json").read_text(encoding="utf-8"))
        draw(args.picture, record["rows"])
        return
    torch.set_num_threads(args.threads)
    settings = FitSettings(steps=args.steps)
    if args.tiny:
        args.train, args.test, settings = 8, 2, settings._replace(steps=2, batch=4)
    config = SPEECH_PRESETS["speech-tiny"].replace(segments=SEGMENTS, lookaheads=LOOKAHEADS)
    rows: list[dict[str, Cell]] = []
    with tempfile.TemporaryDirectory() as temporary:
        run = args.run or Path(temporary)
        speak(rows, run / "data", args.train, args.test)
        checkpoint, sentences = args.checkpoint, len(read_manifest(run / "data", "train"))
        if checkpoint is None:
            done: list[int] = []
            with timed(rows, "training") as row:
                checkpoint = fit(config, run / "data", run, settings, lambda step, _: done.append(step))
                row |= {"sentences": sentences, "steps": settings.steps, "steps_here": len(done)}
        else:
            steps = int(read_json(checkpoint / "speech.json")["step"])
            rows.append({"what": "a recogniser of an earlier run", "sentences": sentences, "steps": steps})
        rows += measure(SpeechModel.load(checkpoint), Corpus(run / "data", config, "test"), args.streamed)
    folder = folder_of(args.out, toy=args.tiny)
    found = {(row["segment"], row["lookahead"]): row for row in rows if "segment" in row}
    heads = [
        Headline(
            f"speech-tiny, segments of 320 ms and look-ahead of 80 ms, {where}",
            round(100 * float(cast("float", found[8, 2][column])), 1), "% wrong words", "whole sentences",
            round(100 * float(cast("float", found[WHOLE, 0][column])), 1),
        )
        for column, where in ((CLEAN_COLUMN, "clean"), (NOISY_COLUMN, "5 dB of babble"))
    ]  # fmt: skip
    report("speech_delay_cpu", rows, notes=__doc__ or "", headlines=heads, folder=folder)


if __name__ == "__main__":
    main()

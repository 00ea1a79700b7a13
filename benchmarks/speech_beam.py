"""Beam search compared with greedy search in streams: word errors, delay of words, speed.

    python benchmarks/speech_beam.py --run runs/delay --checkpoint runs/delay/step-1600

The recogniser and its test are those of ``speech_delay.py``: ``speech-tiny`` (sound only), 51 words, voices that are
not in training, segments of 320 ms and a look-ahead of 80 ms. Greedy text appears at once, that of a beam when all
hypotheses agree. Delays are of the words of right sentences without noise, computing included, one thread.
"""

import argparse
from pathlib import Path
from typing import cast

import torch

from colonnade.checkpoint.atomic_folder import read_json
from colonnade.speech.corpus import Corpus
from colonnade.speech.data import MANIFEST, make_data
from colonnade.speech.fit import word_error_rate
from colonnade.speech.model import SpeechModel
from harness.report import Cell, Headline, folder_of, report
from speech import streams

BEAMS = (None, 4, 10)
SIZES = (8, 2)
NOISY = 5.0


def measure(model: SpeechModel, corpus: Corpus, streamed: int) -> list[dict[str, Cell]]:
    """A row for each number of hypotheses."""
    rows: list[dict[str, Cell]] = []
    sizes = model.choose_segments(*SIZES)
    for beam in BEAMS:
        clean, noisy = (word_error_rate(model, corpus, snr, False, sizes=sizes, beam=beam) for snr in (None, NOISY))
        found = streams(model, corpus, None, False, sizes, streamed, beam)
        row: dict[str, Cell] = {
            "search": "greedy" if beam is None else f"beam of {beam}", "word_errors": round(clean, 4),
            "word_errors_5_db": round(noisy, 4), "sentences": len(corpus.recordings),
        }  # fmt: skip
        row |= {key: found[key] for key in ("recordings", "equal_to_whole", "word_delay_p50_s", "word_delay_p90_s")}
        row |= {"rtf": found["rtf"], "threads": 1}
        print(row, flush=True)
        rows.append(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run of speech_delay.py, with its data")
    parser.add_argument("--checkpoint", type=Path, required=True, help="its last checkpoint")
    parser.add_argument("--streamed", type=int, default=60, help="sentences of the test that are streamed")
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    if not (args.run / "data" / MANIFEST).exists():
        make_data(args.run / "data", 1, 100)  # the test comes first, and does not depend on the rest
    model = SpeechModel.load(args.checkpoint)
    rows = measure(model, Corpus(args.run / "data", model.config, "test"), args.streamed)
    steps = int(read_json(args.checkpoint / "speech.json")["step"])
    greedy, *_, beam = rows
    heads = [
        Headline(
            f"speech-tiny after {steps:,} steps, beam of 10, {where}", round(100 * cast("float", beam[column]), 1),
            "% wrong words", "greedy", round(100 * cast("float", greedy[column]), 1),
        )
        for column, where in (("word_errors", "clean"), ("word_errors_5_db", "5 dB of babble"))
    ]  # fmt: skip
    report("speech_beam_cpu", rows, notes=__doc__ or "", headlines=heads, folder=folder_of(args.out, toy=False))


if __name__ == "__main__":
    main()

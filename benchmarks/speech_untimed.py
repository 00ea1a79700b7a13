"""Times of words of voices whose recordings had no times in training.

    python benchmarks/speech_untimed.py --times accents    # three of five accents have times
    python benchmarks/speech_untimed.py --times none       # no recording has times: CTC alone
    python benchmarks/speech_untimed.py --times all --preset conformer-tiny    # the other family of encoders

A recogniser (sound only; ``speech-tiny`` by default) is trained on sentences of espeak-ng in five accents. With
``--times accents`` the recordings of two accents (Scotland, Caribbean) have no times of words, as a corpus of one's own
has none; those of the others have. Bounds are measured on unseen voices, by accent: by the head's labels of each 10 ms,
and by their mean over a frame, which is what CTC trains.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from colonnade.config.speech import SPEECH_PRESETS
from colonnade.kernels import ctc
from colonnade.speech.corpus import Corpus
from colonnade.speech.data import MANIFEST, make_data
from colonnade.speech.fit import FitSettings, fit, word_error_rate
from colonnade.speech.model import SpeechModel
from colonnade.speech.word_times import WordTime, word_times
from harness.report import Cell, Headline, folder_of, report
from speech import timed

UNTIMED = ("en-gb-scotland", "en-029")
TOLERANCE_S = 0.06


def bounds(model: SpeechModel, corpus: Corpus, snr: float | None, untimed: bool, frames: bool) -> list[float]:
    """Errors of starts and ends [s]; ``frames``: by one label per frame."""
    errors: list[float] = []
    for i, one in enumerate(corpus.recordings):
        if not one.words or one.speaker.startswith(UNTIMED) != untimed:
            continue
        samples = torch.from_numpy(corpus.noisy(i, snr, np.random.Generator(np.random.PCG64([0, i]))))
        found = by_frames(model, samples, one.text) if frames else model.align(samples, one.text)
        for each, true in zip(found, one.words, strict=True):
            errors += [each.start_s - true[0], each.end_s - true[1]]
    return errors


@torch.inference_mode()
def by_frames(model: SpeechModel, samples: torch.Tensor, text: str) -> list[WordTime]:
    """Times of words by the mean of a frame's logits."""
    assert model.letters is not None
    sound_TA, parts = model.features(samples), model.config.parts
    y_TD = model.encode(model.frames(sound_TA), [len(sound_TA)])
    logprobs_TV = model.letters(y_TD).unflatten(1, (parts, -1)).mean(1).log_softmax(1)
    spans = ctc.align(logprobs_TV, model.config.labels(text))
    return word_times(text, [span._replace(start=parts * span.start, stop=parts * span.stop) for span in spans])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", choices=("accents", "none", "all"), default="accents")
    parser.add_argument("--preset", choices=("speech-tiny", "conformer-tiny"), default="speech-tiny")
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--train", type=int, default=1500)
    parser.add_argument("--test", type=int, default=150)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[dict[str, Cell]] = []
    data = args.run / "data"
    if not (data / MANIFEST).exists():
        make_data(data, args.train, args.test)
        lines = [json.loads(line) for line in (data / MANIFEST).read_text().splitlines()]
        for line in lines:
            untimed = args.times == "none" or (args.times == "accents" and line["speaker"].startswith(UNTIMED))
            if line["split"] == "train" and untimed:
                line["words"] = []
        (data / MANIFEST).write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = SPEECH_PRESETS[args.preset]
    with timed(rows, "training") as row:
        checkpoint = fit(config, data, args.run, FitSettings(steps=args.steps))
        row |= {"preset": args.preset, "steps": args.steps, "times": args.times}
    model, corpus = SpeechModel.load(checkpoint), Corpus(data, config, "test")
    for snr in (None, 5.0):
        for untimed in (True, False):
            for how, frames in (("10 ms", False), ("frames", True)):
                errors = bounds(model, corpus, snr, untimed, frames)
                rows.append({
                    "what": "times of words",
                    "accents": ("Scotland, Caribbean" if untimed else "the other three"),
                    "times_in_training": args.times == "all" or (args.times == "accents" and not untimed),
                    "by": how, "snr_db": snr, "bounds": len(errors),
                    "within_60_ms": round(float(np.mean(np.abs(errors) <= TOLERANCE_S)), 4),
                    "median_s": round(float(np.median(errors)), 4),
                    "p90_absolute_error_s": round(float(np.quantile(np.abs(errors), 0.9)), 4),
                })  # fmt: skip
                print(rows[-1], flush=True)
    for snr in (None, 5.0):
        rows.append(
            {"what": "word errors", "snr_db": snr, "word_errors": round(word_error_rate(model, corpus, snr, False), 4)}
        )
        print(rows[-1], flush=True)
    first = next(row for row in rows if row["what"] == "times of words")
    what = f"{args.preset}, word boundaries of two accents within 60 ms, clean, times in training: {args.times}"
    heads = [Headline(what, round(100 * float(first["within_60_ms"] or 0), 1), "%")]
    name = {"accents": "speech_untimed_cpu", "none": "speech_untimed_none_cpu", "all": "speech_timed_cpu"}[args.times]
    name = name if args.preset == "speech-tiny" else name.replace("speech", args.preset.replace("-tiny", ""))
    report(name, rows, notes=__doc__ or "", headlines=heads, folder=folder_of(args.out, toy=False))


if __name__ == "__main__":
    main()

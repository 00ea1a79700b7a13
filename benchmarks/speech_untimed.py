"""Times of words of voices whose recordings had no times in training.

    python benchmarks/speech_untimed.py --times accents    # three of five accents have times
    python benchmarks/speech_untimed.py --times none       # no recording has times: CTC alone
    python benchmarks/speech_untimed.py --times none --prior 0.3

``speech-tiny`` (sound only) is trained on sentences of espeak-ng in five accents. With ``--times accents`` the
recordings of two accents (Scotland, Caribbean) have no times of words, as a corpus of one's own has none; those of the
others have. Bounds are measured on unseen voices, by accent with and without times. ``--prior``: CTC over posteriors
divided by the labels' prior to this power (Huang et al., arXiv 2406.02560).
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.config.speech import SPEECH_PRESETS
from colonnade.kernels import ctc
from colonnade.speech import fit as fitting
from colonnade.speech.corpus import Corpus
from colonnade.speech.data import MANIFEST, make_data
from colonnade.speech.fit import FitSettings, fit, word_error_rate
from colonnade.speech.model import SpeechModel
from colonnade.speech.word_times import word_times
from harness.report import Cell, Headline, folder_of, report
from speech import timed

UNTIMED = ("en-gb-scotland", "en-029")
TOLERANCE_S = 0.06


class PriorModel(SpeechModel):
    """CTC over posteriors divided by a power of the labels' prior."""

    power = 0.0
    prior_V: Tensor | None = None

    def _frames(self, y_TD: Tensor) -> Tensor:
        return self.letters(y_TD).unflatten(1, (self.config.parts, -1)).mean(1).log_softmax(1)

    def _letter_loss(self, y_TD, lengths, labels, letters_P):
        frames_TV = self._frames(y_TD)
        mean_V = frames_TV.detach().exp().mean(0)
        old = type(self).prior_V
        type(self).prior_V = mean_V if old is None else 0.99 * old + 0.01 * mean_V
        scaled = (frames_TV - self.power * type(self).prior_V.log()).split(list(lengths))
        padded = torch.nn.utils.rnn.pad_sequence(scaled)
        targets = torch.tensor([label for own in labels for label in own])
        T_B, U_B = torch.tensor(list(lengths)), torch.tensor([len(own) for own in labels])
        return F.ctc_loss(padded, targets, T_B, U_B, reduction="sum", zero_infinity=True)


def bounds(
    model: SpeechModel, corpus: Corpus, snr: float | None, untimed: bool, frame_power: float | None
) -> list[float]:
    """Errors of starts and ends [s]; ``frame_power``: by one label a frame, over the prior to this power."""
    errors: list[float] = []
    for i, one in enumerate(corpus.recordings):
        if not one.words or one.speaker.startswith(UNTIMED) != untimed:
            continue
        samples = torch.from_numpy(corpus.noisy(i, snr, np.random.Generator(np.random.PCG64([0, i]))))
        if frame_power is None:
            found = model.align(samples, one.text)
        else:
            with torch.inference_mode():
                sound_TA = model.features(samples)
                y_TD = model.encode(model.frames(sound_TA), [len(sound_TA)])
                frames = model.letters(y_TD).unflatten(1, (4, -1)).mean(1).log_softmax(1)
                if frame_power:
                    frames = frames - frame_power * PriorModel.prior_V.log()
                spans = ctc.align(frames, model.config.labels(one.text))
                spans = [span._replace(start=4 * span.start, stop=4 * span.stop) for span in spans]
                found = word_times(one.text, spans)
        for each, true in zip(found, one.words, strict=True):
            errors += [each.start_s - true[0], each.end_s - true[1]]
    return errors


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", choices=("accents", "none"), default="accents")
    parser.add_argument("--prior", type=float, default=0.0)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--train", type=int, default=2000)
    parser.add_argument("--test", type=int, default=200)
    parser.add_argument("--steps", type=int, default=700)
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows: list[dict[str, Cell]] = []
    data = args.run / "data"
    if not (data / MANIFEST).exists():
        make_data(data, args.train, args.test)
        lines = [json.loads(line) for line in (data / MANIFEST).read_text().splitlines()]
        for line in lines:
            if line["split"] == "train" and (args.times == "none" or line["speaker"].startswith(UNTIMED)):
                line["words"] = []
        (data / MANIFEST).write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = SPEECH_PRESETS["speech-tiny"]
    if args.prior:
        PriorModel.power = args.prior
        fitting.SpeechModel = PriorModel
    with timed(rows, "training") as row:
        checkpoint = fit(config, data, args.run, FitSettings(steps=args.steps))
        row |= {"steps": args.steps, "times": args.times, "prior": args.prior}
    model, corpus = SpeechModel.load(checkpoint), Corpus(data, config, "test")
    for snr in (None, 5.0):
        for untimed in (True, False):
            for how, power in (
                ("10 ms", None),
                ("frames", 0.0),
                *((("frames over prior", args.prior),) if args.prior else ()),
            ):
                errors = bounds(model, corpus, snr, untimed, power)
                rows.append({
                    "what": "times of words",
                    "accents": "without times" if untimed or args.times == "none" else "with times",
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
    heads = [
        Headline(
            "bounds of words within 60 ms, accents without times in training, clean",
            round(100 * float(first["within_60_ms"] or 0), 1), "%",
        )
    ]  # fmt: skip
    report("speech_untimed_cpu", rows, notes=__doc__ or "", headlines=heads, folder=folder_of(args.out, toy=False))


if __name__ == "__main__":
    main()

"""A beam search with and without a language model of letters: word errors of whole recordings, and computing time.

    python benchmarks/speech_untimed.py --times all --preset conformer-tiny --run runs/conformer
    python benchmarks/speech_letter_lm.py --run runs/conformer --checkpoint runs/conformer/step-600

The recogniser is that of ``speech_untimed.py``; its test has sentences and voices that are not in training. The
language model is made from the texts of the training sentences, so it knows their grammar of 51 words: what it gains
here is more than in open speech. All weights are shown, none is chosen. One thread, CPU time, noise and features included.
"""

import argparse
import time
from pathlib import Path

import torch

from colonnade.checkpoint.atomic_folder import read_json
from colonnade.speech.corpus import Corpus
from colonnade.speech.data import read_manifest
from colonnade.speech.fit import word_error_rate
from colonnade.speech.letter_lm import Fusion, LetterModel
from colonnade.speech.model import SpeechModel
from harness.report import Cell, Headline, folder_of, report

BEAM, WEIGHTS, NOISY = 10, (0.2, 0.4, 0.8), 5.0


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of the run, with its data")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--sentences", type=int, default=150, help="of the test, how many are measured")
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = SpeechModel.load(args.checkpoint)
    corpus = Corpus(args.run / "data", model.config, "test")
    corpus.samples = corpus.samples[: args.sentences]
    language = LetterModel(model.config, [one.text for one in read_manifest(args.run / "data", "train")])
    searches: dict[str, tuple[int | None, Fusion | None]] = {"greedy": (None, None), "beam of 10": (BEAM, None)}
    searches |= {f"beam of 10, language model, weight {w}": (BEAM, Fusion((language,), w)) for w in WEIGHTS}
    rows: list[dict[str, Cell]] = []
    for name, (beam, fusion) in searches.items():
        start_s = time.process_time()
        clean, noisy = (word_error_rate(model, corpus, snr, False, beam=beam, fusion=fusion) for snr in (None, NOISY))
        spent_s, seconds = time.process_time() - start_s, sum(map(len, corpus.samples)) / 16000
        rows.append({
            "search": name, "word_errors": round(clean, 4), "word_errors_5_db": round(noisy, 4),
            "sentences": len(corpus.samples), "cpu_s_a_second": round(spent_s / seconds / 2, 4), "threads": 1,
        })  # fmt: skip
        print(rows[-1], flush=True)
    steps, family = int(read_json(args.checkpoint / "speech.json")["step"]), model.config.family
    plain, fused = (100 * float(rows[i]["word_errors_5_db"] or 0) for i in (1, 3))
    what = f"a small {family} after {steps:,} steps, 5 dB of babble, beam of 10 and a language model of its grammar"
    heads = [Headline(what, round(fused, 1), "% wrong words", "without the language model", round(plain, 1))]
    report("speech_letter_lm_cpu", rows, notes=__doc__ or "", headlines=heads, folder=folder_of(args.out, toy=False))


if __name__ == "__main__":
    main()

"""The speech demo: synthesises data, trains a recogniser with drawn mouths, and tests it on unseen voices in babble.

An interrupted demo resumes.
"""

import time
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from colonnade.config.speech import SPEECH_PRESETS
from colonnade.speech.corpus import Corpus
from colonnade.speech.data import MANIFEST, make_data
from colonnade.speech.features import FRAME, RATE
from colonnade.speech.fit import FitSettings, fit, word_error_rate
from colonnade.speech.listen import StreamingRecogniser
from colonnade.speech.model import SpeechModel

SNRS = (None, 5.0, -5.0)
STREAMED = 3
"""Sentences that are shown as streams."""

console = Console(highlight=False)


def demo(folder: Path, sentences: int, tests: int, settings: FitSettings) -> Path:
    """Run the demo in ``folder`` and return the checkpoint."""
    config = SPEECH_PRESETS["speech-tiny-av"]
    if not (folder / "data" / MANIFEST).exists():
        with _progress() as progress:
            task = progress.add_task("speaking", total=sentences + tests)
            make_data(folder / "data", sentences, tests, progress=lambda n: progress.update(task, completed=n))
    start_s = time.monotonic()
    with _progress() as progress:
        task = progress.add_task("training", total=settings.steps)

        def log(step: int, loss: float) -> None:
            progress.update(task, completed=step + 1, description=f"training, loss {loss:5.2f}")

        checkpoint = fit(config, folder / "data", folder, settings, log)
    console.print(f"trained in {time.monotonic() - start_s:.0f} s: {checkpoint}", soft_wrap=True)
    model, corpus = SpeechModel.load(checkpoint), Corpus(folder / "data", config, "test")
    columns = ("clean" if snr is None else f"{snr:g} dB" for snr in SNRS)
    table = Table("wrong words, unseen voices, in babble", *columns)
    for what, seen in (("sound", False), ("sound and drawn mouths", True)):
        table.add_row(what, *(f"{word_error_rate(model, corpus, snr, seen):.1%}" for snr in SNRS))
    console.print(table)
    for i in range(min(STREAMED, len(corpus.recordings))):
        _stream(model, corpus, i, SNRS[-1])
    console.print("Mouths are drawn from phoneme times and tell more than lips do.")
    return checkpoint


def _stream(model: SpeechModel, corpus: Corpus, i: int, snr: float | None) -> None:
    """Print the recognised text as it appears, each part with the audio time that it needed."""
    random = np.random.Generator(np.random.PCG64([0, i]))
    pictures = corpus.mouths(i, random)
    samples = torch.from_numpy(corpus.noisy(i, snr, random))
    console.print(f"spoken: {corpus.recordings[i].text}", markup=False)
    console.print("heard:  ", end="")
    listeners = StreamingRecogniser(model)
    stream = listeners.open()
    parts = samples.split(FRAME)
    for number, part in enumerate([*parts, None], 1):
        if part is None:
            listeners.end(stream)
        else:
            listeners.push(stream, part, pictures[number - 1 : number])
        while found := listeners.step():
            if found[stream]:
                console.print(f"[dim]{min(number, len(parts)) * FRAME / RATE:.1f}s[/dim] {found[stream]}", end=" ")
    console.print()


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=30), MofNCompleteColumn(), TimeRemainingColumn(),
        console=console,
    )  # fmt: skip

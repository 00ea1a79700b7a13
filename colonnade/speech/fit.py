"""Trains a recogniser: noise and modality by step, AdamW, checkpoints, bitwise resume.

The data of step s is a function of (seed, s): its recordings (from a seeded permutation of each epoch), noise and
modalities. So a resumed run is bitwise equal to an uninterrupted one. Lock, signals and metrics are those of
:mod:`colonnade.train.loop`.
"""

import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from colonnade.checkpoint.atomic_folder import is_complete, list_steps, prune, read_json, remove_partials
from colonnade.config import TrainConfig
from colonnade.config.speech import SpeechConfig
from colonnade.errors import CheckpointError, ConfigError, DataError
from colonnade.model.segments import Segments
from colonnade.parallel.axis import SOLO, Axis
from colonnade.speech.corpus import Batch, Corpus
from colonnade.speech.data import word_errors
from colonnade.speech.model import SpeechModel
from colonnade.train.loop import StopSignal
from colonnade.train.lr_schedule import learning_rate
from colonnade.train.trackers import JsonLines
from colonnade.train.training_state import RunLock

PARTS = 2
"""Parts of a batch, each computed by one thread, so training uses two cores. The results do not depend on the number of
cores: with batch norm, whose statistics depend on the order, the parts run one after another. On a GPU a batch is one
part.
"""
PREFETCH_PROCESSES = 16
"""On a GPU: most processes that prepare batches ahead. Threads would hold Python's global lock, which the training
thread needs for every launch.
"""
TEST_BATCH = 50
"""Recordings per test batch."""


class FitSettings(NamedTuple):
    """Settings of a training run."""

    steps: int = 3000
    batch: int = 16
    lr: float = 2e-3
    warmup: int = 100
    seed: int = 0
    save_every: int = 500
    clean: int = 400
    """Steps before the first noise: with noise from the start, the encoder learns nothing for hundreds of steps."""
    noise: bool = True
    noises: Path | None = None
    """Folder with further recordings of noise."""
    augment: bool = False
    """Also apply speeds, rooms, codecs, masks and crops."""
    rooms: bool = True
    """With ``augment``: apply rooms and codecs, too."""
    pretrained: Path | None = None
    """A recogniser of the same shapes that provides the initial weights."""


def fit(
    config: SpeechConfig,
    data: Path | Corpus,
    run: Path,
    settings: FitSettings,
    log: Callable[[int, float], None] | None = None,
    device: str = "cpu",
) -> Path:
    """Train to the last step and return its checkpoint, continuing from the newest one of ``run``.

    ``data`` is a folder of recordings, or those to train on, loaded.

    ``run/metrics.jsonl`` has a line per step. After SIGTERM or SIGINT the step is finished and saved, and Interrupted
    is raised. Raises ConfigError for impossible settings, CheckpointError for a run of a different recogniser or one in
    use.
    """
    if min(settings.steps, settings.batch, settings.save_every) < 1 or settings.lr <= 0 or settings.warmup < 0:
        raise ConfigError(f"{settings}: steps, batch, save_every and lr must be above 0, warmup at least 0")
    corpus = data if isinstance(data, Corpus) else Corpus(data, config, "train", settings.noises)
    with RunLock(run, SOLO) as lock, StopSignal(SOLO) as stop, ExitStack() as stack:
        remove_partials(run)
        model, first, state = SpeechModel(config, settings.seed), 0, {}
        if (newest := _newest(run)) is not None:
            model, first, state = _resume(newest, config)
        elif settings.pretrained is not None:
            _start_from(model, settings.pretrained)
        model.to(device).train()
        names, parameters = zip(*model.named_parameters(), strict=True)
        optimizer = torch.optim.AdamW(parameters, lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.06, fused=True)
        _set_state(optimizer, names, state)
        schedule = TrainConfig(lr=settings.lr, warmup=settings.warmup, steps=max(settings.steps, settings.warmup + 1))
        metrics = JsonLines(run, first)
        stack.callback(metrics.close)
        gpu = torch.device(device).type == "cuda"
        workers = stack.enter_context(_workers(1 if gpu or config.front_end == "resnet" else PARTS))
        prepared = _batches(corpus, settings, range(first, settings.steps), gpu)
        stack.callback(prepared.close)
        for step, batches in zip(range(first, settings.steps), prepared, strict=True):
            lr = optimizer.param_groups[0]["lr"] = learning_rate(step, schedule)
            parts = list(
                workers.map(partial(_gradients, model, parameters, step_sizes(model, settings, step)), batches)
            )
            labels = sum(part.labels for part in parts)
            loss, gradients = combine(parts, parameters)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            norm = torch.nn.utils.clip_grad_norm_(parameters, 5.0)
            if not torch.isfinite(norm):
                raise DataError(f"step {step}: the gradient is not finite; lower --lr, or check the recordings")
            optimizer.step()
            metrics.record(step + 1, {"loss": loss, "grad_norm": norm.item(), "lr": lr, "labels": labels})
            if log is not None:
                log(step, loss)
            interrupted = stop.received()
            if interrupted or (step + 1) % settings.save_every == 0 or step + 1 == settings.steps:
                lock.check()
                model.save(run / f"step-{step + 1}", True, _state(optimizer, names), step + 1)
                prune(run, 2)
            if interrupted:
                raise interrupted
    done = _newest(run)
    assert done is not None
    return done


@contextmanager
def _workers(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads for the parts of a batch. With two of them torch uses one thread each: the products are too small to
    split.
    """
    threads = torch.get_num_threads()
    own = 1 if count > 1 else threads
    with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(own,)) as workers:
        try:
            yield workers
        finally:
            torch.set_num_threads(threads)


class Part(NamedTuple):
    """Sums over the labels of a part of a batch."""

    loss: float
    labels: int
    gradients: list[Tensor]


def combine(parts: Sequence[Part], parameters: Sequence[Tensor], dp: Axis = SOLO) -> tuple[float, list[Tensor]]:
    """(loss, gradients of ``parameters``) per label, over the parts of all data ranks; a rank may have none."""
    sums = torch.tensor([sum(part.loss for part in parts), sum(part.labels for part in parts)], dtype=torch.float64)
    loss, labels = dp.sum_(sums).tolist()
    own = (
        zip(*(part.gradients for part in parts), strict=True) if parts else ((torch.zeros_like(x),) for x in parameters)
    )
    return loss / labels, [dp.sum_(sum(gradients[1:], gradients[0])) / labels for gradients in own]


def _batches(
    corpus: Corpus, settings: FitSettings, steps: range, gpu: bool
) -> Generator[list[Callable[[], Batch]], None, None]:
    """For each step the functions that give the parts of its batch; on a GPU other processes have prepared them."""
    if not gpu:
        for step in steps:
            yield [partial(train_batch, corpus, settings, step, part) for part in range(PARTS)]
        return
    processes = max(1, min(PREFETCH_PROCESSES, len(os.sched_getaffinity(0)) - 1))
    loader = DataLoader(
        _Steps(corpus, settings), batch_size=None, sampler=steps, num_workers=processes, collate_fn=_unchanged,
        multiprocessing_context="fork", pin_memory=torch.cuda.is_available(), worker_init_fn=_ignore_signals,
    )  # fmt: skip
    for batch in loader:
        yield [partial(_unchanged, batch)]


class _Steps(Dataset[Batch]):
    """The whole batch of each step. The processes are forked, so they share the recordings."""

    def __init__(self, corpus: Corpus, settings: FitSettings):
        self.corpus, self.settings = corpus, settings

    def __getitem__(self, step: int) -> Batch:
        return train_batch(self.corpus, self.settings, step, parts=1)


def _ignore_signals(_: int) -> None:
    """A signal to the process group must not end the workers: the training process finishes its step and saves."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)


def _unchanged(batch: Any) -> Any:
    return batch


def _gradients(model: SpeechModel, parameters: Sequence[Tensor], sizes: Segments, prepare: Callable[[], Batch]) -> Part:
    """Loss and gradients of a part of a batch."""
    frames, lengths, labels, letters_P = prepare().to(parameters[0].device)
    count = sum(map(len, labels))
    if not count:
        return Part(0.0, 0, [torch.zeros_like(x) for x in parameters])
    loss = count * model.loss(model.front_end(frames), lengths, labels, letters_P, sizes)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
    return Part(loss.item(), count, list(gradients))


def train_batch(corpus: Corpus, settings: FitSettings, step: int, part: int = 0, parts: int = PARTS) -> Batch:
    """A part of the batch of ``step``: its recordings, noise and modalities are functions of seed, step and part."""
    random = np.random.Generator(np.random.PCG64([settings.seed, step, part]))
    indices = batch_indices(len(corpus.samples), settings, step)[part::parts]
    later = step >= settings.clean
    return corpus.train_batch(indices, random, settings.noise and later, settings.augment and later, settings.rooms)


def step_sizes(model: SpeechModel, settings: FitSettings, step: int) -> Segments:
    """S and R of a step, drawn from all that the recogniser is trained with."""
    random = np.random.Generator(np.random.PCG64([settings.seed, 1 << 21, step]))
    return model.all_sizes[random.integers(len(model.all_sizes))]


def batch_indices(recordings: int, settings: FitSettings, step: int) -> list[int]:
    """The recordings of a step; each epoch has its own permutation."""
    first, last = step * settings.batch, (step + 1) * settings.batch
    result: list[int] = []
    for epoch in range(first // recordings, (last - 1) // recordings + 1):
        order = np.random.Generator(np.random.PCG64([settings.seed, 1 << 20, epoch])).permutation(recordings)
        start = epoch * recordings
        result += order[max(0, first - start) : last - start].tolist()
    return result


@torch.inference_mode()
def word_error_rate(
    model: SpeechModel,
    corpus: Corpus,
    snr: float | None,
    pictures: bool,
    seed: int = 0,
    sizes: Segments | None = None,
    beam: int | None = None,
) -> float:
    """Word errors per word in babble of other recordings; ``pictures``: with drawn mouths; greedy or by a beam."""
    errors = words = 0
    for first in range(0, len(corpus.samples), TEST_BATCH):
        chosen = range(first, min(first + TEST_BATCH, len(corpus.samples)))
        frames, lengths, *_ = corpus.test_batch(chosen, snr, pictures, seed).to(model.joint.weight.device)
        texts = model.texts(model.front_end(frames), lengths, sizes, beam)
        for i, text in zip(chosen, texts, strict=True):
            errors += word_errors(corpus.recordings[i].text, text)
            words += len(corpus.recordings[i].text.split())
    return errors / max(1, words)


def _start_from(model: SpeechModel, folder: Path) -> None:
    """Copy the weights of another recogniser; segments and look-aheads may differ."""
    other, own = SpeechModel.load(folder), model.state_dict()
    given = other.state_dict()
    differ = [
        name for name in {*own, *given} if name not in own or name not in given or own[name].shape != given[name].shape
    ]
    if differ or (other.config.pieces or other.config.letters) != (model.config.pieces or model.config.letters):
        raise ConfigError(
            f"{folder} has other shapes or labels{f' ({min(differ)} differs)' if differ else ''}; train its preset, "
            "or choose another recogniser to start from"
        )
    model.load_state_dict(given)


def _newest(run: Path) -> Path | None:
    return next((folder for _, folder in list_steps(run) if is_complete(folder)), None)


def _resume(folder: Path, config: SpeechConfig) -> tuple[SpeechModel, int, dict[str, Tensor]]:
    model = SpeechModel.load(folder)
    if model.config != config:
        raise CheckpointError(f"{folder} is a run of a different recogniser; choose another --run, or use its settings")
    path = folder / "optimizer.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no optimizer state, so it cannot be resumed; choose another --run")
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
            optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in own.items()}

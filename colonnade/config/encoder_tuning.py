"""Settings of fine-tuning an encoder with several seeds: a grid, the median run, an ensemble."""

from dataclasses import dataclass
from pathlib import Path

from colonnade.config.distill import DistillConfig
from colonnade.config.plan import Plan
from colonnade.config.run import Device, TrainConfig

DEFAULT_PLAN, NO_TEACHER = Plan(), DistillConfig()
TRAIN = TrainConfig(lr=2e-5, dropout=0.1, attention_dropout=0.1, weight_decay=0.01)
"""Hyperparameters that BERT's paper fine-tunes with."""


@dataclass(frozen=True)
class EncoderTuning:
    """How an encoder is fine-tuned on classes, choices or spans."""

    model: str
    """The encoder."""
    data: Path
    """The training data; docs/howto/encoders.md describes the formats."""
    held_out: Path
    """The development set, on which runs are compared."""
    method: str = "classify"
    """classify: texts or pairs of texts (MNLI, QQP). choice: one of several options (RACE). span: SQuAD 1.1 and 2.0."""
    test: Path | None = None
    """A test set, for the median run and the ensemble."""
    seeds: int = 5
    """Runs with different seeds; the median is reported, and the ensemble of all."""
    epochs: float = 3.0
    """Passes over the training data."""
    lrs: tuple[float, ...] = (2e-5,)
    """Peak learning rates to try, with the first seed."""
    batches: tuple[int, ...] = (32,)
    """Batch sizes to try, with the first seed [samples]."""
    micro_batch: int = 8
    """Samples in one forward pass."""
    sequence: int = 0
    """Maximum sequence length [tokens]; 0: the encoder's context, at most 512."""
    name: str = ""
    """Folder of the runs within --runs; by default the method."""
    runs: Path = Path("runs")
    """Folder of all runs."""
    device: Device = "auto"
    """auto: CUDA if there is a GPU for each local rank, otherwise the CPU."""
    plan: Plan = DEFAULT_PLAN
    """The parallel layout."""
    train: TrainConfig = TRAIN
    """The optimisation; steps, lr, batch, seed and start follow from the flags above."""
    distill: DistillConfig = NO_TEACHER
    """classify: a fine-tuned classifier to imitate."""

"""Feeds whose samples are made by the model in training, before each step."""

from typing import Protocol, runtime_checkable

from colonnade.model import Transformer


@runtime_checkable
class RolloutFeed(Protocol):
    """A :class:`~colonnade.train.data_feed.DataFeed` that samples from the model."""

    def before_step(self, model: Transformer, seen: int) -> None:
        """Make the samples of the step after ``seen`` samples with the current weights."""
        ...

    def step_metrics(self) -> dict[str, float]:
        """Metrics of the newest samples, by name."""
        ...

    def messages(self) -> list[str]:
        """Lines for the user about the newest samples, such as why some are left out."""
        ...

    def close(self) -> None:
        """Free what belongs to the run."""
        ...

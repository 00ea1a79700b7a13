"""Feeds that compute something with the model that a run starts from, before the first step."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from colonnade.model import Transformer
from colonnade.parallel.axis import Axis
from colonnade.train.train_step import PipelineStep


@runtime_checkable
class PreparedFeed(Protocol):
    """A :class:`~colonnade.train.data_feed.DataFeed` with a preparation step; a resumed run may lack its results."""

    def needs_start_weights(self, world: Axis) -> bool:
        """Whether :meth:`prepare` must be called; the same on all ranks of ``world``."""
        ...

    def prepare(
        self,
        model: Transformer,
        pipeline: PipelineStep | None,
        world: Axis,
        device: torch.device,
        announce: Callable[[str], object],
    ) -> None:
        """Compute with ``model``, which has the initial weights; called on all ranks. ``announce`` shows a line."""
        ...

"""How hidden states are pooled into a result; this file does not import torch, because the HTTP process uses it."""

from dataclasses import dataclass
from typing import Literal

from colonnade.config.serve import ClassActivation, Pooling


@dataclass(frozen=True)
class PoolerSpec:
    """How the hidden states of a text become its result: a vector of ``width`` numbers."""

    task: Literal["embed", "classify"]
    width: int
    """Width of an embedding, or number of classes."""
    context: int
    """Maximum length of a text [tokens]."""
    pooling: Pooling = "mean"
    """For embeddings."""
    normalize: bool = True
    """For embeddings: whether they have length 1."""
    labels: tuple[str, ...] = ()
    """For classes."""
    activation: ClassActivation = "softmax"
    """For classes."""

    @property
    def scores_pairs(self) -> bool:
        """Whether the model is a cross-encoder: its one class is the score of a pair of texts."""
        return self.task == "classify" and self.width == 1

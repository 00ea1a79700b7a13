"""Settings of distillation: a model in training also imitates a teacher."""

from typing import Literal

from pydantic import Field

from colonnade.config.base import Config
from colonnade.config.feature_checks import WeightFormat, WeightGroup

Divergence = Literal["kl", "reverse", "jsd", "dist"]


class DistillConfig(Config):
    """Distillation: mix · cross-entropy + (1 − mix) · divergence from the teacher + hidden · distance to its states."""

    teacher: str = ""
    """The model to imitate (a run, a checkpoint, a Hugging Face folder, a GGUF file); empty: no distillation. Its
    vocabulary must match the run's."""
    loss: Divergence = "kl"
    """kl (Hinton 2015), reverse (the student's own view: it covers fewer modes), jsd (between both, by beta), or dist
    (correlations within and between tokens, or a classifier's examples, arXiv 2205.10536, for students much smaller
    than their teacher)."""
    mix: float = Field(default=0.5, ge=0, le=1)
    """Share of the ordinary cross-entropy."""
    temperature: float = Field(default=1.0, gt=0, le=1e3)
    """Both models' logits are divided by it; the divergence is multiplied by its square."""
    beta: float = Field(default=0.5, gt=0, lt=1)
    """jsd: the teacher's share of the mixture that both are compared with."""
    init: Literal["random", "layers"] = "random"
    """Initial weights of a new run: random, or the teacher's embedding, head and evenly spaced layers, for a model that
    differs from its teacher only in the number of layers."""
    hidden: float = Field(default=0.0, ge=0)
    """Weight of the squared distance of the last hidden states (a classifier: of the pooled vectors), relative to the
    teacher's; needs equal widths."""
    on_policy: float = Field(default=0.0, ge=0, le=1)
    """Share of the samples in which the model in training continues the document from its middle; on the generated
    tokens only the divergence counts (GKD, arXiv 2306.13649). One process."""
    cache: str = ""
    """A folder for the teacher's 64 most likely tokens at each position (0.5 KB), so that it processes each sample only
    once, in this run and in later ones. For kl, whose divergence then counts all other tokens as one; for a classifier
    it stores all classes, for every loss."""
    weights: WeightFormat = "stored"
    """Storage format of the teacher's matrices (serve.weights)."""
    weight_group: WeightGroup = 64
    """int4: consecutive inputs that share a scale."""

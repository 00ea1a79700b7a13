"""Serving: a paged cache, a scheduler, an engine loop of three calls, and an OpenAI-compatible server around it."""

from colonnade.serve.engine import Engine
from colonnade.serve.output import Completion, Output
from colonnade.serve.sampling import SamplingParams

__all__ = ["Completion", "Engine", "Output", "SamplingParams"]

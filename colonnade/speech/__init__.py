"""Streaming speech recognition: predictors and search; the encoder's attention is :mod:`colonnade.model.segments`."""

from colonnade.speech.predictor import LstmPredictor, StatelessPredictor
from colonnade.speech.search import BeamSearch, GreedySearch

__all__ = ["BeamSearch", "GreedySearch", "LstmPredictor", "StatelessPredictor"]

"""One Transformer for training and serving: ``out = model(stream, attend, head)``."""

from colonnade.model.attend import Packed, Paged
from colonnade.model.cache import KVCache
from colonnade.model.encoder_heads import Classes, ClassLoss, Hidden, Orders, Pooled, Pretraining, Spans
from colonnade.model.head import Loss, Rows
from colonnade.model.initialise import initialise
from colonnade.model.loss import IGNORE
from colonnade.model.noise import Noise, Rates
from colonnade.model.ring import Ring
from colonnade.model.stream import Stream
from colonnade.model.transformer import Transformer

__all__ = [
    "IGNORE",
    "ClassLoss",
    "Classes",
    "Hidden",
    "KVCache",
    "Loss",
    "Noise",
    "Orders",
    "Packed",
    "Paged",
    "Pooled",
    "Pretraining",
    "Rates",
    "Ring",
    "Rows",
    "Spans",
    "Stream",
    "Transformer",
    "initialise",
]

"""One Transformer for training and serving: ``out = model(stream, attend, head)``."""

from colonnade.model.attend import Packed, Paged
from colonnade.model.cache import KVCache
from colonnade.model.dropout import Dropout, DropoutRates
from colonnade.model.encoder_heads import Classes, ClassLoss, Hidden, Orders, Pooled, Pretraining, Spans
from colonnade.model.head import Loss, Rows
from colonnade.model.initialise import initialise
from colonnade.model.loss import IGNORE
from colonnade.model.ring_attention import Ring
from colonnade.model.stream import Stream
from colonnade.model.transformer import Transformer

__all__ = [
    "IGNORE",
    "ClassLoss",
    "Classes",
    "Dropout",
    "DropoutRates",
    "Hidden",
    "KVCache",
    "Loss",
    "Orders",
    "Packed",
    "Paged",
    "Pooled",
    "Pretraining",
    "Ring",
    "Rows",
    "Spans",
    "Stream",
    "Transformer",
    "initialise",
]

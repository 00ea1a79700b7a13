"""One Transformer for training and serving: ``out = model(stream, attend, head)``."""

from colonnade.model.attend import Packed, Paged
from colonnade.model.cache import KVCache
from colonnade.model.dropout import Dropout, DropoutRates
from colonnade.model.embedding import Stream
from colonnade.model.encoder_heads import Classes, ClassLoss, Hidden, Pooled, Pretraining, SentenceOrders, Spans
from colonnade.model.head import Loss, Rows
from colonnade.model.initialise import initialise
from colonnade.model.loss import IGNORE
from colonnade.model.ring_attention import Ring
from colonnade.model.token_logprobs import TokenLogprobs
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
    "Packed",
    "Paged",
    "Pooled",
    "Pretraining",
    "Ring",
    "Rows",
    "SentenceOrders",
    "Spans",
    "Stream",
    "TokenLogprobs",
    "Transformer",
    "initialise",
]

"""One Transformer for training and serving: ``out = model(stream, attend, head)``."""

from colonnade.model.attend import Packed, Paged, SharedPrefix
from colonnade.model.cache import KVCache
from colonnade.model.context_parallel import Ring
from colonnade.model.cross_attention import EncoderDecoderAttend, PackedMemory, PagedMemory
from colonnade.model.dropout import Dropout, DropoutRates
from colonnade.model.embedding import Stream
from colonnade.model.encoder import Source
from colonnade.model.initialise import initialise
from colonnade.model.loss import IGNORE
from colonnade.model.output_heads import (
    ChoiceLoss,
    Classes,
    ClassLoss,
    Hidden,
    Loss,
    Pooled,
    Pretraining,
    Rows,
    SentenceOrders,
    SpanLoss,
    Spans,
)
from colonnade.model.token_logprobs import TokenLogprobs
from colonnade.model.transformer import Transformer

__all__ = [
    "IGNORE",
    "ChoiceLoss",
    "ClassLoss",
    "Classes",
    "Dropout",
    "DropoutRates",
    "EncoderDecoderAttend",
    "Hidden",
    "KVCache",
    "Loss",
    "Packed",
    "PackedMemory",
    "Paged",
    "PagedMemory",
    "Pooled",
    "Pretraining",
    "Ring",
    "Rows",
    "SentenceOrders",
    "SharedPrefix",
    "Source",
    "SpanLoss",
    "Spans",
    "Stream",
    "TokenLogprobs",
    "Transformer",
    "initialise",
]

"""The stream: a flat run of tokens, which is all that a model is fed, in training and in serving alike."""

from typing import NamedTuple

from torch import Tensor

from colonnade.model.dropout import Dropout
from colonnade.model.moe.routing_context import Routing


class Stream(NamedTuple):
    """T tokens laid end to end: no padding, no batch dimension. Who sees whom is :mod:`attend`'s affair."""

    tokens_T: Tensor
    """int64 token ids."""
    positions_T: Tensor
    """int64 position of each token within its own sequence."""
    segments_T: Tensor | None = None
    """int64 segment of each token, for a model that has a table of them; None is segment 0 everywhere."""
    noise: Dropout | None = None
    """What is random in this step of training; None drops nothing."""
    routing: Routing | None = None
    """What concerns the routers of a mixture of experts; None is inference."""

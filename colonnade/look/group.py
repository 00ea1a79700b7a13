"""Recordings of a tensor-parallel model: rank 0 leads, the other ranks follow.

Rank 0 sends the number of tokens, then the tokens; 0 is a heartbeat, so that an idle group does not reach a
collective's timeout, and -1 ends.
"""

import threading
from collections.abc import Sequence

import torch

from colonnade.config import Plan
from colonnade.look.recorder import Recording, check_tokens, record
from colonnade.model import Transformer

HEARTBEAT_S = 20.0


def follow(model: Transformer, plan: Plan) -> None:
    """Take part in the recordings of rank 0 until it stops."""
    tp = model.axes.tp
    while (count := int(tp.broadcast_(torch.zeros(1, dtype=torch.int64)))) >= 0:
        if count:
            tokens_T = tp.broadcast_(torch.zeros(count, dtype=torch.int64))
            record(model, tokens_T.tolist(), [], plan)


class Leader:
    """Rank 0 of a group; its methods may be called from any thread."""

    def __init__(self, model: Transformer, plan: Plan):
        self._model, self._plan, self._lock = model, plan, threading.Lock()

    def record(self, tokens: Sequence[int], pieces: Sequence[str]) -> Recording:
        """Record on all ranks."""
        check_tokens(self._model.config, tokens)
        with self._lock:
            self._send(len(tokens))
            self._model.axes.tp.broadcast_(torch.tensor(tokens))
            return record(self._model, tokens, pieces, self._plan)

    def heartbeat(self) -> None:
        """Notify the others that rank 0 is alive; call it every :data:`HEARTBEAT_S`."""
        with self._lock:
            self._send(0)

    def stop(self) -> None:
        """Stop the other ranks."""
        with self._lock:
            self._send(-1)

    def _send(self, count: int) -> None:
        self._model.axes.tp.broadcast_(torch.tensor([count]))

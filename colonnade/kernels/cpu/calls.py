"""Calls of the C++ kernels: their arguments as C structures, running one, recording and replaying many.

A kernel's arguments are the C++ structure of the same name (``linear.h``, ``experts.h``, ``paged_attention.h``,
``latent_attention.h``, ``embedding_norm_rope.h``; ``arguments.h`` has what they share). A :class:`Recording` keeps each
call that runs while it is active; :meth:`Recording.replay` runs them again, on the same addresses, in one call of the
library.
"""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_double, c_int64, c_void_p

import torch
from torch import Tensor

from colonnade.errors import CapacityError, ConfigError
from colonnade.kernels.cpu import library

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""Dtypes of activations, unquantised weights and caches, by the library's number."""
KINDS = {"int8": 1, "int4": 2, "int8_dynamic": 1}
BLOCKS = 2
"""Added to the number of a kind that is stored in blocks."""
ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "gelu": 3, "relu": 4}
SPLIT = 256
"""Keys of one task of attention."""
ERRORS = {
    1: "a token is not in the vocabulary",
    2: "a slot is not in the cache",
    3: "a request is longer than its pages, or shorter than its new tokens",
    4: "a page is not in the cache",
}
NO_MEMORY = 5


class NormWeights(ctypes.Structure):
    """A norm; none if ``weight`` is null."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("eps", c_double))


class Matrix(ctypes.Structure):
    """A weight; none if ``values`` is null."""

    _fields_ = (
        ("values", c_void_p), ("scales", c_void_p), ("bias", c_void_p),
        ("kind", c_int64), ("outputs", c_int64), ("inputs", c_int64), ("group", c_int64),
    )  # fmt: skip


class Arguments(ctypes.Structure):
    """Arguments of a kernel."""

    kernel: int


class Linear(Arguments):
    """A product with its norm, gate, bias and residual."""

    kernel = 0
    _fields_ = (
        ("x", c_void_p), ("residual", c_void_p), ("y", c_void_p), ("norm", NormWeights),
        ("weight", Matrix), ("gate", Matrix),
        ("rows", c_int64), ("x_stride", c_int64), ("dtype", c_int64), ("activation", c_int64),
    )  # fmt: skip


class Embedding(Arguments):
    """Rows of a table, added to a residual."""

    kernel = 1
    _fields_ = (
        ("tokens", c_void_p), ("table", Matrix), ("residual", c_void_p), ("y", c_void_p),
        ("rows", c_int64), ("dtype", c_int64),
    )  # fmt: skip


class Norm(Arguments):
    """A norm of rows."""

    kernel = 2
    _fields_ = (
        ("x", c_void_p), ("norm", NormWeights), ("y", c_void_p),
        ("rows", c_int64), ("width", c_int64), ("dtype", c_int64),
    )  # fmt: skip


class Rotation(Arguments):
    """Rotary factors of tokens."""

    kernel = 3
    _fields_ = (
        ("positions", c_void_p), ("theta", c_void_p), ("own", c_void_p), ("other", c_void_p),
        ("factor", c_double), ("rows", c_int64), ("half", c_int64), ("dtype", c_int64),
    )  # fmt: skip


class RopeWrite(Arguments):
    """Rotates queries and keys, and writes keys and values to the cache."""

    kernel = 4
    _fields_ = (
        ("qkv", c_void_p), ("own", c_void_p), ("other", c_void_p), ("q_norm", NormWeights), ("k_norm", NormWeights),
        ("slots", c_void_p), ("keys", c_void_p), ("values", c_void_p), ("q", c_void_p),
        ("rows", c_int64), ("kv_heads", c_int64), ("group", c_int64), ("width", c_int64), ("slot_count", c_int64),
        ("dtype", c_int64),
    )  # fmt: skip


class Attention(Arguments):
    """Attention to a paged cache."""

    kernel = 5
    _fields_ = (
        ("q", c_void_p), ("keys", c_void_p), ("values", c_void_p),
        ("tables", c_void_p), ("lengths", c_void_p), ("cu_queries", c_void_p), ("partial", c_void_p), ("out", c_void_p),
        ("rows", c_int64), ("requests", c_int64), ("heads", c_int64), ("kv_heads", c_int64), ("width", c_int64),
        ("page_tokens", c_int64), ("pages", c_int64), ("table_width", c_int64), ("most_splits", c_int64),
        ("window", c_int64), ("dtype", c_int64), ("value_width", c_int64),
    )  # fmt: skip


class ExpertMatrices(ctypes.Structure):
    """The matrices of all experts; none if those of the first are none."""

    _fields_ = (("first", Matrix), ("value_bytes", c_int64), ("scale_bytes", c_int64), ("bias_bytes", c_int64))


class Experts(Arguments):
    """A mixture of experts with its norm and router, added to a residual."""

    kernel = 6
    _fields_ = (
        ("x", c_void_p), ("y", c_void_p), ("norm", NormWeights), ("router", Matrix),
        ("up", ExpertMatrices), ("gate", ExpertMatrices), ("down", ExpertMatrices),
        ("normed", c_void_p), ("hidden", c_void_p), ("outputs", c_void_p),
        ("ids", c_void_p), ("places", c_void_p), ("shares", c_void_p),
        ("rows", c_int64), ("active", c_int64), ("normalise", c_int64), ("activation", c_int64), ("dtype", c_int64),
        ("scale", c_double),
    )  # fmt: skip


class LatentQueries(Arguments):
    """Latent attention: absorbs the keys' up-projection into the queries, and writes vectors to the cache."""

    kernel = 7
    _fields_ = (
        ("q", c_void_p), ("kv", c_void_p), ("own", c_void_p), ("other", c_void_p), ("norm", NormWeights),
        ("up", c_void_p), ("slots", c_void_p), ("cache", c_void_p), ("out", c_void_p),
        ("rows", c_int64), ("heads", c_int64), ("plain", c_int64), ("rope", c_int64), ("rank", c_int64),
        ("value_width", c_int64), ("slot_count", c_int64), ("dtype", c_int64), ("factor", c_double),
    )  # fmt: skip


class LatentValues(Arguments):
    """Latent attention: each head's values from its weighted sum of cached vectors."""

    kernel = 8
    _fields_ = (
        ("x", c_void_p), ("up", c_void_p), ("y", c_void_p),
        ("rows", c_int64), ("heads", c_int64), ("plain", c_int64), ("value_width", c_int64), ("rank", c_int64),
        ("dtype", c_int64),
    )  # fmt: skip


class Call(ctypes.Structure):
    """One entry of the list that the library runs."""

    _fields_ = (("kernel", c_int64), ("arguments", c_void_p))


class Recording:
    """Calls in order, and the tensors that they read and write."""

    def __init__(self) -> None:
        self._arguments: list[Arguments] = []
        self._tensors: list[Tensor] = []
        self._calls: ctypes.Array[Call] | None = None

    def add(self, arguments: Arguments, tensors: tuple[Tensor, ...]) -> None:
        """Append a call."""
        self._arguments.append(arguments)
        self._tensors.extend(tensors)
        self._calls = None

    def __len__(self) -> int:
        return len(self._arguments)

    def replay(self) -> None:
        """Run all calls again."""
        if self._calls is None:
            self._calls = (Call * len(self._arguments))(
                *(Call(each.kernel, ctypes.addressof(each)) for each in self._arguments)
            )
        _run(self._calls, len(self._arguments))


class _Active(threading.local):
    recording: Recording | None = None


_active = _Active()


@contextmanager
def recording() -> Iterator[Recording]:
    """Record the calls that this thread makes."""
    new = Recording()
    _active.recording, before = new, _active.recording
    try:
        yield new
    finally:
        _active.recording = before


def run(arguments: Arguments, *tensors: Tensor) -> None:
    """Run a kernel; ``tensors`` are those whose addresses are among its arguments."""
    if _active.recording is not None:
        _active.recording.add(arguments, tensors)
    call = Call(arguments.kernel, ctypes.addressof(arguments))
    _run(ctypes.pointer(call), 1)


def _run(calls: "ctypes.Array[Call] | ctypes._Pointer[Call]", count: int) -> None:
    loaded = library.load()
    assert loaded is not None, "callers check that there is a library"
    error = loaded.colonnade_run(calls, count, torch.get_num_threads())
    if error == NO_MEMORY:
        raise CapacityError("not enough memory for a decode step; serve fewer requests at once")
    if error:
        raise ConfigError(f"{ERRORS[error]}; pass valid inputs")

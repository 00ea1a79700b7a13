"""Passes a NamedTuple of constants to a Triton kernel as one ``tl.constexpr`` argument, for every Triton from 3.5."""

import functools
from typing import TypeVar

from triton import knobs
from triton import language as tl

T = TypeVar("T", bound=tuple)


@functools.lru_cache(maxsize=4096, typed=True)
def constexprs(constants: T) -> T:
    """``constants`` with each member a ``tl.constexpr``; unchanged in the interpreter.

    Triton 3.5 and 3.6 read a plain member as a Python number, which they refuse in tuples and shapes.
    """
    if knobs.runtime.interpret:
        return constants
    return type(constants)(*map(tl.constexpr, constants))

"""A step's tokens told in one launch (see :mod:`reference`), where plain torch takes seven."""

# pyright: reportCallIssue=false, reportArgumentType=false
# A kernel is launched with more than its signature says, and its constants are plain numbers.

import triton
from torch import Tensor
from triton import language as tl

BLOCK = 256


@triton.jit
def _tell(ids_ptr, last_ptr, T, BLOCK: tl.constexpr):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    told = tl.load(ids_ptr + t, t < T, 0)
    drawn = told < 0
    tl.store(ids_ptr + t, tl.maximum(tl.load(last_ptr - 1 - told, drawn, 0), 0), drawn)


def tell_(ids_T: Tensor, last_R: Tensor) -> None:
    """Tokens in the place of draws (see :func:`reference.tell_`)."""
    assert ids_T.is_contiguous(), "ids are written where they lie"
    if len(ids_T):
        _tell[triton.cdiv(len(ids_T), BLOCK),](ids_T, last_R.contiguous(), len(ids_T), BLOCK=BLOCK)

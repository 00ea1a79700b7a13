"""Row-independent rounding for Triton's interpreter."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np


@contextmanager
def rows_alike() -> Iterator[None]:
    """Make a row's products independent of its position in a tile, as on a GPU's tensor cores.

    The interpreter uses numpy and so BLAS, which on some processors computes a matrix's last rows with other
    instructions than the first. So each row is multiplied separately.
    """
    product = np.matmul

    def matmul(a: np.ndarray, b: np.ndarray, **options: Any) -> np.ndarray:
        return (
            np.concatenate([product(row, b, **options) for row in a[:, None]])
            if a.ndim == 2
            else product(a, b, **options)
        )

    with mock.patch.object(np, "matmul", matmul):
        yield

"""How Triton's interpreter rounds."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np


@contextmanager
def rows_alike() -> Iterator[None]:
    """A row's products are rounded alike wherever it stands in a tile, as by a GPU's matrix units.

    The interpreter asks numpy, and numpy BLAS, which on some processors takes the last rows of a matrix by other
    instructions than the first. So each row is multiplied by itself.
    """
    product = np.matmul

    def matmul(a: np.ndarray, b: np.ndarray, **how: Any) -> np.ndarray:
        return np.concatenate([product(row, b, **how) for row in a[:, None]]) if a.ndim == 2 else product(a, b, **how)

    with mock.patch.object(np, "matmul", matmul):
        yield

"""Overlapped tensor parallelism of the benchmarks computes what the Transformer does, in float64 over gloo.

The copies' protocol runs too: buffers that all processes see are files mapped into each, and a barrier is gloo's. There
are no streams on a CPU, but the processes do run at the same time, and whoever leaves a slot too late loses his rows.
"""

import contextlib
import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from _copies import CopyEngines, Mover, Plain
from colonnade.model import Transformer
from colonnade.parallel.axis import Axis
from tests.overlapped import CONFIG, KINDS, gradients, laid
from tests.worlds import assert_same, run

pytestmark = pytest.mark.xdist_group("worlds")


class Mapped(CopyEngines):
    """Copies between processes' mapped files."""

    def __init__(self, axis: Axis, most: int, folder: Path):
        Plain.__init__(self, axis)
        self.stream = mock.MagicMock()
        size = 2 * most
        self._files = [
            torch.from_file(str(folder / str(r)), shared=True, size=size, dtype=torch.float64) for r in range(axis.size)
        ]
        self._buffer, self._handle = self._files[axis.rank], self
        self._most, self._turn = most, 0
        self.barriers = 0

    def get_buffer(self, r: int, shape: tuple[int, ...], dtype: torch.dtype, storage_offset: int) -> torch.Tensor:
        """As torch's handles give them."""
        assert dtype == torch.float64
        assert storage_offset + math.prod(shape) <= len(self._buffer), "within the slots"
        return self._files[r][storage_offset : storage_offset + math.prod(shape)].view(shape)

    def barrier(self, channel: int) -> None:
        """As torch's handles do."""
        assert channel == 0
        self.barriers += 1
        dist.barrier()


def compare(folder: Path | None) -> int:
    movers: list[Mover] = []
    streams = {"current_stream": mock.MagicMock(), "stream": lambda _: contextlib.nullcontext()}
    with laid("cpu") as ground, contextlib.ExitStack() as stack:
        exact = gradients(ground, Transformer, torch.float64)
        for kind in KINDS:
            if folder is not None:

                def made(axis: Axis, most: int, *_: Any) -> Mover:
                    dist.barrier()
                    movers.append(Mapped(axis, most, folder))
                    return movers[-1]

                stack.enter_context(mock.patch("tests.overlapped.mover_of", made))
                stack.enter_context(mock.patch.multiple(torch.cuda, **streams))
                stack.enter_context(mock.patch.object(torch.Tensor, "record_stream"))
            found = gradients(ground, kind, torch.float64)
            assert found.keys() == exact.keys()
            for name, value in exact.items():
                assert_same(found[name], value, what=f"{kind.__name__}: {name}")
    # One for the beginning, and one each for a sum and a gather of both parts of a block, forward and backward.
    blocks = CONFIG.layers
    assert [getattr(mover, "barriers", 0) for mover in movers] in ([], [1 + 2 * 8 * blocks, 1 + 8 * blocks])
    return len(exact)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("copies", [False, True])
def test_overlapped_blocks_have_the_transformers_loss_and_gradients(world: int, copies: bool, tmp_path: Path) -> None:
    found = run(world, compare, tmp_path if copies else None)
    assert found == [len(list(Transformer(CONFIG, device="meta").parameters())) + 1] * world

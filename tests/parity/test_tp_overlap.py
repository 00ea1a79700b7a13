"""plan.tp_overlap equals plain sequence parallelism, in float64 over gloo.

The copy engine's protocol is tested too: symmetric buffers are files mapped into each process, and gloo provides the
barrier. A CPU has no streams, but the processes run concurrently, and a rank that reads a slot too late gets wrong
rows.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from colonnade.config import DataConfig, ModelConfig, Plan, RunConfig, TrainConfig
from colonnade.errors import ConfigError, PlanError
from colonnade.parallel.axis import Axis
from colonnade.parallel.overlapped_matmul import CollectiveTransfer, CopyEngineTransfer, RowTransfer, SymmetricBuffer
from tests.tp_overlap import GPT2, LLAMA, gradients, tp_context
from tests.worlds import assert_same, run


class LateTransfer(CollectiveTransfer):
    """A transfer whose rows are NaN until they are announced."""

    def gather_chunks(self, x_tD: Tensor, x_TD: Tensor) -> Iterator[int]:
        received = torch.empty_like(x_TD)
        for r in super().gather_chunks(x_tD, received):
            if r == self.axis.rank:
                x_TD.fill_(torch.nan)
            x_TD.chunk(self.axis.size)[r].copy_(received.chunk(self.axis.size)[r])
            yield r


class MappedBuffer(SymmetricBuffer):
    """A symmetric buffer in memory-mapped files."""

    def __init__(self, axis: Axis, slot_bytes: int, folder: Path):
        self.slot_bytes, self._slot = slot_bytes, 0
        self._files = [
            torch.from_file(str(folder / f"{slot_bytes} {r}"), shared=True, size=2 * slot_bytes, dtype=torch.uint8)
            for r in range(axis.size)
        ]
        self._handle, self.barriers = self, 0
        self.barrier()

    def get_buffer(self, r: int, shape: tuple[int, ...], dtype: torch.dtype, storage_offset: int) -> Tensor:
        first, size = storage_offset * dtype.itemsize, math.prod(shape) * dtype.itemsize
        assert first // self.slot_bytes == (first + size - 1) // self.slot_bytes == self._slot, "within the slot"
        return self._files[r][first : first + size].view(dtype).view(shape)

    def barrier(self) -> None:
        self.barriers += 1
        dist.barrier()


class MappedTransfer(CopyEngineTransfer):
    """Copies between mapped files."""

    def __init__(self, axis: Axis, folder: Path):
        self.axis, self._stream, self._folder = axis, mock.MagicMock(), folder
        self._buffers, self._buffer, self._in_flight = [], None, []

    def _allocate(self, slot_bytes: int) -> SymmetricBuffer:
        return MappedBuffer(self.axis, slot_bytes, self._folder)


def compare(
    folder: Path | None,
    compiled: str = "",
    recomputed: bool = False,
    configs: Sequence[ModelConfig] = (GPT2, LLAMA),
) -> int:
    streams = {"current_stream": mock.MagicMock(), "stream": lambda _: contextlib.nullcontext()}
    compared = 0
    with tp_context("cpu") as context, contextlib.ExitStack() as stack:
        assert type(context.axes.row_transfer) is CollectiveTransfer
        transfer: RowTransfer = LateTransfer(context.axes.tp)
        if folder is not None:
            transfer = MappedTransfer(context.axes.tp, folder)
            stack.enter_context(mock.patch.multiple(torch.cuda, **streams))
            stack.enter_context(mock.patch.object(torch.Tensor, "record_stream"))
        for config in configs:
            exact = gradients(context, config, torch.float64, None)
            found = gradients(context, config, torch.float64, transfer, compiled=compiled, recomputed=recomputed)
            assert found.keys() == exact.keys()
            for name, value in exact.items():
                assert_same(found[name], value, what=name)
            compared += len(exact)
    if isinstance(transfer, MappedTransfer):
        (buffer,) = transfer._buffers
        # One barrier at allocation, one at the second start, and one each for a sum and a gather of both halves of a
        # block, forward and backward.
        # block, forward and backward.
        assert buffer.barriers == 2 + 8 * sum(config.layers for config in configs)  # type: ignore[attr-defined]
    return compared


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("copies", [False, True])
def test_overlapped_products_equal_sequence_parallelism(world: int, copies: bool, tmp_path: Path) -> None:
    (count, *others) = run(world, compare, tmp_path if copies else None)
    assert count > 50 and others == [count] * (world - 1)


@pytest.mark.slow
def test_overlap_works_with_compiled_blocks() -> None:
    assert len(set(run(2, compare, None, "aot_eager", False, [GPT2]))) == 1


def test_overlap_works_with_recomputation() -> None:
    assert len(set(run(2, compare, None, "", True))) == 1


def _uneven() -> float:
    """The largest difference with unequal rows per rank, where no chunked products run."""
    with tp_context("cpu") as context:
        transfer = mock.MagicMock(spec=CollectiveTransfer)
        exact, found = (gradients(context, GPT2, torch.float64, m, size=(15, 3)) for m in (None, transfer))
        transfer.reset.assert_called_once()
        transfer.gather_chunks.assert_not_called()
        return max(float((found[name] - x).abs().max()) for name, x in exact.items())


def test_unequal_rows_use_the_plain_path() -> None:
    assert run(2, _uneven) == [0.0, 0.0]


def test_overlap_needs_sequence_parallelism_and_no_float8() -> None:
    with pytest.raises(PlanError, match=r"tp_overlap .* set --plan.sequence_parallel too"):
        Plan(tp=2, tp_overlap=True)
    with pytest.raises(ConfigError, match=r"float8 tensorwise scales whole operands.*plan.tp_overlap False"):
        RunConfig(
            model=LLAMA.replace(width=256, ffn_width=256, head_width=32),
            plan=Plan(tp=2, sequence_parallel=True, tp_overlap=True),
            data=DataConfig(sequence=16),
            train=TrainConfig(dtype="bfloat16", float8="tensorwise"),
        )
    assert str(Plan(tp=2, sequence_parallel=True, tp_overlap=True)) == "tp=2 sequence_parallel tp_overlap"

"""Uploads of small lists of numbers to a device."""

from array import array

import pytest
import torch

from colonnade.kernels.device import upload, upload_into


@pytest.mark.parametrize(
    "values", [[], [3], [5, -1, 2**31 - 1], [[1, 2, 3], [4, 5, 6]], [[], []], [[7]] * 300], ids=len
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_uploaded_lists_equal_torchs_tensors(values: list, dtype: torch.dtype) -> None:
    expected = torch.tensor(values, dtype=dtype)
    uploaded, destination = upload(values, dtype, "cpu"), torch.zeros_like(expected)
    upload_into(destination, values)
    for x in (uploaded, destination):
        assert (x.dtype, x.shape) == (dtype, expected.shape)
        assert torch.equal(x, expected)


def test_large_floats_become_infinite_and_large_integers_are_refused() -> None:
    assert upload([1e300, -1e300], torch.float32, "cpu").tolist() == [torch.inf, -torch.inf]
    assert upload([0.1, 7, torch.inf], torch.float32, "cpu").equal(torch.tensor([0.1, 7, torch.inf]))
    with pytest.raises(OverflowError):
        upload([2**63], torch.int64, "cpu")


def test_an_uploaded_array_is_copied() -> None:
    """The source array may be overwritten after the upload."""
    values = array("i", range(100))
    uploaded = upload(values, torch.int32, "cpu")
    values[0] = 7
    assert uploaded.tolist() == list(range(100))
    destination = torch.zeros(100, dtype=torch.int64)
    upload_into(destination, values)
    assert destination.tolist() == [7, *range(1, 100)]


def test_ragged_lists_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of \[1, 2\] numbers; all rows must have the same length"):
        upload([[1], [2, 3]], torch.int32, "cpu")


def test_a_host_tensor_is_copied() -> None:
    rows, destination = torch.arange(6, dtype=torch.int32).view(2, 3), torch.zeros(2, 2, dtype=torch.int64)
    upload_into(destination, rows[:, :2])
    rows.zero_()
    assert destination.tolist() == [[0, 1], [3, 4]]


def test_a_slice_of_a_tensor_is_overwritten() -> None:
    x = torch.zeros(2, 3, dtype=torch.int32)
    upload_into(x[:, :2], [[1, 2], [3, 4]])
    assert x.tolist() == [[1, 2, 0], [3, 4, 0]]

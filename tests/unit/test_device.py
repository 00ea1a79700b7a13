"""Small lists of numbers on their way to a device."""

from array import array

import pytest
import torch

from colonnade.kernels.device import upload, upload_into


@pytest.mark.parametrize(
    "values", [[], [3], [5, -1, 2**31 - 1], [[1, 2, 3], [4, 5, 6]], [[], []], [[7]] * 300], ids=len
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_lists_become_the_tensors_that_torch_makes(values: list, dtype: torch.dtype) -> None:
    exact = torch.tensor(values, dtype=dtype)
    found, into = upload(values, dtype, "cpu"), torch.zeros_like(exact)
    upload_into(into, values)
    for x in (found, into):
        assert (x.dtype, x.shape) == (dtype, exact.shape)
        assert torch.equal(x, exact)


def test_numbers_too_large_are_infinite_and_integers_too_large_are_refused() -> None:
    assert upload([1e300, -1e300], torch.float32, "cpu").tolist() == [torch.inf, -torch.inf]
    assert upload([0.1, 7, torch.inf], torch.float32, "cpu").equal(torch.tensor([0.1, 7, torch.inf]))
    with pytest.raises(OverflowError):
        upload([2**63], torch.int64, "cpu")


def test_an_array_is_copied() -> None:
    """So that its owner may write the next step into it."""
    values = array("i", range(100))
    found = upload(values, torch.int32, "cpu")
    values[0] = 7
    assert found.tolist() == list(range(100))
    into = torch.zeros(100, dtype=torch.int64)
    upload_into(into, values)
    assert into.tolist() == [7, *range(1, 100)]


def test_lists_of_other_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of \[1, 2\] numbers; give each as many"):
        upload([[1], [2, 3]], torch.int32, "cpu")


def test_a_tensor_of_the_host_is_copied() -> None:
    rows, into = torch.arange(6, dtype=torch.int32).view(2, 3), torch.zeros(2, 2, dtype=torch.int64)
    upload_into(into, rows[:, :2])
    rows.zero_()
    assert into.tolist() == [[0, 1], [3, 4]]


def test_a_part_of_a_tensor_is_written_over() -> None:
    x = torch.zeros(2, 3, dtype=torch.int32)
    upload_into(x[:, :2], [[1, 2], [3, 4]])
    assert x.tolist() == [[1, 2, 0], [3, 4, 0]]

"""Records a decode step on a CPU, so that the next ones run in one call of the C++ library.

The model's forward runs once, on the fixed buffers of a padded batch, while its kernel calls are recorded
(:mod:`colonnade.kernels.cpu.calls`). A step can be replayed if nothing else computes: views, allocations and reading
shapes are allowed; with any other torch function the steps stay eager.
"""

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from colonnade.kernels.cpu import calls

log = logging.getLogger(__name__)

METADATA = frozenset((
    "__get__", "__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "stride",
))  # fmt: skip
ALLOCATIONS = frozenset(("empty", "empty_like", "new_empty"))
VIEWS = frozenset(("__getitem__", "contiguous", "flatten", "unflatten", "unsqueeze", "view"))
"""Views, or copies: the result shows which."""


class _OtherFunctions(TorchFunctionMode):
    """Collects the names of torch functions that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result, name = func(*args, **(kwargs or {})), func.__name__
        if name not in METADATA and name not in ALLOCATIONS and not (name in VIEWS and _is_view(result, args[0])):
            self.names.add(resolve_name(func) or name)
        return result


def _is_view(result: object, x: object) -> bool:
    return (
        isinstance(result, Tensor)
        and isinstance(x, Tensor)
        and result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    )


def record(run: Callable[[], Tensor]) -> tuple[Tensor, calls.Recording | None]:
    """(the result of ``run``, its recording); None if ``run`` computes anything outside the C++ kernels."""
    with calls.recording() as recording, _OtherFunctions() as others:
        result = run()
    if others.names or not len(recording):
        outside = ", ".join(sorted(others.names)) or "everything"
        log.debug("decode steps are not recorded: %s runs outside the C++ kernels", outside)
        return result, None
    return result, recording

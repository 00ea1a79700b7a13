"""Tutel's tools for converting checkpoints to a different number of ranks, and their common functions.

    python -m colonnade.compat.tutel.checkpoint.gather --inputs 'run/{rank}.ckpt' --input_size 2 --output whole.ckpt
    python -m colonnade.compat.tutel.checkpoint.scatter --input whole.ckpt --output_size 8 --outputs 'new/{rank}.ckpt'

A file is a state dict written by ``torch.save``, possibly nested in dictionaries, in which ``--namespace a/b`` is its
path. Experts are split or joined, everything else is copied. Files are read with ``weights_only=True``, so they cannot
run code.

    E experts on W ranks, E ≥ W:   (E/W, …) a rank            E < W:   (1, F·E/W, …), a slice of the hidden units
"""

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from colonnade.errors import CheckpointError, ColonnadeError

COUNT = "_num_global_experts"
"""The entry of a layer with the number of its experts on all ranks."""


def read(path: str) -> dict[str, Any]:
    """The dictionary in a file of ``torch.save``; raises :class:`CheckpointError` for anything else."""
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise CheckpointError(f"cannot read '{path}': {error.strerror}; check the path") from error
    except Exception as error:  # RuntimeError, KeyError, EOFError, UnpicklingError: it depends on the bytes
        raise CheckpointError(
            f"'{path}' is damaged, or contains more than tensors, numbers and dictionaries of them (other objects are "
            "not unpickled); if you trust the file, save the model's state_dict on its own"
        ) from error
    if not isinstance(loaded, dict):
        raise CheckpointError(
            f"'{path}' holds a {type(loaded).__name__}, not a dictionary; use a file with a state dict"
        )
    return loaded


def nested_state(whole: dict[str, Any], namespace: str, path: str) -> dict[str, Any]:
    """The state dict at ``namespace`` in ``whole``, the content of the file ``path``."""
    for key in filter(None, namespace.split("/")):
        if not isinstance(whole.get(key), dict):
            raise CheckpointError(
                f"'{path}' has no dictionary '{key}' on the path '{namespace}', but {sorted(map(str, whole))[:8]}; "
                "change --namespace"
            )
        whole = whole[key]
    return whole


def with_nested_state(whole: dict[str, Any], namespace: str, state: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``whole`` with ``state`` as its nested state dict."""
    key, _, rest = namespace.strip("/").partition("/")
    return {**whole, key: with_nested_state(whole[key], rest, state)} if key else state


def layers_of(state: dict[str, Any], default: int = 0) -> dict[str, int]:
    """The prefix of each layer's names, and its number of experts on all ranks; ``default`` if no layer has the
    entry.
    """
    said = {name: value for name, value in state.items() if f".{name}".endswith(f".{COUNT}")}
    for name, value in said.items():
        if not isinstance(value, int | Tensor) or (isinstance(value, Tensor) and value.numel() != 1) or value < 1:
            raise CheckpointError(f"'{name}' is {value!r}, not a number of experts; the file is damaged")
    found = {name.removesuffix(COUNT): int(value) for name, value in said.items()}
    if found or default < 1:
        return found
    # "a.experts.w" belongs to the layer "a.", and "experts.w" to the layer "".
    heads = {f".{name}".rpartition(".experts.")[0] for name in state if ".experts." in f".{name}"}
    return {f"{head[1:]}." if head else "": default for head in heads}


def expert_names(state: dict[str, Any], layers: dict[str, int]) -> dict[str, int]:
    """The parameters of experts, with their layer's number of experts."""
    return {
        name: E
        for prefix, E in layers.items()
        for name, value in state.items()
        if name.startswith(f"{prefix}experts.") and isinstance(value, Tensor)
    }


def check_size(experts: int, size: int) -> None:
    """Raise :class:`CheckpointError` if neither number divides the other."""
    if size < 1 or (experts % size and size % experts):
        raise CheckpointError(
            f"{experts} experts cannot be divided among {size} ranks, nor the ranks among the experts; use a divisor "
            f"or a multiple of {experts} ranks"
        )


def command(parser: ArgumentParser, run: Callable[..., None], argv: list[str] | None) -> None:
    """Calls ``run`` with the parsed arguments; a user error is one line and exit code 1."""
    try:
        run(**vars(parser.parse_args(argv)))
    except ColonnadeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(1)

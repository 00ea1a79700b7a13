"""Cuts a file of all experts into one for each rank (Tutel's ``tutel.checkpoint.scatter``)."""

from argparse import ArgumentParser

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.compat.tutel.checkpoint import (
    COUNT,
    check_size,
    command,
    expert_names,
    layers_of,
    nested_state,
    read,
    with_nested_state,
)
from colonnade.compat.tutel.system import apply_rank_size_from_pattern
from colonnade.errors import CheckpointError


def scatter(input: str, output_size: int, outputs: str, namespace: str = "") -> None:  # noqa: A002
    """Cut the experts in the file ``input`` into ``output_size`` files ``outputs``, with {rank} in their names.

    Raises :class:`CheckpointError` for experts that cannot be split this way.
    """
    if output_size > 1 and "{rank}" not in outputs:
        raise CheckpointError(
            f"no {{rank}} in '{outputs}', so {output_size} ranks share one file; use a pattern with it"
        )
    whole = read(input)
    state = nested_state(whole, namespace, input)
    layers = layers_of(state)
    if not layers:
        raise CheckpointError(
            f"'{input}' has no layer of experts with an entry '{COUNT}'; set --namespace where the state dict is "
            "inside other dictionaries, or create the file with gather"
        )
    for E in set(layers.values()):
        check_size(E, output_size)
    names = expert_names(state, layers)
    for rank in range(output_size):
        own = {name: part(name, state[name], E, output_size, rank) for name, E in names.items()}
        path = apply_rank_size_from_pattern(outputs, rank, output_size)
        torch.save(with_nested_state(whole, namespace, state | own), path)
    print(f"{output_size} files, {len(names)} parameters of experts: {outputs}")


def part(name: str, stack: Tensor, experts: int, size: int, rank: int) -> Tensor:
    """The part of a parameter of all experts that ``rank`` of ``size`` holds."""
    if stack.dim() == 0 or stack.numel() % experts:
        raise CheckpointError(f"'{name}' of shape {tuple(stack.shape)} is not one of {experts} experts")
    if len(stack) != experts:  # llama_ffn stores them flat
        stack = stack.reshape(experts, -1)
    if experts % size == 0:
        return stack.chunk(size)[rank].clone()
    ranks = size // experts
    one = stack[rank // ranks : rank // ranks + 1]
    dim = next((i for i in range(1, one.dim()) if one.shape[i] > 1), one.dim() - 1)
    if dim == one.dim() - 1 and name.endswith("experts.batched_fc2_bias"):
        one = F.pad(one, (0, -one.shape[dim] % ranks))
    if dim == 0 or one.shape[dim] % ranks:
        raise CheckpointError(
            f"an expert of '{name}', of shape {tuple(one.shape[1:])}, cannot be divided over {ranks} ranks; use fewer"
        )
    return one.chunk(ranks, dim)[rank % ranks].clone()


def main(argv: list[str] | None = None) -> None:
    """The program."""
    parser = ArgumentParser(prog="python -m colonnade.compat.tutel.checkpoint.scatter", description=__doc__)
    parser.add_argument("--input", required=True, help="file with all experts")
    parser.add_argument("--output_size", type=int, required=True, help="number of ranks that will read them")
    parser.add_argument("--outputs", required=True, help="files of the ranks, with {rank} (and {size}) in the name")
    parser.add_argument("--namespace", default="", help="keys that lead to the state dict, such as model")
    command(parser, scatter, argv)


if __name__ == "__main__":
    main()

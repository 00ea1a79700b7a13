"""Joins the files of all ranks into one, which a single process loads (Tutel's ``tutel.checkpoint.gather``)."""

from argparse import ArgumentParser

import torch
from torch import Tensor

from colonnade.compat.tutel.checkpoint import COUNT, check_size, command, expert_names, layers_of, nested_state, read
from colonnade.compat.tutel.system import apply_rank_size_from_pattern
from colonnade.errors import CheckpointError


def gather(inputs: str, input_size: int, output: str, namespace: str = "", default_num_global_experts: int = 0) -> None:
    """Join the files ``inputs``, with {rank} in their names, of ``input_size`` ranks into ``output``.

    Everything except experts comes from rank 0. ``default_num_global_experts`` is for files of old versions of Tutel,
    which lack the number of experts. Raises :class:`CheckpointError` for files that do not fit together.
    """
    if input_size > 1 and "{rank}" not in inputs:
        raise CheckpointError(f"no {{rank}} in '{inputs}', so {input_size} ranks share one file; use a pattern with it")
    paths = [apply_rank_size_from_pattern(inputs, rank, input_size, create_dir=False) for rank in range(input_size)]
    whole = read(paths[0])
    state = nested_state(whole, namespace, paths[0])
    layers = layers_of(state, default_num_global_experts)
    state.update({f"{prefix}{COUNT}": torch.tensor(E) for prefix, E in layers.items()})
    if not layers:
        raise CheckpointError(
            f"'{paths[0]}' has no layer of experts; set --namespace where the state dict is inside other "
            f"dictionaries, or --default_num_global_experts for a file without '{COUNT}'"
        )
    names = expert_names(state, layers)
    for E in set(layers.values()):
        check_size(E, input_size)
    pieces: dict[str, list[Tensor]] = {name: [state[name]] for name in names}
    for path in paths[1:]:
        theirs = nested_state(read(path), namespace, path)
        if missing := sorted(pieces.keys() - theirs.keys()):
            raise CheckpointError(f"'{path}' lacks '{missing[0]}', which rank 0 has; use files from one run")
        for name, parts in pieces.items():
            parts.append(theirs[name])
    for name, E in names.items():
        state[name] = joined(name, pieces.pop(name), E)
    for name in names:
        weight = state.get(name.replace("fc2_bias", "fc2_w"))
        if name.endswith("experts.batched_fc2_bias") and weight is not None:  # padded where ranks do not divide it
            state[name] = state[name][:, : weight.shape[-1]].clone()
    torch.save(whole, output)
    print(f"{input_size} files, {len(names)} parameters of experts: {output}")


def joined(name: str, pieces: list[Tensor], experts: int) -> Tensor:
    """A parameter of all experts from each rank's part of it."""
    first, size = pieces[0], len(pieces)
    if any(piece.shape != first.shape for piece in pieces):
        raise CheckpointError(f"the shape of '{name}' differs between ranks; use files from one run")
    if experts % size:  # a rank's part is a slice of one expert
        return torch.cat(pieces).reshape(experts, -1, *first.shape[2:])
    if first.dim() > 1 and len(first) * size != experts:
        raise CheckpointError(
            f"'{name}' has {len(first)} experts on each of {size} ranks, which is not {experts} in all; change "
            "--input_size or --default_num_global_experts"
        )
    return torch.cat(pieces)


def main(argv: list[str] | None = None) -> None:
    """The program."""
    parser = ArgumentParser(prog="python -m colonnade.compat.tutel.checkpoint.gather", description=__doc__)
    parser.add_argument("--inputs", required=True, help="files of the ranks, with {rank} (and {size}) in the name")
    parser.add_argument("--input_size", type=int, required=True, help="number of ranks that wrote them")
    parser.add_argument("--output", required=True, help="output file")
    parser.add_argument("--namespace", default="", help="keys that lead to the state dict, such as model")
    parser.add_argument(
        "--default_num_global_experts", type=int, default=0, help=f"experts on all ranks, for files without {COUNT}"
    )
    command(parser, gather, argv)


if __name__ == "__main__":
    main()

"""The storage view: each rank's own tensors as parts of whole ones, for torch's planner of checkpoints.

A DTensor over (tp, replicate, shard), cut by the parameter's layout and, inside that, by FSDP (layout rule 1); experts
over their own grid. The view aliases the local tensor, so that loading fills it in place. It is the only place where
the placements of a layout become DTensors.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from colonnade.model import Transformer
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters
from colonnade.parallel.layout import WHOLE, Experts, Placement, layout_of


class Moments(Protocol):
    """What a checkpoint needs of an optimizer (:class:`colonnade.train.optimizer.AdamW` is one)."""

    @property
    def steps(self) -> int:
        """Steps that moved the weights; torch would replace this scalar, not fill it: it is in ``checkpoint.json``."""
        ...

    @steps.setter
    def steps(self, taken: int) -> None: ...

    @property
    def state(self) -> dict[str, Tensor]:
        """``{moment}/{parameter}`` to a tensor laid out as the parameter, to be filled in place."""
        ...


def parameter_of(key: str) -> str:
    """The parameter of ``part/parameter``."""
    return key.partition("/")[2]


def local_tensors(model: Transformer, masters: Masters | None, optimizer: Moments | None) -> dict[str, Tensor]:
    """``part/parameter`` to this rank's own tensor of it, which a load fills in place."""
    weights: Mapping[str, Tensor] = (
        dict(model.named_parameters()) if masters is None else masters.local | masters.frozen
    )
    weights = {**weights, **dict(model.named_buffers())}
    return {f"weights/{name}": w.detach() for name, w in weights.items()} | (optimizer.state if optimizer else {})


def storage_views(
    tensors: dict[str, Tensor], model: Transformer, context: DistributedContext, *, sharded: bool
) -> dict[str, Tensor]:
    """The storage view of each tensor; in a world of one, the tensor itself."""
    if context.world == 1:
        return tensors
    layout, whole = layout_of(model), model.whole_shapes()
    state = {name for name, _ in model.named_buffers()}  # the same on all ranks

    def view(name: str, tensor: Tensor) -> Tensor:
        at, cut = (WHOLE, False) if name in state else (layout[name], sharded)
        return storage_view(tensor, at, whole[name], context, sharded=cut)

    return {key: view(parameter_of(key), tensor) for key, tensor in tensors.items()}


def storage_view(
    local: Tensor, placement: Placement, whole: torch.Size, context: DistributedContext, *, sharded: bool
) -> Tensor:
    """``local`` as this rank's part of the whole tensor, for torch's planner; it aliases ``local``.

    The mesh is (tp, replicate, shard) in this order: FSDP cuts what tensor parallelism left (the other order corrupts
    without a word). ``sharded`` says whether FSDP cut it. Shape and stride are given because uneven shares cannot tell
    them.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard  # a second to import

    stride = torch.empty(whole, device="meta").stride()
    # A DTensor moves what is not on its mesh's device, and would then alias nothing: moments in host memory.
    here = local.device.type == context.device.type
    if isinstance(placement, Experts) and context.expert_mesh is not None:
        mesh = context.expert_storage_mesh if here else context.host_expert_storage_mesh
        hidden = Replicate() if placement.hidden is None else Shard(placement.hidden)
        cuts = [Replicate(), Shard(0), hidden]
    else:
        mesh = context.storage_mesh if here else context.host_storage_mesh
        over_tp = Shard(placement) if isinstance(placement, int) else Replicate()
        cuts = [over_tp, Replicate(), Shard(0) if sharded and not isinstance(placement, Experts) else Replicate()]
    return DTensor.from_local(local, mesh, cuts, run_check=False, shape=whole, stride=stride)

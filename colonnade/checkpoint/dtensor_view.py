"""Storage views: each rank's tensors as DTensors, for the planner of torch.distributed.checkpoint.

A view is a DTensor over (tp, replicate, shard): sharded by the parameter's layout and, inside that, by FSDP (layout
rule 1); experts use their own mesh. It aliases the local tensor, so loading fills the tensor in place. Only this module
translates the placements of a layout to DTensor placements.
"""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from colonnade.checkpoint.quantised_components import VALUES, component_shape, components, is_transposed
from colonnade.checkpoint.tensor_index import split_key
from colonnade.model import Transformer
from colonnade.model.lora import is_adapter
from colonnade.model.weight_only_quant import StoredFormat, quantised_parameters
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import Masters
from colonnade.parallel.layout import WHOLE, Experts, Placement, layout_of, placements


class OptimizerState(Protocol):
    """The state of an optimizer that a checkpoint saves (:class:`colonnade.train.optimizer.AdamW` is one)."""

    @property
    def steps(self) -> int:
        """Steps that changed the weights. In ``checkpoint.json``, because DCP replaces scalars and cannot fill them."""
        ...

    @steps.setter
    def steps(self, steps: int, /) -> None: ...

    @property
    def state(self) -> dict[str, Tensor]:
        """``{moment}/{parameter}`` to a tensor sharded like the parameter, to be filled in place."""
        ...


def local_tensors(
    model: Transformer, masters: Masters | None, optimizer: OptimizerState | None, *, adapters: bool
) -> dict[str, Tensor]:
    """``part/parameter`` to this rank's own tensor, which loading fills in place.

    Of a model with adapters, a checkpoint has either these (``adapters``) or everything else.
    """
    weights: Mapping[str, Tensor] = (
        dict(model.named_parameters()) if masters is None else masters.local | masters.frozen
    )
    weights = {**weights, **dict(model.named_buffers())}
    weights = {name: w for name, w in weights.items() if is_adapter(name) == adapters}
    if not adapters:
        for name, weight in quantised_parameters(model).items():
            weights.update(components(name, weight))
    return {f"weights/{name}": w.detach() for name, w in weights.items()} | (optimizer.state if optimizer else {})


def component_view(
    key: str, local: Tensor, form: StoredFormat, placement: Placement, shape: torch.Size, context: DistributedContext
) -> Tensor:
    """The storage view of a component of a quantised parameter of the whole ``shape``: cut in whole groups.

    A dimension of inputs is cut as the parameter's; scales that all inputs of a row share are on every rank.
    """
    cuts_inputs = key.endswith(VALUES) or form.kind == "int4" or form.grouped
    if isinstance(placement, Experts):
        if is_transposed(key, shape):
            placement = Experts(2 if cuts_inputs else None)
    elif placement == 1 and not cuts_inputs:
        placement = WHOLE
    return storage_view(local, placement, component_shape(key, form, shape), context, sharded=False)


def storage_views(
    tensors: dict[str, Tensor], model: Transformer, context: DistributedContext, *, sharded: bool
) -> dict[str, Tensor]:
    """The storage view of each tensor; with one rank, the tensor itself."""
    if context.world == 1:
        return tensors
    quantised = quantised_parameters(model)
    parts = {key: (name, weight) for name, weight in quantised.items() for key, _ in components(name, weight)}
    layout, shapes = placements(model) if quantised else layout_of(model), model.global_shapes()
    buffers = {name for name, _ in model.named_buffers()}  # replicated

    def view(name: str, tensor: Tensor) -> Tensor:
        if name in parts:
            of, weight = parts[name]
            return component_view(name, tensor, StoredFormat.of(weight), layout[of], shapes[of], context)
        placement, over_fsdp = (WHOLE, False) if name in buffers else (layout[name], sharded)
        return storage_view(tensor, placement, shapes[name], context, sharded=over_fsdp)

    return {key: view(split_key(key)[1], tensor) for key, tensor in tensors.items()}


def storage_view(
    local: Tensor, placement: Placement, shape: torch.Size, context: DistributedContext, *, sharded: bool
) -> Tensor:
    """A DTensor of the whole ``shape`` that aliases ``local``, this rank's part; ``sharded``: FSDP shards it.

    The mesh order is (tp, replicate, shard), because FSDP shards what tensor parallelism left; the other order
    corrupts the tensor without an error. Shape and stride are passed because DTensor cannot infer them from uneven
    shards.
    """
    from torch.distributed.tensor import DTensor, Replicate, Shard  # takes a second to import

    stride = torch.empty(shape, device="meta").stride()
    # DTensor copies a tensor that is not on the mesh's device, and the copy would not alias it: offloaded moments.
    on_device = local.device.type == context.device.type
    if isinstance(placement, Experts) and context.expert_mesh is not None:
        mesh = context.expert_storage_mesh if on_device else context.host_expert_storage_mesh
        hidden = Replicate() if placement.hidden is None else Shard(placement.hidden)
        placements = [Replicate(), Shard(0), hidden]
    else:
        mesh = context.storage_mesh if on_device else context.host_storage_mesh
        over_tp = Shard(placement) if isinstance(placement, int) else Replicate()
        over_fsdp = Shard(0) if sharded and not isinstance(placement, Experts) else Replicate()
        placements = [over_tp, Replicate(), over_fsdp]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)

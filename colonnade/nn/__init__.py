"""Building blocks for your own models: tensor-parallel linears, mixture of experts, packed and paged attention.

    with nn.distributed_context(Plan(tp=2)) as context:      # joins torchrun's processes; alone, a world of one
        up = nn.ColumnParallelLinear(512, 2048, context.axes.tp)
        down = nn.RowParallelLinear(2048, 512, context.axes.tp)
        moe = nn.MoE(512, MoeConfig(experts=8, active=2, ffn_width=1024), context.axes)

Every block is an initialised :class:`torch.nn.Module` on plain tensors and takes the axes that it communicates over;
without axes it is the whole layer in one process. The same seed gives the same weights under every layout.

Gradients are sums over ranks: divide each rank's loss by the global token or sample count, then call
:func:`reduce_gradients` between ``backward()`` and the optimizer's step.
"""

from colonnade.kernels.registry import kernel_names
from colonnade.model.attend import Packed, Paged
from colonnade.model.moe import RouterInput, RouterOutput, RouterParameter, TokenGroups, router
from colonnade.nn.gradients import clip_gradients, reduce_gradients
from colonnade.nn.linear import ColumnParallelLinear, RowParallelLinear
from colonnade.nn.managed_table import ManagedTable
from colonnade.nn.moe import MoE, MoEOutput
from colonnade.nn.paged_attention import PagedCache
from colonnade.nn.table_prefetch import prefetched
from colonnade.parallel.axis import SOLO, SOLO_AXES, Axes, Axis
from colonnade.parallel.distributed_context import DistributedContext

distributed_context = DistributedContext.build

__all__ = [
    "SOLO",
    "SOLO_AXES",
    "Axes",
    "Axis",
    "ColumnParallelLinear",
    "ManagedTable",
    "MoE",
    "MoEOutput",
    "Packed",
    "Paged",
    "PagedCache",
    "RouterInput",
    "RouterOutput",
    "RouterParameter",
    "RowParallelLinear",
    "TokenGroups",
    "clip_gradients",
    "distributed_context",
    "kernel_names",
    "prefetched",
    "reduce_gradients",
    "router",
]

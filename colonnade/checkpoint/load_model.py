"""Loads a model for inference: opens it, checks that the plan fits, and reads this rank's shard of the weights."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from colonnade.checkpoint.open_model import OpenedModel, open_model
from colonnade.config import AS_TRAINED, ExpertsConfig, Plan, WeightFormat, WeightGroup
from colonnade.config.feature_checks import check_quantised as check_weights
from colonnade.errors import PlanError
from colonnade.model import Transformer
from colonnade.model.moe import OffloadedExperts, expert_modules
from colonnade.model.moe.router import find_router
from colonnade.model.weight_memory import WeightMemory
from colonnade.model.weight_only_quant import build, copy_weight
from colonnade.parallel.axis import world_axis
from colonnade.parallel.device_memory import free_host_bytes, usable_bytes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.symmetric_memory import with_small_allreduce

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]


def open_for_plan(
    path: str | Path,
    plan: Plan,
    experts: ExpertsConfig = AS_TRAINED,
    weights: WeightFormat = "stored",
    weight_group: WeightGroup = 64,
) -> OpenedModel:
    """Open a model without reading its weights, and check that it can be loaded this way.

    Raises what :func:`colonnade.load` raises.
    """
    opened = open_model(path)
    if plan.world > plan.tp * plan.cp:
        raise PlanError(f"a loaded model is laid out over tp and cp ranks only, not over {plan}; load with these only")
    plan.check(opened.config)
    check_weights(opened.config, weights, weight_group, plan.tp, plan.sh)
    config = experts.apply_to(opened.config, opened.tasks)
    if config.moe is not None and experts.active is not None:
        # Some routers have a fixed number of experts per token: that error should come before any process starts.
        find_router(config.moe, otherwise="leave --experts.active out")
    return replace(opened, config=config)


def load_model(
    opened: OpenedModel,
    context: DistributedContext,
    dtype: DType,
    source: str,
    resident: int | None,
    weights: WeightFormat,
    group: WeightGroup,
) -> Transformer:
    """Build this rank's shard of an opened model and read its weights; checks the memory first."""
    config, device, torch_dtype = opened.config, context.device, resolve_dtype(context.device, dtype)
    expert_layers = config.moe.count_expert_layers(config.layers) if config.moe else 0
    resident = None if resident is None or resident >= expert_layers else resident
    memory = WeightMemory(config, torch_dtype, device, context.plan, resident, weights, group)
    problem = memory.problem(source)
    if context.world > 1:  # wait: a rank that allocates already would take memory that the others count as free
        world_axis().max_(torch.zeros(()))
    if problem is not None:
        raise problem
    experts_on = None if resident is None else torch.device("cpu")
    options = {"device": device, "dtype": torch_dtype, "experts_on": experts_on}
    try:
        axes = with_small_allreduce(context.axes.serving(), device)
        if weights == "stored":
            transformer, put = Transformer(config, axes, **options), copy_weight
        else:
            transformer, put = build(config, axes, **options, kind=weights, group=group)
        opened.load_weights(transformer.eval().requires_grad_(False), context, put)
        if resident is not None:
            OffloadedExperts(expert_modules(transformer), resident, device)
    except torch.OutOfMemoryError:
        raise memory.refusal(source, usable_bytes(device), free_host_bytes()) from None
    return transformer


def resolve_dtype(device: torch.device, dtype: DType) -> torch.dtype:
    """The torch dtype for ``dtype`` on ``device``."""
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, dtype)

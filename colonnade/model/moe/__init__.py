"""Mixture of experts: Router, Dispatch, Experts, Combine."""

from colonnade.model.moe import routers
from colonnade.model.moe.expert_offload import OffloadedExperts, expert_modules
from colonnade.model.moe.layer import MixtureOfExperts
from colonnade.model.moe.router import Router, RouterInput, RouterOutput, RouterParameter, router, uses_noise
from colonnade.model.moe.routing_context import DispatchOptions, LayerReport, LayerRouting, Routing, TokenGroups

__all__ = [
    "DispatchOptions",
    "LayerReport",
    "LayerRouting",
    "MixtureOfExperts",
    "OffloadedExperts",
    "Router",
    "RouterInput",
    "RouterOutput",
    "RouterParameter",
    "Routing",
    "TokenGroups",
    "expert_modules",
    "router",
    "routers",
    "uses_noise",
]

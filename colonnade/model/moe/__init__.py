"""Mixture of experts: Router, Dispatch, Experts, Combine."""

from colonnade.model.moe import routers
from colonnade.model.moe.expert_offload import OffloadedExperts, experts_of
from colonnade.model.moe.layer import MixtureOfExperts
from colonnade.model.moe.router import Choice, Own, Router, Seen, draws, router
from colonnade.model.moe.routing_context import Report, Routed, Routing, Spread, Units

__all__ = [
    "Choice",
    "MixtureOfExperts",
    "OffloadedExperts",
    "Own",
    "Report",
    "Routed",
    "Router",
    "Routing",
    "Seen",
    "Spread",
    "Units",
    "draws",
    "experts_of",
    "router",
    "routers",
]  # fmt: skip

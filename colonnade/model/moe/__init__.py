"""Mixture of experts: Router, Dispatch, Experts, Combine."""

from colonnade.model.moe import routers
from colonnade.model.moe.layer import MixtureOfExperts
from colonnade.model.moe.resident import Resident, experts_of
from colonnade.model.moe.router import Choice, Own, Router, Seen, draws, router
from colonnade.model.moe.routing import Report, Routed, Routing, Spread, Units

__all__ = [
    "Choice", "MixtureOfExperts", "Own", "Report", "Resident", "Routed", "Router", "Routing", "Seen", "Spread", "Units",
    "draws", "experts_of", "router", "routers",
]  # fmt: skip

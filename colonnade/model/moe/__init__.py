"""Mixture of experts: Router, Dispatch, Experts, Combine."""

from colonnade.model.moe.layer import MixtureOfExperts
from colonnade.model.moe.router import Choice, Router, Seen, router
from colonnade.model.moe.routing import Report, Routed, Routing, Spread

__all__ = ["Choice", "MixtureOfExperts", "Report", "Routed", "Router", "Routing", "Seen", "Spread", "router"]

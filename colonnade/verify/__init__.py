"""``colonnade verify``: compares every parallel layout with one process, on the user's own machine."""

from colonnade.verify.plans import all_plans, covering, shrink
from colonnade.verify.run import CHECKS, TOLERANCE, Result, verify

__all__ = ["CHECKS", "TOLERANCE", "Result", "all_plans", "covering", "shrink", "verify"]

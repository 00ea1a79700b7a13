"""Every layout against one process, on the user's own machine: ``colonnade verify``."""

from colonnade.verify.plans import all_plans, covering
from colonnade.verify.run import CHECKS, TOLERANCE, Result, verify
from colonnade.verify.shrink import shrink

__all__ = ["CHECKS", "TOLERANCE", "Result", "all_plans", "covering", "shrink", "verify"]

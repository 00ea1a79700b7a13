"""The routers: one file each, entered by name when this package is imported.

A newcomer writes a function under ``@router("name")``, here with a line below, or anywhere in a program of one's own.
"""

from colonnade.model.moe.routers import (
    cosine,
    expert_choice,
    gshard,
    hashed,
    noisy,
    sequence_task,
    sigmoid,
    softmax,
    topology,
)

__all__ = ["cosine", "expert_choice", "gshard", "hashed", "noisy", "sequence_task", "sigmoid", "softmax", "topology"]

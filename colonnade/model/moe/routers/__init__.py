"""The routers, one file each, registered when this package is imported.

To add one, write a function under ``@router("name")`` here and import it below, or in any module of your program.
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

"""AdamW test cases shared by the interpreter checks and the GPU tests."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from colonnade.kernels.adamw import ParameterState, step_sizes

SIZES = ((3, 7), (1024,), (0, 4), (5, 4099), (1,), (16384 + 1024,))
"""Full blocks, partial blocks, several blocks, and empty tensors."""


def random_states(
    gradient: torch.dtype, copy: torch.dtype | None, device: str = "cpu", sizes: Sequence[tuple[int, ...]] = SIZES
) -> list[ParameterState]:
    """Weights with optimizer state; every other one has no compute-dtype copy."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...], scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device)

    states = []
    for i, shape in enumerate(sizes):
        w = draw(shape)
        mirror = w.to(copy) if copy is not None and i % 2 == 0 else None
        states.append(
            ParameterState(draw(shape, 1e-2).to(gradient), w, draw(shape, 1e-3), draw(shape, 1e-3).square(), mirror)
        )
    return states


def two_steps(
    run: Callable[..., None], weights: Sequence[ParameterState], skip: float = 0.0, factor: float = 0.37
) -> list[Tensor]:
    """Two steps of ``run`` on copies of ``weights``, each with its own step count; returns all updated tensors."""
    weights = [ParameterState(*(None if x is None else x.clone() for x in weight)) for weight in weights]  # type: ignore[arg-type]
    device = weights[0].master.device
    betas = {"beta1": 0.9, "beta2": 0.95}
    decay_P = torch.tensor([0.1 * (i % 2) for i in range(len(weights))], device=device)
    scalars = [torch.tensor(x, device=device) for x in (factor, skip)]
    for step in (1, 2):
        steps_P = torch.arange(len(weights), device=device, dtype=torch.float32) * 100 + step
        run(weights, *step_sizes(steps_P, decay_P, torch.float32, lr=1e-2, **betas), *scalars, **betas, eps=1e-8)
    return [x for weight in weights for x in weight[1:] if x is not None]

"""The training step of peers and studies: plain torch, as in a hand-written loop."""

import torch
from torch import Tensor, nn


def training_update(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, clip: float = 1.0) -> None:
    """Backward, clipping of the gradient's norm, the optimizer's step, and no gradients left."""
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

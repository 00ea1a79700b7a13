"""An optimizer whose state for what all ranks share is cut among them (ZeRO, arXiv 1910.02054, stage 1)."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from colonnade.errors import ConfigError
from colonnade.parallel.process_groups import Group, axis_of


class TutelDistributedOptimizer:
    """Experts, which stand on their ranks only, beside a part of every other parameter.

    ``average_shared`` divides the gradients of the latter, which are summed over ``group``, by its size.
    """

    def __init__(self, params: Iterable[nn.Parameter], group: Group = None, average_shared: bool = False):
        everything = list(params)
        self.params = [p for p in everything if not hasattr(p, "_tutel_expert")]
        self.expert_params = [p for p in everything if hasattr(p, "_tutel_expert")]
        self.group, self.average_shared = group, average_shared
        self.axis = axis_of(group)
        self.local_optim: Optimizer | None = None

    def warp_local(
        self, local_optim: Callable[..., Optimizer], *args: Any, **kwargs: Any
    ) -> "TutelDistributedOptimizer":
        """Make ``local_optim(parameters, *args, **kwargs)`` over this rank's part."""
        self.virt_params = [self._part(p.detach()).clone().requires_grad_(p.requires_grad) for p in self.params]
        self.local_optim = local_optim(self.virt_params + self.expert_params, *args, **kwargs)
        return self

    def _padded(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1)
        return torch.nn.functional.pad(flat, (0, -len(flat) % self.axis.size))

    def _part(self, x: Tensor) -> Tensor:
        return self.axis.split(self._padded(x), 0)

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for p in (*self.params, *self.expert_params, *getattr(self, "virt_params", ())):
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One step; afterwards all ranks have all of the shared parameters."""
        if self.local_optim is None:
            raise ConfigError("no optimizer to step; call warp_local(torch.optim.SGD, lr=…) first")
        for p, part in zip(self.params, self.virt_params, strict=True):
            if p.grad is not None:
                grad = self.axis.scatter_sum(self._padded(p.grad), 0)
                part.grad = grad / self.axis.size if self.average_shared else grad
        self.local_optim.step()
        for p, part in zip(self.params, self.virt_params, strict=True):
            whole = self.axis.join(part.detach(), 0, len(part) * self.axis.size)
            p.copy_(whole[: p.numel()].view(p.shape))

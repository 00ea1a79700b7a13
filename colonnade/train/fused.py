"""AdamW in one pass over the weights: clip, moments, masters, and the weights that the model computes with.

The same state, schedule and checkpoint as :class:`~colonnade.train.optimizer.AdamW`, which moves 52 bytes a weight in
bfloat16 where this moves 28 (:mod:`colonnade.kernels.adamw.reference` has the equation and the count). With one
micro-batch a step the gradients are read in the compute type, as autograd made them: nothing is added up, so float32
would hold the same numbers. Everything that decides about the step is a tensor, so that nobody waits for the device.
"""

import torch
from torch import Tensor

from colonnade.config import TrainConfig
from colonnade.kernels.adamw.reference import Weight, rates
from colonnade.kernels.choose import choose
from colonnade.parallel.fsdp import Masters
from colonnade.train.optimizer import AdamW


class FusedAdamW(AdamW):
    """Moves ``masters`` and writes their copies; nothing is left to publish."""

    def __init__(self, masters: Masters, train: TrainConfig):
        super().__init__(masters.local, train)
        self._masters, self._train = masters, train
        some = next(iter(masters.local.values()))
        self._run = choose("adamw", some.device.type, some.dtype)
        self._steps_P = torch.zeros(len(masters.local), device=some.device)
        """Adam's count of each weight; those of the state are views of it."""
        for w, count in zip(masters.local.values(), self._steps_P, strict=True):
            self._of(w)["step"] = count
        decay = [train.weight_decay if w.dim() >= 2 else 0.0 for w in masters.local.values()]
        self._decay_P = torch.tensor(decay, dtype=torch.float64, device=some.device)
        self._one = torch.ones((), dtype=some.dtype, device=some.device)
        self._zero = torch.zeros((), device=some.device)

    @torch.no_grad()
    def step(
        self, lr: float | Tensor, skip: Tensor | None = None, scale: Tensor | None = None, clip: Tensor | None = None
    ) -> None:
        """As :meth:`AdamW.step`, after the gradients were multiplied by ``clip``; and write the copies."""
        t, graded = self._train, self._masters.graded
        self._count(skip)
        skip, factor = self._zero if skip is None else skip, self._one if clip is None else clip
        factor = (factor if scale is None else factor / scale).to(self._one.dtype)
        weights = [
            Weight(grad, w.detach(), self._of(w)["exp_avg"], self._of(w)["exp_avg_sq"], self._copy(name))
            for name, w in self.weights.items()
            if (grad := graded[name].grad) is not None
        ]
        steps_P, decay_P = self._steps_P, self._decay_P
        if len(weights) == len(self.weights):
            steps_P += 1 - skip
        else:  # a weight that took no part is not counted either
            held = [i for i, tensor in enumerate(graded.values()) if tensor.grad is not None]
            steps_P[held] += 1 - skip
            steps_P, decay_P = steps_P[held], decay_P[held]
        # Where a step is skipped a count may still be 0, and a rate not a number: nothing reads it.
        found = rates(steps_P, decay_P, self._one.dtype, lr=lr, beta1=t.beta1, beta2=t.beta2)
        self._run(weights, *found, factor, skip, beta1=t.beta1, beta2=t.beta2, eps=t.eps)
        for tensor in graded.values():
            tensor.grad = None

    def _copy(self, name: str) -> Tensor | None:
        copy = self._masters.copies.get(name)
        return None if copy is None else copy.detach()

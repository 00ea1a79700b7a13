"""Training of ternary experts for recovery, with a straight-through gradient.

    ŵ = s t,   t = round(u) where |u| is among the k largest of its word, else 0       u trains, and s
    ∂ŵ/∂u = s                                                                           t's gradient passes through

u starts as the dense teacher's weight over s, moved to where it rounds to the trit that calibration chose, or as that
trit if the teacher has other experts. A trit changes when its u crosses ±½, or when another weight of its word becomes
larger.
"""

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from colonnade.kernels.linear import ternary
from colonnade.kernels.linear.quantise import Quantised, dequantise, pack_ternary
from colonnade.model.moe.experts import Experts

TRIT_LR = 10.0
"""The step of u, relative to that of the scales."""
MARGIN, LARGEST = 0.05, 1.5
"""Bounds of u at the start: at least so far from ±½, and at most so large."""


class _RoundBFloat16(Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return grad


def round_bfloat16(x: Tensor) -> Tensor:
    """``x`` rounded to bfloat16, in float32, with a straight-through gradient."""
    return _RoundBFloat16.apply(x)


def round_trits(u: Tensor, trits: int) -> Tensor:
    """``u`` (…, D) rounded to −1, 0 and 1, the k largest of a word of ``trits``, with a straight-through gradient."""
    return _RoundTrits.apply(u, trits)


class _RoundTrits(Function):
    @staticmethod
    def forward(ctx, u: Tensor, trits: int) -> Tensor:
        D = u.shape[-1]
        words = F.pad(u, (0, -D % trits)).unflatten(-1, (-1, trits))
        best = words.abs().topk(ternary.NONZERO[trits], -1).indices
        largest = torch.zeros_like(words).scatter_(-1, best, 1)
        return (words.round().clamp(-1, 1) * largest).flatten(-2)[..., :D]

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class _Stack:
    """One part, up, gate or down, of a layer's experts: outputs first."""

    def __init__(self, weight: Quantised, dense_EFD: Tensor | None):
        self.group, self.first_scale = weight.group, weight.scales.float()
        trits = torch.stack([dequantise(weight.matrix(e), torch.float32).sign() for e in range(len(weight.values))])
        ratio = trits if dense_EFD is None else dense_EFD.float() / self.first_scale.clamp(min=1e-30)
        kept = trits * (ratio * trits).clamp(0.5 + MARGIN, LARGEST)
        self.first_u = torch.where(trits != 0, kept, ratio.clamp(MARGIN - 0.5, 0.5 - MARGIN))
        self.u, self.scale = (nn.Parameter(torch.zeros_like(t)) for t in (self.first_u, self.first_scale))

    def rounded(self) -> tuple[Tensor, Tensor]:
        """(trits, scales)."""
        trits = round_trits(self.first_u + self.u, self.group)
        return trits, round_bfloat16(self.first_scale * (1 + self.scale))

    def packed(self) -> Quantised:
        """As it is stored."""
        trits, scale = self.rounded()
        matrices = [pack_ternary(t, t != 0, s, self.group) for t, s in zip(trits, scale, strict=True)]
        values, scales = [matrix.values for matrix in matrices], [matrix.scales for matrix in matrices]
        return matrices[0]._replace(values=torch.stack(values), scales=torch.stack(scales))


class TernaryExperts:
    """The ternary experts of one layer, whose trits and scales train."""

    def __init__(self, module: Experts, teacher: Experts):
        self.module, self.stacks = module, dict[str, _Stack]()
        same = not teacher.quantised and teacher.local_count == module.local_count  # else experts were pruned or merged
        for part, weight in module.quantised.items():
            dense = getattr(teacher, part).detach() if same else None
            self.stacks[part] = _Stack(weight, dense.mT if dense is not None and part == "down" else dense)
        self._hook: torch.utils.hooks.RemovableHandle | None = None

    @property
    def parameters(self) -> list[tuple[nn.Parameter, float]]:
        """What trains, and its step relative to that of a scale."""
        return [pair for stack in self.stacks.values() for pair in ((stack.u, TRIT_LR), (stack.scale, 1.0))]

    def attach(self) -> None:
        """Compute with the weights in training from now on."""
        self.module.quantised = {}
        self._hook = self.module.register_forward_pre_hook(lambda *_: self._assign())

    def detach(self) -> None:
        """Store the trained weights."""
        assert self._hook is not None
        self._hook.remove()
        for part in self.stacks:
            vars(self.module).pop(part, None)
        with torch.no_grad():
            self.module.quantised = {part: stack.packed() for part, stack in self.stacks.items()}

    def _assign(self) -> None:
        for part, stack in self.stacks.items():
            trits, scale = stack.rounded()
            setattr(self.module, part, (trits * scale).mT if part == "down" else trits * scale)

"""Recovery: trains scales, low values and norms of a quantised model to match the original.

    minimise KL(p ‖ p̂) over s, m and the norms;      Ŵ = q s + m, with q fixed          (EfficientQAT, arXiv 2407.11062)
    s = s₀ (1 + δ),   m = m₀ + s₀ ε                  δ and ε train, so that a step has the same size in every format

In a matrix with 2:4 sparsity, every nonzero weight trains: w = w₀ (1 + δ). Ternary experts train their trits too
(:mod:`colonnade.compress.ternary_training`).

If the grid has integer zero points z (including symmetric grids), m = −z s stays tied to s. The linear layers of the
blocks train; other stacks of experts and the output projection keep their scales. The last text is held out: the state
with the least divergence on it is kept, which may be the initial one.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from colonnade.compress.sparse24 import is_sparse24
from colonnade.compress.ternary_training import TernaryExperts, round_bfloat16
from colonnade.errors import ConfigError, DataError
from colonnade.kernels.linear.quantise import Quantised, int4_scales, round_inputs, to_float, to_rows, unpack_int4
from colonnade.model import Hidden, Packed, Stream, Transformer
from colonnade.model.moe import Routing
from colonnade.model.moe.experts import Experts
from colonnade.model.norm import Norm
from colonnade.model.tensor_parallel_linear import Linear, linear

WEIGHT_LR = 5.0
"""The step of single weights, relative to that of the scales."""
LR = 4e-4
"""Adam's step, relative to each scale; twelve times as much made SmolLM2 worse."""
NORM_LR = 0.02
"""The step of the norms, relative to that of the scales."""
EVALUATIONS = 4
"""How often the divergence on the last text is measured."""


def recover(
    model: Transformer,
    teacher: Transformer,
    texts: Sequence[Tensor],
    steps: int,
    *,
    lr: float = LR,
    progress: Callable[[int, int], object] = lambda _done, _of: None,
) -> tuple[float, float]:
    """Train ``model``, quantised, in place; returns its divergence from ``teacher`` on the last text before and after.

    A step is one text, int64 token ids (T,). Raises :class:`ConfigError` for a model without quantised layers or with a
    different vocabulary, :class:`DataError` for fewer than two texts.
    """
    layers = _trained_layers(model, teacher)
    if not layers or model.config.vocab_size != teacher.config.vocab_size:
        raise ConfigError(
            "recovery needs a quantised or sparse model and the model that it was made from; compress it first"
        )
    if len(texts) < 2:
        raise DataError(f"recovery trains on all sequences but the last, and was given {len(texts)}; use more tokens")
    norms = [p for module in model.modules() if isinstance(module, Norm) for p in module.parameters()]
    for parameter in norms:
        parameter.requires_grad_(True)
    pairs = [pair for layer in layers for pair in layer.parameters] + [(norm, NORM_LR) for norm in norms]
    trained, relative = [parameter for parameter, _ in pairs], [step for _, step in pairs]
    groups = [{"params": [p], "lr": lr * share} for p, share in zip(trained, relative, strict=True)]
    optimizer = torch.optim.Adam(groups, betas=(0.9, 0.95), foreach=False)
    try:
        for layer in layers:
            layer.attach()
        before = best = _evaluate(model, teacher, texts[-1])
        kept = [p.detach().clone() for p in trained]
        every = max(1, steps // EVALUATIONS)
        for step in range(steps):
            for group, share in zip(optimizer.param_groups, relative, strict=True):
                group["lr"] = lr * share * (1 - step / steps)
            optimizer.zero_grad()
            text = texts[step % (len(texts) - 1)]
            _divergence(model, teacher, text).backward()
            optimizer.step()
            if ((step + 1) % every == 0 or step + 1 == steps) and (now := _evaluate(model, teacher, texts[-1])) < best:
                best, kept = now, [p.detach().clone() for p in trained]
            progress(step + 1, steps)
        with torch.no_grad():
            for parameter, value in zip(trained, kept, strict=True):
                parameter.copy_(value)
    finally:
        for layer in layers:
            layer.detach()
        for parameter in norms:
            parameter.requires_grad_(False)
            parameter.grad = None
    return before, best


def _trained_layers(model: Transformer, teacher: Transformer) -> "list[_Layer | _SparseLayer | TernaryExperts]":
    linears = [module for module in model.blocks.modules() if isinstance(module, Linear)]
    layers: list[_Layer | _SparseLayer | TernaryExperts] = [_Layer(module) for module in linears if module.quantised]
    for name, module in model.named_modules():
        if isinstance(module, Experts) and any(weight.kind == "ternary" for weight in module.quantised.values()):
            experts = teacher.get_submodule(name)
            assert isinstance(experts, Experts)
            layers.append(TernaryExperts(module, experts))
    return layers or [_SparseLayer(m) for m in linears if not m.never_quantise and is_sparse24(m.weight.detach())]


class _Layer:
    """A linear layer with trainable scales."""

    def __init__(self, module: Linear):
        assert module.quantised is not None
        self.module, self.weight = module, to_rows(module.quantised)  # an engine stores it in blocks
        self.low = self.zero = self.first_low = None
        if self.weight.kind != "int4":
            self.first_scale = self.weight.scales.clone()
        else:
            self.first_scale, self.first_low = self.weight.scales.float().unbind(-1)
            zero = (-self.first_low / self.first_scale).round()
            if torch.equal(-zero * self.first_scale, self.first_low):
                self.zero = zero
            else:
                self.low = nn.Parameter(torch.zeros_like(self.first_low))
        self.scale = nn.Parameter(torch.zeros_like(self.first_scale))

    @property
    def parameters(self) -> list[tuple[nn.Parameter, float]]:
        """The trained tensors, and their step relative to that of a scale."""
        return [(p, 1.0) for p in (self.scale, self.low) if p is not None]

    def attach(self) -> None:
        """Multiply with the scales in training from now on."""
        _replace_product(self.module, lambda x: _ScaledLinear.apply(x, *self._rounded(), self.weight))

    def detach(self) -> None:
        """Store the trained scales."""
        _restore_product(self.module)
        with torch.no_grad():
            scale, low = self._rounded()
            scales = scale.detach() if low is None else int4_scales(scale.detach(), low.detach())
            self.module.quantised = self.weight._replace(scales=scales)

    def _rounded(self) -> tuple[Tensor, Tensor | None]:
        """Scales and low values as they will be stored; gradients pass through the rounding."""
        scale = self.first_scale * (1 + self.scale)
        if self.weight.kind != "int4":
            return scale, None
        scale = round_bfloat16(scale)
        if self.low is not None and self.first_low is not None:
            return scale, round_bfloat16(self.first_low + self.first_scale * self.low)
        assert self.zero is not None
        return scale, -self.zero * scale


class _SparseLayer:
    """A linear layer with 2:4 sparsity and trainable weights, each by a factor."""

    def __init__(self, module: Linear):
        self.module, self.first_FD = module, module.weight.detach().clone()
        self.factor = nn.Parameter(torch.zeros_like(self.first_FD))
        self.parameters = [(self.factor, WEIGHT_LR)]

    def attach(self) -> None:
        """Multiply with the weights in training from now on."""
        _replace_product(self.module, lambda x: F.linear(x, self.first_FD * (1 + self.factor)))

    def detach(self) -> None:
        """Store the trained weights."""
        _restore_product(self.module)
        with torch.no_grad():
            self.module.weight.copy_(self.first_FD * (1 + self.factor))


def _replace_product(module: Linear, product: Callable[[Tensor], Tensor]) -> None:
    """Multiply by ``product`` instead of the stored matrix."""

    def multiply(x: Tensor) -> Tensor:
        return product(x)

    def forward(x: Tensor) -> Tensor:
        y = product(x)
        return y if module.bias is None else y + module.bias

    module.forward, module.product = forward, multiply


def _restore_product(module: Linear) -> None:
    for method in ("forward", "product"):
        vars(module).pop(method, None)


class _ScaledLinear(Function):
    """y = x (q s + m)ᵀ; q is unpacked again in the backward pass, so that no tensor of W's size is stored."""

    @staticmethod
    def forward(ctx, x: Tensor, scale: Tensor, low: Tensor | None, weight: Quantised) -> Tensor:
        if weight.kind == "int8_dynamic":
            x = round_inputs(x)
        ctx.save_for_backward(x, scale, low)
        ctx.weight = weight
        return F.linear(x, _dense(_integers(weight), scale, low, weight).to(x.dtype))

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, scale, low = ctx.saved_tensors
        weight: Quantised = ctx.weight
        q_FD = _integers(weight)
        dx = grad @ _dense(q_FD, scale, low, weight).to(grad.dtype)
        dw_FD = (grad.flatten(0, -2).T @ x.flatten(0, -2)).float()
        dscale = _sum_groups(dw_FD * q_FD, weight)
        return dx, dscale, None if low is None else _sum_groups(dw_FD, weight), None


def _integers(weight: Quantised) -> Tensor:
    return unpack_int4(weight).float() if weight.kind == "int4" else to_float(weight.values, torch.float32)


def _dense(q_FD: Tensor, scale: Tensor, low: Tensor | None, weight: Quantised) -> Tensor:
    if weight.kind != "int4":
        return q_FD * scale
    spread = scale.repeat_interleave(weight.group, 1)[:, : weight.inputs]
    assert low is not None
    return q_FD * spread + low.repeat_interleave(weight.group, 1)[:, : weight.inputs]


def _sum_groups(x_FD: Tensor, weight: Quantised) -> Tensor:
    group = weight.group if weight.kind == "int4" else weight.inputs
    return F.pad(x_FD, (0, -x_FD.shape[1] % group)).unflatten(1, (-1, group)).sum(2)


def _divergence(model: Transformer, teacher: Transformer, tokens_T: Tensor) -> Tensor:
    """KL(teacher ‖ model) per token."""
    with torch.no_grad():
        logp_TV = _logits(teacher, tokens_T).float().log_softmax(1)
    logq_TV = _logits(model, tokens_T).float().log_softmax(1)
    return F.kl_div(logq_TV, logp_TV, reduction="sum", log_target=True) / len(tokens_T)


@torch.no_grad()
def _evaluate(model: Transformer, teacher: Transformer, tokens_T: Tensor) -> float:
    return float(_divergence(model, teacher, tokens_T))


def _logits(model: Transformer, tokens_T: Tensor) -> Tensor:
    device = next(model.parameters()).device
    T = len(tokens_T)
    positions_T = torch.arange(T, device=device)
    routing = None if model.config.moe is None else Routing(positions_T)
    stream = Stream(tokens_T.to(device), positions_T, routing=routing)
    x_TD = model(stream, Packed.of([T], device, causal=model.config.causal), Hidden())
    output = model.output
    return linear(x_TD, output.weight_vD, None, output.kernels)

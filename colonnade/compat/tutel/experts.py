"""Tutel's built-in experts and the factories of experts and gates; a custom expert is called in the same way.

    ffn         act(x W1ᵀ + b1) W2 + b2
    llama_ffn   (act(x W1) ⊙ x W2) W3

``module(x, ctx)``: x is (experts, rows, D), ctx the layer, of which ``group``, ``sharded_count`` (Sh) and
``adaptive_degree`` (r) matter. For r = 0 every rank gathers all E experts; otherwise it computes its
own, for the rows of hidden slice s // (Sh/r), where s is its index among the Sh ranks of its expert. Gathered weights
are not kept for the backward pass but gathered again.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.compat.tutel.gates import COMMON, GATES
from colonnade.config.base import did_you_mean
from colonnade.errors import ConfigError, PlanError
from colonnade.model.activation_checkpointing import checkpointed
from colonnade.parallel.process_groups import axis_of, contiguous_group

if TYPE_CHECKING:
    from colonnade.compat.tutel.moe import MOELayer


def _function(activation_fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    if not callable(activation_fn):
        raise ConfigError(
            f"activation_fn is {activation_fn!r}; pass a function of a tensor, such as torch.nn.functional.gelu"
        )
    return activation_fn


class FusedExpertsNetwork(nn.Module):
    """Two-layer feed-forward experts with any activation and optional biases."""

    def __init__(
        self,
        model_dim: int,
        hidden_size_per_expert: int,
        num_experts_per_device: int,
        sharded_count: int,
        activation_fn: Callable[[Tensor], Tensor] | None = None,
        activation_fn_with_self: Callable[[Tensor, nn.Module], Tensor] | None = None,
        output_dim: int | None = None,
        has_fc1_bias: bool = True,
        has_fc2_bias: bool = True,
    ):
        super().__init__()
        if hidden_size_per_expert % sharded_count:
            raise PlanError(
                f"{hidden_size_per_expert} hidden units of an expert cannot be divided over its {sharded_count} ranks; "
                "change hidden_size_per_expert"
            )
        if activation_fn is not None and activation_fn_with_self is not None:
            raise ConfigError("activation_fn and activation_fn_with_self are both set; pass only one")
        self.model_dim, self.output_dim = model_dim, output_dim or model_dim
        self.hidden_size_per_expert = hidden_size_per_expert
        self.hidden_size = hidden_size_per_expert // sharded_count
        self.local_experts, self.sharded_count = num_experts_per_device, sharded_count
        if activation_fn_with_self is not None:
            act = activation_fn_with_self  # a name of its own: the other may be set later

            def with_self(x: Tensor) -> Tensor:
                return act(x, self)

            activation_fn = with_self
        self.activation_fn = _function(F.relu if activation_fn is None else activation_fn)
        n, f, o = num_experts_per_device, self.hidden_size, -(-self.output_dim // sharded_count)
        self.batched_fc1_w = nn.Parameter(torch.empty(n, f, model_dim))
        self.batched_fc2_w = nn.Parameter(torch.empty(n, f, self.output_dim))
        self.batched_fc1_bias = nn.Parameter(torch.empty(n, f)) if has_fc1_bias else None
        self.batched_fc2_bias = nn.Parameter(torch.empty(n, o)) if has_fc2_bias else None
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise like nn.Linear, expert by expert, so that a seed gives the same values as in Tutel."""
        fc1_b, fc2_b = self.batched_fc1_bias, self.batched_fc2_bias
        for i in range(self.local_experts):
            fc1 = nn.Linear(self.model_dim, self.hidden_size, bias=fc1_b is not None)
            fc2 = nn.Linear(self.hidden_size, self.output_dim, bias=fc2_b is not None)
            self.batched_fc1_w[i] = fc1.weight
            self.batched_fc2_w[i] = fc2.weight.T
            if fc1_b is not None:
                fc1_b[i] = fc1.bias
            if fc2_b is not None:
                fc2_b[i] = fc2.bias[: fc2_b.shape[1]]

    def extra_repr(self) -> str:
        """Describe the module for print."""
        return (
            f"model_dim={self.model_dim}, hidden_size={self.hidden_size}, output_dim={self.output_dim}, "
            f"num_experts_per_device={self.local_experts}, has_fc1_bias={self.batched_fc1_bias is not None}, "
            f"has_fc2_bias={self.batched_fc2_bias is not None}"
        )

    def forward(self, x: Tensor, ctx: "MOELayer") -> Tensor:
        """(experts, rows, output_dim)."""
        if ctx.world_size == 1 or (ctx.sharded_count == 1 and ctx.adaptive_degree == 1):
            b1, b2 = self.batched_fc1_bias, self.batched_fc2_bias
            return self._ffn(x, self.batched_fc1_w, self.batched_fc2_w, b1, b2)
        # The activation may draw random numbers, and must draw the same again.
        return checkpointed(self._gathered, x, ctx, ctx.adaptive_degree, random=True)

    def _gathered(self, x: Tensor, ctx: "MOELayer", degree: int) -> Tensor:
        E = ctx.num_global_experts if degree == 0 else 1
        hidden = axis_of(ctx.group if degree == 0 else contiguous_group(ctx.sharded_count // degree, ctx.group))
        output = hidden if degree == 0 else axis_of(contiguous_group(ctx.sharded_count, ctx.group))
        fc1_w, fc2_w, fc1_b = (
            None if w is None else hidden.gather(w, 0, len(w) * hidden.size).reshape(E, -1, *w.shape[2:])
            for w in (self.batched_fc1_w, self.batched_fc2_w, self.batched_fc1_bias)
        )
        fc2_b = self.batched_fc2_bias
        if fc2_b is not None:
            fc2_b = output.gather(fc2_b, 0, len(fc2_b) * output.size).reshape(E, -1)[:, : self.output_dim]
            fc2_b = fc2_b / max(degree, 1)  # r ranks add it
        assert fc1_w is not None
        assert fc2_w is not None
        return self._ffn(x, fc1_w, fc2_w, fc1_b, fc2_b)

    def _ffn(self, x: Tensor, fc1_w: Tensor, fc2_w: Tensor, fc1_b: Tensor | None, fc2_b: Tensor | None) -> Tensor:
        h = x @ fc1_w.transpose(1, 2)
        h = self.activation_fn(h if fc1_b is None else h + fc1_b.unsqueeze(1).to(h.dtype))
        y = h @ fc2_w
        return y if fc2_b is None else y + fc2_b.unsqueeze(1).to(y.dtype)


class LlamaFFNNetwork(nn.Module):
    """Gated experts whose flat weights are sharded over the ranks of each expert.

    A shard is not a slice of hidden units, so every r gathers the whole weight, and r > 1 takes its slice of that.
    """

    def __init__(
        self,
        model_dim: int,
        hidden_size_per_expert: int,
        num_experts_per_device: int,
        sharded_count: int,
        activation_fn: Callable[[Tensor], Tensor] = F.silu,
    ):
        super().__init__()
        n, D, F_ = num_experts_per_device, model_dim, hidden_size_per_expert
        self.model_dim, self.hidden_size_per_expert = D, F_
        self.sharded_count, self.activation_fn = sharded_count, _function(activation_fn)
        self.W_fc1_full_shape = self.W_fc2_full_shape = torch.Size((n, D, F_))
        self.W_fc3_full_shape = torch.Size((n, F_, D))
        share = -(-n * D * F_ // sharded_count)
        self.W_fc1 = nn.Parameter(torch.empty(share))
        self.W_fc2 = nn.Parameter(torch.empty(share))
        self.W_fc3 = nn.Parameter(torch.empty(share))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise with N(0, 0.01²)."""
        for w in (self.W_fc1, self.W_fc2, self.W_fc3):
            w.normal_(0, 0.01)

    def extra_repr(self) -> str:
        """Describe the module for print."""
        return f"model_dim={self.model_dim}, hidden_size_per_expert={self.hidden_size_per_expert}"

    def forward(self, x: Tensor, ctx: "MOELayer") -> Tensor:
        """(experts, rows, D)."""
        if ctx.world_size == 1 or (ctx.sharded_count == 1 and ctx.adaptive_degree == 1):
            return self._ffn(x, ctx, 1)
        return checkpointed(self._ffn, x, ctx, ctx.adaptive_degree, random=True)

    def _ffn(self, x: Tensor, ctx: "MOELayer", degree: int) -> Tensor:
        etp = ctx.sharded_count
        axis = axis_of(ctx.group if degree == 0 else contiguous_group(etp, ctx.group))

        def whole(w: Tensor, shape: torch.Size) -> Tensor:
            flat = axis.gather(w, 0, len(w) * axis.size).view(-1, etp * len(w))
            return flat[:, : shape.numel()].reshape(-1, *shape[1:])

        w1, w2 = whole(self.W_fc1, self.W_fc1_full_shape), whole(self.W_fc2, self.W_fc2_full_shape)
        w3 = whole(self.W_fc3, self.W_fc3_full_shape)
        if degree > 1:
            nth, units = axis.rank * degree // etp, self.hidden_size_per_expert
            mine = slice(units * nth // degree, units * (nth + 1) // degree)
            w1, w2, w3 = w1[:, :, mine], w2[:, :, mine], w3[:, mine]
        return (self.activation_fn(x @ w1) * (x @ w2)) @ w3


EXPERTS = {"ffn": FusedExpertsNetwork, "llama_ffn": LlamaFFNNetwork}


def make_experts(options: dict[str, Any], model_dim: int, local: int, sharded: int) -> nn.Module:
    """Build the experts that ``options`` describe: ``local`` of them, each over ``sharded`` ranks."""
    kind = options.pop("type", None)
    if kind == "custom":
        module = options.pop("module", None)
        if module is None:
            raise ConfigError("experts of type 'custom' need a class; pass experts={'module': …}")
    elif kind in EXPERTS:
        module = EXPERTS[kind]
    else:
        raise ConfigError(f"there are no experts of type '{kind}'" + did_you_mean(str(kind), [*EXPERTS, "custom"]))
    names = inspect.signature(module).parameters
    # The older name of the argument.
    old = "local_experts" in names and "num_experts_per_device" not in names
    count = "local_experts" if old else "num_experts_per_device"
    options |= {"model_dim": model_dim, count: local, "sharded_count": sharded}
    if kind != "custom":
        if "hidden_size_per_expert" not in options:
            raise ConfigError(f"experts of type '{kind}' have no size; pass experts={{'hidden_size_per_expert': …}}")
        for name in options:
            if name not in names:
                raise ConfigError(f"experts of type '{kind}' have no option '{name}'" + did_you_mean(name, list(names)))
    return module(**options)


def make_gate(kind: Any, model_dim: int, experts: int) -> nn.Module:
    """Build the gate that ``kind`` describes, with its noise and capacity factor."""
    if isinstance(kind, str) and (old := re.fullmatch(r"Top(\d+)Gate", kind)):
        kind = {"type": "top", "k": int(old[1])}
    if not isinstance(kind, Mapping):
        raise ConfigError(f"gate_type {kind!r} does not describe a gate; use {{'type': 'top', 'k': 2}}")
    options = dict(kind)
    name = options.pop("type", None)
    if name == "custom" and "module" not in options:
        raise ConfigError("a gate of type 'custom' needs a class; pass gate_type={'module': …}")
    if name != "custom" and name not in GATES:
        raise ConfigError(f"there is no gate of type '{name}'" + did_you_mean(str(name), [*GATES, "custom"]))
    module = options.pop("module") if name == "custom" else GATES[name]
    # The layer reads these; a custom gate gets them if it accepts them.
    accepted = {key: value for key, value in options.items() if key not in COMMON or _accepts(module, key)}
    gate = module(model_dim=model_dim, num_global_experts=experts, **accepted)
    for option, default in (("gate_noise", 0.0), ("capacity_factor", 1.0)):
        if not hasattr(gate, option):
            setattr(gate, option, options.get(option, default))
    return gate


def _accepts(module: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(module).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

"""What of a layer of experts, as a model has it, goes into its router, dispatch and combine: kernels by what they do.

The layer is :class:`MixtureOfExperts` itself, with a router of random weights, whose loads are about even. Products are
the experts' three and the activations between them; a token's row that a product gathers meanwhile is the product's.
Dispatch sorts the choices and lays out rows, combine sums them. All the rest counts as the router's: scores, choice,
counts, checks and, in training, the losses, and what adds up the gradients. Times are of kernels, without what is
between them, which a graph's replay hardly has. On a CPU the operators have other names, and it only runs.
"""

import statistics
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig, MoeConfig
from colonnade.kernels.experts.reference import Weights
from colonnade.model.moe import LayerRouting, MixtureOfExperts, Routing
from colonnade.parallel.axis import SOLO_AXES
from moe.layer_profile import LIBRARYS, PRODUCTS, timeline

DISPATCH = ("_count", "_scatter", "_sort_by_counting", "_inverse_permutation", "_gather_by_row", "_gather_by_token")
COMBINE = ("_combine_kernel", "_combine_grad")
BETWEEN = ("activation_forward_kernel", "activation_backward_kernel", "bias_grad_kernel")
RUNS = 3


class Shares(NamedTuple):
    """µs of one pass, and of each kernel by group."""

    router: float
    dispatch: float
    combine: float
    products: float
    kernels: dict[tuple[str, str], float]

    @property
    def share(self) -> float:
        """Of all but the products in the whole."""
        rest = self.router + self.dispatch + self.combine
        return rest / (rest + self.products)


def layer_of(active: int, weights: Weights) -> MixtureOfExperts:
    """A layer that has these weights, not a copy of them."""
    (E, F, D), on = weights.up_EFD.shape, {"device": weights.up_EFD.device, "dtype": weights.up_EFD.dtype}
    moe = MoeConfig(experts=E, active=active, ffn_width=F)
    config = ModelConfig(
        vocab_size=64, layers=1, width=D, heads=16, ffn_width=F, context=64, activation="silu", gated=True, moe=moe
    )
    layer = MixtureOfExperts(config, moe, SOLO_AXES, **on)
    for name, stack in (("up", weights.up_EFD), ("down", weights.down_EFD), ("gate", weights.gate_EFD)):
        assert stack is not None, "a gated layer"
        setattr(layer.experts, name, nn.Parameter(stack.detach()))
    for parameter in layer.router.parameters():
        nn.init.normal_(parameter, std=D**-0.5)
    return layer


def measured(layer: MixtureOfExperts, x_TD: Tensor, *, back: bool, gpu: bool) -> Shares:
    """Medians of a few passes: of inference, or ``back`` and forth as in training. A library's product that the router
    runs by itself too is the router's.
    """
    T, device = len(x_TD), x_TD.device
    tokens_T, index_T = torch.zeros(T, dtype=torch.int64, device=device), torch.arange(T, device=device)
    routed = LayerRouting(tokens_T, Routing(index_T, 1.0) if back else None, None)
    x_TD = x_TD.detach().requires_grad_(back)

    def whole() -> Tensor:
        return layer(x_TD, T, routed)[0]

    def router() -> Tensor:
        choice, logits_TE = layer.router(x_TD, tokens_T, index_T, None)
        return choice.weights_TA.sum() + logits_TE.sum()

    def once(run: Callable[[], Tensor], wanted: nn.Module) -> Callable[[], None]:
        def one_pass() -> None:
            with torch.set_grad_enabled(back):
                y = run()
            if back:
                torch.autograd.grad(y, [x_TD, *wanted.parameters()], x_TD.detach() if y.dim() else None)

        return one_pass

    routers = {name for name, *_ in timeline(once(router, layer.router), gpu=gpu)}
    runs = [_by_group(timeline(once(whole, layer), gpu=gpu), routers) for _ in range(RUNS)]
    kernels = {key: statistics.median(run.get(key, 0.0) for run in runs) for key in runs[0]}
    sums = {group: sum(took for (of, _), took in kernels.items() if of == group) for group in Shares._fields[:4]}
    return Shares(**sums, kernels=kernels)


def _by_group(kernels: list[tuple[str, float, float]], routers: set[str]) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for name, _, took in kernels:
        key = group_of(name, routers), name
        found[key] = found.get(key, 0.0) + took
    return found


def group_of(name: str, routers: set[str]) -> str:
    """What a kernel is for; ``routers`` are those that the router runs by itself."""
    if name in DISPATCH or "scan" in name.lower():  # a running sum of counts
        return "dispatch"
    if name in COMBINE:
        return "combine"
    library = any(it in name.lower() for it in (*LIBRARYS, "grouped_mm")) and name not in routers
    return "products" if library or name in PRODUCTS or name in BETWEEN else "router"


def told(shares: Shares) -> list[str]:
    """A line for each group and, under it, for each of its kernels, and the share of all but the products."""
    lines = []
    for group in Shares._fields[:4]:
        lines.append(f"{getattr(shares, group):10.1f} us {group}")
        mine = sorted(((took, name) for (of, name), took in shares.kernels.items() if of == group), reverse=True)
        lines += [f"{took:18.1f} us  {name[:80]}" for took, name in mine]
    return [*lines, f"{shares.share:10.1%} router, dispatch and combine"]

"""Shares of router, dispatch, combine and GEMMs in a complete layer of experts, by kernel.

The layer is :class:`MixtureOfExperts` with a router of random weights, whose load is about uniform. "products" are the
experts' three GEMMs and the activations between them, including rows that a GEMM gathers itself. "dispatch" sorts the
choices and gathers rows, "combine" sums them. All the rest counts as the router: scores, choice, counts, checks and, in
training, the losses and the accumulation of gradients. Times are those of the kernels without the gaps between them,
which a replayed CUDA graph hardly has. On a CPU the operators have other names, so the shares mean nothing there.
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
from moe.layer_profile import LIBRARY_NAMES, PRODUCTS, timeline

DISPATCH = ("_count", "_scatter", "_sort_by_counting", "_inverse_permutation", "_gather_by_row", "_gather_by_token")
COMBINE = ("_combine_kernel", "_combine_grad")
BETWEEN = ("activation_forward_kernel", "activation_backward_kernel", "bias_grad_kernel")
RUNS = 3


class Shares(NamedTuple):
    """µs of each group in one pass, and of each kernel by (group, name)."""

    router: float
    dispatch: float
    combine: float
    products: float
    kernels: dict[tuple[str, str], float]

    @property
    def share(self) -> float:
        """The share of everything but the products."""
        rest = self.router + self.dispatch + self.combine
        return rest / (rest + self.products)


def layer_of(active: int, weights: Weights) -> MixtureOfExperts:
    """A layer that uses these weights without a copy."""
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


def measure_shares(layer: MixtureOfExperts, x_TD: Tensor, *, back: bool, gpu: bool) -> Shares:
    """Medians of a few passes of inference, or with ``back`` of training.

    A library GEMM that also runs in the router alone counts as the router's.
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

    def once(run: Callable[[], Tensor], module: nn.Module) -> Callable[[], None]:
        def one_pass() -> None:
            with torch.set_grad_enabled(back):
                y = run()
            if back:
                torch.autograd.grad(y, [x_TD, *module.parameters()], x_TD.detach() if y.dim() else None)

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
    """The group of a kernel; ``routers`` are the kernels that run in the router alone."""
    if name in DISPATCH or "scan" in name.lower():  # a running sum of counts
        return "dispatch"
    if name in COMBINE:
        return "combine"
    library = any(it in name.lower() for it in (*LIBRARY_NAMES, "grouped_mm")) and name not in routers
    return "products" if library or name in PRODUCTS or name in BETWEEN else "router"


def report_lines(shares: Shares) -> list[str]:
    """Lines for each group and its kernels, and the share of everything but the products."""
    lines = []
    for group in Shares._fields[:4]:
        lines.append(f"{getattr(shares, group):10.1f} us {group}")
        mine = sorted(((took, name) for (of, name), took in shares.kernels.items() if of == group), reverse=True)
        lines += [f"{took:18.1f} us  {name[:80]}" for took, name in mine]
    return [*lines, f"{shares.share:10.1%} router, dispatch and combine"]

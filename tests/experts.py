"""Test cases for expert kernels, shared by tests on a CPU, in Triton's interpreter and on a GPU."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colonnade.kernels import permute
from colonnade.kernels.dropout import HiddenDropout, choice_hash, hidden_hash
from colonnade.kernels.experts.deferred_wgrad import DeferredWgrad
from colonnade.kernels.experts.quantised import QuantisedWeights
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.linear.quantise import Kind, Quantised, dequantise, quantise

LOADS = ("even", "skewed", "one", "some dropped", "bounded", "all dropped")
NAMES = ("y", "x", "routing", *Weights._fields)


@dataclass(frozen=True)
class Case:
    """One MoE layer and how its tokens are distributed over experts."""

    T: int
    A: int
    E: int
    D: int
    F: int
    load: str = "even"
    gated: bool = True
    biased: bool = False
    activation: str = "silu"
    across: bool = False
    """Whether W_down is stored column-major."""

    def ids(self) -> Tensor:
        """(T, A): each token's experts, distinct except with load "one"; E means none."""
        draw = torch.Generator().manual_seed(self.T)
        scores_TE = torch.rand(self.T, self.E, generator=draw)
        if self.load == "skewed":
            scores_TE *= torch.arange(1, self.E + 1) ** 2.0
        ids_TA = scores_TE.argsort(1, descending=True)[:, : self.A]
        if self.load == "one":
            ids_TA = torch.full_like(ids_TA, self.E - 1)
        if self.load in ("some dropped", "bounded"):
            ids_TA[::3] = self.E
        return torch.full_like(ids_TA, self.E) if self.load == "all dropped" else ids_TA

    def rows(self) -> int | None:
        """An upper bound on the number of choices, if known; not tight with load "bounded"."""
        return int((self.ids() < self.E).sum()) + 1 if self.load == "bounded" else None

    def leaves(self, dtype: torch.dtype, device: str) -> list[Tensor | None]:
        """x, the routing weights and the experts' weights."""
        draw = torch.Generator().manual_seed(self.E)

        def leaf(*shape: int, scale: float = 1.0, wanted: bool = True, kind: torch.dtype = dtype) -> Tensor | None:
            drawn = torch.randn(*shape, generator=draw, dtype=torch.float64) * scale
            # Rounded to the tested dtype first, for the exact computation too.
            return drawn.to(kind).to(device).requires_grad_() if wanted else None

        T, A, E, D, F = self.T, self.A, self.E, self.D, self.F
        kind = torch.promote_types(dtype, torch.float32)
        x, routing, up, down = (
            leaf(T, D),
            leaf(T, A, kind=kind),
            leaf(E, F, D, scale=D**-0.5),
            leaf(E, F, D, scale=F**-0.5),
        )
        if self.across and down is not None:
            down = down.detach().mT.contiguous().mT.requires_grad_()
        return [
            x, routing, up, down,
            leaf(E, F, D, scale=D**-0.5, wanted=self.gated), leaf(E, F, wanted=self.biased),
            leaf(E, F, wanted=self.biased and self.gated), leaf(E, D, wanted=self.biased),
        ]  # fmt: skip


def routed_experts(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An implementation of "routed_experts" as a function of a case and its leaves."""

    def of(case: Case, x: Tensor, routing: Tensor, *stacks: Any) -> Tensor:
        order_R, ends_E = permute.sort(case.ids().to(x.device), case.E, case.rows())
        return run(x, order_R, ends_E, routing, Weights(*stacks), case.activation)

    return of


def routed_in_parts(run: Callable[..., Tensor], parts: int = 3) -> Callable[..., Tensor]:
    """ "routed_experts_deferred_wgrad", called for each third of the tokens, some of which may be empty."""

    def of(case: Case, x: Tensor, routing: Tensor, *stacks: Any) -> Tensor:
        later, out = DeferredWgrad(Weights(*stacks)), list[Tensor]()
        cuts = [case.T * i // parts for i in range(parts + 1)]
        for start, end in itertools.pairwise(cuts):
            order_R, ends_E = permute.sort(case.ids()[start:end].to(x.device), case.E)
            out.append(run(x[start:end], order_R, ends_E, routing[start:end], later, case.activation))
        assert not later.pending
        return torch.cat(out)

    return of


def experts_of_rows(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An experts implementation on sorted rows, between the reference gather and combine."""

    def of(case: Case, x: Tensor, routing: Tensor, *stacks: Any) -> Tensor:
        order_R, ends_E = permute.sort(case.ids().to(x.device), case.E, case.rows())
        x_RD = permute.gather(x, order_R, case.A)
        y_RD = run(x_RD, ends_E, Weights(*stacks), case.activation)
        assert not len(order_R) or not y_RD[int(ends_E[-1]) :].any(), "rows without an expert must be 0"
        return permute.combine(y_RD, order_R, routing)

    return of


def experts_with_dropout(run: Callable[..., Tensor], rate: float = 0.3) -> Callable[..., Tensor]:
    """An implementation of "dropout_experts", between the reference gather and combine."""

    def of(case: Case, x: Tensor, routing: Tensor, *stacks: Any) -> Tensor:
        order_R, ends_E = permute.sort(case.ids().to(x.device), case.E, case.rows())
        row_TA = choice_hash(torch.tensor(77, device=x.device), torch.arange(case.T, device=x.device) + 5, case.A)
        hidden = HiddenDropout(
            row_TA.flatten()[order_R], hidden_hash(torch.arange(3, 3 + case.F, device=x.device)), rate
        )
        y_RD = run(permute.gather(x, order_R, case.A), ends_E, Weights(*stacks), case.activation, hidden)
        assert not len(order_R) or not y_RD[int(ends_E[-1]) :].any(), "rows without an expert must be 0"
        return permute.combine(y_RD, order_R, routing)

    return of


def quantise_experts(weights: Weights, kind: Kind, group: int) -> QuantisedWeights:
    """Quantise each expert's matrices like dense layers, W_down with outputs first."""

    def stack(w_ENK: Tensor) -> Quantised:
        made = [quantise(w, kind, group) for w in w_ENK]
        values, scales = (torch.stack([one[i] for one in made]) for i in (1, 2))
        return made[0]._replace(values=values, scales=scales)

    up, down, gate, *biases = weights
    return QuantisedWeights(stack(up), stack(down.mT), None if gate is None else stack(gate), *biases)


def dequantise_experts(weights: QuantisedWeights, dtype: torch.dtype) -> Weights:
    """The dequantised weights."""

    def stack(w: Quantised) -> Tensor:
        return torch.stack([dequantise(w.matrix(e), dtype) for e in range(len(w.values))])

    up, down, gate, *biases = weights
    biases = [None if b is None else b.to(dtype) for b in biases]
    return Weights(stack(up), stack(down).mT, None if gate is None else stack(gate), *biases)


def gradients(
    run: Callable[..., Tensor], case: Case, dtype: torch.dtype, device: str = "cpu", values: torch.dtype | None = None
) -> dict[str, Tensor]:
    """y and every gradient, with inputs rounded to ``values`` (default ``dtype``)."""
    leaves = case.leaves(values or dtype, device)
    leaves = [None if w is None else w.detach().to(torch.promote_types(dtype, w.dtype)) for w in leaves]
    leaves = [None if w is None else w.requires_grad_() for w in leaves]
    y = run(case, *leaves)
    assert y.dtype == dtype
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y))
    found = {"y": y.detach()}
    for name, leaf in zip(NAMES[1:], leaves, strict=True):
        if leaf is not None:
            found[name] = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    return found

"""The C++ kernel of a mixture of experts computes what the router and the experts compute in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade.config import ModelConfig, MoeConfig
from colonnade.kernels import norm as norm_reference
from colonnade.kernels.cpu import experts, kernels, library
from colonnade.kernels.cpu.experts import SoftmaxRouter, experts_step
from colonnade.kernels.experts.quantised import QuantisedWeights
from colonnade.kernels.experts.reference import ACTIVATIONS, Weights
from colonnade.kernels.linear.quantise import Quantised, can_block, dequantise, quantise, to_blocks
from colonnade.kernels.linear.reference import NormWeights
from colonnade.kernels.routing import scores, top_experts
from colonnade.model import Transformer, fused_block, initialise
from colonnade.model.moe.routing_context import LayerRouting
from tests.guard_pages import guarded
from tests.unit.test_cpu_kernels import instruction_sets, native, rows, threads  # noqa: F401 - fixtures

E, A = 5, 3
FORMATS = ["stored", "int8", "int4"]


def stack_of(format: str, *shape: int, seed: int) -> Tensor | Quantised:
    w = rows(*shape, seed=seed) / shape[2] ** 0.5
    if format == "stored":
        return guarded(w)
    parts = [quantise(each, format, 32) for each in w]  # type: ignore[arg-type]
    q = parts[0]._replace(values=torch.stack([p.values for p in parts]), scales=torch.stack([p.scales for p in parts]))
    q = to_blocks(q) if can_block(q) else q
    return q._replace(values=guarded(q.values), scales=guarded(q.scales))


def weights_of(format: str, width: int, units: int, *, gated: bool, bias: bool) -> Weights | QuantisedWeights:
    up, down = stack_of(format, E, units, width, seed=1), stack_of(format, E, width, units, seed=2)
    gate = stack_of(format, E, units, width, seed=3) if gated else None
    biases = (rows(E, units, seed=4), rows(E, units, seed=5) if gated else None, rows(E, width, seed=6))
    biases = biases if bias else (None, None, None)
    if format == "stored":
        assert isinstance(down, Tensor)
        return Weights(up, down.mT, gate, *biases)  # type: ignore[arg-type]
    return QuantisedWeights(up, down, gate, *biases)  # type: ignore[arg-type]


def product(x: Tensor, w: Tensor | Quantised, bias: Tensor | None) -> Tensor:
    """In float64, of the row that the kernel multiplies."""
    if isinstance(w, Quantised):
        x, w = kernels.round_inputs(x.float(), w).double(), dequantise(w, torch.float64)
    return x.double() @ w.double().T + (0 if bias is None else bias.double())


def exact_step(
    x: Tensor, norm: NormWeights, router: SoftmaxRouter, weights: Weights | QuantisedWeights, activation: str
) -> Tensor:
    normed = norm_reference.norm(x, norm.weight_D, norm.bias_D, norm.eps)
    logits = scores(normed.double(), router.weight_ED, router.bias_E)
    ids, shares = top_experts(logits, logits.softmax(1), router.active, normalise=router.normalise, scale=router.scale)
    act, out = ACTIVATIONS[activation], x.double().clone()
    up, down, gate = weights[:3]
    down = down if isinstance(down, Quantised) else down.mT
    for t in range(len(x)):
        for j, e in enumerate(ids[t].tolist()):
            of = [w if w is None else w.matrix(e) if isinstance(w, Quantised) else w[e] for w in (up, gate, down)]
            up_b, gate_b, down_b = (b if b is None else b[e] for b in weights[3:])
            u = product(normed[t], of[0], up_b)  # type: ignore[arg-type]
            h = act(u) if gate is None else act(product(normed[t], of[1], gate_b)) * u  # type: ignore[arg-type]
            out[t] += shares[t, j] * product(h.float(), of[2], down_b)  # type: ignore[arg-type]
    return out


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", FORMATS)
def test_a_step_matches_the_oracle(native: str, format: str, threads: None) -> None:  # noqa: F811
    for seed, (T, D, F, gated, bias) in enumerate(
        ((1, 64, 48, True, False), (7, 36, 20, True, True), (4, 96, 32, False, True))
    ):
        x, norm = guarded(rows(T, D, seed=seed)), NormWeights(1 + 0.1 * rows(D, seed=7), 1e-5)
        weights = weights_of(format, D, F, gated=gated, bias=bias)
        router = SoftmaxRouter(rows(E, D, seed=8), rows(E, seed=9) if bias else None, A, gated, 1.0 if gated else 1.7)
        assert experts.fits(x, router, weights)
        exact = exact_step(x, norm, router, weights, "silu")
        outputs = []
        for count in (1, 3):
            torch.set_num_threads(count)
            outputs.append(experts_step(x, norm, router, weights, "silu"))
        # A hidden unit that differs in its last bit may round another way: one step of a group's 127.
        limit = 1e-5 if format == "stored" else 4e-3
        assert float((outputs[0].double() - exact).abs().max()) < limit * max(1.0, float(exact.abs().max()))
        assert torch.equal(*outputs)
        for t in range(T):
            assert torch.equal(experts_step(x[t : t + 1].clone(), norm, router, weights, "silu")[0], outputs[0][t])


def test_what_it_does_not_support_is_left_to_torch(native: str) -> None:  # noqa: F811
    x, router = rows(2, 64), SoftmaxRouter(rows(E, 64), None, A, True, 1.0)
    weights: Any = weights_of("stored", 64, 32, gated=True, bias=False)
    assert experts.fits(x, router, weights)
    assert not experts.fits(rows(2, 128)[:, ::2], router, weights)
    assert not experts.fits(x, router._replace(weight_ED=router.weight_ED.double()), weights)
    assert not experts.fits(x, router, weights._replace(down_EFD=weights.down_EFD.contiguous()))
    assert not experts.fits(x.requires_grad_(), router, weights)
    assert library.load() is not None


def test_the_mean_of_an_output_mask_scales_the_weights() -> None:
    """NLLB-MoE masks outputs in training; else they have the mask's mean, in C++ too."""
    moe = MoeConfig(experts=4, active=2, ffn_width=32, output_mask=0.5)
    config = ModelConfig(layers=1, width=64, heads=2, vocab_size=64, ffn_width=64, context=64, moe=moe)
    model = initialise(Transformer(config), seed=0)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    x_TD, block = rows(3, 64, seed=7), model.blocks[0]
    routing = LayerRouting(torch.zeros(3, dtype=torch.long), None, None)
    exact = x_TD + block.ffn(block.norm2(x_TD), 3, routing)[0]
    if fused_block.enable(model) == "native":
        torch.testing.assert_close(fused_block.ffn_step(block, x_TD, in_place=False), exact, rtol=1e-4, atol=1e-4)

"""Every router on a GPU chooses, weighs, drops and loses as on a CPU, in float64."""

from dataclasses import replace

import pytest
import torch

from colonnade.model.moe.capacity import admit
from colonnade.model.moe.losses import load, losses
from colonnade.parallel.axis import SOLO
from tests.routers import EXPERTS, KINDS, moe_of, noise_for, router_of, tokens
from tests.worlds import assert_same

pytestmark = pytest.mark.gpu


def _on(name: str, device: str) -> dict[str, torch.Tensor]:
    moe = moe_of(name, capacity=1.0, priority=True)
    x_TD, tokens_T, index_T, units = tokens()
    noise, router = noise_for(moe, index_T.to(device)), router_of(moe).to(device)
    noise = noise and replace(noise, key=noise.key.to(device))
    x_TD = x_TD.to(device).requires_grad_()
    index_T, units = index_T.to(device), units._replace(of_T=units.of_T.to(device))
    choice, logits_TE = router(x_TD, tokens_T.to(device), index_T, noise, training=True, units=units)
    admitted = admit(choice, index_T, moe, SOLO)
    load_E = load(choice.ids_TA, EXPERTS)
    surrogate, balance, z = losses(choice, load_E, logits_TE, moe, SOLO, units)
    total = surrogate + (admitted.weights_TA * (admitted.ids_TA + 1)).sum()
    if total.requires_grad:
        total.backward()
    found = {"ids": choice.ids_TA, "kept": admitted.ids_TA, "weights": admitted.weights_TA, "balance": balance, "z": z}
    found |= {"x": torch.zeros_like(x_TD) if x_TD.grad is None else x_TD.grad}
    return {what: value.detach().cpu() for what, value in found.items()}


@pytest.mark.parametrize("name", KINDS)
def test_a_gpu_routes_as_a_cpu(name: str) -> None:
    found, reference = _on(name, "cuda"), _on(name, "cpu")
    for what in reference:
        assert_same(found[what].double(), reference[what].double(), what=what)

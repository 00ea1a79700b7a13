"""Routers of every kind with odd sizes, and tokens for them."""

from collections.abc import Callable
from typing import Any

import torch

from colonnade.config import ModelConfig, MoeConfig, RouterConfig
from colonnade.model import Dropout, DropoutRates
from colonnade.model.dropout import BlockDropout
from colonnade.model.moe import Router, TokenGroups
from colonnade.model.moe.router import uses_noise
from colonnade.parallel.axis import SOLO_AXES, Axes

WIDTH, EXPERTS, TOKENS, VOCAB = 10, 6, 29, 40
SEQUENCES = [7, 1, 0, 13, 8]

KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "softmax_tutel_noise": {"noise": 1.5, "balance": "importance"},
    "softmax_biased": {"bias": True, "bias_rate": 0.01, "normalise": False, "scale": 1.7},
    "softmax_groups_max": {"groups": 3, "groups_kept": 2, "group_score": "max"},
    "switch": {"active": 1, "jitter": 0.3},
    "gshard": {"balance": "gshard"},
    "noisy": {"active": 3, "balance": "importance"},
    "noisy_all": {"active": EXPERTS, "balance": "importance"},
    "cosine": {"projection": 7, "noise": 0.5},
    "sigmoid": {"bias_rate": 0.01, "scale": 2.5, "active": 3},
    "sigmoid_groups": {"bias_rate": 0.01, "groups": 2, "groups_kept": 1},
    "expert_choice": {"balance": "choices"},
    "hash": {"active": 3},
    "sequence": {"balance": "sequence"},
    "task": {"tasks": len(SEQUENCES)},
    "topology": {"nodes": 3, "outgoing_fraction": 0.14},
    "topology_no_way_out": {"nodes": 2, "outgoing_fraction": 0.0},
}
"""Router configs; the name up to the underscore is the registry's, except for expert_choice."""


def kind_of(name: str) -> str:
    return name if name == "expert_choice" else name.partition("_")[0]


def moe_of(name: str, **changes: Any) -> MoeConfig:
    """The config of one of :data:`KINDS`."""
    wanted = KINDS[name] | changes
    router = {key: value for key, value in wanted.items() if key in RouterConfig.model_fields}
    rest = {key: value for key, value in wanted.items() if key not in router}
    base = {"experts": EXPERTS, "active": 2, "ffn_width": 8, "z_weight": 0.1, "balance_weight": 0.3}
    return MoeConfig(**(base | rest), router=RouterConfig(kind=kind_of(name), **router))


def config_of(moe: MoeConfig) -> ModelConfig:
    return ModelConfig(vocab_size=VOCAB, layers=1, width=WIDTH, heads=2, head_width=4, ffn_width=8, context=64, moe=moe)


def router_of(moe: MoeConfig, axes: Axes = SOLO_AXES) -> Router:
    """A float64 router with the same weights under any axes, larger than at initialisation."""
    router = Router(config_of(moe), moe, axes, device=torch.device("cpu"), dtype=torch.float64)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_(0, 0.6, generator=generator)
    if router.bias_E is not None:
        router.bias_E.normal_(0, 0.2, generator=generator)
    return router


def tokens(T: int = TOKENS) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TokenGroups]:
    """x_TD, token ids, token indices (not 0 … T − 1), and the sequence of each token."""
    generator = torch.Generator().manual_seed(3)
    x_TD = torch.randn(T, WIDTH, generator=generator, dtype=torch.float64)
    tokens_T = torch.randint(VOCAB, (T,), generator=generator)
    index_T = 100 + 3 * torch.arange(T)
    of_T = torch.repeat_interleave(torch.arange(len(SEQUENCES)), torch.tensor(SEQUENCES))
    return x_TD, tokens_T, index_T, TokenGroups(of_T[:T], len(SEQUENCES))


def noise_for(moe: MoeConfig, index_T: torch.Tensor) -> BlockDropout | None:
    """The router's noise in a training step; None unless it is stochastic."""
    return Dropout.of(11, 4, 1, index_T, DropoutRates()).at(0) if uses_noise(moe) else None


CHOICES = [
    (0, 8, 2),
    (1, 2, 1),
    (7, 1, 1),
    (33, 6, 6),
    (37, 5, 2),
    (50, 60, 8),
    (21, 128, 8),
    (3, 300, 20),
    (300, 8, 2),
]
"""(tokens, experts, choices)"""


def hard_scores(T: int, E: int) -> dict[str, torch.Tensor]:
    """Scores of both signs, ties, infinities and NaN."""
    draw = torch.Generator().manual_seed(T + E)
    normal = torch.randn(T, E, generator=draw)
    lost = torch.rand(T, E, generator=draw) < 0.5
    return {
        "normal": normal,
        "far below": normal - 50,
        "ties": (normal * 2).round() / 2,
        "all equal": torch.full((T, E), -0.0),
        "zeros of both signs": torch.zeros(T, E).copysign(normal),
        "infinite": normal.masked_fill(lost, float("-inf")),
        "none left": torch.full((T, E), float("-inf")),
        "greatest": normal.sign() * torch.finfo().max,
        "nan": normal.masked_fill(lost, float("nan")).where(normal < 1, float("inf")),
        "negative nan": torch.full((T, E), float("nan")).copysign(-torch.ones(())),
    }


def same_choice(run: Callable[..., Any], reference: Callable[..., Any], scores_TE: torch.Tensor, A: int, **how) -> None:
    """Compare two implementations of "top_experts": same distinct experts, the lower index on ties.

    Weights and gradients agree too.
    """
    T, E = scores_TE.shape
    counted_TE = scores_TE.sigmoid().detach().requires_grad_()  # different from the scores that are compared
    ids_TA, weights_TA = run(scores_TE, counted_TE, A, **how)
    again_TE = counted_TE.detach().requires_grad_()
    exact_ids_TA, exact_TA = reference(scores_TE, again_TE, A, **how)
    assert ids_TA.dtype == torch.int64 and ids_TA.shape == weights_TA.shape == (T, A)
    sorted_TA = ids_TA.sort(1).values
    assert not T or ((sorted_TA[:, 0] >= 0).all() and (sorted_TA[:, -1] < E).all() and (sorted_TA.diff() > 0).all())
    assert torch.equal(ids_TA, exact_ids_TA)
    torch.testing.assert_close(weights_TA, exact_TA, rtol=16 * torch.finfo(scores_TE.dtype).eps, atol=0, equal_nan=True)
    g_TA = torch.rand(T, A, generator=torch.Generator().manual_seed(1)).to(weights_TA)
    for weights in (weights_TA, exact_TA):
        weights.backward(g_TA)
    largest = float(again_TE.grad.nan_to_num().abs().max().clamp(min=1)) if T else 1.0
    torch.testing.assert_close(counted_TE.grad, again_TE.grad, rtol=1e-5, atol=1e-6 * largest, equal_nan=True)

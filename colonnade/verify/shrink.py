"""A model's small likeness: the same choices and the same ratios, in sizes that a laptop takes through forty plans.

What can go wrong in a layout is decided by how heads, hidden units and vocabulary divide, by norms, biases, ties and
windows; not by how wide a head is. So heads and key/value heads stay, head width and hidden width shrink together, the
vocabulary becomes a number that divides by nothing, and the depth just feeds the deepest pipeline.
"""

import math

from colonnade.config import ModelConfig, MoeConfig

HEAD_WIDTH, VOCABULARY, CONTEXT = 4, 211, 64
LEAST_HIDDEN = 57
"""From here on no rank of 8 or fewer is left without hidden units."""
EXPERTS, EXPERT_WIDTH = 16, 24
"""Experts at most, and hidden units of each: they divide over 2, 3, 4 and 8 ranks."""


def shrink(model: ModelConfig, layers: int) -> ModelConfig:
    """``model`` with ``layers`` blocks and heads of :data:`HEAD_WIDTH`."""
    narrower = min(1.0, HEAD_WIDTH / model.head_width)
    # Odd, so that no tensor-parallel degree divides it: the uneven case holds for the even ones too.
    hidden = max(model.heads, LEAST_HIDDEN, round(model.ffn_width * narrower)) | 1
    moe = model.moe and _fewer_experts(model.moe)
    return model.but(
        layers=layers,
        head_width=round(model.head_width * narrower),
        width=max(2, round(model.width * narrower) // 2 * 2),
        ffn_width=hidden,
        moe=moe,
        latent=model.latent and model.latent.but(kv_rank=7, q_rank=model.latent.q_rank and 9, rope_width=2, v_width=3),
        vocab_size=min(model.vocab_size, VOCABULARY),
        context=CONTEXT,
        window=None if model.window is None else min(model.window, 7),
        window_from_layer=min(model.window_from_layer, layers - 1),
        top=model.top if model.causal or model.predicts_masked else "pretraining",  # verify trains, on tokens
        classes=0,
    )


def _fewer_experts(moe: MoeConfig) -> MoeConfig:
    """The same choices among at most :data:`EXPERTS` experts, in the same groups as far as there are so many."""
    experts, router = min(moe.experts, EXPERTS), moe.router
    groups = math.gcd(experts, router.groups)
    kept = min(router.groups_kept, groups)
    return moe.but(
        experts=experts,
        active=min(moe.active, kept * (experts // groups)),
        ffn_width=EXPERT_WIDTH,
        shared_width=moe.shared_width and EXPERT_WIDTH + 1,
        first=min(moe.first, 1),
        # Verify's texts are of no task.
        router=router.but(groups=groups, groups_kept=kept, task=0 if router.kind == "task" else router.task),
    )

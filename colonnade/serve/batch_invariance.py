"""A request's tokens to the last bit the same, whoever else is served at the time (``serve.batch_invariant``).

Libraries choose how to add up by the number of rows, so that a logit's last bits depend on the batch, and with them now
and then a token. What is promised here: the bits of a request's logits are a function of its own tokens, on one device
with one number of threads; so its text, greedy or drawn, does not depend on company, order of arrival, shared prefixes,
preemption, or where its prompt was cut into chunks.

    CPU    a pass of T tokens is T passes of one token: every library call has the same shape and aligned operands
           for any batch, and attention the shape of the request's own past. No promise of a library is needed
    GPU    products, norms and attention by kernels of ours whose tiles do not depend on the number of rows
           (:mod:`~colonnade.kernels.linear.triton_batch_invariant`, …); all else works number by number
"""

import torch

from colonnade.errors import ConfigError
from colonnade.model import Transformer
from colonnade.model.linear import Linear
from colonnade.model.norm import HeadsNorm, Norm
from colonnade.model.weight_only_quant import kind_of
from colonnade.serve.scheduler import Slice, Work

WIDEST = 256
"""Heads that the attention of fixed cuts takes."""


def check_ranks(*, tp: int, cp: int) -> None:
    """Raise :class:`ConfigError` for a model that lies on more than one rank."""
    for name, size in (("tp", tp), ("cp", cp)):
        if size > 1:
            raise ConfigError(
                f"serve.batch_invariant is for one rank, and this model lies on {name}={size}: a sum over "
                f"ranks would have to be of one order too; use --plan.{name} 1, or leave it out"
            )


def prepare(model: Transformer) -> str:
    """Have ``model`` compute so, for good, and name the attention that does; :class:`ConfigError` where it cannot."""
    config = model.config
    check_ranks(tp=model.axes.tp.size, cp=model.axes.cp.size)
    if next(model.parameters()).device.type == "cpu":
        return "reference"
    missing = {
        "experts": config.moe is not None,
        "latent attention": config.latent is not None,
        f"heads wider than {WIDEST}": config.head_width > WIDEST,
        f"weights in {kind_of(model)}": kind_of(model) is not None,
        "float64": next(model.parameters()).dtype == torch.float64,
    }
    if found := [what for what, there in missing.items() if there]:
        raise ConfigError(
            f"serve.batch_invariant has no kernels for {' and '.join(found)} on a GPU; use --device cpu, or leave it "
            "out"
        )
    for module in model.modules():
        if isinstance(module, Linear | Norm | HeadsNorm):
            module.kernels = "batch_invariant"
    model.kernels = "batch_invariant"
    return "batch_invariant"


def one_by_one(work: Work, page_tokens: int) -> list[Work]:
    """``work`` as passes of one token each; nobody runs before those whose pages it shares."""
    return [
        Work((Slice(piece.start + i, (token,), piece.pages[: (piece.start + i) // page_tokens + 1], draw),))
        for piece in work.slices
        for i, token in enumerate(piece.tokens)
        for draw in [piece.draw if i == len(piece.tokens) - 1 else None]
    ]

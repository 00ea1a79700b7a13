"""Batch invariance: a request's logits are bitwise independent of the rest of the batch (``serve.batch_invariant``).

Libraries choose the order of a sum by the number of rows, so the last bits of a logit depend on the batch, and
sometimes a token does too. With ``serve.batch_invariant`` the bits of a request's logits depend only on its own tokens,
on one device with one number of threads; so its text, greedy or sampled, does not depend on other requests, order of
arrival, shared prefixes, preemption, or how its prompt was split into chunks.

Our kernels compute a row in the same order whatever the other rows are (:mod:`colonnade.model.batch_invariant`). Models
without such kernels, on a CPU, run a pass of T tokens as T passes of one token: every library call has the same shape
and aligned operands for any batch, and attention the shape of the request's own past. This relies on no guarantee of a
library.
"""

from colonnade.config import ModelConfig
from colonnade.errors import ConfigError
from colonnade.model import Transformer, batch_invariant
from colonnade.serve.work import Slice, Work


def check_ranks(*, tp: int, cp: int) -> None:
    """Raise :class:`ConfigError` for a model on more than one rank."""
    for name, size in (("tp", tp), ("cp", cp)):
        if size > 1:
            raise ConfigError(
                f"serve.batch_invariant is for one rank, and this model is on {name}={size}: sums over ranks have no "
                f"fixed order; use --plan.{name} 1, or remove serve.batch_invariant"
            )


def make_batch_invariant(model: Transformer) -> str:
    """Switch ``model`` to batch-invariant kernels permanently, and return the name of its attention implementation.

    "reference" is for a model that runs token by token. Raises :class:`ConfigError` for a model without such kernels
    on a GPU.
    """
    check_ranks(tp=model.axes.tp.size, cp=model.axes.cp.size)
    if not batch_invariant.has_kernels(model):
        return "reference"
    batch_invariant.select_kernels(model)
    return batch_invariant.NAME


def split_into_single_tokens(work: Work, page_tokens: int) -> list[Work]:
    """``work`` as passes of one token each; a request runs after those that it shares pages with."""
    passes = []
    for piece in work.slices:
        for i, token in enumerate(piece.tokens):
            pages = piece.pages[: (piece.start + i) // page_tokens + 1]
            args = piece.sample_args if i == len(piece.tokens) - 1 else None
            targets = piece.targets[i : i + 1]
            each = Slice(piece.start + i, (token,), pages, args, targets=targets, alternatives=piece.alternatives)
            passes.append(Work((each,)))
    return passes


def batching_note(config: ModelConfig) -> str:
    """A note about experts with results that depend on the other tokens of a batch; empty for other models."""
    moe = config.moe
    if moe is not None and moe.router.kind == "expert_choice":
        return "note: router expert_choice chose among all tokens of a sequence in training; here it sees one at a time"
    if moe is not None and moe.capacity:
        return (
            f"note: experts with a capacity (factor {moe.capacity:g}) drop tokens when a batch has too many for one "
            "expert, so requests affect each other; --experts.capacity off drops none"
        )
    return ""

"""The tensor side of a draft model: opened and checked before the target is loaded, loaded on rank 0, run there.

open_draft          refuses a model that cannot draft for the target, before any weights are read
load_draft          the whole model on rank 0, in the dtype and weight format of the target
build_draft_model   its runner and cache behind a :class:`~colonnade.serve.draft_model.DraftModel`
"""

from colonnade.checkpoint.load_model import DType, OpenedModel, load_model, open_for_plan
from colonnade.config import ModelConfig, Plan, ServeConfig
from colonnade.config.expert_overrides import check_generates
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, ConfigError
from colonnade.model import KVCache, Transformer
from colonnade.model.weight_only_quant import weight_bytes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve.draft_model import DraftModel
from colonnade.serve.draft_planner import PassTimes
from colonnade.serve.model_runner import build_runner
from colonnade.serve.page_pool import PagePool
from colonnade.serve.resolve_config import EngineTraits, draft_config

OTHER_TOKENS = 0.01
"""Share of the target's tokens that may differ in the draft model: added ones, such as those of a chat template."""

CPU_ROW_SHARE = 0.25
"""On a CPU a pass takes about this much longer per row: SmolLM2-135M 34 ms for 1 row, 84 ms for 8, on one core."""


def open_draft(serve: ServeConfig, target: ModelConfig, tokenizer: Tokenizer | None) -> OpenedModel:
    """Open the model that ``serve.draft`` names, without its weights; ``tokenizer`` is the target's.

    Raises :class:`ConfigError` if there is none, if it does not generate text, or if its vocabulary differs from the
    target's.
    """
    assert serve.draft is not None, "the caller has checked it"
    name = f"--serve.draft {serve.draft}"
    try:
        opened = open_for_plan(serve.draft, Plan(), weights=serve.weights, weight_group=serve.weight_group)
    except CheckpointError as error:
        raise ConfigError(f"{name}: {error}; or use --serve.draft ngram") from None
    check_generates(opened.config, name)
    _check_vocabulary(name, opened, target.vocab_size, tokenizer)
    return opened


def _check_vocabulary(name: str, draft: OpenedModel, vocab_size: int, ours: Tokenizer | None) -> None:
    """Raise :class:`ConfigError` unless the ids of both models mean the same tokens. Padded ids do not count."""
    theirs, sizes = Tokenizer.from_model(draft.tokenizer_source), (vocab_size, draft.config.vocab_size)
    remedy = "use a model with the served model's tokenizer, or remove --serve.draft"
    if ours is None or theirs is None:
        if sizes[0] != sizes[1]:
            raise ConfigError(
                f"{name} has a vocabulary of {sizes[1]:,} tokens, and the served model one of {sizes[0]:,}; {remedy}"
            )
        return
    tokens = [(i, ours.token(i), theirs.token(i)) for i in range(sizes[0])]
    others = [each for each in tokens if each[1] is not None and each[1] != each[2]]
    known = sum(token is not None for _, token, _ in tokens)
    if len(others) > OTHER_TOKENS * known:
        i, here, there = others[0]
        raise ConfigError(
            f"{name} has a different vocabulary: {len(others):,} of the served model's {known:,} tokens differ, such "
            f"as {i}, which is {here!r} and there {there!r} (vocabularies of {sizes[0]:,} and {sizes[1]:,} tokens); "
            f"{remedy}"
        )


def load_draft(
    opened: OpenedModel, serve: ServeConfig, context: DistributedContext, dtype: DType
) -> Transformer | None:
    """The draft model on rank 0 of ``context``, whole; None on other ranks."""
    if context.rank:
        return None
    assert serve.draft is not None, "the caller has opened it"
    solo = DistributedContext.solo(context.device)
    return load_model(opened, solo, dtype, serve.draft, None, serve.weights, serve.weight_group)


def build_draft_model(
    draft: Transformer, cache: KVCache, target: Transformer, pool: PagePool, config: ServeConfig
) -> DraftModel:
    """Drafts by ``draft`` for ``target`` in an engine with the resolved ``config``."""
    ratio = weight_bytes(draft) / max(1, weight_bytes(target))
    times = PassTimes(ratio, CPU_ROW_SHARE if cache.k[0].device.type == "cpu" else 0.0)
    return DraftModel(
        build_runner(draft, cache, draft_config(config, EngineTraits.of(draft)), pool.tokens),
        pool,
        times,
        most=config.draft_tokens,
        context=draft.config.context,
        vocab_sizes=(draft.config.vocab_size, target.config.vocab_size),
        max_requests=config.max_requests,
        token_budget=config.budget,
    )

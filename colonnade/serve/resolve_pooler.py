"""Determines whether a server returns text, embeddings or classes for a model, and how hidden states are pooled.

    --serve.task auto    text by a causal model, classes by a model with a class head, else embeddings; embeddings by
                         a model that was tuned for them
    --serve.task embed   embeddings by any model

The pooling is the checkpoint's, or ``--serve.pooling``; without either the mean, for causal models the last token.
"""

from collections.abc import Sequence
from pathlib import Path

from colonnade.checkpoint.hf.pooling import StoredPooling, read_pooling
from colonnade.checkpoint.native import read_class_names, read_embedding_pooling
from colonnade.config import ModelConfig, ServeConfig
from colonnade.config.expert_overrides import check_generates
from colonnade.config.serve import ClassActivation, Pooling
from colonnade.errors import CheckpointError, ConfigError, PlanError
from colonnade.serve.pooler_spec import PoolerSpec


def resolve_pooler(model: ModelConfig, folder: Path, serve: ServeConfig, name: str, *, cp: int) -> PoolerSpec | None:
    """The pooler of the model ``name`` in ``folder`` over ``cp`` context ranks; None if the server generates text.

    Raises :class:`ConfigError` and :class:`PlanError` for settings that contradict the model, and
    :class:`CheckpointError` for files that describe a pooling that is not implemented.
    """
    tuned = read_embedding_pooling(folder)
    if serve.task == "generate" or (serve.task == "auto" and model.causal and tuned is None):
        check_generates(model, name)
        if serve.pooling is not None:
            raise ConfigError(
                f"serve.pooling is {serve.pooling}, but applies to embeddings only: {name} is served to generate "
                "text; add --serve.task embed, or remove it"
            )
        return None
    if cp > 1:
        raise PlanError(
            f"without generation there is no key/value cache to share over cp={cp} ranks; use --plan.tp, or one "
            "server per replica"
        )
    if serve.batch_invariant:
        raise ConfigError("serve.batch_invariant applies to generation only; remove it")
    if model.task_head == "classes" and serve.task == "auto" and tuned is None:
        stored = read_pooling(folder, kind=False)
        return _classifier(model, stored.labels or read_class_names(folder), stored.activation, serve)
    stored = StoredPooling(tuned) if tuned is not None else read_pooling(folder, kind=serve.pooling is None)
    default: Pooling = "last" if model.causal else "mean"
    normalize = True if stored.normalize is None else stored.normalize
    context = min(model.context, stored.max_tokens or model.context)
    return PoolerSpec("embed", model.width, context, serve.pooling or stored.kind or default, normalize)


def _classifier(
    model: ModelConfig, names: Sequence[str], stored: ClassActivation | None, serve: ServeConfig
) -> PoolerSpec:
    if serve.pooling is not None:
        raise ConfigError(
            f"serve.pooling is {serve.pooling}, but this model's class head has its own pooler; remove it, or "
            "add --serve.task embed for embeddings"
        )
    labels = tuple(names) or tuple(f"LABEL_{i}" for i in range(model.classes))
    if len(labels) != model.classes:
        raise CheckpointError(f"the checkpoint names {len(labels)} classes, but the model has {model.classes}")
    activation = stored or "softmax"
    if model.classes == 1 and activation == "softmax":
        activation = "sigmoid"  # the softmax of one logit is always 1
    return PoolerSpec("classify", model.classes, model.context, labels=labels, activation=activation)

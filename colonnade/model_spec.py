"""A model to run, as the command line names it. Importing this module does not import torch.

The HTTP process of a server only passes it on: the engine's process opens the model and loads its weights.
"""

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from colonnade.config import AS_TRAINED, Device, ExpertsConfig, Plan, ServeConfig
from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade import api
    from colonnade.checkpoint.load_model import DType, OpenedModel
    from colonnade.checkpoint.packed_weights import PackedUse
    from colonnade.data.tokenizer import Tokenizer
    from colonnade.model import Transformer
    from colonnade.parallel.distributed_context import DistributedContext
    from colonnade.serve.pooler_spec import PoolerSpec
    from colonnade.serve.worker import Load


TEXT_PACKAGES = ("smollm2", "minilm")
"""Packaged models that read text."""


@dataclass(frozen=True)
class ModelSpec:
    """A model to run: its source, layout, device, dtype, and expert settings."""

    model: str
    plan: Plan
    serve: ServeConfig
    device: Device
    dtype: "DType"
    experts: ExpertsConfig = AS_TRAINED

    def open_loader(self) -> "Load":
        """Open the model, and return a picklable function that loads it in an engine process.

        Every process then loads the same checkpoint, even if a run writes a newer one meanwhile. Raises what
        :meth:`open` and :func:`~colonnade.serve.resolve_pooler.resolve_pooler` raise.
        """
        from colonnade.serve.resolve_pooler import resolve_pooler

        opened = self.open()
        pooler = resolve_pooler(opened.config, opened.path, self.serve, self.model, cp=self.plan.cp)
        spec = replace(self, model=str(opened.path))
        if draft := self.open_draft(opened):
            if pooler is not None:
                raise ConfigError(
                    f"serve.draft is {self.serve.draft}, but drafts need text generation, and {self.model} is not "
                    "served for that; remove it"
                )
            spec = replace(spec, serve=self.serve.replace(draft=str(draft.path)))
        if pooler is not None:
            return functools.partial(load_pooling, spec, pooler)
        return functools.partial(load_checked, spec, OpenedOnce(opened))

    def open_generative(self) -> "OpenedModel":
        """Like :meth:`open`; raises :class:`ConfigError` for a model that cannot generate text."""
        from colonnade.config.expert_overrides import check_generates

        opened = self.open()
        check_generates(opened.config, self.model)
        return opened

    def open(self) -> "OpenedModel":
        """Open the model without its weights, and check the layout and the expert and serving settings."""
        from colonnade.checkpoint.load_model import open_for_plan
        from colonnade.config.expert_overrides import check_task
        from colonnade.serve.batch_invariance import check_ranks

        opened = open_for_plan(self.model, self.plan, self.experts, self.serve.weights, self.serve.weight_group)
        check_task(opened.config, opened.tasks)
        self.serve.check(opened.config)
        if self.serve.batch_invariant:
            check_ranks(tp=self.plan.tp, cp=self.plan.cp)
        if self.serve.adapters:
            from colonnade.serve.adapters import check_adapters

            check_adapters(self.serve, opened.config)
        return opened

    def reads_audio(self) -> bool:
        """Whether the model transcribes recordings."""
        if not _may_read_audio(Path(self.model)):
            return False
        encoder = self.open().config.encoder
        return encoder is not None and encoder.reads == "audio"

    def open_draft(self, target: "OpenedModel") -> "OpenedModel | None":
        """Open the draft model, if there is one; raises :class:`ConfigError` if it cannot draft for ``target``."""
        if self.serve.draft_model is None:
            return None
        from colonnade.data.tokenizer import Tokenizer
        from colonnade.serve.draft_runner import open_draft

        return open_draft(self.serve, target.config, Tokenizer.from_model(target.tokenizer_source))

    def load(self, context: "DistributedContext | None" = None) -> "api.Model":
        """Load the model, on every rank of its plan; ``context`` is an existing distributed context."""
        from colonnade import api

        return api.load(
            self.model, plan=self.plan, dtype=self.dtype, device=self.device, context=context, experts=self.experts,
            weights=self.serve.weights, weight_group=self.serve.weight_group,
        )  # fmt: skip

    def load_opened(self, opened: "OpenedModel", context: "DistributedContext") -> "api.Model":
        """Load the model, which :meth:`open` has opened, perhaps from packed weights."""
        from colonnade import api

        return api.load_opened(
            opened, self.plan, self.model, dtype=self.dtype, device=self.device, context=context, experts=self.experts,
            weights=self.serve.weights, weight_group=self.serve.weight_group, packed=self.packed_use,
        )  # fmt: skip

    @property
    def packed_use(self) -> "PackedUse":
        """How an engine takes packed weights: replicas share a file's pages; one engine reads it into huge pages."""
        if self.serve.batch_invariant:  # its kernels read weights by row
            return "never"
        return "copied" if self.serve.replicas == 1 else "mapped"


def _may_read_audio(model: Path) -> bool:
    """Whether the files of ``model`` could be those of an audio model; reads JSON only, without torch."""
    if model.is_dir():
        configs = [*model.glob("*.json"), *model.glob("*/*.json")]
        names = {path.name for path in configs}
        if not names & {"config.json", "checkpoint.json"} or "adapter_config.json" in names:
            return True
        other_format = (model / "model.bin").is_file()  # CTranslate2, whose config names no architecture
        described = (path.read_bytes().lower() for path in configs if path.name in ("config.json", "checkpoint.json"))
        return other_format or any(b"audio" in text or b"whisper" in text for text in described)
    return model.suffix != ".gguf" and str(model) not in TEXT_PACKAGES


class OpenedOnce:
    """An opened model for the first load in the process that opened it; other processes open it for themselves.

    Opening reads a GGUF file's vocabulary, which takes 0.2 s and 10 MB for SmolLM2, so that it is not kept.
    """

    def __init__(self, opened: "OpenedModel | None"):
        self._opened = opened

    def __reduce__(self) -> "tuple[type[OpenedOnce], tuple[None]]":
        return OpenedOnce, (None,)

    def take(self) -> "OpenedModel | None":
        """The model, or None if it was taken, or opened in another process."""
        opened, self._opened = self._opened, None
        return opened


def load_checked(
    spec: ModelSpec, once: OpenedOnce, context: "DistributedContext"
) -> "tuple[Transformer, Tokenizer, Transformer | None]":
    """Load the model, on rank 0 also its draft model, in an engine process; checks the memory before reading."""
    from colonnade.checkpoint.load_model import resolve_dtype
    from colonnade.serve.draft_runner import load_draft
    from colonnade.serve.memory_advice import check_memory
    from colonnade.serve.memory_estimate import EngineSpec

    dtype, opened, plan = resolve_dtype(context.device, spec.dtype), once.take() or spec.open(), spec.plan
    draft = spec.open_draft(opened)
    ranks = {"tp": plan.tp, "cp": plan.cp, "ep": plan.ep, "etp": plan.etp}
    serve, formats = spec.serve, {}
    if serve.weights in ("stored", "file") and opened.formats:
        serve, formats = serve.replace(weights=opened.weights), opened.formats
    check_memory(
        EngineSpec(
            opened.config, serve, dtype, context.device, **ranks, layers_on_device=spec.experts.layers_on_device,
            formats=formats, draft=None if draft is None else draft.config,
        )
    )  # fmt: skip
    model = spec.load_opened(opened, context)
    drafting = None if draft is None else load_draft(draft, spec.serve, context, spec.dtype)
    return model.transformer, model.tokenizer, drafting


def load_pooling(
    spec: ModelSpec, pooler: "PoolerSpec", context: "DistributedContext"
) -> "tuple[Transformer, Tokenizer, PoolerSpec]":
    """Load a model whose hidden states are pooled; there is no cache, and loading checks the weights' memory."""
    model = spec.load(context)
    return model.transformer, model.tokenizer, pooler

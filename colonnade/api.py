"""What people hold: load a model from anywhere, ask it, save it.

    model = colonnade.load("smollm2")
    model.generate("The capital of France is", max_tokens=8, temperature=0)
    model.chat("What is the capital of France?", max_tokens=32)
    colonnade.save(model, "folder", format="hf")

``load`` takes a Colonnade checkpoint (or a run folder: its newest one), a Hugging Face folder, a GGUF file, a hub id,
or ``smollm2`` and ``minilm`` (an encoder) where the packages that carry them are installed. The same call loads a
rank's share inside a launched group: ``load(path, plan=Plan(tp=2))``.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, cast, overload

import torch
from torch import Tensor

from colonnade.checkpoint import native
from colonnade.checkpoint.hf.write import write_hf
from colonnade.checkpoint.open_model import OpenedModel, locate, open_model
from colonnade.config import (
    AS_TRAINED,
    Device,
    ExpertsConfig,
    ModelConfig,
    Plan,
    ServeConfig,
    WeightGroup,
    Weights,
    check_choice,
    count,
    dtype_name,
    shown,
)  # fmt: skip
from colonnade.config.feature_checks import check_kind
from colonnade.config.feature_checks import check_quantised as check_weights
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, ConfigError, PlanError, RequestError
from colonnade.model import Hidden, Packed, Pooled, Rows, Stream, Transformer
from colonnade.model.head import Head
from colonnade.model.moe import OffloadedExperts, experts_of
from colonnade.model.moe.router import rule
from colonnade.model.score import Score, score
from colonnade.model.weight_memory import WeightMemory
from colonnade.model.weight_only_quant import build, in_place, kind_of
from colonnade.parallel.axis import world_axis
from colonnade.parallel.device_memory import free_host_bytes, usable_bytes
from colonnade.parallel.distributed_context import DistributedContext, choose_device
from colonnade.parallel.launch import launched
from colonnade.parallel.symmetric_memory import with_small_allreduce
from colonnade.serve.engine import Engine as _Engine
from colonnade.serve.prompts import Message, is_conversation, is_list_of_prompts, token_ids
from colonnade.serve.sampling_params import SamplingParams

DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
Format = Literal["hf", "colonnade"]
IDS = "a list of token ids, such as model.tokenizer.encode(text)"


class Model:
    """A transformer with its tokenizer, on the ground it was loaded for. Use :func:`load` to make one."""

    def __init__(
        self,
        transformer: Transformer,
        tokenizer: Tokenizer | None,
        context: DistributedContext,
        source: str,
        tasks: Sequence[str] = (),
    ):
        self.transformer, self.context, self.source = transformer, context, source
        self.tasks = tuple(tasks)
        """What the corpus called the tasks of the router 'task', by number."""
        self._tokenizer = tokenizer
        self._exit = ExitStack()
        self._engine: Engine | None = None

    def __repr__(self) -> str:
        """``Model('runs/a', llama, 134,515,008 parameters, float32 with weights in int8, tp=2 on cpu)``."""
        dtype = str(next(self.transformer.parameters()).dtype).removeprefix("torch.")
        kept = f" with weights in {kind}" if (kind := kind_of(self.transformer)) else ""
        what = f"{self.config.family}, {count(self.config.parameters, 'parameter')}, {dtype}{kept}"
        return f"Model({self.source!r}, {what}, {self.context.plan} on {self.context.device.type})"

    @property
    def config(self) -> ModelConfig:
        """The sizes and choices of the transformer."""
        return self.transformer.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises :class:`CheckpointError` for a model that came without one."""
        if self._tokenizer is None:
            raise CheckpointError(f"{self.source} has no tokenizer; put its tokenizer.json beside the weights")
        return self._tokenizer

    @torch.no_grad()
    def logits(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """logits_TV of one sequence of T token ids; of a masked-token model, with ``[MASK]`` where it shall fill in.

        Raises :class:`RequestError` for an encoder without a top that predicts tokens, and, as all that takes tokens
        does, for none, for more than the context, and for what is no token of the vocabulary.
        """
        if not (self.config.causal or self.config.predicts_masked):
            raise RequestError(f"{self.source} is an encoder that predicts no tokens; ask for hidden(tokens)")
        return self._forward(tokens, None, Rows())

    @torch.no_grad()
    def hidden(self, tokens: Sequence[int] | Tensor, segments: Sequence[int] | Tensor | None = None) -> Tensor:
        """hidden_TD: the last hidden states of one sequence; ``segments`` (0 or 1 a token) for a pair of texts."""
        return self._forward(tokens, segments, Hidden())

    @torch.no_grad()
    def pooled(self, tokens: Sequence[int] | Tensor, segments: Sequence[int] | Tensor | None = None) -> Tensor:
        """The pooled vector of one sequence, (D,); raises :class:`RequestError` for a model without a pooler."""
        if not self.config.has_pooler:
            raise RequestError(f"{self.source} has no pooler; ask for hidden(tokens) and take the mean, or the first")
        return self._forward(tokens, segments, Pooled(torch.zeros(1, dtype=torch.int64, device=self.context.device)))[0]

    def _forward(self, tokens: Sequence[int] | Tensor, segments: Sequence[int] | Tensor | None, head: Head) -> Tensor:
        config, device = self.config, self.context.device
        ids = token_ids(tokens, config.vocab_size, "tokens", IDS)
        tokens_T, T = torch.tensor(ids, device=device), len(ids)
        if config.positions == "learned" and config.context < T:
            raise RequestError(f"{T} tokens are more than the context of {config.context}; give fewer")
        segments_T = None if segments is None else torch.as_tensor(segments, dtype=torch.int64, device=device)
        if segments_T is not None and segments_T.shape != tokens_T.shape:
            raise RequestError(f"{count(segments_T.numel(), 'segment')} for {count(T, 'token')}; give one for each")
        stream = Stream(tokens_T, torch.arange(T, device=device), segments_T)
        return self.transformer(stream, Packed.of([T], device, causal=config.causal), head)

    @overload
    def generate(self, prompt: str, **params: Any) -> str: ...
    @overload
    def generate(self, prompt: Sequence[int] | Tensor, **params: Any) -> list[int]: ...
    @overload
    def generate(self, prompt: list[str] | tuple[str, ...], **params: Any) -> list[str]: ...
    @overload
    def generate(self, prompt: Sequence[Sequence[int]], **params: Any) -> list[list[int]]: ...
    def generate(self, prompt: Any, **params: Any) -> str | list[int] | list[str] | list[list[int]]:
        """The continuation of ``prompt``, text for text and ids for ids; of a list of prompts, a list of them.

        ``params`` are those of :class:`~colonnade.serve.sampling_params.SamplingParams`: max_tokens, temperature,
        top_p, seed, stop and others. Several prompts are batched, and each is answered as it would be alone. Raises
        :class:`~colonnade.errors.RequestError` for a prompt that does not fit.
        """
        each = list(prompt) if (listed := is_list_of_prompts(prompt)) else [prompt]
        found = self._ready.generate(each, SamplingParams.named(params))
        said = [
            one.text if isinstance(asked, str) else list(one.token_ids) for asked, one in zip(each, found, strict=True)
        ]
        return said if listed else said[0]  # type: ignore[return-value] - as the overloads say

    @overload
    def stream(self, prompt: str | Sequence[Message], **params: Any) -> Iterator[str]: ...
    @overload
    def stream(self, prompt: Sequence[int] | Tensor, **params: Any) -> Iterator[int]: ...
    def stream(self, prompt: Any, **params: Any) -> Iterator[str] | Iterator[int]:
        """The same piece by piece: text for a text or a conversation's messages, ids for ids.

        A bad request is refused at once; leaving the loop early cancels the rest.
        """
        ids = self._conversation(prompt) if is_conversation(prompt) else prompt
        reader = self._ready.stream(ids, SamplingParams.named(params))
        if isinstance(prompt, str) or ids is not prompt:
            return (piece.text for piece in reader if piece.text)
        return (piece.token for piece in reader)

    def chat(self, messages: str | Sequence[Message], **params: Any) -> str:
        """The answer to a conversation by the model's chat template; a text is a conversation of one message.

        Messages are ``{"role": "user", "content": "..."}``. Raises :class:`RequestError` for a model without a
        template, and for messages that it refuses.
        """
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        (answer,) = self._ready.generate([self._conversation(said)], SamplingParams.named(params))
        return answer.text

    def _conversation(self, messages: Sequence[Message]) -> list[int]:
        if not is_conversation(messages):
            raise RequestError(f"messages is {shown(messages)}; give a text, or a list of {{'role': …, 'content': …}}")
        return self.tokenizer.encode_chat([dict(message) for message in messages])

    @property
    def _ready(self) -> "Engine":
        """The engine that answers; made for the first question."""
        if self._engine is None:
            self._engine = Engine(self, ServeConfig())
        return self._engine

    def score(self, text: str | list[int], **windows: Any) -> Score:
        """The log-likelihood and perplexity of a text; ``windows`` are :func:`colonnade.model.score.score`'s."""
        tokens = self.tokenizer.encode(text) if isinstance(text, str) else text
        ids = token_ids(tokens, self.config.vocab_size, "the text", "a text, or a list of token ids")
        return score(self.transformer, list(ids), **windows)

    def close(self) -> None:
        """Leave the process group, if loading joined one."""
        self._exit.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Engine(_Engine):
    """The serving engine of a loaded model: ``Engine(model).stream(prompt, SamplingParams(max_tokens=32))``."""

    def __init__(self, model: Model, config: ServeConfig | None = None):
        if not isinstance(model, Model):
            given = shown(model) if isinstance(model, str | Path) else f"a {type(model).__name__}"
            raise ConfigError(f"an Engine serves a loaded model, not {given}; give it colonnade.load(…)")
        if not isinstance(config, ServeConfig | None):
            raise ConfigError(f"an Engine's config is no {type(config).__name__}; give it ServeConfig(…)")
        super().__init__(model.transformer, model.tokenizer, config or ServeConfig())


def load(
    path: str | Path,
    *,
    plan: Plan | None = None,
    dtype: DType | torch.dtype = "auto",
    device: Device | torch.device = "auto",
    context: DistributedContext | None = None,
    experts: ExpertsConfig = AS_TRAINED,
    weights: Weights = "stored",
    weight_group: WeightGroup = 64,
) -> Model:
    """Load a model for inference.

    ``dtype`` is a name or torch's own; auto is float32 on a CPU and bfloat16 on a GPU. With a ``plan`` of more than
    one rank every process of a launched group calls this and gets its share: of the weights over ``tp``, of an
    engine's cache over ``cp`` too (all else context ranks do alike). ``ground`` is for those who already stand on
    one. ``experts`` says what a mixture of experts does otherwise than in training: another A or capacity, for one.
    The model's config says what it does, and so does what :func:`save` writes of it. ``weights`` other than stored
    quantises the matrices while they are read (int4 with a scale for each ``weight_group`` inputs); such a model
    generates and scores, and is not saved.

    Raises :class:`CheckpointError` for anything missing, damaged or unknown, :class:`PlanError` for a layout that the
    model or the world does not allow, :class:`ConfigError` for what its experts cannot do, and, before anything is
    read, for a ``dtype``, a ``device`` or ``weights`` that there are not.
    """
    kept, where = _named_dtype(dtype), cast(Device, str(device))
    check_choice("device", where, Device)
    check_kind(weights, weight_group)
    plan = context.plan if context else plan or Plan()
    found = find(path, plan, experts, weights, weight_group)
    exits = ExitStack()
    if context is None:
        context = _ground(plan, where, exits)
    with exits:
        model = _load(found, context, kept, str(path), experts.resident, weights, weight_group)
        model._exit = exits.pop_all()
        return model


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of anything that :func:`load` takes, of a corpus, or of a tokenizer.json; no weights are read.

    Raises :class:`CheckpointError` or :class:`DataError` for what does not exist or comes without one.
    """
    place = Path(path)
    if not place.exists():
        place = locate(path, weights=False)
    if place.is_dir():
        for folder in (place, place / "tokenizer"):
            if (folder / "tokenizer.json").is_file() or (folder / "merges.txt").is_file():
                return Tokenizer.from_file(folder)
        place = locate(place)
    elif place.suffix == ".json":
        return Tokenizer.from_file(place)
    if (found := Tokenizer.beside(open_model(place).words)) is None:
        raise CheckpointError(f"{path} has no tokenizer; give another model, or a tokenizer.json")
    return found


def _ground(plan: Plan, device: Device, exits: ExitStack) -> DistributedContext:
    if plan.world == 1:
        return DistributedContext.solo(choose_device(plan, device))
    if not launched():
        raise PlanError(
            f"{plan} needs {plan.world} processes and this is one; start the script with "
            f"torchrun --nproc-per-node {plan.world} SCRIPT, or use the command line, which starts them itself"
        )
    return exits.enter_context(DistributedContext.build(plan, device))


def find(
    path: str | Path,
    plan: Plan,
    experts: ExpertsConfig = AS_TRAINED,
    weights: Weights = "stored",
    weight_group: WeightGroup = 64,
) -> OpenedModel:
    """Open the model that ``path`` means and check that ``plan`` can lay it out, before any process starts.

    Raises what :func:`load` raises for a model that is not there, for a plan that does not fit, for ``experts`` told
    to do what they cannot, and for ``weights`` that cannot be quantised so.
    """
    found = open_model(path)
    if plan.world > plan.tp * plan.cp:
        raise PlanError(f"a loaded model is laid over tp and cp ranks only, not over {plan}; load with these only")
    plan.check(found.config)
    check_weights(found.config, weights, weight_group, plan.tp, plan.sh)
    return replace(found, config=_told(found, experts))


def _told(found: OpenedModel, experts: ExpertsConfig) -> ModelConfig:
    """The model whose experts do as they are told."""
    told = experts.of(found.config, found.tasks)
    if told.moe is not None and experts.active is not None:
        # A router that always sends a token to as many says so before any process starts.
        rule(told.moe, otherwise="leave --experts.active out")
    return told


def _load(
    found: OpenedModel,
    context: DistributedContext,
    dtype: DType,
    source: str,
    resident: int | None,
    weights: Weights,
    group: WeightGroup,
) -> Model:
    layers = found.config.moe.layers_among(found.config.layers) if found.config.moe else 0
    resident = None if resident is None or resident >= layers else resident
    home = None if resident is None else torch.device("cpu")
    kept = dtype_on(context.device, dtype)
    on = {"device": context.device, "dtype": kept, "experts_on": home}
    memory = WeightMemory(found.config, kept, context.device, context.plan, resident, weights, group)
    problem = memory.problem(source)
    if context.world > 1:  # a rank that went ahead would take what the others count as free
        world_axis().max_(torch.zeros(()))
    if problem is not None:
        raise problem
    try:
        axes = with_small_allreduce(context.axes.serving(), context.device)
        if weights == "stored":
            transformer, put = Transformer(found.config, axes, **on), in_place
        else:
            transformer, put = build(found.config, axes, **on, kind=weights, group=group)
        found.fill(transformer.eval().requires_grad_(False), context, put)
        if resident is not None:
            OffloadedExperts(experts_of(transformer), resident, context.device)
    except torch.OutOfMemoryError:
        raise memory.refusal(source, usable_bytes(context.device), free_host_bytes()) from None
    return Model(transformer, Tokenizer.beside(found.words), context, source, found.tasks)


def _named_dtype(dtype: DType | torch.dtype) -> DType:
    name = dtype_name(dtype)
    check_choice("dtype", name, DType)
    return cast(DType, name)


def dtype_on(device: torch.device, dtype: DType) -> torch.dtype:
    """The type that ``dtype`` means on ``device``."""
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, dtype)


def save(
    model: Model,
    path: str | Path,
    *,
    format: Format = "colonnade",
    dtype: DType | torch.dtype = "auto",
    shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> Path:
    """Write ``model`` to the folder ``path``, whole or not at all; every rank of its ground calls this.

    ``hf`` is what ``transformers`` loads (``dtype`` and ``shard_bytes`` say how it lies on disk), ``colonnade`` what
    any plan of ours loads. ``overwrite`` replaces a model that is there, once the new one is written. Raises
    :class:`CheckpointError` when the folder exists otherwise, or cannot be written.
    """
    check_choice("format", format, Format)
    dtype = _named_dtype(dtype)
    place = Path(path)
    if kind := kind_of(model.transformer):
        raise ConfigError(
            f"weights in {kind} are made while a model is read, and not saved; load it stored, and save that"
        )
    if format == "hf":
        kept = None if dtype == "auto" else getattr(torch, dtype)
        write_hf(
            model.transformer, place, tokenizer=model._tokenizer, dtype=kept, shard_bytes=shard_bytes,
            overwrite=overwrite,
        )  # fmt: skip
    elif dtype not in ("auto", str(next(model.transformer.parameters()).dtype).removeprefix("torch.")):
        raise ConfigError(f"the colonnade format keeps the weights' own type; load with dtype='{dtype}' and save that")
    else:
        meta = native.Meta(model=model.config, tasks=model.tasks)
        native.save(place, model.transformer, meta, model.context, tokenizer=model._tokenizer, overwrite=overwrite)
    return place

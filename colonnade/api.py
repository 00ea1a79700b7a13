"""The Python interface: load a model from anywhere, generate with it, save it.

    model = colonnade.load("smollm2")
    model.generate("The capital of France is", max_tokens=8, temperature=0)
    model.chat("What is the capital of France?", max_tokens=32)
    colonnade.save(model, "folder", format="hf")

``load`` takes a Colonnade checkpoint (or a run folder: its newest one), a Hugging Face folder, a GGUF file, a hub id,
or ``smollm2`` and ``minilm`` (an encoder) if their packages are installed. In each process of a launched group, the
same call loads this rank's shard: ``load(path, plan=Plan(tp=2))``.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast, overload

import torch
from torch import Tensor

from colonnade.checkpoint import native
from colonnade.checkpoint.adapters import read_adapter
from colonnade.checkpoint.gguf.write import write_gguf
from colonnade.checkpoint.hf.write import write_hf
from colonnade.checkpoint.load_model import (
    DType,
    OpenedModel,
    load_model,
    locate,
    open_for_plan,
    open_model,
    resolve_dtype,
)
from colonnade.checkpoint.packed_weights import PackedUse, load_packed, packable
from colonnade.checkpoint.peft import write_peft
from colonnade.config import (  # fmt: skip
    AS_TRAINED,
    Device,
    ExpertsConfig,
    ModelConfig,
    Plan,
    ServeConfig,
    WeightFormat,
    WeightGroup,
    check_choice,
    dtype_name,
    plural,
    short_repr,
)  # fmt: skip
from colonnade.config.feature_checks import check_weight_format
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, ConfigError, PlanError, RequestError
from colonnade.model import Hidden, Packed, Pooled, Rows, Stream, Transformer
from colonnade.model.output_heads import Head
from colonnade.model.score import Score, score
from colonnade.model.weight_only_quant import quantised_kind
from colonnade.parallel.device_memory import usable_bytes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.launch import launched
from colonnade.serve.draft_runner import load_draft, open_draft
from colonnade.serve.engine import Engine as _Engine
from colonnade.serve.prompts import Message, is_conversation, is_list_of_prompts, token_ids
from colonnade.serve.sampling_params import SamplingParams
from colonnade.serve.worker import open_context

Format = Literal["hf", "colonnade", "gguf"]


class Model:
    """A loaded transformer with its tokenizer; :func:`load` returns it."""

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
        """Names of the corpus's tasks, in the order of the router 'task'."""
        self._tokenizer = tokenizer
        self._exit = ExitStack()
        self._engine: Engine | None = None

    def __repr__(self) -> str:
        """``Model('runs/a', llama, 134,515,008 parameters, float32 with weights in int8, tp=2 on cpu)``."""
        quantised = f" with weights in {kind}" if (kind := quantised_kind(self.transformer)) else ""
        config, dtype = self.config, f"{_dtype_of(self.transformer)}{quantised}"
        what = f"{config.family}, {plural(config.parameters, 'parameter')}, {dtype}"
        return f"Model({self.source!r}, {what}, {self.context.plan} on {self.context.device.type})"

    @property
    def config(self) -> ModelConfig:
        """The transformer's configuration."""
        return self.transformer.config

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; raises :class:`CheckpointError` for a model without one."""
        if self._tokenizer is None:
            raise CheckpointError(
                f"{self.source} has no tokenizer; put its tokenizer.json into the folder of the weights"
            )
        return self._tokenizer

    @torch.no_grad()
    def logits(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """logits_TV of one sequence of T token ids; a masked-token model predicts those that are ``[MASK]``.

        Like all methods that take tokens, raises :class:`RequestError` for an empty sequence, for one over the context
        and for ids outside the vocabulary; also for an encoder without a language-model head.
        """
        if not (self.config.causal or self.config.predicts_masked):
            raise RequestError(f"{self.source} is an encoder and does not predict tokens; use hidden(tokens)")
        return self._forward(tokens, None, Rows())

    @torch.no_grad()
    def hidden(self, tokens: Sequence[int] | Tensor, segments: Sequence[int] | Tensor | None = None) -> Tensor:
        """hidden_TD: the last hidden states of one sequence; ``segments`` (0 or 1 per token) for a pair of texts."""
        return self._forward(tokens, segments, Hidden())

    @torch.no_grad()
    def pooled(self, tokens: Sequence[int] | Tensor, segments: Sequence[int] | Tensor | None = None) -> Tensor:
        """The pooled vector of one sequence, (D,); raises :class:`RequestError` for a model without a pooler."""
        if not self.config.has_pooler:
            raise RequestError(
                f"{self.source} has no pooler; use hidden(tokens) and take the mean, or the first token's vector"
            )
        return self._forward(tokens, segments, Pooled(torch.zeros(1, dtype=torch.int64, device=self.context.device)))[0]

    def _forward(self, tokens: Sequence[int] | Tensor, segments: Sequence[int] | Tensor | None, head: Head) -> Tensor:
        config, device = self.config, self.context.device
        if config.encoder is not None:
            raise RequestError(
                f"{self.source} has an encoder and reads two sequences; use generate(source), or its transformer"
            )
        allowed = "a list of token ids, such as model.tokenizer.encode(text)"
        tokens_T = torch.tensor(token_ids(tokens, config.vocab_size, "tokens", allowed), device=device)
        T = len(tokens_T)
        if config.positions == "learned" and config.context < T:
            raise RequestError(f"{T} tokens are more than the context of {config.context}; pass fewer")
        segments_T = None if segments is None else torch.as_tensor(segments, dtype=torch.int64, device=device)
        if segments_T is not None and segments_T.shape != tokens_T.shape:
            raise RequestError(f"{plural(segments_T.numel(), 'segment')} for {plural(T, 'token')}; pass one per token")
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
        """The continuation of ``prompt``: text for text, ids for ids, a list for a list of prompts.

        ``params`` are those of :class:`~colonnade.serve.sampling_params.SamplingParams`: max_tokens, temperature,
        top_p, seed, stop and others. Several prompts are batched, with the same results as one at a time. Raises
        :class:`~colonnade.errors.RequestError` for a prompt that does not fit.
        """
        prompts = list(prompt) if (is_list := is_list_of_prompts(prompt)) else [prompt]
        completions = self._serving_engine.generate(prompts, _sampling_params(params))
        results = [
            completion.text if isinstance(each, str) else list(completion.token_ids)
            for each, completion in zip(prompts, completions, strict=True)
        ]
        return results if is_list else results[0]  # type: ignore[return-value] - as the overloads say

    @overload
    def stream(self, prompt: str | Sequence[Message], **params: Any) -> Iterator[str]: ...
    @overload
    def stream(self, prompt: Sequence[int] | Tensor, **params: Any) -> Iterator[int]: ...
    def stream(self, prompt: Any, **params: Any) -> Iterator[str] | Iterator[int]:
        """The continuation piece by piece: text for a text or a conversation's messages, ids for ids.

        A bad request is refused immediately; leaving the loop early cancels the rest.
        """
        ids = self._encode_chat(prompt) if is_conversation(prompt) else prompt
        outputs = self._serving_engine.stream(ids, _sampling_params(params))
        if isinstance(prompt, str) or ids is not prompt:
            return (output.text for output in outputs if output.text)
        return (output.token for output in outputs if output.token is not None)

    def chat(self, messages: str | Sequence[Message], **params: Any) -> str:
        """The reply to a conversation, with the model's chat template; a string is a conversation of one message.

        Messages are ``{"role": "user", "content": "..."}``. Raises :class:`RequestError` for a model without a template
        and for messages that the template refuses.
        """
        conversation = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        ids = self._encode_chat(conversation)
        return self._serving_engine.generate([ids], _sampling_params(params))[0].text

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        if not is_conversation(messages):
            raise RequestError(
                f"messages is {short_repr(messages)}; pass a string, or a list of {{'role': …, 'content': …}}"
            )
        return self.tokenizer.encode_chat([dict(message) for message in messages])

    @property
    def _serving_engine(self) -> "Engine":
        """An engine made when it is first used, with a quarter of the free memory, at most, for its cache.

        On a GPU an engine's default is most of the memory; this process may load other models, or train.
        """
        if self._engine is None:
            quarter = usable_bytes(next(self.transformer.parameters()).device) // 4
            self._engine = Engine(self, ServeConfig(cache_bytes=max(1, quarter)))
        return self._engine

    def score(self, text: str | list[int], **windows: Any) -> Score:
        """The log-likelihood and perplexity of a text; ``windows`` are :func:`colonnade.model.score.score`'s."""
        tokens = self.tokenizer.encode(text) if isinstance(text, str) else text
        ids = token_ids(tokens, self.config.vocab_size, "the text", "a string, or a list of token ids")
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
            given = short_repr(model) if isinstance(model, str | Path) else f"a {type(model).__name__}"
            raise ConfigError(f"an Engine serves a loaded model, not {given}; pass colonnade.load(…)")
        if not isinstance(config, ServeConfig | None):
            raise ConfigError(f"an Engine's config is not a {type(config).__name__}; pass ServeConfig(…)")
        config = config or ServeConfig()
        super().__init__(model.transformer, model.tokenizer, config, _load_draft(model, config))


def _load_draft(model: Model, config: ServeConfig) -> Transformer | None:
    """The draft model that ``config`` names, in the dtype and weight format of ``model``."""
    if config.draft_model is None:
        return None
    config = config.replace(weights=quantised_kind(model.transformer) or "stored")
    dtype = cast(DType, _dtype_of(model.transformer))
    return load_draft(open_draft(config, model.config, model.tokenizer), config, model.context, dtype)


def load(
    path: str | Path,
    *,
    plan: Plan | None = None,
    dtype: DType | torch.dtype = "auto",
    device: Device | torch.device = "auto",
    context: DistributedContext | None = None,
    experts: ExpertsConfig = AS_TRAINED,
    weights: WeightFormat = "stored",
    weight_group: WeightGroup = 64,
    adapter: str | Path | None = None,
    packed: PackedUse = "never",
) -> Model:
    """Load a model for inference.

    ``dtype`` is a name or a torch dtype; auto is float32 on a CPU and bfloat16 on a GPU. With a ``plan`` of more than
    one rank, every process of a launched group calls this and gets its shard: of the weights over ``tp``, of an
    engine's cache also over ``cp`` (context ranks otherwise compute the same). ``context`` is an existing context to
    load into. ``experts`` changes what a mixture of experts does after training, such as the active experts per token
    or the capacity; :func:`save` writes the changed config. ``weights`` other than stored quantises the matrices while
    they are read (int4 with a scale for each ``weight_group`` inputs); dense dequantises those of a quantised
    checkpoint, which stored keeps. A quantised model generates, scores, and is saved in its quantised form.
    ``adapter``, a run with adapters or a folder of PEFT, is merged into the model. ``packed``: whether int8 and int4
    weights come from a file in the user's cache (:mod:`~colonnade.checkpoint.packed_weights`), on a CPU and one rank.

    Raises :class:`CheckpointError` for anything missing, damaged or unknown, :class:`PlanError` for a layout that the
    model or the number of processes does not allow, and :class:`ConfigError` for impossible ``experts`` settings and,
    before anything is read, for an unknown ``dtype``, ``device`` or ``weights``.
    """
    dtype, device = _checked_dtype(dtype), cast(Device, str(device))
    check_choice("device", device, Device)
    check_weight_format(weights, weight_group)
    plan = context.plan if context else plan or Plan()
    opened = open_for_plan(path, plan, experts, weights, weight_group, adapter)
    return load_opened(
        opened, plan, str(path), dtype=dtype, device=device, context=context, experts=experts, weights=weights,
        weight_group=weight_group, packed=packed,
    )  # fmt: skip


def load_opened(
    opened: OpenedModel,
    plan: Plan,
    source: str,
    *,
    dtype: DType,
    device: Device,
    context: DistributedContext | None,
    experts: ExpertsConfig,
    weights: WeightFormat,
    weight_group: WeightGroup,
    packed: PackedUse,
) -> Model:
    """:func:`load` of a model that is open already."""
    exits = ExitStack()
    if context is None:
        if plan.world > 1 and not launched():
            raise PlanError(
                f"{plan} needs {plan.world} processes and this is one; start the script with "
                f"torchrun --nproc-per-node {plan.world} SCRIPT, or use the command line, which starts them itself"
            )
        context = exits.enter_context(open_context(plan, device))
    with exits:
        read = partial(load_model, opened, context, dtype, source, experts.layers_on_device, weights, weight_group)
        if packed != "never" and (kind := packable(opened, context, experts, weights)):
            transformer = load_packed(opened, kind, weight_group, resolve_dtype(context.device, dtype), packed, read)
        else:
            transformer = read()
        model = Model(transformer, Tokenizer.from_model(opened.tokenizer_source), context, source, opened.tasks)
        model._exit = exits.pop_all()
        return model


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of anything that :func:`load` takes, of a corpus, or of a tokenizer.json; reads no weights.

    Raises :class:`CheckpointError` or :class:`DataError` if there is none.
    """
    location = Path(path)
    if not location.exists():
        location = locate(path, weights=False)
    if location.is_dir():
        for folder in (location, location / "tokenizer"):
            if (folder / "tokenizer.json").is_file() or (folder / "merges.txt").is_file():
                return Tokenizer.from_file(folder)
        location = locate(location)
    elif location.suffix == ".json":
        return Tokenizer.from_file(location)
    if (tokenizer := Tokenizer.from_model(open_model(location).tokenizer_source)) is None:
        raise CheckpointError(f"{path} has no tokenizer; use another model, or a tokenizer.json")
    return tokenizer


def _checked_dtype(dtype: DType | torch.dtype) -> DType:
    name = dtype_name(dtype)
    check_choice("dtype", name, DType)
    return cast(DType, name)


def _dtype_of(transformer: Transformer) -> object:
    return dtype_name(next(transformer.parameters()).dtype)


def save(
    model: Model,
    path: str | Path,
    *,
    format: Format = "colonnade",
    dtype: DType | torch.dtype = "auto",
    shard_bytes: int = 5 * 10**9,
    overwrite: bool = False,
) -> Path:
    """Write ``model`` to the folder ``path``, completely or not at all; every rank of its context calls this.

    ``hf`` is for ``transformers`` (``dtype`` and ``shard_bytes`` describe its files), ``colonnade`` loads under any
    plan, ``gguf`` is one file for llama.cpp. ``overwrite`` replaces an existing model once the new one is written.
    Raises :class:`CheckpointError` if the
    folder exists otherwise, or cannot be written.
    """
    check_choice("format", format, Format)
    dtype, folder = _checked_dtype(dtype), Path(path)
    if format == "hf":
        write_hf(
            model.transformer, folder, tokenizer=model._tokenizer, shard_bytes=shard_bytes, overwrite=overwrite,
            dtype=None if dtype == "auto" else getattr(torch, dtype),
        )  # fmt: skip
    elif format == "gguf":
        write_gguf(model.transformer, folder, tokenizer=model.tokenizer, overwrite=overwrite)
    elif dtype not in ("auto", _dtype_of(model.transformer)):
        raise ConfigError(
            f"the colonnade format keeps the dtype of the weights; load with dtype='{dtype}' and save that"
        )
    else:
        meta = native.Meta(model=model.config, tasks=model.tasks)
        native.save(folder, model.transformer, meta, model.context, tokenizer=model._tokenizer, overwrite=overwrite)
    return folder


def save_adapter(source: str | Path, path: str | Path, *, overwrite: bool = False) -> tuple[int, int]:
    """Write the adapters of the run ``source`` as files of PEFT; returns (number of tensors, rank).

    Raises :class:`CheckpointError` if ``source`` has no adapters or the folder exists, :class:`ConfigError` if PEFT's
    files cannot have them.
    """
    adapter = read_adapter(source)
    write_peft(Path(path), adapter, overwrite=overwrite)
    assert adapter.model.lora is not None
    return len(adapter.tensors), adapter.model.lora.rank


def _sampling_params(kwargs: dict[str, Any]) -> SamplingParams:
    """The parameters of a call that returns text or ids only."""
    params = SamplingParams.from_kwargs(kwargs)
    for name in ("logprobs", "prompt_logprobs", "echo"):
        if getattr(params, name) not in (None, False):
            raise RequestError(
                f"{name} is not supported by this call, which returns only the generated text or ids; use "
                "colonnade.Engine",
                param=name,
            )
    return params

"""Records one forward pass of a model: the inputs and outputs of each attention and feed-forward part.

Queries, keys and values are recorded where attention receives them, after norms and rotary positions; inputs and
outputs by forward hooks. Under tensor parallelism the heads and the weights are gathered from all ranks, so that a
recording covers the whole model.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from colonnade.checkpoint.peft import Adapter
from colonnade.config import ModelConfig, Plan
from colonnade.errors import RequestError
from colonnade.model import Hidden, Packed, Stream, Transformer
from colonnade.model.attend import Attend
from colonnade.model.moe import MixtureOfExperts
from colonnade.model.moe.capacity import apply_capacity
from colonnade.parallel.layout import placements

MAX_TOKENS = 512
"""Maximum number of tokens of a recording; the scores of a head are quadratic in it."""


@dataclass
class LayerRecord:
    """Tensors of one block by name, in float32 on the CPU."""

    values: dict[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.values[name]


@dataclass
class Recording:
    """One forward pass, and the weights of its blocks."""

    run: str
    tokens: list[int]
    pieces: list[str]
    config: ModelConfig
    plan: Plan
    layers: list[LayerRecord]
    weights: Sequence[Mapping[str, Tensor]]
    """By block: full matrices by parameter name."""
    rotation: tuple[Tensor, Tensor] | None
    """(cos, sin) of each token, (T, half a head), if positions are rotary."""
    adapter: Adapter | None = None
    """The adapter that is merged into the weights, if there is one."""


class _RecordingView:
    """The attention of one layer, recording its queries, keys and values."""

    caches: ClassVar[bool] = False

    def __init__(self, view: Attend, record: dict[str, Tensor]):
        self._view, self._record = view, record

    def __call__(self, q_TnH: Tensor, k_TkH: Tensor, v_TkH: Tensor) -> Tensor:
        o_TnH = self._view(q_TnH, k_TkH, v_TkH)
        self._record |= {"q": q_TnH, "k": k_TkH, "v": v_TkH, "o": o_TnH}
        return o_TnH


@dataclass
class _RecordingAttend:
    """Packed attention that records every layer."""

    packed: Packed
    records: list[LayerRecord]

    def at(self, layer: int, window: int | None) -> _RecordingView:
        return _RecordingView(self.packed.at(layer, window), self.records[layer].values)


@contextmanager
def _hooks(model: Transformer, records: list[LayerRecord], T: int) -> Iterator[None]:
    hooks, own = [], slice(*model.axes.token_replicas.part(T))

    def watch(module: torch.nn.Module, into: dict[str, Tensor], before: str | None, after: str | None) -> None:
        def keep(_module: torch.nn.Module, inputs: tuple, out: Any) -> None:
            if before is not None:
                into[before] = inputs[0].detach()
            if after is not None:
                into[after] = (out[0] if isinstance(out, tuple) else out).detach()

        hooks.append(module.register_forward_hook(keep))

    def watch_router(module: MixtureOfExperts, into: dict[str, Tensor]) -> None:
        def keep(_module: torch.nn.Module, _inputs: tuple, out: tuple) -> None:
            choice = out[0]
            index_t = torch.arange(own.start, own.stop, device=choice.ids_TA.device)
            kept = apply_capacity(choice, index_t, module.moe, module.axes.experts.tokens)
            into["choice_ids"], into["choice_weights"] = choice.ids_TA.detach(), choice.weights_TA.detach()
            into["kept_ids"] = kept.ids_TA.detach()

        hooks.append(module.router.register_forward_hook(keep))

    for i, record in enumerate(records):
        block, into = model.blocks.get_submodule(str(i)), record.values
        watch(block.get_submodule("attention"), into, "attention_in", "attention_out")
        ffn = block.get_submodule("ffn")
        watch(ffn, into, "ffn_in", "ffn_out")
        if isinstance(ffn, MixtureOfExperts):
            watch_router(ffn, into)
        if model.config.latent is not None:
            watch(block.get_submodule("attention.kv_norm"), into, None, "latent")
            if model.config.latent.q_rank:
                watch(block.get_submodule("attention.q_norm"), into, None, "q_latent")
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def run_name(tokens: Sequence[int]) -> str:
    """The name of the recording of these tokens: the same text has the same name."""
    return hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()[:16]


def check_tokens(config: ModelConfig, tokens: Sequence[int]) -> None:
    """Raise :class:`RequestError` for a text that is too short or too long."""
    most = min(MAX_TOKENS, config.context)
    if not 2 <= len(tokens) <= most:
        raise RequestError(f"the text has {len(tokens)} tokens; send 2 to {most}", param="text")


@torch.no_grad()
def record(model: Transformer, tokens: Sequence[int], pieces: Sequence[str], plan: Plan = Plan()) -> Recording:
    """Record a forward pass over ``tokens``; every rank of the model calls this.

    Raises :class:`RequestError` for a text that does not fit, and for layouts other than tensor parallelism.
    """
    config, axes = model.config, model.axes
    check_tokens(config, tokens)
    if axes.cp.size * axes.pp.size * axes.experts.all.size > 1:
        raise RequestError("the viewer records whole models and tensor-parallel ones; load it with --plan.tp only")
    device, T = next(model.parameters()).device, len(tokens)
    records = [LayerRecord() for _ in range(config.layers)]
    positions_T = torch.arange(T, device=device)
    attend = _RecordingAttend(Packed.of([T], device, causal=config.causal), records)
    was_fused = [block.fused for block in model.blocks]  # type: ignore[union-attr]
    with _hooks(model, records, T):
        for block in model.blocks:
            block.fused = False  # type: ignore[assignment] - fused steps skip the modules that hooks watch
        try:
            model(Stream(torch.tensor(tokens, device=device), positions_T), attend, Hidden())
        finally:
            for block, fused in zip(model.blocks, was_fused, strict=True):
                block.fused = fused  # type: ignore[assignment]
    for layer in records:
        _gather(layer.values, model, T)
    rotation = model.rotation_of(positions_T, torch.float32)
    half = config.rotary_width // 2
    turn = None if rotation is None else (rotation.own[:, 0, :half].cpu(), rotation.other[:, 0, half:].cpu())
    weights = [_whole_weights(model, i) for i in range(config.layers)]
    return Recording(run_name(tokens), list(tokens), list(pieces), config, plan, records, weights, turn)


def _gather(values: dict[str, Tensor], model: Transformer, T: int) -> None:
    """Heads of all tp ranks and tokens of all of them, on the CPU."""
    axes, config = model.axes, model.config
    for name, x in values.items():
        whole = x
        if name in ("q", "o"):
            whole = axes.tp.gather(x.contiguous(), 1, config.heads)
        elif name in ("k", "v"):
            whole = axes.tp.gather(x.contiguous(), 1, config.heads if config.latent else config.kv_heads)
        elif name.startswith(("choice_", "kept_")) or (axes.sequence_parallel and len(x) != T):
            whole = axes.tp.gather(x.contiguous(), 0, T)  # each rank routes its own tokens
        values[name] = whole.cpu() if name.endswith("_ids") else whole.float().cpu()


def _whole_weights(model: Transformer, layer: int) -> Mapping[str, Tensor]:
    """The block's parameters over all tp ranks, and its buffers, by name."""
    axes, block = model.axes, model.blocks.get_submodule(str(layer))
    if axes.tp.size == 1:
        return {**dict(block.named_parameters()), **dict(block.named_buffers())}
    shapes, found = model.global_shapes(), {name: x.cpu() for name, x in block.named_buffers()}
    for name, place in placements(block).items():
        x, whole = block.get_parameter(name).detach(), shapes[f"blocks.{layer}.{name}"]
        found[name] = axes.tp.gather(x, place, whole[place]).cpu() if isinstance(place, int) else x.cpu()
    return found

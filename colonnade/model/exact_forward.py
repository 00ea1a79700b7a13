"""A training forward pass whose values are, bit for bit, those of the batch-invariant engine.

    exact      the engine's kernels over a paged cache, many tokens at a time (:mod:`~colonnade.model.batch_invariant`);
               a model without such kernels runs token by token, as its engine does
    ordinary   all tokens at once, for the gradient
    y = exact value,  ∂y/∂x = that of the ordinary block at the exact x

Libraries round a row of a product by the number of rows beside it, so an engine that decodes and a trainer that packs
give other log-probabilities for the same weights (in bfloat16 by 0.1). Here the ratio of both is exactly 1. The price
is one more forward pass.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.model import batch_invariant
from colonnade.model.attend import Packed, Paged
from colonnade.model.cache import KVCache
from colonnade.model.embedding import Stream
from colonnade.model.output_heads import OutputProjection, project_rows, projection_input
from colonnade.model.token_logprobs import TokenScores, score_logits
from colonnade.model.transformer import Transformer

PAGE_TOKENS = {"cpu": 16, "cuda": 64}
"""Of the cache of one pass, by device."""
CHUNK_TOKENS = {"cpu": 512, "cuda": 4096}
"""Tokens of a pass that are computed at a time, by device: they bound the memory of attention. On a GPU each chunk
costs the launches of a whole pass."""
HEAD_ROWS = 512
"""Rows of logits that are computed at a time."""
REFERENCE_KERNELS = "reference"
"""The name of the kernels of models that run token by token."""


class _Replace(Function):
    @staticmethod
    def forward(ctx, ordinary: Tensor, exact: Tensor) -> Tensor:
        return exact.clone()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


def replace_value(ordinary: Tensor, exact: Tensor) -> Tensor:
    """The value of ``exact`` with the gradient of ``ordinary``."""
    return _Replace.apply(ordinary, exact)


@dataclass(frozen=True)
class _Values:
    """Of one pass: the residual stream after each block, and the normed one."""

    after_block: list[Tensor]
    normed_TD: Tensor


def make_exact(model: Transformer) -> str:
    """Make every later pass of ``model`` over packed tokens, with gradients, exact up to the head.

    Returns the name of the kernels, for :func:`exact_logprobs`. Raises :class:`ConfigError` for a model without
    batch-invariant kernels on a GPU.
    """
    current: list[_Values] = []
    kernels = batch_invariant.NAME if batch_invariant.has_kernels(model) else REFERENCE_KERNELS

    def before(module: Transformer, arguments: tuple[Any, ...]) -> None:
        stream, attend, _ = arguments
        current.clear()
        if torch.is_grad_enabled():
            assert isinstance(attend, Packed), "one process packs its tokens"
            current.append(_run(module, stream, attend.cu_seqlens.tolist(), kernels))

    def after_block(layer: int) -> Callable[..., Any]:
        def hook(_block: Any, _arguments: Any, result: tuple[Tensor, Any]) -> tuple[Tensor, Any] | None:
            return (replace_value(result[0], current[0].after_block[layer]), result[1]) if current else None

        return hook

    def after_norm(_norm: Any, _arguments: Any, result: Tensor) -> Tensor | None:
        return replace_value(result, current.pop().normed_TD) if current else None

    model.register_forward_pre_hook(before)
    for layer, block in enumerate(model.blocks):
        block.register_forward_hook(after_block(layer))
    assert model.norm is not None, "one process has all blocks"
    model.norm.register_forward_hook(after_norm)
    return kernels


class _Sequence(NamedTuple):
    """Tokens ``start`` to ``end`` of the stream, and their pages."""

    start: int
    end: int
    pages: list[int]


@torch.no_grad()
def _run(model: Transformer, stream: Stream, starts: list[int], kernels: str) -> _Values:
    """All tokens, a chunk at a time; hooks are not called."""
    T, weight = len(stream.tokens_T), next(model.parameters())
    page, step = PAGE_TOKENS[weight.device.type], 1
    if kernels == batch_invariant.NAME:
        step = CHUNK_TOKENS[weight.device.type]
    sequences: list[_Sequence] = []
    slots: list[int] = []
    first = 0
    for a, b in pairwise(starts):
        count = -(-(b - a) // page)
        sequences.append(_Sequence(a, b, list(range(first, first + count))))
        slots += range(first * page, first * page + b - a)
        first += count
    assert len(slots) == T
    cache = KVCache(model.config, model.axes, pages=first, page_tokens=page, dtype=weight.dtype, device=weight.device)
    slots_T = torch.tensor(slots, device=weight.device)
    rows: list[list[Tensor]] = []
    with batch_invariant.selected_kernels(model) if step > 1 else nullcontext():
        for t in range(0, T, step):
            chunk = range(t, min(t + step, T))
            rows.append(_chunk(model, stream, _attend(sequences, chunk, slots_T, cache, kernels), chunk))
    columns = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    return _Values(columns[:-1], columns[-1])


def _attend(sequences: list[_Sequence], chunk: range, slots_T: Tensor, cache: KVCache, kernels: str) -> Paged:
    """Attention of the tokens in ``chunk`` to those before them in their sequences."""
    new, lengths, pages = list[int](), list[int](), list[list[int]]()
    for a, b, own in sequences:
        first, end = max(a, chunk.start), min(b, chunk.stop)
        if first < end:
            new.append(end - first)
            lengths.append(end - a)
            pages.append(own[: -(-(end - a) // cache.page_tokens)])
    most, device = max(map(len, pages)), slots_T.device
    return Paged(
        cache,
        pages_RP=torch.tensor([own + [0] * (most - len(own)) for own in pages], dtype=torch.int32, device=device),
        slots_T=slots_T[chunk.start : chunk.stop].clone(),
        cu_queries=torch.tensor([0, *new]).cumsum(0).to(device, torch.int32),
        lengths_R=torch.tensor(lengths, dtype=torch.int32, device=device),
        longest_query=max(new),
        longest_context=max(lengths),
        kernels=kernels,
        known=(new, lengths),
        known_pages=pages,
        share=False,
    )


def _chunk(model: Transformer, stream: Stream, attend: Paged, chunk: range) -> list[Tensor]:
    """The residual stream of a chunk's tokens after each block, and the normed one."""
    mine = slice(chunk.start, chunk.stop)
    piece = Stream(stream.tokens_T[mine].clone(), stream.positions_T[mine].clone())
    assert model.embed is not None
    assert model.norm is not None
    x_TD = model.embed.forward(piece)
    rotation = model.rotation_of(piece.positions_T, x_TD.dtype)
    values: list[Tensor] = []
    for layer, block in enumerate(model.blocks):
        x_TD, _ = block.forward(x_TD, len(chunk), rotation, attend.at(layer, model.config.window_of(layer)))
        values.append(x_TD)
    return [*values, model.norm.forward(x_TD)]


@torch.no_grad()
def exact_logprobs(
    x_tD: Tensor, T: int, rows_R: Tensor | None, targets_R: Tensor, output: OutputProjection, temperature: float,
    kernels: str,
) -> Tensor:  # fmt: skip
    """logp_R as the engine's head gives them; ``kernels`` as :func:`make_exact` returns."""
    x_RD, bias_v = projection_input(x_tD, T, rows_R, output)
    exact, step = torch.promote_types(x_RD.dtype, torch.float32), 1
    if kernels == batch_invariant.NAME:
        output, step = output._replace(kernels=kernels), HEAD_ROWS
    parts = list[TokenScores]()
    for r in range(0, len(x_RD), step):
        z_Rv = project_rows(x_RD[r : r + step].clone(), bias_v, output)
        if temperature != 1.0:  # by a tensor, as the engine: a GPU multiplies by the reciprocal of a number
            z_Rv = z_Rv.to(exact) / z_Rv.new_full((len(z_Rv), 1), temperature, dtype=exact)
        parts.append(score_logits(z_Rv, targets_R[r : r + step], vocab_size=output.vocab_size, rowwise=True))
    return torch.cat([part.logp_R for part in parts]) if parts else x_RD.new_zeros(0, dtype=exact)

"""A training forward pass whose values are, bit for bit, those of the batch-invariant engine on a CPU.

    exact      each token alone through the blocks, over a cache of the keys before it: the engine's calls
    ordinary   all tokens at once, for the gradient
    y = exact value,  ∂y/∂x = that of the ordinary block at the exact x

Libraries round a row of a product by the number of rows beside it, so an engine that decodes and a trainer that packs
give other log-probabilities for the same weights (in bfloat16 by 0.1). Here the ratio of both is exactly 1. The price
is one more pass, token by token; a beginning that several sequences share is computed once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from colonnade.model.attend import Packed, Paged
from colonnade.model.cache import KVCache
from colonnade.model.embedding import Stream
from colonnade.model.output_heads import OutputProjection, project_rows, projection_input
from colonnade.model.token_logprobs import score_logits
from colonnade.model.transformer import Transformer

PAGE_TOKENS = 16
"""Of the cache of one pass."""


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


def make_exact(model: Transformer) -> None:
    """Make every later pass of ``model`` over packed tokens, with gradients, exact up to the head."""
    current: list[_Values] = []

    def before(module: Transformer, arguments: tuple[Any, ...]) -> None:
        stream, attend, _ = arguments
        current.clear()
        if torch.is_grad_enabled():
            assert isinstance(attend, Packed), "one process packs its tokens"
            current.append(_run(module, stream, attend.cu_seqlens.tolist()))

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


@torch.no_grad()
def _run(model: Transformer, stream: Stream, starts: list[int]) -> _Values:
    """Every token by itself; hooks are not called."""
    tokens, T = stream.tokens_T.tolist(), len(stream.tokens_T)
    spans = [(a, b) for a, b in pairwise(starts) if b > a]
    pages = [-(-(b - a) // PAGE_TOKENS) for a, b in spans]
    weight = next(model.parameters())
    cache = KVCache(
        model.config, model.axes, pages=sum(pages), page_tokens=PAGE_TOKENS, dtype=weight.dtype, device=weight.device
    )
    rows: list[list[Tensor]] = []
    slots: list[int] = []
    known: dict[tuple[int, int], int] = {}
    """(the first token with the beginning before, token id) -> the first token with this beginning."""
    first_page = 0
    for (a, b), count in zip(spans, pages, strict=True):
        table = list(range(first_page, first_page + count))
        slots += range(first_page * PAGE_TOKENS, first_page * PAGE_TOKENS + b - a)
        first_page += count
        same = -1
        for t in range(a, b):
            same = known.setdefault((same, tokens[t]), t)
            if same < t:
                rows.append(rows[same])
                for pool in (*cache.k, *cache.v):
                    flat = pool.flatten(0, 1)
                    flat[slots[t]] = flat[slots[same]]
            else:
                rows.append(_token(model, stream, t, t - a, table, cache))
    assert len(rows) == T
    columns = [torch.cat(parts) for parts in zip(*rows, strict=True)]
    return _Values(columns[:-1], columns[-1])


def _token(model: Transformer, stream: Stream, t: int, position: int, table: list[int], cache: KVCache) -> list[Tensor]:
    """The residual stream of token ``t`` after each block, and the normed one."""
    one = slice(t, t + 1)
    piece = Stream(stream.tokens_T[one].clone(), stream.positions_T[one].clone())
    pages = table[: position // PAGE_TOKENS + 1]
    attend = Paged(
        cache,
        pages_RP=torch.tensor([pages], dtype=torch.int32),
        slots_T=torch.tensor([pages[-1] * PAGE_TOKENS + position % PAGE_TOKENS]),
        cu_queries=torch.tensor([0, 1], dtype=torch.int32),
        lengths_R=torch.tensor([position + 1], dtype=torch.int32),
        longest_query=1,
        longest_context=position + 1,
        kernels="reference",
        known=([1], [position + 1]),
        known_pages=[pages],
        share=False,
    )
    assert model.embed is not None
    assert model.norm is not None
    x_1D = model.embed.forward(piece)
    rotation = model.rotation_of(piece.positions_T, x_1D.dtype)
    values: list[Tensor] = []
    for layer, block in enumerate(model.blocks):
        x_1D, _ = block.forward(x_1D, 1, rotation, attend.at(layer, model.config.window_of(layer)))
        values.append(x_1D)
    return [*values, model.norm.forward(x_1D)]


@torch.no_grad()
def exact_logprobs(
    x_tD: Tensor, T: int, rows_R: Tensor | None, targets_R: Tensor, output: OutputProjection, temperature: float
) -> Tensor:
    """logp_R as the engine's head gives them, one row at a time."""
    x_RD, bias_v = projection_input(x_tD, T, rows_R, output)
    exact = torch.promote_types(x_RD.dtype, torch.float32)
    parts = []
    for r in range(len(x_RD)):
        z_1v = project_rows(x_RD[r : r + 1].clone(), bias_v, output)
        if temperature != 1.0:
            z_1v = z_1v.to(exact) / temperature
        parts.append(score_logits(z_1v, targets_R[r : r + 1], vocab_size=output.vocab_size).logp_R)
    return torch.cat(parts) if parts else x_RD.new_zeros(0, dtype=exact)

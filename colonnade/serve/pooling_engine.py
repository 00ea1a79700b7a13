"""The engine for embeddings, classes and scores: texts in, a row of numbers for each out, without a cache.

    work    = schedule()      the waiting texts, packed up to the token budget     pooling_queue.py
    rows    = run(work)       one forward pass: model(stream, Packed, head)          pooler.py
    outputs = commit(rows)    base64 of each row

No timer collects a batch: while a pass runs, texts arrive, and the next pass takes them. Each text attends to itself
only, so its row does not depend on the others, apart from rounding. With ``async_scheduling`` a pass is launched
before the rows of the last one are read. On several ranks, rank 0 broadcasts the texts, and the others
:meth:`~PoolingEngine.follow`.
"""

import dataclasses
from binascii import b2a_base64
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from colonnade.config import ServeConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import RequestError
from colonnade.kernels.device import upload
from colonnade.model import Packed, Stream, Transformer
from colonnade.serve.model_inputs import IDLE, RUN, STOP, broadcast_message, receive_message
from colonnade.serve.pooler import head_of
from colonnade.serve.pooler_spec import PoolerSpec
from colonnade.serve.pooling_queue import PoolingQueue
from colonnade.serve.pooling_request import PoolingItem, PoolingOutput, check_tokens, name_of
from colonnade.serve.request import Stats
from colonnade.serve.resolve_config import EngineTraits, check_plan, resolve_config

MAX_RESULT_BYTES = 8 << 20
"""Limit for the rows of one pass: they travel in one message."""


class PoolingWork(NamedTuple):
    """One forward pass: R texts. Ranks above 0 receive it without ``items``."""

    lengths: list[int]
    tokens: list[int]
    segments: list[int] | None
    items: list[PoolingItem] | None = None


class PoolingEngine:
    """Pools the hidden states of ``model`` as defined by ``spec``; ``config`` limits the tokens of a pass and the
    queue.
    """

    def __init__(self, model: Transformer, tokenizer: Tokenizer, config: ServeConfig, spec: PoolerSpec):
        check_plan(model)
        self.model, self.tokenizer, self.spec = model, tokenizer, spec
        self.config = resolve_config(config, EngineTraits.of(model))
        self.device = next(model.parameters()).device
        self.queue = PoolingQueue()
        self._most = max(1, MAX_RESULT_BYTES // (4 * spec.width))
        self._live: dict[str, str] = {}
        """The request of each text that waits or runs."""
        self._in_flight: tuple[PoolingWork, _Rows] | None = None
        self._stats = Stats()

    def add(
        self,
        ids: Sequence[str],
        texts: Sequence[tuple[list[int], list[int] | None]],
        *,
        fields: Sequence[tuple[str, int]],
        dimensions: int | None = None,
    ) -> None:
        """Queue one request: an id and (tokens, segments or None) for each text; all are queued, or none.

        ``fields`` and ``dimensions`` are those of :class:`~colonnade.serve.pooling_request.PoolingRequest`. Raises
        :class:`RequestError` for a text that cannot be run, and (429) if the queue is full.
        """
        if len(self.queue) >= self.config.max_waiting:
            raise RequestError(
                f"the queue is full: {len(self.queue)} requests are already waiting, the maximum; try again later",
                status=429,
                code="queue_full",
            )
        for index, (tokens, _) in enumerate(texts):
            where = name_of(fields, index)
            check_tokens(tokens, where, context=self.spec.context, vocab_size=self.model.config.vocab_size)
        self.queue.add(ids[0], [PoolingItem(key, *text, dimensions) for key, text in zip(ids, texts, strict=True)])
        self._live.update(dict.fromkeys(ids, ids[0]))

    def step(self) -> list[PoolingOutput]:
        """Run one forward pass over as many texts as fit; returns its results.

        With ``async_scheduling`` it returns those of the previous pass.
        """
        work = self._schedule()
        ready = (work, self._run(work)) if work.lengths else None
        if self.config.async_scheduling:
            ready, self._in_flight = self._in_flight, ready
        return self._commit(*ready) if ready else []

    def cancel(self, key: str) -> bool:
        """Drop a text, and the waiting ones of its request; False if it has ended."""
        if (request := self._live.pop(key, None)) is None:
            return False
        self.queue.cancel(request)
        self._count("cancelled")
        return True

    @property
    def busy(self) -> bool:
        """True while :meth:`step` has something to do."""
        return bool(self.queue) or self._in_flight is not None

    @property
    def stats(self) -> Stats:
        """Counters, and the state after the last call."""
        self._stats.waiting = len(self.queue)
        self._stats.running = len(self._in_flight[0].lengths) if self._in_flight else 0
        return self._stats

    def _schedule(self) -> PoolingWork:
        items = self.queue.take(self.config.budget, self._most)
        segments = None
        if any(item.segments is not None for item in items) and self.model.config.segments:
            segments = list(chain.from_iterable(item.segments or [0] * len(item.tokens) for item in items))
        tokens = list(chain.from_iterable(item.tokens for item in items))
        return PoolingWork([len(item.tokens) for item in items], tokens, segments, items)

    def _run(self, work: PoolingWork) -> "_Rows":
        if (axis := self.model.axes.token_replicas).size > 1:
            payload = pack(work)
            broadcast_message(axis, RUN, payload)
        return _Rows(self._forward(work))

    @torch.inference_mode()
    def _forward(self, work: PoolingWork) -> Tensor:
        """The rows of ``work``, (R, width)."""
        device, lengths = self.device, work.lengths
        positions = list(chain.from_iterable(map(range, lengths)))
        tokens_T, positions_T = upload([work.tokens, positions], torch.int64, device)
        segments_T = None if work.segments is None else upload(work.segments, torch.int64, device)
        cu_seqlens = upload([0, *accumulate(lengths)], torch.int32, device)
        attend = Packed(cu_seqlens, max(lengths), len(set(lengths)) == 1, causal=self.model.config.causal)
        return self.model(Stream(tokens_T, positions_T, segments_T), attend, head_of(self.spec, cu_seqlens))

    def _commit(self, work: PoolingWork, rows: "_Rows") -> list[PoolingOutput]:
        assert work.items is not None
        self._stats.steps += 1
        x_RD, outputs = rows.read(), []
        finite = x_RD.isfinite().all(1).tolist()
        for item, x_D, good in zip(work.items, x_RD, finite, strict=True):
            if self._live.pop(item.id, None) is None:
                continue  # cancelled since the pass was launched
            if item.dimensions is not None:
                x_D = x_D[: item.dimensions]  # noqa: PLW2901 - the part that is kept
                x_D = x_D / x_D.norm().clamp_min(1e-12)  # noqa: PLW2901
            self._stats.prompt_tokens += len(item.tokens)
            reason: Literal["stop", "error"] = "stop" if good else "error"
            outputs.append(PoolingOutput(item.id, to_base64(x_D), len(item.tokens), reason))
            self._count(reason)
        return outputs

    def _count(self, reason: str) -> None:
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1

    @property
    def limits(self) -> dict[str, Any]:
        """The properties of the model that the HTTP process needs."""
        longest, context = self.tokenizer.longest_token_bytes, self.spec.context
        return {
            "context": context, "cache_tokens": context, "longest_token_bytes": longest,
            "note": "",
            "pooler": dataclasses.asdict(self.spec),
            "capabilities": ["score"] if self.spec.scores_pairs else [self.spec.task],
        }  # fmt: skip

    # -- several ranks ---------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """On ranks above 0: run the texts that rank 0 broadcasts, until it stops."""
        axis = self.model.axes.token_replicas
        while (message := receive_message(axis))[0] != STOP:
            if message[0] == RUN:
                self._forward(unpack(message[1]))

    def heartbeat(self) -> None:
        """On rank 0, while idle: keep the other ranks' pending collective from timing out."""
        broadcast_message(self.model.axes.token_replicas, IDLE)

    def stop(self) -> None:
        """On rank 0, at the end: make the other ranks leave :meth:`follow`."""
        broadcast_message(self.model.axes.token_replicas, STOP)


class _Rows:
    """The rows of a pass, copied to the host asynchronously: reading them does not wait for later passes."""

    def __init__(self, x_RD: Tensor):
        self._copied: torch.cuda.Event | None = None
        self._x_RD = x_RD
        if x_RD.is_cuda:
            self._x_RD = torch.empty_like(x_RD, device="cpu", pin_memory=True).copy_(x_RD, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def read(self) -> Tensor:
        """x_RD, as soon as it has been copied."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._x_RD


def to_base64(x_D: Tensor) -> str:
    """The numbers of ``x_D`` in float32."""
    return b2a_base64(x_D.float().numpy().tobytes(), newline=False).decode()


def pack(work: PoolingWork) -> list[int]:
    """``work`` as integers: the number of texts, their lengths, the tokens and, for pairs, the segments."""
    return [len(work.lengths), *work.lengths, *work.tokens, *(work.segments or ())]


def unpack(payload: Sequence[int]) -> PoolingWork:
    """The inverse of :func:`pack`, without the items."""
    count = payload[0]
    lengths, rest = list(payload[1 : 1 + count]), list(payload[1 + count :])
    total = sum(lengths)
    return PoolingWork(lengths, rest[:total], rest[total:] or None)

"""On-policy distillation (GKD, arXiv 2306.13649): the student continues a share of the documents itself.

    text       the document in the middle of a sample: its tokens to the middle, then the continuation, sampled at
               temperature 1, to where the document or the sample ended
    loss       on the continuation only the divergence from the teacher; on all other tokens the run's usual mixture

The position in the run's order determines which samples are continued, and with which seed: a resumed run trains on the
same text. An engine in the trainer gets the current weights before each step. Supports one process.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from colonnade.config import RunConfig, ServeConfig
from colonnade.data import Batch
from colonnade.data.loader import splitmix64
from colonnade.errors import ConfigError, DataError
from colonnade.model import Transformer
from colonnade.serve.engine import Engine
from colonnade.serve.sampling_params import SamplingParams
from colonnade.train.data_feed import CorpusFeed, StepSamples


class OnPolicyFeed(CorpusFeed):
    """A corpus with continuations sampled from the model; a ``colonnade.train.rollout_feed.RolloutFeed``.

    Raises :class:`ConfigError` for settings that do not apply, :class:`DataError` for a corpus without a tokenizer.
    """

    def __init__(self, run: RunConfig, rank: int = 0, ranks: int = 1):
        _check(run)
        super().__init__(run, rank, ranks)
        if self.tokenizer is None:
            raise DataError(f"{run.data.path} has no tokenizer, which the engine needs; build the corpus again")
        self._text, self.samples = self.samples, ContinuedSamples(self.samples)
        self._run, self._metrics = run, dict[str, float]()
        self._engine: Engine | None = None

    def before_step(self, model: Transformer, seen: int) -> None:
        """Sample the continuations of the step after ``seen`` samples."""
        run, sequence = self._run, self._run.data.sequence
        batches = self._text.at(seen)
        tokens, positions = (
            torch.cat([getattr(batch, name) for batch in batches]).view(-1, sequence)
            for name in ("tokens_T", "positions_T")
        )
        sampled, spans = torch.zeros_like(tokens, dtype=torch.bool), list[tuple[int, slice, slice]]()
        for i in range(len(tokens)):
            if is_chosen(run.train.seed, seen + i, run.distill.on_policy):
                spans += [(i, *span) for span in [continued(positions[i])] if span is not None]
        if spans:
            prompts = [tokens[i, prompt].tolist() for i, prompt, _ in spans]
            params = [
                SamplingParams(
                    temperature=1.0, max_tokens=rest.stop - rest.start, ignore_eos=True,
                    seed=_seed(run.train.seed, seen + i),
                )
                for i, _, rest in spans
            ]  # fmt: skip
            completions = self._refreshed(model).generate(prompts, params)
            for (i, _, rest), completion in zip(spans, completions, strict=True):
                tokens[i, rest] = torch.tensor(completion.token_ids)
                sampled[i, rest] = True
        sizes = [len(batch.tokens_T) for batch in batches]
        parts = zip(batches, tokens.flatten().split(sizes), sampled.flatten().split(sizes), strict=True)
        self.samples.step = seen, [replace(batch, tokens_T=t, sampled_T=s) for batch, t, s in parts]
        self._metrics = {"on_policy": float(sampled.double().mean())}

    def step_metrics(self) -> dict[str, float]:
        """The share of tokens that the model generated."""
        return self._metrics

    def messages(self) -> list[str]:
        """No lines."""
        return []

    def close(self) -> None:
        """Free the engine."""
        self._engine = None

    @property
    def identity(self) -> dict[str, Any]:
        """Fingerprint of the corpus, and the share."""
        return super().identity | {"on_policy": self._run.distill.on_policy}

    def _refreshed(self, model: Transformer) -> Engine:
        """The engine with the weights of ``model``."""
        run, weight = self._run, next(model.parameters())

        def copy(own: Transformer) -> None:
            source = dict((*model.named_parameters(), *model.named_buffers()))
            with torch.no_grad():
                for name, tensor in (*own.named_parameters(), *own.named_buffers()):
                    tensor.copy_(source[name])

        if self._engine is not None:
            self._engine.update_weights(copy)
            return self._engine
        dtype = getattr(torch, run.resolved(weight.device.type).train.compute_dtype)
        own = Transformer(model.config, model.axes.serving(), device=weight.device, dtype=dtype)
        copy(own.eval().requires_grad_(False))
        assert self.tokenizer is not None
        requests, page = min(run.train.batch, 64), 16
        pages = requests * -(-run.data.sequence // page)
        serve = ServeConfig(max_requests=requests, page_tokens=page, pages=pages, prefix_cache=False)
        self._engine = Engine(own, self.tokenizer, serve)
        return self._engine


class ContinuedSamples:
    """The batches with continuations that the feed has made for a step, or the text's batches."""

    def __init__(self, text: StepSamples):
        self.text, self.samples = text, text.samples
        self.step: tuple[int, list[Batch]] = (-1, [])

    def at(self, seen: int) -> list[Batch]:
        """The micro-batches of the step after ``seen`` samples."""
        return self.step[1] if self.step[0] == seen else self.text.at(seen)

    def numbers(self, seen: int) -> list[int]:
        """The numbers of the step's samples."""
        return self.text.numbers(seen)


def continued(positions_S: Tensor) -> tuple[slice, slice] | None:
    """(prompt, rest) of the document in the middle of a sample; None if it ends there."""
    half = len(positions_S) // 2
    start = half - int(positions_S[half])
    first = max(half, start + 1)
    ends = (positions_S[first:] == 0).nonzero()
    stop = first + int(ends[0]) if len(ends) else len(positions_S)
    return (slice(start, first), slice(first, stop)) if stop > first else None


def is_chosen(seed: int, position: int, share: float) -> bool:
    """Whether the sample at ``position`` of the run's order is continued by the model."""
    return splitmix64(_seed(seed, position)) < share * 2**64


def _seed(seed: int, position: int) -> int:
    return splitmix64(seed ^ splitmix64(position)) >> 1


def _check(run: RunConfig) -> None:
    if not run.distill.teacher:
        raise ConfigError("distill.on_policy needs a teacher; set --distill.teacher, or remove distill.on_policy")
    if run.plan.world > 1:
        raise ConfigError("distill.on_policy samples in the trainer's process; remove --plan")
    if run.distill.cache or run.train.cuda_graph:
        raise ConfigError(
            "distill.on_policy generates new text in every step; remove distill.cache and train.cuda_graph"
        )

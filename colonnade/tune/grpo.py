"""Reward tuning (GRPO): answers sampled by an engine in the trainer, and the advantages of a group of answers.

    rollout    the engine gets the trainer's weights (Engine.refresh) and answers each prompt ``group`` times
    reward     worker processes score the answers (:mod:`colonnade.tune.rewards`)
    advantage  A = R − mean of the group, or that divided by (its standard deviation + 1e-4)
    step       one policy-gradient step over the answers' tokens (:mod:`colonnade.model.policy_loss`)

(Shao 2024, arXiv 2402.03300.) The divisor of the loss is the number of tokens (DAPO, Yu 2025), the number of answers
with the mean over each (GRPO), or that of answers times ``max_tokens`` (Dr. GRPO, Liu 2025, arXiv 2503.20783). A group
of equal rewards moves nothing: it is left out, and counted.

Answers are sampled from the whole distribution at temperature 1, so that the engine's log-probabilities are those of
what it sampled. Seeds follow from the position of the prompt and the number of the answer: a resumed run samples what
the uninterrupted one does. One process: the engine and the trainer have one rank.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from colonnade.config import RunConfig, ServeConfig, TuneConfig
from colonnade.data import Batch, Tokenizer
from colonnade.data.loader import Cursor, splitmix64
from colonnade.errors import ConfigError, DataError
from colonnade.model import Transformer
from colonnade.serve.engine import Engine
from colonnade.serve.request import Completion
from colonnade.serve.sampling_params import SamplingParams
from colonnade.train.data_feed import MakeFeed
from colonnade.tune.classify import start_tokenizer
from colonnade.tune.packing import check_tune_settings, pack_rows
from colonnade.tune.rewards import Answer, RewardPool, Scored


class PromptRow(NamedTuple):
    """A prompt's tokens, its text, and the row that the reward gets."""

    tokens: list[int]
    text: str
    row: Mapping[str, Any]


class Rollout(NamedTuple):
    """One answer with its log-probabilities and advantage."""

    prompt: list[int]
    answer: list[int]
    logp: list[float]
    advantage: float


def advantages(scored: Sequence[Scored], *, normalise: bool) -> list[float | None]:
    """The advantage of each answer of one group; None where there is no reward, or for a group that moves nothing."""
    rewards = [each.reward for each in scored if each.reward is not None]
    if not rewards or max(rewards) == min(rewards):
        return [None] * len(scored)
    mean = math.fsum(rewards) / len(rewards)
    scale = 1.0
    if normalise:
        scale = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)) + 1e-4
    return [None if each.reward is None else (each.reward - mean) / scale for each in scored]


def pack_rollouts(rollouts: Sequence[Rollout], sequence: int, tune: TuneConfig) -> Batch:
    """The batch of ``rollouts``; those with an advantage of 0 have no targets."""
    rows, advantage, old = [], list[float](), list[float]()
    for prompt, answer, logp, value in rollouts:
        counts = [False] * len(prompt) + [value != 0] * len(answer)
        rows.append((np.array(prompt + answer, np.int64), np.array(counts)))
        weight = (
            1.0 if tune.divisor == "tokens" else 1 / (len(answer) if tune.divisor == "answers" else tune.max_tokens)
        )
        # A token is predicted by the row before it.
        advantage += [0.0] * (len(prompt) - 1) + [value * weight] * len(answer) + [0.0]
        old += [0.0] * (len(prompt) - 1) + logp + [0.0]
    batch = pack_rows(rows, sequence)
    units = None
    if tune.divisor != "tokens":
        units = torch.tensor(sum(bool(value) for *_, value in rollouts))
    policy = torch.tensor([advantage, old], dtype=torch.float64)
    return replace(batch, policy_2T=policy, units=units, clip=(tune.clip_low, tune.clip_high))


class RolloutSamples:
    """The samples of the newest rollouts; :class:`colonnade.data.Loader`'s part of the session's interface."""

    def __init__(self, rows: int, run: RunConfig, tune: TuneConfig):
        self.samples = rows
        """Prompts in one epoch."""
        self._cursor, self._run, self._tune = Cursor(rows, run.data.seed), run, tune
        self.rollouts: list[Rollout] = []
        self.observed: list[Tensor] = []

    def at(self, seen: int) -> list[Batch]:
        """The micro-batches of the newest rollouts."""
        t, sequence = self._run.train, self._run.data.sequence
        batches = []
        for start in range(0, len(self.rollouts), t.micro_batch):
            part = self.rollouts[start : start + t.micro_batch]
            batch = pack_rollouts(part, sequence, self._tune)
            batches.append(replace(batch, first=start * sequence, observed=self.observed))
        return batches

    def positions(self, seen: int) -> range:
        """The positions of a step's prompts in the order of all epochs."""
        first = seen // self._tune.group
        return range(first, first + self._run.train.batch // self._tune.group)

    def numbers(self, seen: int) -> list[int]:
        """The rows of a step's prompts."""
        positions = self.positions(seen)
        return self._cursor.at(positions.start, len(positions)).tolist()


class RewardFeed:
    """Prompts, an engine and rewards; see :class:`colonnade.train.data_feed.DataFeed`.

    Raises :class:`ConfigError` for settings that do not apply.
    """

    def __init__(self, rows: Sequence[PromptRow], tune: TuneConfig, run: RunConfig, rank: int = 0, ranks: int = 1):
        check_reward_settings(run, tune)
        self.corpus, self.held_out, self.eval_every = None, None, 0
        self.no_validation_reason: str | None = "the rewards of the answers are logged instead"
        self.name, self._rows, self._tune, self._run = "this data", rows, tune, run
        self.sample_tokens = float(sum(len(row.tokens) for row in rows) / max(1, len(rows)) + tune.max_tokens)
        self.samples = RolloutSamples(len(rows), run, tune)
        self.tokenizer: Tokenizer = _tokenizer(run)
        digest = hashlib.sha256(json.dumps([(row.tokens, row.row) for row in rows], sort_keys=True).encode())
        self.identity: dict[str, Any] = {"method": "grpo", "rows": digest.hexdigest()} | {
            key: getattr(tune, key)
            for key in ("group", "max_tokens", "clip_low", "clip_high", "divisor", "normalise", "reward")
        }
        self._engine: Engine | None = None
        self._rewards: RewardPool | None = None
        self._metrics: dict[str, float] = {}

    def difference(self, old: Mapping[str, Any]) -> str | None:
        """How data or method differ from a checkpoint's, if at all."""
        for key, value in self.identity.items():
            if (was := old.get(key)) != value:
                return "it has other rows" if key == "rows" else f"{key} is {value}, and was {was}"
        return None

    def before_step(self, model: Transformer, seen: int) -> None:
        """Sample and score the answers of the step after ``seen`` answers."""
        tune, positions, numbers = self._tune, self.samples.positions(seen), self.samples.numbers(seen)
        engine = self._refreshed(model)
        prompts, params = [], []
        for position, number in zip(positions, numbers, strict=True):
            for answer in range(tune.group):
                seed = splitmix64(self._run.train.seed ^ splitmix64(position * tune.group + answer)) >> 1
                prompts.append(self._rows[number].tokens)
                params.append(SamplingParams(temperature=1.0, max_tokens=tune.max_tokens, seed=seed, logprobs=0))
        completions = engine.generate(prompts, params)
        rows = [self._rows[number] for number in numbers for _ in range(tune.group)]
        if self._rewards is None:
            self._rewards = RewardPool(tune.reward, tune.reward_workers, tune.reward_s)
        scored = self._rewards.score(
            [Answer(row.text, each.text, row.row) for row, each in zip(rows, completions, strict=True)]
        )
        self.samples.rollouts, skipped = [], 0
        for start in range(0, len(rows), tune.group):
            part = slice(start, start + tune.group)
            found = advantages(scored[part], normalise=tune.normalise)
            skipped += all(value is None for value in found)
            self.samples.rollouts += [
                Rollout(row.tokens, list(each.token_ids), _logp(each), value or 0.0)
                for row, each, value in zip(rows[part], completions[part], found, strict=True)
            ]
        rewards = [each.reward for each in scored if each.reward is not None]
        self._metrics = {
            "reward": math.fsum(rewards) / max(1, len(rewards)),
            "reward_failures": float(sum(each.reward is None for each in scored)),
            "skipped_groups": float(skipped),
            "answer_tokens": sum(len(each.token_ids) for each in completions) / len(completions),
        }

    def step_metrics(self) -> dict[str, float]:
        """Mean reward, failed rewards, skipped groups, mean length, and mismatch of engine and trainer."""
        observed, self.samples.observed = self.samples.observed, []
        if not observed:
            return self._metrics
        k3, largest, count = torch.stack(observed).double().cpu().unbind(1)
        mismatch = {"mismatch_k3": float(k3.sum() / count.sum().clamp(min=1)), "mismatch_max": float(largest.max())}
        return self._metrics | mismatch

    def close(self) -> None:
        """End the reward processes."""
        if self._rewards is not None:
            self._rewards.close()

    def _refreshed(self, model: Transformer) -> Engine:
        """The engine with the weights of ``model``, adapters merged."""
        if self._engine is None:
            weight = next(model.parameters())
            config = model.config.replace(lora=None)
            own = Transformer(
                config, model.axes.serving(), device=weight.device, dtype=compute_dtype(self._run, weight)
            )
            serve = ServeConfig(max_requests=min(self._run.train.batch, 64), async_scheduling=False)
            own = own.eval().requires_grad_(False)
            _copy(model, own)
            self._engine = Engine(own, self.tokenizer, serve)
            return self._engine
        self._engine.refresh(lambda own: _copy(model, own))
        return self._engine


def compute_dtype(run: RunConfig, weight: Tensor) -> torch.dtype:
    """The dtype that the trainer computes in."""
    return getattr(torch, run.resolved(weight.device.type).train.compute_dtype)


@torch.no_grad()
def _copy(trained: Transformer, own: Transformer) -> None:
    """Copy the weights of ``trained`` into ``own``, with its adapters merged."""
    from colonnade.model.lora import is_adapter, merged_delta

    source = {name: p.detach() for name, p in (*trained.named_parameters(), *trained.named_buffers())}
    adapters = {name: p for name, p in source.items() if is_adapter(name)}
    for name, parameter in (*own.named_parameters(), *own.named_buffers()):
        value = source[name]
        if adapters and (delta := merged_delta(name, adapters, trained.config)) is not None:
            value = value + delta
        parameter.copy_(value)


def _logp(completion: Completion) -> list[float]:
    assert completion.logprobs is not None
    return [each.logprob for each in completion.logprobs if each.logprob is not None]


def _tokenizer(run: RunConfig) -> Tokenizer:
    tokenizer = start_tokenizer(run)
    if tokenizer is None:
        raise DataError(
            f"{run.train.pretrained_checkpoint} has no tokenizer, and answers are text; use a model with one"
        )
    return tokenizer


def check_reward_settings(run: RunConfig, tune: TuneConfig) -> None:
    """Raise :class:`ConfigError` for settings that do not apply to reward tuning."""
    if check_tune_settings(run) or run.plan.world > 1:
        raise ConfigError(
            "reward tuning runs in one process, without train.compile, train.cuda_graph or a recompute budget; leave "
            "--plan and these out"
        )
    if run.train.batch % tune.group:
        raise ConfigError(
            f"train.batch {run.train.batch} counts answers, and does not divide by tune.group {tune.group}; make it a "
            f"multiple, such as {-(-run.train.batch // tune.group) * tune.group}"
        )
    if not tune.reward:
        raise ConfigError("reward tuning needs a reward function; set --tune.reward FILE.py:FUNCTION")
    if run.model.moe is not None:
        raise ConfigError("reward tuning is for dense models: the engine routes tokens by its own settings")
    if run.model.lora is not None and run.model.lora.base != "stored":
        raise ConfigError(
            f"reward tuning merges adapters into the engine's weights; leave lora.base {run.model.lora.base} out"
        )
    if run.train.dropout or run.train.attention_dropout or run.train.embedding_dropout:
        raise ConfigError("dropout would change the probabilities of the sampled tokens; leave it out")


def reward_feed(rows: Sequence[PromptRow], tune: TuneConfig, run: RunConfig) -> MakeFeed:
    """The data feed of reward tuning; raises :class:`DataError` for prompts that leave no room for an answer."""
    check_reward_settings(run, tune)
    if not rows:
        raise DataError("there are no prompts; give at least one")
    for number, row in enumerate(rows, 1):
        if not 0 < len(row.tokens) <= run.data.sequence - tune.max_tokens:
            raise DataError(
                f"prompt {number} has {len(row.tokens)} tokens; with {tune.max_tokens} of an answer a sequence of "
                f"{run.data.sequence} holds 1 to {run.data.sequence - tune.max_tokens}; raise --sequence"
            )
    return partial(RewardFeed, list(rows), tune)

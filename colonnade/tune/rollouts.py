"""Sampled completions as training samples: their advantages, and the batches built from them.

    A = R − mean of the group, or that divided by (its standard deviation + 1e-4)

The loss is divided by the number of tokens (DAPO, Yu 2025), by the number of completions with the mean over each
(GRPO), or by the number of completions times ``max_tokens`` (Dr. GRPO, Liu 2025, arXiv 2503.20783). Completions without
a reward and groups of equal rewards are skipped. A completion with exactly its group's mean reward has A = 0 and counts
in the divisor.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from colonnade.config import RunConfig, TuneConfig
from colonnade.data import Batch
from colonnade.data.loader import Cursor
from colonnade.model.policy_loss import PolicySettings
from colonnade.tune.packing import pack_rows
from colonnade.tune.rewards import Scored


class Rollout(NamedTuple):
    """One completion with its log-probabilities and advantage."""

    prompt: list[int]
    answer: list[int]
    logp: list[float]
    advantage: float | None
    """None: it is skipped."""


def advantages(scored: Sequence[Scored], *, normalise: bool) -> list[float | None]:
    """The advantage of each completion of one group; None without a reward, or if all rewards of the group are
    equal.
    """
    rewards = [each.reward for each in scored if each.reward is not None]
    if not rewards or max(rewards) == min(rewards):
        return [None] * len(scored)
    mean = math.fsum(rewards) / len(rewards)
    scale = 1.0
    if normalise:
        scale = math.sqrt(math.fsum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1)) + 1e-4
    return [None if each.reward is None else (each.reward - mean) / scale for each in scored]


def pack_rollouts(rollouts: Sequence[Rollout], sequence: int, tune: TuneConfig, exact: str = "") -> Batch:
    """The batch of ``rollouts``; skipped ones have no targets. ``exact`` as in :class:`PolicySettings`."""
    rows, policy = [], list[tuple[float, float, float, float]]()
    for prompt, answer, logp, advantage in rollouts:
        counts = [False] * len(prompt) + [advantage is not None] * len(answer)
        rows.append((np.array(prompt + answer, np.int64), np.array(counts)))
        weight = (
            1.0 if tune.divisor == "tokens" else 1 / (len(answer) if tune.divisor == "answers" else tune.max_tokens)
        )
        # A token is predicted by the row before it.
        policy += [(0.0, 0.0, 0.0, 0.0)] * (len(prompt) - 1)
        policy += [(weight, advantage or 0.0, old, old) for old in logp]
        policy += [(0.0, 0.0, 0.0, 0.0)]
    batch = pack_rows(rows, sequence)
    units = None
    if tune.divisor != "tokens":
        units = torch.tensor(sum(each.advantage is not None for each in rollouts))
    policy_4T = torch.tensor(policy, dtype=torch.float64).T.contiguous()
    settings = PolicySettings(
        tune.clip_low, tune.clip_high, kl=tune.kl, temperature=tune.temperature or 1.0, exact=exact
    )
    return replace(batch, policy_4T=policy_4T, units=units, policy=asdict(settings))


class RolloutSamples:
    """The samples of the newest rollouts on one data rank; as :class:`colonnade.data.Loader` for the session."""

    def __init__(self, rows: int, run: RunConfig, tune: TuneConfig, rank: int, ranks: int):
        self.samples = rows
        """Prompts in one epoch."""
        self._cursor, self._run, self._tune = Cursor(rows, run.data.seed), run, tune
        self._rank, self._ranks = rank, ranks
        self.rollouts: list[Rollout] = []
        self.batches: list[Batch] = []
        self.observed: list[Tensor] = []
        self.exact = ""
        """The kernels of exact log-probabilities (:class:`PolicySettings`)."""

    def use_rollouts(self, rollouts: list[Rollout]) -> None:
        """Use these rollouts from now on."""
        t, sequence = self._run.train, self._run.data.sequence
        first = self._rank * t.batch // self._ranks
        self.rollouts, self.batches = rollouts, []
        for start in range(0, len(rollouts), t.micro_batch):
            batch = pack_rollouts(rollouts[start : start + t.micro_batch], sequence, self._tune, self.exact)
            self.batches.append(replace(batch, first=(first + start) * sequence, observed=self.observed))

    def at(self, seen: int) -> list[Batch]:
        """The micro-batches of the newest rollouts."""
        return self.batches

    def positions(self, seen: int) -> range:
        """This rank's positions of a step's prompts in the order of all epochs."""
        first, count = self._prompts(seen)
        share = count // self._ranks
        return range(first + self._rank * share, first + (self._rank + 1) * share)

    def rows(self, positions: range) -> list[int]:
        """The rows at these positions."""
        return self._cursor.at(positions.start, len(positions)).tolist()

    def numbers(self, seen: int) -> list[int]:
        """The rows of a step's prompts, over all ranks."""
        first, count = self._prompts(seen)
        return self.rows(range(first, first + count))

    def _prompts(self, seen: int) -> tuple[int, int]:
        """The position of a step's first prompt, and their number."""
        return seen // self._tune.group, self._run.train.batch // self._tune.group

"""Reward tuning (GRPO): completions sampled by an engine in the trainer, and a policy-gradient step over their tokens.

    rollout    the engine gets the trainer's weights and completes each prompt ``group`` times
               (:mod:`colonnade.tune.rollout_engine`)
    reward     worker processes score the completions (:mod:`colonnade.tune.rewards`)
    advantage  A = R − mean of the group (:mod:`colonnade.tune.rollouts`)
    reference  with ``kl``, the completions' log-probabilities under the model that the run starts from
    step       :mod:`colonnade.model.policy_loss`

(Shao 2024, arXiv 2402.03300.) A group of equal rewards has no gradient: it is skipped and counted. Completions are
sampled from the whole distribution at ``temperature``, so that the engine's log-probabilities at this temperature are
those of the sampling distribution, as in the trainer. Seeds are derived from the position of the prompt and the number
of the completion: a resumed run samples the same completions as an uninterrupted one, and several data ranks sample, up
to rounding, the same as one.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from colonnade.config import RunConfig, TuneConfig
from colonnade.data import Tokenizer
from colonnade.data.loader import splitmix64
from colonnade.errors import ConfigError, DataError
from colonnade.model import Transformer
from colonnade.model.exact_forward import make_exact
from colonnade.model.lora import adapters_off
from colonnade.model.policy_loss import PolicyLoss
from colonnade.parallel.axis import Axis
from colonnade.serve.engine import Engine
from colonnade.serve.request import Completion
from colonnade.serve.sampling_params import SamplingParams
from colonnade.train.data_feed import MakeFeed, VaryingFeed
from colonnade.train.model_inputs import model_inputs
from colonnade.train.train_step import PipelineStep
from colonnade.tune.classify import start_tokenizer
from colonnade.tune.packing import check_tune_settings
from colonnade.tune.rewards import TIMED_OUT, Answer, RewardPool
from colonnade.tune.rollout_engine import RolloutEngine, copy_of, copy_weights
from colonnade.tune.rollouts import Rollout, RolloutSamples, advantages

IDENTITY = (
    "group", "max_tokens", "clip_low", "clip_high", "divisor", "normalise", "reward", "temperature", "kl", "exact",
)  # fmt: skip
"""Settings that a resumed run must share."""
MAX_REASONS = 8
"""Different reasons for failed rewards that are shown."""


class PromptRow(NamedTuple):
    """A prompt's tokens, its text, the row that is passed to the reward, and its file and line."""

    tokens: list[int]
    text: str
    row: Mapping[str, Any]
    where: str = ""


class RewardFeed:
    """Prompts, an engine and rewards; see :class:`colonnade.train.data_feed.DataFeed`.

    Raises :class:`ConfigError` for settings that do not apply.
    """

    def __init__(self, rows: Sequence[PromptRow], tune: TuneConfig, run: RunConfig, rank: int = 0, ranks: int = 1):
        check_reward_settings(run, tune)
        self.corpus, self.held_out, self.eval_every = None, None, 0
        self.no_validation_reason: str | None = "the rewards of the completions are logged instead"
        self.name, self._rows, self._tune, self._run = "this data", rows, tune, run
        self.sample_tokens = float(sum(len(row.tokens) for row in rows) / max(1, len(rows)) + tune.max_tokens)
        self.samples = RolloutSamples(len(rows), run, tune, rank, ranks)
        self.tokenizer: Tokenizer = _tokenizer(run)
        digest = hashlib.sha256(json.dumps([(row.tokens, row.row) for row in rows], sort_keys=True).encode())
        self.identity: dict[str, Any] = {"method": "grpo", "rows": digest.hexdigest()} | {
            key: getattr(tune, key) for key in IDENTITY
        }
        self._engine = RolloutEngine(run, tune, self.tokenizer, run.train.batch // ranks)
        self._rewards: RewardPool | None = None
        self._reference: Transformer | None = None
        self._metrics: dict[str, float] = {}
        self._messages, self._reported = list[str](), set[str]()
        self._dp: Axis | None = None

    def difference(self, old: Mapping[str, Any]) -> str | None:
        """How data or method differ from a checkpoint's, if at all."""
        for key, value in self.identity.items():
            if (was := old.get(key)) != value:
                return "it has different rows" if key == "rows" else f"{key} is {value}, and was {was}"
        return None

    # -- the reference model -------------------------------------------------------------------------------------------

    def needs_start_weights(self, world: Axis) -> bool:
        """Whether the reference needs its own copy of the weights; with adapters it is the model without them."""
        return self._tune.kl > 0 and self._run.model.lora is None

    def prepare(
        self,
        model: Transformer,
        pipeline: PipelineStep | None,
        world: Axis,
        device: torch.device,
        announce: Callable[[str], object],
    ) -> None:
        """Keep a copy of ``model``, which has the initial weights."""
        self._reference = copy_of(model, self._run, serving=False)
        copy_weights(model, self._reference)

    @torch.no_grad()
    def _score_reference(self, model: Transformer) -> None:
        """Set the reference's log-probabilities in all batches."""
        reference, device = self._reference or model, next(model.parameters()).device
        with adapters_off(reference):
            for batch in self.samples.batches:
                stream, attend, head = model_inputs(batch.to(device), reference)
                assert isinstance(head, PolicyLoss)
                assert batch.policy_4T is not None
                assert batch.predicted_R is not None
                logp_R = reference(stream, attend, head.logprobs)
                batch.policy_4T[3, batch.predicted_R] = logp_R.double().cpu()

    # -- one step ------------------------------------------------------------------------------------------------------

    def before_step(self, model: Transformer, seen: int) -> None:
        """Sample and score the completions of the step after ``seen`` completions; all ranks call this together."""
        self._dp = model.axes.dp
        if self._tune.exact and not self.samples.exact:
            self.samples.exact = make_exact(model)
        positions = self.samples.positions(seen)
        rows = [self._rows[number] for number in self.samples.rows(positions) for _ in range(self._tune.group)]
        answers = self._engine.run(model, partial(self._sample, positions, rows))
        self.samples.use_rollouts([Rollout(row.tokens, *each[:3]) for row, each in zip(rows, answers, strict=True)])
        if self._tune.kl:
            self._score_reference(model)
        group = self._tune.group
        groups = [answers[start : start + group] for start in range(0, len(answers), group)]
        rewards = [reward for *_, reward, _ in answers if reward is not None]
        total, scored, failed, skipped, tokens, count = self._dp.sum_(
            torch.tensor([
                math.fsum(rewards), len(rewards), len(answers) - len(rewards),
                sum(all(advantage is None for *_, advantage, _, _ in each) for each in groups),
                sum(len(ids) for ids, *_ in answers), len(answers),
            ], dtype=torch.float64)
        ).tolist()  # fmt: skip
        failures = [failure for *_, failure in answers if failure]
        if not scored:
            late = failures[0].startswith(TIMED_OUT)
            raise DataError(
                f"tune.reward {self._tune.reward} failed for all {count:g} completions of a step; the first one: "
                f"{failures[0]}; " + (f"raise --tune.reward_s {self._tune.reward_s:g}" if late else "fix it")
            )
        if failures:
            where = "" if self._dp.size == 1 else " on all ranks"
            what = f"{failed:g} of {count:g} rewards failed{where}, and their completions are skipped"
            self._report_once(failures[0], f"{what}; the first one: {failures[0]}")
        if skipped * group == count:
            self._report_once(
                "equal",
                "no prompt has completions with different rewards, so this step has no gradient; use a reward that "
                "differs between the completions of a prompt, or a larger --tune.group",
            )
        self._metrics = {
            "reward": total / scored,
            "reward_failures": failed,
            "skipped_groups": skipped,
            "answer_tokens": tokens / count,
        }

    def _sample(self, positions: range, rows: Sequence[PromptRow], engine: Engine) -> list[Any]:
        """(tokens, log-probabilities, advantage, reward, reason of failure) of each completion of ``rows``."""
        tune = self._tune
        numbers = [position * tune.group + answer for position in positions for answer in range(tune.group)]
        params = [
            SamplingParams(
                temperature=tune.temperature or 1.0, max_tokens=tune.max_tokens, logprobs=0, tempered_logprobs=True,
                seed=splitmix64(self._run.train.seed ^ splitmix64(number)) >> 1,
            ) for number in numbers
        ]  # fmt: skip
        completions = engine.generate([row.tokens for row in rows], params)
        if self._rewards is None:
            self._rewards = RewardPool(tune.reward, tune.reward_workers, tune.reward_s)
        scored = self._rewards.score(
            [Answer(row.text, each.text, row.row) for row, each in zip(rows, completions, strict=True)]
        )
        found: list[float | None] = []
        for start in range(0, len(rows), tune.group):
            found += advantages(scored[start : start + tune.group], normalise=tune.normalise)
        return [
            (list(each.token_ids), _logp(each), value, score.reward, score.failure)
            for each, value, score in zip(completions, found, scored, strict=True)
        ]

    def step_metrics(self) -> dict[str, float]:
        """Mean reward, failed rewards, skipped groups, mean length, mismatch of engine and trainer, and divergence."""
        assert self._dp is not None, "no step was taken"
        observed = torch.zeros(1, 4, dtype=torch.float64)
        if self.samples.observed:
            observed = torch.stack(self.samples.observed).double().cpu()
        self.samples.observed.clear()
        k3, count, kl = self._dp.sum_(observed[:, [0, 2, 3]].sum(0)).tolist()
        mismatch = {
            "mismatch_k3": k3 / max(1, count),
            "mismatch_max": float(self._dp.max_(observed[:, 1].max())),
        }
        if self._tune.kl:
            mismatch["kl"] = kl / max(1, count)
        return self._metrics | mismatch

    def messages(self) -> list[str]:
        """Reasons for failed rewards and for steps without a gradient, each once."""
        messages, self._messages = self._messages, []
        return messages

    def _report_once(self, reason: str, message: str) -> None:
        if reason not in self._reported and len(self._reported) < MAX_REASONS:
            self._reported.add(reason)
            self._messages.append(message)

    def close(self) -> None:
        """Stops the reward processes."""
        if self._rewards is not None:
            self._rewards.close()


def _logp(completion: Completion) -> list[float]:
    assert completion.logprobs is not None
    return [each.logprob for each in completion.logprobs if each.logprob is not None]


def _tokenizer(run: RunConfig) -> Tokenizer:
    tokenizer = start_tokenizer(run)
    if tokenizer is None:
        raise DataError(
            f"{run.train.pretrained_checkpoint} has no tokenizer, but completions are text; use a model with one"
        )
    return tokenizer


def check_reward_settings(run: RunConfig, tune: TuneConfig) -> None:
    """Raise :class:`ConfigError` for settings that do not apply to reward tuning."""
    plan = run.plan
    if check_tune_settings(run) or plan.cp > 1:
        raise ConfigError(
            "reward tuning supports only dp and tp, without train.compile, train.cuda_graph or a recompute "
            "budget; remove these, --plan.pp and --plan.cp"
        )
    ranks = plan.data_ranks
    if run.train.batch % (tune.group * ranks):
        unit = tune.group * ranks
        ranked = "" if ranks == 1 else f" times {ranks} data ranks"
        raise ConfigError(
            f"train.batch {run.train.batch} counts completions and is not divisible by tune.group "
            f"{tune.group}{ranked}; use a multiple, such as {-(-run.train.batch // unit) * unit}"
        )
    if not tune.reward:
        raise ConfigError("reward tuning needs a reward function; set --tune.reward FILE.py:FUNCTION")
    if run.model.moe is not None:
        raise ConfigError("reward tuning supports dense models only: the engine routes tokens by its own settings")
    if run.model.lora is not None and run.model.lora.base != "stored":
        raise ConfigError(
            f"reward tuning merges adapters into the engine's weights; remove lora.base {run.model.lora.base}"
        )
    if tune.exact and (plan.world > 1 or run.model.lora is not None):
        raise ConfigError("tune.exact supports one process without adapters; remove --tune.exact")
    if run.train.dropout or run.train.attention_dropout or run.train.embedding_dropout:
        raise ConfigError("dropout would change the probabilities of the sampled tokens; remove it")


def reward_feed(rows: Sequence[PromptRow], tune: TuneConfig, run: RunConfig) -> MakeFeed:
    """The data feed of reward tuning; raises :class:`DataError` for prompts that leave no room for a completion."""
    check_reward_settings(run, tune)
    if not rows:
        raise DataError("there are no prompts; pass at least one")
    named = [(row.where or f"prompt {number}", len(row.tokens)) for number, row in enumerate(rows, 1)]
    for where, length in named:
        if not length:
            raise DataError(f"{where}: the prompt has no tokens; write at least one word")
    where, longest = max(named, key=lambda each: each[1])
    if (needed := longest + tune.max_tokens) > (sequence := run.data.sequence):
        remedies: list[str] = []
        if needed <= run.model.context:
            remedies.append(f"--sequence {needed}")
        if longest < sequence:
            remedies.append(f"--tune.max_tokens {sequence - longest} or less")
        limit = f"a sequence of {sequence:,}{', the context of the model' if sequence == run.model.context else ''}"
        remedy = f"set {', or '.join(remedies)}" if remedies else "shorten or remove it"
        raise DataError(
            f"{where}: the longest prompt has {longest:,} tokens, and with a completion of {tune.max_tokens:,} it does "
            f"not fit {limit}; {remedy}"
        )
    return VaryingFeed(partial(RewardFeed, list(rows), tune))

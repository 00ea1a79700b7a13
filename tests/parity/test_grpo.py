"""Reward tuning: losses equal plain torch, advantages, divisors, refreshed engines, resuming, and a bandit."""

import math
import shutil
from pathlib import Path

import pytest
import tokenizers
import torch

from colonnade.checkpoint import native
from colonnade.cli import main
from colonnade.config import LoraConfig, ModelConfig, Plan, ServeConfig, TuneConfig
from colonnade.data import Tokenizer
from colonnade.errors import ConfigError, DataError
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from colonnade.train.loop import Trainer
from colonnade.train.trackers import read_rows
from colonnade.train.training_state import TrainingState
from colonnade.tune import rollout_engine
from colonnade.tune.grpo import PromptRow, RewardFeed, reward_feed
from colonnade.tune.rewards import Scored
from colonnade.tune.rollouts import Rollout, advantages, pack_rollouts
from colonnade.tune.tuner import Tuner, tuned_run
from tests import tuning
from tests.models import build
from tests.serve import tiny
from tests.worlds import assert_same
from tests.worlds import run as in_world

REWARD = """
def low(prompt, answer, row):
    words = answer.split()
    return sum(word < "b" for word in words) / max(1, len(words))

def length(prompt, answer, row):
    return float(len(answer) % 7)

def equal(prompt, answer, row):
    return 0.5

def first(prompt, answer, row):
    if row["prompt"] == "fox":
        while True:
            pass
    return 0.5 if row["prompt"] == "The quick" else float(len(answer) % 7)

def broken(prompt, answer, row):
    return row["no such key"]
"""


def reward(folder: Path, name: str) -> str:
    (folder / "reward.py").write_text(REWARD)
    return f"{folder / 'reward.py'}:{name}"


def test_advantages() -> None:
    group = [Scored(1.0), Scored(0.0), Scored(None, "late"), Scored(0.5)]
    assert advantages(group, normalise=False) == [0.5, -0.5, None, 0.0]
    scaled = advantages(group, normalise=True)
    assert scaled[0] == pytest.approx(0.5 / (0.5 + 1e-4))
    assert advantages([Scored(1.0)] * 3, normalise=False) == [None] * 3
    assert advantages([Scored(None), Scored(None)], normalise=False) == [None] * 2


def rows() -> list[PromptRow]:
    texts = ["The quick", "We the people", "fox"]
    return [PromptRow(tiny.tokenizer().encode(text), text, {"prompt": text}) for text in texts]


SLOW = pytest.mark.slow
CASES = [
    pytest.param("tokens", None, {"temperature": 0.7, "kl": 0.3}),
    pytest.param("answers", LoraConfig(rank=2), {"kl": 0.3}),
    pytest.param("constant", None, {}, marks=SLOW),
    pytest.param("tokens", LoraConfig(rank=2), {"temperature": 1.5}, marks=SLOW),
]


@pytest.mark.parametrize(("divisor", "lora", "more"), CASES)
def test_loss_and_gradient_equal_plain_torch(
    divisor: str, lora: LoraConfig | None, more: dict[str, float], tmp_path: Path
) -> None:
    """At the second step; the engine's log-probabilities are the model's, at the temperature."""
    tune = TuneConfig(reward=reward(tmp_path, "length"), group=4, max_tokens=6, divisor=divisor, **more)
    config = tuning.MODEL.replace(lora=lora)
    run = tuning.settings(tmp_path, tuning.start(tmp_path), config, batch=8, micro_batch=3)
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=reward_feed(rows(), tune, run)) as training,
    ):
        training.step()
        state = {name: p.detach().clone() for name, p in training.model.named_parameters()}
        outcome = training.step()
        feed = training.feed
        assert isinstance(feed, RewardFeed)
        rollouts = feed.samples.rollouts
        extra = outcome.extra
        assert extra["skipped_groups"] < 2
        assert 0 <= extra["mismatch_k3"] < 1e-20
        assert 0 < extra["mismatch_max"] < 1e-10
    model, reference = build(config), build(tuning.MODEL)
    model.load_state_dict(state)
    for name, p in model.named_parameters():
        p.requires_grad_(lora is None or ".adapter." in name)
    used = [each for each in rollouts if each.advantage is not None]
    assert 2 <= len(used) <= 8
    total = torch.zeros((), dtype=torch.float64)
    divergence = 0.0
    for prompt, answer, old, advantage in used:
        assert advantage is not None
        logp = tuning.logp(model, prompt + answer, tune.temperature or 1.0)[len(prompt) - 1 :]
        with torch.no_grad():
            ratio = tuning.logp(reference, prompt + answer, tune.temperature or 1.0)[len(prompt) - 1 :] - logp
        k3 = (ratio + logp.detach() - logp).exp() - 1 - (ratio + logp.detach() - logp)
        divergence += k3.sum().item()
        assert_same(logp.detach(), torch.tensor(old, dtype=torch.float64), 1e-10, "the engine's log-probabilities")
        weight = {"tokens": 1.0, "answers": 1 / len(answer), "constant": 1 / 6}[divisor]
        total = total - (advantage * weight * (logp - logp.detach()).exp()).sum() + tune.kl * weight * k3.sum()
    count = sum(len(each.answer) for each in used) if divisor == "tokens" else len(used)
    (total / count).backward()
    assert_same(outcome.loss_sum / outcome.count, total.detach() / count)
    assert_same(outcome.norm, tuning.norm(model))
    if tune.kl:
        assert extra["kl"] == pytest.approx(divergence / sum(len(each.answer) for each in used))
        assert extra["kl"] > 1e-6


def test_ratios_are_clipped_and_capped() -> None:
    from colonnade.model.policy_loss import PolicySettings, policy_loss

    logp_R = torch.tensor([0.0, math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5), math.log(9)])
    advantages_R = torch.tensor([2.0, 1.0, -1.0, 1.0, -1.0, -1.0])
    loss_R = policy_loss(logp_R, torch.zeros(6), advantages_R, PolicySettings())
    assert_same(loss_R, torch.tensor([-2.0, -1.28, 1.5, -0.5, 0.8, 2.0]), 1e-6)


def test_targets_are_the_answers_tokens() -> None:
    """An advantage of 0 counts in the divisor; an answer without one does not."""
    rollouts = [
        Rollout([1, 2, 3], [4, 5], [-1.0, -2.0], 0.5),
        Rollout([6], [7], [-3.0], None),
        Rollout([6], [8], [-4.0], 0.0),
    ]
    batch = pack_rollouts(rollouts, 8, TuneConfig(divisor="answers"))
    assert batch.targets_T.tolist() == [-100, -100, 4, 5, -100, -100, -100, 8, -100]
    assert batch.policy_4T is not None
    assert batch.policy_4T[:, 2:4].tolist() == [[0.5, 0.5], [0.5, 0.5], [-1.0, -2.0], [-1.0, -2.0]]
    assert batch.units == 2


def test_refresh_replaces_weights_in_place_and_empties_the_cache() -> None:
    prompt, params = "The quick brown fox jumps", SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    engine = Engine(tiny.model(), tiny.tokenizer(), ServeConfig(page_tokens=4))
    before = engine.generate([prompt], params)[0].token_ids
    other = tiny.noisy_copy(0.2)
    addresses = [p.data_ptr() for p in engine.model.parameters()]
    engine.add(prompt, params, request_id="running")
    engine.step()
    assert engine.update_weights(lambda model: model.load_state_dict(other.state_dict())) == 1
    assert [p.data_ptr() for p in engine.model.parameters()] == addresses
    engine.cancel("running")
    outputs = list(engine.stream(prompt, params))
    expected = Engine(other, tiny.tokenizer(), ServeConfig()).generate([prompt], params)[0].token_ids
    assert tuple(output.token for output in outputs) == expected != before
    assert {output.version for output in outputs} == {1}
    assert outputs[0].cached_tokens == 0


def test_the_cache_is_kept_between_steps_where_memory_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the first step, whose peak is not known yet; answers are bit for bit those after a release."""
    tune = TuneConfig(reward=reward(tmp_path, "length"), group=4, max_tokens=6)
    run = tuning.settings(tmp_path, tuning.start(tmp_path), batch=8)
    sampled: list[list[Rollout]] = []
    for free in (0, 1 << 60):
        monkeypatch.setattr(rollout_engine, "usable_bytes", lambda _, free=free: free)
        with (
            DistributedContext.build(run.plan, "cpu") as context,
            TrainingState(run, context, feed=reward_feed(rows(), tune, run)) as training,
        ):
            feed, kept = training.feed, []
            assert isinstance(feed, RewardFeed)
            for _ in range(3):
                training.step()
                assert feed._engine.engine is not None
                kept.append(feed._engine.engine.cache.bytes > 0)
            assert kept == [False, free > 0, free > 0]
            sampled.append(feed.samples.rollouts)
    assert sampled[0] == sampled[1]


PLANS = [
    pytest.param(Plan(dp=2, tp=2), LoraConfig(rank=2), marks=SLOW),
    pytest.param(Plan(tp=2, sequence_parallel=True), LoraConfig(rank=2)),
    pytest.param(Plan(dp=2), None, marks=SLOW),
]


@pytest.mark.parametrize(("plan", "lora"), PLANS, ids=["dp2-tp2-lora", "sequence-lora", "dp2"])
def test_any_plan_gives_the_same_answers_and_losses(plan: Plan, lora: LoraConfig | None, tmp_path: Path) -> None:
    """Weights gathered from FSDP's shards, adapters merged on tensor ranks, and a reference model."""
    tune = TuneConfig(reward=reward(tmp_path, "length"), group=4, max_tokens=6, kl=0.1, temperature=0.8)
    config = tuning.MODEL.replace(lora=lora)
    alone = tuning.settings(tmp_path / "alone", tuning.start(tmp_path), config, batch=8, steps=2, save_every=0)
    several = alone.replace(runs=tmp_path / "several", plan=plan, train=alone.train.replace(micro_batch=3))
    tuning.fit(alone, reward_feed(rows(), tune, alone))
    in_world(plan.world, tuning.fit, several, reward_feed(rows(), tune, several))
    for step, (ours, theirs) in enumerate(zip(read_rows(several.folder), read_rows(alone.folder), strict=True)):
        for key in ("loss", "grad_norm", "reward", "answer_tokens", "skipped_groups", "kl"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-9 if step else 1e-10), key
        assert ours["mismatch_max"] < 1e-10
    assert len({row["reward"] for row in read_rows(alone.folder)}) > 1


def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    """Rollouts and the reference model included."""
    tune = TuneConfig(reward=reward(tmp_path, "length"), group=4, max_tokens=6, kl=0.1)
    whole = tuning.settings(tmp_path / "whole", tuning.start(tmp_path), batch=8)
    feed = reward_feed(rows(), tune, whole)
    tuning.fit(whole, feed)
    resumed = whole.replace(runs=tmp_path / "resumed")
    shutil.copytree(whole.folder / "step-2", resumed.folder / "step-2")
    tuning.fit(resumed, feed)
    ours = tuning.weights(resumed)
    for name, x in tuning.weights(whole).items():
        assert torch.equal(x, ours[name]), name
    assert [row["reward"] for row in read_rows(whole.folder)][2:] == [
        row["reward"] for row in read_rows(resumed.folder)
    ]
    with pytest.raises(DataError, match="group is 2, and was 4"):
        tuning.fit(
            resumed.replace(train=resumed.train.replace(steps=5)), reward_feed(rows(), tune.replace(group=2), whole)
        )


def test_groups_of_equal_rewards_move_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune = TuneConfig(reward=reward(tmp_path, "equal"), group=4, max_tokens=2)
    run = tuning.settings(tmp_path, tuning.start(tmp_path), batch=8, weight_decay=0.0, steps=2, save_every=2)
    tuning.fit(run, reward_feed(rows(), tune, run))
    for row in read_rows(run.folder):
        assert (row["skipped_groups"], row["grad_norm"], row["loss"]) == (2, 0, 0)
    said = capsys.readouterr().out
    assert said.count("completions with different rewards, so this step has no gradient") == 1, "not each step"
    assert said.count("  reward ") == 2
    ours = tuning.weights(run)
    for name, x in build(tuning.MODEL).state_dict().items():
        assert torch.equal(ours[name], x), name


@pytest.mark.slow
def test_an_endless_reward_ends_its_sample_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune = TuneConfig(reward=reward(tmp_path, "first"), group=2, max_tokens=4, reward_s=3.0)
    run = tuning.settings(tmp_path, tuning.start(tmp_path), batch=6, micro_batch=6, steps=1, save_every=0)
    tuning.fit(run, reward_feed(rows(), tune, run))
    (row,) = read_rows(run.folder)
    assert row["reward_failures"] == 2
    assert row["skipped_groups"] >= 2, "that of equal rewards, and that without"
    assert "2 of 6 rewards failed, and their completions are skipped; the first one: took" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_answers_are_sampled_from_the_whole_distribution(name: str) -> None:
    """A filter would enter the ratio of probabilities (TRL issue 6789), so there is no setting for one."""
    with pytest.raises(ConfigError, match=name):
        TuneConfig(**{name: 0.8})


def test_a_reward_that_fails_for_every_answer_ends_the_run(tmp_path: Path) -> None:
    tune = TuneConfig(reward=reward(tmp_path, "broken"), group=4, max_tokens=2)
    run = tuning.settings(tmp_path, tuning.start(tmp_path), batch=8)
    with pytest.raises(
        DataError, match=r"failed for all 8 completions of a step; the first one: KeyError: 'no such key'; fix it$"
    ):
        tuning.fit(run, reward_feed(rows(), tune, run))


def test_prompts_without_room_for_an_answer_are_refused(tmp_path: Path) -> None:
    run = tuning.settings(tmp_path, tmp_path / "start", batch=8)
    tune = TuneConfig(reward=reward(tmp_path, "length"), group=4)
    sequence, context = run.data.sequence, run.model.context

    def refused(lengths: list[int], max_tokens: int) -> str:
        prompts = [PromptRow([1] * length, "", {}, f"p.jsonl, line {i}") for i, length in enumerate(lengths, 1)]
        with pytest.raises(DataError) as error:
            reward_feed(prompts, tune.replace(max_tokens=max_tokens), run)
        return str(error.value)

    assert sequence < context
    room = context - 8  # for an answer to the longest prompt
    assert refused([2, 8, 3], room) == (
        f"p.jsonl, line 2: the longest prompt has 8 tokens, and with a completion of {room} it does not fit a "
        f"sequence of {sequence}; set --sequence {context}, or --tune.max_tokens {sequence - 8} or less"
    )
    assert refused([2, 8], room + 1).endswith(f"; set --tune.max_tokens {sequence - 8} or less")
    assert refused([sequence], 1).endswith(f"; set --sequence {sequence + 1}")
    assert refused([context], 1).endswith("; shorten or remove it")
    run = run.replace(data=run.data.replace(sequence=context))
    assert refused([3, 2], context).endswith(
        f"a sequence of {context}, the context of the model; set --tune.max_tokens {context - 3} or less"
    )
    assert refused([2, 0], 1) == "p.jsonl, line 2: the prompt has no tokens; write at least one word"


def test_a_trainer_does_not_compile_answers_by_default(tmp_path: Path) -> None:
    """Also without a Tuner; a GPU's default is to compile, which is refused."""
    tune = TuneConfig(reward=reward(tmp_path, "length"), group=4, max_tokens=2)
    run = tuning.settings(tmp_path, tuning.start(tmp_path), batch=8)
    assert run.resolved("cuda").train.compile
    feed = reward_feed(rows(), tune, run)
    assert Trainer(run, feed=feed).run.resolved("cuda").train.compile is False
    with DistributedContext.build(run.plan, "cpu") as context, TrainingState(run, context, feed=feed) as training:
        assert training.run.resolved("cuda").train.compile is False
    with pytest.raises(ConfigError, match=r"without train\.compile"):
        Trainer(run.replace(train=run.train.replace(compile=True)), feed=feed)


def _bandit(folder: Path) -> Path:
    """A model of 64 words, of which 8 begin with "a"."""
    words = [f"a{i}" for i in range(8)] + [f"z{i}" for i in range(56)]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="z0"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    config = ModelConfig(vocab_size=64, layers=1, width=32, heads=2, ffn_width=64, context=16)
    meta = native.Meta(model=config)
    native.save(
        folder / "start", build(config, dtype=torch.float32), meta, DistributedContext.solo(), tokenizer=Tokenizer(core)
    )
    return folder / "start"


@pytest.mark.slow
def test_a_bandit_is_solved_in_40_steps(tmp_path: Path) -> None:
    """Answers in 8 of 64 words: the mean reward rises from an eighth to at least 0.95."""
    file = tuning.write_rows(tmp_path / "rows.jsonl", [{"prompt": "z1 z2"}, {"prompt": "z3"}])
    train = tuning.TRAIN.replace(
        steps=40, batch=32, micro_batch=32, lr=1e-2, dtype="float32", weight_decay=0.0, save_every=0, clip=1.0
    )
    run = tuned_run(_bandit(tmp_path), runs=tmp_path, device="cpu", sequence=12, train=train)
    tune = TuneConfig(reward=reward(tmp_path, "low"), group=16, max_tokens=4)
    tuner = Tuner(run, file, "grpo", tune)
    assert tuner.run.resolved("cuda").train.compile is False, "a GPU compiles only what has one shape"
    tuner.fit()
    rewards = [row["reward"] for row in read_rows(run.folder)]
    assert rewards[0] < 0.3
    assert max(rewards[35:]) >= 0.95


def test_command_line_and_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = tuning.start(tmp_path)
    file = tuning.write_rows(
        tmp_path / "rows.jsonl", [{"prompt": "The quick"}, {"prompt": [{"role": "user", "content": "x"}]}]
    )
    name = reward(tmp_path, "length")
    monkeypatch.chdir(tmp_path)
    flags = [
        "--device",
        "cpu",
        "--train.steps",
        "1",
        "--train.batch",
        "4",
        "--tune.group",
        "2",
        "--tune.max_tokens",
        "4",
    ]
    main(["finetune", str(start), "--method", "grpo", "--data", str(file), "--tune.reward", name, *flags])
    (row,) = read_rows(tmp_path / "runs" / "grpo")
    assert {"reward", "reward_failures", "skipped_groups", "answer_tokens"} <= row.keys()
    run, tune = tuned_run(start), TuneConfig(reward=name, max_tokens=4)
    with pytest.raises(ConfigError, match="supports only dp and tp"):
        Tuner(run.replace(plan=Plan(cp=2)), file, "grpo", tune)
    with pytest.raises(ConfigError, match=r"tune.group 16 times 4 data ranks; use a multiple, such as 64"):
        Tuner(run.replace(plan=Plan(dp=4)), file, "grpo", tune.replace(group=16))
    with pytest.raises(ConfigError, match=r"tune.group 7; use a multiple, such as 35"):
        Tuner(run, file, "grpo", tune.replace(group=7))
    with pytest.raises(ConfigError, match=r"there is no file absent\.py"):
        Tuner(run, tmp_path / "absent.jsonl", "grpo", tune.replace(reward="absent.py:f"))
    with pytest.raises(ConfigError, match="needs a reward function"):
        Tuner(run, file, "grpo", tune.replace(reward=""))
    with pytest.raises(ConfigError, match="does not apply to grpo"):
        Tuner(run, file, "grpo", tune, held_out=file)
    with pytest.raises(DataError, match=r"tokens, .* completion of 64 .* set --tune.max_tokens \d+ or less"):
        Tuner(run, file, "grpo", tune.replace(max_tokens=64))
    with pytest.raises(ConfigError, match="dropout would change"):
        Tuner(run.replace(train=run.train.replace(dropout=0.1)), file, "grpo", tune)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_ratios_are_one_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    """Over two steps; the gradient is the ordinary one. Without the setting the same run's ratios differ."""
    tune = TuneConfig(reward=reward(tmp_path, "length"), group=4, max_tokens=6, temperature=0.7)
    run = tuning.settings(tmp_path, tuning.start(tmp_path), batch=8, micro_batch=3, dtype=dtype)
    found: list[list[tuple[float, float, float]]] = []
    for each in (tune.replace(exact=True), tune):
        with (
            DistributedContext.build(run.plan, "cpu") as context,
            TrainingState(run, context, feed=reward_feed(rows(), each, run)) as training,
        ):
            steps = [training.step() for _ in range(2)]
            found.append([(s.extra["mismatch_max"], s.extra["mismatch_k3"], float(s.norm)) for s in steps])
    exact, default = found
    assert [step[:2] for step in exact] == [(0.0, 0.0)] * 2
    assert default[0][0] > 0
    assert exact[0][2] == pytest.approx(default[0][2], rel=1e-4 if dtype == "float32" else 0.2)

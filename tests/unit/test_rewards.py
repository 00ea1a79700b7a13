"""Rewards in worker processes: limits, failures, order."""

import importlib.util
from pathlib import Path

import pytest

from colonnade.errors import ConfigError, DataError
from colonnade.reward_worker import load_reward
from colonnade.tune.rewards import Answer, RewardPool

FUNCTIONS = """
import os, time
from fractions import Fraction
import numpy as np

def reward(prompt, answer, row):
    if answer == "raise":
        raise ValueError("no")
    if answer == "exit":
        os._exit(3)
    if answer == "forever":
        while True:
            time.sleep(0.01)
    if answer == "text":
        return "x"
    if answer == "nan":
        return float("nan")
    if answer == "huge":
        return 10**400
    if answer == "numpy":
        return np.float32(0.5)
    if answer == "fraction":
        return Fraction(1, 4)
    if answer == "array":
        return np.zeros(2)
    return len(answer) + row["bonus"]

number = 3
"""


LIMIT_S = 5.0
"""A loaded machine answers the other calls in far less."""


@pytest.fixture
def functions(tmp_path: Path) -> str:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return f"{tmp_path / 'functions.py'}:reward"


@pytest.mark.slow
def test_failures_end_their_sample_only(functions: str) -> None:
    answers = ["ab", "raise", "exit", "forever", "text", "nan", "huge", "abc", "é\ud800"]
    with RewardPool(functions, workers=2, limit_s=LIMIT_S) as pool:
        scored = pool.score([Answer("p", answer, {"bonus": 0.5}) for answer in answers])
        again = pool.score([Answer("p", "abcd", {"bonus": 0})])
    assert [each.reward for each in scored] == [2.5, None, None, None, None, None, None, 3.5, 2.5]
    failures = [each.failure for each in scored]
    assert failures[1] == "ValueError: no"
    assert failures[2] == "ended its process"
    assert failures[3] == f"took longer than {LIMIT_S:g} s"
    assert "not a finite number" in failures[4]
    assert "not a finite number" in failures[5]
    assert "not a finite number" in failures[6]
    assert again[0].reward == 4


def test_numbers_of_other_libraries_are_rewards(functions: str) -> None:
    answers = [Answer("p", answer, {"bonus": 0.0}) for answer in ("numpy", "fraction", "array")]
    with RewardPool(functions, limit_s=LIMIT_S) as pool:
        scored = pool.score(answers)
    assert [each.reward for each in scored] == [0.5, 0.25, None]
    assert "TypeError" in scored[2].failure


def test_no_answers_need_no_process() -> None:
    with RewardPool("nowhere.py:f") as pool:
        assert pool.score([]) == []


def test_bad_names(functions: str, tmp_path: Path) -> None:
    file = functions.rpartition(":")[0]
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "needs.py").write_text("import no_such_module")
    for name, message in (
        ("reward", "write FILE.py:FUNCTION"),
        (f"{file}:other", "functions.py has no function 'other'; name one of its functions: reward$"),
        (f"{file}:number", "has 'number', which is not a function; name one of its functions: reward$"),
        (f"{tmp_path}/none.py:f", "there is no file .*none.py; check its path$"),
        (f"{tmp_path}/empty.py:f", "empty.py has no function 'f'; define one in it$"),
        (f"{tmp_path}/broken.py:f", "broken.py raises ZeroDivisionError when it is imported: .*; fix .*broken.py$"),
        (f"{tmp_path}/needs.py:f", "needs.py raises ModuleNotFoundError .*'no_such_module'; fix .*needs.py$"),
        ("no_such_module:f", "there is no module no_such_module; write FILE.py:FUNCTION, or install it$"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_reward(name)
    with RewardPool("no_such_module:f") as pool, pytest.raises(DataError, match="did not start"):
        pool.score([Answer("p", "a", {})])


def test_verifiers_of_reasoning_gym() -> None:
    """The real package where it is installed; otherwise its name is refused with a remedy."""
    if importlib.util.find_spec("reasoning_gym") is None:
        with pytest.raises(ConfigError, match="pip install reasoning-gym"):
            load_reward("reasoning_gym:leg_counting")
        return
    import reasoning_gym  # pyrefly: ignore[missing-import]

    reward = load_reward("reasoning_gym:leg_counting")
    for entry in reasoning_gym.create_dataset("leg_counting", size=3, seed=1):
        row = {"answer": entry["answer"], "metadata": entry["metadata"]}
        assert reward(entry["question"], f"so <answer>{entry['answer']}</answer>", row) == 1
        assert reward(entry["question"], "none", row) < 1
    with pytest.raises(ConfigError, match="use one of its tasks"):
        load_reward("reasoning_gym:nothing")

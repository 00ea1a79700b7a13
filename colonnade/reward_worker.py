"""A process that calls a reward function (:mod:`colonnade.tune.rewards`); it imports neither torch nor the trainer."""

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from types import FunctionType
from typing import Any, SupportsFloat, cast

from colonnade.errors import ConfigError

RewardFunction = Callable[[str, str, Mapping[str, Any]], float]
"""(prompt, completion, row) -> reward."""


def load_reward(name: str) -> RewardFunction:
    """The function that ``name`` names: FILE.py:FUNCTION, MODULE:FUNCTION, or reasoning_gym:TASK, its verifier.

    Raises :class:`ConfigError` if there is none.
    """
    source, _, function = name.rpartition(":")
    if not (source and function):
        raise ConfigError(f"tune.reward is {name!r}; write FILE.py:FUNCTION, MODULE:FUNCTION or reasoning_gym:TASK")
    if source == "reasoning_gym":
        return _verifier(function)
    if source.endswith(".py") and not Path(source).is_file():
        raise ConfigError(f"tune.reward {name}: there is no file {source}; check its path")
    try:
        if source.endswith(".py"):
            spec = importlib.util.spec_from_file_location(f"reward_{Path(source).stem}", source)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
    except Exception as why:  # noqa: BLE001 - the user's module may raise anything
        if isinstance(why, ModuleNotFoundError) and why.name == source:
            raise ConfigError(
                f"tune.reward {name}: there is no module {source}; write FILE.py:FUNCTION, or install it"
            ) from None
        raise ConfigError(
            f"tune.reward {name}: {source} raises {type(why).__name__} when it is imported: {why}; fix {source}"
        ) from None
    found = getattr(module, function, None)
    if not callable(found):
        fault = f"has no function '{function}'" if found is None else f"has '{function}', which is not a function"
        functions = [key for key, value in vars(module).items() if isinstance(value, FunctionType)
                     and value.__module__ == module.__name__]  # fmt: skip
        remedy = f"name one of its functions: {', '.join(functions[:8])}" if functions else "define one in it"
        raise ConfigError(f"tune.reward {name}: {source} {fault}; {remedy}")
    return cast(RewardFunction, found)


def _verifier(task: str) -> RewardFunction:
    """The verifier of a task of reasoning-gym (Stojanovski 2025, arXiv 2505.24760).

    A row has the entry's ``answer`` and ``metadata``; its question is the prompt. If a completion has <answer> tags,
    the last one's content is verified.
    """
    try:
        factory = importlib.import_module("reasoning_gym.factory")
        score = factory.get_score_answer_fn(task)
    except ImportError as why:
        raise ConfigError(
            f"tune.reward reasoning_gym:{task} needs a package: {why}; pip install reasoning-gym"
        ) from None
    except ValueError as why:
        raise ConfigError(
            f"tune.reward reasoning_gym:{task}: {why}; use one of its tasks, such as leg_counting"
        ) from None

    def verify(prompt: str, answer: str, row: Mapping[str, Any]) -> float:
        _, tag, inside = answer.rpartition("<answer>")
        text = inside.partition("</answer>")[0] if tag else answer
        return float(score(text.strip(), {"question": prompt, **row}))

    return verify


def _number(value: object) -> object:
    """A number of another library, such as numpy's, as a float; anything else unchanged."""
    if isinstance(value, int | float) or not isinstance(value, SupportsFloat):
        return value
    return float(value)


def main() -> None:
    """The process: its arguments are the number of its pipe, the function's name, and the parent."""
    pipe, name, parent = sys.argv[1:4]
    work(Connection(int(pipe)), name, int(parent))


def work(pipe: Connection, name: str, parent: int) -> None:
    """Serve calls until the process ``parent`` ends or closes the pipe."""
    sys.path.insert(0, "")
    function = load_reward(name)
    pipe.send_bytes(b'{"reward": 0}')
    while os.getppid() == parent:
        try:
            call = json.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            return
        try:
            text = json.dumps({"reward": _number(function(call["prompt"], call["answer"], call["row"]))})
        except Exception as why:  # noqa: BLE001 - one sample's failure
            text = json.dumps({"failure": f"{type(why).__name__}: {why}"})
        pipe.send_bytes(text.encode())

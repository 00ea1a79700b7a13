"""Evaluates a model on tasks: lm-eval's, our own in ``tasks/``, WikiText-103 and LAMBADA from files.

Tasks of lm-eval load their data with ``datasets``, from its cache or the hub. Ours come from a package and need no
network.
"""

import logging
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval
import lm_eval.evaluator
import yaml
from lm_eval.tasks import TaskManager

from colonnade.config import ServeConfig, did_you_mean
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError, DataError
from colonnade.evaluate.harness import HarnessModel, follow
from colonnade.evaluate.report import write_report
from colonnade.evaluate.scorer import STOP, Scorer
from colonnade.evaluate.zeroshot import lambada, read_lambada, read_wikitext, wikitext103
from colonnade.model import Transformer
from colonnade.parallel.axis import SOLO, Axis
from colonnade.parallel.device_memory import usable_bytes
from colonnade.parallel.launch import launch
from colonnade.serve.worker import open_context

# The commit of any repository in the current folder; outside a repository git prints an error.
lm_eval.evaluator.get_git_commit_hash = lambda: ""

FOLDER = Path(__file__).parent / "tasks"
FROM_FILES = {"wikitext103": "wiki.test.tokens", "lambada": "lambada_test.jsonl"}
"""Tasks that need a file, and its usual name."""


class TaskOptions(NamedTuple):
    """The tasks to evaluate, and their options."""

    tasks: tuple[str, ...]
    """Names, or YAML files of tasks."""
    limit: int | None = None
    """Examples of each task; None: all."""
    shots: int | None = None
    """Solved examples before each question; None: as defined by the task."""
    data: tuple[Path, ...] = ()
    """Files of the tasks that need one, by their usual names, or in this order."""
    chat: bool = False
    """Put questions into the model's chat template."""
    budget_tokens: int = 0
    """Tokens of one forward pass; 0: by the device."""


@dataclass(frozen=True)
class TaskResult:
    """The metrics of one task."""

    task: str
    metrics: dict[str, float]
    stderr: dict[str, float] = field(default_factory=dict)
    examples: int = 0
    samples: tuple[dict[str, Any], ...] = ()
    """A few examples with the model's outputs."""


def bundled_tasks() -> list[str]:
    """Names of the tasks in the folder ``tasks``."""
    return sorted(file.stem for file in FOLDER.glob("*.yaml"))


def check_tasks(options: TaskOptions) -> TaskManager:
    """A manager of all tasks; raises :class:`ConfigError` for an unknown one, before a model is loaded."""
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit {options.limit} is not positive; omit it for all examples")
    if options.shots is not None and not 0 <= options.shots <= 1000:
        raise ConfigError(f"--shots {options.shots} is not from 0 to 1,000")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    harness = [name for name in options.tasks if name not in FROM_FILES and not name.endswith((".yaml", ".yml"))]
    for name in options.tasks:
        if name.endswith((".yaml", ".yml")) and not Path(name).is_file():
            raise ConfigError(f"there is no task file {name}")
    own = bundled_tasks()
    manager = TaskManager(include_path=str(FOLDER), include_defaults=not set(harness) <= set(own))
    for name in harness:
        if not manager.match_tasks([name]):
            known = [*FROM_FILES, *own, *manager.all_tasks]
            raise ConfigError(f"lm-eval has no task '{name}'{did_you_mean(name, known)}; ours are {', '.join(own)}")
    for name in set(FROM_FILES) & set(options.tasks):
        _data_file(name, options)
    return manager


def evaluate_tasks(spec: Any, options: TaskOptions, out: Path | None = None) -> list[TaskResult]:
    """Evaluate the model of ``spec`` (a :class:`~colonnade.model_spec.ModelSpec`) in the processes of its plan.

    Writes ``results.json`` and ``report.html`` into the folder ``out``. Raises :class:`DataError` if the data of a task
    are missing, and :class:`ConfigError` for tasks that do not exist.
    """
    check_tasks(options)
    started_s = time.monotonic()
    results = launch(_evaluate, (spec, options), spec.plan)
    if out is not None and results is not None:
        write_report(out, spec.model, results, options._asdict(), time.monotonic() - started_s)
    return results or []


def _evaluate(spec: Any, options: TaskOptions) -> list[TaskResult] | None:
    with open_context(spec.plan, spec.device) as context:
        own = context.replica()
        with replace(spec, plan=own.plan).load(own) as model:
            return evaluate_model(model.transformer, model.tokenizer, options, name=model.source, data=context.axes.dp)


def evaluate_model(
    model: Transformer,
    tokenizer: Tokenizer,
    options: TaskOptions,
    serve: ServeConfig | None = None,
    name: str = "model",
    data: Axis = SOLO,
) -> list[TaskResult] | None:
    """Evaluate a loaded model; every rank calls this, and ranks above 0 get None.

    ``data``: replicas of the model that share the requests.
    """
    serve = serve or _serve_config(model)
    scorer = Scorer(model, options.budget_tokens, data)
    if not scorer.is_leader:
        follow(scorer, tokenizer, serve)
        return None
    try:
        manager = check_tasks(options)
        harness = HarnessModel(scorer, tokenizer, serve, name)
        return [_evaluate_task(task, options, manager, harness, scorer, tokenizer) for task in options.tasks]
    finally:
        scorer.send(STOP)


def _serve_config(model: Transformer) -> ServeConfig:
    """An engine with at most a quarter of a GPU's free memory for its cache: scoring needs the rest."""
    device = next(model.parameters()).device
    return ServeConfig(cache_bytes=max(1, usable_bytes(device) // 4)) if device.type == "cuda" else ServeConfig()


def _evaluate_task(
    task: str, options: TaskOptions, manager: TaskManager, harness: HarnessModel, scorer: Scorer, tokenizer: Tokenizer
) -> TaskResult:
    if task in FROM_FILES:
        file = _data_file(task, options)
        if task == "wikitext103":
            found = wikitext103(scorer, tokenizer, read_wikitext(file))
        else:
            found = lambada(scorer, tokenizer, read_lambada(file)[: options.limit])
        stderr = {"acc": found.pop("acc_stderr")} if "acc_stderr" in found else {}
        return TaskResult(task, found, stderr, int(found.pop("n", found.get("words", 0))))
    given: Any = _load_yaml(Path(task)) if task.endswith((".yaml", ".yml")) else task
    try:
        simple_evaluate: Any = lm_eval.simple_evaluate
        found = simple_evaluate(
            harness, tasks=[given], num_fewshot=options.shots, limit=options.limit, task_manager=manager,
            bootstrap_iters=0, log_samples=True, apply_chat_template=options.chat,
        )  # fmt: skip
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise DataError(
            f"task {task} cannot load its data: {_first_line(error)}; {_needed_data(task, manager)}"
        ) from None
    assert found is not None, "rank 0 has the results"
    return _result(Path(task).stem if task.endswith((".yaml", ".yml")) else task, found)


def _result(task: str, found: Mapping[str, Any]) -> TaskResult:
    """The metrics of a task or group in lm-eval's results."""
    name = task if task in found["results"] else next(iter(found["results"]))
    metrics, stderr = dict[str, float](), dict[str, float]()
    own = found.get("samples", {}).get(name, ())
    for key, value in found["results"][name].items():
        metric, _, kind = key.partition(",")
        if isinstance(value, int | float) and kind and not metric.endswith("_stderr"):
            label = metric + ("" if kind == "none" else f" ({kind})")
            metrics[label] = float(value)
            scores = [each[metric] for each in own if metric in each and each.get("filter", kind) == kind]
            if (error := _standard_error(scores, float(value))) is not None:
                stderr[label] = error
    samples = [sample for each in found.get("samples", {}).values() for sample in each]
    count = sum(each["effective"] for each in found.get("n-samples", {}).values())
    return TaskResult(task, metrics, stderr, count, tuple(map(_short_sample, samples[:5])))


def _standard_error(scores: Sequence[Any], mean: float) -> float | None:
    """The standard error of a metric that is the mean of its examples' scores.

    lm-eval would start a pool of processes for those of perplexities.
    """
    if len(scores) < 2 or not all(isinstance(score, bool | int | float) for score in scores):
        return None
    if abs(statistics.fmean(scores) - mean) > 1e-9:
        return None
    return statistics.stdev(map(float, scores)) / math.sqrt(len(scores))


def _short_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A short form of a sample for the report."""
    arguments = [str(each)[:2000] for each in next(iter(sample["arguments"]), ())][:2]
    return {
        "arguments": arguments,
        "target": str(sample["target"])[:500],
        "answers": str(sample["filtered_resps"])[:500],
    }


def _data_file(task: str, options: TaskOptions) -> Path:
    """The file of a task: the one of its usual name in ``options.data``, or the only one."""
    usual = FROM_FILES[task]
    wanted = [name for name in options.tasks if name in FROM_FILES]
    for path in options.data:
        if path.name == usual or (path.is_dir() and (path / usual).is_file()):
            return path / usual if path.is_dir() else path
    if len(wanted) == len(options.data) == 1 and not options.data[0].is_dir():
        return options.data[0]
    schema = "WikiText-103's tokens separated by spaces" if task == "wikitext103" else 'lines like {"text": "…"}'
    raise DataError(f"task {task} needs the file {usual} ({schema}); pass it, or its folder, with --data")


def _load_yaml(path: Path) -> dict[str, Any]:
    """A task from a user's file; ``!function`` runs Python of that file's folder, so it is refused here."""
    try:
        loaded = yaml.safe_load(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not a task in YAML: {_first_line(error)}") from None
    if not (isinstance(loaded, dict) and "task" in loaded):
        raise ConfigError(f"{path} is not a task of lm-eval: it has no key 'task'")
    return loaded


def _needed_data(task: str, manager: TaskManager) -> str:
    """The data that a task reads, for an error message."""
    index = manager.task_index.get(task)
    path = getattr(index, "yaml_path", None)
    where = f"its definition is {path}" if path else "see its definition"
    return f"{where}; data from the Hub must be in the datasets cache, or the Hub reachable"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]

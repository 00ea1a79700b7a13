"""What a loaded model's experts are told: to work otherwise than they were trained, or from host memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from colonnade.config.base import Config, plural
from colonnade.config.model import ModelConfig
from colonnade.config.moe import MAX_CAPACITY, MAX_EXPERTS, RouterConfig
from colonnade.errors import ConfigError

Capacity = Annotated[float, Field(ge=-MAX_CAPACITY, le=MAX_CAPACITY, allow_inf_nan=False)] | Literal["off"] | None
"""A capacity factor, "off" for none (dropless), or None: as trained."""
MAX_LISTED_TASKS = 12
"""Names of tasks that an error lists."""


class ExpertsConfig(Config):
    """How a mixture of experts works where it is not trained; what is left out stays as it was trained."""

    active: int | None = Field(default=None, ge=1, le=MAX_EXPERTS)
    """A: experts that a token goes to (top-k); None: as trained."""
    capacity: Capacity = None
    """Capacity factor, or off: every token reaches its experts; None: as trained."""
    task: Annotated[int, Field(ge=0, lt=1 << 16)] | str | None = None
    """Router 'task': the task that all tokens are of: its number, or the name that the corpus gave it, of a file also
    without its folder and ending (colonnade corpus --tasks tells numbers and names; a number is never taken for a
    name)."""
    resident: int | None = Field(default=None, ge=1, le=1 << 20)
    """Layers whose experts are in the device's memory at a time; those of all others wait in host memory and come while
    the layers before them compute (2 or more; with 1 nothing overlaps). None: all layers'."""

    def of(self, model: ModelConfig, tasks: Sequence[str] = ()) -> ModelConfig:
        """``model`` with these changes; ``tasks`` are the names of those that its router knows. Raises
        :class:`ConfigError` for what it cannot do.
        """
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if not given:
            return model
        if (moe := model.moe) is None:
            names = " and ".join(f"--experts.{name}" for name in given)
            raise ConfigError(f"{names} would change a mixture of experts, and this model has none; leave it out")
        kept, each = moe.router.groups_kept, moe.experts // moe.router.groups
        if self.active is not None and self.active > (most := kept * each):
            held = "" if most == moe.experts else f", of which it may use {kept} groups of {each}"
            raise ConfigError(
                f"a token cannot go to {self.active} of {moe.experts} experts{held}; set --experts.active {most} or "
                "less"
            )
        if self.resident is not None and self.resident > (layers := model.expert_layers):
            raise ConfigError(
                f"--experts.resident {self.resident} is more than the {plural(layers, 'layer')} of experts that this "
                "model has; leave it out to keep all of them on the device"
                + (f", or set it to {layers - 1} or less" if layers > 1 else "")
            )
        router = moe.router if self.task is None else moe.router.replace(task=_task_id(self.task, moe.router, tasks))
        moe = moe.replace(active=self.active or moe.active, router=router)
        if self.capacity is not None:
            moe = moe.replace(capacity=None if self.capacity == "off" else self.capacity)
        return model.replace(moe=moe)


AS_TRAINED = ExpertsConfig()
"""No change."""


def _task_id(task: int | str, router: RouterConfig, names: Sequence[str]) -> int:
    """A task's number, given that or its name."""
    if router.kind != "task":
        raise ConfigError(f"router '{router.kind}' knows no tasks; leave --experts.task out")
    if isinstance(task, int) and task < router.tasks:
        return task
    if isinstance(task, str):
        for called in (list(names), [Path(name).name for name in names], [Path(name).stem for name in names]):
            if called.count(task) == 1:
                return called.index(task)
        said = f"no task is called '{task}'" + ("" if names else ": this model has come without its tasks' names")
    else:
        said = f"there is no task {task} among {router.tasks}"
    raise ConfigError(f"{said}; set --experts.task to {_task_choices(router, names)}")


def _task_choices(router: RouterConfig, names: Sequence[str]) -> str:
    """What ``--experts.task`` takes: ``"one of 0 to 2"``, or with names ``"one of 0 (web), 1 (books)"``."""
    if not names:
        return f"one of 0 to {router.tasks - 1}"
    told = [f"{number} ({name})" for number, name in enumerate(names[:MAX_LISTED_TASKS])]
    return f"one of {', '.join(told)}" + (
        f", … {len(names) - 1} ({names[-1]})" if len(names) > MAX_LISTED_TASKS else ""
    )


def check_task(model: ModelConfig, tasks: Sequence[str] = ()) -> None:
    """Raise :class:`ConfigError` for a model whose experts depend on a task that nobody has said, of ``tasks``."""
    router = model.moe and model.moe.router
    if router and router.kind == "task" and router.task is None:
        raise ConfigError(
            f"router 'task' knows {router.tasks} tasks, and not which one a text is of; set --experts.task to "
            f"{_task_choices(router, tasks)}"
        )


def check_generates(model: ModelConfig, name: str = "this model") -> None:
    """Raise :class:`ConfigError` for a model that cannot generate, by its ``name``.

    Each token of such a model, or its choice of experts, depends on the tokens after it.
    """
    if not model.causal:
        raise ConfigError(
            f"{name} attends in both directions (causal = False), so it cannot generate text; in Python, "
            "colonnade.load(...).hidden(tokens) returns its hidden states"
        )
    check_task(model)
    if model.moe is not None and model.moe.router.kind == "sequence":
        raise ConfigError(
            "router 'sequence' chooses experts by the whole sequence, whose end a model that generates has not written "
            "yet; such a model trains and scores (colonnade eval)"
        )

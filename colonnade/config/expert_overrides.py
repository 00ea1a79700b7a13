"""Changes to a loaded mixture of experts: a different top-k or capacity, a fixed task, experts in host memory.

Also checks whether a model can generate.
"""

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
"""Maximum number of tasks that an error message lists by name."""


class ExpertsConfig(Config):
    """Overrides for a trained mixture of experts; unset fields stay as trained."""

    active: int | None = Field(default=None, ge=1, le=MAX_EXPERTS)
    """A: experts per token (top-k); None: as trained."""
    capacity: Capacity = None
    """Capacity factor; off: dropless, no token is dropped; None: as trained."""
    task: Annotated[int, Field(ge=0, lt=1 << 16)] | str | None = None
    """Router 'task': the task of all tokens, by number or by its name in the corpus. The name of a file may be given
    without its folder and suffix. colonnade corpus --tasks prints numbers and names; a number is never read as a
    name."""
    layers_on_device: int | None = Field(default=None, ge=1, le=1 << 20)
    """Layers whose experts are in device memory at a time. The experts of the other layers stay in host memory and are
    copied while the layers before them compute (needs 2 or more; with 1 nothing overlaps). None: all layers."""

    def apply_to(self, model: ModelConfig, tasks: Sequence[str] = ()) -> ModelConfig:
        """``model`` with these overrides; ``tasks`` are the names of its router's tasks.

        Raises :class:`ConfigError` for an override that the model does not support.
        """
        overrides = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if not overrides:
            return model
        if (moe := model.moe) is None:
            names = " and ".join(f"--experts.{name}" for name in overrides)
            raise ConfigError(f"{names} would change a mixture of experts, and this model has none; remove it")
        groups, group_size = moe.router.groups_kept, moe.experts // moe.router.groups
        if self.active is not None and self.active > (limit := groups * group_size):
            reason = "" if limit == moe.experts else f", of which it may use {groups} groups of {group_size}"
            raise ConfigError(
                f"a token cannot go to {self.active} of {moe.experts} experts{reason}; set --experts.active {limit} or "
                "less"
            )
        if self.layers_on_device is not None and self.layers_on_device > (layers := model.expert_layers):
            raise ConfigError(
                f"--experts.layers_on_device {self.layers_on_device} is more than the "
                f"{plural(layers, 'layer')} of experts that this "
                "model has; omit it to keep all of them on the device"
                + (f", or set it to {layers - 1} or less" if layers > 1 else "")
            )
        router = moe.router if self.task is None else moe.router.replace(task=_task_id(self.task, moe.router, tasks))
        moe = moe.replace(active=self.active or moe.active, router=router)
        if self.capacity is not None:
            over = "batch" if moe.capacity_over == "sequence" else moe.capacity_over
            factor = None if self.capacity == "off" else self.capacity
            moe = moe.replace(capacity=factor, capacity_tokens=None, capacity_over=over)
        return model.replace(moe=moe)


AS_TRAINED = ExpertsConfig()
"""No overrides."""


def _task_id(task: int | str, router: RouterConfig, names: Sequence[str]) -> int:
    """The number of a task that is named or numbered."""
    if router.kind != "task":
        raise ConfigError(f"router '{router.kind}' has no tasks; remove --experts.task")
    if isinstance(task, int) and task < router.tasks:
        return task
    if isinstance(task, str):
        for spellings in (list(names), [Path(name).name for name in names], [Path(name).stem for name in names]):
            if spellings.count(task) == 1:
                return spellings.index(task)
        problem = f"no task is called '{task}'" + ("" if names else ": the names of this model's tasks are not stored")
    else:
        problem = f"there is no task {task} among {router.tasks}"
    raise ConfigError(f"{problem}; set --experts.task to {_task_choices(router, names)}")


def _task_choices(router: RouterConfig, names: Sequence[str]) -> str:
    """The values of ``--experts.task``: ``"one of 0 to 2"``, or with names ``"one of 0 (web), 1 (books)"``."""
    if not names:
        return f"one of 0 to {router.tasks - 1}"
    listed = [f"{number} ({name})" for number, name in enumerate(names[:MAX_LISTED_TASKS])]
    return f"one of {', '.join(listed)}" + (
        f", … {len(names) - 1} ({names[-1]})" if len(names) > MAX_LISTED_TASKS else ""
    )


def check_task(model: ModelConfig, tasks: Sequence[str] = ()) -> None:
    """Raise :class:`ConfigError` if the model's router needs a task and none is set; ``tasks`` are their names."""
    router = model.moe and model.moe.router
    if router and router.kind == "task" and router.task is None:
        raise ConfigError(
            f"router 'task' chooses experts by one of {router.tasks} tasks, and none is set; set --experts.task to "
            f"{_task_choices(router, tasks)}"
        )


def check_generates(model: ModelConfig, name: str = "this model") -> None:
    """Raise :class:`ConfigError` for a model that cannot generate: a token, or its routing, depends on later tokens."""
    if not model.causal:
        raise ConfigError(
            f"{name} attends in both directions (causal = False), so it cannot generate text; colonnade serve returns "
            "its embeddings, and in Python colonnade.load(...).hidden(tokens) returns its hidden states"
        )
    check_task(model)
    if model.moe is not None and model.moe.router.kind == "sequence":
        raise ConfigError(
            "router 'sequence' selects experts by the whole sequence, which is not available during generation; "
            "train and evaluate such a model (colonnade eval)"
        )

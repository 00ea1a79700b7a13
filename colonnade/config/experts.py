"""What a loaded model's experts are told: to work otherwise than they were trained, or from host memory."""

from typing import Literal

from pydantic import Field

from colonnade.config.base import Config
from colonnade.config.model import ModelConfig
from colonnade.errors import ConfigError

Capacity = float | Literal["off"] | None
"""A capacity factor, "off" for none (dropless), or None: as trained."""


class ExpertsConfig(Config):
    """How a mixture of experts works where it is not trained; what is left out stays as it was trained."""

    active: int | None = Field(default=None, ge=1)
    """A: experts that a token goes to (top-k); None: as trained."""
    capacity: Capacity = None
    """Capacity factor, or off: every token reaches its experts; None: as trained."""
    task: int | None = Field(default=None, ge=0)
    """Router 'task': the task that all tokens are of, by number."""
    resident: int | None = Field(default=None, ge=1)
    """Layers whose experts are in the device's memory at a time; those of all others wait in host memory and come while
    the layers before them compute (2 or more; with 1 nothing overlaps). None: all layers'."""

    def of(self, model: ModelConfig) -> ModelConfig:
        """``model`` with these changes; raises :class:`ConfigError` for what it cannot do."""
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if not given:
            return model
        if (moe := model.moe) is None:
            names = " and ".join(f"--experts.{name}" for name in given)
            raise ConfigError(f"{names} would change a mixture of experts, and this model has none; leave it out")
        if self.active is not None and self.active > moe.experts:
            raise ConfigError(
                f"a token cannot go to {self.active} of {moe.experts} experts; set --experts.active {moe.experts} or "
                "less"
            )
        if self.task is not None and moe.router.kind != "task":
            raise ConfigError(f"router '{moe.router.kind}' knows no tasks; leave --experts.task out")
        if self.task is not None and self.task >= moe.router.tasks:
            raise ConfigError(
                f"there is no task {self.task} among {moe.router.tasks}; set --experts.task to one of 0 to "
                f"{moe.router.tasks - 1}"
            )
        router = moe.router if self.task is None else moe.router.but(task=self.task)
        moe = moe.but(active=self.active or moe.active, router=router)
        if self.capacity is not None:
            moe = moe.but(capacity=None if self.capacity == "off" else self.capacity)
        return model.but(moe=moe)


AS_TRAINED = ExpertsConfig()
"""No change."""


def check_task(model: ModelConfig) -> None:
    """Raise :class:`ConfigError` for a model whose experts depend on a task that nobody has said."""
    router = model.moe and model.moe.router
    if router and router.kind == "task" and router.task is None:
        raise ConfigError(
            f"router 'task' knows {router.tasks} tasks, and not which one a text is of; set --experts.task to one of 0 "
            f"to {router.tasks - 1}"
        )


def check_generates(model: ModelConfig) -> None:
    """Raise :class:`ConfigError` for a model whose experts depend on what no model that generates knows."""
    check_task(model)
    if model.moe is not None and model.moe.router.kind == "sequence":
        raise ConfigError(
            "router 'sequence' chooses experts by the whole sequence, whose end a model that generates has not written "
            "yet; such a model trains and scores (colonnade eval)"
        )

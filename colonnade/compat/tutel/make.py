"""What a layer is made of, out of the dictionaries that describe it."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from colonnade.compat.tutel.experts import EXPERTS
from colonnade.compat.tutel.gates import COMMON, GATES
from colonnade.config.base import nearest
from colonnade.errors import ConfigError


def make_experts(options: dict[str, Any], model_dim: int, local: int, sharded: int) -> nn.Module:
    """The module that ``options`` describe, ``local`` experts of it, each over ``sharded`` ranks."""
    kind = options.pop("type", None)
    if kind == "custom":
        module = options.pop("module", None)
        if module is None:
            raise ConfigError("experts of type 'custom' need a class; give experts={'module': …}")
    elif kind in EXPERTS:
        module = EXPERTS[kind]
    else:
        raise ConfigError(f"there are no experts of type '{kind}'" + nearest(str(kind), [*EXPERTS, "custom"]))
    names = inspect.signature(module).parameters
    # The name of older programs.
    old = "local_experts" in names and "num_experts_per_device" not in names
    count = "local_experts" if old else "num_experts_per_device"
    options |= {"model_dim": model_dim, count: local, "sharded_count": sharded}
    if kind != "custom":
        if "hidden_size_per_expert" not in options:
            raise ConfigError(f"experts of type '{kind}' have no size; give experts={{'hidden_size_per_expert': …}}")
        for name in options:
            if name not in names:
                raise ConfigError(f"experts of type '{kind}' have no option '{name}'" + nearest(name, list(names)))
    return module(**options)


def make_gate(kind: Any, model_dim: int, experts: int) -> nn.Module:
    """The gate that ``kind`` describes, which says what noise and what capacity it wants."""
    if isinstance(kind, str) and (old := re.fullmatch(r"Top(\d+)Gate", kind)):
        kind = {"type": "top", "k": int(old[1])}
    if not isinstance(kind, Mapping):
        raise ConfigError(f"gate_type {kind!r} is no description of a gate; give {{'type': 'top', 'k': 2}}")
    options = dict(kind)
    name = options.pop("type", None)
    if name == "custom" and "module" not in options:
        raise ConfigError("a gate of type 'custom' needs a class; give gate_type={'module': …}")
    if name != "custom" and name not in GATES:
        raise ConfigError(f"there is no gate of type '{name}'" + nearest(str(name), [*GATES, "custom"]))
    module = options.pop("module") if name == "custom" else GATES[name]
    # The layer reads these; a gate of one's own is told if it wants to be.
    told = {key: value for key, value in options.items() if key not in COMMON or _takes(module, key)}
    gate = module(model_dim=model_dim, num_global_experts=experts, **told)
    for option, default in (("gate_noise", 0.0), ("capacity_factor", 1.0)):
        if not hasattr(gate, option):
            setattr(gate, option, options.get(option, default))
    return gate


def _takes(module: Callable[..., Any], name: str) -> bool:
    parameters = inspect.signature(module).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())

"""What a family is to us: its config.json both ways, and one table from our parameter names to theirs.

The table writes ``{i}`` for the layer and lists every parameter that the family *can* have; the config says which it
has. To add a family, write one small file beside ``llama.py`` with a :class:`Family` in it, and name it in
``families.py``.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from colonnade.checkpoint.hf.keys import Keys
from colonnade.checkpoint.stored import Table
from colonnade.config import ModelConfig
from colonnade.config.model import Activation

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Hugging Face's names of activations to ours; the first of several is the one we write."""


@dataclass(frozen=True)
class Family:
    """One line of models, as Hugging Face stores it."""

    name: str
    """``model_type`` in config.json, and :attr:`ModelConfig.family`."""
    architecture: str
    """The class, for ``architectures``, unless :attr:`to_hf` says another."""
    prefix: str
    """What their base model's tensors begin with; files saved from the base model alone lack it."""
    table: Table
    """Our names to theirs."""
    from_hf: Callable[[Keys], ModelConfig]
    """Reads the keys of config.json."""
    to_hf: Callable[[ModelConfig], dict[str, Any]]
    """Writes them (those of :func:`colonnade.checkpoint.hf.families.config_to_hf` excepted)."""
    buffers: str
    """A regular expression for tensors that old files carry and that follow from the config."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that a file may hold again under another name, to the original's."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Ends of tensor names in old files, to what they are today."""
    experts: bool = False
    """Whether its models have experts, in some layers or all."""
    modules: Table = field(default_factory=dict)
    """Forms that take the place of :attr:`table`'s where a file holds tensors as transformers 5's classes do."""
    as_held: Callable[[ModelConfig, Collection[str]], ModelConfig] = lambda config, names: config
    """Corrects the config by the names of the tensors that the folder really holds."""

    def table_of(self, names: Collection[str]) -> Table:
        """Our names to theirs for a file of these tensors."""
        plain = any(name.endswith("mlp.experts.down_proj") for name in names)
        return {**self.table, **self.modules} if plain else self.table


def activation_from_hf(keys: Keys, key: str, default: str) -> Activation:
    """Our name of their activation function."""
    theirs = keys.take(key, default)
    if not isinstance(theirs, str) or theirs not in ACTIVATIONS:
        raise keys.refuse(key, f"known activations are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[theirs]


def activation_to_hf(ours: Activation) -> str:
    """Their name of our activation function."""
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)

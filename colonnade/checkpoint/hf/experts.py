"""Experts as others store them, and the keys of config.json that all families of them have in common.

    PerExpert   a matrix an expert, experts.7.w1.weight: what lies on the Hub and what transformers saves
    Stacked     all experts' matrices in one tensor, gate and up one above the other: as transformers 5 holds them, and
                saves them when asked to keep that form

Ours is one stack (E, F, D) for each of gate, up and down, hidden units first; a rank reads the experts and the hidden
units that it has, and nothing of the others.
"""

from typing import Any

import torch
from torch import Tensor

from colonnade.checkpoint.hf.family import Keys
from colonnade.checkpoint.weight_mapping import Box, Shape, Source, Stored, Table
from colonnade.config import ModelConfig, MoeConfig, RouterConfig


class PerExpert(Stored):
    """A stack stored expert by expert under names with ``{e}``; ``transposed`` where they keep (D, F)."""

    def shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """A matrix for each expert."""
        return {self._name(e): shape[:0:-1] if self.transposed else shape[1:] for e in range(shape[0])}

    def read(self, source: Source, box: Box, config: ModelConfig) -> Tensor:
        """The experts that the box touches, of each as much as it takes."""
        return torch.stack([self._fetch(source, self._name(e), box[1:]) for e in range(*box[0])])

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """The matrices."""
        return {
            self._name(e): (matrix.t() if self.transposed else matrix).contiguous()
            for e, matrix in enumerate(parameter)
        }

    def _name(self, expert: int) -> str:
        return self.names[0].replace("{e}", str(expert))


class Stacked(Stored):
    """A stack that is part ``which`` of ``parts``, one above the other along the hidden units, in one tensor."""

    def __init__(self, name: str, which: int = 0, parts: int = 1, *, transposed: bool = False):
        super().__init__(name, transposed=transposed)
        self.which, self.parts = which, parts

    def shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """One tensor, which the other parts name too."""
        E, F, D = shape
        return {self.names[0]: (E, D, self.parts * F) if self.transposed else (E, self.parts * F, D)}

    def read(self, source: Source, box: Box, config: ModelConfig) -> Tensor:
        """One box of our part."""
        assert config.moe is not None, "experts without a config of them"
        experts, (start, stop), width = box
        before = self.which * config.moe.ffn_width
        hidden = (before + start, before + stop)
        if self.transposed:
            return source.read(self.names[0], (experts, width, hidden)).transpose(1, 2)
        return source.read(self.names[0], (experts, hidden, width))

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """We write experts one by one, as the Hub has them."""
        raise AssertionError("stacked experts are only read")


_PARTS = ("gate", "up", "down")


def per_expert(place: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> Table:
    """The three stacks of a layer, each expert's matrices at ``place``.{e}.NAME.weight."""
    return {
        f"blocks.{{i}}.ffn.experts.{part}": PerExpert(f"{place}.{{e}}.{name}.weight", transposed=part == "down")
        for part, name in zip(_PARTS, names, strict=True)
    }


def stacked(place: str) -> Table:
    """The same as transformers 5 holds them at ``place``.gate_up_proj and ``place``.down_proj."""
    return {
        "blocks.{i}.ffn.experts.gate": Stacked(f"{place}.gate_up_proj", 0, 2),
        "blocks.{i}.ffn.experts.up": Stacked(f"{place}.gate_up_proj", 1, 2),
        "blocks.{i}.ffn.experts.down": Stacked(f"{place}.down_proj", transposed=True),
    }


def shared(place: str) -> Table:
    """The experts that every token goes to."""
    return {f"blocks.{{i}}.ffn.shared.{part}.weight": Stored(f"{place}.{part}_proj.weight") for part in _PARTS}


GATE = "blocks.{i}.ffn.router.gates.0.weight"
"""Our name of a layer's router."""

TRAINING = ("balance", "balance_over", "balance_weight", "z_weight")
TRAINING_ROUTER = ("jitter", "noise", "dtype")
"""Settings of a run that no logit depends on; a file need not be able to say them."""


def moe_from_hf(
    keys: Keys, experts: int, ffn_width: int, *, normalise: bool, weight: str = "router_aux_loss_coef", **fields: Any
) -> MoeConfig:
    """A config of these sizes; ``fields`` are MoeConfig's, but for ``router``, a dict of RouterConfig's; ``weight`` is
    the key that says what the balance loss counts.
    """
    active = keys.size("num_experts_per_tok")
    keys.flag("output_router_logits", False)  # whether their loss has the balance loss in it; ours always may
    router = {"normalise": normalise, "normalise_single": normalise and active == 1}
    router |= {"jitter": keys.number("router_jitter_noise", 0.0)} | fields.pop("router", {})
    if "balance" not in fields:
        fields |= {"balance": "choices", "balance_over": "model"}  # transformers' load_balancing_loss_func
    return MoeConfig(
        experts=experts,
        active=active,
        ffn_width=ffn_width,
        balance_weight=keys.number(weight, 0.001),
        router=RouterConfig(**router),
        **fields,
    )


def balance_to_hf(moe: MoeConfig) -> dict[str, Any]:
    """``router_aux_loss_coef`` of transformers' loss, which is ``choices`` over all layers: ``switch`` is 1/A of it.
    Of other balance losses the weight alone can be written.
    """
    share = moe.active if moe.balance == "switch" else 1
    return {"router_aux_loss_coef": 0.0 if moe.balance == "none" else moe.balance_weight / share}


def held_layers(step: int, dense: list[int], layers: int) -> dict[str, Any]:
    """The fields ``first``, ``every`` and ``dense`` where every ``step``-th layer has experts but for ``dense``."""
    first = step - 1
    while first in dense and first < layers:
        first += step
    return {"first": first, "every": step, "dense": tuple(i for i in range(first, layers, step) if i in dense)}


def expressible(config: ModelConfig) -> dict[str, Any]:
    """What of a config's experts a file must be able to say: all but what only a run's training depends on."""
    moe = config.moe
    if moe is None:
        return {}
    fields = {f"moe.{name}": getattr(moe, name) for name in MoeConfig.model_fields if name not in TRAINING}
    router = fields.pop("moe.router")
    fields |= {
        f"moe.router.{name}": getattr(router, name) for name in RouterConfig.model_fields if name not in TRAINING_ROUTER
    }
    has = tuple(config.experts_of(i) is not None for i in range(config.layers))
    follow = ("first", "every", "dense")  # said by the list of layers
    unused = ("capacity_over", "priority", "dropped") if moe.capacity is None else ()
    for name in (*follow, *unused):
        fields.pop(f"moe.{name}")
    fields.pop("moe.router.normalise_single")
    fields["moe.router.normalise"] = moe.normalises_weights
    if moe.router.groups == 1:
        fields.pop("moe.router.group_score")
    return fields | {"layers with experts": has, "moe.bias_rate": bool(moe.bias_rate)}

"""Mappings of expert weights, and the config.json keys that all MoE families have in common.

    PerExpert        one matrix per expert, experts.7.w1.weight: the form on the Hub, and what transformers saves
    StackedExperts   all experts' matrices in one tensor, gate above up: the form of transformers 5's modules, saved on
                     request

Ours is one stack (E, F, D) for each of gate, up and down, hidden units first; a rank reads only its own experts and
hidden units.
"""

from typing import Any

import torch
from torch import Tensor

from colonnade.checkpoint.hf.family import ConfigKeys
from colonnade.checkpoint.weight_mapping import Box, MappingTable, ParamMapping, Shape, TensorSource
from colonnade.config import ModelConfig, MoeConfig, RouterConfig


class PerExpert(ParamMapping):
    """A stack stored expert by expert under names with ``{e}``; ``transposed`` where they store (D, F)."""

    def shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """A matrix for each expert."""
        return {self._name(e): shape[:0:-1] if self.transposed else shape[1:] for e in range(shape[0])}

    def read(self, source: TensorSource, box: Box, config: ModelConfig) -> Tensor:
        """Reads the box of each expert that it touches."""
        return torch.stack([self._read(source, self._name(e), box[1:]) for e in range(*box[0])])

    @property
    def keeps_inputs_last(self) -> bool:
        """Quantised experts have their inputs last, as theirs: our down projection is transposed where it is dense."""
        return True

    def read_component(self, source: TensorSource, box: Box, config: ModelConfig) -> Tensor:
        """Reads values or scales of the experts in a box."""
        inner = box[:0:-1] if self.transposed else box[1:]
        return torch.stack([source.read(self._name(e), inner) for e in range(*box[0])])

    def write_component(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Values or scales of one matrix for each expert, with its inputs last."""
        return {self._name(e): matrix.contiguous() for e, matrix in enumerate(parameter)}

    def inputs_of(self, box: Box) -> tuple[int, int]:
        """Hidden units for a down projection."""
        return box[1] if self.transposed else box[2]

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Converts to one matrix for each expert."""
        return {
            self._name(e): (matrix.t() if self.transposed else matrix).contiguous()
            for e, matrix in enumerate(parameter)
        }

    def _name(self, expert: int) -> str:
        return self.names[0].replace("{e}", str(expert))


class StackedExperts(ParamMapping):
    """A stack that is part ``which`` of ``parts`` along the hidden units of one tensor; it can only be read."""

    def __init__(self, name: str, which: int = 0, parts: int = 1, *, transposed: bool = False):
        super().__init__(name, transposed=transposed)
        self.which, self.parts = which, parts

    def shapes(self, shape: Shape, config: ModelConfig) -> dict[str, Shape]:
        """One tensor, shared with the other parts."""
        E, F, D = shape
        return {self.names[0]: (E, D, self.parts * F) if self.transposed else (E, self.parts * F, D)}

    def read(self, source: TensorSource, box: Box, config: ModelConfig) -> Tensor:
        """Reads one box of this part."""
        assert config.moe is not None, "experts need a MoeConfig"
        experts, (start, stop), width = box
        before = self.which * config.moe.ffn_width
        hidden = (before + start, before + stop)
        if self.transposed:
            return source.read(self.names[0], (experts, width, hidden)).transpose(1, 2)
        return source.read(self.names[0], (experts, hidden, width))

    @property
    def keeps_inputs_last(self) -> bool:
        """No quantised format has such stacks."""
        return False

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Not used: experts are written one by one, as on the Hub."""
        raise AssertionError("stacked experts are only read")


_PARTS = ("gate", "up", "down")
ROUTER_WEIGHT = "blocks.{i}.ffn.router.gates.0.weight"
"""Our name of a layer's router weight."""


def per_expert_table(prefix: str, names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")) -> MappingTable:
    """Mappings of a layer's three stacks to ``prefix``.{e}.NAME.weight."""
    return {
        f"blocks.{{i}}.ffn.experts.{part}": PerExpert(f"{prefix}.{{e}}.{name}.weight", transposed=part == "down")
        for part, name in zip(_PARTS, names, strict=True)
    }


def stacked_table(prefix: str) -> MappingTable:
    """Mappings of a layer's three stacks to transformers 5's ``prefix``.gate_up_proj and ``prefix``.down_proj."""
    return {
        "blocks.{i}.ffn.experts.gate": StackedExperts(f"{prefix}.gate_up_proj", 0, 2),
        "blocks.{i}.ffn.experts.up": StackedExperts(f"{prefix}.gate_up_proj", 1, 2),
        "blocks.{i}.ffn.experts.down": StackedExperts(f"{prefix}.down_proj", transposed=True),
    }


def shared_experts_table(prefix: str) -> MappingTable:
    """Mappings of the shared experts."""
    return {f"blocks.{{i}}.ffn.shared.{part}.weight": ParamMapping(f"{prefix}.{part}_proj.weight") for part in _PARTS}


def moe_from_hf(
    keys: ConfigKeys,
    experts: int,
    ffn_width: int,
    *,
    normalise: bool,
    balance_key: str = "router_aux_loss_coef",
    **fields: Any,
) -> MoeConfig:
    """A config of these sizes; ``balance_key`` is the key of the balance loss's weight.

    ``fields`` are fields of MoeConfig, with ``router`` as a dict of RouterConfig's.
    """
    active = keys.size("num_experts_per_tok")
    keys.flag("output_router_logits", False)  # whether transformers adds the balance loss; our run decides
    router = {"normalise": normalise, "normalise_single": normalise and active == 1}
    router |= {"jitter": keys.number("router_jitter_noise", 0.0)} | fields.pop("router", {})
    if "balance" not in fields:
        fields |= {"balance": "choices", "balance_over": "model"}  # transformers' load_balancing_loss_func
    return MoeConfig(
        experts=experts,
        active=active,
        ffn_width=ffn_width,
        balance_weight=keys.number(balance_key, 0.001),
        router=RouterConfig(**router),
        **fields,
    )


def balance_to_hf(moe: MoeConfig) -> dict[str, Any]:
    """``router_aux_loss_coef``: transformers' loss is ``choices`` over all layers, and ``switch`` is 1/A of it.

    Of other balance losses only the weight is written.
    """
    divisor = moe.active if moe.balance == "switch" else 1
    return {"router_aux_loss_coef": 0.0 if moe.balance == "none" else moe.balance_weight / divisor}


def expert_layers(step: int, dense: list[int], layers: int) -> dict[str, Any]:
    """The fields ``first``, ``every`` and ``dense`` when every ``step``-th layer except ``dense`` has experts."""
    first = step - 1
    while first in dense and first < layers:
        first += step
    return {
        "first_k_dense_replace": first,
        "layer_freq": step,
        "mlp_only_layers": tuple(i for i in range(first, layers, step) if i in dense),
    }


_TRAINING_FIELDS = ("balance", "balance_over", "balance_weight", "z_weight")
_TRAINING_ROUTER_FIELDS = ("jitter", "noise", "dtype")


def expert_fields(config: ModelConfig) -> dict[str, Any]:
    """The fields of a config's experts that a file must represent: everything that a logit depends on."""
    moe = config.moe
    if moe is None:
        return {}
    fields = {f"moe.{name}": getattr(moe, name) for name in MoeConfig.model_fields if name not in _TRAINING_FIELDS}
    router = fields.pop("moe.router")
    fields |= {
        f"moe.router.{name}": getattr(router, name)
        for name in RouterConfig.model_fields
        if name not in _TRAINING_ROUTER_FIELDS
    }
    with_experts = tuple(config.experts_of(i) is not None for i in range(config.layers))
    implied = ("first_k_dense_replace", "layer_freq", "mlp_only_layers")  # by the list of layers with experts
    unused = ("priority", "dropped_token_output") if moe.capacity is None else ()
    unused += ("capacity_over",) if moe.capacity is None and moe.capacity_tokens is None else ()
    for name in (*implied, *unused):
        fields.pop(f"moe.{name}")
    fields.pop("moe.router.normalise_single")
    fields["moe.router.normalise"] = moe.normalises_weights
    if moe.router.groups == 1:
        fields.pop("moe.router.group_score")
    return fields | {"layers with experts": with_experts, "moe.bias_rate": bool(moe.bias_rate)}

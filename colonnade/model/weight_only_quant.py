"""Weight-only quantisation of a model: while it is read, one matrix at a time, or as it is stored in a checkpoint.

Experts are quantised one layer's stack at a time.

Quantised are the linear layers of the blocks, all experts among them, and the output projection, also if it is tied to
the embedding; that one has 8 bits if the others have 4, because each of its rows is a token's logit. Not quantised are
embeddings that are only looked up; norms and biases; the up-projection of latent attention, which is multiplied in
parts; routers, and the gate of shared experts.

Quantised weights are bitwise the same in every layout: if columns are cut over ranks, int8 and float8 take each row's
maximum over all of them, and int4's groups are never cut (:mod:`colonnade.config.feature_checks`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from colonnade.config import Config, ModelConfig, WeightFormat
from colonnade.errors import ConfigError
from colonnade.kernels.linear.quantise import Kind, Quantised, dequantise, stored_bytes, to_rows
from colonnade.kernels.linear.ternary import NONZERO
from colonnade.model.moe.expert_offload import unquantised_bytes
from colonnade.model.moe.experts import Experts
from colonnade.model.tensor_parallel_linear import Linear, QuantisableMatrix, quantise_finite
from colonnade.model.transformer import Transformer
from colonnade.parallel.axis import SOLO, Axes, Axis
from colonnade.parallel.layout import layout_of

StoreWeight = Callable[[str, Tensor, Tensor | Quantised], object]
"""Called with a parameter's name, the parameter, and this rank's part of its value, quantised if it is stored so."""


class StoredFormat(Config):
    """How a checkpoint stores a matrix, or a stack of them."""

    kind: Kind
    group: int = Field(gt=0, le=1 << 24)
    """Inputs that share a scale."""
    wide_scales: bool = False
    """int4: scales in float32."""
    grouped: bool = False
    """int8: a scale per group."""

    @model_validator(mode="after")
    def _validate(self) -> "StoredFormat":
        if self.kind == "ternary" and self.group not in NONZERO:
            words = ", ".join(map(str, NONZERO))
            raise ConfigError(f"ternary words have {words} weights, not {self.group}; use another checkpoint")
        return self

    @staticmethod
    def of(weight: Quantised) -> "StoredFormat":
        """The format of ``weight``."""
        return StoredFormat(
            kind=weight.kind, group=weight.group, wide_scales=weight.has_wide_scales, grouped=weight.has_int8_groups
        )

    def bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a matrix."""
        if self.grouped:
            return outputs * (inputs + 4 * -(-inputs // self.group))
        return stored_bytes(outputs, inputs, self.kind, self.group, 4 if self.wide_scales else 2)


Formats = Mapping[str, StoredFormat]
"""The format of each quantised parameter of a checkpoint, by name."""


def copy_weight(name: str, parameter: Tensor, value: Tensor | Quantised) -> None:
    """Copy ``value`` into ``parameter``, dequantised."""
    parameter.copy_(dense(name, value))


def dense(name: str, value: Tensor | Quantised) -> Tensor:
    """``value`` of parameter ``name``, in float32 and in the parameter's shape if it is quantised."""
    if not isinstance(value, Quantised):
        return value
    if value.values.dim() == 2:
        return dequantise(value, torch.float32)
    stack = torch.stack([dequantise(value.matrix(e), torch.float32) for e in range(len(value.values))])
    return stack.mT if _part(name) == "down" else stack


def build(
    config: ModelConfig,
    axes: Axes,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kind: Kind,
    group: int,
    experts_on: torch.device | None = None,
    formats: Formats | None = None,
    spans: Sequence[range] | None = None,
) -> tuple[Transformer, StoreWeight]:
    """A model with its matrices on the meta device, and the function that stores each weight, quantised to ``kind``.

    ``formats``: those of a checkpoint whose matrices are quantised, and are kept as they are. Experts are stored on
    ``experts_on``, if not on ``device``; only the blocks of ``spans`` are built if given.
    """
    model = Transformer(config, axes, spans=spans, device="meta", dtype=dtype)
    quantised = quantisable_modules(model)
    if formats is not None:
        quantised = {name: module for name, module in quantised.items() if name in formats}
    for prefix, module in model.named_modules():
        target = device
        if isinstance(module, Experts):
            target = module.storage_device = experts_on or device
        for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if _joined(prefix, name) not in quantised:
                empty = torch.empty_like(tensor, device=target)
                setattr(module, name, nn.Parameter(empty) if isinstance(tensor, nn.Parameter) else empty)
    layout = layout_of(model)

    def store(name: str, parameter: Tensor, value: Tensor | Quantised) -> None:
        layer = quantised.get(name)
        if layer is None:
            copy_weight(name, parameter, value)
        elif isinstance(value, Quantised):
            assign_quantised(layer, name, value, layer.storage_device if isinstance(layer, Experts) else device)
        elif isinstance(layer, Experts):
            layer.quantise(_part(name), value, kind, group, axes.experts.etp, device)
        else:
            over = axes.tp if layout[name] == 1 else SOLO
            layer.quantise(value.to(device), kind_of(name, kind), group, over.max_)

    return model, store


def assign_quantised(
    layer: QuantisableMatrix | Experts, name: str, value: Quantised, device: torch.device | None = None
) -> None:
    """Replace parameter ``name`` of ``layer`` by ``value``, on ``device`` or where it is."""
    if device is not None:
        value = value._replace(values=value.values.to(device), scales=value.scales.to(device))
    if isinstance(layer, Experts):
        layer.quantised[_part(name)] = value
        if hasattr(layer, _part(name)):
            delattr(layer, _part(name))
    else:
        if layer.quantised is None:
            layer.dequantised_dtype = layer.weight.dtype
            del layer.weight
        layer.quantised = value


def quantised_parameters(model: nn.Module) -> dict[str, Quantised]:
    """The quantised weights of ``model``, in rows, by the name of the parameter that each replaces."""
    return {name: to_rows(weight) for name, weight in stored_quantised(model).items()}


def stored_quantised(model: nn.Module) -> dict[str, Quantised]:
    """The quantised weights of ``model`` as they are stored, in rows or blocks, by the parameter's name."""
    found: dict[str, Quantised] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantisableMatrix) and module.quantised is not None:
            found[_joined(name, "weight")] = module.quantised
        elif isinstance(module, Experts):
            found |= {_joined(name, part): weight for part, weight in module.quantised.items()}
    return found


def quantisable_modules(model: nn.Module) -> dict[str, QuantisableMatrix | Experts]:
    """The modules with a matrix, or a stack of them, that can be quantised, by parameter name."""
    found: dict[str, QuantisableMatrix | Experts] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantisableMatrix) and not module.never_quantise:
            found[_joined(name, "weight")] = module
        elif isinstance(module, Experts):
            parts = ("up", "down") if module.gate is None else ("up", "down", "gate")
            found |= {_joined(name, part): module for part in parts}
    return found


class Requantise:
    """Quantises new values of a model's parameters as its own were, on the CPU, into new tensors."""

    def __init__(self, model: Transformer):
        shape = Transformer(model.config, model.axes, device="meta")  # a quantised model lacks the parameters
        self._axes, self._layout = model.axes, layout_of(shape)
        self._layers = {name: model.get_submodule(name.rpartition(".")[0]) for name in quantisable_modules(shape)}

    def current(self, name: str) -> Quantised | None:
        """The quantised weights that parameter ``name`` has now; None if it is not quantised."""
        match self._layers.get(name):
            case Experts() as layer:
                return layer.quantised.get(_part(name))
            case QuantisableMatrix() as layer:
                return layer.quantised
        return None

    def is_collective(self, name: str) -> bool:
        """Whether all ranks must quantise ``name`` together: they share the scale of a row."""
        current = self.current(name)
        if current is None or current.kind == "int4":
            return False
        if isinstance(self._layers[name], Experts):
            return _part(name) == "down" and self._axes.experts.etp.size > 1
        return self._over(name).size > 1

    def __call__(self, name: str, value: Tensor) -> Quantised:
        """``value``, quantised; raises :class:`CheckpointError` if it is not finite."""
        current, layer, cpu = self.current(name), self._layers[name], torch.device("cpu")
        assert current is not None, name
        if isinstance(layer, Experts):
            return layer.quantise_stack(
                _part(name), value, current.kind, current.group, self._axes.experts.etp, cpu, cpu
            )
        return quantise_finite(value, current.kind, current.group, self._over(name).max_)

    def _over(self, name: str) -> Axis:
        return self._axes.tp if self._layout[name] == 1 else SOLO


def _joined(module: str, name: str) -> str:
    return f"{module}.{name}" if module else name


def _part(name: str) -> str:
    return name.rpartition(".")[2]


def kind_of(name: str, kind: Kind) -> Kind:
    """The format of parameter ``name`` where the blocks have ``kind``."""
    return "int8" if kind == "int4" and name in ("unembed.weight", "embed.tokens.weight") else kind


def ternary_names(model: nn.Module) -> list[str]:
    """The quantisable parameters that may be ternary: those of experts."""
    return [name for name, module in quantisable_modules(model).items() if isinstance(module, Experts)]


def quantisable_shapes(shape: nn.Module) -> dict[str, tuple[int, int, int]]:
    """(count, outputs, inputs) of each quantisable parameter; the model may be on the meta device."""
    found: dict[str, tuple[int, int, int]] = {}
    for name, layer in quantisable_modules(shape).items():
        *stack, outputs, inputs = layer.get_parameter(_part(name)).shape
        if stack and _part(name) == "down":  # stored inputs first
            outputs, inputs = inputs, outputs
        found[name] = (stack[0] if stack else 1, outputs, inputs)
    return found


def weight_bytes_as(shape: nn.Module, weights: WeightFormat, group: int, formats: Formats | None = None) -> int:
    """Memory of a module's weights in format ``weights`` [bytes]; the module may be on the meta device.

    ``formats``: those of the checkpoint, if its matrices are quantised and ``weights`` is stored.
    """
    if weights == "dense" or (weights in ("stored", "file") and not formats):
        return unquantised_bytes(shape)
    quantised = quantisable_shapes(shape)
    if weights in ("stored", "file"):
        assert formats is not None
        # ``shape`` may be a part of the model, whose names lack the prefix.
        ends = {
            name: next((f for full, f in formats.items() if f".{full}".endswith(f".{name}")), None)
            for name in quantised
        }
        of = {name: each for name, each in ends.items() if each is not None}
    else:
        names = ternary_names(shape) if weights == "ternary" else quantised
        of = {name: StoredFormat(kind=kind_of(name, weights), group=group) for name in names}
    plain = (x.nbytes for name, x in (*shape.named_parameters(), *shape.named_buffers()) if name not in of)
    return sum(plain) + sum(
        count * of[name].bytes(outputs, inputs) for name, (count, outputs, inputs) in quantised.items() if name in of
    )


def quantised_kind(model: nn.Module) -> Kind | None:
    """The format of a model's quantised blocks; None if they are not quantised."""
    found = [m.quantised for m in model.modules() if isinstance(m, Linear) and m.quantised is not None]
    found += [weight for m in model.modules() if isinstance(m, Experts) for weight in m.quantised.values()]
    return next((weight.kind for weight in found), None)


def weight_tensors(model: nn.Module) -> Iterator[Tensor]:
    """All tensors of a model's weights, quantised or not."""
    yield from (*model.parameters(), *model.buffers())
    for module in model.modules():
        quantised = []
        if isinstance(module, QuantisableMatrix) and module.quantised is not None:
            quantised = [module.quantised]
        elif isinstance(module, Experts):
            quantised = module.quantised.values()
        for weight in quantised:
            yield from (weight.values, weight.scales)


def weight_bytes(model: nn.Module) -> int:
    """Memory of this rank's weights, quantised or not [bytes]."""
    return sum(x.nbytes for x in weight_tensors(model))

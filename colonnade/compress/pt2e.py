"""Export quantisation (PyTorch 2 export, "PT2E"): linear layers of an exported graph in 8 bits, for packages.

torchao's X86InductorQuantizer inserts observers into the graph, which read the range of every input and weight while it
runs on calibration inputs, and replaces them by roundings; Inductor then fuses rounding and product into oneDNN's int8
kernels. Weights get a scale for each output. Inputs get one scale for all rows of a pass:

    dynamic   from the pass's own rows, its padding included
    static    from the calibration texts, the same for all passes

The quantizer recognises a linear layer by the function that Python called, which a graph exported without tracing
Python's bytecode does not record; it is added here. Otherwise the quantizer would leave all of them as they are.
"""

import importlib.util
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from torch.export import ExportedProgram

InputScales = Literal["dynamic", "static"]
"""How the scales of inputs are chosen."""
LINEAR = torch.ops.aten.linear.default
WEIGHT = "quantized_decomposed.dequantize_per_channel.default"
STATIC_TOKENS = 1024
"""Calibration tokens of each program with static scales, at most."""


def check_torchao() -> None:
    """Raise :class:`ConfigError` unless torchao is installed."""
    if importlib.util.find_spec("torchao") is None:
        raise ConfigError("--pt2e needs torchao's quantizer; install it (pip install 'colonnade[pt2e]')")


def quantise_program(
    program: "ExportedProgram",
    example: tuple[Any, ...],
    shapes: Any,
    how: InputScales,
    weights: Collection[str],
    calibration: Iterable[tuple],
) -> "ExportedProgram":
    """``program`` with linear layers in 8 bits, exported again for ``example`` inputs of dynamic ``shapes``.

    ``weights``: the parameters that may be quantised; routers, for example, keep float32. ``calibration`` are inputs of
    the program, whose caches it may write to; dynamic scales need only one of them.
    """
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e  # type: ignore[import-not-found]
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (  # type: ignore[import-not-found]
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    module = program.module()
    linears = [node for node in module.graph.nodes if node.target is LINEAR and node.args[1].target in weights]
    for node in linears:
        node.meta["source_fn_stack"] = [(node.name, F.linear)]
    quantizer = X86InductorQuantizer()
    config = get_default_x86_inductor_quantization_config(is_dynamic=how == "dynamic")
    quantizer.set_function_type_qconfig(F.linear, config)
    module = prepare_pt2e(module, quantizer)
    for inputs in calibration:
        module(*inputs)
        if how == "dynamic":
            break
    module = convert_pt2e(module)
    rounded = sum(str(node.target) == WEIGHT for node in module.graph.nodes)
    assert rounded == len(linears), f"{rounded} of {len(linears)} linear layers were quantised"
    return torch.export.export(module, example, dynamic_shapes=shapes)


def passes(texts: Sequence[Tensor], tokens: int, cache: Sequence[Tensor]) -> Iterator[tuple]:
    """The inputs of a package's program with passes of ``tokens`` tokens over ``texts``, each with an empty cache."""
    left = max(1, STATIC_TOKENS // tokens)
    for text_T in texts:
        used = [torch.zeros_like(layer) for layer in cache]
        for start in range(0, min(len(text_T), len(cache[0])) - tokens + 1, tokens):
            if not left:
                return
            left -= 1
            yield text_T[start : start + tokens], torch.tensor(start), torch.tensor(tokens - 1), used

"""Exports a model to a package of native code, by ``torch.export`` and AOTInductor.

The graph is the model's own forward pass with a cache of fixed shape (:mod:`colonnade.model.static_attend`) and the
reference kernels, which Inductor fuses. :mod:`colonnade.checkpoint.package_format` describes the folder, and
:mod:`colonnade.serve.package` runs it.
"""

import functools
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.export import Dim

from colonnade.checkpoint import atomic_folder
from colonnade.checkpoint.package_format import (
    DECODE,
    PACKAGE,
    PREFILL,
    TOKENIZER,
    WEIGHTS,
    PackageInfo,
    Processor,
    check_out,
    compile_program,
    load_program,
)
from colonnade.compress.pt2e import InputScales, check_torchao, passes, quantise_program
from colonnade.config import ModelConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import CheckpointError, ConfigError
from colonnade.kernels.experts.gathered import all_experts, gathered_experts
from colonnade.kernels.experts.reference import Weights
from colonnade.model import Rows, Stream, Transformer
from colonnade.model.moe.experts import ExpertRows, Experts
from colonnade.model.moe.router import find_router
from colonnade.model.static_attend import Static, cache_row
from colonnade.model.weight_only_quant import quantisable_modules

TORCH = (2, 13)
"""The oldest version known to work; 2.11 ended with a segmentation fault."""


def export(
    model: Transformer,
    tokenizer: Tokenizer | None,
    out: Path,
    *,
    context: int = 2048,
    prefill: int = 128,
    pt2e: InputScales | None = None,
    texts: Sequence[Tensor] = (),
    overwrite: bool = False,
    progress: Callable[[str], object] = lambda _what: None,
) -> PackageInfo:
    """Write ``model`` as a package for sequences of up to ``context`` tokens; returns its metadata.

    ``prefill``: tokens of a prompt in one pass, at most. With ``pt2e`` linear layers have 8 bits
    (:mod:`colonnade.compress.pt2e`); static scales need ``texts``, int64 token ids (T,) of at least ``prefill`` tokens.
    The model's modules are changed and cannot train afterwards. Raises :class:`ConfigError` for models and sizes that
    cannot be exported and without a C++ compiler, and :class:`CheckpointError` if ``out`` exists, with ``overwrite`` if
    it is not a package.
    """
    check_export(model.config, context, prefill)
    if pt2e is not None:
        check_pt2e(str(next(model.parameters()).dtype).removeprefix("torch."))
    texts = [text[:context] for text in texts if len(text) >= prefill]
    if pt2e == "static" and not texts:
        raise ConfigError(
            f"static scales need a text of at least {prefill} tokens; use a longer one, or use --pt2e dynamic"
        )
    check_out(out, overwrite)
    atomic_folder.create_partial(out, overwrite)
    try:
        return _write(model, tokenizer, out, context, prefill, pt2e, texts, progress)
    except BaseException as why:
        atomic_folder.remove_partial(out)
        if isinstance(why, OSError | SafetensorError):
            raise CheckpointError(f"{out} cannot be written: {why}; check the folder and its free space") from why
        raise


def _write(
    model: Transformer,
    tokenizer: Tokenizer | None,
    out: Path,
    context: int,
    prefill: int,
    pt2e: InputScales | None,
    texts: Sequence[Tensor],
    progress: Callable[[str], object],
) -> PackageInfo:
    """Write the package to the partial folder, and put that in its place."""
    config, dtype = model.config, next(model.parameters()).dtype
    partial = atomic_folder.partial_path(out)
    step, slots = step_module(model), context + prefill
    cache = [torch.zeros(slots, *cache_row(config), dtype=dtype) for _ in range(config.layers)]
    constants: dict[str, Tensor] = {}
    for name, tokens in ((DECODE, 1), (PREFILL, prefill)):
        progress(name)
        constants |= _compile(step, tokens, cache, partial / name, pt2e, texts)
    atomic_folder.write_tensors(partial / WEIGHTS, {name: t.detach().contiguous() for name, t in constants.items()})
    info = PackageInfo(
        context=context, prefill=prefill, dtype=str(dtype).removeprefix("torch."), cache_row=cache_row(config),
        pt2e=pt2e, model=config, processor=Processor.current(),
    )  # fmt: skip
    atomic_folder.write_json(partial / PACKAGE, info.model_dump(mode="json"))
    if tokenizer is not None:
        tokenizer.save(partial / TOKENIZER)
    atomic_folder.commit(out, {})
    return info


def check_export(config: ModelConfig, context: int, prefill: int) -> None:
    """Raise :class:`ConfigError` for a model or for sizes that cannot be exported, or without a C++ compiler."""
    if config.encoder is not None or not config.causal or config.relative_positions is not None:
        raise ConfigError("export is for decoders that generate text; serve this model instead of exporting it")
    if config.moe is not None and (config.moe.capacity or not find_router(config.moe).per_token):
        raise ConfigError(
            f"router '{config.moe.router.kind}' with capacity {config.moe.capacity} chooses among the tokens of a "
            "batch, which a package does not have; export with --experts.capacity off, or serve the model"
        )
    if not 2 <= prefill <= context <= config.context:
        raise ConfigError(
            f"--context {context} and --prefill {prefill} do not fit a model with a context of {config.context}; "
            "--prefill is at least 2 and at most --context, which is at most that"
        )
    if not any(shutil.which(name) for name in ("g++", "c++", "clang++")):
        raise ConfigError("export compiles C++, and g++ was not found; install it (apt-get install g++)")
    if (version := tuple(int(n) for n in torch.__version__.split(".")[:2])) < TORCH:
        raise ConfigError(
            f"export needs torch {TORCH[0]}.{TORCH[1]}, and this is {version[0]}.{version[1]}, whose compiler crashes "
            "on such programs; upgrade torch"
        )


def check_pt2e(dtype: str) -> None:
    """Raise :class:`ConfigError` unless a model of this dtype can be quantised while it is exported."""
    if dtype != "float32":
        raise ConfigError(f"--pt2e rounds float32 weights, not {dtype}; remove --dtype")
    check_torchao()


def step_module(model: Transformer) -> "_Step":
    """``model`` as a module of tensor operations alone; its weights become contiguous and frozen."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.contiguous()  # its strides are compiled in
    for module in model.modules():
        if hasattr(module, "kernels"):
            module.kernels = "reference"  # type: ignore[assignment]
    theta = model.__dict__.pop("_theta", None)
    if theta is not None:
        # Inductor renames the constants that are not buffers, and compiles in only those of up to 8 values.
        model.register_buffer("_theta", theta.contiguous(), persistent=False)
    return _Step(model)


class _Step(nn.Module):
    """The next-token logits after up to T tokens of one sequence."""

    def __init__(self, model: Transformer):
        super().__init__()
        self.model = model

    def forward(self, tokens_T: Tensor, start: Tensor, last: Tensor, cache: list[Tensor]) -> Tensor:
        """logits_V after token ``last``; the tokens are at positions ``start`` and following.

        Tokens after ``last`` are padding: what they write into the cache is masked until it is overwritten.
        """
        positions_T = start + torch.arange(len(tokens_T))
        # Padding may lie beyond the context, where a table of learned positions ends.
        stream = Stream(tokens_T, positions_T.clamp(max=self.model.config.context - 1))
        return self.model(stream, Static(cache, start), Rows(last[None]))[0]


def _compile(
    step: _Step, tokens: int, cache: list[Tensor], path: Path, pt2e: InputScales | None, texts: Sequence[Tensor]
) -> dict[str, Tensor]:
    """Compile one program to ``path``; returns the constants that it needs, by name."""
    run = gathered_experts if tokens == 1 else all_experts
    for module in step.modules():
        if isinstance(module, Experts):
            module.forward = functools.partial(_experts, run, module)
    zero, slots = torch.tensor(0), Dim("slots", min=2, max=len(cache[0]))
    example = (torch.zeros(tokens, dtype=torch.int64), zero, zero.clone(), cache)
    shapes: Any = (None, None, None, [{0: slots} for _ in cache])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about its own internals
        program = torch.export.export(step, example, dynamic_shapes=shapes)
        if pt2e is not None:
            weights = {f"model.{name}" for name in quantisable_modules(step.model)}
            calibration = passes(texts or example[:1], tokens, cache)
            program = quantise_program(program, example, shapes, pt2e, weights, calibration)
        compile_program(program, path, weights_inside=pt2e is not None)
    if pt2e is not None:
        return {}
    values = {**program.state_dict, **program.constants}
    return {name: values[name] for name in load_program(path).get_constant_fqns()}  # others are unused or folded


def _experts(run: Callable[..., Tensor], module: Experts, rows: ExpertRows) -> Tensor:
    weights = module.stored
    assert isinstance(weights, Weights), "packages have unquantised weights"
    assert rows.ids_TA is not None, "one rank sorts nothing before the experts"
    return run(rows.x_TD, rows.ids_TA, rows.weights_TA, weights, module.activation)

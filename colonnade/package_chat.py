"""``generate`` and ``chat`` with an exported package, which need no engine.

Checksums are computed while torch is imported, which takes longer than everything else.
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from colonnade.checkpoint.digest import BackgroundDigests, digest_of
from colonnade.conversation import CONTINUATION_TOKENS, Messages, converse
from colonnade.errors import CheckpointError, RequestError
from colonnade.serve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from colonnade.serve.package import Package


def load_package(folder: Path, *, trust: bool) -> "Package":
    """Load ``folder``; raises what :class:`~colonnade.serve.package.Package` raises."""
    digests = BackgroundDigests(folder) if trust else digest_of
    from colonnade.serve.package import Package  # imports torch

    return Package(folder, trust=trust, digest=digests)


def generate_from_package(folder: Path, prompt: str, params: SamplingParams, *, trust: bool) -> None:
    """Print the continuation of ``prompt`` by an exported package; raises what
    :class:`~colonnade.serve.package.Package` raises.
    """
    package = load_package(folder, trust=trust)
    if params.max_tokens is None and package.tokenizer is not None:
        left = package.info.context - len(package.tokenizer.encode(prompt))
        params = replace(params, max_tokens=max(1, min(CONTINUATION_TOKENS, left)))
    for text, _ in package.stream(prompt, params):
        print(text, end="", flush=True)
    print()


def chat_with_package(folder: Path, system: str | None, params: SamplingParams, *, trust: bool) -> None:
    """Chat with an exported package, as :func:`colonnade.chat.chat` does with a model."""
    package, console = load_package(folder, trust=trust), Console(stderr=True, highlight=False)
    tokenizer = package.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise CheckpointError(
            f"{folder} has no chat template, so it cannot chat; continue a text instead: "
            f"colonnade generate {folder} PROMPT --trust"
        )

    def answer(messages: Messages) -> Messages:
        pieces: list[str] = []
        try:
            for text, _ in package.stream(tokenizer.encode_chat([dict(each) for each in messages]), params):
                pieces.append(text)
                print(text, end="", flush=True)
        except KeyboardInterrupt:
            pass  # the reply ends here, and the conversation continues with this part of it
        except RequestError as error:
            console.print(f"[red]{error}[/red]")
            return messages[:-1]
        print(flush=True)
        return [*messages, {"role": "assistant", "content": "".join(pieces)}]

    converse(system, tokenizer, package.info.context, params.max_tokens, answer, console)

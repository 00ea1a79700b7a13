"""Compiles :class:`StructuredOutputs` to matchers that compute token masks.

The grammar engine is llguidance (Microsoft): its limits on lexer and parser work bound the time of a mask, whatever the
grammar. It compiles lazily, so most of a schema costs nothing until the text reaches it.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

from colonnade.errors import RequestError
from colonnade.serve.structured_outputs import WHITESPACE, StructuredOutputs, lark_json

if TYPE_CHECKING:  # llguidance is of the extra 'serve': other requests need no grammar engine
    import llguidance

    from colonnade.data.tokenizer import Tokenizer

Result = TypeVar("Result")

CACHED_GRAMMARS = 256
"""Compiled grammars that are kept, the least recently used ones dropped first."""

COMPILE_STACK_BYTES = 256 << 20
"""Stack of a compilation: llguidance recurses over rules that refer to one another, and 64 KiB of them overflow the
usual 8 MiB, which would kill the process. The pages that are not used cost no memory."""

_stack_size = threading.Lock()
"""Held while a thread starts with a different stack size: the size is one setting for all threads."""


class Matcher:
    """The state of one output in its grammar."""

    def __init__(self, matcher: "llguidance.LLMatcher", mask_bytes: int):
        self._matcher, self._mask_bytes = matcher, mask_bytes

    def mask(self) -> bytes:
        """The mask of allowed tokens: bit i % 8 of byte i // 8 is token i's."""
        data = self._matcher.compute_bitmask()
        return data[: self._mask_bytes].ljust(self._mask_bytes, b"\0")

    def accept(self, token: int) -> None:
        """Advance by ``token``, which the last mask allows."""
        self._matcher.consume_token(token)

    @property
    def finished(self) -> bool:
        """True if the text is complete and nothing can follow it."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """The reason for which the matcher stopped: its limits were exceeded, or a token was not allowed."""
        return _first_line(self._matcher.get_error()) if self._matcher.is_error() else None


class GrammarCompiler:
    """Makes matchers for the vocabulary of ``tokenizer``; may be used by several threads.

    A server sets ``check``, which raises for a grammar that would take too much
    (:class:`~colonnade.serve.grammar_check.GrammarChecker`).
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int):
        self._tokenizer, self._mask_bytes = tokenizer, -(-vocab_size // 8)
        self.check: Callable[[StructuredOutputs], object] = lambda _: None
        self._compiled: OrderedDict[tuple[str, str], llguidance.LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        """Held while ``_compiled`` is read or changed, and while the vocabulary is prepared."""

    @cached_property
    def vocabulary(self) -> "Vocabulary":
        """The tokenizer as seen by the grammar engine."""
        it = self._tokenizer
        tokens = [it.token_bytes(i) for i in range(it.vocab_size)]
        encode = lambda text: it.encode_documents([text.decode()])[0]  # noqa: E731
        return Vocabulary(tokens, sorted(it.special_ids), list(it.eos_ids), it.bos_id, encode)

    def matcher(self, wanted: StructuredOutputs) -> Matcher:
        """A matcher at the start of the text; raises :class:`RequestError` for a grammar that cannot be compiled."""
        key = (wanted.kind, wanted.source)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is not None:
                self._compiled.move_to_end(key)
        if compiled is None:
            self._prepare()
            self.check(wanted)
            compiled = in_large_stack(partial(compile_grammar, wanted, self._tokens)).result()
            with self._lock:
                self._compiled[key] = compiled
                while len(self._compiled) > CACHED_GRAMMARS:
                    self._compiled.popitem(last=False)
        return Matcher(compiled.deep_copy(), self._mask_bytes)

    def _prepare(self) -> None:
        """Read the vocabulary, once: for a large one that takes a second."""
        try:
            import llguidance  # noqa: F401
        except ImportError:
            raise RequestError(
                "structured outputs need the package llguidance, which is not installed; remove them, or run: "
                "pip install 'colonnade[serve]'",
                param="structured_outputs",
            ) from None
        with self._lock:
            _ = self._tokens

    @cached_property
    def _tokens(self) -> "llguidance.LLTokenizer":
        return read_vocabulary(self.vocabulary)


class Vocabulary:
    """The interface of a tokenizer that llguidance expects: the bytes of each token, which are special, text to ids."""

    def __init__(
        self,
        tokens: list[bytes],
        special_ids: list[int],
        eos_ids: list[int],
        bos_id: int | None,
        encode: Callable[[bytes], list[int]],
    ):
        self.tokens, self.special_token_ids, self.eos_ids = tokens, special_ids, eos_ids
        self.eos_token_id, self.bos_token_id, self._encode = eos_ids[0], bos_id, encode

    def __call__(self, text: bytes) -> list[int]:
        """The ids of ``text``."""
        return self._encode(text)


def read_vocabulary(vocabulary: Vocabulary) -> "llguidance.LLTokenizer":
    """llguidance's form of it."""
    import llguidance

    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(vocabulary), eos_token=vocabulary.eos_ids)


def in_large_stack(work: Callable[[], Result]) -> Future[Result]:
    """Run ``work`` in a thread with :data:`COMPILE_STACK_BYTES`."""
    result: Future[Result] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            result.set_exception(error)

    thread = threading.Thread(target=run, name="compile-grammar", daemon=True)
    with _stack_size:
        before = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return result


def compile_grammar(wanted: StructuredOutputs, vocabulary: "llguidance.LLTokenizer") -> "llguidance.LLMatcher":
    """A matcher for ``wanted``; raises :class:`RequestError` if it is invalid."""
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False)
    try:
        grammar = _to_grammar(wanted)
    except Exception as error:  # noqa: BLE001 - a parser of untrusted text, which raises errors of many kinds
        raise invalid_grammar(wanted, "read", str(error) or type(error).__name__) from None
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds grammars that match nothing
    if matcher.is_error():
        raise invalid_grammar(wanted, "compiled", matcher.get_error())
    return matcher


def _to_grammar(wanted: StructuredOutputs) -> str:
    """llguidance's form of ``wanted``."""
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    match wanted.kind:
        case "regex":
            return LLMatcher.grammar_from_regex(wanted.source)
        case "choice":
            choices = " | ".join(map(lark_json, wanted.choice or ()))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")  # a terminal: one automaton for all
        case "grammar":
            return LLMatcher.grammar_from_lark(any_to_lark(wanted.source))
        case _:
            text = json.dumps({"type": "object"} if wanted.kind == "json_object" else wanted.json)
            return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": WHITESPACE})


def invalid_grammar(wanted: StructuredOutputs, verb: str, reason: str) -> RequestError:
    """The error (400) of a grammar that cannot be ``verb``: read or compiled."""
    if reason.startswith("NoExtension"):
        reason = "no text matches it"
    return RequestError(
        f"structured_outputs.{wanted.kind} cannot be {verb}: {_first_line(reason)}",
        param="structured_outputs",
        code="invalid_grammar",
    )


def _first_line(text: str, most: int = 300) -> str:
    return text.partition("\n")[0][:most]

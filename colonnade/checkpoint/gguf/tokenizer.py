"""Builds a ``tokenizers.Tokenizer`` from a GGUF file: byte-level BPE (Radford 2019).

The file has the vocabulary, the merges, a type for each token and the *name* of the pre-tokenizer that splits text
before merging (``tokenizer.ggml.pre``); the pre-tokenizers themselves are in llama.cpp's source, and here:

    gpt-2       GPT-2's pattern
    smollm each digit separately, then GPT-2's pattern
    llama-bpe   Llama 3's pattern: up to three digits; a word that is a token is not merged
    qwen2       Llama 3's pattern with single digits, on text in Unicode's composed form (NFC)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE

from colonnade.checkpoint.gguf.header import Header
from colonnade.errors import CheckpointError

CONTROL, USER_DEFINED = 3, 4
"""ggml's types of tokens that are matched whole in the text; control tokens are also skipped in decoding."""

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"


class TokenizerParts(NamedTuple):
    """The arguments of :class:`colonnade.data.tokenizer.Tokenizer`."""

    tokenizer: Tokenizer
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str | None


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _pattern(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _pattern(LLAMA3),
    "qwen2": lambda: _pattern(QWEN2),
}
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def tokenizer_from_header(header: Header, vocab_size: int) -> TokenizerParts:
    """Builds the tokenizer of a file whose embedding has ``vocab_size`` rows.

    Raises :class:`CheckpointError` for an unknown tokenizer or pre-tokenizer, and for parts that contradict each other.
    """
    keys = _TokenizerKeys(header)
    model, pre = keys.get("model", None), keys.get("pre", "default")
    if model != "gpt2":
        raise CheckpointError(
            f"{header.path} has a tokenizer of type {model!r}, but only 'gpt2' (byte-level BPE) is supported; "
            "use a Hugging Face folder of the same model"
        )
    pre = ALIASES.get(pre, pre)
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{header.path} has the pre-tokenizer {pre!r}; supported ones are {', '.join([*PRE_TOKENIZERS, *ALIASES])}"
        )
    tokens = keys.strings("tokens")
    if not tokens or len(tokens) > vocab_size:
        raise CheckpointError(
            f"{header.path} has {len(tokens)} tokens, but its embedding has {vocab_size} rows; it is damaged"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise CheckpointError(f"{header.path} lists a token twice; it is damaged")
    merges = [_pair(merge, vocab, header) for merge in keys.strings("merges")]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = ByteLevelDecoder()
    types: list[int] = keys.get("token_type", [])
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        add([
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, token_kind in zip(tokens, types, strict=False)
            if token_kind == kind
        ])  # fmt: skip
    bos = keys.token_id("bos_token_id", len(tokens))
    eos_ids = [keys.token_id(f"{name}_token_id", len(tokens)) for name in ("eos", "eot", "eom")]
    eos = tuple(dict.fromkeys(i for i in eos_ids if i is not None))
    before = [bos] if bos is not None and keys.get("add_bos_token", pre == "llama-bpe") else []
    after = [eos[0]] if eos and keys.get("add_eos_token", False) else []
    if before or after:
        tokenizer.post_processor = _special_tokens(before, after, tokens)
    template = header.values.get("tokenizer.chat_template")
    return TokenizerParts(tokenizer, bos, eos, template if isinstance(template, str) else None)


def _pair(merge: str, vocab: dict[str, int], header: Header) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise CheckpointError(f"{header.path} has the merge {merge!r} of unknown tokens; it is damaged")
    return left, right


def _special_tokens(before: list[int], after: list[int], tokens: list[str]) -> Any:
    """A post-processor that adds special tokens before and after a text."""
    single = [tokens[i] for i in before] + ["$A"] + [tokens[i] for i in after]
    return processors.TemplateProcessing(
        single=single,
        pair=[*single, *(part.replace("$A", "$B:1") for part in single)],
        special_tokens=[(tokens[i], i) for i in dict.fromkeys(before + after)],
    )


class _TokenizerKeys:
    """The keys under ``tokenizer.ggml``, with their types checked."""

    def __init__(self, header: Header):
        self.header = header

    def get(self, name: str, default: Any) -> Any:
        value = self.header.values.get(f"tokenizer.ggml.{name}", default)
        if default is not None and type(value) is not type(default):
            raise CheckpointError(f"{self.header.path} has a 'tokenizer.ggml.{name}' of the wrong type; it is damaged")
        return value

    def strings(self, name: str) -> list[str]:
        value = self.get(name, [])
        if not all(isinstance(string, str) for string in value):
            raise CheckpointError(f"{self.header.path} has a 'tokenizer.ggml.{name}' of the wrong type; it is damaged")
        return value

    def token_id(self, name: str, tokens: int) -> int | None:
        value = self.get(name, None)
        if value is not None and not (isinstance(value, int) and 0 <= value < tokens):
            raise CheckpointError(f"{self.header.path} has {name} {value!r} but only {tokens} tokens; it is damaged")
        return value

"""The tokenizer inside a GGUF file: byte-level BPE (Radford 2019) as a ``tokenizers.Tokenizer``.

The file has the vocabulary, the merges, a type for each token and the *name* of the rule that splits text before
merging (``tokenizer.ggml.pre``); the rules themselves live in llama.cpp's source, and here:

    gpt-2       GPT-2's pattern
    smollm      each digit by itself, then GPT-2's pattern
    llama-bpe   Llama 3's pattern: digits by three; a whole word that is a token needs no merges
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
"""ggml's token types that are matched whole in the text; control tokens are also left out of what people read."""

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


SPLITTERS: dict[str, Callable[[], Any]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _pattern(LLAMA3),
    "qwen2": lambda: _pattern(QWEN2),
}
ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


def tokenizer_of(header: Header, vocab_size: int) -> TokenizerParts:
    """The tokenizer of a file whose embedding has ``vocab_size`` rows.

    Raises :class:`CheckpointError` for a kind of tokenizer or a splitting rule that we do not know, and for parts
    that contradict each other.
    """
    keys = _Keys(header)
    model, rule = keys.get("model", None), keys.get("pre", "default")
    if model != "gpt2":
        raise CheckpointError(
            f"{header.path} has a tokenizer of the kind {model!r}, and only 'gpt2' (byte-level BPE) can be rebuilt; "
            "use a Hugging Face folder of the same model"
        )
    rule = ALIASES.get(rule, rule)
    if rule not in SPLITTERS:
        raise CheckpointError(
            f"{header.path} splits text by the rule {rule!r}; known rules are {', '.join([*SPLITTERS, *ALIASES])}"
        )
    tokens: list[str] = keys.texts("tokens")
    if not tokens or len(tokens) > vocab_size:
        raise CheckpointError(
            f"{header.path} has {len(tokens)} tokens for an embedding of {vocab_size} rows; it is damaged"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) < len(tokens):
        raise CheckpointError(f"{header.path} lists a token twice; it is damaged")
    merges = [_pair(merge, vocab, header) for merge in keys.texts("merges")]
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=rule == "llama-bpe"))
    if rule == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = SPLITTERS[rule]()
    tokenizer.decoder = ByteLevelDecoder()
    types: list[int] = keys.get("token_type", [])
    for kind, add in ((CONTROL, tokenizer.add_special_tokens), (USER_DEFINED, tokenizer.add_tokens)):
        add([
            AddedToken(token, normalized=False, special=kind == CONTROL)
            for token, its_kind in zip(tokens, types, strict=False)
            if its_kind == kind
        ])  # fmt: skip
    bos = keys.token_id("bos_token_id", len(tokens))
    ends = [keys.token_id(f"{name}_token_id", len(tokens)) for name in ("eos", "eot", "eom")]
    eos = tuple(dict.fromkeys(i for i in ends if i is not None))
    before = [bos] if bos is not None and keys.get("add_bos_token", rule == "llama-bpe") else []
    after = [eos[0]] if eos and keys.get("add_eos_token", False) else []
    if before or after:
        tokenizer.post_processor = _frame(before, after, tokens)
    template = header.values.get("tokenizer.chat_template")
    return TokenizerParts(tokenizer, bos, eos, template if isinstance(template, str) else None)


def _pair(merge: str, vocab: dict[str, int], header: Header) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise CheckpointError(f"{header.path} merges {merge!r}, which its tokens do not have; it is damaged")
    return left, right


def _frame(before: list[int], after: list[int], tokens: list[str]) -> Any:
    """A post-processor that puts the special tokens around a text."""
    single = [tokens[i] for i in before] + ["$A"] + [tokens[i] for i in after]
    return processors.TemplateProcessing(
        single=single,
        pair=[*single, *(part.replace("$A", "$B:1") for part in single)],
        special_tokens=[(tokens[i], i) for i in dict.fromkeys(before + after)],
    )


class _Keys:
    """The keys under ``tokenizer.ggml``, each of the type that is expected."""

    def __init__(self, header: Header):
        self.header = header

    def get(self, name: str, default: Any) -> Any:
        value = self.header.values.get(f"tokenizer.ggml.{name}", default)
        if default is not None and type(value) is not type(default):
            raise CheckpointError(f"{self.header.path} has a strange 'tokenizer.ggml.{name}'; it is damaged")
        return value

    def texts(self, name: str) -> list[str]:
        value = self.get(name, [])
        if not all(isinstance(text, str) for text in value):
            raise CheckpointError(f"{self.header.path} has a strange 'tokenizer.ggml.{name}'; it is damaged")
        return value

    def token_id(self, name: str, tokens: int) -> int | None:
        value = self.get(name, None)
        if value is not None and not (isinstance(value, int) and 0 <= value < tokens):
            raise CheckpointError(f"{self.header.path} has {name} {value!r} and only {tokens} tokens; it is damaged")
        return value

"""The tokenizer rebuilt from a GGUF file splits text as the model's own does.

The oracle below is llama.cpp's algorithm, written plainly: split by the rule's patterns one after the other, then merge
the pair of lowest rank until none is left. transformers' tokenizer of the same file is a second reference, except for
non-ASCII digits: it ignores the rule "smollm" and merges them with the preceding text.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import transformers
from gguf import GGMLQuantizationType as Kind
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from colonnade.checkpoint.gguf import GGUFFile
from colonnade.checkpoint.gguf.header import Header
from colonnade.checkpoint.gguf.tokenizer import tokenizer_from_header
from colonnade.checkpoint.load_model import find_packaged
from colonnade.errors import CheckpointError
from tests.gguf_files import quantisable, speech, vocabulary, write_gguf

TEXTS = [
    "The capital of France is Paris.",
    "In 1865, 4 score and 7 years; π ≈ 3.14159, ½ cup, x² + ٣٤ = Ⅻ!",
    "def f(x):\n    return x**2  # don't\n\n\n\tif True:\r\n        pass\n",
    "   leading, trailing   \n\n  and    inner   ",
    "naïve café — “quotes” … 日本語の文章。 Привет, мир! مرحبا 👩‍👩‍👧‍👦🏳️‍🌈 e\u0301",
    "I'll we're IT'S they'd O'Neil's 'tis",
    "a1b22c333d4444 1,000,000.00 $5 100% #1",
    "",
    " ",
    "\u00a0\u2003\u3000non-ASCII\u200bspaces",
    '{"key": [1, 2, 3], \'nested\': {"a": null}}',
    "https://example.org/a?b=c&d=%20e",
]
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
RULES = {
    "gpt-2": [GPT2],
    "smollm": [r"\p{N}", GPT2],
    "llama-bpe": [WORDS + r"|\p{N}{1,3}|" + REST],
    "qwen2": [WORDS + r"|\p{N}|" + REST],
}


class Oracle:
    """Plain byte-level BPE."""

    def __init__(self, rule: str, tokens: list[str], merges: list[str]):
        self.patterns = [regex.compile(pattern) for pattern in RULES[rule]]
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(merges)}
        printable = [b for b in range(256) if chr(b).isprintable() and not chr(b).isspace() and b != 0xAD]
        others = [b for b in range(256) if b not in printable]
        self.letters = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}

    def encode(self, text: str) -> list[int]:
        pieces = [text]
        for pattern in self.patterns:
            pieces = [part for piece in pieces for part in self.split(pattern, piece)]
        return [self.ids[token] for piece in pieces for token in self.merge(piece)]

    @staticmethod
    def split(pattern: Any, text: str) -> list[str]:
        """The matches and the text between them."""
        parts, at = [], 0
        for match in pattern.finditer(text):
            parts += [text[at : match.start()], match[0]]
            at = match.end()
        return [part for part in [*parts, text[at:]] if part]

    def merge(self, piece: str) -> list[str]:
        # Bytes missing from the vocabulary are dropped: SmolLM2 lacks 0x06 and 0xF1, for instance.
        word = [letter for letter in (self.letters[byte] for byte in piece.encode()) if letter in self.ids]
        while True:
            pairs = [(self.ranks.get(pair, len(self.ranks)), i) for i, pair in enumerate(itertools.pairwise(word))]
            rank, i = min(pairs, default=(len(self.ranks), 0))
            if rank == len(self.ranks):
                return word
            word[i : i + 2] = [word[i] + word[i + 1]]


@pytest.fixture(scope="module")
def smollm2() -> GGUFFile:
    return GGUFFile(find_packaged("smollm2"))


@pytest.fixture(scope="module")
def oracle(smollm2: GGUFFile) -> Oracle:
    values = smollm2.header.values
    return Oracle("smollm", values["tokenizer.ggml.tokens"], values["tokenizer.ggml.merges"])


def test_smollm2_equals_plain_bpe(smollm2: GGUFFile, oracle: Oracle) -> None:
    tokenizer = smollm2.tokenizer().tokenizer
    for text in [*TEXTS, speech()]:
        ids = tokenizer.encode(text).ids
        assert ids == oracle.encode(text), text[:80]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8"), max_size=40))
@example("a  1")
@example("²½")
@example("'S 'Ll")
def test_smollm2_equals_plain_bpe_on_any_text(text: str) -> None:
    tokenizer, oracle = _cached()
    ids = tokenizer.encode(text).ids
    assert ids == oracle.encode(text)
    if all(oracle.letters[byte] in oracle.ids for byte in text.encode()):
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


_CACHE: list[tuple[Tokenizer, Oracle]] = []


def _cached() -> tuple[Tokenizer, Oracle]:
    """Cached here because hypothesis refuses function-scoped fixtures; this pair never changes."""
    if not _CACHE:
        file = GGUFFile(find_packaged("smollm2"))
        values = file.header.values
        oracle = Oracle("smollm", values["tokenizer.ggml.tokens"], values["tokenizer.ggml.merges"])
        _CACHE.append((file.tokenizer().tokenizer, oracle))
    return _CACHE[0]


@pytest.mark.slow
def test_smollm2_agrees_with_transformers(smollm2: GGUFFile) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(smollm2.path.parent, gguf_file=smollm2.path.name)
    parts = smollm2.tokenizer()
    chat = "<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n"
    for text in [*(text for text in TEXTS if "½" not in text), speech(), chat]:
        assert parts.tokenizer.encode(text).ids == reference(text)["input_ids"], text[:80]
    assert (parts.bos_id, parts.eos_ids) == (reference.bos_token_id, (reference.eos_token_id,))
    assert parts.chat_template == reference.chat_template
    assert parts.tokenizer.encode("<|im_start|>").ids == [1]
    assert parts.tokenizer.decode([1, 504, 2]) == parts.tokenizer.decode([504])


@pytest.mark.parametrize("rule", ["gpt-2", "llama-bpe", "llama3", "qwen2", "deepseek-r1-qwen"])
def test_other_pre_tokenizers_equal_plain_bpe_and_transformers(rule: str, tmp_path: Path) -> None:
    keys = vocabulary() | {"tokenizer.ggml.pre": rule, "tokenizer.ggml.add_bos_token": False}
    model = quantisable("qwen2", vocab_size=410)
    path = write_gguf(tmp_path / "model.gguf", model, Kind.F16, keys=keys)
    tokenizer = GGUFFile(path).tokenizer().tokenizer
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="model.gguf")
    known = {"llama3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}.get(rule, rule)
    oracle = Oracle(known, keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.merges"])
    for text in TEXTS:
        composed = text.replace("e\u0301", "é") if known == "qwen2" else text
        assert tokenizer.encode(text).ids == oracle.encode(composed), text
        assert reference(composed)["input_ids"] == oracle.encode(composed), text
    assert tokenizer.encode("so <think>ing<|begin|>").ids == reference("so <think>ing<|begin|>")["input_ids"]
    assert tokenizer.decode([401, 400]) == "<think>"


def tokenizer_with(**changes: Any) -> Any:
    """The tokenizer of a header with nothing but a tokenizer."""
    values = vocabulary() | {f"tokenizer.ggml.{key}": value for key, value in ({"pre": "gpt-2"} | changes).items()}
    return tokenizer_from_header(Header(Path("model.gguf"), values, {}, np.empty(0, np.uint8)), 402)


def test_begin_and_end_tokens_follow_the_file() -> None:
    plain = tokenizer_with().tokenizer.encode("so").ids
    assert tokenizer_with(add_bos_token=True).tokenizer.encode("so").ids == [400, *plain]
    assert tokenizer_with(add_bos_token=True, add_eos_token=True).tokenizer.encode("so").ids == [400, *plain, 400]
    assert tokenizer_with(add_bos_token=True).tokenizer.encode("so", add_special_tokens=False).ids == plain
    assert tokenizer_with(pre="llama-bpe").tokenizer.encode("so").ids == [400, *plain], (
        "llama-bpe adds the begin token by default"
    )
    assert tokenizer_with(eot_token_id=401).eos_ids == (400, 401)


def test_llama3_encodes_a_known_word_without_merges() -> None:
    keys = vocabulary()
    tokens = [*keys["tokenizer.ggml.tokens"][:-1], "xylophone"]
    assert tokenizer_with(pre="llama-bpe", add_bos_token=False, tokens=tokens, token_type=[]).tokenizer.encode(
        "xylophone"
    ).ids == [401]
    assert len(tokenizer_with(tokens=tokens, token_type=[]).tokenizer.encode("xylophone").ids) > 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "llama"}, "of type 'llama'.*use a Hugging Face folder"),
        ({"pre": "tekken"}, "the pre-tokenizer 'tekken'; supported ones are gpt-2, smollm"),
        ({"tokens": []}, "0 tokens, but its embedding has 402 rows"),
        ({"tokens": [str(i) for i in range(403)]}, "403 tokens, but its embedding has 402 rows"),
        ({"tokens": ["a", "a"]}, "lists a token twice"),
        ({"tokens": [1, 2]}, "'tokenizer.ggml.tokens' of the wrong type"),
        ({"tokens": "abc"}, "'tokenizer.ggml.tokens' of the wrong type"),
        ({"merges": ["q z"]}, "the merge 'q z' of unknown tokens"),
        ({"merges": ["qz"]}, "the merge 'qz' of unknown tokens"),
        ({"bos_token_id": 402}, "bos_token_id 402 but only 402 tokens"),
        ({"eos_token_id": "end"}, "eos_token_id 'end'"),
        ({"pre": 7}, "'tokenizer.ggml.pre' of the wrong type"),
    ],
)
def test_unsupported_tokenizers_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        tokenizer_with(**changes)

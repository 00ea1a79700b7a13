"""Calibration texts: windows of a corpus's training split, or of a text.

``sotu`` is all speeches of the sample package except the latest, which ``colonnade eval`` uses.
"""

from pathlib import Path

import torch
from torch import Tensor

from colonnade.data.corpus import Corpus
from colonnade.data.readers import sotu_documents
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError, DataError

WINDOW = 512
"""Tokens of one calibration text."""


def calibration_texts(source: str, tokenizer: Tokenizer, tokens: int, window: int = WINDOW) -> list[Tensor]:
    """Texts of ``window`` tokens, ``tokens`` in all or as many as there are: int64 (T,).

    ``source`` is sotu, a UTF-8 text file, or a corpus folder of the same tokenizer. Raises :class:`DataError` for
    anything else, and :class:`ConfigError` for impossible numbers.
    """
    if tokens < 1 or window < 2:
        raise ConfigError(
            f"{tokens} calibration tokens in windows of {window} are not possible; 131072 in windows of 512 are usual"
        )
    path = Path(source)
    if source != "sotu" and path.is_dir():
        return _windows_of_corpus(path, tokenizer, tokens, window)
    found: list[int] = []
    documents = [text for _, text in reversed(sotu_documents()[:-1])] if source == "sotu" else [_read(path)]
    for text in documents:
        if len(found) < tokens:
            found += tokenizer.encode(text)
    return list(torch.tensor(found[:tokens], dtype=torch.int64).split(window))


def _windows_of_corpus(path: Path, tokenizer: Tokenizer, tokens: int, window: int) -> list[Tensor]:
    corpus = Corpus(path)
    if corpus.tokenizer.fingerprint != tokenizer.fingerprint:
        raise DataError(
            f"{path} was made with a different tokenizer from the model's; use a text file, or another corpus"
        )
    split = corpus.split("train")
    count = min(-(-tokens // window), max(1, split.tokens // window))
    starts = [i * (split.tokens // count) for i in range(count)]  # evenly over the whole split
    return [torch.from_numpy(split.read(at, min(at + window, split.tokens)).astype("int64")) for at in starts]


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; use a text file, a corpus, or sotu") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it first") from None

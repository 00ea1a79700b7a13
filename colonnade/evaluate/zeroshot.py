r"""WikiText-103's adjusted perplexity and LAMBADA's accuracy, as the Megatron-LM paper measures them (section 5.2).

    adjusted perplexity = exp(Σ nll / (words − 1))

Words are those of the raw file, separated by single spaces, while the model sees detokenized text and its own tokens,
so that models with different vocabularies can be compared. Windows of 1,024 tokens overlap by all but 32.

LAMBADA: the last word of a passage counts as predicted if all of its tokens are the argmax.
"""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colonnade.config import plural
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError
from colonnade.evaluate.scorer import Request, Scorer
from colonnade.model.score import window_starts

WINDOW, STRIDE = 1024, 32
Progress = Callable[[int, int], None]

_RULES: tuple[tuple[str, str], ...] = (
    (r"s '", "s'"),
    # Megatron-LM's pattern has slashes in it and matches no text of WikiText; kept for the same numbers.
    (r"/' [0-9]/", "/'[0-9]/"),
    (r" @-@ ", "-"), (r" @,@ ", ","), (r" @\.@ ", "."),
    (r" : ", ": "), (r" ; ", "; "), (r" \. ", ". "), (r" ! ", "! "), (r" \? ", "? "), (r" , ", ", "),
    (r"\(\s*([^\)]*?)\s*\)", r"(\1)"), (r"\[\s*([^\]]*?)\s*\]", r"[\1]"), (r"{\s*([^}]*?)\s*}", r"{\1}"),
    (r'"\s*([^"]*?)\s*"', r'"\1"'), (r"'\s*([^']*?)\s*'", r"'\1'"),
    (r"= = = =", "===="), (r"= = =", "==="), (r"= =", "=="), (r" ° ", "°"),
    (r" \n", "\n"), (r"\n ", "\n"), (r" N ", " 1 "), (r" 's", "'s"),
)  # fmt: skip
_COMPILED = tuple((re.compile(pattern), replacement) for pattern, replacement in _RULES)


def detokenize_wikitext(text: str) -> str:
    """WikiText's tokens as ordinary text, by the rules of Megatron-LM, one after the other."""
    for pattern, replacement in _COMPILED:
        text = pattern.sub(replacement, text)
    return text


def wikitext103(
    scorer: Scorer, tokenizer: Tokenizer, raw: str, progress: Progress = lambda *_: None
) -> dict[str, float]:
    """The adjusted perplexity of the raw text of WikiText-103's test set, and the perplexity per token."""
    words = len(raw.strip().split(" "))
    tokens = tokenizer.encode(detokenize_wikitext(raw.strip()), special=False)
    if words < 2 or len(tokens) < 2:
        raise DataError(f"the text has {plural(words, 'word')}; use wiki.test.tokens of WikiText-103")
    window = min(WINDOW, scorer.model.config.context)
    requests = []
    for start in window_starts(len(tokens) - 1, window, min(STRIDE, window)):
        inputs = tokens[start : min(start + window, len(tokens) - 1) + 1]
        new = len(inputs) - 1 if not start else len(inputs) - 1 - (window - min(STRIDE, window))
        requests.append(Request(inputs[: len(inputs) - new], inputs[len(inputs) - new :]))
    nll = -sum(each.logp for each in scorer.score(requests, progress))
    return {
        "adjusted_perplexity": math.exp(nll / (words - 1)), "token_perplexity": math.exp(nll / (len(tokens) - 1)),
        "nll": nll, "words": words, "tokens": len(tokens),
    }  # fmt: skip


def lambada(
    scorer: Scorer, tokenizer: Tokenizer, texts: list[str], progress: Progress = lambda *_: None
) -> dict[str, float]:
    """The share of ``texts`` with a correctly predicted last word, with its standard error, and the word's
    perplexity.
    """
    requests = []
    for text in texts:
        words = text.split()
        if len(words) < 2:
            raise DataError(f"'{text[:60]}' has no last word after others; use passages, such as LAMBADA's test set")
        context = text[: text.rindex(words[-1])].strip()
        requests.append(
            Request(tokenizer.encode(context, special=False), tokenizer.encode(" " + words[-1], special=False))
        )
    scores = scorer.score(requests, progress)
    accuracy = sum(each.greedy for each in scores) / len(scores)
    return {
        "acc": accuracy, "acc_stderr": math.sqrt(accuracy * (1 - accuracy) / max(len(scores) - 1, 1)),
        "perplexity": math.exp(-sum(each.logp for each in scores) / len(scores)), "n": len(scores),
    }  # fmt: skip


def read_lambada(path: Path) -> list[str]:
    """The passages of ``lambada_test.jsonl``: one object with a text in each line."""
    texts: list[str] = []
    for number, line in enumerate(_read(path, "lambada", 'lines like {"text": "…"}').split("\n"), 1):
        if not line.strip():
            continue
        try:
            record: Any = json.loads(line)
        except ValueError as error:
            raise DataError(f'{path}:{number}: not JSON: {error}; lambada needs lines like {{"text": "…"}}') from None
        if not (isinstance(record, dict) and isinstance(record.get("text"), str)):
            raise DataError(f'{path}:{number}: no text; lambada needs lines like {{"text": "…"}}')
        texts.append(record["text"])
    if not texts:
        raise DataError(f"{path} is empty; use lambada_test.jsonl")
    return texts


def read_wikitext(path: Path) -> str:
    """The raw text of ``wiki.test.tokens``."""
    return _read(path, "wikitext103", "the tokens of WikiText-103, separated by spaces")


def _read(path: Path, task: str, schema: str) -> str:
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise DataError(f"task {task} needs {path} ({schema}): {error.strerror}; pass the file with --data") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); task {task} needs {schema}") from None

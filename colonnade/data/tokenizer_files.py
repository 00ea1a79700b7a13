"""Reads a tokenizer's files: ``tokenizer.json``, and the special tokens and chat template in the files next to it.

``tokenizer.json`` has the vocabulary and the rules that split text. The ids that begin and end a text and the chat
template are spread over ``tokenizer_config.json``, ``special_tokens_map.json``, ``generation_config.json`` (all EOS
ids; the first file has one) and ``chat_template.jinja``. All are read.
"""

import json
from pathlib import Path
from typing import Any

import tokenizers

from colonnade.errors import DataError

CONFIG_KEY = "colonnade"
"""Our key in tokenizer_config.json for the BOS and EOS ids; transformers ignores it."""

TURNS = "{% for message in messages %}{{ message['content'] }}{{ eos_token }}{% endfor %}"
"""The chat template of DialoGPT (arXiv 1911.00536), which has no template of its own but is configured as
"conversational": turns without roles, each with an EOS token.
"""


def read_core(file: Path) -> tokenizers.Tokenizer:
    """The vocabulary and rules in a ``tokenizer.json``; raises :class:`DataError` if it cannot be read."""
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # noqa: BLE001 - the library raises a plain Exception for any error
        raise DataError(f"{file} is not a tokenizer.json: {error}; download or save it again") from None


def read_special_tokens(folder: Path, core: tokenizers.Tokenizer) -> tuple[int | None, tuple[int, ...], str | None]:
    """(bos_id, eos_ids, chat_template) from the files next to ``tokenizer.json``."""
    config = _read_json(folder / "tokenizer_config.json")
    tokens = _read_json(folder / "special_tokens_map.json") | config
    generation = _read_json(folder / "generation_config.json")
    saved = config.get(CONFIG_KEY, {})

    # BERT's tokenizers have [CLS] and [SEP] instead of BOS and EOS.
    bos_id = saved.get("bos_id", _id_of(tokens.get("bos_token") or tokens.get("cls_token"), core))
    bos_id = generation.get("bos_token_id") if bos_id is None else bos_id
    ends = [
        *saved.get("eos_ids", [_id_of(tokens.get("eos_token") or tokens.get("sep_token"), core)]),
        *_as_list(generation.get("eos_token_id")),
    ]
    model = _read_json(folder / "config.json")
    ends = [end for end in ends if end is not None] or _as_list(model.get("eos_token_id"))
    eos_ids = tuple(dict.fromkeys(ends))

    jinja = folder / "chat_template.jinja"
    template = jinja.read_text("utf-8") if jinja.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several templates, as in Command R: the default one is for plain conversations
        template = next((one["template"] for one in template if one["name"] == "default"), None)
    if template is None and "conversational" in (model.get("task_specific_params") or {}):
        template = TURNS
    return bos_id, eos_ids, template


def _id_of(token: str | dict[str, Any] | None, core: tokenizers.Tokenizer) -> int | None:
    content = token["content"] if isinstance(token, dict) else token
    return None if content is None else core.token_to_id(content)


def _as_list(value: int | list[int] | None) -> list[int]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in ``file``; {} if there is no file."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise DataError(f"{file} is not JSON: {error}; download it again") from None
    if not isinstance(value, dict):
        raise DataError(f"{file} contains {type(value).__name__}, not a JSON object; download it again")
    return value

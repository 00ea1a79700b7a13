"""Handles the messages of /tokenize, /detokenize and /tokenizer_info in the engine process, concurrently with steps."""

from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ColonnadeError, RequestError
from colonnade.serve.ipc import Message, error_to_dict
from colonnade.serve.prompts import check_vocabulary

MESSAGES = ("tokenize", "detokenize", "tokenizer_info")
"""Values of ``do``."""

MAX_TEXT_CHARACTERS = 1 << 20
"""Maximum length of a text to tokenise."""

MAX_IDS = 1 << 18
"""Maximum number of ids to decode."""

MAX_DECODED_BYTES = 1 << 24
"""Maximum number of bytes that the decoded ids may stand for."""


def work_size(message: Message) -> int:
    """Characters of text, or ids, to convert."""
    if message["do"] == "tokenizer_info":
        return 0
    if message["do"] == "detokenize":
        return len(message["tokens"])
    if message["messages"] is not None:
        return sum(len(each["content"]) for each in message["messages"])
    return len(message["prompt"])


def answer_message(message: Message, tokenizer: Tokenizer) -> Message:
    """The event that replies to ``message``, or refuses it."""
    try:
        if message["do"] == "tokenizer_info":
            answer: Message = {"info": tokenizer.info}
        else:
            answer = _detokenize(message, tokenizer) if message["do"] == "detokenize" else _tokenize(message, tokenizer)
    except ColonnadeError as error:
        return {"event": "refused", "ids": message["ids"], "error": error_to_dict(error)}
    return {"event": "answer", "ids": message["ids"], **answer}


def _tokenize(message: Message, tokenizer: Tokenizer) -> Message:
    size, messages = work_size(message), message["messages"]
    if size > MAX_TEXT_CHARACTERS:
        raise RequestError(
            f"the text has {size} characters; at most {MAX_TEXT_CHARACTERS} are tokenised per request; send it in "
            "parts",
            param="prompt" if messages is None else "messages",
        )
    if messages is None:
        tokens = tokenizer.encode(message["prompt"], special=message["special"])
    else:
        tokens = tokenizer.encode_chat(messages, add_generation_prompt=message["generation_prompt"])
    return {"tokens": tokens, "strings": [tokenizer.token(i) or "" for i in tokens] if message["strings"] else None}


def _detokenize(message: Message, tokenizer: Tokenizer) -> Message:
    tokens, most = message["tokens"], min(MAX_IDS, MAX_DECODED_BYTES // max(1, tokenizer.longest_token_bytes))
    if len(tokens) > most:
        raise RequestError(
            f"there are {len(tokens)} tokens; at most {most} are decoded per request; send them in parts",
            param="tokens",
        )
    check_vocabulary(tokens, tokenizer.vocab_size, "tokens")
    return {"text": tokenizer.decode(tokens, skip_special=False)}

"""The tokenizer: Hugging Face ``tokenizers`` with the BOS and EOS ids and the chat template of a model.

Models' folders are read by :mod:`colonnade.data.tokenizer_files`; :meth:`Tokenizer.save` writes only ``tokenizer.json``
and ``tokenizer_config.json``, which transformers' ``PreTrainedTokenizerFast`` reads too.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers

from colonnade.data.chat_template import ChatEncoder, ChatTemplate, Message
from colonnade.data.detokenize import ByteDetokenizer, Detokenizer, TokenBytes
from colonnade.data.tokenizer_files import CONFIG_KEY, read_core, read_special_tokens
from colonnade.data.train_tokenizer import CLS, END, SEP, byte_level_bpe, train_bpe, train_wordpiece
from colonnade.errors import DataError, RequestError

TRUNCATION_RATIO = 16
"""The beginning of a long text that is read to truncate it to k tokens, in multiples of the k longest tokens."""

_GENERATION = re.compile(r"\{%[-+]?\s*generation\b")

_BERT_TOKENS = {"unk": "[UNK]", "sep": "[SEP]", "pad": "[PAD]", "cls": "[CLS]", "mask": "[MASK]"}


class Tokenizer:
    """Text to ids and back. Make one with :meth:`from_file`, :meth:`from_bpe_files` or :meth:`train`."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        bos_id: int | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ):
        core.no_truncation()  # a tokenizer.json may contain its training script's truncation and padding
        core.no_padding()
        self._core = core
        self.bos_id = bos_id
        """BOS: the id that begins a text, or None."""
        self.eos_ids = tuple(eos_ids)
        """EOS: the ids that end a generation; the first one ends a document in a corpus."""
        self.chat_template = chat_template
        """The Jinja source that turns messages into a prompt, or None."""
        added = core.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Ids of special tokens, which ``decode`` skips."""
        self.vocab_size = max(core.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """Rows that an embedding needs: the largest id + 1."""
        for token in (*self.eos_ids, *(() if bos_id is None else (bos_id,))):
            if not 0 <= token < self.vocab_size:
                raise DataError(f"special token id {token} is outside the vocabulary of {self.vocab_size}; fix it")

    @classmethod
    def from_model(cls, source: Path | Callable[[], tuple[Any, ...]]) -> Self | None:
        """The tokenizer in a model's folder, if any, or from a function that returns this class's arguments."""
        if callable(source):
            return cls(*source())
        bpe = (source / "vocab.json").is_file() and (source / "merges.txt").is_file()
        return cls.from_file(source) if bpe or (source / "tokenizer.json").is_file() else None

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """The tokenizer of a folder (Colonnade's or Hugging Face's), or of a ``tokenizer.json`` and the files next to
        it.

        Raises :class:`DataError`, naming the file, if there is none or it cannot be read.
        """
        path = Path(path)
        folder = path if path.is_dir() else path.parent
        file = folder / "tokenizer.json" if path.is_dir() else path
        if file.is_file():
            core = read_core(file)
        elif path.is_dir() and (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
            core = byte_level_bpe(folder / "vocab.json", folder / "merges.txt")
            if core.token_to_id(END) is not None:
                core.add_special_tokens([END])
        else:
            raise DataError(f"{file} does not exist; use a tokenizer.json, or a folder with one")
        return cls(core, *read_special_tokens(folder, core))

    @classmethod
    def from_bpe_files(cls, vocab: str | Path, merges: str | Path) -> Self:
        """GPT-2's original two files: ``vocab`` (JSON, token to id) and ``merges`` (one pair per line)."""
        core = byte_level_bpe(Path(vocab), Path(merges))
        core.add_special_tokens([END])
        return cls._with_document_end(core)

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> Self:
        """Train a byte-level BPE of at most ``vocab_size`` tokens, special token included."""
        return cls._with_document_end(train_bpe(texts, vocab_size))

    @classmethod
    def train_wordpiece(cls, texts: Iterable[str], vocab_size: int, *, lowercase: bool = True) -> Self:
        """Train BERT's kind of tokenizer, of at most ``vocab_size`` tokens, special tokens included."""
        core = train_wordpiece(texts, vocab_size, lowercase=lowercase)
        sep = core.token_to_id(SEP)
        assert sep is not None
        return cls(core, core.token_to_id(CLS), (sep,))

    @classmethod
    def _with_document_end(cls, core: tokenizers.Tokenizer) -> Self:
        """As in GPT-2, one special token between documents is both BOS and EOS."""
        end = core.token_to_id(END)
        assert end is not None
        return cls(core, end, (end,))

    def with_special(self, tokens: Sequence[str]) -> Self:
        """A copy with ``tokens`` as special tokens after all others."""
        core = tokenizers.Tokenizer.from_str(self._core.to_str())
        core.add_special_tokens(list(tokens))
        return type(self)(core, self.bos_id, self.eos_ids)

    def save(self, folder: str | Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``folder``, which is created if necessary."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {**self.info, CONFIG_KEY: {"bos_id": self.bos_id, "eos_ids": list(self.eos_ids)}}
        (folder / "tokenizer.json").write_text(self._json, encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False), "utf-8")

    @property
    def info(self) -> dict[str, Any]:
        """The contents of transformers' ``tokenizer_config.json``: class, special tokens, chat template."""
        to_token = self._core.id_to_token
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None if self.bos_id is None else to_token(self.bos_id),
            "eos_token": to_token(self.eos_ids[0]) if self.eos_ids else None,
            "clean_up_tokenization_spaces": False,
            **{
                f"{name}_token": token
                for name, token in _BERT_TOKENS.items()
                if self.token_id(token) in self.special_ids
            },
            "chat_template": self.chat_template,
        }
        return {key: value for key, value in config.items() if value is not None}

    @property
    def size_bytes(self) -> int:
        """Upper bound of the size of the files that :meth:`save` writes."""
        return len(self._json.encode()) + 8 * len(self.chat_template or "") + 4096

    @property
    def json(self) -> str:
        """The contents of its tokenizer.json."""
        return self._json

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the ``tokenizer.json`` that :meth:`save` writes; equal fingerprints tokenise equally."""
        return hashlib.sha256(self._json.encode()).hexdigest()

    def encode(self, text: str, special: bool = True) -> list[int]:
        """The ids of ``text``; ``special`` adds the tokens that begin or end every text (BOS).

        Special tokens spelled in the text become their ids, as chat templates need. Raises :class:`RequestError` for a
        lone surrogate, which is not a character.
        """
        try:
            return self._core.encode(text, add_special_tokens=special).ids
        except TypeError:
            raise _surrogate_error(text) from None

    def encode_batch(self, texts: Sequence[str], special: bool = True) -> list[list[int]]:
        """:meth:`encode` of each text, on several cores."""
        try:
            return [each.ids for each in self._core.encode_batch_fast(list(texts), add_special_tokens=special)]
        except TypeError:
            return [self.encode(text, special) for text in texts]  # raises the error of the text

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The ids of ``text`` without special tokens, and the characters (start, stop) of each token."""
        try:
            encoding = self._literal.encode(text, add_special_tokens=False)
        except TypeError:
            raise _surrogate_error(text) from None
        return encoding.ids, encoding.offsets

    def encode_pair(self, first: str, second: str) -> tuple[list[int], list[int]]:
        """(ids, segments) of a pair of texts with the special tokens around them, for BERT."""
        try:
            encoding = self._core.encode(first, second)
        except TypeError:
            raise _surrogate_error(first + second) from None
        return encoding.ids, encoding.type_ids

    def encode_truncated(
        self, first: str, second: str | None = None, *, special: bool = True, max_tokens: int | None = None
    ) -> tuple[list[int], list[int]]:
        """(ids, segments) of a text or a pair, truncated to the first ``max_tokens``.

        Special tokens count, and are added after truncating (``special``). Of a pair the longer text is truncated
        first. Raises :class:`RequestError` for a lone surrogate, and if the special tokens alone are too many.
        """
        parts = [self._encode_beginning(text, max_tokens) for text in (first, second) if text is not None]
        if max_tokens is not None:
            added = self._core.num_special_tokens_to_add(len(parts) == 2) if special else 0
            room = max_tokens - added
            if room < len(parts):
                raise RequestError(
                    f"truncate_prompt_tokens is {max_tokens}, but {added} special tokens are added; set it to "
                    f"{added + len(parts)} or more",
                    param="truncate_prompt_tokens",
                )
            lengths = [len(part) for part in parts]
            kept = min(lengths[0], max(room - sum(lengths[1:]), room - room // 2))
            for part, most in zip(parts, (kept, room - kept), strict=False):
                part.truncate(most)
        encoding = self._core.post_process(parts[0], parts[1] if len(parts) == 2 else None, special)
        return encoding.ids, encoding.type_ids

    def _encode_beginning(self, text: str, max_tokens: int | None) -> tokenizers.Encoding:
        """At least the first ``max_tokens`` of ``text``, without special ones; the rest of a long text is not read."""
        head = text if max_tokens is None else text[: TRUNCATION_RATIO * self.longest_token_bytes * max_tokens]
        try:
            encoding = self._core.encode(head, add_special_tokens=False)
            if len(head) < len(text) and max_tokens is not None and len(encoding) <= max_tokens:  # spaces, mostly
                encoding = self._core.encode(text, add_special_tokens=False)
        except TypeError:
            raise _surrogate_error(text) from None
        return encoding

    def encode_documents(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, in parallel on all cores, without added tokens.

        A special token spelled in a text stays text: a page that quotes ``<|endoftext|>`` does not end there.
        """
        return [encoding.ids for encoding in self._literal.encode_batch_fast(texts, add_special_tokens=False)]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return self._core.decode(ids, skip_special_tokens=skip_special)

    def token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of an id (``Ġthe``), or None if there is no such id."""
        return self._core.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """The id of a token in the vocabulary's spelling, or None."""
        return self._core.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token inside a text, possibly part of a character; empty for an id without a token."""
        return self._token_bytes.inside(token_id)

    @functools.cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self._core, json.loads(self._json).get("decoder"))

    def detokenizer(self, skip_special: bool = True) -> Detokenizer | ByteDetokenizer:
        """A new incremental decoder, for streaming."""
        return self._token_bytes.detokenizer(self.special_ids if skip_special else frozenset())

    def chat(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation, to be encoded with ``special=False``, since it has its own special tokens.

        Special tokens spelled in a message become special tokens; use :meth:`encode_chat` for untrusted messages.
        ``variables`` are passed to the template (``enable_thinking``). Raises :class:`RequestError` if the model has no
        template or its template refuses the messages.
        """
        if self._chat is None:
            raise RequestError("this model has no chat template; use text completion instead", param="messages")
        ids = {"bos_token": self.bos_id, "eos_token": self.eos_ids[0] if self.eos_ids else None}
        tokens = {name: self._core.id_to_token(i) for name, i in ids.items() if i is not None}
        arguments = {"tools": tools, "add_generation_prompt": add_generation_prompt}
        return self._chat.render(messages, **arguments | tokens | variables)

    def encode_chat(self, messages: list[Message], *, continue_last: bool = False, **variables: Any) -> list[int]:
        """The ids of :meth:`chat`, where special tokens spelled in a message or a variable stay text.

        ``continue_last`` ends the prompt after the last message's content, for the model to continue it; ``variables``
        are those of :meth:`chat`. Raises what :meth:`chat` raises, and :class:`RequestError` for a lone surrogate.
        """
        if continue_last:
            variables["add_generation_prompt"] = False
        try:
            return self._chat_encoder.encode(messages, self.chat, continue_last=continue_last, **variables)
        except TypeError:
            raise _surrogate_error(self.chat(messages, **variables)) from None

    def encode_generations(self, messages: list[Message], **variables: Any) -> tuple[list[int], list[int]] | None:
        """The ids of :meth:`encode_chat`, and for each the number of its ``{% generation %}`` part, or -1.

        None if the template marks no parts. Raises as :meth:`encode_chat`.
        """
        if not _GENERATION.search(self.chat_template or ""):
            return None
        variables.setdefault("add_generation_prompt", False)
        try:
            return self._chat_encoder.encode_generations(messages, self.chat, **variables)
        except TypeError:
            raise _surrogate_error(self.chat(messages, **variables)) from None

    @functools.cached_property
    def _chat_encoder(self) -> ChatEncoder:
        return ChatEncoder(self._core, lambda: self._literal, self.special_ids)

    @functools.cached_property
    def _chat(self) -> ChatTemplate | None:
        return ChatTemplate(self.chat_template) if self.chat_template else None

    @functools.cached_property
    def _json(self) -> str:
        return self._core.to_str(pretty=True)

    @functools.cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """A copy that encodes special tokens as text; the switch belongs to the object, which threads share."""
        copy = tokenizers.Tokenizer.from_str(self._json)
        copy.encode_special_tokens = True
        return copy

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """The length of the longest token in the vocabulary's spelling, in UTF-8; its text is at most as long."""
        return max((len(token.encode()) for token in self._core.get_vocab()), default=1)


def _surrogate_error(text: str) -> RequestError:
    at = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), 0)
    return RequestError(f"character {at} is a lone surrogate, which is not text; remove it", param="prompt")

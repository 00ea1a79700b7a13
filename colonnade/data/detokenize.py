"""Token by token to text, for streaming: never half a character, and in the end exactly ``decode(all the ids)``.

One token is not one piece of text. A byte-level token may hold part of a UTF-8 character; SentencePiece's first token
loses its leading space and the others keep it; its byte tokens (``<0xE2>``) become a character only if the whole run
of them is valid, and one U+FFFD each otherwise. So a token is decoded with some that went before it, and a decoder's
output is held back while a later token could still change it:

- a final U+FFFD may be the first bytes of a character: lossy decoding writes one for an unfinished character, however
  many of its bytes are there (Unicode 15, section 3.9, "U+FFFD substitution of maximal subparts"), so exactly one
  trailing character is uncertain;
- a run of byte tokens is uncertain until it ends.

What differs from the sliding windows of other servers: the two rules above, which make the concatenation exact also
for broken bytes, and the window, which moves only once it holds several settled tokens, so that a push decodes once.
"""

from collections.abc import Callable, Sequence

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BROKEN_RUN = 32  # tokens; a model that is stuck on a broken byte must not take ever longer
_SETTLED = 8  # tokens of context kept before the newest: enough that the window's own first token no longer matters


class Detokenizer:
    """Feed ids to :meth:`push`, print what it returns, and :meth:`flush` at the end.

    ``decode`` turns ids into text; ``silent`` are ids that print nothing (skipped special tokens); ``byte_ids`` are
    SentencePiece's byte tokens, none for a byte-level vocabulary.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        silent: frozenset[int] = frozenset(),
        byte_ids: frozenset[int] = frozenset(),
    ):
        self._decode, self._silent, self._byte_ids = decode, silent, byte_ids
        self._window: list[int] = []
        self._told = 0  # characters of decode(window) already returned
        self._mark = 0  # tokens of the window before which the text is settled

    def push(self, token: int) -> str:
        """The text that is certain now that ``token`` has come; often one word, sometimes nothing."""
        if token in self._silent:
            return ""
        self._window.append(token)
        if token in self._byte_ids:
            return ""
        text = self._decode(self._window)
        certain = text.removesuffix(REPLACEMENT)
        new, self._told = certain[self._told :], len(certain)
        if len(certain) == len(text):
            self._slide()
        elif len(self._window) > _BROKEN_RUN:
            self._cut(text)
        return new

    def flush(self) -> str:
        """Whatever was held back; the stream is over and the detokenizer is empty again."""
        rest = self._decode(self._window)[self._told :]
        self._window, self._told, self._mark = [], 0, 0
        return rest

    def _slide(self) -> None:
        """Forget tokens whose text is settled, keeping at least ``_SETTLED`` of them as context for the next."""
        if len(self._window) - self._mark >= _SETTLED:
            self._window = self._window[self._mark :]
            self._told = len(self._decode(self._window))
            self._mark = len(self._window)

    def _cut(self, text: str) -> None:
        """Forget the start of a long run of broken bytes, which would make each push slower than the last.

        Only where the two parts say what the whole says, so that no character spans the cut; one push later, another
        place is tried.
        """
        before, after = self._window[:-_SETTLED], self._window[-_SETTLED:]
        gone = self._decode(before)
        if gone + self._decode(after) == text:
            self._window, self._told, self._mark = after, self._told - len(gone), 0

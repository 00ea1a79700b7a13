"""A config.json read to its last key: what we cannot express is refused, never skipped.

Hugging Face's config classes ignore keys that they do not know, and so would run a model that is not the one described.
Here every key is either *taken* (it becomes a field of ours), *required to say* the one value that we implement, known
to be *harmless* (it cannot change a logit), or refused. A key that says no (null, false, 0, "", [], {}) says nothing.
"""

from collections.abc import Mapping
from typing import Any

from colonnade.errors import CheckpointError

# Book-keeping, dropout rates (training only; ours is a setting of the run) and defaults for `generate` and for
# classification heads. They are written into many config.json files and none of them reaches a logit.
HARMLESS = frozenset({
    "architectures", "dtype", "gradient_checkpointing", "is_llama_config", "model_type", "n_ctx",
    "name_or_path", "pretraining_tp", "tokenizer_class", "torch_dtype", "transformers_version", "use_cache",
    "bos_token_id", "cls_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id", "sep_token_id",
    "unk_token_id",
    "attention_dropout", "attn_dropout", "attn_pdrop", "embd_pdrop", "hidden_dropout", "resid_pdrop",
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "return_dict", "use_return_dict",
    "finetuning_task", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params",
    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id",
    "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
})  # fmt: skip
HARMLESS_PREFIXES = ("_", "summary_", "unsloth", "transformers.js")


class Keys:
    """The keys of one config.json; ``where`` names the file in messages."""

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw, self.where = raw, where
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """The value of a key, or ``default`` where it is absent or null."""
        self._taken.add(name)
        value = self.raw.get(name)
        return default if value is None else value

    def size(self, name: str, default: int | None = None) -> int:
        """A positive whole number; required unless ``default`` is given."""
        value = self.take(name, default)
        if value is None:
            raise CheckpointError(f"{self.where} lacks '{name}'; is it a model's config.json, whole?")
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise self.refuse(name, "a positive whole number was expected")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number; required unless ``default`` is given."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, "a number was expected")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false was expected")
        return value

    def must_be(self, name: str, value: Any, why: str) -> None:
        """Refuse the file when the key is there and says anything but ``value``."""
        if self.take(name, value) != value:
            raise self.refuse(name, why)

    def refuse(self, name: str, why: str) -> CheckpointError:
        """The error that names the file, the key and its value."""
        return CheckpointError(f"{self.where} sets {name!r} to {_short(self.raw.get(name))}: {why}")

    def finish(self) -> None:
        """Refuse the file when it holds a key that nothing has taken and that is not known to be harmless."""
        for name, value in self.raw.items():
            if name in self._taken or name in HARMLESS or name.startswith(HARMLESS_PREFIXES) or not value:
                continue
            raise self.refuse(
                name, "Colonnade does not know this key; if it changes no logit, remove it from the file and load again"
            )


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

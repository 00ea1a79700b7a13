"""The record of a model family, and strict reading of its config.json.

Hugging Face's config classes ignore unknown keys, and so may run a different model from the one that the file
describes. Here every key must be *taken* (it sets one of our fields), *required* to have the one value that we
implement, listed in :data:`IGNORED_KEYS` (it cannot change a logit), or the file is refused, whatever the key's value.
``null`` is a value too: it is accepted only where it has a meaning. GGUF metadata is read with the same class.

A :class:`Family` converts config.json in both directions and maps our parameter names to theirs. Its table has ``{i}``
for the layer and lists every parameter that the family *can* have; the config determines which a model has. To add a
family, write a file next to ``llama.py`` with a :class:`Family`, and list it in ``__init__.py``.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from colonnade.checkpoint.weight_mapping import MappingTable
from colonnade.config import ModelConfig
from colonnade.config.model import Activation
from colonnade.errors import CheckpointError

_IGNORED_BY_REASON: dict[str, str] = {
    "names, versions and dtypes of the file": """
        architectures model_type name_or_path _name_or_path _commit_hash transformers_version is_llama_config
        dtype torch_dtype use_bfloat16 _pre_quantization_dtype tokenizer_class _from_auto _auto_class""",
    "the choice among implementations with equal results": """
        attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
        _flash_attn_2_enabled _experts_implementation _experts_implementation_internal chunk_size_feed_forward
        gradient_checkpointing pretraining_tp torchscript tf_legacy_loss use_cache reorder_and_upcast_attn""",
    "what a call returns": """
        output_attentions _output_attentions output_hidden_states output_past output_scores return_dict
        return_dict_in_generate use_return_dict""",
    "settings of training, which belong to our run config": """
        attention_dropout attention_probs_dropout_prob attn_dropout attn_pdrop classifier_dropout embd_pdrop
        hidden_dropout hidden_dropout_prob resid_pdrop output_router_logits""",
    "a tokenizer's ids and length limit": """
        bos_token_id cls_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id unk_token_id prefix
        max_sequence_length model_max_length""",
    "classification heads and tasks (bert.py reads the labels itself)": """
        finetuning_task id2label label2id num_labels _num_labels problem_type task_specific_params
        n_special predict_special_tokens""",
    "a cross-encoder's activation (pooling.py reads it)": """
        sentence_transformers sbert_ce_default_activation_function""",
    "read only by BERT's classes; GPT-2's second name for its context length": """
        is_decoder n_ctx""",
    "defaults of generate()": """
        bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
        exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
        no_repeat_ngram_size num_beam_groups num_beams num_return_sequences remove_invalid_values repetition_penalty
        suppress_tokens temperature top_k top_p typical_p""",
}
IGNORED_KEYS = frozenset(name for names in _IGNORED_BY_REASON.values() for name in names.split())
"""Keys that cannot change a logit."""
IGNORED_PREFIXES = ("summary_", "unsloth", "transformers.js")
"""Prefixes of such keys: GPT-2's pooling for a multiple-choice head, and marks of two tools."""

UNSUPPORTED: dict[str, Any] = {
    "add_cross_attention": False, "cross_attention_hidden_size": None, "is_encoder_decoder": False,
    "tie_encoder_decoder": False, "pruned_heads": {}, "rope_interleaved": False, "sliding_window": None,
    "use_mrope": False, "use_sliding_window": False, "use_bidirectional_attention": False,
    "quantization_config": None,
}  # fmt: skip
"""Features that a family lacks unless it reads the key itself: only the value that switches them off is accepted."""

_MISSING: Any = object()


class StrictKeys:
    """The keys of one file's metadata; :meth:`refuse_unknown` refuses the file when one was not taken.

    Each reader takes a ``default`` for an absent key, and in ``null`` the meaning of an explicit null; a null is
    refused where neither ``null`` nor a default of None is given.
    """

    ignored: Collection[str] = ()
    """Keys that cannot change a logit."""
    ignored_prefixes: tuple[str, ...] = ()
    """Prefixes of such keys."""
    unsupported: Mapping[str, Any] = {}
    """Features that are not implemented, with the value that switches them off."""
    remedy: str
    """The remedy for an unknown key."""

    def __init__(self, raw: Mapping[str, Any], file: str, prefix: str = ""):
        """``file`` and ``prefix`` (of all names) are for messages."""
        self.raw, self.file, self._prefix = raw, file, prefix
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = None, *, null: Any = _MISSING) -> Any:
        """Reads a value of any type."""
        self._taken.add(name)
        value = self.raw.get(name, default)
        if value is not None or default is None:
            return value
        if null is _MISSING:
            raise self.refuse(name, "null has no meaning here; set a value, or remove the key to use the default")
        return null

    def ignore(self, names: Iterable[str]) -> None:
        """Accepts any values of keys that change nothing here."""
        self._taken.update(names)

    def size(self, name: str, default: int | None = _MISSING, *, null: int | None = _MISSING, minimum: int = 1) -> Any:
        """Reads a whole number not below ``minimum``; required unless ``default`` is given."""
        if default is _MISSING and self.raw.get(name) is None:
            raise CheckpointError(
                f"{self.file} lacks '{self._prefix}{name}'; it is incomplete, or does not describe a model"
            )
        value = self.take(name, default, null=null)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= minimum):
            return value
        raise self.refuse(name, f"a {'positive whole number' if minimum else 'whole number from 0 on'} was expected")

    def number(self, name: str, default: float | None = None) -> float:
        """Reads a number; required unless ``default`` is given."""
        value = self.take(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, "a number was expected")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """Reads true or false."""
        value = self.take(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false was expected")
        return value

    def must_be(self, name: str, value: Any, why: str) -> None:
        """Refuses the file when the key is present with a value other than ``value``."""
        self._taken.add(name)
        if self.raw.get(name, value) != value:
            raise self.refuse(name, why)

    def must_agree(self, name: str, other: str, value: Any) -> None:
        """Refuses the file when ``name`` is present and is not ``value``, which the key ``other`` implies."""
        self.must_be(
            name, value, f"'{other}' ({_short(self.raw.get(other))}) requires {_short(value)}; make them agree"
        )

    def refuse(self, name: str, why: str) -> CheckpointError:
        """Returns an error that names the file, the key and its value."""
        return CheckpointError(f"{self.file} sets {self._prefix + name!r} to {_short(self.raw.get(name))}: {why}")

    def refuse_unknown(self) -> None:
        """Refuses the file when it has a key that was not taken and is not ignored."""
        for name in self.raw:
            if name in self._taken or name in self.ignored or name.startswith(self.ignored_prefixes):
                continue
            if name in self.unsupported:
                self.must_be(name, self.unsupported[name], "this is not implemented for this family")
            else:
                raise self.refuse(name, f"Colonnade does not support this key; {self.remedy}")


class ConfigKeys(StrictKeys):
    """The keys of one config.json."""

    ignored, ignored_prefixes, unsupported = IGNORED_KEYS, IGNORED_PREFIXES, UNSUPPORTED
    remedy = "if the model without it computes the same, remove the key and load again"

    def refuse_unknown(self) -> None:
        """As in :class:`StrictKeys`; explains that code in the folder (``auto_map``) is not run."""
        if "auto_map" in self.raw and "auto_map" not in self._taken:
            raise self.refuse(
                "auto_map",
                "the model comes with its own code, which is not run; if transformers' own class computes the same, "
                "remove the key and load again",
            )
        super().refuse_unknown()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""Hugging Face's names of activations to ours; of several names for one, the first is written."""


@dataclass(frozen=True)
class Family:
    """One model family, as Hugging Face stores it."""

    name: str
    """``model_type`` in config.json, and :attr:`ModelConfig.family`."""
    architecture: str
    """The class name in ``architectures``, unless :attr:`to_hf` sets another."""
    prefix: str
    """The prefix of the base model's tensors; files saved from the base model alone lack it."""
    table: MappingTable
    """Our parameter names to theirs."""
    from_hf: Callable[[ConfigKeys], ModelConfig]
    """Converts config.json to our config."""
    to_hf: Callable[[ModelConfig], dict[str, Any]]
    """Converts our config to theirs, without the keys that all families have."""
    buffers: str
    """A regular expression for tensors in old files that follow from the config."""
    duplicates: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may be stored again under another name, to the original."""
    renamed_suffixes: tuple[tuple[str, str], ...] = ()
    """Suffixes of tensor names in old files, to today's."""
    stacked_table: MappingTable = field(default_factory=dict)
    """For families with experts: replaces entries of :attr:`table` for files with stacked experts, the form of
    transformers 5's modules."""
    config_for_tensors: Callable[[ModelConfig, Collection[str]], ModelConfig] = lambda config, names: config
    """Corrects the config by the names of the tensors that are in the folder."""
    tied_by_values: bool = False
    """Whether the output projection is tied is decided by the tensors, because the config does not define it."""

    @property
    def moe(self) -> bool:
        """Whether its models have experts, in some layers or all."""
        return any(".ffn.experts." in name for name in self.table)

    def table_for(self, names: Collection[str]) -> MappingTable:
        """The mappings for a file with the tensors ``names``."""
        stacked = any(name.endswith("mlp.experts.down_proj") for name in names)
        return {**self.table, **self.stacked_table} if stacked else self.table


def activation_from_hf(keys: ConfigKeys, key: str, default: str) -> Activation:
    """Converts their name of an activation function to ours."""
    theirs = keys.take(key, default)
    if not isinstance(theirs, str) or theirs not in ACTIVATIONS:
        raise keys.refuse(key, f"known activations are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[theirs]


def activation_to_hf(ours: Activation) -> str:
    """Converts our name of an activation function to theirs."""
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)


SIZES = {
    "vocab_size": "vocab_size",
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn_width": "intermediate_size",
}
"""Our fields to theirs, for the sizes that every family but GPT-2 has under these names."""


def sizes_from_hf(keys: ConfigKeys) -> dict[str, Any]:
    """Reads :data:`SIZES`, which are required."""
    return {ours: keys.size(theirs) for ours, theirs in SIZES.items()}


def sizes_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Writes :data:`SIZES`."""
    return {theirs: getattr(config, ours) for ours, theirs in SIZES.items()}

"""Strict reading of a config.json: every key is read, checked, listed as harmless, or refused.

Hugging Face's config classes ignore keys that they do not know, and so may run another model than the file describes.
Here a key is either *taken* (it becomes a field of ours), *required to have* the one value that we implement, listed in
:data:`HARMLESS` (it cannot change a logit), or the file is refused, whatever the key's value. ``null`` is a value too:
it is accepted only where it has a meaning.

What a family is to us: its config.json both ways, and one table from our parameter names to theirs.

The table writes ``{i}`` for the layer and lists every parameter that the family *can* have; the config says which it
has. To add a family, write one small file beside ``llama.py`` with a :class:`Family` in it, and name it in
``families.py``.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from colonnade.checkpoint.weight_mapping import Table
from colonnade.config import ModelConfig
from colonnade.config.model import Activation
from colonnade.errors import CheckpointError

_GROUPS: dict[str, str] = {
    "names, versions and number types: of the file, not of the function": """
        architectures model_type name_or_path _name_or_path _commit_hash transformers_version is_llama_config
        dtype torch_dtype use_bfloat16 _pre_quantization_dtype tokenizer_class _from_auto _auto_class""",
    "other implementations of the same function": """
        attn_implementation _attn_implementation _attn_implementation_autoset _attn_implementation_internal
        _flash_attn_2_enabled _experts_implementation _experts_implementation_internal chunk_size_feed_forward
        gradient_checkpointing pretraining_tp torchscript tf_legacy_loss use_cache reorder_and_upcast_attn""",
    "what a call returns": """
        output_attentions _output_attentions output_hidden_states output_past output_scores return_dict
        return_dict_in_generate use_return_dict""",
    "settings of training: ours belong to the run": """
        attention_dropout attention_probs_dropout_prob attn_dropout attn_pdrop classifier_dropout embd_pdrop
        hidden_dropout hidden_dropout_prob resid_pdrop output_router_logits""",
    "a tokenizer's ids, and its limit, which no rotary position depends on": """
        bos_token_id cls_token_id decoder_start_token_id eos_token_id pad_token_id sep_token_id unk_token_id prefix
        max_sequence_length model_max_length""",
    "classification heads and tasks (BERT reads its labels itself)": """
        finetuning_task id2label label2id num_labels _num_labels problem_type task_specific_params
        n_special predict_special_tokens""",
    "a mark of decoders that BERT's classes alone read; GPT-2's second name of its context": """
        is_decoder n_ctx""",
    "defaults of generate()": """
        bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
        exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
        no_repeat_ngram_size num_beam_groups num_beams num_return_sequences remove_invalid_values repetition_penalty
        suppress_tokens temperature top_k top_p typical_p""",
}
HARMLESS = frozenset(name for names in _GROUPS.values() for name in names.split())
"""Keys that change no logit, whatever they say."""
HARMLESS_PREFIXES = ("summary_", "unsloth", "transformers.js")
"""GPT-2's pooling for a multiple-choice head, and marks of two tools."""

ABSENT: dict[str, Any] = {
    "add_cross_attention": False, "cross_attention_hidden_size": None, "is_encoder_decoder": False,
    "tie_encoder_decoder": False, "pruned_heads": {}, "rope_interleaved": False, "sliding_window": None,
    "use_mrope": False, "use_sliding_window": False, "use_bidirectional_attention": False,
    "quantization_config": None,
}  # fmt: skip
"""Features that a family lacks unless it reads the key itself: only the value that says so is accepted."""

_NOT_GIVEN: Any = object()


class Keys:
    """The keys of one config.json; ``where`` names the file in messages.

    Each reader takes a ``default`` for an absent key, and in ``null`` what an explicit null stands for; a null is
    refused where neither ``null`` nor a default of None is given.
    """

    def __init__(self, raw: Mapping[str, Any], where: str):
        self.raw, self.where = raw, where
        self._taken: set[str] = set()

    def take(self, name: str, default: Any = None, *, null: Any = _NOT_GIVEN) -> Any:
        """The value of a key of any type."""
        self._taken.add(name)
        value = self.raw.get(name, default)
        if value is not None or default is None:
            return value
        if null is _NOT_GIVEN:
            raise self.refuse(name, "null says nothing; give a value, or remove the key for transformers' default")
        return null

    def size(
        self, name: str, default: int | None = _NOT_GIVEN, *, null: int | None = _NOT_GIVEN, least: int = 1
    ) -> Any:
        """A whole number from ``least`` on; required unless ``default`` is given."""
        if default is _NOT_GIVEN and self.raw.get(name) is None:
            raise CheckpointError(f"{self.where} lacks '{name}'; is it a model's config.json, whole?")
        value = self.take(name, default, null=null)
        if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least):
            return value
        raise self.refuse(name, f"a {'positive whole number' if least else 'whole number from 0 on'} was expected")

    def number(self, name: str, default: float) -> float:
        """A number."""
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
        self._taken.add(name)
        if self.raw.get(name, value) != value:
            raise self.refuse(name, why)

    def must_agree(self, name: str, other: str, value: Any) -> None:
        """Refuse the file when ``name`` is there and is not ``value``, which follows from the key ``other``."""
        self.must_be(
            name, value, f"'{other}' ({_short(self.raw.get(other))}) asks for {_short(value)}; make them agree"
        )

    def refuse(self, name: str, why: str) -> CheckpointError:
        """The error that names the file, the key and its value."""
        return CheckpointError(f"{self.where} sets {name!r} to {_short(self.raw.get(name))}: {why}")

    def finish(self) -> None:
        """Refuse the file when it holds a key that nothing has taken and that is not known to be harmless."""
        for name in self.raw:
            if name in self._taken or name in HARMLESS or name.startswith(HARMLESS_PREFIXES):
                continue
            if name in ABSENT:
                self.must_be(name, ABSENT[name], "this is not implemented for this family")
                continue
            why = (
                "the model brings code of its own, which is not run; if transformers' own class"
                if name == "auto_map"
                else "Colonnade does not know this key; if the model without it"
            )
            raise self.refuse(name, f"{why} computes the same, remove the key and load again")


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
"""Hugging Face's names of activations to ours; the first of several is the one we write."""


@dataclass(frozen=True)
class Family:
    """One line of models, as Hugging Face stores it."""

    name: str
    """``model_type`` in config.json, and :attr:`ModelConfig.family`."""
    architecture: str
    """The class, for ``architectures``, unless :attr:`to_hf` says another."""
    prefix: str
    """What their base model's tensors begin with; files saved from the base model alone lack it."""
    table: Table
    """Our names to theirs."""
    from_hf: Callable[[Keys], ModelConfig]
    """Reads the keys of config.json."""
    to_hf: Callable[[ModelConfig], dict[str, Any]]
    """Writes them (those of :func:`colonnade.checkpoint.hf.families.config_to_hf` excepted)."""
    buffers: str
    """A regular expression for tensors that old files carry and that follow from the config."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that a file may hold again under another name, to the original's."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Ends of tensor names in old files, to what they are today."""
    experts: bool = False
    """Whether its models have experts, in some layers or all."""
    modules: Table = field(default_factory=dict)
    """Forms that take the place of :attr:`table`'s where a file holds tensors as transformers 5's classes do."""
    as_held: Callable[[ModelConfig, Collection[str]], ModelConfig] = lambda config, names: config
    """Corrects the config by the names of the tensors that the folder really holds."""

    def table_of(self, names: Collection[str]) -> Table:
        """Our names to theirs for a file of these tensors."""
        plain = any(name.endswith("mlp.experts.down_proj") for name in names)
        return {**self.table, **self.modules} if plain else self.table


def activation_from_hf(keys: Keys, key: str, default: str) -> Activation:
    """Our name of their activation function."""
    theirs = keys.take(key, default)
    if not isinstance(theirs, str) or theirs not in ACTIVATIONS:
        raise keys.refuse(key, f"known activations are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[theirs]


def activation_to_hf(ours: Activation) -> str:
    """Their name of our activation function."""
    return next(theirs for theirs, name in ACTIVATIONS.items() if name == ours)

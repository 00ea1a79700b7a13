"""BERT (Devlin 2019) and Megatron's BERT (Shoeybi 2019), with the heads of transformers' classes.

    "bert"            norms after each part and after the embedding (figure 7a of arXiv 1909.08053)
    "megatron-bert"   norms before each part and after the last block (figure 7b)

``architectures`` determines the head (our :attr:`ModelConfig.top`); without it, only a pooler. The original files name
norms as TensorFlow did (gamma, beta), and ``bert-base-uncased`` declares a masked-token model but contains the pooler
and the sentence head too: it is read with all of them.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

from colonnade.checkpoint.hf.family import (
    ConfigKeys,
    Family,
    activation_from_hf,
    activation_to_hf,
    sizes_from_hf,
    sizes_to_hf,
)
from colonnade.checkpoint.weight_mapping import MappingTable, ParamMapping, SplitQKV, weight_and_bias
from colonnade.config import ModelConfig
from colonnade.config.model import Family as Kind
from colonnade.config.model import TaskHead

TASK_HEADS: dict[str, TaskHead] = {
    "Model": "encoder",
    "ForPreTraining": "pretraining",
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "classes",
    "ForQuestionAnswering": "spans",
}
"""The end of a class's name to our head."""

DUPLICATES = {
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings.weight",
    "cls.predictions.decoder.bias": "cls.predictions.bias",
}

_LAYER = "bert.encoder.layer.{i}."
_NORMS: dict[Kind, dict[str, str]] = {
    "bert": {
        "embed.norm": "bert.embeddings.LayerNorm",
        "blocks.{i}.norm1": f"{_LAYER}attention.output.LayerNorm",
        "blocks.{i}.norm2": f"{_LAYER}output.LayerNorm",
    },
    "megatron-bert": {
        "blocks.{i}.norm1": f"{_LAYER}attention.ln",
        "blocks.{i}.norm2": f"{_LAYER}ln",
        "norm": "bert.encoder.ln",
    },
}
_QKV = [f"{_LAYER}attention.self.{part}" for part in ("query", "key", "value")]
_LAYERS = {
    "blocks.{i}.attention.out": f"{_LAYER}attention.output.dense",
    "blocks.{i}.ffn.up": f"{_LAYER}intermediate.dense",
    "blocks.{i}.ffn.down": f"{_LAYER}output.dense",
    "top.transform": "cls.predictions.transform.dense",
    "top.norm": "cls.predictions.transform.LayerNorm",
    "top.pooler": "bert.pooler.dense",
    "top.order": "cls.seq_relationship",
    "top.classes": "classifier",
    "top.spans": "qa_outputs",
}


def _table(kind: Kind) -> MappingTable:
    table: MappingTable = {
        "embed.tokens.weight": ParamMapping("bert.embeddings.word_embeddings.weight"),
        "embed.positions.weight": ParamMapping("bert.embeddings.position_embeddings.weight"),
        "embed.segments.weight": ParamMapping("bert.embeddings.token_type_embeddings.weight"),
        **weight_and_bias("blocks.{i}.attention.qkv", *_QKV, mapping=SplitQKV),
        "top.bias": ParamMapping("cls.predictions.bias"),
        "unembed.weight": ParamMapping("cls.predictions.decoder.weight"),
    }
    for ours, theirs in (_LAYERS | _NORMS[kind]).items():
        table |= weight_and_bias(ours, theirs)  # pyrefly: ignore[unsupported-operation]
    return table


_POOLER_SIZES = ("pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head")
"""In Google's multilingual files, for other pooler types than theirs."""


def _from_hf(kind: Kind, stem: str, keys: ConfigKeys) -> ModelConfig:
    keys.must_be("position_embedding_type", "absolute", "only absolute positions are implemented")
    keys.must_be("is_decoder", False, "only the encoder is implemented")
    keys.must_be("add_cross_attention", False, "only the encoder is implemented")
    keys.must_be("tie_word_embeddings", True, "BERT ties its output projection to the embedding")
    keys.must_be("is_causal", False, "BERT's attention is bidirectional")
    keys.must_be("directionality", "bidi", "BERT's attention is bidirectional")
    keys.must_be("pooler_type", "first_token_transform", "only the first token's pooler is implemented")
    keys.ignore(_POOLER_SIZES)
    architecture = (keys.take("architectures") or [f"{stem}Model"])[0]
    tops: dict[str, TaskHead] = {stem + end: top for end, top in TASK_HEADS.items()}
    if not isinstance(architecture, str) or architecture not in tops:
        raise keys.refuse("architectures", f"known classes are {', '.join(tops)}")
    top = tops[architecture]
    labels, outputs = keys.take("id2label"), keys.size("num_labels", 2, null=2)
    if labels is not None and top == "classes":
        outputs = len(labels)
        keys.must_agree("num_labels", "id2label", outputs)
    return ModelConfig(
        family=kind,
        **sizes_from_hf(keys),
        context=keys.size("max_position_embeddings", 512),
        segments=keys.size("type_vocab_size", 2),
        norm_eps=keys.number("layer_norm_eps", 1e-12),
        norm_order="post" if kind == "bert" else "pre",
        embed_norm=kind == "bert",
        activation=activation_from_hf(keys, "hidden_act", "gelu"),
        init_std=keys.number("initializer_range", 0.02),
        task_head=top,
        classes=outputs if top == "classes" else 0,
        causal=False,
        positions="learned",
        norm="layernorm",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        tied=True,
    )


def _to_hf(stem: str, config: ModelConfig) -> dict[str, Any]:
    end = next((end for end, top in TASK_HEADS.items() if top == config.task_head), "Model")
    labels = {str(i): f"LABEL_{i}" for i in range(config.classes)}
    fields = {
        "architectures": [stem + end],
        "max_position_embeddings": config.context,
        "type_vocab_size": config.segments,
        "layer_norm_eps": config.norm_eps,
        "hidden_act": activation_to_hf(config.activation),
        "initializer_range": config.init_std,
        "tie_word_embeddings": True,
    }
    if labels:
        fields |= {"id2label": labels, "label2id": {name: int(i) for i, name in labels.items()}}
    return sizes_to_hf(config) | fields


def _config_for_tensors(config: ModelConfig, names: Collection[str]) -> ModelConfig:
    pretraining = {"bert.pooler.dense.weight", "cls.seq_relationship.weight"} <= set(names)
    return config.replace(task_head="pretraining") if config.task_head == "masked" and pretraining else config


def _family(kind: Kind, stem: str) -> Family:
    return Family(
        kind, f"{stem}Model", "bert.", _table(kind), partial(_from_hf, kind, stem), partial(_to_hf, stem),
        r".*\.embeddings\.position_ids", duplicates=DUPLICATES, config_for_tensors=_config_for_tensors,
        renamed_suffixes=(("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")),
    )  # fmt: skip


BERT, MEGATRON = _family("bert", "Bert"), _family("megatron-bert", "MegatronBert")

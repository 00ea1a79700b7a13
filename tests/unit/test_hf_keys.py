"""Every key of transformers' configs: accepted at its default, never silently ignored when changed, null or absent."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from colonnade.checkpoint.hf import FAMILIES, config_from_hf, nllb
from colonnade.checkpoint.hf.family import IGNORED_KEYS, IGNORED_PREFIXES, UNSUPPORTED
from colonnade.config import ModelConfig
from colonnade.errors import CheckpointError

# Keys of configs of transformers 4.33 to 4.57 that version 5 lacks, as ``to_dict`` wrote them.
TRANSFORMERS_4_KEYS: dict[str, Any] = {
    "_attn_implementation_autoset": False, "add_cross_attention": False, "bad_words_ids": None,
    "begin_suppress_tokens": None, "cross_attention_hidden_size": None, "decoder_start_token_id": None,
    "diversity_penalty": 0.0, "do_sample": False, "early_stopping": False, "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None, "finetuning_task": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "is_decoder": False, "length_penalty": 1.0, "max_length": 20, "min_length": 0,
    "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
    "output_scores": False, "prefix": None, "pruned_heads": {}, "remove_invalid_values": False,
    "repetition_penalty": 1.0, "return_dict_in_generate": False, "sep_token_id": None, "suppress_tokens": None,
    "task_specific_params": None, "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False,
    "tokenizer_class": None, "top_k": 50, "top_p": 1.0, "torch_dtype": "bfloat16", "torchscript": False,
    "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip
TRANSFORMERS_4_FAMILY_KEYS: dict[str, dict[str, Any]] = {
    "bert": {"position_embedding_type": "absolute"},
    "megatron-bert": {"position_embedding_type": "absolute"},
    "qwen2_moe": {"sliding_window": None},
    "deepseek_v2": {"aux_loss_alpha": 0.001, "seq_aux": True},
}
# As published on the Hub, in addition to those of test_hf_config.py.
HUB: dict[str, dict[str, Any]] = {
    "nllb-moe-54b": {
        "activation_dropout": 0.0, "activation_function": "relu", "architectures": ["NllbMoeForConditionalGeneration"],
        "attention_dropout": 0.1, "batch_prioritized_routing": False, "bos_token_id": 0, "d_model": 2048,
        "decoder_attention_heads": 16, "decoder_ffn_dim": 8192, "decoder_layerdrop": 0, "decoder_layers": 24,
        "decoder_sparse_step": 4, "decoder_start_token_id": 2, "dropout": 0.1, "encoder_attention_heads": 16,
        "encoder_ffn_dim": 8192, "encoder_layerdrop": 0, "encoder_layers": 24, "encoder_sparse_step": 4,
        "eos_token_id": 2, "expert_capacity": 64, "init_std": 0.02, "is_encoder_decoder": True,
        "max_position_embeddings": 1024, "model_type": "nllb-moe", "moe_eval_capacity_token_fraction": 1.0,
        "moe_token_dropout": 0.2, "normalize_router_prob_before_dropping": False, "num_experts": 128,
        "num_hidden_layers": 24, "output_router_logits": False, "pad_token_id": 1, "router_aux_loss_coef": 0.001,
        "router_bias": False, "router_dtype": "float32", "router_ignore_padding_tokens": False,
        "router_type": "tokens_masked", "router_z_loss_coef": 0.001, "scale_embedding": True,
        "second_expert_policy": "all", "torch_dtype": "float32", "transformers_version": "4.27.0.dev0",
        "use_cache": True, "vocab_size": 256206,
    },
    "switch-base-8": {
        "architectures": ["SwitchTransformersForConditionalGeneration"], "add_router_probs": False, "d_ff": 3072,
        "d_kv": 64, "d_model": 768, "decoder_sparse_step": 2, "decoder_start_token_id": 0, "dense_act_fn": "relu",
        "dropout_rate": 0.1, "encoder_sparse_step": 2, "eos_token_id": 1, "expert_capacity": 64,
        "feed_forward_proj": "relu", "initializer_factor": 1.0, "is_encoder_decoder": True, "is_gated_act": False,
        "layer_norm_epsilon": 1e-06, "model_type": "switch_transformers", "n_positions": 512, "num_decoder_layers": 12,
        "num_experts": 8, "num_heads": 12, "num_layers": 12, "num_sparse_decoder_layers": 6,
        "num_sparse_encoder_layers": 6, "output_past": True, "pad_token_id": 0,
        "relative_attention_max_distance": 128, "relative_attention_num_buckets": 32, "router_aux_loss_coef": 0.001,
        "router_bias": False, "router_dtype": "float32", "router_ignore_padding_tokens": False,
        "router_jitter_noise": 0.01, "router_type": "tokens_masked", "router_z_loss_coef": 0.001,
        "torch_dtype": "float32", "transformers_version": "4.25.0.dev0", "use_cache": True, "vocab_size": 32128,
    },
    "gte-qwen2-1.5b": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02,
        "intermediate_size": 8960, "is_causal": False, "max_position_embeddings": 131072, "max_window_layers": 21,
        "model_type": "qwen2", "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": False,
        "torch_dtype": "float32", "transformers_version": "4.41.2", "use_cache": True, "use_sliding_window": False,
        "vocab_size": 151646,
    },
    "llama-7b": {
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008, "max_sequence_length": 2048,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "pad_token_id": 0,
        "rms_norm_eps": 1e-06, "torch_dtype": "float16", "transformers_version": "4.28.0.dev0", "use_cache": True,
        "vocab_size": 32000,
    },
    "mistral-nemo": {
        "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "model_type": "mistral",
        "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 131072,
    },
    "deepseek-r1-distill-qwen": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02,
        "intermediate_size": 8960, "max_position_embeddings": 131072, "max_window_layers": 21, "model_type": "qwen2",
        "num_attention_heads": 12, "num_hidden_layers": 28, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 10000, "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.44.0", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "bert-base-multilingual": {
        "architectures": ["BertForMaskedLM"], "attention_probs_dropout_prob": 0.1, "directionality": "bidi",
        "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 768, "initializer_range": 0.02,
        "intermediate_size": 3072, "layer_norm_eps": 1e-12, "max_position_embeddings": 512, "model_type": "bert",
        "num_attention_heads": 12, "num_hidden_layers": 12, "pad_token_id": 0, "pooler_fc_size": 768,
        "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3, "pooler_size_per_head": 128,
        "pooler_type": "first_token_transform", "position_embedding_type": "absolute",
        "transformers_version": "4.6.0.dev0", "type_vocab_size": 2, "use_cache": True, "vocab_size": 119547,
    },
    "gpt2-medium": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 1024, "n_head": 16, "n_layer": 24,
        "n_positions": 1024, "n_special": 0, "predict_special_tokens": True, "resid_pdrop": 0.1,
        "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True,
        "summary_type": "cls_index", "summary_use_proj": True, "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "moonlight-16b-a3b": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
        "bos_token_id": 163584, "eos_token_id": 163585, "ep_size": 1, "first_k_dense_replace": 1,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 11264,
        "kv_lora_rank": 512, "max_position_embeddings": 8192, "model_type": "deepseek_v3",
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "pretraining_tp": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "scoring_func": "sigmoid",
        "seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "transformers_version": "4.48.3", "use_cache": True, "v_head_dim": 128,
        "vocab_size": 163840,
    },
}  # fmt: skip

REQUIRED: dict[str, dict[str, Any]] = {"deepseek_v2": {"num_experts_per_tok": 6}, "bert": {}, "megatron-bert": {}}
"""Keys that transformers' own default lacks but a model needs."""
ENABLING_SETTINGS: dict[tuple[str, str], dict[str, Any]] = {
    **{
        (family, key): {"use_sliding_window": key != "use_sliding_window", "sliding_window": 64}
        for family in ("qwen2", "qwen3", "qwen3_moe")
        for key in ("use_sliding_window", "sliding_window", "max_window_layers")
        if (family, key) != ("qwen3_moe", "max_window_layers")
    },
    **{
        ("deepseek_v2", key): {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 2}
        for key in ("n_group", "topk_group")
    },
}
"""Other settings without which a key has no effect, in transformers and here."""
WITHOUT_EFFECT = {
    "qwen2_moe": ("sliding_window", "max_window_layers"),  # a window is refused
    "deepseek_v2": ("seq_aux",),
    "deepseek_v3": ("num_nextn_predict_layers",),
    "t5": ("dropout_rate", "initializer_factor"),
    "nllb-moe": nllb.TRAINING,
    "switch_transformers": (
        "dropout_rate",
        "initializer_factor",
        "add_router_probs",
        "router_ignore_padding_tokens",
    ),
    "whisper": (
        "encoder_layerdrop",
        "decoder_layerdrop",
        "dropout",
        "activation_dropout",
        "use_weighted_layer_sum",
        "classifier_proj_size",
        "apply_spec_augment",
        "mask_time_prob",
        "mask_time_length",
        "mask_time_min_masks",
        "mask_feature_prob",
        "mask_feature_length",
        "mask_feature_min_masks",
        "median_filter_width",
    ),
}
"""Keys of one family that change no logits."""
OTHER_VALUES: dict[str, Any] = {
    "hidden_act": "relu", "activation_function": "relu", "topk_method": "group_limited_greedy", "is_causal": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}, "rope_scaling": {"type": "linear", "factor": 2.0},
    "n_inner": 99, "num_key_value_heads": 1, "num_experts_per_tok": 3, "clip_qkv": 0.5, "q_lora_rank": 96,
    "mlp_only_layers": [1], "pruned_heads": {"0": [1]}, "cross_attention_hidden_size": 8, "head_dim": 32,
}  # fmt: skip
"""Plausible values for keys where adding one or doubling gives none."""


def default_json(family: str) -> dict[str, Any]:
    """Contents of the config.json that transformers 5 writes for a family's default."""
    return json.loads(json.dumps(CONFIG_MAPPING[family]().to_dict())) | REQUIRED.get(family, {})


def as_transformers_4(family: str) -> dict[str, Any]:
    """The same config.json as transformers 4 wrote it."""
    raw = default_json(family)
    rope = raw.pop("rope_parameters", None)
    old = {} if rope is None else {"rope_theta": rope["rope_theta"], "rope_scaling": None}
    raw |= (
        {key: value for key, value in TRANSFORMERS_4_KEYS.items() if key not in raw}
        | old
        | TRANSFORMERS_4_FAMILY_KEYS.get(family, {})
    )
    if family == "qwen3_moe":
        raw["num_experts"] = raw.pop("num_local_experts")
    return raw


def through_transformers(family: str, raw: dict[str, Any]) -> ModelConfig:
    """The file as rewritten by transformers, read by Colonnade."""
    made = CONFIG_MAPPING[family](**{key: value for key, value in raw.items() if key != "model_type"}).to_dict()
    return config_from_hf(json.loads(json.dumps(made, default=str)))


@pytest.mark.parametrize("family", FAMILIES)
def test_default_configs_of_transformers_4_and_5_load(family: str) -> None:
    assert config_from_hf(as_transformers_4(family)) == config_from_hf(default_json(family))


@pytest.mark.parametrize("name", HUB)
def test_published_files_load(name: str) -> None:
    config = config_from_hf(HUB[name])
    family, raw = str(HUB[name]["model_type"]), {k: v for k, v in HUB[name].items() if k != "torch_dtype"}
    assert config == through_transformers(family, raw)
    assert config.causal == (config.family != "bert" and "is_causal" not in raw)


@pytest.mark.sample(7)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_changed_key_is_used_refused_or_harmless(family: str) -> None:
    silent = []
    for raw, key, value in changes(family):
        before = config_from_hf(raw)
        try:
            same = config_from_hf(raw | {key: value}) == before
        except CheckpointError:
            continue
        if same:
            silent.append(key)
    known = IGNORED_KEYS | set(WITHOUT_EFFECT.get(family, ()))
    assert [key for key in silent if key not in known and not key.startswith(IGNORED_PREFIXES)] == []


def changes(family: str) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """(file, key, other value) for each key of a family, in files where the key has an effect."""
    for file in (default_json(family), as_transformers_4(family)):
        for key in {**file, **UNSUPPORTED, "is_causal": "bert" not in family}:
            raw = {**file, **ENABLING_SETTINGS.get((family, key), {})}
            if (family, key) in ENABLING_SETTINGS:
                raw.pop("layer_types", None)  # it would contradict a changed window
            value = raw.get(key, UNSUPPORTED.get(key))
            yield raw, key, other_value(key, "bert" not in family if key == "is_causal" else value)


def other_value(key: str, value: Any) -> Any:
    """Another plausible value of a key."""
    if key in OTHER_VALUES and value != OTHER_VALUES[key]:
        return OTHER_VALUES[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 1
    if isinstance(value, list):
        return ["sliding_attention", *value[1:]]
    return {"a": 1} if isinstance(value, dict) else "another"


@pytest.mark.slow
def test_harmless_keys_change_no_transformers_logits() -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 20, "num_key_value_heads": 2}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 32, "n_embd": 16, "n_head": 2, "n_layer": 1}
    typed = {"id2label": {"0": "a"}, "label2id": {"a": 0}, "problem_type": "regression", "classifier_dropout": 0.5}
    typed |= {"chunk_size_feed_forward": 3, "pad_token_id": 3}
    harmless: set[str] = set()
    for family in ("gpt2", "llama", "bert", "olmoe"):
        raw = as_transformers_4(family) | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        raw |= {"num_experts": 4, "num_experts_per_tok": 2} if family == "olmoe" else {}
        raw = {key: value for key, value in raw.items() if key not in ("head_dim", "model_type", "torch_dtype")}
        raw |= {key: size for key, size in sizes.items() if key in raw}
        expected = logits(family, raw)
        for key in sorted(
            IGNORED_KEYS & raw.keys() - {"transformers_version", "architectures", "dtype", "return_dict"}
        ):
            if key == "is_decoder" and family == "bert":
                continue  # refused by Colonnade
            value = typed.get(key, other_value(key, raw[key]))
            assert torch.allclose(logits(family, raw | {key: value}), expected, atol=1e-6), key
            harmless.add(key)
    assert len(harmless) > 40


def logits(family: str, raw: dict[str, Any]) -> torch.Tensor:
    """Logits that transformers computes for a few tokens, with its own initial weights."""
    config = CONFIG_MAPPING[family](**raw)
    torch.manual_seed(0)
    made = transformers.AutoModelForMaskedLM if family == "bert" else transformers.AutoModelForCausalLM
    model = made.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
        out = model(input_ids=torch.arange(9)[None] % 5)
    return out.logits if hasattr(out, "logits") else out[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_absent_or_null_keys_mean_the_same_as_in_transformers(family: str) -> None:
    wider = {"num_attention_heads": 64, "n_head": 16}
    for file in (default_json(family), as_transformers_4(family)):
        for sizes in ({}, {key: value for key, value in wider.items() if key in file}):
            for key in file.keys() - {"model_type", "num_key_value_heads" if sizes and family == "deepseek_v3" else ""}:
                raw = file | sizes
                for changed in ({k: v for k, v in raw.items() if k != key}, raw | {key: None}):
                    try:
                        ours = config_from_hf({"model_type": family, **changed})
                        expected = through_transformers(family, changed)
                    except (CheckpointError, StrictDataclassError):
                        continue  # refused by Colonnade, or (a null) by transformers
                    assert ours == expected, (key, changed.get(key, "absent"))

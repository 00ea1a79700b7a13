"""Reading and writing config.json: published files match the presets; unsupported settings are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings

from colonnade.checkpoint.hf import FAMILIES, config_from_hf, config_to_hf
from colonnade.config import ModelConfig, MoeConfig, RopeScaling
from colonnade.config.presets import PRESETS, preset
from colonnade.errors import CheckpointError, ConfigError
from tests.hf_configs import configs

# As published on the Hub, with all their extra keys.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2": {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 50256, "embd_pdrop": 0.1, "eos_token_id": 50256, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
        "n_positions": 1024, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.02,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False,
        "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
        "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
        "transformers_version": "4.42.3", "use_cache": True, "vocab_size": 49152,
    },
    "llama-2-7b": {
        "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.31.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "llama-3.2-1b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "head_dim": 64, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072,
        "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 16,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "rope_theta": 500000.0, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0.dev0", "use_cache": True, "vocab_size": 128256,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 32768,
        "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "qwen2-0.5b": {
        "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
        "intermediate_size": 4864, "max_position_embeddings": 131072, "max_window_layers": 24, "model_type": "qwen2",
        "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False, "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "mixtral-8x7b": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
    },
    "qwen1.5-moe-a2.7b": {
        "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
        "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
        "model_type": "qwen2_moe", "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 151936, "decoder_sparse_step": 1, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4, "num_experts": 60,
        "norm_topk_prob": False, "output_router_logits": False, "router_aux_loss_coef": 0.001,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
        "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe",
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False,
        "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "olmoe-1b-7b": {
        "architectures": ["OlmoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "clip_qkv": None,
        "eos_token_id": 50279, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 1024, "max_position_embeddings": 4096, "model_type": "olmoe", "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16,
        "num_key_value_heads": 16, "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 50304,
    },
    "deepseek-v2-lite": {
        "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "aux_loss_alpha": 0.001,
        "bos_token_id": 100000, "eos_token_id": 100001, "first_k_dense_replace": 1, "hidden_act": "silu",
        "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 10944, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1408,
        "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "pretraining_tp": 1, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 102400,
    },
    # As in its bfloat16 conversions: without the original's quantization_config.
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
        "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
        "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
        "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
        "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
    },
}  # fmt: skip


OURS = ("tour-moe", "gpt2-switch-8", "gpt2-gshard-8")
"""Their balance loss or expert placement cannot be expressed in any family's config.json."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_equal_the_presets(name: str) -> None:
    assert config_from_hf(PUBLISHED[name]) == preset(name)


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in OURS])
def test_presets_round_trip_and_transformers_agrees(name: str, tmp_path: Path) -> None:
    raw = config_to_hf(preset(name))
    assert config_from_hf(raw) == preset(name)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    theirs = transformers.AutoConfig.from_pretrained(tmp_path).to_dict()
    read = config_from_hf(theirs)
    if FAMILIES[read.family].tied_by_values:  # transformers writes that any T5 is tied; reading the tensors tells
        read = read.replace(tied=preset(name).tied)
    assert read == preset(name), "transformers' own version of the file differs"


def test_small_moe_model_can_be_saved_in_hf_format() -> None:
    config = preset("tour-moe")
    assert config_from_hf(config_to_hf(config)).replace(moe=config.moe, ffn_width=config.ffn_width) == config


@pytest.mark.parametrize("name", ["gpt2-switch-8", "gpt2-gshard-8"])
def test_dense_families_refuse_to_write_experts(name: str) -> None:
    with pytest.raises(CheckpointError, match="'gpt2' files cannot represent a model with experts"):
        config_to_hf(preset(name))


def test_training_only_settings_are_not_written() -> None:
    config = preset("qwen3-30b-a3b")
    assert config.moe is not None
    trained = config.moe.replace(
        balance="gshard", balance_over="layer", z_weight=0.1, router=config.moe.router.replace(noise=1.0)
    )
    assert config_from_hf(config_to_hf(config.replace(moe=trained))) == config


@pytest.mark.parametrize(("balance", "coefficient"), [("choices", 0.4), ("switch", 0.05), ("none", 0.0)])
def test_global_balance_loss_is_written_as_transformers_does(balance: str, coefficient: float) -> None:
    config = preset("qwen3-30b-a3b")
    assert config.moe is not None and config.moe.active == 8
    raw = config_to_hf(config.replace(moe=config.moe.replace(balance=balance, balance_weight=0.4)))
    assert raw["router_aux_loss_coef"] == coefficient
    read = config_from_hf(raw).moe
    assert read is not None and (read.balance, read.balance_over) == ("choices", "model")
    assert read.balance_weight == coefficient


@settings(max_examples=200, deadline=None)
@given(configs())
def test_any_config_round_trips(config: ModelConfig) -> None:
    assert config_from_hf(json.loads(json.dumps(config_to_hf(config)))) == config


LLAMA = PUBLISHED["llama-2-7b"]


@pytest.mark.parametrize(
    ("changes", "field", "expected"),
    [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, "rope_theta", 7.0),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_theta": 7}}, "rope_theta", 7.0),
        ({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default"}}, "rope_theta", 7.0),
        ({"rope_theta": 7.0}, "rope_theta", 7.0),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling", RopeScaling(kind="linear", factor=2.0)),
        ({"num_key_value_heads": None}, "kv_heads", 32),
        ({"hidden_act": "gelu_pytorch_tanh"}, "activation", "gelu_tanh"),
        ({"attention_bias": True}, "out_bias", True),
        ({"mlp_bias": True}, "ffn_bias", True),
        ({"head_dim": 96}, "head_width", 96),
        ({"unsloth_version": "2025.1", "_attn_implementation": "sdpa", "sliding_window": None}, "family", "llama"),
        ({"is_causal": False}, "causal", False),
        ({"is_causal": True}, "causal", True),
    ],
)
def test_each_key_sets_its_field(changes: dict[str, Any], field: str, expected: Any) -> None:
    assert getattr(config_from_hf(LLAMA | changes), field) == expected


def test_qwen_yarn_settings_give_the_extended_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = config_from_hf(PUBLISHED["qwen2-0.5b"] | {"rope_scaling": scaling, "max_position_embeddings": 32768})
    assert config.context == 131072
    assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "llama-2-7b",
            {"model_type": "gemma"},
            r"of type 'gemma'; supported types are gpt2, llama, mistral, qwen2, qwen3",
        ),
        ("llama-2-7b", {"model_type": None}, "of type None"),
        ("llama-2-7b", {"model_type": ["llama"]}, "of type"),
        ("llama-2-7b", {"quantization_config": {"quant_method": "gptq"}}, "quantised weights"),
        ("llama-2-7b", {"hidden_size": None}, "lacks 'hidden_size'"),
        ("llama-2-7b", {"hidden_size": "4096"}, "sets 'hidden_size' to '4096': a positive whole number"),
        ("llama-2-7b", {"hidden_size": -1}, "a positive whole number"),
        ("llama-2-7b", {"num_hidden_layers": True}, "a positive whole number"),
        ("llama-2-7b", {"rms_norm_eps": "small"}, "a number was expected"),
        ("llama-2-7b", {"rms_norm_eps": 0}, "ModelConfig.norm_eps is 0"),
        ("llama-2-7b", {"tie_word_embeddings": "yes"}, "true or false was expected"),
        ("llama-2-7b", {"num_key_value_heads": 5}, "32 query heads are not divisible by 5"),
        ("llama-2-7b", {"head_dim": 7}, "head_width 7 must be even"),
        ("llama-2-7b", {"hidden_act": "quick_gelu"}, "'quick_gelu': known activations are silu"),
        ("llama-2-7b", {"hidden_act": {"x": 1}}, "known activations are"),
        ("llama-2-7b", {"residual_multiplier": 0.22}, "sets 'residual_multiplier' to 0.22: Colonnade does not support"),
        ("llama-2-7b", {"surprise": False}, "sets 'surprise' to False: Colonnade does not support this key"),
        ("llama-2-7b", {"surprise": None}, "sets 'surprise' to None: Colonnade does not support this key"),
        ("llama-2-7b", {"_remove_final_norm": True}, "does not support this key"),
        ("llama-2-7b", {"is_causal": None}, "sets 'is_causal' to None: null has no meaning here"),
        ("llama-2-7b", {"rms_norm_eps": None}, "null has no meaning here; set a value, or remove the key"),
        ("llama-2-7b", {"sliding_window": 4096}, "not implemented for this family"),
        ("llama-2-7b", {"pruned_heads": {"1": [0]}}, "not implemented for this family"),
        ("llama-2-7b", {"quantization_config": {}}, "quantised weights"),
        ("llama-2-7b", {"auto_map": {"AutoModel": "modeling.Mine"}}, "its own code, which is not run"),
        ("mistral-7b", {"is_causal": False}, "causal = False and window = 4096 cannot be combined"),
        ("llama-2-7b", {"partial_rotary_factor": 0.5}, "only rotation of the whole head"),
        ("llama-2-7b", {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "only rotation"),
        (
            "llama-2-7b",
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "use rope_type 'yarn'",
        ),
        (
            "llama-2-7b",
            {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 9.0}},
            "contradicts itself: 'rope_theta' gives 7.0 and 'rope_parameters.rope_theta' gives 9.0",
        ),
        (
            "llama-2-7b",
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
            "contradicts itself: 'rope_scaling' gives .* and 'rope_parameters' gives",
        ),
        (
            "llama-2-7b",
            {"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 2.0}},
            "'type' and 'rope",
        ),
        ("llama-2-7b", {"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "'factor' of kind 'default' is not"),
        ("llama-2-7b", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "truncate": None}}, "'truncate' is null"),
        ("llama-2-7b", {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 0}}, "beta_fast is 0"),
        (
            "llama-2-7b",
            {
                "original_max_position_embeddings": 64,
                "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32},
            },
            "contradicts itself: 'rope_scaling.original_max_position_embeddings' gives 32",
        ),
        ("llama-2-7b", {"rope_scaling": {"rope_type": "longrope"}}, "switches frequencies.*use a checkpoint"),
        ("llama-2-7b", {"rope_scaling": {"type": "su"}}, "switches frequencies"),
        ("llama-2-7b", {"rope_scaling": {"rope_type": "mrope"}}, "supported kinds: default, linear, llama3, yarn"),
        ("llama-2-7b", {"rope_scaling": {"type": "linear"}}, "needs 'factor'"),
        ("llama-2-7b", {"rope_scaling": {"type": "linear", "factor": -1.0}}, "RopeScaling.factor is -1.0"),
        ("llama-2-7b", {"rope_scaling": {"type": "linear", "factor": 2.0, "short_factor": [1]}}, "'short_factor'"),
        ("llama-2-7b", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs 'high_freq_factor'"),
        ("llama-2-7b", {"rope_scaling": {"type": ["linear"]}}, "supported kinds"),
        ("llama-2-7b", {"rope_scaling": [1]}, "one set of RoPE settings"),
        ("llama-2-7b", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "one set of RoPE settings"),
        ("llama-2-7b", {"rope_theta": 0}, "ModelConfig.rope_theta is 0"),
        ("llama-2-7b", {"rope_theta": "10000"}, "a number was expected"),
        ("mistral-7b", {"sliding_window": 0}, "a positive whole number"),
        ("mistral-7b", {"layer_types": ["full_attention"] * 32}, "implies 'sliding_attention' in every layer"),
        (
            "qwen2-0.5b",
            {"use_sliding_window": True, "layer_types": ["sliding_attention", *["full_attention"] * 23]},
            "first",
        ),
        ("qwen2-0.5b", {"layer_types": ["sliding_attention"] * 24}, "'use_sliding_window' is false"),
        ("qwen2-0.5b", {"layer_types": ["full_attention"] * 23}, "24 in all"),
        ("qwen2-0.5b", {"layer_types": ["chunked_attention"] * 24}, "24 in all"),
        (
            "qwen2-0.5b",
            {"use_sliding_window": True, "max_window_layers": 3, "layer_types": ["sliding_attention"] * 24},
            "sets 'layer_types'.*'max_window_layers' starts the window at layer 3",
        ),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "divided by the layer's number"),
        ("gpt2", {"scale_attn_weights": False}, "factor 1/√H"),
        ("gpt2", {"add_cross_attention": True}, "only decoder"),
        ("gpt2", {"n_head": 7}, "width 768 is not divisible by 7 heads"),
        ("mixtral-8x7b", {"num_experts_per_tok": 9}, "cannot go to 9 of 8 experts"),
        ("qwen1.5-moe-a2.7b", {"use_sliding_window": True}, "only full attention"),
        ("qwen3-30b-a3b", {"mlp_only_layers": 3}, "a list of layer numbers was expected"),
        ("qwen3-30b-a3b", {"num_local_experts": 64}, r"sets 'num_local_experts' to 64: 'num_experts' \(128\) requires"),
        ("olmoe-1b-7b", {"clip_qkv": "wide"}, "a number was expected"),
        ("olmoe-1b-7b", {"head_dim": 64}, "as wide as the model"),
        ("deepseek-v2-lite", {"moe_layer_freq": 2}, "experts in every layer"),
        ("deepseek-v2-lite", {"norm_topk_prob": True}, "does not divide weights"),
        ("deepseek-v2-lite", {"topk_method": "random"}, "known methods are greedy"),
        ("deepseek-v2-lite", {"num_key_value_heads": 4}, "needs its own key and value head"),
        ("deepseek-v3", {"rope_interleave": False}, "only adjacent RoPE pairs"),
        ("deepseek-v3", {"rope_interleave": None}, "sets 'rope_interleave' to None: only adjacent RoPE pairs"),
        ("deepseek-v3", {"norm_topk_prob": None}, "sets 'norm_topk_prob' to None: null has no meaning here"),
        ("deepseek-v3", {"head_dim": 192}, r"sets 'head_dim' to 192: 'qk_rope_head_dim' \(64\) requires 64"),
        ("deepseek-v3", {"qk_head_dim": 64}, "'qk_nope_head_dim' and 'qk_rope_head_dim' add up to 192"),
        ("deepseek-v2-lite", {"topk_method": "group_limited_greedy", "n_group": None}, "needs a number"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scores by sigmoid"),
        ("deepseek-v3", {"quantization_config": {"quant_method": "fp8"}}, "quantised weights"),
    ],
)
def test_unsupported_settings_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        config_from_hf(PUBLISHED[name] | changes, "folder/config.json")
    assert str(caught.value).startswith("folder/config.json") and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama-2-7b", {"window": 7}, r"'llama' files cannot represent window = 7 \(it would be read back as None\)"),
        ("llama-2-7b", {"qk_norm": True}, "cannot represent qk_norm"),
        ("llama-2-7b", {"qkv_bias": True}, "cannot represent out_bias"),
        ("llama-2-7b", {"norm": "layernorm"}, "cannot represent norm"),
        ("mistral-7b", {"window_from_layer": 3}, "cannot represent window_from_layer"),
        ("qwen2-0.5b", {"qkv_bias": False}, "cannot represent qkv_bias"),
        ("qwen2-0.5b", {"ffn_bias": True}, "cannot represent ffn_bias"),
        ("gpt2", {"kv_heads": 4}, "cannot represent kv_heads"),
        ("gpt2", {"gated": True}, "cannot represent gated"),
        (
            "llama-2-7b",
            {"family": "llama", "moe": preset("mixtral-8x7b").moe},
            "cannot represent a model with experts; write --format colonnade, or train",
        ),
        (
            "mixtral-8x7b",
            {"moe": None, "family": "mixtral"},
            "cannot represent a model with no experts; write --format colonnade, or train",
        ),
        ("mixtral-8x7b", {"moe": preset("qwen1.5-moe-a2.7b").moe}, r"cannot represent moe\.shared_width = 5632"),
        (
            "mixtral-8x7b",
            {"moe": MoeConfig(experts=8, ffn_width=14336, layer_freq=2)},
            "cannot represent layers with experts",
        ),
        ("mixtral-8x7b", {"moe": MoeConfig(experts=8, ffn_width=9, capacity=1.0)}, r"cannot represent moe\.capacity"),
        ("olmoe-1b-7b", {"qk_norm_over": "head"}, "cannot represent qk_norm_over"),
        (
            "qwen3-30b-a3b",
            {"moe": MoeConfig(experts=8, ffn_width=9, bias_rate=0.1)},
            r"cannot represent moe\.bias_rate",
        ),
        ("deepseek-v3", {"moe": MoeConfig(experts=8, ffn_width=9)}, "sets 'n_shared_experts' to 0"),
    ],
)
def test_settings_a_family_lacks_are_not_written(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        config_to_hf(preset(name).replace(**changes))


def test_invalid_model_settings_stay_config_errors() -> None:
    with pytest.raises(ConfigError):
        preset("gpt2").replace(heads=7)

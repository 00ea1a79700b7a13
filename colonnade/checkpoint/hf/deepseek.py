"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): multi-head latent attention (MLA), and shared experts.

    deepseek_v2   softmax scores; a token may be limited to the experts of a few groups (by each group's best expert)
    deepseek_v3   sigmoid scores, chosen with a load-balancing bias (by the sum of each group's two best) and divided by
                  their sum

Their RoPE pairs are adjacent, (0, 1), (2, 3), …; ours are half a width apart, so those rows of the projections are
permuted. V3's module for multi-token prediction (``num_nextn_predict_layers``, layer 61 of its files) is not loaded: no
logit depends on it.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from colonnade.checkpoint.hf.experts import (
    ROUTER_WEIGHT,
    moe_from_hf,
    per_expert_table,
    shared_experts_table,
    stacked_table,
)
from colonnade.checkpoint.hf.family import ConfigKeys, Family
from colonnade.checkpoint.hf.llama import BUFFERS, LLAMA_TABLE, common_from_hf, common_to_hf
from colonnade.checkpoint.weight_mapping import Box, MappingTable, ParamMapping, TensorSource, weight_and_bias
from colonnade.config import LatentConfig, ModelConfig
from colonnade.config.model import Family as Kind


class InterleavedRope(ParamMapping):
    """Rows in groups (heads, or one group of all) that end in RoPE pairs, which are adjacent in the files' order."""

    def __init__(self, name: str, group: Literal["head", "compressed"]):
        super().__init__(name)
        self.group = group

    def read(self, source: TensorSource, box: Box, config: ModelConfig) -> Tensor:
        """Reads the groups that the box touches, with the RoPE rows in our order."""
        (start, stop), size = box[0], self._group_rows(config)
        first, last = start // size, -(-stop // size)
        rows = source.read(self.names[0], ((first * size, last * size), *box[1:]))
        ours = self._transpose_pairs(rows, config, (_latent(config).rope_width // 2, 2))
        return ours[start - first * size : stop - first * size]

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """Converts to one tensor with adjacent pairs."""
        return {self.names[0]: self._transpose_pairs(parameter, config, (2, _latent(config).rope_width // 2))}

    def _transpose_pairs(self, rows: Tensor, config: ModelConfig, shape: tuple[int, int]) -> Tensor:
        """Views the RoPE rows of each group as ``shape`` and transposes them."""
        size, rope_width = self._group_rows(config), _latent(config).rope_width
        plain, rope = rows.unflatten(0, (-1, size)).split([size - rope_width, rope_width], 1)
        return torch.cat((plain, rope.unflatten(1, shape).transpose(1, 2).flatten(1, 2)), 1).flatten(0, 1)

    def _group_rows(self, config: ModelConfig) -> int:
        return config.head_width if self.group == "head" else _latent(config).kv_rank + _latent(config).rope_width


def _latent(config: ModelConfig) -> LatentConfig:
    assert config.latent is not None, "DeepSeek's attention is latent"
    return config.latent


_ATTENTION, _MLP = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
_OURS = "blocks.{i}.attention."
TABLE: MappingTable = {
    **{name: mapping for name, mapping in LLAMA_TABLE.items() if ".qkv." not in name},
    f"{_OURS}q.weight": InterleavedRope(f"{_ATTENTION}q_proj.weight", "head"),
    **weight_and_bias(f"{_OURS}q_down", f"{_ATTENTION}q_a_proj"),
    f"{_OURS}q_norm.weight": ParamMapping(f"{_ATTENTION}q_a_layernorm.weight"),
    f"{_OURS}q_up.weight": InterleavedRope(f"{_ATTENTION}q_b_proj.weight", "head"),
    f"{_OURS}kv_down.weight": InterleavedRope(f"{_ATTENTION}kv_a_proj_with_mqa.weight", "compressed"),
    f"{_OURS}kv_down.bias": InterleavedRope(f"{_ATTENTION}kv_a_proj_with_mqa.bias", "compressed"),
    f"{_OURS}kv_norm.weight": ParamMapping(f"{_ATTENTION}kv_a_layernorm.weight"),
    f"{_OURS}kv_up.weight": ParamMapping(f"{_ATTENTION}kv_b_proj.weight"),
    ROUTER_WEIGHT: ParamMapping(f"{_MLP}gate.weight"),
    "blocks.{i}.ffn.router.bias_E": ParamMapping(f"{_MLP}gate.e_score_correction_bias"),
    **per_expert_table(f"{_MLP}experts"),
    **shared_experts_table(f"{_MLP}shared_experts"),
}
STACKED = stacked_table(f"{_MLP}experts")
_IGNORED_KEYS = ("auto_map", "ep_size", "seq_aux", "num_nextn_predict_layers", "num_mtp_layers")
"""The authors' own code (transformers' classes compute the same), their expert parallelism, how their balance loss
counts, and V3's multi-token prediction under both its names."""
V3_BIAS_RATE = 0.001
"""For the first 14.3 of its 14.8 trillion tokens (section 4.2); it is not in config.json."""


def _fields(keys: ConfigKeys, **defaults: Any) -> dict[str, Any]:
    """Reads the fields that both share, without experts; ``defaults`` are those of :func:`common_from_hf`."""
    keys.ignore(_IGNORED_KEYS)
    latent = LatentConfig(
        kv_rank=keys.size("kv_lora_rank", 512),
        q_rank=keys.size("q_lora_rank", 1536, null=None) or 0,
        rope_width=keys.size("qk_rope_head_dim", 64),
        v_width=keys.size("v_head_dim", 128),
    )
    head_width = keys.size("qk_nope_head_dim", 128) + latent.rope_width
    # transformers uses 'head_dim' for the width of the RoPE part.
    keys.must_agree("head_dim", "qk_rope_head_dim", latent.rope_width)
    if keys.take("qk_head_dim", head_width) != head_width:
        why = f"'qk_nope_head_dim' and 'qk_rope_head_dim' add up to {head_width}; make them agree"
        raise keys.refuse("qk_head_dim", why)
    fields = common_from_hf(keys, **defaults)
    if fields["kv_heads"] != fields["heads"]:
        raise keys.refuse(
            "num_key_value_heads",
            f"each of the {fields['heads']} query heads ('num_attention_heads') needs its own key and value head",
        )
    keys.must_be("rope_interleave", True, "only adjacent RoPE pairs are implemented, as in the authors' files")
    keys.must_be("moe_layer_freq", 1, "only experts in every layer from the first MoE layer on are implemented")
    bias = keys.flag("attention_bias", False)
    fields |= {"head_width": head_width, "qkv_bias": bias, "out_bias": bias}
    return fields | {"latent": latent}


def _moe(keys: ConfigKeys, experts: int, shared: int, width: int, first: int, **fields: Any) -> Any:
    width = keys.size("moe_intermediate_size", width)
    return moe_from_hf(
        keys,
        keys.size("n_routed_experts", experts),
        width,
        shared_width=width * keys.size("n_shared_experts", shared),
        first_k_dense_replace=keys.size("first_k_dense_replace", first, minimum=0),
        **fields,
    )


def _v2_from_hf(keys: ConfigKeys) -> ModelConfig:
    fields = _fields(keys, context=2048)
    keys.must_be("scoring_func", "softmax", "this family scores by softmax")
    keys.must_be("norm_topk_prob", False, "this family does not divide weights by their sum")
    method = keys.take("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise keys.refuse("topk_method", "known methods are greedy and group_limited_greedy")
    groups, groups_kept = keys.size("n_group", None), keys.size("topk_group", None)
    router: dict[str, Any] = {"scale": keys.number("routed_scaling_factor", 1.0)}
    if method != "greedy":
        for name, number in (("n_group", groups), ("topk_group", groups_kept)):
            if number is None:
                raise keys.refuse(name, f"'topk_method' ({method}) needs a number")
        router |= {"groups": groups, "groups_kept": groups_kept, "group_score": "max"}
    # V2's balance loss is Switch's (section 2.1.3, equation 23).
    moe = _moe(keys, 64, 2, 1407, 0, normalise=False, router=router, balance="switch", balance_key="aux_loss_alpha")
    if keys.flag("mlp_bias", False):
        raise keys.refuse("mlp_bias", "only experts and dense layers without biases are implemented for this family")
    return ModelConfig(family="deepseek_v2", **fields, moe=moe)


def _v3_from_hf(keys: ConfigKeys) -> ModelConfig:
    fields = _fields(keys, context=4096, kv_heads=128)
    keys.must_be("scoring_func", "sigmoid", "this family scores by sigmoid")
    keys.must_be("topk_method", "noaux_tc", "this family chooses with a bias that balances the load")
    router = {
        "kind": "sigmoid",
        "groups": keys.size("n_group", 8),
        "groups_kept": keys.size("topk_group", 4),
        "group_score": "top2",
        "scale": keys.number("routed_scaling_factor", 2.5),
    }
    balance = {"bias_rate": V3_BIAS_RATE, "balance": "none", "balance_key": "aux_loss_alpha"}
    moe = _moe(keys, 256, 1, 2048, 3, normalise=keys.flag("norm_topk_prob", True), router=router, **balance)
    return ModelConfig(family="deepseek_v3", **fields, moe=moe)


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    latent, moe = config.latent, config.moe
    raw = common_to_hf(config) | {"attention_bias": config.qkv_bias}
    del raw["head_dim"]
    if latent is not None:
        raw |= {
            "kv_lora_rank": latent.kv_rank,
            "q_lora_rank": latent.q_rank or None,
            "qk_rope_head_dim": latent.rope_width,
            "qk_nope_head_dim": config.head_width - latent.rope_width,
            "v_head_dim": latent.v_width,
        }
    if moe is not None:
        raw |= {
            "n_routed_experts": moe.experts,
            "num_experts_per_tok": moe.active,
            "moe_intermediate_size": moe.ffn_width,
            "n_shared_experts": moe.shared_width // moe.ffn_width,
            "first_k_dense_replace": moe.first_k_dense_replace,
            "routed_scaling_factor": moe.router.scale,
            "norm_topk_prob": moe.normalises_weights,
        }
    return raw


def _v2_to_hf(config: ModelConfig) -> dict[str, Any]:
    router = config.moe.router if config.moe else None
    limited = router is not None and router.groups > 1
    groups = {"n_group": router.groups, "topk_group": router.groups_kept} if router is not None and limited else {}
    method = "group_limited_greedy" if limited else "greedy"
    return _to_hf(config) | {"scoring_func": "softmax", "topk_method": method} | groups


def _v3_to_hf(config: ModelConfig) -> dict[str, Any]:
    router = config.moe.router if config.moe else None
    groups = {"n_group": router.groups, "topk_group": router.groups_kept} if router else {}
    scoring = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    return _to_hf(config) | scoring | groups


def _family(kind: Kind, architecture: str, from_hf: Any, to_hf: Any) -> Family:
    # Layer 61 is V3's multi-token prediction; none of these models has more than 61 layers.
    buffers = rf"{BUFFERS}|model\.layers\.61\..*"
    return Family(kind, architecture, "model.", TABLE, from_hf, to_hf, buffers, stacked_table=STACKED)


V2 = _family("deepseek_v2", "DeepseekV2ForCausalLM", _v2_from_hf, _v2_to_hf)
V3 = _family("deepseek_v3", "DeepseekV3ForCausalLM", _v3_from_hf, _v3_to_hf)

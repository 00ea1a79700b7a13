"""DeepSeek-V2 and V3 (arXiv 2405.04434, 2412.19437): latent attention; shared experts beside the routed ones.

    deepseek_v2   softmax scores, of which a token may use those of a few groups of experts (best expert of each)
    deepseek_v3   sigmoid scores, chosen with a bias that balances the load (sum of a group's two best), divided by
                  their sum

Their rotary pairs lie side by side, (0, 1), (2, 3), …; ours are half a width apart, so those rows of the projections
change places on their way. V3's module that predicts a second token ahead (``num_nextn_predict_layers``, layer 61 of
its files) is left out: no logit depends on it.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from colonnade.checkpoint.hf.experts import GATE, moe_from_hf, per_expert, shared, stacked
from colonnade.checkpoint.hf.family import Family, Keys
from colonnade.checkpoint.hf.llama import BUFFERS, common_from_hf, common_to_hf
from colonnade.checkpoint.hf.llama import LLAMA_TABLE as LLAMA
from colonnade.checkpoint.weight_mapping import Box, Source, Stored, Table
from colonnade.config import LatentConfig, ModelConfig
from colonnade.config.model import Family as Kind


class RotaryTail(Stored):
    """Rows in groups (heads, or all of one) that end in rotary pairs, there side by side, here half a width apart."""

    def __init__(self, name: str, group: Literal["head", "compressed"]):
        super().__init__(name)
        self.group = group

    def read(self, source: Source, box: Box, config: ModelConfig) -> Tensor:
        """The groups that the box touches, their last rows in our order."""
        (start, stop), size = box[0], self._size(config)
        first, last = start // size, -(-stop // size)
        rows = source.read(self.names[0], ((first * size, last * size), *box[1:]))
        rope = _latent(config).rope_width
        ours = self._paired(rows, config, (rope // 2, 2))
        return ours[start - first * size : stop - first * size]

    def write(self, parameter: Tensor, config: ModelConfig) -> dict[str, Tensor]:
        """One tensor, its pairs side by side."""
        return {self.names[0]: self._paired(parameter, config, (2, _latent(config).rope_width // 2))}

    def _paired(self, rows: Tensor, config: ModelConfig, pairs: tuple[int, int]) -> Tensor:
        """The rows with the rotary ones of each group, laid as ``pairs``, in the other order."""
        size = self._size(config)
        plain, rotary = rows.unflatten(0, (-1, size)).split([size - _latent(config).rope_width, pairs[0] * pairs[1]], 1)
        return torch.cat((plain, rotary.unflatten(1, pairs).transpose(1, 2).flatten(1, 2)), 1).flatten(0, 1)

    def _size(self, config: ModelConfig) -> int:
        return config.head_width if self.group == "head" else _latent(config).kv_rank + _latent(config).rope_width


def _latent(config: ModelConfig) -> LatentConfig:
    assert config.latent is not None, "DeepSeek's attention is latent"
    return config.latent


_ATTENTION, _MLP = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
_OURS = "blocks.{i}.attention."
TABLE: Table = {
    **{name: form for name, form in LLAMA.items() if ".qkv." not in name},
    f"{_OURS}q.weight": RotaryTail(f"{_ATTENTION}q_proj.weight", "head"),
    f"{_OURS}q_down.weight": Stored(f"{_ATTENTION}q_a_proj.weight"),
    f"{_OURS}q_down.bias": Stored(f"{_ATTENTION}q_a_proj.bias"),
    f"{_OURS}q_norm.weight": Stored(f"{_ATTENTION}q_a_layernorm.weight"),
    f"{_OURS}q_up.weight": RotaryTail(f"{_ATTENTION}q_b_proj.weight", "head"),
    f"{_OURS}kv_down.weight": RotaryTail(f"{_ATTENTION}kv_a_proj_with_mqa.weight", "compressed"),
    f"{_OURS}kv_down.bias": RotaryTail(f"{_ATTENTION}kv_a_proj_with_mqa.bias", "compressed"),
    f"{_OURS}kv_norm.weight": Stored(f"{_ATTENTION}kv_a_layernorm.weight"),
    f"{_OURS}kv_up.weight": Stored(f"{_ATTENTION}kv_b_proj.weight"),
    GATE: Stored(f"{_MLP}gate.weight"),
    "blocks.{i}.ffn.router.bias_E": Stored(f"{_MLP}gate.e_score_correction_bias"),
    **per_expert(f"{_MLP}experts"),
    **shared(f"{_MLP}shared_experts"),
}
MODULES: Table = stacked(f"{_MLP}experts")
NO_EFFECT = ("auto_map", "ep_size", "seq_aux", "num_nextn_predict_layers", "num_mtp_layers")
"""The authors' own code (transformers' classes compute the same), their expert parallelism, how their balance loss
counts, and V3's second token ahead under both its names."""
BIAS_RATE = 0.001
"""V3's, for the first 14.3 of its 14.8 trillion tokens (section 4.2); a file does not say it."""


def _fields(keys: Keys, **defaults: Any) -> dict[str, Any]:
    """What both have in common, experts excepted; ``defaults`` are those of :func:`common_from_hf`."""
    for name in NO_EFFECT:
        keys.take(name)
    latent = LatentConfig(
        kv_rank=keys.size("kv_lora_rank", 512),
        q_rank=keys.size("q_lora_rank", 1536, null=None) or 0,
        rope_width=keys.size("qk_rope_head_dim", 64),
        v_width=keys.size("v_head_dim", 128),
    )
    head_width = keys.size("qk_nope_head_dim", 128) + latent.rope_width
    # transformers takes 'head_dim' for the width of the rotary part.
    keys.must_agree("head_dim", "qk_rope_head_dim", latent.rope_width)
    if keys.take("qk_head_dim", head_width) != head_width:
        why = f"'qk_nope_head_dim' and 'qk_rope_head_dim' add up to {head_width}; make them agree"
        raise keys.refuse("qk_head_dim", why)
    fields = common_from_hf(keys, **defaults)
    if fields["kv_heads"] != fields["heads"]:
        raise keys.refuse(
            "num_key_value_heads",
            f"each of the {fields['heads']} query heads ('num_attention_heads') has a key and a value head of its own",
        )
    keys.must_be("rope_interleave", True, "only rotary pairs side by side are implemented, as the authors' files have")
    keys.must_be("moe_layer_freq", 1, "only experts in every layer from the first one on are implemented")
    bias = keys.flag("attention_bias", False)
    fields |= {"head_width": head_width, "qkv_bias": bias, "out_bias": bias}
    return fields | {"latent": latent}


def _moe(keys: Keys, experts: int, shared: int, width: int, first: int, **fields: Any) -> Any:
    width = keys.size("moe_intermediate_size", width)
    return moe_from_hf(
        keys,
        keys.size("n_routed_experts", experts),
        width,
        shared_width=width * keys.size("n_shared_experts", shared),
        first=keys.size("first_k_dense_replace", first, least=0),
        **fields,
    )


def _v2_from_hf(keys: Keys) -> ModelConfig:
    fields = _fields(keys, context=2048)
    keys.must_be("scoring_func", "softmax", "this family scores by softmax")
    keys.must_be("norm_topk_prob", False, "this family does not divide weights by their sum")
    method = keys.take("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise keys.refuse("topk_method", "known methods are greedy and group_limited_greedy")
    groups, kept = keys.size("n_group", None), keys.size("topk_group", None)
    limited = {}
    if method != "greedy":
        for name, number in (("n_group", groups), ("topk_group", kept)):
            if number is None:
                raise keys.refuse(name, f"'topk_method' ({method}) needs a number")
        limited = {"groups": groups, "groups_kept": kept, "group_score": "max"}
    router = {"scale": keys.number("routed_scaling_factor", 1.0)} | limited
    # Its balance loss is Switch's (section 2.1.3, equation 23).
    moe = _moe(keys, 64, 2, 1407, 0, normalise=False, router=router, balance="switch", weight="aux_loss_alpha")
    if keys.flag("mlp_bias", False):
        raise keys.refuse("mlp_bias", "only experts and dense layers without biases are implemented for this family")
    return ModelConfig(family="deepseek_v2", **fields, moe=moe)


def _v3_from_hf(keys: Keys) -> ModelConfig:
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
    balance = {"bias_rate": BIAS_RATE, "balance": "none", "weight": "aux_loss_alpha"}
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
            "first_k_dense_replace": moe.first,
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
    says = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
    return _to_hf(config) | says | groups


def _family(kind: Kind, architecture: str, from_hf: Any, to_hf: Any) -> Family:
    # V3's second token ahead; none of these models has more than 61 layers.
    buffers = rf"{BUFFERS}|model\.layers\.61\..*"
    return Family(kind, architecture, "model.", TABLE, from_hf, to_hf, buffers, experts=True, modules=MODULES)


V2 = _family("deepseek_v2", "DeepseekV2ForCausalLM", _v2_from_hf, _v2_to_hf)
V3 = _family("deepseek_v3", "DeepseekV3ForCausalLM", _v3_from_hf, _v3_to_hf)

"""Switch Transformers (arXiv 2101.03961): T5 1.0 with a mixture of experts in some blocks of each stack.

    experts in block i with i mod step = 1, step = blocks // sparse blocks of the stack (step 1: in all)
    one expert per token, the most probable, weighted by its probability in float32
    an expert takes ``expert_capacity`` tokens of a sequence, first come; the others get 0

The capacity is per sequence, whatever else is in the batch. A decoder that runs one token at a time drops none.
transformers pools the router's losses over all layers; ours are sums over the layers.
"""

from typing import Any

from colonnade.checkpoint.hf.experts import PerExpert
from colonnade.checkpoint.hf.family import ConfigKeys, Family, activation_from_hf, activation_to_hf
from colonnade.checkpoint.hf.t5 import COMMON_TABLE, DUPLICATES, OLD_BUFFERS, STACKS, common_from_hf, common_to_hf
from colonnade.checkpoint.weight_mapping import MappingTable, ParamMapping
from colonnade.config import ModelConfig, MoeConfig, RouterConfig
from colonnade.errors import CheckpointError


def _feed_forward(ours: str, theirs: str) -> MappingTable:
    """Mappings of a dense part and of a mixture of experts; a block has one of them."""
    mlp = f"{theirs}mlp."
    return {
        f"{ours}.ffn.up.weight": ParamMapping(f"{mlp}wi.weight"),
        f"{ours}.ffn.down.weight": ParamMapping(f"{mlp}wo.weight"),
        f"{ours}.ffn.router.gates.0.weight": ParamMapping(f"{mlp}router.classifier.weight"),
        f"{ours}.ffn.experts.up": PerExpert(f"{mlp}experts.expert_{{e}}.wi.weight"),
        f"{ours}.ffn.experts.down": PerExpert(f"{mlp}experts.expert_{{e}}.wo.weight", transposed=True),
    }


TABLE: MappingTable = {
    **COMMON_TABLE, **{k: v for ours, theirs in STACKS.items() for k, v in _feed_forward(ours, theirs).items()}
}  # fmt: skip


def _step(keys: ConfigKeys, stack: str, layers: int) -> int:
    """The interval between blocks with experts in a stack."""
    sparse = keys.size(f"num_sparse_{stack}_layers", 3, minimum=0)
    if sparse > layers:
        raise keys.refuse(f"num_sparse_{stack}_layers", f"the stack has {layers} blocks")
    step = layers // sparse if sparse else layers
    keys.must_agree(f"{stack}_sparse_step", f"num_sparse_{stack}_layers", step)
    return step


def _from_hf(keys: ConfigKeys) -> ModelConfig:
    fields = common_from_hf(keys)
    keys.must_be("router_bias", False, "a router bias is not implemented for this family")
    keys.must_be("router_type", "tokens_masked", "this routing is not implemented")
    keys.must_be("feed_forward_proj", "relu", "published models have relu")
    keys.must_be("is_gated_act", False, "gated experts are not implemented for this family")
    for name in ("router_ignore_padding_tokens", "add_router_probs"):  # there is no padding; what a call returns
        keys.take(name)
    keys.must_be("router_dtype", "float32", "the router computes in float32")
    activation = activation_from_hf(keys, "dense_act_fn", "relu")
    layers, encoder = fields["layers"], fields["encoder"]
    steps = {stack: _step(keys, stack, n) for stack, n in (("encoder", encoder.layers), ("decoder", layers))}
    moe = MoeConfig(
        experts=keys.size("num_experts", 8),
        active=1,
        ffn_width=fields["ffn_width"],
        first_k_dense_replace=min(1, steps["decoder"] - 1),
        layer_freq=steps["decoder"],
        capacity_tokens=keys.size("expert_capacity", 64),
        capacity_over="sequence",
        router=RouterConfig(kind="switch", jitter=keys.number("router_jitter_noise", 0.01)),
        balance_weight=keys.number("router_aux_loss_coef", 0.001),
        z_weight=keys.number("router_z_loss_coef", 0.001),
    )
    step = steps["encoder"]
    tied = keys.flag("tie_word_embeddings", True)
    return ModelConfig(
        family="switch_transformers",
        **fields | {"encoder": encoder.replace(first_k_dense_replace=min(1, step - 1), layer_freq=step)},
        activation=activation,
        gated=False,
        scale_decoder_outputs=tied,
        tied=tied,
        moe=moe,
    )


def _sparse(with_experts: list[int], layers: int) -> int:
    """The number of sparse blocks from which transformers derives the blocks ``with_experts``."""
    for sparse in range(layers + 1):
        step = layers // sparse if sparse else layers
        if with_experts == [i for i in range(layers) if step == 1 or i % step == 1]:
            return sparse
    raise CheckpointError(
        f"'switch_transformers' files cannot represent experts in blocks {with_experts} of {layers}; write --format "
        "colonnade, or train with experts in every n-th block from block 1 on"
    )


def _to_hf(config: ModelConfig) -> dict[str, Any]:
    moe, encoder = config.moe, config.encoder
    assert moe is not None, "Switch Transformers have experts"
    assert encoder is not None, "Switch Transformers have an encoder"
    return common_to_hf(config) | {
        "num_sparse_encoder_layers": _sparse(
            [i for i in range(encoder.layers) if encoder.has_experts(i)], encoder.layers
        ),
        "num_sparse_decoder_layers": _sparse([i for i in range(config.layers) if moe.has_experts(i)], config.layers),
        "num_experts": moe.experts,
        "expert_capacity": moe.capacity_tokens,
        "router_jitter_noise": moe.router.jitter,
        "router_bias": False,
        "router_dtype": "float32",
        "router_aux_loss_coef": moe.balance_weight,
        "router_z_loss_coef": moe.z_weight,
        "dense_act_fn": activation_to_hf(config.activation),
        "tie_word_embeddings": config.tied,
    }


SWITCH = Family(
    "switch_transformers", "SwitchTransformersForConditionalGeneration", "", TABLE, _from_hf, _to_hf, OLD_BUFFERS,
    DUPLICATES,
)  # fmt: skip

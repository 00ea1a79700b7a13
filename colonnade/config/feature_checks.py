"""Checks whether a model and a plan support float8 training, CUDA graphs and weight-only quantisation.

- float8: tensor cores read float8 in blocks of 16 bytes along the contracted and the output dimension, and in the
  forward and the two backward products of y = x Wᵀ each dimension of W plays both parts.
- CUDA graph: the forward and backward passes must neither synchronise with the host nor change their shapes.
- int4 weights: a group of inputs that share a scale must not be split over two tensor-parallel ranks.
"""

from typing import TYPE_CHECKING, Literal

from colonnade.config.base import check_choice
from colonnade.config.model import ModelConfig
from colonnade.errors import ConfigError, PlanError

FLOAT8_MULTIPLE = 16
"""Rows and columns of each rank's shard of a weight must be multiples of this."""


def check_float8(model: ModelConfig, tp: int, etp: int = 1) -> None:
    """Raise :class:`ConfigError` if the model's sizes rule out float8, :class:`PlanError` if its shards' sizes do.

    ``tp`` shards the layers, ``etp`` the experts' hidden units. ``grouped``: int8 with a scale per group.
    """
    kv, head, group = model.kv_heads, model.head_width, model.group
    if kv % tp or -(-model.ffn_width // tp) * (tp - 1) >= model.ffn_width:
        return  # Plan.check reports it
    share = -(-model.ffn_width // tp)
    sizes: dict[str, tuple[int, tuple[int, ...]]] = {
        "width": (model.width, (model.width,)),
        "rows of queries, keys and values": (kv * (group + 2) * head, (kv // tp * (group + 2) * head,)),
        "columns of heads": (kv * group * head, (kv // tp * group * head,)),
        "ffn_width": (model.ffn_width, (share, model.ffn_width - share * (tp - 1))),
    }
    axes = dict.fromkeys(sizes, f"tp={tp}")
    if model.moe is not None:
        if model.moe.ffn_width % etp:
            return  # Plan.check reports it
        sizes["moe.ffn_width"] = model.moe.ffn_width, (model.moe.ffn_width // etp,)
        axes["moe.ffn_width"] = f"etp={etp}"
        shared = model.moe.shared_width
        if shared:
            shard = -(-shared // tp)
            sizes["moe.shared_width"] = shared, (shard, max(0, shared - shard * (tp - 1)))
            axes["moe.shared_width"] = f"tp={tp}"
    for what, (whole, parts) in sizes.items():
        if whole % FLOAT8_MULTIPLE:
            raise ConfigError(
                f"float8 needs multiples of {FLOAT8_MULTIPLE}, and the model has {what} {whole}; change it, or set "
                "train.float8 none"
            )
        for part in parts:
            if part % FLOAT8_MULTIPLE:
                raise PlanError(
                    f"float8 needs multiples of {FLOAT8_MULTIPLE}, and {axes[what]} leaves each rank {part} of {what} "
                    f"{whole}; use a lower {axes[what].partition('=')[0]}, or set train.float8 none"
                )


if TYPE_CHECKING:
    from colonnade.config.run import RunConfig

HEAD_MULTIPLE = 8
"""Kernels for sequences of unequal lengths need heads of a multiple of this width."""


def check_cuda_graph(run: "RunConfig") -> None:
    """Raise :class:`ConfigError` if the forward and backward passes cannot be recorded as one CUDA graph."""
    plan, t, without = run.plan, run.train, "or turn train.cuda_graph off"
    for axis, size, why in (
        ("pp", plan.pp, "a pipeline's schedule runs on the host"),
        ("cp", plan.cp, "ring attention's exchanges are not captured"),
        ("dp", plan.data_ranks, "the host frees FSDP's gathered weights"),
    ):
        if size > 1:
            raise ConfigError(
                f"train.cuda_graph: {why}, and the plan has {axis}={size}; use tensor ranks only, {without}"
            )
    if run.model.moe is not None:
        raise ConfigError(f"train.cuda_graph: the host reads the experts' loads; use a dense model, {without}")
    if run.micro_batches > 1:
        raise ConfigError(
            f"train.cuda_graph: a graph overwrites gradients and cannot accumulate them, and a step of {t.batch} "
            f"samples has {run.micro_batches} micro-batches of {t.micro_batch}; set train.micro_batch {t.batch}, "
            f"{without}"
        )
    ragged = run.data.separate_documents or not run.model.causal
    dtype = t.resolved("cuda").dtype
    if ragged and (dtype not in ("bfloat16", "float16") or run.model.head_width % HEAD_MULTIPLE):
        raise ConfigError(
            f"train.cuda_graph: sequences of unequal lengths in {dtype} with heads of width {run.model.head_width} run "
            "one at a time, and the host reads their lengths; set data.separate_documents false for a model of equal "
            f"sequences, or train.dtype bfloat16 and heads of a multiple of {HEAD_MULTIPLE}, {without}"
        )


WeightFormat = Literal["stored", "dense", "int8", "int4", "float8", "int8_dynamic", "ternary", "file"]
"""Storage format of the weight matrices for inference; dense dequantises those of a quantised checkpoint. ternary, of
experts only, needs calibration: colonnade compress makes such checkpoints. file keeps the Q4_0, Q4_1 and Q8_0
matrices of a GGUF file as they are, which saves memory; kernels of other formats are faster."""
WeightGroup = Literal[32, 64, 128]
"""Consecutive inputs that share an int4 scale."""


INPUT_GROUP = 32
"""Inputs that share a scale where int8_dynamic rounds them."""


def check_weight_format(weights: object, group: object) -> None:
    """Raise :class:`ConfigError` for an unknown weight format or group size."""
    check_choice("weights", weights, WeightFormat)
    check_choice("weight_group", group, WeightGroup)


def check_quantised(
    model: ModelConfig, weights: WeightFormat, group: int, tp: int, etp: int = 1, *, grouped: bool = False
) -> None:
    """Raise :class:`ConfigError` if the model cannot be quantised this way, :class:`PlanError` if a shard splits a
    group.

    ``tp`` shards the layers, ``etp`` the experts' hidden units. ``grouped``: int8 with a scale per group.
    """
    if weights in ("stored", "dense", "file"):
        return
    if not model.causal:
        raise ConfigError(
            f"weights in {weights} are for models that generate text, and this one attends in both directions (causal "
            "= False); use stored"
        )
    if weights == "ternary":
        _check_ternary(model, group, etp)
    if weights not in ("int4", "int8_dynamic") and not grouped:
        return
    group = INPUT_GROUP if weights == "int8_dynamic" else group
    heads = model.heads * (model.latent.v_width if model.latent else model.head_width)
    moe, sharded = model.moe, [("columns of heads", heads, "tp", tp)]
    if moe is None or moe.count_expert_layers(model.layers) < model.layers:
        sharded += [("ffn_width", model.ffn_width, "tp", tp)]
    if moe is not None:
        sharded += [("moe.shared_width", moe.shared_width, "tp", tp), ("moe.ffn_width", moe.ffn_width, "etp", etp)]
    for what, inputs, axis, ranks in sharded:
        share = -(-inputs // ranks)
        if ranks > 1 and share % group:
            fits = [g for g in (128, 64, 32) if share % g == 0]
            fits = fits if weights == "int4" else []
            remedy = (
                f"use --serve.weight_group {fits[0]}"
                if fits
                else f"use another {axis}, or --serve.weights {'stored' if grouped else 'int8'}"
            )
            raise PlanError(
                f"{weights} has one scale for {group} inputs, and {axis}={ranks} leaves each rank {share} of {what} "
                f"{inputs}, which cuts a group in two; {remedy}"
            )


def _check_ternary(model: ModelConfig, group: int, etp: int) -> None:
    if model.moe is None:
        raise ConfigError("ternary applies only to experts, and this model has none; use --weights int4")
    if etp > 1 and model.moe.ffn_width // etp % group:
        raise PlanError(
            f"ternary has {group} inputs in a word, and etp={etp} leaves each rank {model.moe.ffn_width // etp} of "
            f"moe.ffn_width {model.moe.ffn_width}, which cuts a word in two; use ep instead of etp"
        )

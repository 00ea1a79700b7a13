"""Whether a model's matrices can be multiplied in float8 on this many tensor-parallel ranks.

The matrix units take float8 in blocks of 16 bytes along every dimension that is summed or written, and in the forward
and the two backward products of y = x Wᵀ each dimension of W is both at some time.

Whether a run's forward and backward passes can be one CUDA graph: nothing in them may ask the device, or change.

Which weights of a model can be kept in fewer bits, and on how many tensor-parallel ranks.
"""

from typing import TYPE_CHECKING, Literal

from colonnade.config.base import check_choice
from colonnade.config.model import ModelConfig
from colonnade.errors import ConfigError, PlanError

FLOAT8_MULTIPLE = 16
"""Rows and columns of each rank's share of a weight must be multiples of this."""


def check_float8(model: ModelConfig, tp: int, sh: int = 1) -> None:
    """Raise :class:`ConfigError` for a model that float8 cannot take, :class:`PlanError` when it is the fault of ``tp``
    or of ``sh``, which cuts experts.
    """
    kv, head, group = model.kv_heads, model.head_width, model.group
    if kv % tp or -(-model.ffn_width // tp) * (tp - 1) >= model.ffn_width:
        return  # Plan.check says so, with the remedy
    share = -(-model.ffn_width // tp)
    rows: dict[str, tuple[int, tuple[int, ...]]] = {
        "width": (model.width, (model.width,)),
        "rows of queries, keys and values": (kv * (group + 2) * head, (kv // tp * (group + 2) * head,)),
        "columns of heads": (kv * group * head, (kv // tp * group * head,)),
        "ffn_width": (model.ffn_width, (share, model.ffn_width - share * (tp - 1))),
    }
    cut = dict.fromkeys(rows, f"tp={tp}")
    if model.moe is not None:
        if model.moe.ffn_width % sh:
            return  # Plan.check says so
        rows["moe.ffn_width"] = model.moe.ffn_width, (model.moe.ffn_width // sh,)
        cut["moe.ffn_width"] = f"sh={sh}"
        shared = model.moe.shared_width
        if shared:
            each = -(-shared // tp)
            rows["moe.shared_width"] = shared, (each, max(0, shared - each * (tp - 1)))
            cut["moe.shared_width"] = f"tp={tp}"
    for what, (whole, parts) in rows.items():
        if whole % FLOAT8_MULTIPLE:
            raise ConfigError(
                f"float8 needs multiples of {FLOAT8_MULTIPLE}, and the model has {what} {whole}; change it, or set "
                "train.float8 none"
            )
        for part in parts:
            if part % FLOAT8_MULTIPLE:
                raise PlanError(
                    f"float8 needs multiples of {FLOAT8_MULTIPLE}, and {cut[what]} leaves a rank {part} of {what} "
                    f"{whole}; "
                    f"use a lower {cut[what][:2]}, or set train.float8 none"
                )


if TYPE_CHECKING:
    from colonnade.config.run import RunConfig

HEAD_MULTIPLE = 8
"""Heads of other widths have no kernel for sequences of unequal lengths."""


def check_cuda_graph(run: "RunConfig") -> None:
    """Raise :class:`ConfigError` for what stands in the way, with the way out of it."""
    plan, t, without = run.plan, run.train, "or leave train.cuda_graph out"
    for axis, size, why in (
        ("pp", plan.pp, "a pipeline's schedule is the host's"),
        ("cp", plan.cp, "a ring's exchanges are not recorded"),
        ("dp", plan.data_ranks, "FSDP lets go of weights while the host looks on"),
    ):
        if size > 1:
            raise ConfigError(
                f"train.cuda_graph: {why}, and the plan has {axis}={size}; use tensor ranks only, {without}"
            )
    if run.model.moe is not None:
        raise ConfigError(f"train.cuda_graph: experts' loads are read by the host; use a dense model, {without}")
    if run.micro_batches > 1:
        raise ConfigError(
            f"train.cuda_graph: a recording writes gradients and adds none up, and a step of {t.batch} samples has "
            f"{run.micro_batches} micro-batches of {t.micro_batch}; set train.micro_batch {t.batch}, {without}"
        )
    ragged = run.data.separate_documents or not run.model.causal
    dtype = t.resolved("cuda").dtype
    if ragged and (dtype not in ("bfloat16", "float16") or run.model.head_width % HEAD_MULTIPLE):
        raise ConfigError(
            f"train.cuda_graph: sequences of unequal lengths in {dtype} with heads of width {run.model.head_width} "
            "run one by one, and the host reads their lengths; set data.separate_documents false for a model of equal "
            f"sequences, or train.dtype bfloat16 and heads of a multiple of {HEAD_MULTIPLE}, {without}"
        )


WeightFormat = Literal["stored", "int8", "int4", "float8"]
"""How a model that is not trained keeps its matrices."""
WeightGroup = Literal[32, 64, 128]
"""Neighbouring inputs that share an int4 scale."""


def check_weight_format(weights: object, group: object) -> None:
    """Raise :class:`ConfigError` for ``weights``, or a ``group`` of them, that there are not."""
    check_choice("weights", weights, WeightFormat)
    check_choice("weight_group", group, WeightGroup)


def check_quantised(model: ModelConfig, weights: WeightFormat, group: int, tp: int, sh: int = 1) -> None:
    """Raise :class:`ConfigError` for a model whose ``weights`` cannot be so, :class:`PlanError` when it is the fault of
    ``tp`` (or ``sh``, of experts): a group of inputs that two ranks would share.
    """
    if weights == "stored":
        return
    if not model.causal:
        raise ConfigError(
            f"weights in {weights} are for models that generate, and this one attends in both directions (causal = "
            "False); load it stored"
        )
    if weights != "int4":
        return
    heads = model.heads * (model.latent.v_width if model.latent else model.head_width)
    moe, cut = model.moe, [("columns of heads", heads, "tp", tp)]
    if moe is None or moe.count_expert_layers(model.layers) < model.layers:
        cut += [("ffn_width", model.ffn_width, "tp", tp)]
    if moe is not None:
        cut += [("moe.shared_width", moe.shared_width, "tp", tp), ("moe.ffn_width", moe.ffn_width, "sh", sh)]
    for what, inputs, axis, ranks in cut:
        share = -(-inputs // ranks)
        if ranks > 1 and share % group:
            fits = [g for g in (128, 64, 32) if share % g == 0]
            remedy = f"use --serve.weight_group {fits[0]}" if fits else f"use another {axis}, or --serve.weights int8"
            raise PlanError(
                f"int4 has one scale for {group} inputs, and {axis}={ranks} leaves a rank {share} of {what} {inputs}, "
                f"which cuts a group in two; {remedy}"
            )

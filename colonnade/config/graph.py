"""Whether a run's forward and backward passes can be one CUDA graph: nothing in them may ask the device, or change."""

from typing import TYPE_CHECKING

from colonnade.errors import ConfigError

if TYPE_CHECKING:
    from colonnade.config.run import RunConfig

HEAD_MULTIPLE = 8
"""Heads of other widths have no kernel for sequences of unequal lengths."""


def check(run: "RunConfig") -> None:
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

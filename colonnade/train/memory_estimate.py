"""Estimate of a training run's peak memory from its configuration, without allocating anything.

    masters       4 bytes per weight of this rank (8 in float64); gradients the same, moments twice as much
    weights       2 bytes per weight where a 16-bit copy is stored; with FSDP the gathered root and two blocks
    activations   tokens of a micro-batch · what each block saves for its backward pass, and temporaries
    teacher       in distillation, its weights in the compute type or quantised, and its logits of a chunk
    checkpoint    a copy of masters and moments in host memory, for asynchronous checkpoints

The peak of a step is the larger of two moments. At the end of the forward pass all activations exist, and the loss
needs its gradient of the output projection twice; at the end of the backward pass all gradients exist, and the
temporaries of one block. With several micro-batches the gradients of the first exist in both.

Parameters are counted on the meta device, to the byte. Activations are a formula (:func:`block_bytes`), fitted to what
autograd saves on a CPU; tests compare both with a real run. Not counted: the interpreter with torch (PROGRAM_BYTES per
new process), memory-mapped data, communication buffers, and allocator waste.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from colonnade.config import ModelConfig, Plan, RunConfig
from colonnade.kernels.linear.quantise import Kind
from colonnade.model import Transformer
from colonnade.model.activation_checkpointing import RecomputeKind
from colonnade.model.loss import CHUNK_BYTES, CHUNK_ROWS
from colonnade.model.weight_only_quant import weight_bytes_as
from colonnade.parallel.axis import Axes, Axis, ExpertAxes
from colonnade.parallel.layout import Experts, layout_of
from colonnade.train.distill import open_teacher
from colonnade.train.initial_weights import GROUP, freeze
from colonnade.train.optimizer import BUCKET_BYTES

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
PROGRAM_BYTES = 400 << 20
"""Resident memory of a process that has imported torch and done nothing else."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank by purpose: on its device, and on the host of a GPU."""

    device: dict[str, int]
    host: dict[str, int]


class ParameterCounts(NamedTuple):
    """Numbers of elements on one rank."""

    stored: int
    trained: int
    unsharded: int
    """Not sharded by FSDP, so that a lower compute type needs a copy of them."""
    trained_unsharded: int
    sharded: int
    """Whole parameters that FSDP shards."""
    root: int
    """Gathered by FSDP during a whole step."""
    block: int
    """The largest block that FSDP gathers."""


def estimate(run: RunConfig, device: str, rank: int = 0) -> Estimate:
    """Memory of pipeline rank ``rank`` of ``run`` on a ``device`` "cpu" or "cuda"."""
    run = run.resolved(device)
    t, plan = run.train, run.plan
    counts = count_parameters(run.model, plan, rank, t.freeze)  # type: ignore[arg-type]  # frozen configs have hashes
    master_size, compute_size = (8 if t.dtype == "float64" else 4), BYTES[t.compute_dtype]
    has_copies = compute_size < master_size
    single = bool(t.fused_adamw) and run.micro_batches == 1 and plan.pp == 1
    gradients = master_size * counts.trained
    if single and has_copies:  # in the compute type, as autograd makes them
        gradients -= (master_size - compute_size) * counts.trained_unsharded
    weights = compute_size * counts.unsharded if has_copies else 0
    if counts.sharded:
        gathered = 2 * counts.block if plan.reshard and plan.pp == 1 else counts.sharded - counts.root
        weights += compute_size * (counts.root + gathered)
        # Gradients are unsharded until they are reduced: with several micro-batches, all of them at once.
        if run.micro_batches > 1:
            gradients = master_size * (counts.trained_unsharded + counts.sharded)
        else:
            gradients += master_size * (counts.root + counts.block)
    moments = 2 * master_size * counts.trained
    on_gpu = device == "cuda"
    offloaded = moments if on_gpu and t.offload == "optimizer" else 0
    masters, saved = master_size * counts.stored, master_size * counts.stored
    if (lora := run.model.lora) is not None:  # the base has no masters where FSDP does not shard it, and is not saved
        saved = master_size * counts.trained
        if not counts.sharded:
            weights = compute_size * counts.trained_unsharded if has_copies else 0
            masters = master_size * counts.trained + compute_size * (counts.stored - counts.trained)
        if lora.base != "stored":
            masters = master_size * counts.trained + quantised_bytes(run.model, plan, rank, lora.base)
    rows = {
        **_teacher_rows(run, device),
        "master weights": masters,
        "weights to compute with": weights,
        "gradients": gradients,
        "moments": min(moments, 3 * BUCKET_BYTES) if offloaded else moments,
        "activations": _step_peak(run, rank, device, gradients) - gradients,
    }
    checkpoint = {"checkpoint": saved + moments if t.async_save else 0}
    host = {"moments": offloaded, **checkpoint} if on_gpu else {}
    rows = rows if on_gpu else _with_checkpoint_copy(run, rows, checkpoint)
    return Estimate({what: n for what, n in rows.items() if n}, {what: n for what, n in host.items() if n})


def _teacher_rows(run: RunConfig, device: str) -> dict[str, int]:
    """The teacher's weights on a rank, and what its forward pass needs in addition to the model's."""
    if (opened := open_teacher(run)) is None:
        return {}
    t, plan, config, settings = run.train, run.plan, opened.config, run.distill
    axes = Axes(tp=Axis("tp", plan.tp), experts=ExpertAxes(ep=Axis("ep", plan.ep), etp=Axis("etp", plan.etp)))
    shape = Transformer(config, axes, device="meta", dtype=getattr(torch, t.compute_dtype))
    weights = weight_bytes_as(shape, settings.weights, settings.weight_group, opened.formats)
    vocabulary, each = -(-config.vocab_size // plan.tp), 8 if t.dtype == "float64" else 4
    samples = min(t.micro_batch, t.batch // plan.data_ranks)
    rows = max(1, min(CHUNK_ROWS[device], CHUNK_BYTES[device] // (2 * vocabulary * each), samples * run.data.sequence))
    states = samples * run.data.sequence * config.width * BYTES[t.compute_dtype]
    logits = 0 if config.task_head == "classes" else 4 * rows * vocabulary * each
    found = {"teacher": weights + logits + 2 * states}
    if settings.on_policy:  # an engine with a copy of the weights
        own = Transformer(run.model, device="meta", dtype=getattr(torch, t.compute_dtype))
        keys = 2 * run.model.layers * run.model.kv_heads * run.model.head_width * BYTES[t.compute_dtype]
        cached = min(t.batch, 64) * run.data.sequence * keys
        found["engine"] = sum(p.nbytes for p in own.parameters()) + cached
    return found


def _with_checkpoint_copy(run: RunConfig, rows: dict[str, int], copy: dict[str, int]) -> dict[str, int]:
    """``rows`` with the checkpoint copy; if only the last step saves, no gradients exist at the same time."""
    t = run.train
    if 0 < t.save_every < t.steps or not copy["checkpoint"]:
        return rows | copy
    step = rows["gradients"] + rows["activations"]
    return rows | {"checkpoint": max(0, copy["checkpoint"] - step)}


def _step_peak(run: RunConfig, rank: int, device: str, gradients: int) -> int:
    """Peak of gradients, activations and temporaries in a step [bytes]; at least ``gradients``."""
    t, plan, model = run.train, run.plan, run.model
    compute_size, master_size = BYTES[t.compute_dtype], (8 if t.dtype == "float64" else 4)
    samples = min(t.micro_batch, t.batch // plan.data_ranks)
    tokens = -(-samples * run.data.sequence // plan.cp)
    spans = plan.stage_layers(model.layers)[rank :: plan.pp]
    last, first = plan.pp - 1 == rank, rank == 0
    layers = [layer for span in spans for layer in span]
    kind: RecomputeKind = "none" if t.recompute == "budget" else t.recompute
    ragged = run.data.separate_documents or not model.causal
    in_flight = 1
    if plan.pp > 1:
        in_flight = run.micro_batches if plan.schedule == "gpipe" else min(run.micro_batches, plan.pp - rank)
    if model.encoder is not None:  # sources and targets are at most data.sequence long, and rarely all of one length
        ragged = True
        layers += range(model.layers, model.total_layers)
    blocks = in_flight * tokens * sum(block_bytes(run, layer, device, kind, ragged=ragged) for layer in layers)
    if t.recompute == "budget":
        blocks = min(blocks, in_flight * t.activation_bytes)
    largest = tokens * max(block_bytes(run, layer, device, "none", ragged=ragged) for layer in layers)
    working = largest if kind == "full" else largest // 2
    residual = tokens * -(-model.width // (plan.tp if plan.sequence_parallel else 1)) * compute_size
    rotary = 2 * tokens * model.rotary_width * compute_size if model.positions == "rotary" else 0
    ends, embedding, projection = residual + rotary, 0, 0
    vocabulary = -(-model.vocab_size // plan.tp)
    if first:
        embedding = master_size * vocabulary * model.width
    if model.encoder is not None:  # the encoder's output, and the keys and values of all decoder layers
        keys = 2 * model.layers * model.kv_heads * model.head_width // plan.tp
        ends += residual + tokens * (_norm_bytes(model, device, compute_size) + keys * compute_size)
    if model.relative_positions is not None:  # a table for all pairs of a sequence, and its gradient, in each stack
        stacks = 1 if model.encoder is None else 2
        ends += 2 * stacks * model.heads // plan.tp * run.data.sequence**2 * compute_size
    if last:
        rows = max(1, min(CHUNK_ROWS[device], CHUNK_BYTES[device] // (vocabulary * master_size), tokens))
        chunk = 3 * rows * vocabulary * master_size
        ends += tokens * model.width * compute_size + tokens * _norm_bytes(model, device, compute_size)
        projection = 0 if model.lora else master_size * vocabulary * model.width
        projection += max(chunk, projection + (projection // 2 if compute_size < master_size else 0))
    forward = blocks + ends + projection
    # The embedding's gradient is dense: while it is added to another of the same weight, both exist.
    temporary = embedding if model.tied or run.micro_batches > 1 or compute_size < master_size else 0
    backward = gradients + residual + max(working, temporary)
    earlier = gradients if run.micro_batches > 1 else 0
    return max(earlier + forward, backward, gradients)


def block_bytes(run: RunConfig, layer: int, device: str, kind: RecomputeKind, *, ragged: bool) -> int:
    """Bytes that a block saves per token for the backward pass; ``run`` is resolved.

    Blocks of an encoder are numbered after the decoder's, whose own tokens are the targets.
    """
    model, plan, t = run.model, run.plan, run.train
    each = BYTES[t.compute_dtype]
    residual = model.width // (plan.tp if plan.sequence_parallel else 1)
    if kind == "full":
        return residual * each
    query, key = (heads * model.head_width // plan.tp for heads in (model.heads, model.kv_heads))
    norms = 2 * _norm_bytes(model, device, each) * residual // model.width
    attention = 2 * query + 2 * key  # the projections' outputs, and the output projection's input
    core = query + key if model.positions == "rotary" else 0
    if model.latent is not None:
        value = model.heads * model.latent.v_width // plan.tp
        attention = query + value + model.latent.kv_rank + model.latent.rope_width
        core = 2 * query + 2 * value
    elif ragged and device == "cpu":
        core += query
    core *= each
    if model.relative_positions is not None:
        core += _relative_bytes(run, device, each, ragged=ragged)
    if model.encoder is not None and layer < model.layers:  # cross attention, whose keys are counted with the bridge
        norms += _norm_bytes(model, device, each) * residual // model.width
        attention += 2 * query
        core += query * each if ragged and device == "cpu" else 0
    if model.qk_norm:
        core += (query + key) * (each if each >= 4 or device == "cuda" else 8)
    if t.attention_dropout and device == "cpu":  # its kernel materialises the scores
        core += 5 * model.heads // plan.tp * run.data.sequence * each // 2
    return norms + attention * each + (core if kind == "none" else 0) + _hidden_bytes(run, layer, each)


def _relative_bytes(run: RunConfig, device: str, each: int, *, ragged: bool) -> int:
    """Bytes per token saved by attention with relative positions, beyond its inputs and output."""
    model, plan = run.model, run.plan
    scores = model.heads // plan.tp * run.data.sequence * each
    if device == "cpu":  # its kernel materialises the probabilities, and ragged sequences cut their biases
        return scores * (2 if ragged else 1)
    padded = (model.heads + 2 * model.kv_heads) * model.head_width // plan.tp * each
    return scores + padded if ragged else 0


def _hidden_bytes(run: RunConfig, layer: int, each: int) -> int:
    """Bytes per token saved inside the FFN or the experts."""
    model, plan = run.model, run.plan
    dense = 4 if model.gated else 2  # gate, its activation, up, their product
    if run.train.compile:  # element-wise results are recomputed
        dense = 3 if model.gated else 2
    if model.activation == "relu" and not model.gated:  # its gradient follows from its result
        dense = 1
    moe = model.experts_of(layer)
    if moe is None:
        of_encoder = 0 if model.encoder is None or layer < model.layers else model.encoder.ffn_width
        return dense * -(-(of_encoder or model.ffn_width) // plan.tp) * each
    chosen = moe.active * max(1.0, moe.capacity or 1.0)
    experts = chosen * (2 if model.gated else 1) * moe.ffn_width
    if plan.ep * plan.etp > 1:
        experts += 2 * chosen * model.width  # received tokens, and returned ones
    scores = 4 * model.width if each < 4 else 0  # the router reads the stream in float32
    return int((experts + dense * moe.shared_width) * each) + scores


def _norm_bytes(model: ModelConfig, device: str, each: int) -> int:
    """Bytes per token saved by a norm: input and output; RMSNorm on a CPU also its float32 intermediates."""
    if model.norm == "layernorm" or device == "cuda":
        return 2 * model.width * each
    return model.width * (each + 2 * max(4, each))


def quantised_bytes(model: ModelConfig, plan: Plan, rank: int, kind: Kind) -> int:
    """Memory of the frozen base of pipeline rank ``rank``, quantised to ``kind``."""
    spans = plan.stage_layers(model.layers)[rank :: plan.pp]
    shape = Transformer(model.replace(lora=None), Axes(tp=Axis("tp", plan.tp)), spans=spans, device="meta")
    return weight_bytes_as(shape, kind, GROUP)


@functools.lru_cache(maxsize=256)
def count_parameters(model: ModelConfig, plan: Plan, rank: int, frozen: str) -> ParameterCounts:
    """Elements of ``model`` on data rank 0 of pipeline rank ``rank``, counted on the meta device."""
    grid = ExpertAxes(ep=Axis("ep", plan.ep), etp=Axis("etp", plan.etp))
    axes = Axes(tp=Axis("tp", plan.tp), cp=Axis("cp", plan.cp), experts=grid)
    local_model = Transformer(model, axes, spans=plan.stage_layers(model.layers)[rank :: plan.pp], device="meta")
    freeze(local_model, frozen)
    layout, shard_axis = layout_of(local_model), Axis("shard", plan.dp * plan.cp)
    fsdp = plan.data_ranks * plan.cp > 1
    stored = trained = unsharded = trained_unsharded = sharded = root = 0
    blocks: dict[str, int] = {}
    for name, p in local_model.named_parameters():
        is_sharded = fsdp and not isinstance(layout[name], Experts)
        start, stop = shard_axis.part(len(p)) if is_sharded else (0, len(p))
        local = (stop - start) * p.numel() // max(1, len(p))
        stored += local
        trained += local * p.requires_grad
        if not is_sharded:
            unsharded += local
            trained_unsharded += local * p.requires_grad
            continue
        sharded += p.numel()
        if name.startswith(("blocks.", "encoder_blocks.")):
            block = ".".join(name.split(".")[:2])
            blocks[block] = blocks.get(block, 0) + p.numel()
        else:
            root += p.numel()
    largest_block = max(blocks.values(), default=0)
    return ParameterCounts(stored, trained, unsharded, trained_unsharded, sharded, root, largest_block)

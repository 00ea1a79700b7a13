"""Estimate of the memory that a training run takes at its peak, from the configuration alone: nothing is allocated.

    masters       4 bytes a weight of this rank (8 in float64); gradients as much, moments twice as much
    weights       2 bytes a weight where a 16-bit copy is kept; with FSDP the gathered root and two blocks
    activations   tokens of a micro-batch · what each block keeps for its backward pass, and temporaries
    checkpoint    a copy of masters and moments in host memory, where checkpoints are written while training goes on

The peak of a step is the larger of two moments. At the end of the forward pass all activations are held, and the loss
holds its gradient of the output projection twice; at the end of the backward pass all gradients are held, and the
temporaries of one block. With several micro-batches the gradients of the first are held in both.

Parameters are counted on the meta device, to the byte. Activations are a formula (:func:`block_bytes`), fitted to what
autograd keeps on a CPU; tests compare both with a real run. Not counted: the interpreter with torch (PROGRAM_BYTES for
each new process), memory-mapped data, buffers of collectives, what allocators waste.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

from colonnade.config import ModelConfig, Plan, RunConfig
from colonnade.model import Transformer
from colonnade.model.activation_checkpointing import Kind
from colonnade.model.loss import CHUNK_BYTES, CHUNK_ROWS
from colonnade.parallel.axis import Axes, Axis, ExpertAxes
from colonnade.parallel.layout import Experts, layout_of
from colonnade.train.initial_weights import freeze
from colonnade.train.optimizer_offload import BUCKET_BYTES

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
PROGRAM_BYTES = 400 << 20
"""Resident memory of a process that has imported torch and trains nothing yet."""


@dataclass(frozen=True)
class Estimate:
    """Bytes of one rank, by what they are for: on its device, and on the host beside a GPU."""

    device: dict[str, int]
    host: dict[str, int]


class Parameters(NamedTuple):
    """Numbers (not bytes) that one rank holds."""

    held: int
    trained: int
    copied: int
    """Not sharded by FSDP, so that a lower compute type has a copy of them."""
    trained_copied: int
    sharded: int
    """All that FSDP shards, whole."""
    root: int
    """What FSDP keeps gathered during a step."""
    block: int
    """The largest block that FSDP gathers."""


def estimate(run: RunConfig, device: str, rank: int = 0) -> Estimate:
    """What pipeline rank ``rank`` of ``run`` takes on a ``device`` "cpu" or "cuda"."""
    run = run.resolved(device)
    t, plan = run.train, run.plan
    numbers = parameters(run.model, plan, rank, t.freeze)  # type: ignore[arg-type]  # frozen configs have hashes
    kept, each = (8 if t.dtype == "float64" else 4), BYTES[t.compute_dtype]
    lower = each < kept
    single = bool(t.fused_adamw) and run.micro_batches == 1 and plan.pp == 1
    gradients = kept * numbers.trained
    if single and lower:  # in the compute type, as autograd makes them
        gradients -= (kept - each) * numbers.trained_copied
    weights = each * numbers.copied if lower else 0
    if numbers.sharded:
        gathered = 2 * numbers.block if plan.reshard and plan.pp == 1 else numbers.sharded - numbers.root
        weights += each * (numbers.root + gathered)
        # Gradients are whole until they are reduced: those of several micro-batches all at once.
        if run.micro_batches > 1:
            gradients = kept * (numbers.trained_copied + numbers.sharded)
        else:
            gradients += kept * (numbers.root + numbers.block)
    moments = 2 * kept * numbers.trained
    on_gpu = device == "cuda"
    moved = moments if on_gpu and t.offload == "optimizer" else 0
    rows = {
        "master weights": kept * numbers.held,
        "weights to compute with": weights,
        "gradients": gradients,
        "moments": min(moments, 3 * BUCKET_BYTES) if moved else moments,
        "activations": _peak(run, rank, device, gradients) - gradients,
    }
    copy = {"checkpoint": kept * numbers.held + moments if t.async_save else 0}
    host = {"moments": moved, **copy} if on_gpu else {}
    rows = rows if on_gpu else _with_copy(run, rows, copy)
    return Estimate({what: n for what, n in rows.items() if n}, {what: n for what, n in host.items() if n})


def _with_copy(run: RunConfig, rows: dict[str, int], copy: dict[str, int]) -> dict[str, int]:
    """``rows`` with the copy for checkpoints; if only the last step saves, no step's gradients are beside it."""
    t = run.train
    if 0 < t.save_every < t.steps or not copy["checkpoint"]:
        return rows | copy
    step = rows["gradients"] + rows["activations"]
    return rows | {"checkpoint": max(0, copy["checkpoint"] - step)}


def _peak(run: RunConfig, rank: int, device: str, gradients: int) -> int:
    """Gradients, activations and temporaries at the highest moment of a step [bytes]; at least ``gradients``."""
    t, plan, model = run.train, run.plan, run.model
    each, exact = BYTES[t.compute_dtype], (8 if t.dtype == "float64" else 4)
    samples = min(t.micro_batch, t.batch // plan.data_ranks)
    tokens = -(-samples * run.data.sequence // plan.cp)
    spans = plan.spans(model.layers)[rank :: plan.pp]
    last, first = plan.pp - 1 == rank, rank == 0
    layers = [layer for span in spans for layer in span]
    kind: Kind = "none" if t.recompute == "budget" else t.recompute
    ragged = run.data.separate_documents or not model.causal
    in_flight = 1
    if plan.pp > 1:
        in_flight = run.micro_batches if plan.schedule == "gpipe" else min(run.micro_batches, plan.pp - rank)
    blocks = in_flight * tokens * sum(block_bytes(run, layer, device, kind, ragged=ragged) for layer in layers)
    if t.recompute == "budget":
        blocks = min(blocks, in_flight * t.activation_bytes)
    largest = tokens * max(block_bytes(run, layer, device, "none", ragged=ragged) for layer in layers)
    working = largest if kind == "full" else largest // 2
    residual = tokens * -(-model.width // (plan.tp if plan.sequence_parallel else 1)) * each
    rotary = 2 * tokens * model.rotary_width * each if model.positions == "rotary" else 0
    ends, embedding, projection = residual + rotary, 0, 0
    vocabulary = -(-model.vocab_size // plan.tp)
    if first:
        embedding = exact * vocabulary * model.width
    if last:
        rows = max(1, min(CHUNK_ROWS[device], CHUNK_BYTES[device] // (vocabulary * exact), tokens))
        chunk = 3 * rows * vocabulary * exact
        ends += tokens * model.width * each + tokens * _norm_bytes(model, device, each)
        projection = exact * vocabulary * model.width
        projection += max(chunk, projection + (projection // 2 if each < exact else 0))
    forward = blocks + ends + projection
    # The embedding's gradient is dense: added to another of the same weight it is held beside it.
    added = embedding if model.tied or run.micro_batches > 1 or each < exact else 0
    backward = gradients + residual + max(working, added)
    held = gradients if run.micro_batches > 1 else 0
    return max(held + forward, backward, gradients)


def block_bytes(run: RunConfig, layer: int, device: str, kind: Kind, *, ragged: bool) -> int:
    """What a block keeps of one token for the backward pass [bytes]; ``run`` is resolved."""
    model, plan, t = run.model, run.plan, run.train
    each = BYTES[t.compute_dtype]
    residual = model.width // (plan.tp if plan.sequence_parallel else 1)
    if kind == "full":
        return residual * each
    query, key = (heads * model.head_width // plan.tp for heads in (model.heads, model.kv_heads))
    norms = 2 * _norm_bytes(model, device, each) * residual // model.width
    attention = 2 * query + 2 * key  # the projections' output, and what the last projection reads
    core = query + key if model.positions == "rotary" else 0
    if model.latent is not None:
        value = model.heads * model.latent.v_width // plan.tp
        attention = query + value + model.latent.kv_rank + model.latent.rope_width
        core = 2 * query + 2 * value
    elif ragged and device == "cpu":
        core += query
    core *= each
    if model.qk_norm:
        core += (query + key) * (each if each >= 4 or device == "cuda" else 8)
    if t.attention_dropout and device == "cpu":  # by a kernel that writes the scores out
        core += 5 * model.heads // plan.tp * run.data.sequence * each // 2
    return norms + attention * each + (core if kind == "none" else 0) + _hidden_bytes(run, layer, each)


def _hidden_bytes(run: RunConfig, layer: int, each: int) -> int:
    """Of the feed-forward part: what lies between its products, of a token."""
    model, plan = run.model, run.plan
    dense = 4 if model.gated else 2  # gate, its activation, up, their product
    if run.train.compile:  # elementwise results are computed again
        dense = 3 if model.gated else 2
    moe = model.experts_of(layer)
    if moe is None:
        return dense * -(-model.ffn_width // plan.tp) * each
    chosen = moe.active * max(1.0, moe.capacity or 1.0)
    experts = chosen * (2 if model.gated else 1) * moe.ffn_width
    if plan.ep * plan.sh > 1:
        experts += 2 * chosen * model.width  # tokens that travelled here, and back
    scores = 4 * model.width if each < 4 else 0  # the router reads the stream in float32
    return int((experts + dense * moe.shared_width) * each) + scores


def _norm_bytes(model: ModelConfig, device: str, each: int) -> int:
    """What a norm keeps of one token: its input and output; RMSNorm on a CPU also what it computes in float32."""
    if model.norm == "layernorm" or device == "cuda":
        return 2 * model.width * each
    return model.width * (each + 2 * max(4, each))


@functools.lru_cache(maxsize=256)
def parameters(model: ModelConfig, plan: Plan, rank: int, frozen: str) -> Parameters:
    """What data rank 0 of pipeline rank ``rank`` holds of ``model``, counted on the meta device."""
    grid = ExpertAxes(ep=Axis("ep", plan.ep), sh=Axis("sh", plan.sh))
    axes = Axes(tp=Axis("tp", plan.tp), cp=Axis("cp", plan.cp), experts=grid)
    shape = Transformer(model, axes, spans=plan.spans(model.layers)[rank :: plan.pp], device="meta")
    freeze(shape, frozen)
    layout, shard = layout_of(shape), Axis("shard", plan.dp * plan.cp)
    sharded = plan.data_ranks * plan.cp > 1
    held = trained = copied = trained_copied = whole = root = 0
    blocks: dict[str, int] = {}
    for name, p in shape.named_parameters():
        cut = sharded and not isinstance(layout[name], Experts)
        start, stop = shard.part(len(p)) if cut else (0, len(p))
        mine = (stop - start) * p.numel() // max(1, len(p))
        held += mine
        trained += mine * p.requires_grad
        if not cut:
            copied += mine
            trained_copied += mine * p.requires_grad
            continue
        whole += p.numel()
        if name.startswith("blocks."):
            block = name.split(".")[1]
            blocks[block] = blocks.get(block, 0) + p.numel()
        else:
            root += p.numel()
    return Parameters(held, trained, copied, trained_copied, whole, root, max(blocks.values(), default=0))

"""What a run holds from step to step, counted before it is there: for one that is too large to begin.

    masters      4 bytes a weight of this rank (8 in float64)       gradients as much, moments twice as much
    copies       2 bytes a weight, where the compute type is a lower one and FSDP does not make them for a moment

The model that would be built is built on the meta device, which takes no memory.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from colonnade.config import RunConfig, size
from colonnade.errors import CapacityError
from colonnade.model import Transformer
from colonnade.parallel.layout import Experts, Placement, layout_of
from colonnade.parallel.mesh import Ground
from colonnade.train.memory import Account, host_bytes, lack_of_memory, told, wanted_bytes
from colonnade.train.offload import BUCKET_BYTES
from colonnade.train.start import freeze


def expected(run: RunConfig, ground: Ground) -> Account:
    """What this rank of ``run`` would hold, without activations."""
    t, spans = run.train, [span for _, span in ground.stages(run.model.layers)]
    model = Transformer(run.model, ground.axes, spans=spans, device="meta")
    freeze(model, t.freeze)
    layout, kept = layout_of(model), 8 if t.dtype == "float64" else 4
    lower = t.dtype in ("bfloat16", "float16")

    def whole(at: Placement) -> bool:
        return not ground.sharded or isinstance(at, Experts)

    def held(p: Tensor, at: Placement) -> int:
        start, stop = (0, len(p)) if whole(at) else ground.shard.part(len(p))
        return (stop - start) * p.numel() // max(1, len(p))

    numbers = {name: held(p, layout[name]) for name, p in model.named_parameters()}
    moved = kept * sum(numbers[name] for name, p in model.named_parameters() if p.requires_grad)
    moments = 2 * moved
    if ground.device.type == "cuda":
        free, capacity = torch.cuda.mem_get_info(ground.device)
        others = max(capacity - free - torch.cuda.memory_reserved(ground.device), 0)
        moments = min(moments, 3 * BUCKET_BYTES) if t.offload == "optimizer" else moments
    else:
        capacity, others = host_bytes(), 0
    return Account(
        masters=kept * sum(numbers.values()),
        weights=2 * sum(n for name, n in numbers.items() if lower and whole(layout[name])),
        gradients=moved,
        moments=moments,
        activations=0,
        unused=0,
        others=others,
        wanted=0,
        capacity=capacity,
        sharded_masters=kept * sum(n for name, n in numbers.items() if isinstance(layout[name], int)),
    )


@contextmanager
def beginning(run: RunConfig, ground: Ground) -> Iterator[None]:
    """Turns running out of memory inside into a :class:`CapacityError` with what the run would take, and three changes
    that would help.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        lack = lack_of_memory(error)
        if lack is None:
            raise
        wanted = f", which wanted {size(wanted_bytes(lack))} more" if wanted_bytes(lack) else ""
        when = f"before the first step{wanted}. A step takes, besides its activations,"
        raise CapacityError(told(when, expected(run, ground), run, ground.device)) from error


@contextmanager
def copying(name: str) -> Iterator[None]:
    """The same for the copy in host memory from which checkpoint ``name`` is to be written."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if lack_of_memory(error) is None:
            raise
        raise CapacityError(
            f"there is no host memory for a copy of what {name} is made of, from which it is written while training "
            "goes on; set --train.async_save false"
        ) from error

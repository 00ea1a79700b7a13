"""Batch-invariant paged attention: a request's result does not depend on the batch or on prompt chunking.

Flash-Decoding with splits at fixed positions (:mod:`triton_decode`), also for prompts, in blocks of 16 rows, or as many
as one query has. The price is that a prompt's keys are read once for every few queries. Which queries share a block
does not matter: keys that a row does not see are states of weight 0, which do not change a sum.
"""

from torch import Tensor

from colonnade.kernels.attention.decode_plan import KernelLayout
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.triton_decode import attend

CHUNK = 512
"""Keys per split; splits end at multiples of this."""


def paged(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    *,
    window: int | None = None,
    values: int | None = None,
) -> Tensor:
    """o_TNH (see :func:`reference.paged`), for head widths up to 256."""
    layout = KernelLayout.of(q_TNH, k_PpKH, 1, window=window, chunk=CHUNK)
    if layout not in table.plan_cache:
        new, lengths = table.host_lengths
        plan = layout.plan(lengths, new, max_keys=table.max_keys)
        table.plan_cache[layout] = (layout.prepare(plan, q_TNH.device),)
    (ready,) = table.plan_cache[layout]
    return attend(q_TNH, k_PpKH, v_PpKH, table, ready).o[..., :values]

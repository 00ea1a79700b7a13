"""Attention over pages whose numbers do not depend on who else is in the batch, nor on how a prompt was cut.

Flash-Decoding with cuts at fixed positions (:mod:`triton_decode`), for prompts too, in blocks of as many rows as one
query has, 16 at least: so a prompt's keys are read once for each few of its queries. That is what it costs. Which
queries share a block changes nothing: to a row, keys that it does not see are states of weight 0, which change no sum.
"""

from torch import Tensor

from colonnade.kernels.attention.decode_plan import KernelLayout
from colonnade.kernels.attention.page_table import PageTable
from colonnade.kernels.attention.triton_decode import attend

CHUNK = 512
"""Keys of a split: cuts are at multiples of this."""


def paged(
    q_TNH: Tensor,
    k_PpKH: Tensor,
    v_PpKH: Tensor,
    table: PageTable,
    *,
    window: int | None = None,
    values: int | None = None,
) -> Tensor:
    """o_TNH (see :func:`reference.paged`), of heads up to 256 wide."""
    layout = KernelLayout.of(q_TNH, k_PpKH, 1, window=window, chunk=CHUNK)
    if layout not in table.plan_cache:
        new, lengths = table.host_lengths
        plan = layout.plan(lengths, new, max_keys=table.max_keys)
        table.plan_cache[layout] = (layout.prepare(plan, q_TNH.device),)
    (ready,) = table.plan_cache[layout]
    return attend(q_TNH, k_PpKH, v_PpKH, table, ready).o[..., :values]

"""Part (e): activation checkpointing over blocks with collectives inside: what the backward pass repeats."""

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

from _ground import QWEN3, Table, batch_of, build, difference, exact
from _ground_compile import Compiler, fresh
from colonnade.config import Plan
from colonnade.model import Loss, Packed, Stream
from colonnade.model.attend import Attend
from colonnade.model.rotary import Rotation
from colonnade.parallel.axis import Axes

REDUCE, WAIT = torch.ops._c10d_functional.all_reduce.default, torch.ops._c10d_functional.wait_tensor.default


class Collectives(TorchDispatchMode):
    """Counts the all-reduces that really run."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is REDUCE
        return func(*args, **(kwargs or {}))


class Recomputed(nn.Module):
    """A block whose activations are computed again in the backward pass, but for what ``keep`` names."""

    def __init__(self, block: nn.Module, keep: tuple[Any, ...]):
        super().__init__()
        self.block = block
        self.context = functools.partial(create_selective_checkpoint_contexts, list(keep)) if keep else None

    def forward(self, x_TD: Tensor, turn: Rotation | None, attend: Attend) -> Tensor:
        """As the block."""
        if self.context is None:
            return checkpoint(self.block, x_TD, turn, attend, use_reentrant=False)
        return checkpoint(self.block, x_TD, turn, attend, use_reentrant=False, context_fn=self.context)


def check(table: Table) -> None:
    """All of part (e)."""
    if table.context.world == 1:
        return
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    for label, keep in (
        ("none", None),
        ("everything again", ()),
        ("everything again, no early stop", ()),
        ("all_reduce and wait_tensor kept", (REDUCE, WAIT)),
        ("all_reduce kept", (REDUCE,)),
        ("matrix products kept", products),
        ("all of these kept", (*products, REDUCE, WAIT)),
    ):
        early = not label.endswith("no early stop")
        table.run("e", f"all-reduces forward, backward: {label}", lambda k=keep, s=early: _recompute(table, k, s, None))
    table.run(
        "e",
        f"{table.compiler}: all_reduce and wait_tensor kept, each block compiled",
        lambda: _recompute(table, (REDUCE, WAIT), True, table.compiler),
    )


def _recompute(table: Table, keep: tuple[Any, ...] | None, early: bool, backend: str | None) -> tuple[str, str]:
    context = table.on(Plan(tp=table.context.world))
    with fresh():
        config = QWEN3.but(layers=3)
        batch = batch_of([16], config.vocab_size, 0).to(context.device)
        compiler = Compiler(backend or "eager")

        def gradients(axes: Axes, keep: tuple[Any, ...] | None) -> tuple[dict[str, Tensor | None], str]:
            model = build(config, context.device, axes)
            names = [name for name, _ in model.named_parameters()]
            if keep is not None:
                model.blocks = nn.ModuleList(Recomputed(block, keep) for block in model.blocks)
                for block in model.blocks:
                    if backend:
                        block.compile(backend=compiler, fullgraph=True)
            counts = []
            # Dynamo compiles nothing under a dispatch mode, so compiled blocks go uncounted.
            counting = Collectives if not backend else contextlib.nullcontext
            with counting() as seen, set_checkpoint_early_stop(early):
                loss, _ = model(
                    Stream(batch.tokens_T, batch.positions_T), Packed.of([16], context.device), Loss(batch.targets_T)
                )
            counts.append(seen and seen.count)
            with counting() as seen:
                loss.backward()
            counts.append(seen and seen.count)
            return {n: p.grad for n, p in zip(names, model.parameters(), strict=True)}, f"{counts[0]}, {counts[1]}"

        (want, _), (got, counts) = gradients(context.axes, None), gradients(context.axes, keep)
        error, verdict = exact(max(table.everybody(max(difference(got[n], want[n]) for n in want))))
        return f"{f'graphs {compiler.graphs}' if backend else counts}; error {error}", verdict

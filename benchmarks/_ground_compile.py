"""Part (d): blocks under torch.compile, with collectives inside: graphs, breaks, recompilations, equality."""

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule, fully_shard

from _ground import EXACT, GPT2, QWEN3, Table, batch_of, build, difference, exact
from colonnade.config import ModelConfig, Plan
from colonnade.model import KVCache, Loss, Paged, Rows, Stream

LENGTHS_T = (16, 16, 32, 48, 16)


class Compiler:
    """A backend of torch.compile that counts the graphs it is given."""

    def __init__(self, name: str):
        self.inner, self.graphs = torch._dynamo.lookup_backend(name), 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.graphs += 1
        return self.inner(graph, inputs)


@dataclass(frozen=True)
class Compiled:
    """A case of part (d)."""

    label: str
    layers: int
    documents: Callable[[int], list[int]]
    """The documents of a stream of T tokens."""
    config: ModelConfig = QWEN3
    train: bool = True
    fsdp: bool = False
    dtype: torch.dtype = torch.float64
    solo: bool = False
    """In a world of one, too."""
    breaks: int | None = 0
    """Graph breaks expected; None says that any number is a finding, not a failure."""


BF16 = QWEN3.but(head_width=8)
"""Heads that a GPU's 16-bit kernels take as they are."""
CASES = [
    Compiled("1 document, L=4", 4, lambda t: [t]),
    Compiled("1 document, L=12", 12, lambda t: [t], solo=True),
    Compiled("1 document, L=4, gpt2", 4, lambda t: [t], config=GPT2),
    Compiled("documents of 8, L=12", 12, lambda t: [8] * (t // 8)),
    Compiled("1 document, L=12, no gradient", 12, lambda t: [t], train=False),
    Compiled("1 document, L=4, FSDP2 over the world", 4, lambda t: [t], fsdp=True),
    Compiled("ragged documents, L=4", 4, lambda t: [5, t - 8, 3], solo=True, breaks=None),
    Compiled(
        "ragged documents, L=4, bfloat16",
        4,
        lambda t: [5, t - 8, 3],
        BF16,
        dtype=torch.bfloat16,
        solo=True,
        breaks=None,
    ),
]


def check(table: Table) -> None:
    """Part (d)."""
    for case in CASES:
        if table.context.world > 1 or case.solo:
            table.run("d", f"{table.compiler}, T {LENGTHS_T}: {case.label}", lambda c=case: _graphs(table, c))
    table.run("d", f"{table.compiler}: paged prefill and decode mixed, L=4", lambda: _paged(table))
    if table.context.world > 1:
        for width in (256, 2048) if table.context.device.type == "cuda" else (256,):
            what = f"eager, us: fan_in, in-place all_reduce of {width}x{width} float32"
            table.run("d", what, lambda w=width: _times(table, w))


def _graphs(table: Table, case: Compiled) -> tuple[str, str]:
    world = table.context.world
    context = table.on(Plan(dp=world) if case.fsdp else Plan(tp=world))
    with fresh():
        config = case.config.but(layers=case.layers)
        eager, model = (build(config, context.device, context.axes, dtype=case.dtype) for _ in range(2))
        if case.fsdp:
            for part in (*model.blocks, model):
                fully_shard(part, mesh=context.fsdp_mesh)
            for part in model.modules():
                if isinstance(part, FSDPModule):
                    part.set_gradient_divide_factor(1.0)
                    part.set_force_sum_reduction_for_comms(True)
        compiler = Compiler(table.compiler)
        for block in model.blocks:
            block.compile(backend=compiler)
        graphs, worst = [], 0.0
        for T in LENGTHS_T:
            batch = batch_of(case.documents(T), config.vocab_size, T).to(context.device)
            results = []
            for it in (eager, model):
                it.zero_grad()
                with torch.set_grad_enabled(case.train):
                    loss, _ = it(Stream(batch.tokens_T, batch.positions_T), batch.attend, Loss(batch.targets_T))
                if case.train:
                    loss.backward()
                results.append(loss.detach())
            worst = max(worst, difference(results[1], results[0]))
            if case.train:
                # Under FSDP2 every rank ran the same batch, and the sum over ranks is what it gives.
                scale = world if case.fsdp else 1
                both = zip(model.parameters(), eager.parameters(), strict=True)
                worst = max(worst, *(difference(p.grad, torch.mul(q.grad, scale)) for p, q in both))
            graphs.append(compiler.graphs)
        return _judge(table, graphs, worst, case.breaks, EXACT if case.dtype == torch.float64 else 5e-2)


def _judge(
    table: Table, graphs: list[int], worst: float, expected: int | None, tolerance: float = EXACT
) -> tuple[str, str]:
    found = sum(counters["graph_break"].values())
    why = Counter(str(text).splitlines()[0].strip()[:70] for text in counters["graph_break"].elements())
    error, verdict = exact(max(table.everybody(worst)), tolerance)
    figure = f"graphs {','.join(map(str, graphs))}; breaks {found}; error {error}"
    if verdict == "ok" and expected is not None and found != expected:
        verdict = f"WRONG: {found} graph breaks"
    if found:
        figure += f" ({'; '.join(why)})"
    return figure, verdict


class fresh:  # noqa: N801
    """Forget what was compiled before, and raise rather than fall back to eager when the limit is hit."""

    def __enter__(self) -> None:
        torch._dynamo.reset()
        counters.clear()
        self._patch = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
        self._patch.__enter__()

    def __exit__(self, *error: object) -> None:
        self._patch.__exit__(*error)
        torch._dynamo.reset()


@torch.no_grad()
def _paged(table: Table) -> tuple[str, str]:
    """Four rounds of two requests, one still in prefill, against the same model without compile."""
    context = table.on(Plan(tp=table.context.world))
    with fresh():
        config = QWEN3.but(layers=4)
        compiler, graphs, worst = Compiler(table.compiler), [], 0.0
        eager, model = (build(config, context.device, context.axes) for _ in range(2))
        for block in model.blocks:
            block.compile(backend=compiler)
        caches = [
            KVCache(config, context.axes, pages=16, page_tokens=4, dtype=torch.float64, device=context.device)
            for _ in range(2)
        ]
        generator = torch.Generator().manual_seed(0)
        contexts = [0, 0]
        for new in ([5, 3], [4, 1], [1, 1], [1, 1]):
            positions = [torch.arange(a, a + n) for a, n in zip(contexts, new, strict=True)]
            contexts = [a + n for a, n in zip(contexts, new, strict=True)]
            slots = torch.cat([32 * r + p for r, p in enumerate(positions)])
            tokens = torch.randint(config.vocab_size, (sum(new),), generator=generator)
            stream = Stream(*(x.to(context.device) for x in (tokens, torch.cat(positions))))
            outs = []
            for it, cache in zip((eager, model), caches, strict=True):
                attend = Paged(
                    cache,
                    torch.tensor([[0, 1, 2], [8, 9, 10]], dtype=torch.int32, device=context.device),
                    slots.to(context.device),
                    torch.tensor([0, *new]).cumsum(0).to(context.device, torch.int32),
                    torch.tensor(contexts, dtype=torch.int32, device=context.device),
                    longest_query=max(new),
                    longest_context=max(contexts),
                    kernels="sdpa",
                )
                outs.append(it(stream, attend, Rows()))
            worst = max(worst, difference(outs[1], outs[0]))
            graphs.append(compiler.graphs)
        return _judge(table, graphs, worst, None)


def _times(table: Table, width: int) -> tuple[str, str]:
    """Medians of 5 runs of 100 calls each, one after another, the device waited for at the end."""
    context = table.on(Plan(tp=table.context.world))
    x = torch.ones(width, width, device=context.device)
    group = context.storage_mesh.get_group("tp")
    found = []
    for call in (lambda: context.axes.tp.fan_in(x), lambda: dist.all_reduce(x, group=group)):
        runs = []
        for _ in range(6):
            x.fill_(0.0)
            table.everybody("")
            _synchronise(x)
            began = time.perf_counter()
            for _ in range(100):
                call()
            _synchronise(x)
            runs.append((time.perf_counter() - began) * 1e4)
        found.append(statistics.median(runs[1:]))
    return ", ".join(f"{us:.1f}" for us in found), "ok"


def _synchronise(x: Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()

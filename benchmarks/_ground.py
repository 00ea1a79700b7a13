"""What the parts of ``ground_check.py`` share: tiny models of odd sizes, ragged batches, rows of the table."""

import json
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from colonnade.config import ModelConfig, Plan
from colonnade.errors import ColonnadeError
from colonnade.model import IGNORE, Packed, Transformer, initialise
from colonnade.parallel.axis import SOLO_AXES, Axes
from colonnade.parallel.distributed_context import DistributedContext

EXACT = 1e-10
"""Tolerance of float64 parity, relative to the larger of 1 and the reference."""

_ODD: dict[str, Any] = {"vocab_size": 257, "layers": 2, "width": 22, "ffn_width": 102, "context": 64, "head_width": 6}
GPT2 = ModelConfig(
    family="gpt2", heads=4, positions="learned", norm="layernorm", activation="gelu_tanh", gated=False,
    qkv_bias=True, out_bias=True, ffn_bias=True, tied=True, **_ODD,
)  # fmt: skip
"""Biases everywhere, tied: 257 rows and 102 units over tp=4 are 65, 65, 65, 62 and 26, 26, 26, 24."""
QWEN3 = ModelConfig(family="qwen3", heads=8, kv_heads=4, qk_norm=True, **_ODD)
"""Grouped heads, norms of queries and keys (PARTIAL), untied."""
MODELS = {"gpt2, tied, biases": GPT2, "qwen3, grouped, q/k norms": QWEN3}


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    part: str
    """The letter of the check in the design's layout notes."""
    check: str
    """What was done, and over which plan."""
    world: int
    """Processes."""
    figure: str
    """The worst error, or the counts."""
    verdict: str
    """ok, or what is wrong."""
    seconds: float = 0.0
    """What the check took."""

    def flat(self) -> dict[str, str | int | float]:
        """For the report."""
        return asdict(self)


class Table:
    """Runs checks; rank 0 prints and writes each row at once, in case a later check kills the run."""

    def __init__(self, context: DistributedContext, stack: ExitStack, scratch: str, compiler: str, kept: str):
        self.context, self.scratch, self.compiler, self.kept = context, scratch, compiler, Path(kept)
        self._control = dist.new_group(backend="gloo") if context.world > 1 else None
        self._stack = stack
        self._grounds: dict[Plan, DistributedContext] = {}

    def on(self, plan: Plan) -> DistributedContext:
        """This world laid out by ``plan``; made once, since each lays its own communicators."""
        if plan not in self._grounds:
            self._grounds[plan] = self._stack.enter_context(DistributedContext.build(plan, self.context.device.type))
        return self._grounds[plan]

    def run(self, part: str, check: str, work: Callable[[], tuple[str, str]]) -> None:
        """``work`` returns (figure, verdict); what it raises becomes the row's verdict.

        All ranks hear of each other's verdicts, so that the row holds the first that is not "ok".
        """
        began = time.perf_counter()
        try:
            figure, verdict = work()
        except (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, ColonnadeError) as why:
            figure, verdict = "", f"raises {type(why).__name__}: {first_line(why)}"
        verdict = next((said for said in self.everybody(verdict) if said != "ok"), "ok")
        row = Row(part, check, self.context.world, figure, verdict, round(time.perf_counter() - began, 2))
        if self.context.rank == 0:
            with self.kept.open("a") as file:
                file.write(json.dumps(row.flat()) + "\n")
            print(f"({part}) world {row.world} | {check} | {figure} | {verdict} | {row.seconds:.1f} s", flush=True)

    def everybody(self, value: Any) -> list[Any]:
        """Each rank's ``value``, over gloo; also the way to wait for all."""
        if self._control is None:
            return [value]
        values: list[Any] = [None] * self.context.world
        dist.all_gather_object(values, value, group=self._control)
        return values


def first_line(why: BaseException) -> str:
    """What an exception says, in short."""
    return next(iter(str(why).strip().splitlines()), "")[:200]


def exact(error: float, tolerance: float = EXACT) -> tuple[str, str]:
    """An error as a row's (figure, verdict)."""
    return f"{error:.1e}", "ok" if error <= tolerance else f"WRONG: {error:.1e} is above {tolerance:.0e}"


def difference(got: Tensor, want: Tensor) -> float:
    """max |got - want| relative to max(1, max |want|); infinite where a number is not finite."""
    got, want = whole_of(got), whole_of(want)
    assert got.shape == want.shape, f"shape {tuple(got.shape)} against {tuple(want.shape)}"
    if not want.numel():
        return 0.0
    error = (got.to(want) - want).abs().max().item() / max(1.0, want.abs().max().item())
    return float("inf") if math.isnan(error) else error


def whole_of(x: Tensor) -> Tensor:
    """A plain tensor; what FSDP shards is gathered."""
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


def build(
    config: ModelConfig, device: torch.device, axes: Axes = SOLO_AXES, *, dtype: torch.dtype = torch.float64
) -> Transformer:
    """An initialised model; larger weights than usual, so that a wrong sum shows."""
    return initialise(Transformer(config.but(init_std=0.1), axes, device=device, dtype=dtype), 7)


@dataclass(frozen=True)
class Batch:
    """A micro-batch of ragged documents."""

    tokens_T: Tensor
    positions_T: Tensor
    targets_T: Tensor
    cu_seqlens: Tensor
    longest: int
    equal: bool

    @property
    def attend(self) -> Packed:
        """Who sees whom."""
        return Packed(self.cu_seqlens, self.longest, self.equal)

    def to(self, device: torch.device) -> "Batch":
        """On a device."""
        names = ("tokens_T", "positions_T", "targets_T", "cu_seqlens")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})


def batch_of(lengths: list[int], vocab_size: int, seed: int, ignored: float = 0.2) -> Batch:
    """Random documents of these lengths; a share of the targets does not count."""
    generator = torch.Generator().manual_seed(seed)
    tokens_T, targets_T = torch.randint(0, vocab_size, (2, sum(lengths)), generator=generator)
    targets_T = torch.where(torch.rand(sum(lengths), generator=generator) < ignored, IGNORE, targets_T)
    packed = Packed.of(lengths)
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    return Batch(tokens_T, positions_T, targets_T, packed.cu_seqlens, packed.longest, packed.equal)


def ragged(vocab_size: int, seed: int) -> Batch:
    """Three documents of 1 to 8 tokens."""
    lengths = torch.randint(1, 9, (3,), generator=torch.Generator().manual_seed(seed)).tolist()
    return batch_of(lengths, vocab_size, seed, ignored=0.2 * (seed % 4))

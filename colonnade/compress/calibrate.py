"""Calibration: the statistics of each matrix's inputs over some text, one block at a time.

    H = (2/N) Σ x xᵀ,   mean|x|,   max|x|           of N rows x that enter the matrix

:class:`InputStatistics` gathers these while a block runs: hooks see what enters every linear layer, and an expert's
rows are computed again to see what enters its down projection. An expert that few tokens choose adds the statistics of
its layer: H_e + n₀/(n_e + n₀) · H_layer, with n₀ the number of inputs. On several ranks, each runs its share of the
texts (:mod:`colonnade.compress.ranks`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colonnade.compress.ranks import slots, sum_over, tree_sum
from colonnade.kernels.experts.reference import ACTIVATIONS
from colonnade.model import Packed, Stream, Transformer
from colonnade.model.moe import Routing
from colonnade.model.moe.experts import ExpertRows, Experts
from colonnade.model.output_heads import Hidden
from colonnade.model.tensor_parallel_linear import Linear
from colonnade.parallel.axis import Axis


@dataclass
class Moments:
    """Sums over the input rows of a matrix."""

    outer_DD: Tensor
    abs_D: Tensor
    max_D: Tensor
    rows: int = 0

    @staticmethod
    def of(inputs: int, device: torch.device) -> "Moments":
        """Empty sums for a matrix with this number of ``inputs``."""
        exact = torch.float32 if device.type == "cuda" else torch.float64
        zeros = torch.zeros(inputs, dtype=exact, device=device)
        return Moments(torch.zeros(inputs, inputs, dtype=exact, device=device), zeros, zeros.clone())

    def add(self, x_TD: Tensor) -> None:
        """Add rows."""
        x_TD = x_TD.detach().reshape(-1, x_TD.shape[-1]).to(self.outer_DD.dtype)
        if not len(x_TD):
            return
        self.outer_DD.addmm_(x_TD.T, x_TD)
        self.abs_D += x_TD.abs().sum(0)
        self.max_D = torch.maximum(self.max_D, x_TD.abs().amax(0))
        self.rows += len(x_TD)

    def __add__(self, other: "Moments") -> "Moments":
        """The sums over the rows of both."""
        highest_D = torch.maximum(self.max_D, other.max_D)
        return Moments(self.outer_DD + other.outer_DD, self.abs_D + other.abs_D, highest_D, self.rows + other.rows)

    def all_reduce(self, dp: Axis) -> "Moments":
        """The sums over the rows of all ranks."""
        if dp.size == 1:
            return self
        outer_DD, abs_D = sum_over(dp, self.outer_DD), sum_over(dp, self.abs_D)
        return Moments(outer_DD, abs_D, dp.max_(self.max_D), sum(dp.all_gather_int(self.rows, self.abs_D.device)))

    @property
    def hessian(self) -> Tensor:
        """H."""
        return self.outer_DD * (2 / max(1, self.rows))

    @property
    def mean_abs(self) -> Tensor:
        """mean|x|."""
        return self.abs_D / max(1, self.rows)

    def scaled(self, scale_D: Tensor) -> "Moments":
        """The sums for x / scale."""
        s = scale_D.to(self.outer_DD.dtype)
        return Moments(self.outer_DD / (s[:, None] * s), self.abs_D / s, self.max_D / s, self.rows)


class InputStatistics:
    """The moments of all linear layers and experts of a block, by the module's name."""

    def __init__(self, block: nn.Module):
        self.block = block
        self.linears: dict[str, Moments] = {}
        self.experts: dict[str, dict[str, list[Moments]]] = {}
        """By module: the moments of each expert's inputs, for up and gate ("up") and for "down"."""

    @contextmanager
    def gather(self) -> Iterator[None]:
        """Gather while the block runs."""
        wrapped, handles = [], []
        for name, module in self.block.named_modules():
            if isinstance(module, Linear) and not module.never_quantise:
                record = self._recorder(name, module.weight)
                for method in ("forward", "product"):
                    setattr(module, method, _recording(getattr(module, method), record))
                wrapped.append(module)
            elif isinstance(module, Experts):
                up = module.up
                E, f, D = up.shape
                self.experts[name] = {
                    part: [Moments.of(inputs, up.device) for _ in range(E)] for part, inputs in (("up", D), ("down", f))
                }
                handles.append(module.register_forward_pre_hook(self._expert_hook(name)))
        try:
            yield
        finally:
            for module in wrapped:
                del module.forward, module.product
            for handle in handles:
                handle.remove()

    def __add__(self, other: "InputStatistics") -> "InputStatistics":
        """The statistics over the texts of both."""
        return self._each(lambda mine, theirs: mine + theirs, other)

    def all_reduce(self, dp: Axis) -> "InputStatistics":
        """The statistics over the texts of all ranks."""
        return self if dp.size == 1 else self._each(lambda mine, _: mine.all_reduce(dp), self)

    def _each(self, run: Callable[[Moments, Moments], Moments], other: "InputStatistics") -> "InputStatistics":
        result = InputStatistics(self.block)
        result.linears = {name: run(mine, other.linears[name]) for name, mine in self.linears.items()}
        for name, parts in self.experts.items():
            result.experts[name] = {
                part: [run(mine, theirs) for mine, theirs in zip(stack, other.experts[name][part], strict=True)]
                for part, stack in parts.items()
            }
        return result

    def expert_hessians(self, name: str, part: str) -> list[Tensor]:
        """H of each expert's ``part`` (up or down), including the share of its layer."""
        moments = self.experts[name][part]
        inputs = len(moments[0].abs_D)
        layer = sum(each.outer_DD for each in moments) * (2 / max(1, sum(each.rows for each in moments)))
        return [each.hessian + inputs / (each.rows + inputs) * layer for each in moments]

    def _recorder(self, name: str, weight: Tensor) -> Callable[[Tensor], None]:
        moments = self.linears.setdefault(name, Moments.of(weight.shape[1], weight.device))
        return moments.add

    def _expert_hook(self, name: str) -> Callable[[nn.Module, tuple[ExpertRows, ...]], None]:
        def hook(module: nn.Module, arguments: tuple[ExpertRows, ...]) -> None:
            assert isinstance(module, Experts)
            rows = arguments[0]
            order_R, ends_e = rows.order or module._sorted(rows, None)
            up, down, gate, up_b, gate_b, _ = module.stored
            assert isinstance(up, Tensor)
            assert isinstance(down, Tensor)
            x_RD, act, start = rows.x_TD[order_R // rows.weights_TA.shape[1]], ACTIVATIONS[module.activation], 0
            for e, end in enumerate(ends_e.tolist()):
                x_cD = x_RD[start:end]
                h_cf = x_cD @ up[e].T + (0 if up_b is None else up_b[e])
                if gate is None:
                    h_cf = act(h_cf)
                else:
                    assert isinstance(gate, Tensor)
                    h_cf = act(x_cD @ gate[e].T + (0 if gate_b is None else gate_b[e])) * h_cf
                self.experts[name]["up"][e].add(x_cD)
                self.experts[name]["down"][e].add(h_cf)
                start = end

        return hook


def _recording(run: Callable[[Tensor], Tensor], record: Callable[[Tensor], None]) -> Callable[[Tensor], Tensor]:
    def recording(x: Tensor) -> Tensor:
        record(x)
        return run(x)

    return recording


class BlockRunner:
    """Runs one block after another over this rank's calibration texts, and keeps their activations."""

    def __init__(self, model: Transformer, texts: Sequence[Tensor]):
        self.model, self.dp = model, model.axes.dp
        device = next(model.parameters()).device
        self._slots: list[list[tuple[Stream, Packed, Tensor]]] = []
        """(stream, attend, residual stream) of the texts of each slot; after the last block, the normed one."""
        for slot in slots(texts, self.dp):
            self._slots.append([])
            for tokens_T in slot:
                T = len(tokens_T)
                stream = Stream(tokens_T.to(device), torch.arange(T, device=device), routing=self._routing(T, device))
                attend = Packed.of([T], device, causal=model.config.causal)
                x_TD = model.run(range(0), None, stream, attend, Hidden())
                self._slots[-1].append((stream, attend, x_TD))

    @property
    def hidden(self) -> list[Tensor]:
        """The residual stream of each of this rank's texts."""
        return [x_TD for slot in self._slots for _, _, x_TD in slot]

    def gather(self, layer: int) -> InputStatistics:
        """The statistics of block ``layer`` over all ranks' texts."""
        block = self.model.blocks.get_submodule(str(layer))

        def of(slot: list[tuple[Stream, Packed, Tensor]]) -> InputStatistics:
            statistics = InputStatistics(block)
            with statistics.gather():
                for text in slot:
                    self._run(layer, *text)
            return statistics

        return tree_sum(map(of, self._slots), lambda a, b: a + b).all_reduce(self.dp)

    def advance(self, layer: int) -> None:
        """Replace the texts' activations with the outputs of block ``layer``."""
        self._slots = [
            [(stream, attend, self._run(layer, stream, attend, x_TD)) for stream, attend, x_TD in slot]
            for slot in self._slots
        ]

    def hidden_moments(self) -> Moments:
        """The moments of the activations of all ranks' texts."""

        def of(slot: list[tuple[Stream, Packed, Tensor]]) -> Moments:
            moments = Moments.of(self.model.config.width, next(self.model.parameters()).device)
            for _, _, x_TD in slot:
                moments.add(x_TD)
            return moments

        return tree_sum(map(of, self._slots), lambda a, b: a + b).all_reduce(self.dp)

    def _run(self, layer: int, stream: Stream, attend: Packed, x_TD: Tensor) -> Tensor:
        fresh = stream._replace(routing=self._routing(len(x_TD), x_TD.device))
        return self.model.run(range(layer, layer + 1), x_TD, fresh, attend, Hidden())

    def _routing(self, T: int, device: torch.device) -> Routing | None:
        return None if self.model.config.moe is None else Routing(torch.arange(T, device=device))

"""Calibration: the statistics of each matrix's inputs over some texts, one block at a time.

    H = (2/N) Σ x xᵀ,   mean|x|,   max|x|           of N rows x that enter the matrix

:class:`InputStatistics` gathers these while a block runs: hooks see what enters every linear layer, and an expert's
rows are computed again to see what enters its down projection. An expert that few tokens choose borrows from its
layer: H_e + n₀/(n_e + n₀) · H_layer, with n₀ the number of inputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colonnade.kernels.experts.reference import ACTIVATIONS
from colonnade.model import Packed, Stream, Transformer
from colonnade.model.moe import Routing
from colonnade.model.moe.experts import ExpertRows, Experts
from colonnade.model.output_heads import Hidden
from colonnade.model.tensor_parallel_linear import Linear


@dataclass
class Moments:
    """Sums over the rows that have entered a matrix."""

    outer_DD: Tensor
    abs_D: Tensor
    max_D: Tensor
    rows: int = 0

    @staticmethod
    def of(inputs: int, device: torch.device) -> "Moments":
        """Empty sums for a matrix of so many ``inputs``."""
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

    @property
    def hessian(self) -> Tensor:
        """H."""
        return self.outer_DD * (2 / max(1, self.rows))

    @property
    def mean_abs(self) -> Tensor:
        """mean|x|."""
        return self.abs_D / max(1, self.rows)

    def scaled(self, scale_D: Tensor) -> "Moments":
        """Those of x / scale."""
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
                handles.append(module.register_forward_pre_hook(self._expert_hook(name)))
        try:
            yield
        finally:
            for module in wrapped:
                del module.forward, module.product
            for handle in handles:
                handle.remove()

    def expert_hessians(self, name: str, part: str) -> list[Tensor]:
        """H of each expert's ``part`` (up or down), with what it borrows from its layer."""
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
            E, f, D = up.shape
            if name not in self.experts:
                self.experts[name] = {
                    part: [Moments.of(inputs, up.device) for _ in range(E)] for part, inputs in (("up", D), ("down", f))
                }
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
    """Runs one block after another over all calibration texts, whose activations are kept in between."""

    def __init__(self, model: Transformer, texts: Sequence[Tensor]):
        self.model = model
        device = next(model.parameters()).device
        self._inputs = []
        self.hidden: list[Tensor] = []
        """The residual stream of each text; after the last block, the normed one."""
        for tokens_T in texts:
            T = len(tokens_T)
            positions_T = torch.arange(T, device=device)
            stream = Stream(tokens_T.to(device), positions_T, routing=self._routing(T, device))
            attend = Packed.of([T], device, causal=model.config.causal)
            self._inputs.append((stream, attend))
            self.hidden.append(model.run(range(0), None, stream, attend, Hidden()))

    def run(self, layer: int) -> list[Tensor]:
        """The outputs of block ``layer``."""
        outputs = []
        for x_TD, (stream, attend) in zip(self.hidden, self._inputs, strict=True):
            fresh = stream._replace(routing=self._routing(len(x_TD), x_TD.device))
            outputs.append(self.model.run(range(layer, layer + 1), x_TD, fresh, attend, Hidden()))
        return outputs

    def _routing(self, T: int, device: torch.device) -> Routing | None:
        return None if self.model.config.moe is None else Routing(torch.arange(T, device=device))

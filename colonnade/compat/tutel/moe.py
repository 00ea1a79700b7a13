"""``moe_layer``: gate, capacity, all-to-all, experts, all-to-all, sum, under Tutel's names (arXiv 2206.03382).

    x_TD → y_ECD → repeated r times, (W, n, rC/Sh, D) → all-to-all → experts → all-to-all back → summed over r → y_TD

Expert e is on ranks e·Sh … e·Sh + Sh − 1 of the group, for every r. :mod:`colonnade.compat.tutel` lists how this
differs from Tutel. The functions of :mod:`~colonnade.compat.tutel.routing` are exported for programs that write the
layer out themselves.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from colonnade.compat.tutel.experts import EXPERTS, make_experts, make_gate
from colonnade.compat.tutel.gates import GATES, gshard_loss, load_importance_loss
from colonnade.compat.tutel.routing import (
    Critical,
    extract_critical,
    fast_cumsum_sub_one,
    fast_decode,
    fast_dispatcher,
    fast_encode,
    route,
    top_k_routing,
)
from colonnade.config.base import did_you_mean
from colonnade.config.model import divisors
from colonnade.errors import CheckpointError, ConfigError, PlanError
from colonnade.parallel.process_groups import Group, all_ranks, axis_of, make_all_to_all

__all__ = [
    "MOELayer",
    "extract_critical",
    "fast_cumsum_sub_one",
    "fast_decode",
    "fast_dispatcher",
    "fast_encode",
    "moe_layer",
    "top_k_routing",
]


class MOELayer(nn.Module):
    """Tutel's MoE layer, from (…, D) to (…, D), with ``y.l_aux``, the balance loss of this rank's tokens."""

    def __init__(
        self,
        gate_type: Any,
        model_dim: int,
        experts: Mapping[str, Any] | None = None,
        scan_expert_func: Callable[[str, nn.Parameter], Any] | None = None,
        result_func: Callable[[Tensor], Any] | None = None,
        group: Group = None,
        seeds: Sequence[int | None] | None = None,
        a2a_ffn_overlap_degree: int = 1,
        is_postscore: bool = True,
        batch_prioritized_routing: bool = False,
        normalize_gate: bool = True,
        is_gshard_loss: bool = True,
        parallel_type: str = "adaptive:1",
        use_2dh: bool = False,
        pad_samples: bool = False,
        load_loss_input: Literal["probabilities", "logits"] = "probabilities",
    ):
        """Tutel's arguments, and ``load_loss_input``: what the load loss of ``is_gshard_loss=False`` compares with the
        noisy logits, probabilities (Tutel) or logits (Riquelme 2021).
        """
        super().__init__()
        if not experts:
            raise ConfigError("no experts; pass experts={'type': 'ffn', 'hidden_size_per_expert': …}")
        if load_loss_input not in (inputs := ["probabilities", "logits"]):
            raise ConfigError(
                f"there is no load_loss_input '{load_loss_input}'" + did_you_mean(load_loss_input, inputs)
            )
        self.group = all_ranks() if group is None else group
        self.world_size = axis_of(self.group).size
        self.model_dim, self.result_func = model_dim, result_func
        self.is_postscore, self.normalize_gate = is_postscore, normalize_gate
        self.batch_prioritized_routing, self.is_gshard_loss = batch_prioritized_routing, is_gshard_loss
        self.load_loss_input = load_loss_input
        self.use_2dh, self.megablocks_size = use_2dh, 0
        self.a2a_ffn_overlap_degree = _overlap(a2a_ffn_overlap_degree)
        self.l_aux: Tensor | None = None
        self.dispatch_count: Tensor | None = None

        options = dict(experts)
        local = options.pop("num_experts_per_device", 1)
        local = options.pop("count_per_node", local)
        self._count = self.global_expert_count(local, self.group)
        self.register_buffer("_num_global_experts", torch.tensor(self._count))
        self.num_local_experts = max(1, self._count // self.world_size)
        self.sharded_count = max(1, self.world_size // self._count)
        self.valid_rs = [0, *divisors(self.sharded_count)]
        self.adaptive_degree = self._degree_of(parallel_type)

        _seed(seeds, 0, 1)
        self.experts = make_experts(options, model_dim, self.num_local_experts, self.sharded_count)
        # Only built-in experts are known to be correct for every r.
        self.auto_parallel = parallel_type == "auto" and isinstance(self.experts, tuple(EXPERTS.values()))
        for name, p in self.experts.named_parameters():
            if scan_expert_func is not None:
                scan_expert_func(name, p)
            p._tutel_expert = True  # pyrefly: ignore[missing-attribute]
        kinds = gate_type if isinstance(gate_type, list) else [gate_type]
        self.gates = nn.ModuleList()
        for i, kind in enumerate(kinds):
            _seed(seeds, i, 0)
            self.gates.append(make_gate(kind, model_dim, self._count))
            if not is_gshard_loss and self.gates[i].gate_noise <= 0:  # pyrefly: ignore[unsupported-operation]
                raise ConfigError(
                    "is_gshard_loss=False computes the load under noise; set the gate's gate_noise above 0"
                )
        _seed(seeds, 0, 2)

    # -- configuration -----------------------------------------------------------------------------------------------

    @staticmethod
    def global_expert_count(num_local_experts: float, group: Group = None) -> int:
        """E for n experts per rank: n·W; for −k, or 1/k: W/k. Raises :class:`PlanError` if that is not an integer."""
        world, n = axis_of(group).size, num_local_experts
        if 0 < n < 1:
            n = -round(1 / n)
        if n == 0 or n != int(n):
            raise PlanError(
                f"{num_local_experts} experts per device: use a whole number, or -k (1/k) for k devices per expert"
            )
        if n > 0:
            return int(n) * world
        if world % int(-n):
            raise PlanError(f"{world} ranks are not divisible by {int(-n)} ranks per expert; use a divisor of {world}")
        return world // int(-n)

    @property
    def num_global_experts(self) -> int:
        """E."""
        return self._count

    def _degree_of(self, parallel_type: str) -> int:
        kind, _, number = parallel_type.partition(":")
        degrees = {"data": 1, "model": self.sharded_count, "auto": 1}
        if kind == "adaptive" and re.fullmatch(r"-?\d+", number):
            return self._valid(min(max(int(number), 0), self.sharded_count))
        if parallel_type not in degrees:
            raise ConfigError(
                f"there is no parallel_type '{parallel_type}'" + did_you_mean(parallel_type, ["adaptive:1", *degrees])
            )
        return degrees[parallel_type]

    def _valid(self, degree: int) -> int:
        if degree not in self.valid_rs:
            raise PlanError(
                f"{self.sharded_count} ranks per expert allow degrees {self.valid_rs}, not {degree}; use one of these"
            )
        return degree

    def extra_repr(self) -> str:
        """Describe the layer for print."""
        gates = [f"k={getattr(gate, 'top_k', None)}, noise={gate.gate_noise}" for gate in self.gates]
        return f"Top-K(s) = {gates}, Total-Experts = {self._count} [managed by {self.world_size} device(s)],"

    def get_parameter_iterator(self, param_type: str) -> Iterator[tuple[str, nn.Parameter]]:
        """The named parameters of the 'gate' or of the 'local_experts'."""
        parts = {"gate": self.gates, "local_experts": self.experts}
        if param_type not in parts:
            raise ConfigError(f"there are no parameters of type '{param_type}'" + did_you_mean(param_type, list(parts)))
        return parts[param_type].named_parameters()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        stored = state_dict.setdefault(prefix + "_num_global_experts", self._num_global_experts)
        if int(stored) != self._count:
            raise CheckpointError(
                f"the state has {int(stored)} experts at '{prefix}', this layer {self._count}; they must agree"
            )
        for name, p in self.experts.named_parameters():
            value = state_dict.get(f"{prefix}experts.{name}")
            if value is not None and value.numel() == p.numel():
                state_dict[f"{prefix}experts.{name}"] = value.view(p.shape)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    # -- computation -----------------------------------------------------------------------------------------------

    def forward(
        self,
        input: Tensor,  # noqa: A002
        gate_index: int = 0,
        capacity_factor: float | None = None,
        top_k: int | None = None,
        a2a_ffn_overlap_degree: int | None = None,
        reserve_dims: int = 1,
        inequivalent_tokens: bool = False,
        adaptive_r: int | None = None,
        megablocks_size: int = 0,
    ) -> Any:
        """y, or the result of ``result_func``; ``a2a_ffn_overlap_degree`` and ``adaptive_r`` persist for later calls.

        Raises :class:`ConfigError` and :class:`PlanError` for impossible arguments.
        """
        if input.dim() < max(2, reserve_dims + 1):
            raise ConfigError(f"an input of shape {tuple(input.shape)}; pass (tokens …, {self.model_dim})")
        if not 0 <= gate_index < len(self.gates):
            raise ConfigError(
                f"there is no gate {gate_index} among {len(self.gates)}; use gate_index 0 to {len(self.gates) - 1}"
            )
        if a2a_ffn_overlap_degree is not None:
            self.a2a_ffn_overlap_degree = _overlap(a2a_ffn_overlap_degree)
        if adaptive_r is not None:
            self.adaptive_degree, self.auto_parallel = self._valid(adaptive_r), False
        tail = input.shape[-reserve_dims:]
        if self.gates[gate_index].__class__ in GATES.values() and tail.numel() != self.model_dim:
            raise ConfigError(
                f"the last {reserve_dims} dimensions (reserve_dims) of an input of shape {tuple(input.shape)} are "
                f"{tail.numel()} numbers, the layer's model_dim is {self.model_dim}; reshape the input"
            )
        sparse = self.num_local_experts > 1 and self.world_size == 1 and not torch.is_grad_enabled()
        self.megablocks_size = megablocks_size if sparse else 0

        x_TD = self._to_expert_dtype(input.reshape(-1, tail.numel()))
        kind, crit, l_aux = self._route(x_TD, self.gates[gate_index], capacity_factor, top_k)
        self.dispatch_count = crit[-1]
        weighed_TD = x_TD if self.is_postscore else x_TD.to(kind)
        y_ECD = fast_encode(weighed_TD, crit, self.is_postscore).to(x_TD.dtype)
        if self.auto_parallel:
            self.adaptive_degree = self._cheapest(y_ECD.numel())
        y_ECD = self.expert_local(y_ECD, tail) if self.adaptive_degree == 0 else self._exchanged(y_ECD, tail)
        y_TD = fast_decode(y_ECD.to(kind), crit, self.is_postscore)
        y = y_TD.view(*input.shape[:-reserve_dims], *self.protected_shape[-reserve_dims:]).to(input.dtype)
        self.l_aux = y.l_aux = l_aux  # pyrefly: ignore[missing-attribute]
        return y if self.result_func is None else self.result_func(y)

    def _to_expert_dtype(self, x: Tensor) -> Tensor:
        """``x`` in the experts' dtype."""
        if torch.is_autocast_enabled(x.device.type):
            return x.to(torch.get_autocast_dtype(x.device.type))
        first = next(self.experts.parameters(), None)
        return x if first is None else x.to(first.dtype)

    def _route(
        self, x_TD: Tensor, gate: nn.Module, factor: float | None, top_k: int | None
    ) -> tuple[torch.dtype, Critical, Tensor | None]:
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = noisy_TE = gate(x_TD)
            noise = float(gate.gate_noise)  # pyrefly: ignore[bad-argument-type]
            if self.training and noise > 0:
                noisy_TE = logits_TE + noise * torch.randn_like(logits_TE) / self._count

            def loss(scores_TE: Tensor, ids_TA: Tensor) -> Tensor:
                if self.is_gshard_loss:
                    return gshard_loss(scores_TE, ids_TA)
                kept_TA = noisy_TE.gather(1, ids_TA)
                return load_importance_loss(logits_TE, kept_TA, self._count, noise, self.load_loss_input)

            top_k = getattr(gate, "top_k", None) if top_k is None else top_k  # pyrefly: ignore[bad-assignment]
            if top_k is None:
                raise ConfigError("the gate has no top_k; set it, or pass top_k with the call")
            rows = max(self.megablocks_size, 1)
            factor = float(gate.capacity_factor if factor is None else factor)  # pyrefly: ignore[bad-argument-type]
            gathered = self.sharded_count > 1 or not self.adaptive_degree
            same = {
                "model_dim": x_TD.shape[1], "num_experts_per_device": self._count / self.world_size,
                "top_k": min(top_k, self._count), "capacity_factor": factor, "adaptive_r": self.adaptive_degree,
                "a2a_ffn_overlap_degree": self.a2a_ffn_overlap_degree, "bytes of an element": x_TD.itemsize,
                "parameters of experts": sum(p.numel() for p in self.experts.parameters()) if gathered else 0,
            }  # fmt: skip
            multiple = _multiple(
                -(-self.sharded_count * self.a2a_ffn_overlap_degree // rows) * rows, self.sharded_count
            )
            crit, l_aux = route(
                noisy_TE.softmax(1), top_k, loss, factor, self.batch_prioritized_routing, self.normalize_gate, multiple,
                self.group, inequivalent_tokens=self.world_size > 1, same=same,
            )  # fmt: skip
        return logits_TE.dtype, crit, l_aux

    def _cheapest(self, elements: int) -> int:
        """The r that moves the least in a step (Tutel, section 4.1): r = 0 all weights, others tokens and weights."""
        weights = self.world_size * sum(p.numel() for p in self.experts.parameters())

        def moved(r: int) -> float:
            return 2 * weights if r == 0 else 4 * elements * r + 2 * weights / (self._count * r)

        return min(self.valid_rs, key=moved)

    def expert_local(self, x: Tensor, reserve_shape: Sequence[int]) -> Tensor:
        """Applies the experts to their rows (experts, rows, D), with the last dimension viewed as ``reserve_shape``."""
        y = self.experts(x.view(x.shape[0], x.shape[1], *reserve_shape), self)
        self.protected_shape = y.shape
        return y.reshape(y.shape[0], y.shape[1], y.shape[2:].numel())

    def _exchanged(self, y_ECD: Tensor, tail: Sequence[int]) -> Tensor:
        """All-to-all, experts, all-to-all back; in p chunks, each exchanged while the previous one is computed."""
        (all_to_all, sizes), r = make_all_to_all(self.group, two_steps=self.use_2dh), self.adaptive_degree
        W, n, (_, C, D) = self.world_size, self.num_local_experts, y_ECD.shape
        parts = y_ECD.repeat(1, r, 1).view(W, n, r * C // self.sharded_count, D)
        parts = parts.chunk(self.a2a_ffn_overlap_degree if W > 1 else 1, dim=2)
        pending, back = all_to_all.begin(parts[0], sizes), []
        for i, part in enumerate(parts):
            arriving, rows = pending, part.shape[2]
            if i + 1 < len(parts):
                pending = all_to_all.begin(parts[i + 1], sizes)
            x = all_to_all.finish(arriving, sizes).transpose(0, 1).reshape(n, W * rows, D)
            y = self.expert_local(x, tail)
            y = y.view(n, W, rows, y.shape[2]).transpose(0, 1)
            back.append(all_to_all.begin_return(y, sizes))
        y = torch.cat([all_to_all.finish_return(returning, sizes) for returning in back], dim=2)
        y = y.reshape(self._count, r, C, y.shape[3])
        return y.squeeze(1) if r == 1 else y.sum(1)  # the partial results of r hidden slices


def _overlap(parts: int) -> int:
    if parts < 1:
        raise ConfigError(f"a2a_ffn_overlap_degree={parts}: use 1 for no overlap, or the number of parts")
    return parts


def _multiple(rows: int, shards: int) -> int:
    """Return the multiple to which C is rounded: above 256 in steps of 128 that can be divided over the ``shards``."""
    if rows <= 256:
        return rows
    rows = -(-rows // 128) * 128
    return rows if rows % shards == 0 else rows * shards


def _seed(seeds: Sequence[int | None] | None, offset: int, which: int) -> None:
    """Set one of Tutel's ``seeds``: for shared weights, for this rank's weights, for after the layer."""
    if seeds is not None and len(seeds) > which:
        seed = seeds[which]
        if seed is not None:
            torch.manual_seed(seed + offset)


moe_layer = MOELayer

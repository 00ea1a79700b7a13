"""Routing decisions, dispatch and combine, for programs that write the layer out themselves.

    crit, l_aux = extract_critical(scores_TE, top_k)
    y_ECD = fast_encode(x_TD, crit)          →  experts  →          x_TD = fast_decode(y_ECD, crit)

``crit`` is a tuple (E, indices, locations, gates, C, load_E): for each of the A choices a tensor of T experts, one of T
slots in them, one of T weights; the capacity; the load of each expert. Slots from C on are dropped.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from colonnade.compat.tutel.gates import gshard_loss
from colonnade.errors import ConfigError, PlanError
from colonnade.model.moe.capacity import capacity, global_positions
from colonnade.parallel.process_groups import Group, axis_of

Critical = tuple[int, list[Tensor], list[Tensor], list[Tensor], int, Tensor]


def extract_critical(
    scores: Tensor,
    top_k: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None = gshard_loss,
    capacity_factor: float = 1.0,
    batch_prioritized_routing: bool = False,
    normalize_gate: bool = True,
    alignment: int = 1,
    group: Group = None,
    inequivalent_tokens: bool = False,
) -> tuple[Critical, Tensor | None]:
    """(crit, l_aux) of scores_TE: the ``top_k`` best experts of each token, their slots and weights.

    C is a multiple of ``alignment``; for a ``capacity_factor`` of 0 or less, or with ``inequivalent_tokens``, the ranks
    of ``group`` agree on it. Raises :class:`ConfigError` for a positive factor that leaves no place at all.
    """
    return route(
        scores, top_k, loss_fn, capacity_factor, batch_prioritized_routing, normalize_gate, alignment, group,
        inequivalent_tokens=inequivalent_tokens,
    )  # fmt: skip


def route(
    scores: Tensor,
    top_k: int,
    loss_fn: Callable[[Tensor, Tensor], Tensor] | None,
    capacity_factor: float,
    batch_prioritized_routing: bool,
    normalize_gate: bool,
    alignment: int,
    group: Group,
    *,
    inequivalent_tokens: bool,
    same: Mapping[str, float] = MappingProxyType({}),
) -> tuple[Critical, Tensor | None]:
    """:func:`extract_critical`, which in the same message also compares the values that must be the ``same`` on all
    ranks: raises :class:`PlanError` on each, before tensors of unequal shapes are sent.
    """
    T, E = scores.shape
    if top_k < 1:
        raise ConfigError(f"top_k={top_k}: a token goes to at least 1 expert")
    ids_TA = scores.topk(min(top_k, E), dim=1).indices
    weights_TA = scores.gather(1, ids_TA)
    l_aux = None if loss_fn is None else loss_fn(scores, ids_TA)
    place_TA = global_positions(ids_TA, E)
    if batch_prioritized_routing:
        order_T = scores.detach().amax(1).argsort(descending=True, stable=True)
        place_TA = torch.empty_like(place_TA).index_copy_(0, order_T, global_positions(ids_TA[order_T], E))
    if ids_TA.shape[1] > 1 and normalize_gate:
        weights_TA = weights_TA / weights_TA.sum(1, keepdim=True).clamp(min=torch.finfo(scores.dtype).eps)
    load_E = torch.zeros(E, dtype=torch.int64, device=scores.device)
    load_E = load_E.index_add(0, ids_TA.flatten(), torch.ones_like(ids_TA.flatten()))
    axis, largest = axis_of(group), 0
    if capacity_factor <= 0 or inequivalent_tokens:
        local = load_E.new_tensor([T, *same.values(), *(-value for value in same.values())], dtype=torch.float64)
        most, *extremes, heaviest = axis.max_(torch.cat([local, load_E.max().double()[None]])).tolist()
        _check_same(same, extremes)
        T, largest = (int(most) if inequivalent_tokens else T), int(heaviest)
    C = capacity(capacity_factor, ids_TA.shape[1], T, E, largest, alignment)
    if T and not C:
        raise ConfigError(
            f"a capacity factor of {capacity_factor:g} leaves no room for {T} tokens in {E} experts; raise it"
        )
    by_choice = [
        list(x_TA.to(kind).unbind(1))
        for x_TA, kind in ((ids_TA, torch.int32), (place_TA, torch.int32), (weights_TA, scores.dtype))
    ]
    return (E, by_choice[0], by_choice[1], by_choice[2], C, load_E), l_aux


def _check_same(same: Mapping[str, float], extremes: Sequence[float]) -> None:
    """``extremes`` are the largest of each of the values on any rank, then the smallest, times −1."""
    for (name, mine), high, negated in zip(same.items(), extremes[: len(same)], extremes[len(same) :], strict=True):
        low = 0 - negated
        if high != low:
            raise PlanError(
                f"ranks that share experts differ in {name}: {low:g} to {high:g}, {mine:g} on this one; set the same "
                "on all of them"
            )


def get_dispatch_count(critial_data: Critical) -> Tensor:
    """load_E: the number of choices of each expert, dropped ones included."""
    return critial_data[-1]


def fast_cumsum_sub_one(data: Tensor, dim: int = 0) -> Tensor:
    """For each 1 in a column of ``data``, count those above it."""
    if data.dim() != 2 or dim != 0:
        raise ConfigError(f"fast_cumsum_sub_one counts along the columns of a matrix, not dim {dim} of {data.dim()}")
    return data.cumsum(0) - 1


class fast_dispatcher:  # noqa: N801
    """Dispatches tokens to their experts' slots (E·C, D), and combines them again.

    With ``is_postscore`` the weights are applied when combining, otherwise when dispatching.
    """

    def __init__(self, num_global_experts: int, capacity: int, model_dim: int, dispatch_dtype: torch.dtype):
        self.num_global_experts, self.capacity = int(num_global_experts), int(capacity)
        self.model_dim, self.dtype = int(model_dim), dispatch_dtype

    def update(
        self,
        indices_: Sequence[Tensor],
        locations_: Sequence[Tensor],
        gates_: Sequence[Tensor],
        capacity: int | None = None,
        is_postscore: bool = True,
    ) -> None:
        """For each choice: the tokens' experts, their slots, their weights."""
        self.capacity = int(capacity or self.capacity)
        self.is_postscore = is_postscore
        ids_TA, place_TA = torch.stack(list(indices_), 1).long(), torch.stack(list(locations_), 1).long()
        self.weights_TA = torch.stack(list(gates_), 1)
        slots = self.num_global_experts * self.capacity
        # One extra slot takes the dropped choices, which avoids a synchronisation with the device.
        self.slot_TA = torch.where(place_TA < self.capacity, ids_TA * self.capacity + place_TA, slots)

    def encode(self, data: Tensor) -> Tensor:
        """Dispatch x_TD to (E·C, D); empty slots are 0."""
        T, A = self.slot_TA.shape
        x_TAD = data.unsqueeze(1).expand(T, A, -1)
        if not self.is_postscore:
            x_TAD = x_TAD * self.weights_TA.unsqueeze(2).to(data.dtype)
        slots = data.new_zeros(self.num_global_experts * self.capacity + 1, data.shape[1])
        return slots.index_add(0, self.slot_TA.flatten(), x_TAD.reshape(T * A, data.shape[1]))[:-1]

    def decode(self, data: Tensor) -> Tensor:
        """Combine (E·C, D) to (T, D); dropped choices count 0."""
        y_TAD = torch.cat([data, data.new_zeros(1, data.shape[1])])[self.slot_TA]
        if self.is_postscore:
            y_TAD = y_TAD * self.weights_TA.unsqueeze(2).to(data.dtype)
        return y_TAD.sum(1)


def _dispatcher(data: Tensor, critial_data: Critical, is_postscore: bool) -> fast_dispatcher:
    E, indices, locations, gates, C, _ = critial_data
    dispatcher = fast_dispatcher(E, C, data.shape[-1], data.dtype)
    dispatcher.update(indices, locations, gates, C, is_postscore)
    return dispatcher


def fast_encode(data: Tensor, critial_data: Critical, is_postscore: bool = True) -> Tensor:
    """x_TD to y_ECD: each expert's tokens in their places."""
    E, C = critial_data[0], critial_data[4]
    return _dispatcher(data, critial_data, is_postscore).encode(data).view(E, C, data.shape[-1])


def fast_decode(data: Tensor, critial_data: Critical, is_postscore: bool = True) -> Tensor:
    """y_ECD, or (E·C, D), to x_TD: each token's choices, summed by their weights."""
    return _dispatcher(data, critial_data, is_postscore).decode(data.reshape(-1, data.shape[-1]))


top_k_routing: Callable[..., Any] = extract_critical

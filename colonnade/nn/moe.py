"""A stand-alone mixture-of-experts layer that returns its output and its losses.

    y = Σ_j w_j · expert_{i_j}(x) + shared(x)      loss = balance_weight · balance + z_weight · z

The same layer as in :class:`colonnade.model.Transformer`, with its routers, capacities and expert parallelism.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from colonnade.config import ModelConfig, MoeConfig
from colonnade.config.model import Activation
from colonnade.errors import ConfigError, PlanError
from colonnade.model.dropout import Dropout, DropoutRates
from colonnade.model.initialise import fill
from colonnade.model.moe import LayerRouting, MixtureOfExperts, Routing, TokenGroups, uses_noise
from colonnade.model.moe.router import find_router, needs_sequences
from colonnade.nn.linear import shared_seed
from colonnade.parallel.axis import SOLO_AXES, Axes


class MoEOutput(NamedTuple):
    """Output and losses of :class:`MoE`."""

    y: Tensor
    """(…, D)."""
    loss: Tensor
    """Scalar to add to the training loss: balance_weight · balance + z_weight · z. 0 in evaluation."""
    balance: Tensor
    """The load-balancing loss, a mean over all ranks' tokens; no gradient."""
    z: Tensor
    """The router z-loss, in the same form."""
    load_E: Tensor
    """int64: how many of this rank's token choices went to each expert, dropped ones included."""
    dropped: Tensor
    """int64: how many of this rank's token choices exceeded an expert's capacity."""


class MoE(nn.Module):
    """An initialised mixture-of-experts layer from (…, D) to :class:`MoEOutput`."""

    def __init__(
        self,
        width: int,
        moe: MoeConfig,
        axes: Axes = SOLO_AXES,
        *,
        activation: Activation = "silu",
        gated: bool = True,
        bias: bool = False,
        init_std: float = 0.02,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        """``moe`` configures router, experts and losses; ``axes.experts`` distributes the experts over ranks.

        ``gated``: SwiGLU when ``activation`` is silu. Weights are N(0, ``init_std``), drawn from torch's generator.
        """
        super().__init__()
        if axes.sequence_parallel:
            raise PlanError("nn.MoE needs all tokens on each tp rank; build the plan without sequence_parallel")
        if moe.pools_layers:
            raise ConfigError(
                "balance_over 'model' is one loss over all layers, but nn.MoE is a single layer; set balance_over "
                "'layer'"
            )
        config = ModelConfig(
            vocab_size=1, layers=1, width=width, heads=1, positions="learned", ffn_width=moe.ffn_width,
            activation=activation, gated=gated, ffn_bias=bias, moe=moe, init_std=init_std,
        )  # fmt: skip
        self.width, self.moe, self.axes = width, moe, axes
        self.layer = MixtureOfExperts(config, moe, axes, device=torch.device(device), dtype=dtype)
        whole = MixtureOfExperts(config, moe, SOLO_AXES, device=torch.device("meta"), dtype=dtype)
        shapes = {f"layer.{name}": x.shape for name, x in (*whole.named_parameters(), *whole.named_buffers())}
        # Data ranks hold copies and tensor ranks shards of the same weights, so all start from one seed.
        self._seed = shared_seed(axes.experts.tokens)
        self._step = 0
        fill(self, axes, shapes, self._seed, std=init_std, residual_std=init_std)

    def forward(
        self,
        x: Tensor,
        *,
        tokens: Tensor | None = None,
        token_groups: TokenGroups | None = None,
        step: int | None = None,
    ) -> MoEOutput:
        """Map (…, D) to y of the same shape and, in training mode, the losses.

        ``tokens``: ids of x's tokens, for the hash router. ``token_groups``: which tokens belong to one sequence or
        task, for routers and losses that need it; by default the rows of a (B, S, D) are sequences. ``step``: counter
        of the router's random numbers; by default calls in training mode are counted, so pass it with activation
        checkpointing.
        """
        if x.dim() < 2 or x.shape[-1] != self.width:
            raise ConfigError(f"an input of shape {tuple(x.shape)}; pass (…, {self.width})")
        if tokens is None and find_router(self.moe).needs_token_ids:
            kind = self.moe.router.kind
            raise ConfigError(f"the {kind} router routes by token ids; pass tokens=ids of the input's tokens")
        x_TD = x.reshape(-1, self.width)
        T, batch = len(x_TD), self.axes.batch
        ids_T = torch.zeros(T, dtype=torch.int64, device=x.device) if tokens is None else tokens.reshape(-1)
        if len(ids_T) != T:
            raise ConfigError(f"{len(ids_T)} token ids for {T} tokens; pass one per token")
        index_T = torch.arange(T, device=x.device)
        noisy = self.training and uses_noise(self.moe)
        if noisy or self.moe.capacity is not None:  # these depend on the token's index over all ranks
            index_T = index_T + sum(batch.all_gather_int(T, x.device)[: batch.rank])
        if token_groups is None and needs_sequences(self.moe):
            token_groups = self._sequences(x)
        noise = None
        if noisy:
            step = self._step if step is None else step
            noise = Dropout.of(self._seed, step, 1, index_T, DropoutRates()).at(0)
            self._step += 1
        if not self.training:
            routing = Routing(index_T, token_groups=token_groups)
            y_TD, report = self.layer(x_TD, T, LayerRouting(ids_T, routing, None), noise)
            zero = y_TD.new_zeros(())
            return MoEOutput(y_TD.view_as(x), zero, report.balance, report.z, report.load_E, report.dropped)
        exact = torch.promote_types(x.dtype, torch.float32)
        weight = torch.zeros((), dtype=exact, device=x.device)
        routing = Routing(index_T, weight, token_groups=token_groups)
        y_TD, report = self.layer(x_TD, T, LayerRouting(ids_T, routing, None), noise)
        value = self.moe.balance_weight * report.balance + self.moe.z_weight * report.z
        tokens_all = batch.sum_(torch.full((), T, device=x.device)).clamp(min=1)
        y_TD, loss = _WithLoss.apply(y_TD, value.to(exact), weight, tokens_all)
        return MoEOutput(y_TD.view_as(x), loss, report.balance, report.z, report.load_E, report.dropped)

    def _sequences(self, x: Tensor) -> TokenGroups:
        """One unit per row of (B, S, D), one for all of (T, D)."""
        T, S = x.shape[:-1].numel(), x.shape[-2]
        ends = torch.arange(0, T + 1, max(S, 1), device=x.device, dtype=torch.int32)
        return TokenGroups.sequences(ends, T, self.axes.batch)


class _WithLoss(Function):
    """Returns the layer's loss as a value, and passes its gradient on as the weight of the layer's own losses.

    In its backward pass the layer adds the gradient of ``weight``·(sum of its losses over tokens). It runs after this
    one, because y passes through here.
    """

    @staticmethod
    def forward(ctx, y: Tensor, value: Tensor, weight: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        ctx.weight, ctx.tokens = weight, tokens
        return y.view_as(y), value.clone()

    @staticmethod
    def backward(ctx, grad_y: Tensor, grad_loss: Tensor):
        ctx.weight.data.copy_(grad_loss / ctx.tokens)  # .data: the layer saved this tensor and reads it later
        return grad_y, None, None, None

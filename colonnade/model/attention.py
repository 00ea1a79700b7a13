"""Multi-head attention, tensor-parallel by heads.

    q, k, v = split(x W_qkvᵀ)        o = attend(rot(q), rot(k), v)        y = o W_outᵀ

Each rank has n = N/tp query heads and k = K/tp key/value heads: W_qkv is cut by rows, W_out by columns, with one
collective before and one after (Megatron-LM, arXiv 1909.08053, section 3, figure 3b; :mod:`colonnade.model.edges`).
The rows of W_qkv are grouped by key/value head (its query heads, its key, its value), so that a cut between groups is
one contiguous range and three projections are one product. Grouped heads: Ainslie et al., arXiv 2305.13245;
query/key norms: Qwen3,
over all heads OLMoE. Latent attention is another module (:mod:`colonnade.model.latent`).
"""

import torch
from torch import Tensor, nn

from colonnade.config import ModelConfig
from colonnade.kernels.rotary.reference import Rotation, rotate
from colonnade.model.attend import Attend
from colonnade.model.edges import entered, left
from colonnade.model.linear import Linear
from colonnade.model.norm import HeadsNorm, Norm
from colonnade.model.recompute import again
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import PARTIAL, Placement, on_rows


class Attention(nn.Module):
    """x_tD to y_tD; which keys are seen, and where they live, is the affair of the ``attend`` that is passed in."""

    def __init__(self, config: ModelConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.axes, self.H, self.G = axes, config.head_width, config.group
        k = config.kv_heads // axes.tp.size
        on = {"device": device, "dtype": dtype}
        self.qkv = Linear(config.width, k * (self.G + 2) * self.H, bias=config.qkv_bias, **on)
        self.out = Linear(k * self.G * self.H, config.width, bias=config.out_bias, **on)
        self.layout: dict[str, Placement] = {"qkv.weight": 0, "out.weight": 1}
        if config.qkv_bias:
            self.layout["qkv.bias"] = 0
        if config.out_bias:
            self.layout["out.bias"] = on_rows(axes)
        self.q_norm = self.k_norm = None
        if config.qk_norm and config.qk_norm_over == "all":
            self.q_norm = HeadsNorm(config, config.heads, axes.tp, **on)
            self.k_norm = HeadsNorm(config, config.kv_heads, axes.tp, **on)
        elif config.qk_norm:
            # Each rank normalises its own heads only, so the gradient of these weights is partial.
            self.q_norm = Norm(config, self.H, placement=PARTIAL, **on)
            self.k_norm = Norm(config, self.H, placement=PARTIAL, **on)
        self.clip = config.qkv_clip
        self.recompute = False

    def forward(self, x_tD: Tensor, T: int, turn: Rotation | None, attend: Attend) -> Tensor:
        """y_tD for the residual stream of T tokens; ``turn`` is None where positions are learned."""
        (qkv_Tz,) = entered(self.axes, x_tD, T, self.qkv)
        o_Tz = again(self._core, qkv_Tz, turn, attend) if self.recompute else self._core(qkv_Tz, turn, attend)
        return left(self.axes, o_Tz, self.out)

    def _core(self, qkv_Tz: Tensor, turn: Rotation | None, attend: Attend) -> Tensor:
        """All between the two projections; z is the share of the rows of W_qkv, then of the columns of W_out."""
        qkv_TkgH = qkv_Tz.unflatten(-1, (-1, self.G + 2, self.H))
        q_TnH = qkv_TkgH[:, :, : self.G].flatten(1, 2)
        k_TkH, v_TkH = qkv_TkgH[:, :, self.G], qkv_TkgH[:, :, self.G + 1]
        if self.q_norm is not None and self.k_norm is not None:
            q_TnH, k_TkH = self.q_norm(q_TnH), self.k_norm(k_TkH)
        if self.clip is not None:
            q_TnH, k_TkH, v_TkH = (x.clamp(-self.clip, self.clip) for x in (q_TnH, k_TkH, v_TkH))
        if turn is not None:
            q_TnH, k_TkH = rotate(q_TnH, turn), rotate(k_TkH, turn)
        return attend(q_TnH, k_TkH, v_TkH).flatten(1)

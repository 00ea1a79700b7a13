"""Multi-head attention and multi-head latent attention (MLA), tensor-parallel by heads.

:class:`Attention`, also with grouped query heads (GQA):

    q, k, v = split(x W_qkvᵀ)        o = attend(rot(q), rot(k), v)        y = o W_outᵀ

Each rank has n = N/tp query heads and k = K/tp key/value heads: W_qkv is column-parallel and W_out row-parallel, with
one collective before and one after (Megatron-LM, arXiv 1909.08053, section 3, figure 3b;
:mod:`colonnade.model.tensor_parallel_linear`). The rows of W_qkv are grouped by key/value head (its query heads, its
key, its value), so that a cut between groups is one contiguous range, and three projections are one product. Grouped
heads: Ainslie et al., arXiv 2305.13245; query/key norms: Qwen3, over all heads OLMoE.

:class:`LatentAttention` (DeepSeek-V2, arXiv 2405.04434, section 2.1):

    c = norm(W_down x), r = rot(W_rope x)             a compressed vector and a rotary key per token, for all heads
    [k_n; v_n] = W_up,n c                             keys and values of head n; its whole key is [k_n; r]
    [q_n; p_n] = W_q,n (norm(W_q,down x) or x)        its query is [q_n; rot(p_n)]
    o_n = attend([q_n; rot(p_n)], [k_n; r], v_n)      scores times H^-½ · mscale², H the whole width of a query
    y = Σ_n W_out,n o_n

Each rank has its share of the heads; W_down, W_rope, W_q,down and their norms are replicated and used for this rank's
heads only, so their gradients are sums over ranks. The order of a head's dimensions does not change its scores, so
rotary pairs are (i, i + width/2) as everywhere; DeepSeek's files interleave them.

There are two forms of the same product. Without a cache (training, scoring) the keys and values of all N heads are
materialised, which is the least arithmetic. An ``attend`` that caches gets c and r instead, as one key for all heads,
whose first dimensions are also the value: q_n·(W_up,n c) = (W_up,nᵀ q_n)·c, and the up-projection of values comes after
the softmax (section 2.1.2, "absorbed"). A token then takes kv_rank + rope_width values a layer in the cache, in V2 576
instead of 2 · 128 · 192 = 49,152; a long prompt pays with 3.4 times the arithmetic of its scores. The whole W_up of its
heads is on each rank, and the cached vector is on every tp rank.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.config import ModelConfig
from colonnade.kernels.rotary import Rotation, rotate
from colonnade.model.activation_checkpointing import checkpointed
from colonnade.model.attend import Attend, PagedView
from colonnade.model.lora import linear_adapter, qkv_adapter
from colonnade.model.norm import HeadsNorm, Norm
from colonnade.model.rotary import score_factor
from colonnade.model.tensor_parallel_linear import Linear, column_parallel, row_parallel
from colonnade.parallel.axis import Axes
from colonnade.parallel.layout import PARTIAL, Placement, residual_placement


class Attention(nn.Module):
    """x_tD to y_tD; ``attend`` decides which keys each query sees and where they are stored."""

    def __init__(self, config: ModelConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.axes, self.H, self.G = axes, config.head_width, config.group
        k = config.kv_heads // axes.tp.size
        on = {"device": device, "dtype": dtype}
        self.qkv = Linear(config.width, k * (self.G + 2) * self.H, bias=config.qkv_bias, **on)
        self.out = Linear(k * self.G * self.H, config.width, bias=config.out_bias, **on)
        self.qkv.adapter = qkv_adapter(config, k, **on)
        width = config.heads * self.H
        self.out.adapter = linear_adapter("out", config, k * self.G * self.H, config.width, width, row=True, **on)
        self.layout: dict[str, Placement] = {"qkv.weight": 0, "out.weight": 1}
        if config.qkv_bias:
            self.layout["qkv.bias"] = 0
        if config.out_bias:
            self.layout["out.bias"] = residual_placement(axes)
        self.q_norm = self.k_norm = None
        if config.qk_norm and config.qk_norm_over == "all":
            self.q_norm = HeadsNorm(config, config.heads, axes.tp, **on)
            self.k_norm = HeadsNorm(config, config.kv_heads, axes.tp, **on)
        elif config.qk_norm:
            # Each rank normalises its own heads only, so the gradient of these weights is partial.
            self.q_norm = Norm(config, self.H, placement=PARTIAL, **on)
            self.k_norm = Norm(config, self.H, placement=PARTIAL, **on)
        self.clip = config.qkv_clip
        self.q_factor = 1.0 if config.score_scale is None else config.score_scale * config.head_width**0.5
        self.recompute = False

    def forward(self, x_tD: Tensor, T: int, rotation: Rotation | None, attend: Attend) -> Tensor:
        """y_tD for the residual stream of T tokens; ``rotation`` is None with learned positions."""
        (qkv_Tz,) = column_parallel(self.axes, x_tD, T, self.qkv)
        run = self._attend_heads
        o_Tz = checkpointed(run, qkv_Tz, rotation, attend) if self.recompute else run(qkv_Tz, rotation, attend)
        return row_parallel(self.axes, o_Tz, self.out)

    def _attend_heads(self, qkv_Tz: Tensor, rotation: Rotation | None, attend: Attend) -> Tensor:
        """Everything between the two projections; z is this rank's rows of W_qkv, then its columns of W_out."""
        plain = self.q_norm is None and self.clip is None and self.q_factor == 1.0
        if plain and isinstance(attend, PagedView) and attend.writes_in_one_launch:
            return attend.from_qkv(qkv_Tz, rotation, None).flatten(1)
        qkv_TkgH = qkv_Tz.unflatten(-1, (-1, self.G + 2, self.H))
        q_TnH = qkv_TkgH[:, :, : self.G].flatten(1, 2)
        k_TkH, v_TkH = qkv_TkgH[:, :, self.G], qkv_TkgH[:, :, self.G + 1]
        if self.q_norm is not None and self.k_norm is not None:
            q_TnH, k_TkH = self.q_norm(q_TnH), self.k_norm(k_TkH)
        if self.clip is not None:
            q_TnH, k_TkH, v_TkH = (x.clamp(-self.clip, self.clip) for x in (q_TnH, k_TkH, v_TkH))
        if rotation is not None:
            q_TnH, k_TkH = rotate(q_TnH, rotation), rotate(k_TkH, rotation)
        if self.q_factor != 1.0:
            q_TnH = q_TnH * self.q_factor
        return attend(q_TnH, k_TkH, v_TkH).flatten(1)


class LatentAttention(nn.Module):
    """x_tD to y_tD through compressed keys and values."""

    def __init__(self, config: ModelConfig, axes: Axes, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        latent = config.latent
        assert latent is not None, "a config without latent attention"
        self.axes, self.H, self.rope, self.rank = axes, config.head_width, latent.rope_width, latent.kv_rank
        self.plain, self.v_width = config.head_width - latent.rope_width, latent.v_width
        # attend divides by the square root of the width that it gets; the rest of the factor is in the queries.
        self.factor = score_factor(config.rope_scaling)
        n, bias = config.heads // axes.tp.size, config.qkv_bias
        on = {"device": device, "dtype": dtype}
        norm = {"placement": PARTIAL, "eps": latent.norm_eps, **on}
        self.layout: dict[str, Placement] = {}
        self.q = self.q_down = self.q_norm = self.q_up = None
        if latent.q_rank:
            self.q_down = Linear(config.width, latent.q_rank, bias=bias, **on)
            self.q_norm = Norm(config, latent.q_rank, **norm)
            self.q_up = Linear(latent.q_rank, n * self.H, bias=False, **on)
            self.layout |= {"q_down.weight": PARTIAL, "q_up.weight": 0} | ({"q_down.bias": PARTIAL} if bias else {})
        else:
            self.q = Linear(config.width, n * self.H, bias=False, **on)
            self.layout["q.weight"] = 0
        self.kv_down = Linear(config.width, latent.kv_rank + latent.rope_width, bias=bias, **on)
        self.kv_norm = Norm(config, latent.kv_rank, **norm)
        self.kv_up = Linear(latent.kv_rank, n * (self.plain + latent.v_width), bias=False, **on)
        self.kv_up.never_quantise = True
        self.out = Linear(n * latent.v_width, config.width, bias=config.out_bias, **on)
        inputs, fan_in = n * latent.v_width, config.heads * latent.v_width
        self.out.adapter = linear_adapter("out", config, inputs, config.width, fan_in, row=True, **on)
        self.layout |= {"kv_down.weight": PARTIAL, "kv_up.weight": 0, "out.weight": 1}
        self.layout |= {"kv_down.bias": PARTIAL} if bias else {}
        self.layout |= {"out.bias": residual_placement(axes)} if config.out_bias else {}
        self.recompute = False

    @property
    def absorbed_factor(self) -> float:
        """The factor of queries in the cache's space, of whose width ``attend`` takes the square root."""
        return self.factor * ((self.rank + self.rope) / self.H) ** 0.5

    def forward(self, x_tD: Tensor, T: int, rotation: Rotation | None, attend: Attend) -> Tensor:
        """y_tD for the residual stream of T tokens."""
        assert rotation is not None, "latent attention has rotary positions"
        if self.q is not None:
            q_Tz, kv_Tz = column_parallel(self.axes, x_tD, T, self.q, self.kv_down)
        else:
            assert self.q_down is not None
            assert self.q_norm is not None
            assert self.q_up is not None
            down_Tz, kv_Tz = column_parallel(self.axes, x_tD, T, self.q_down, self.kv_down)
            q_Tz = self.q_up(self.q_norm(down_Tz))
        run = self._absorbed if attend.caches else self._materialised
        if self.recompute:
            o_Tz = checkpointed(run, q_Tz, kv_Tz, rotation, attend)
        else:
            o_Tz = run(q_Tz, kv_Tz, rotation, attend)
        return row_parallel(self.axes, o_Tz, self.out)

    def _split(self, q_Tz: Tensor, kv_Tz: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(plain part of the queries by head, their rotary part, compressed vector, rotary key of one head)."""
        q_TnH, p_TnH = q_Tz.unflatten(-1, (-1, self.H)).split([self.plain, self.rope], -1)
        c_Tz, r_TH = kv_Tz.split([self.rank, self.rope], -1)
        return q_TnH, rotate(p_TnH, rotation), self.kv_norm(c_Tz), rotate(r_TH[:, None], rotation)

    def _materialised(self, q_Tz: Tensor, kv_Tz: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        q_TnH, p_TnH, c_Tz, r_T1H = self._split(q_Tz, kv_Tz, rotation)
        k_TnH, v_TnH = (
            self.kv_up(c_Tz).unflatten(-1, (-1, self.plain + self.v_width)).split([self.plain, self.v_width], -1)
        )
        k_TnH = torch.cat((k_TnH, r_T1H.expand(-1, k_TnH.shape[1], -1)), -1)
        q_TnH = torch.cat((q_TnH, p_TnH), -1) * self.factor
        # Kernels, ring attention and caches need values as wide as keys: pad with zeros.
        o_TnH = attend(q_TnH, k_TnH, F.pad(v_TnH, (0, self.H - self.v_width)))
        return o_TnH[..., : self.v_width].flatten(1)

    def _absorbed(self, q_Tz: Tensor, kv_Tz: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        q_TnH, p_TnH, c_Tz, r_T1H = self._split(q_Tz, kv_Tz, rotation)
        up_nHz, v_nHz = self.kv_up.weight.unflatten(0, (-1, self.plain + self.v_width)).split(
            [self.plain, self.v_width], 1
        )
        q_Tnz = torch.cat((torch.einsum("tnh,nhz->tnz", q_TnH, up_nHz), p_TnH), -1)
        k_T1z = torch.cat((c_Tz[:, None], r_T1H), -1)
        o_Tnz = attend(q_Tnz * self.absorbed_factor, k_T1z, k_T1z)
        return torch.einsum("tnz,nhz->tnh", o_Tnz[..., : self.rank], v_nHz).flatten(1)

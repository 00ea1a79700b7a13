"""Matrices of a recording by name: weights and activations of one head, of one expert, or of a layer.

Of head n, with K/V head n // G (docs/alphabet.md):

    input_TD @ wQ_DH (+ bQ, rotated) = Q_TH        wK_t_HD @ input_t_DT (+ bK_t, rotated) = K_t_HT
    input_TD @ wV_DH (+ bV) = V_TH                 softmax(Q @ K_t) @ V = head_out_TH        head_out @ wO_HD = out_TD

Latent attention is the same with the cached vector [r; c] as the input of keys and values, and the rotary part of a
head first:

    latent = [r; c]        wK_t = diag(1, W_up,n)        wV = [0; W_up,n of values]
"""

import functools
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from colonnade.errors import RequestError
from colonnade.look.lora import adapter_factors, low_rank
from colonnade.look.recorder import Recording


class Names:
    """The matrices of one layer, and head or expert, of a recording."""

    def __init__(self, recording: Recording, layer: int, head: int = -1):
        config = recording.config
        if not 0 <= layer < config.layers:
            raise RequestError(f"there is no layer {layer}; this model has 0 to {config.layers - 1}", param="layer")
        self.recording, self.config, self.layer, self.head = recording, config, layer, head
        self.record, self.weights = recording.layers[layer], recording.weights[layer]
        self.moe = config.experts_of(layer)

    def get(self, name: str) -> np.ndarray:
        """The matrix ``name`` in float32; raises :class:`RequestError` if there is none."""
        whole, _, change = name.partition("/")  # "wQ/A8": the first factor of rank 8
        maker = self._makers.get(whole)
        if maker is None:
            raise RequestError(
                f"there is no tensor '{name[:40]}' here; use {', '.join(sorted(self._makers))}", param="name"
            )
        x = maker()
        if change:
            x = low_rank(x, change)
        return x.detach().float().cpu().numpy()

    @functools.cached_property
    def _makers(self) -> dict[str, Callable[[], Tensor]]:
        found = self._layer() | (self._of_head() if 0 <= self.head < self.config.heads else {}) | self._of_expert()
        return found | self._of_adapter(found)

    @functools.cached_property
    def adapted(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The factors that the adapter adds, by matrix."""
        adapter = self.recording.adapter
        return {} if adapter is None else adapter_factors(adapter, self.config, self.layer, self.head)

    def _of_adapter(self, whole: dict[str, Callable[[], Tensor]]) -> dict[str, Callable[[], Tensor]]:
        found: dict[str, Callable[[], Tensor]] = {}
        for name, (left, right) in self.adapted.items():
            found |= {
                f"{name}_A": lambda left=left: left,
                f"{name}_B": lambda right=right: right,
                f"{name}_base": lambda name=name, left=left, right=right: whole[name]().float().cpu() - left @ right,
            }
        return found

    def weight(self, name: str) -> Tensor:
        """A parameter of the block."""
        return self.weights[name].detach()

    def _bias(self, name: str, width: int) -> Tensor:
        return self.weights[name].detach() if name in self.weights else torch.zeros(width)

    def _layer(self) -> dict[str, Callable[[], Tensor]]:
        record, config = self.record, self.config
        found: dict[str, Callable[[], Tensor]] = {
            "input": lambda: record["attention_in"],
            "input_t": lambda: record["attention_in"].T,
            "last": lambda: record["attention_in"][-1:],
            "heads_out": lambda: record["o"][..., : self.v_width].flatten(1),
            "wO_all": lambda: self.weight("attention.out.weight").T,
            "bO": lambda: self._bias("attention.out.bias", config.width)[None],
            "attention_out": lambda: record["attention_out"],
            "ffn_in": lambda: record["ffn_in"],
            "ffn_out": lambda: record["ffn_out"],
            "heads": self._attention_maps,
        }
        if self.recording.rotation is not None:
            cos, sin = self.recording.rotation
            found |= {"cos": lambda: cos, "sin": lambda: sin, "cos_t": lambda: cos.T, "sin_t": lambda: sin.T}
            found |= {"last_cos": lambda: cos[-1:], "last_sin": lambda: sin[-1:]}
        if config.latent is not None:
            found |= {"latent": self._latent, "latent_t": lambda: self._latent().T}
            if config.latent.q_rank:
                found["q_latent"] = lambda: record["q_latent"]
        else:
            for part in ("Q", "K", "V"):
                found[f"w{part}_all"] = lambda part=part: self._qkv(part)[0].flatten(0, 1).T
                found[f"b{part}_all"] = lambda part=part: self._qkv(part)[1].flatten()[None]
        if self.moe is None:
            found |= {
                "up": lambda: self.weight("ffn.up.weight").T,
                "bup": lambda: self._bias("ffn.up.bias", config.ffn_width)[None],
                "down": lambda: self.weight("ffn.down.weight").T,
                "bdown": lambda: self._bias("ffn.down.bias", config.width)[None],
            }
            if config.gated:
                found["gate"] = lambda: self.weight("ffn.gate.weight").T
                found["bgate"] = lambda: self._bias("ffn.gate.bias", config.ffn_width)[None]
        else:
            found["routing"] = self._routing
        return found

    @property
    def v_width(self) -> int:
        """Width of a head's values."""
        return self.config.latent.v_width if self.config.latent else self.config.head_width

    def _qkv(self, part: str) -> tuple[Tensor, Tensor]:
        """(w_nHD, b_nH) of the queries, keys or values of all heads."""
        G, H = self.config.group, self.config.head_width
        w_kgHD = self.weight("attention.qkv.weight").unflatten(0, (-1, G + 2, H))
        b_kgH = self._bias("attention.qkv.bias", len(w_kgHD) * (G + 2) * H).to(w_kgHD).view(-1, G + 2, H)
        own = {"Q": slice(0, G), "K": slice(G, G + 1), "V": slice(G + 1, G + 2)}[part]
        return w_kgHD[:, own].flatten(0, 1), b_kgH[:, own].flatten(0, 1)

    def _latent(self) -> Tensor:
        """[r; c] of each token; r is the same in all heads' keys."""
        latent = self.config.latent
        assert latent is not None
        return torch.cat((self.record["k"][:, 0, -latent.rope_width :], self.record["latent"]), 1)

    def _of_head(self) -> dict[str, Callable[[], Tensor]]:
        n, record, config = self.head, self.record, self.config
        wO = lambda: self.weight("attention.out.weight").T.unflatten(0, (config.heads, -1))[n]  # noqa: E731
        shared: dict[str, Callable[[], Tensor]] = {
            "Q_recorded": lambda: record["q"][:, n],
            "Q_last": lambda: record["q"][-1:, n],
            "wO": wO,
            "head_out": lambda: record["o"][:, n, : self.v_width],
            "out": lambda: record["o"][:, n, : self.v_width] @ wO().float().cpu(),
        }
        if latent := config.latent:
            up = lambda: self.weight("attention.kv_up.weight").unflatten(0, (config.heads, -1))[n].float().cpu()  # noqa: E731
            plain, rope = config.head_width - latent.rope_width, latent.rope_width
            rope_first = torch.arange(config.head_width).roll(rope)
            name = "attention.q_up.weight" if latent.q_rank else "attention.q.weight"
            return shared | {
                "Q_recorded": lambda: record["q"][:, n][:, rope_first],
                "Q_last": lambda: record["q"][-1:, n][:, rope_first],
                "wQ": lambda: self.weight(name).unflatten(0, (config.heads, -1))[n].T[:, rope_first],
                "wK_t": lambda: torch.block_diag(torch.eye(rope), up()[:plain]),
                "wV": lambda: torch.cat((torch.zeros(rope, latent.v_width), up()[plain:].T)),
                "K_t_recorded": lambda: record["k"][:, n].T[rope_first],
                "V_recorded": lambda: record["v"][:, n, : latent.v_width],
            }
        kv = n // config.group
        return shared | {
            "wQ": lambda: self._qkv("Q")[0][n].T,
            "bQ": lambda: self._qkv("Q")[1][n][None],
            "wK_t": lambda: self._qkv("K")[0][kv],
            "bK_t": lambda: self._qkv("K")[1][kv][:, None],
            "wV": lambda: self._qkv("V")[0][kv].T,
            "bV": lambda: self._qkv("V")[1][kv][None],
            "K_t_recorded": lambda: record["k"][:, kv].T,
            "V_recorded": lambda: record["v"][:, kv],
        }

    def rows_of_expert(self) -> Tensor:
        """The tokens that the expert ``head`` processes."""
        return (self.record["kept_ids"] == self.head).any(1).nonzero().flatten()

    def choices_of_expert(self) -> int:
        """Tokens that chose the expert ``head``, dropped ones included."""
        return int((self.record["choice_ids"] == self.head).any(1).sum())

    def _of_expert(self) -> dict[str, Callable[[], Tensor]]:
        if self.moe is None or not 0 <= self.head < self.moe.experts:
            return {}
        groups = self.weights.get("ffn.group_E")
        e = self.head if groups is None else int(groups[self.head])
        config, moe = self.config, self.moe
        x = lambda: self.record["ffn_in"][self.rows_of_expert()]  # noqa: E731

        def stack(name: str) -> Tensor:
            return self.weights[f"ffn.experts.{name}"][e].detach().float().cpu()

        def bias(name: str, width: int) -> Tensor:
            return stack(name) if f"ffn.experts.{name}" in self.weights else torch.zeros(width)

        found: dict[str, Callable[[], Tensor]] = {
            "expert_in": x,
            "expert_up": lambda: stack("up").T,
            "expert_bup": lambda: bias("up_bias", moe.ffn_width)[None],
            "expert_down": lambda: stack("down"),
            "expert_bdown": lambda: bias("down_bias", config.width)[None],
        }
        if config.gated:
            found["expert_gate"] = lambda: stack("gate").T
            found["expert_bgate"] = lambda: bias("gate_bias", moe.ffn_width)[None]
        return found

    def _routing(self) -> Tensor:
        """The router's weight of each token and expert; negative where the capacity drops the choice."""
        assert self.moe is not None
        ids, kept = self.record["choice_ids"], self.record["kept_ids"]
        signed = self.record["choice_weights"] * torch.where(ids == kept, 1.0, -1.0)
        whole = torch.zeros(len(ids), self.moe.experts + 1).scatter_(1, ids, signed)
        return whole[:, : self.moe.experts]

    def attention(self, n: int) -> Tensor:
        """The probabilities of head ``n``, from the recorded queries and keys."""
        q, k = self.record["q"][:, n], self.record["k"][:, n // (1 if self.config.latent else self.config.group)]
        scores, position = q @ k.T / q.shape[1] ** 0.5, torch.arange(len(q))
        if self.config.causal:
            behind = position[:, None] - position
            window = self.config.window_of(self.layer) or len(q)
            scores = scores.masked_fill((behind < 0) | (behind >= window), float("-inf"))
        return scores.softmax(-1)

    def _attention_maps(self) -> Tensor:
        """The probabilities of all heads, one below the other, reduced to at most 32 tokens a side."""
        by = -(-len(self.record["q"]) // 32)
        maps = torch.stack([self.attention(n) for n in range(self.config.heads)])
        return torch.nn.functional.max_pool2d(maps[:, None], by, ceil_mode=True)[:, 0].flatten(0, 1)

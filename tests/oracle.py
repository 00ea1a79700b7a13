"""An independent implementation of training in plain PyTorch, for comparison: model, losses, clipping, AdamW.

The library's layouts could agree and all be wrong in the same way, so this file shares no code with it.
It reads the fields of a config and of batches, computes attention one sequence and one head at a time and every expert
on every token, and leaves all derivatives to autograd. Only the rotary angles are in float32, as in published models.
Latent attention, noise and dropout are not covered.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100
ACTIVATIONS = {"gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"), "silu": F.silu, "relu": F.relu}


class Oracle:
    """A model of ``config`` with these float64 weights by name, and its AdamW."""

    def __init__(self, config: Any, train: Any, weights: dict[str, Tensor], buffers: dict[str, Tensor]):
        self.config, self.train = config, train
        self.w = {name: w.detach().clone().requires_grad_() for name, w in weights.items()}
        self.biases = {name: b.clone() for name, b in buffers.items()}
        """The experts' balancing biases, which have no gradient."""
        self.m = {name: torch.zeros_like(w) for name, w in self.w.items()}
        self.v = {name: torch.zeros_like(w) for name, w in self.w.items()}
        self.loads: dict[int, Tensor] = {}
        """Choices per expert since the last reset, by layer."""

    # -- training --------------------------------------------------------------------------------------------------

    def step(self, number: int, passes: list[list[Any]]) -> tuple[float, float]:
        """(mean loss, gradient norm) of step ``number``; expert balance is computed per pass."""
        train, (valid, pairs) = self.train, _counts(passes)
        tokens = sum(len(batch.tokens_T) for batches in passes for batch in batches)
        self.loads.clear()
        loss = auxiliary = torch.zeros((), dtype=torch.float64)
        for batches in passes:
            masked, order, routers = self.losses(batches, train.label_smoothing)
            loss = loss + masked / valid + order / pairs
            auxiliary = auxiliary + routers * sum(len(b.tokens_T) for b in batches) / tokens
        grads = torch.autograd.grad(loss + auxiliary, list(self.w.values()))
        norm = torch.sqrt(sum((g * g).sum() for g in grads)).item()
        self.adamw(number, [g * min(1.0, train.clip / (norm + 1e-6)) for g in grads])
        for i, load_E in self.loads.items():
            if (bias_E := self.biases.get(f"blocks.{i}.ffn.router.bias_E")) is not None:
                bias_E += self.config.moe.bias_rate * torch.sign(load_E.double().mean() - load_E)
        return loss.item(), norm

    @torch.no_grad()
    def evaluate(self, passes: list[list[Any]]) -> float:
        """The mean loss without smoothing and without the experts' losses."""
        masked, order = (sum(parts) for parts in zip(*(self.losses(part, 0.0)[:2] for part in passes), strict=True))
        valid, pairs = _counts(passes)
        return (masked / valid + order / pairs).item()

    def rate(self, number: int) -> float:
        """Linear warm-up from 0 to lr in ``warmup`` + 1 steps, then decay to min_lr at the last step."""
        t = self.train
        if number < t.warmup:
            return t.lr * (number + 1) / (t.warmup + 1)
        u = min(1.0, (number - t.warmup) / max(1, t.steps - 1 - t.warmup))
        share = {"cosine": (1 + math.cos(math.pi * u)) / 2, "linear": 1 - u, "constant": 1.0}[t.schedule]
        return t.min_lr + (t.lr - t.min_lr) * share

    @torch.no_grad()
    def adamw(self, number: int, grads: list[Tensor]) -> None:
        """Loshchilov 2017, algorithm 2, with decay multiplied by the rate; vectors do not decay."""
        t, lr = self.train, self.rate(number)
        for (name, w), g in zip(self.w.items(), grads, strict=True):
            m, v = self.m[name], self.v[name]
            m.copy_(t.beta1 * m + (1 - t.beta1) * g)
            v.copy_(t.beta2 * v + (1 - t.beta2) * g * g)
            m_hat, v_hat = m / (1 - t.beta1 ** (number + 1)), v / (1 - t.beta2 ** (number + 1))
            w.sub_(lr * (m_hat / (v_hat.sqrt() + t.eps) + (t.weight_decay * w if w.dim() > 1 else 0)))

    # -- losses ----------------------------------------------------------------------------------------------------

    def losses(self, batches: list[Any], smoothing: float) -> tuple[Tensor, Tensor, Tensor]:
        """Sum over tokens, sum over BERT's pairs, and the experts' weighted losses (means over this pass's tokens)."""
        lengths = [n for batch in batches for n in batch.cu_seqlens.diff().tolist()]
        targets_T = torch.cat([batch.targets_T for batch in batches])
        segments = [batch.segments_T for batch in batches if batch.segments_T is not None]
        x_TD, routers = self.stream(torch.cat([b.tokens_T for b in batches]), lengths, segments)
        c, y_TD = self.config, x_TD
        if c.task_head == "pretraining":
            y_TD = self.norm(ACTIVATIONS[c.activation](self.linear(x_TD, "top.transform")), "top.norm")
        logits_TV = y_TD @ self.w["embed.tokens.weight" if c.tied else "unembed.weight"].T
        if c.task_head == "pretraining":
            logits_TV = logits_TV + self.w["top.bias"]
        log_p_TV = logits_TV.log_softmax(1)
        wanted_TV = torch.full_like(log_p_TV, smoothing / c.vocab_size)
        wanted_TV = wanted_TV + (1 - smoothing) * F.one_hot(targets_T.clamp(min=0), c.vocab_size).double()
        masked = -(wanted_TV * log_p_TV)[targets_T != IGNORE].sum()
        order, start = torch.zeros((), dtype=torch.float64), 0
        for batch in batches:
            for row, label in [] if batch.orders_R is None else zip(batch.first_R, batch.orders_R, strict=True):
                pooled_D = torch.tanh(self.linear(x_TD[start + row], "top.pooler"))
                if label != IGNORE:
                    order = order - self.linear(pooled_D, "top.order").log_softmax(0)[label]
            start += len(batch.tokens_T)
        return masked, order, routers

    # -- model -----------------------------------------------------------------------------------------------------

    def stream(self, tokens_T: Tensor, lengths: list[int], segments: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The last hidden states of sequences of these lengths, and the experts' losses."""
        c, positions_T = self.config, torch.cat([torch.arange(n) for n in lengths])
        x_TD, routers = self.w["embed.tokens.weight"][tokens_T], torch.zeros((), dtype=torch.float64)
        if c.positions == "learned":
            x_TD = x_TD + self.w["embed.positions.weight"][positions_T]
        if c.segments:
            x_TD = x_TD + self.w["embed.segments.weight"][torch.cat(segments)]
        if c.embed_norm:
            x_TD = self.norm(x_TD, "embed.norm")
        for i in range(c.layers):
            at, post = f"blocks.{i}", c.norm_order == "post"
            if post:
                x_TD = self.norm(x_TD + self.attention(i, x_TD, lengths, positions_T), f"{at}.norm1")
            else:
                x_TD = x_TD + self.attention(i, self.norm(x_TD, f"{at}.norm1"), lengths, positions_T)
            h_TD, moe = x_TD if post else self.norm(x_TD, f"{at}.norm2"), c.moe
            if (
                moe is not None
                and i >= moe.first_k_dense_replace
                and (i - moe.first_k_dense_replace) % moe.layer_freq == 0
                and i not in moe.mlp_only_layers
            ):
                y_TD, loss = self.experts(i, h_TD, lengths)
                routers = routers + loss
            else:
                y_TD = self.feed_forward(h_TD, f"{at}.ffn")
            x_TD = self.norm(x_TD + y_TD, f"{at}.norm2") if post else x_TD + y_TD
        return x_TD if c.norm_order == "post" else self.norm(x_TD, "norm"), routers

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        layer = f"{name}.bias" in self.w
        x = x - x.mean(-1, keepdim=True) if layer else x
        y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + self.config.norm_eps) * self.w[f"{name}.weight"]
        return y + self.w[f"{name}.bias"] if layer else y

    def feed_forward(self, x: Tensor, name: str) -> Tensor:
        act = ACTIVATIONS[self.config.activation]
        if self.config.gated:
            return self.linear(act(self.linear(x, f"{name}.gate")) * self.linear(x, f"{name}.up"), f"{name}.down")
        return self.linear(act(self.linear(x, f"{name}.up")), f"{name}.down")

    def attention(self, i: int, x_TD: Tensor, lengths: list[int], positions_T: Tensor) -> Tensor:
        """Rows of the projection are, for each key/value head, its query heads, its key, its value."""
        c, name = self.config, f"blocks.{i}.attention"
        N, K, H = c.heads, c.kv_heads, c.head_width
        rows_TKGH = self.linear(x_TD, f"{name}.qkv").view(len(x_TD), K, N // K + 2, H)
        q_TNH, k_TKH, v_TKH = rows_TKGH[:, :, :-2].reshape(-1, N, H), rows_TKGH[:, :, -2], rows_TKGH[:, :, -1]
        if c.qk_norm and c.qk_norm_over == "head":
            q_TNH, k_TKH = self.norm(q_TNH, f"{name}.q_norm"), self.norm(k_TKH, f"{name}.k_norm")
        elif c.qk_norm:
            q_TNH = self.norm(q_TNH.flatten(1), f"{name}.q_norm").view_as(q_TNH)
            k_TKH = self.norm(k_TKH.flatten(1), f"{name}.k_norm").view_as(k_TKH)
        if c.qkv_clip is not None:
            q_TNH, k_TKH, v_TKH = (x.clamp(-c.qkv_clip, c.qkv_clip) for x in (q_TNH, k_TKH, v_TKH))
        if c.positions == "rotary":
            theta = 1.0 / c.rope_theta ** (torch.arange(0, H, 2).float() / H)
            angle = positions_T.float()[:, None, None] * theta
            cos, sin = angle.cos().double(), angle.sin().double()
            q_TNH, k_TKH = _rotate(q_TNH, cos, sin), _rotate(k_TKH, cos, sin)
        parts, start, window = [], 0, c.window if i >= c.window_from_layer else None
        for n in lengths:
            q, k, v = (x[start : start + n] for x in (q_TNH, k_TKH, v_TKH))
            behind = torch.arange(n)[:, None] - torch.arange(n)
            seen = (behind >= 0) if c.causal else torch.ones(n, n, dtype=torch.bool)
            if window is not None:
                seen = seen & (behind < window)
            heads = []
            for head in range(N):
                scores = q[:, head] @ k[:, head * K // N].T / math.sqrt(H)
                heads.append(scores.masked_fill(~seen, -math.inf).softmax(1) @ v[:, head * K // N])
            parts.append(torch.cat(heads, 1))
            start += n
        return self.linear(torch.cat(parts), f"{name}.out")

    def experts(self, i: int, x_TD: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        moe, at = self.config.moe, f"blocks.{i}.ffn"
        (T, E, A), router = (len(x_TD), moe.experts, moe.active), moe.router
        logits_TE = self.linear(x_TD, f"{at}.router.gates.0")
        scores_TE = logits_TE.sigmoid() if router.kind == "sigmoid" else logits_TE.softmax(1)
        probs_TE = scores_TE / scores_TE.sum(1, keepdim=True)
        compared_TE = scores_TE.detach() + self.biases.get(f"{at}.router.bias_E", 0.0)
        for t in range(T if router.groups > 1 else 0):
            groups = compared_TE[t].view(router.groups, -1)
            best = 1 if router.group_score == "max" else min(2, groups.shape[1])
            order = groups.sort(1, descending=True).values[:, :best].sum(1).argsort(descending=True)
            groups[order[router.groups_kept :]] = -math.inf  # a view
        ids_TA = compared_TE.argsort(1, descending=True)[:, :A]
        weights_TA = scores_TE.gather(1, ids_TA)
        if router.normalise and A > 1:
            weights_TA = weights_TA / weights_TA.sum(1, keepdim=True)
        chosen_TAE = F.one_hot(ids_TA, E).double()
        self.loads[i] = self.loads.get(i, 0) + chosen_TAE.sum((0, 1)).long()
        loss = moe.z_weight * logits_TE.logsumexp(1).square().mean()
        loss = loss + moe.balance_weight * self.balance(probs_TE, chosen_TAE, lengths)

        kept_TA, taken = torch.ones(T, A, dtype=torch.bool), [0] * E
        order = list(range(T))
        if moe.priority:
            order.sort(key=lambda t: -probs_TE[t].max().item())
        for j in range(A):
            for t in order if moe.capacity else []:
                e = int(ids_TA[t, j])
                kept_TA[t, j] = taken[e] < A * int(abs(moe.capacity) * math.ceil(T / E))
                taken[e] += 1
        weights_TA = router.scale * weights_TA
        out_TED = torch.stack([self.expert(x_TD, f"{at}.experts", e) for e in range(E)], 1)
        y_TD = torch.einsum("ta,tae,ted->td", weights_TA * kept_TA, chosen_TAE, out_TED)
        if moe.dropped_token_output == "residual":
            y_TD = y_TD + (weights_TA * ~kept_TA).sum(1, keepdim=True) * x_TD
        if moe.shared_width:
            shared_TD = self.feed_forward(x_TD, f"{at}.shared")
            y_TD = y_TD + (self.linear(x_TD, f"{at}.shared_gate").sigmoid() if moe.shared_gate else 1.0) * shared_TD
        return y_TD, loss

    def expert(self, x_TD: Tensor, name: str, e: int) -> Tensor:
        w = {part: stack[e] for part in ("up", "gate", "down") if (stack := self.w.get(f"{name}.{part}")) is not None}
        b = {part: self.w[f"{name}.{part}_bias"][e] if f"{name}.{part}_bias" in self.w else 0.0 for part in w}
        act, up = ACTIVATIONS[self.config.activation], x_TD @ w["up"].T + b["up"]
        hidden = act(x_TD @ w["gate"].T + b["gate"]) * up if self.config.gated else act(up)
        return hidden @ w["down"] + b["down"]

    def balance(self, probs_TE: Tensor, chosen_TAE: Tensor, lengths: list[int]) -> Tensor:
        (_, A, E), kind = chosen_TAE.shape, self.config.moe.balance
        P_E, f_E = probs_TE.mean(0), chosen_TAE.sum(1).mean(0)  # the shares sum to 1 and to A
        if kind == "sequence":
            parts = zip(probs_TE.split(lengths), chosen_TAE.sum(1).split(lengths), strict=True)
            return torch.stack([E / A * (p.mean(0) * f.mean(0)).sum() for p, f in parts if len(p)]).mean()
        if kind == "importance":
            return P_E.var(correction=0) / P_E.mean() ** 2
        shares = {"gshard": chosen_TAE[:, 0].mean(0), "switch": f_E / A, "choices": f_E, "none": 0 * f_E}
        return E * (P_E * shares[kind]).sum()


def _counts(passes: list[list[Any]]) -> tuple[int, int]:
    """Targets, and pairs of BERT's, that count; 1 where there are none."""
    batches = [batch for part in passes for batch in part]
    valid = sum(int((batch.targets_T != IGNORE).sum()) for batch in batches)
    pairs = sum(int((batch.orders_R != IGNORE).sum()) for batch in batches if batch.orders_R is not None)
    return max(1, valid), max(1, pairs)


def _rotate(x_TNH: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x_TNH.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1)

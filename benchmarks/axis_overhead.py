"""Overhead of axes, attend and head on one process: our Transformer against the same maths in plain modules.

    python benchmarks/axis_overhead.py

Forward and backward of the tour model on random sequences of equal length: by ``Transformer`` with axes of size 1,
``Packed`` and ``Loss``, and by the plain modules below, which use torch's operators on (batch, sequence) and have no
axes, ``attend`` or ``head``. Weights are equal, and gradients are compared first. The plain modules' loss is the same
chunked Function without its collectives; a third row uses torch's ``cross_entropy`` over whole logits.

The three alternate; a ratio is the median of the per-round ratios.
"""

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.config import ModelConfig
from colonnade.config.presets import preset
from colonnade.model import Loss, Packed, Stream, Transformer, initialise
from harness.paired_timing import OtherProcesses, run_interleaved, wall_clock
from harness.report import Headline, report


class PlainLoss(torch.autograd.Function):
    """Σ (lse − z[target]); gradients are computed chunk by chunk with the logits, as in the Transformer's head."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
        dx_TD, dw_VD, loss = torch.empty_like(x_TD), torch.zeros_like(weight_VD), x_TD.new_zeros(())
        rows = 512
        for a in range(0, len(x_TD), rows):
            x_cD, target_c1 = x_TD[a : a + rows], targets_T[a : a + rows, None]
            z_cV = x_cD @ weight_VD.T
            top_c1 = z_cV.amax(1, keepdim=True)
            lse_c1 = (z_cV - top_c1).exp_().sum(1, keepdim=True).log() + top_c1
            loss += (lse_c1 - z_cV.gather(1, target_c1)).sum()
            p_cV = z_cV.sub_(lse_c1).exp_()
            p_cV.scatter_(1, target_c1, p_cV.gather(1, target_c1) - 1)
            torch.mm(p_cV, weight_VD, out=dx_TD[a : a + rows])
            dw_VD.addmm_(p_cV.T, x_cD)
        ctx.save_for_backward(dx_TD, dw_VD)
        return loss

    @staticmethod
    def backward(ctx, grad: Tensor):
        dx_TD, dw_VD = ctx.saved_tensors
        return dx_TD * grad, dw_VD * grad, None


def torch_loss(x_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    return F.cross_entropy(x_TD @ weight_VD.T, targets_T, reduction="sum")


class PlainAttention(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.N, self.K, self.H, self.G = c.heads, c.kv_heads, c.head_width, c.group
        self.qkv = nn.Linear(c.width, (c.heads + 2 * c.kv_heads) * c.head_width, bias=False)
        self.out = nn.Linear(c.heads * c.head_width, c.width, bias=False)

    def forward(self, x_BSD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        B, S, _ = x_BSD.shape
        qkv = self.qkv(x_BSD).view(B, S, self.K, self.G + 2, self.H)
        q_BSNH = qkv[..., : self.G, :].reshape(B, S, self.N, self.H)
        k_BSKH, v_BSKH = qkv[..., self.G, :], qkv[..., self.G + 1, :]
        rotated = []
        for head in (q_BSNH, k_BSKH):
            a, b = head.chunk(2, dim=-1)
            rotated.append(torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1))
        q, k, v = (head.transpose(1, 2) for head in (*rotated, v_BSKH))
        o_BNSH = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.G > 1)
        return self.out(o_BNSH.transpose(1, 2).reshape(B, S, -1))


class PlainFeedForward(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.gate, self.up = (nn.Linear(c.width, c.ffn_width, bias=False) for _ in range(2))
        self.down = nn.Linear(c.ffn_width, c.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class PlainBlock(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(c.width, c.norm_eps) for _ in range(2))
        self.attention, self.ffn = PlainAttention(c), PlainFeedForward(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.ffn(self.norm2(x))


class PlainEmbedding(nn.Module):
    def __init__(self, c: ModelConfig):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.width)


class Plain(nn.Module):
    """A Llama model with tied embeddings; parameters have the Transformer's names, so that state dicts match."""

    def __init__(self, c: ModelConfig, loss: Callable[..., Tensor]):
        super().__init__()
        self.c, self.loss = c, loss
        self.embed, self.norm = PlainEmbedding(c), nn.RMSNorm(c.width, c.norm_eps)
        self.blocks = nn.ModuleList(PlainBlock(c) for _ in range(c.layers))

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor) -> Tensor:
        theta = self.c.rope_theta ** (-torch.arange(0, self.c.head_width, 2) / self.c.head_width)
        angle = torch.arange(tokens_BS.shape[1])[:, None, None] * theta
        cos, sin = angle.cos(), angle.sin()
        x = self.embed.tokens(tokens_BS)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.loss(self.norm(x).flatten(0, 1), self.embed.tokens.weight, targets_BS.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--sequence", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch")
    parser.add_argument("--no-report", action="store_true", help="print only; write no result")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config = preset("tour")
    B, S = args.batch, args.sequence
    ids_BS = torch.randint(config.vocab_size, (B, S + 1), generator=torch.Generator().manual_seed(0))
    tokens_BS, targets_BS = ids_BS[:, :-1].contiguous(), ids_BS[:, 1:].contiguous()
    model = initialise(Transformer(config), 0)
    plain, whole = Plain(config, PlainLoss.apply), Plain(config, torch_loss)
    for other in (plain, whole):
        other.load_state_dict(model.state_dict())

    def ours(_: int) -> None:
        stream = Stream(tokens_BS.flatten(), torch.arange(S).repeat(B))
        loss_sum, count = model(stream, Packed.of([S] * B), Loss(targets_BS.flatten()))
        model.zero_grad()
        (loss_sum / count).backward()

    def theirs(other: Plain) -> Callable[[int], None]:
        def step(_: int) -> None:
            loss_sum = other(tokens_BS, targets_BS)
            other.zero_grad()
            (loss_sum / targets_BS.numel()).backward()

        return step

    runs = {"colonnade": ours, "plain modules": theirs(plain), "plain, cross_entropy": theirs(whole)}
    for run in runs.values():
        run(0)
    expected = {name: p.grad for name, p in model.named_parameters()}
    for other in (plain, whole):
        for name, p in other.named_parameters():
            torch.testing.assert_close(p.grad, expected[name], rtol=1e-4, atol=1e-6)

    neighbours = OtherProcesses()
    times = run_interleaved({name: wall_clock(run) for name, run in runs.items()}, args.rounds, warm_up=3)
    rows = [
        {
            "who": name,
            "forward_backward_ms": round(1e3 * statistics.median(took), 2),
            "colonnade_over_it": round(
                statistics.median(a / b for a, b in zip(times["colonnade"], took, strict=True)), 4
            ),
        }
        for name, took in times.items()
    ]
    for row in rows:
        print(row)
    if args.no_report:
        return
    head = Headline(
        f"overhead of axes, attend and head in one process, the tour model forward and backward, {B} x {S} tokens",
        rows[0]["forward_backward_ms"],
        "ms",
        "the same maths in plain modules",
        rows[1]["forward_backward_ms"],
    )
    notes = (
        f"{config.parameters / 1e6:.2f} M parameters, float32, {B} sequences of {S} tokens, {args.threads} threads; "
        f"medians of {args.rounds} alternating rounds, ratios taken round by round; {neighbours}."
    )
    report("axis_overhead_cpu", rows, notes, headlines=[head])


if __name__ == "__main__":
    main()

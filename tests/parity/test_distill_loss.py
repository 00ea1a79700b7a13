"""The distillation loss against plain torch and autograd: values and gradients, over tp and dp."""

import pytest
import torch
from torch.nn import functional as F

from colonnade.config import Plan
from colonnade.model.distill_loss import DistillLoss, Teacher, distillation_sum
from colonnade.model.loss import IGNORE
from colonnade.parallel.axis import SOLO
from colonnade.parallel.distributed_context import DistributedContext
from tests.worlds import assert_same, run

V, T, D, S = 101, 42, 10, 14
"""Three samples of 14 tokens."""
LOSSES = {
    "kl": DistillLoss("kl", 0.3, 2.0),
    "kl_alone": DistillLoss("kl", 0.0),
    "reverse": DistillLoss("reverse", 0.25, 1.5),
    "jsd": DistillLoss("jsd", 0.5, 1.3, beta=0.2),
    "dist": DistillLoss("dist", 0.4, 2.0, sample_tokens=S),
    "hidden": DistillLoss("kl", 0.4, hidden=0.7),
    "cross_entropy": DistillLoss("kl", 1.0, hidden=0.7),
}


def inputs() -> dict[str, torch.Tensor]:
    def random(*shape: int, seed: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    targets = torch.randint(V, (T,), generator=torch.Generator().manual_seed(5))
    targets[torch.tensor([0, 3, 20, 41])] = IGNORE
    return {
        "x": random(T, D, seed=1), "w": random(V, D, seed=2), "tx": random(T, D, seed=3), "tw": random(V, D, seed=4),
        "targets": targets,
    }  # fmt: skip


def pearson(a: torch.Tensor, b: torch.Tensor, dim: int) -> torch.Tensor:
    return F.cosine_similarity(a - a.mean(dim, keepdim=True), b - b.mean(dim, keepdim=True), dim, eps=1e-30)


def plain(loss: DistillLoss, x, w, tx, tw, targets) -> torch.Tensor:
    """The equations of the module's docstring in plain torch."""
    z, t, valid, tau = x @ w.T, tx @ tw.T, targets != IGNORE, loss.temperature
    total = loss.mix * F.cross_entropy(z, targets, ignore_index=IGNORE, reduction="sum")
    p, q = (t / tau).softmax(1), (z / tau).softmax(1)
    if loss.loss == "kl":
        d = (p * (p / q).log()).sum(1)[valid].sum()
    elif loss.loss == "reverse":
        d = (q * (q / p).log()).sum(1)[valid].sum()
    elif loss.loss == "jsd":
        m = loss.beta * p + (1 - loss.beta) * q
        d = (loss.beta * p * (p / m).log() + (1 - loss.beta) * q * (q / m).log()).sum(1)[valid].sum()
    else:
        d = 2 * (1 - pearson(p, q, 1))[valid].sum()
        for rows in torch.arange(T).split(S):
            these = rows[valid[rows]]
            share = p[these].mean(0)
            d = d + 2 * len(these) * (share * (1 - pearson(p[these], q[these], 0))).sum()
    total = total + (1 - loss.mix) * tau**2 * d
    distance = (x - tx).square().sum(1) / tx.square().sum(1)
    return total + loss.hidden * distance[valid].sum()


def expected(loss: DistillLoss) -> tuple[torch.Tensor, ...]:
    given = inputs()
    x, w = given["x"].requires_grad_(), given["w"].requires_grad_()
    total = plain(loss, **given)
    return (total.detach(), *torch.autograd.grad(total, (x, w)))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("chunk", [None, 5])
def test_one_process_equals_autograd(name, chunk, monkeypatch) -> None:
    if chunk:
        monkeypatch.setitem(__import__("colonnade.model.loss", fromlist=["CHUNK_ROWS"]).CHUNK_ROWS, "cpu", chunk)
    loss, given = LOSSES[name], inputs()
    x, w = given["x"].requires_grad_(), given["w"].requires_grad_()
    teacher = Teacher(given["tx"], given["tw"])
    total = distillation_sum(x, w, given["targets"], teacher, loss, tp=SOLO, vocab_size=V)
    dx, dw = torch.autograd.grad(3 * total, (x, w))
    value, ex, ew = expected(loss)
    assert_same(total.detach(), value)
    assert_same(dx, 3 * ex)
    assert_same(dw, 3 * ew)


def plain_top(loss: DistillLoss, k: int, x, w, tx, tw, targets, sampled) -> torch.Tensor:
    """Cross-entropy of the text's tokens, and KL of k + 1 events."""
    z, valid, tau = x @ w.T, targets != IGNORE, loss.temperature
    text = targets.where(~sampled, IGNORE)
    total = loss.mix * F.cross_entropy(z, text, ignore_index=IGNORE, reduction="sum")
    p, q = (tx @ tw.T / tau).softmax(1), (z / tau).softmax(1)
    top, at = p.topk(k, 1)
    top = top.float().double()  # as a cache stores them: log-probabilities in float32
    p, q = (torch.cat((a, 1 - a.sum(1, keepdim=True)), 1) for a in (top, q.gather(1, at)))
    return total + (1 - loss.mix) * tau**2 * (p * (p / q).log()).sum(1)[valid].sum()


def _top_on_ranks(tp: int, k: int) -> tuple[torch.Tensor, ...]:
    loss, given = LOSSES["kl"], inputs()
    with DistributedContext.build(Plan(tp=tp)) as context:
        axis = context.axes.tp
        a, b = axis.part(V)
        x, w = given["x"].requires_grad_(), given["w"][a:b].clone().requires_grad_()
        top = Teacher(given["tx"], given["tw"][a:b]).top(k, loss.temperature, axis, V)
        total = distillation_sum(
            axis.fan_out(x), w, given["targets"], top, loss, tp=axis, vocab_size=V, sampled_T=SAMPLED
        )
        return (total.detach(), *torch.autograd.grad(total, (x, w)))


SAMPLED = torch.arange(T) % 3 == 1


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_most_likely_tokens_equal_autograd(tp) -> None:
    k, given = 30, inputs()  # more than a rank's part of the vocabulary with tp=4
    x, w = given["x"].requires_grad_(), given["w"].requires_grad_()
    total = plain_top(LOSSES["kl"], k, **given, sampled=SAMPLED)
    ex, ew = torch.autograd.grad(total, (x, w))
    ranks = run(tp, _top_on_ranks, tp, k)
    for value, dx, _ in ranks:
        assert_same(value, total.detach(), 1e-6)
        assert_same(dx, ex, 1e-6)
    assert_same(torch.cat([dw for _, _, dw in ranks]), ew, 1e-6)


def test_all_tokens_are_the_whole_divergence() -> None:
    loss, given = LOSSES["kl_alone"], inputs()
    x, w = given["x"].requires_grad_(), given["w"].requires_grad_()
    teacher = Teacher(given["tx"], given["tw"])
    found = []
    for each in (teacher, teacher.top(V, 1.0, SOLO, V)):
        total = distillation_sum(x, w, given["targets"], each, loss, tp=SOLO, vocab_size=V)
        found.append((total.detach(), *torch.autograd.grad(total, (x, w))))
    for ours, theirs in zip(*found, strict=True):
        assert_same(ours, theirs, 1e-5)
    few = distillation_sum(x, w, given["targets"], teacher.top(5, 1.0, SOLO, V), loss, tp=SOLO, vocab_size=V)
    assert few < found[0][0]


def _on_ranks(tp: int, name: str) -> tuple[torch.Tensor, ...]:
    loss, given = LOSSES[name], inputs()
    with DistributedContext.build(Plan(tp=tp)) as context:
        axis = context.axes.tp
        a, b = axis.part(V)
        x, w = given["x"].requires_grad_(), given["w"][a:b].clone().requires_grad_()
        teacher = Teacher(given["tx"], given["tw"][a:b])
        total = distillation_sum(axis.fan_out(x), w, given["targets"], teacher, loss, tp=axis, vocab_size=V)
        return (total.detach(), *torch.autograd.grad(total, (x, w)))


@pytest.mark.sample(5)
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", ["kl", "reverse", "jsd", "dist", "hidden"])
def test_tensor_parallel_equals_autograd(tp, name) -> None:
    value, ex, ew = expected(LOSSES[name])
    ranks = run(tp, _on_ranks, tp, name)
    for total, dx, _ in ranks:
        assert_same(total, value)
        assert_same(dx, ex)
    assert_same(torch.cat([dw for _, _, dw in ranks]), ew)


def test_a_perfect_student_has_no_divergence() -> None:
    given = inputs()
    for name in ("kl", "reverse", "jsd", "dist"):
        loss = DistillLoss(name, 0.0, 1.0, hidden=1.0, sample_tokens=S)
        x, w = given["tx"].clone().requires_grad_(), given["tw"].clone().requires_grad_()
        teacher = Teacher(given["tx"], given["tw"])
        total = distillation_sum(x, w, given["targets"], teacher, loss, tp=SOLO, vocab_size=V)
        dx, dw = torch.autograd.grad(total, (x, w))
        assert total.abs() < 1e-12
        assert max(dx.abs().max(), dw.abs().max()) < 1e-12


def test_no_valid_token_gives_zero() -> None:
    given = inputs()
    nothing = torch.full((T,), IGNORE)
    for loss in LOSSES.values():
        x = given["x"].clone().requires_grad_()
        total = distillation_sum(x, given["w"], nothing, Teacher(given["tx"], given["tw"]), loss, tp=SOLO, vocab_size=V)
        (dx,) = torch.autograd.grad(total, x)
        assert total == 0
        assert not dx.any()

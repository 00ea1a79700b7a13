"""The chunked cross-entropy equals torch's, with its gradients."""

import pytest
import torch
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from colonnade.model import loss
from colonnade.model.loss import IGNORE, cross_entropy_sum
from colonnade.parallel.axis import SOLO
from tests.worlds import assert_same


@pytest.mark.parametrize("rows", [1, 3, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_chunked_loss_and_gradients_match_torch(
    monkeypatch: pytest.MonkeyPatch, rows: int, smoothing: float, dtype: torch.dtype
) -> None:
    monkeypatch.setitem(loss.CHUNK_ROWS, "cpu", rows)
    generator = torch.Generator().manual_seed(0)
    x_TD, weight_VD = (torch.randn(n, 6, generator=generator, dtype=torch.float64).to(dtype) for n in (10, 17))
    targets_T = torch.randint(17, (10,), generator=generator).index_fill(0, torch.tensor([2, 3, 9]), IGNORE)
    leaves = [x.clone().requires_grad_() for x in (x_TD, weight_VD)]
    ours = cross_entropy_sum(leaves[0], leaves[1], targets_T, tp=SOLO, vocab_size=17, smoothing=smoothing)
    ours.backward()
    exact = [x.double().requires_grad_() for x in (x_TD, weight_VD)]
    logits_TV = exact[0] @ exact[1].T
    expected = F.cross_entropy(logits_TV, targets_T, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    expected.backward()
    bound = 1e-10 if dtype == torch.float64 else 2e-2
    for name, a, b in (
        ("loss", ours, expected),
        *(("grad", a.grad, b.grad) for a, b in zip(leaves, exact, strict=True)),
    ):
        assert_same(a.double(), b, bound, what=name)


def test_logits_are_never_allocated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a vocabulary of 131,072, logits of all 256 tokens take 134 MB, those of a chunk 4 MB."""
    monkeypatch.setitem(loss.CHUNK_BYTES, "cpu", 1 << 22)
    V, T = 131_072, 256
    x_TD, weight_VD = torch.randn(T, 4, requires_grad=True), torch.randn(V, 4, requires_grad=True)
    targets_T = torch.randint(V, (T,))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        cross_entropy_sum(x_TD, weight_VD, targets_T, tp=SOLO, vocab_size=V, smoothing=0.1).backward()
    assert seen.profiler is not None and seen.profiler.kineto_results is not None
    deltas = [event.nbytes() for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
    peak_bytes = torch.tensor(deltas).cumsum(0).max().item()
    assert weight_VD.nbytes < peak_bytes < 40e6 < T * V * 4


def test_token_count_is_not_rounded_to_16_bits() -> None:
    """1/count in bfloat16 is off by up to 0.4%, and with it every gradient of the model."""
    x, w = torch.randn(64, 8).bfloat16(), torch.randn(16, 8).bfloat16()
    targets, count = torch.arange(64) % 16, 331.0
    grads = []
    for divisor in (1.0, count):
        it = x.clone().requires_grad_()
        (cross_entropy_sum(it, w, targets, tp=SOLO, vocab_size=16) / divisor).backward()
        assert it.grad is not None
        grads.append(it.grad.float())
    ratio = (grads[0] / grads[1]).nanmedian().item()
    assert abs(ratio / count - 1) < 1e-3

"""Dropout on a GPU: the CPU's masks bit for bit; attention close to float64; one compiled graph."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from colonnade.config import ModelConfig
from colonnade.kernels import dropout as dropout_reference
from colonnade.kernels.attention import reference
from colonnade.kernels.dropout import AttentionDropout
from colonnade.kernels.registry import choose
from colonnade.model import Dropout, DropoutRates, Loss, Packed, Stream, Transformer, initialise

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 6e-4}
KEY = torch.tensor(-(2**62) + 12345)


def test_triton_kernels_are_the_default() -> None:
    for operation in ("dropout", "dropout_attention"):
        for dtype in TOLERANCE:
            assert choose(operation, "cuda", dtype) is choose(operation, "cuda", dtype, "triton")
        assert choose(operation, "cuda", torch.float64) is not choose(operation, "cuda", torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kernel", ["triton", "recompute"])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("T", "D"), [(1000, 1536), (3, 5), (0, 8)])
def test_elementwise_dropout_equals_cpu_bitwise(
    kernel: str, dtype: torch.dtype, compiled: bool, T: int, D: int
) -> None:
    torch._dynamo.reset()
    x, g = torch.randn(2, T, D, generator=torch.Generator().manual_seed(0)).to(dtype)
    index_T = torch.arange(T) * 7 + 2**32 - 50
    run = choose("dropout", "cuda", dtype, kernel)
    run = torch.compile(run, fullgraph=True) if compiled else run
    results = []
    for it, device in ((run, "cuda"), (dropout_reference.dropout, "cpu")):
        leaf = x.detach().to(device).requires_grad_()
        y = it(leaf, KEY.to(device), index_T.to(device), site=1, rate=0.1, start=40)
        y.backward(g.to(device))
        results.append((y.detach().cpu(), leaf.grad.cpu()))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


EQUAL, RAGGED = [256, 256], [5, 0, 1, 199, 600]
CASES = [
    (torch.bfloat16, EQUAL, True, None, 6, 128),
    (torch.bfloat16, RAGGED, True, 70, 2, 64),
    (torch.bfloat16, RAGGED, False, None, 3, 40),
    (torch.float16, RAGGED, True, None, 6, 128),
    (torch.float16, EQUAL, False, 70, 2, 64),
    (torch.float32, RAGGED, True, 70, 3, 40),
    (torch.float32, EQUAL, False, None, 6, 128),
    (torch.bfloat16, EQUAL, True, None, 6, 256),
]
"""About one case per value and dtype, because each compiles three kernels, which takes seconds."""


@pytest.mark.parametrize(("dtype", "lengths", "causal", "window", "kv", "H"), CASES, ids=str)
def test_attention(dtype: torch.dtype, lengths: list[int], causal: bool, window: int | None, kv: int, H: int) -> None:
    T, equal = sum(lengths), len(set(lengths)) == 1
    cu = torch.tensor([0, *lengths, *([] if equal else [0] * 3)]).cumsum(0).int().cuda()
    index_T = torch.arange(T, device="cuda") * 3 + 1000
    pairs = AttentionDropout(KEY.cuda(), index_T, index_T, 0.2, head=7)
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(T, n, H, generator=draw).to(dtype).cuda() for n in (6, kv, kv)]
    weight = torch.randn(T, 6, H, generator=draw).cuda().double()
    results = []
    for run, kind in ((choose("dropout_attention", "cuda", dtype), dtype), (reference.packed, torch.float64)):
        q, k, v = (x.detach().to(kind).requires_grad_() for x in inputs)
        o = run(q, k, v, cu, longest=max(lengths), equal=equal, causal=causal, window=window, dropout=pairs)
        o.backward(weight.to(kind))
        results.append((o.detach(), q.grad, k.grad, v.grad))
    for what, got, exact in zip(("o", "dq", "dk", "dv"), *results, strict=True):
        assert error(got, exact) < TOLERANCE[dtype] * (1 if what == "o" else 2), what


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_attention_is_deterministic(dtype: torch.dtype) -> None:
    index_T = torch.arange(900, device="cuda")
    pairs = AttentionDropout(KEY.cuda(), index_T, index_T, 0.2)
    q, k, v = (torch.randn(900, n, 64, device="cuda").to(dtype).requires_grad_() for n in (8, 2, 2))
    cu = torch.tensor([0, 500, 900], device="cuda").int()
    run, runs = choose("dropout_attention", "cuda", dtype), []
    for _ in range(3):
        o = run(q, k, v, cu, longest=500, equal=False, dropout=pairs)
        runs.append((o, *torch.autograd.grad(o.float().pow(2).sum(), (q, k, v))))
    assert all(torch.equal(a, b) for other in runs[1:] for a, b in zip(other, runs[0], strict=True))


@pytest.mark.parametrize("lengths", [[64, 64], [100, 28]], ids=str)
def test_blocks_share_one_graph(lengths: list[int]) -> None:
    """Also with ragged sequences: the kernel is a torch operator whose lengths stay on the device."""
    config = ModelConfig(vocab_size=67, layers=10, width=64, heads=4, kv_heads=2, ffn_width=96, context=128)
    losses = []
    for compiled in (False, True):
        torch._dynamo.reset()
        model = initialise(Transformer(config, device="cuda"), 0)
        counter = CompileCounterWithBackend("inductor")
        if compiled:
            for block in model.blocks:
                block.compile(backend=counter, fullgraph=True)
        tokens = torch.arange(128, device="cuda") % 67
        for step in range(3):
            noise = Dropout.of(0, step, 10, torch.arange(128, device="cuda"), DropoutRates(0.1, 0.2, 0.3))
            packed = Packed.of(lengths, "cuda", dropout=noise)
            loss, _ = model(Stream(tokens, tokens, noise), packed, Loss((tokens + 1) % 67))
            loss.backward()
            losses.append(loss.item())
    assert counter.frame_count == 1
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-4)
    assert len(set(losses[:3])) == 3

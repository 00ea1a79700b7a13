"""Triton kernels run by the interpreter on a CPU: ``TRITON_INTERPRET=1 python -m tests.interpreted``.

Triton decides at import whether to interpret, so these checks run in their own process, started by
tests/unit/test_triton.py. The interpreter does not support bfloat16, which tests/gpu covers.
"""

import itertools
import warnings

import torch

from colonnade.kernels import adamw as adamw_reference
from colonnade.kernels import dropout as dropout_reference
from colonnade.kernels import host_rows as host_rows_reference
from colonnade.kernels import triton_adamw, triton_dropout, triton_host_rows
from colonnade.kernels.adamw import ParameterState
from colonnade.kernels.attention import cudnn_relative, reference
from colonnade.kernels.dropout import AttentionDropout
from tests.adamw import random_states, two_steps

TOLERANCE = {torch.float32: 1e-6, torch.float16: 6e-4}


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_elements() -> int:
    """Bitwise equal to the reference, forward and backward, also for a column slice."""
    count = 0
    key, wide = torch.tensor(-(2**62) + 99), draw(7, 700, seed=0)
    for x, rate, start, dtype in itertools.product(
        (wide, wide[:, 3:40], wide[:0], wide[:, :1], wide[:, :30].T),
        (0.1, 0.9),
        (0, 2**31 - 1000),
        (torch.float32, torch.float16),
    ):
        index_T = torch.arange(len(x)) * 3 + 2**33
        results = []
        for run in (triton_dropout.dropout, dropout_reference.dropout):
            leaf = x.to(dtype).detach().requires_grad_()
            y = run(leaf, key, index_T, site=2, rate=rate, start=start)
            y.backward(torch.ones_like(y) * 3)
            results.append((y, leaf.grad))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        count += 1
    return count


def check_attention() -> int:
    """Outputs and gradients close to float64 by norm (relative above 1)."""
    count = 0
    sequences = {"ragged": [70, 0, 1], "equal": [40, 40], "one": [1], "none": []}
    sees = [(True, None), (True, 7), (False, None), (False, 7)]
    heads = [(6, 2, 20), (4, 4, 8), (2, 1, 130)]  # query heads, key/value heads, width
    for i, (name, (causal, window)) in enumerate(itertools.product(sequences, sees)):
        (N, K, H), dtype = heads[i % 3], (torch.float32, torch.float16)[i // 2 % 2]
        if name == "one":  # with one key, gradients of q and k are rounding only
            dtype = torch.float32
        lengths = sequences[name]
        T, equal = sum(lengths), name == "equal"
        cu = torch.tensor([0, *lengths, *([] if equal else [0, 0])]).cumsum(0).int()
        index_T = torch.arange(T).flip(0) * 3 + 100
        pairs = AttentionDropout(torch.tensor(-987654321987), index_T, index_T, 0.3, head=5)
        # As in attention: views of the joint projection, so that heads are not contiguous.
        qkv = draw(T, K, N // K + 2, H, seed=i, dtype=dtype)
        do = draw(T, N, H, seed=99, dtype=torch.float64)
        results = []
        for run, kind in ((triton_dropout.packed, dtype), (reference.packed, torch.float64)):
            leaf = qkv.detach().to(kind).requires_grad_()
            q, k, v = leaf[:, :, :-2].flatten(1, 2), leaf[:, :, -2], leaf[:, :, -1]
            longest = max(lengths, default=0) + (0 if equal else 10)
            o = run(q, k, v, cu, longest=longest, equal=equal, causal=causal, window=window, dropout=pairs)
            o.backward(do.to(kind))
            grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            results.append((o.detach(), grad[:, :, :-2], grad[:, :, -2], grad[:, :, -1]))
        for what, got, exact in zip(("o", "dq", "dk", "dv"), *results, strict=True):
            error = float((got.double() - exact).norm() / exact.norm().clamp(min=1))
            assert error < TOLERANCE[dtype] * (1 if what == "o" else 2), (name, causal, window, H, dtype, what, error)
        count += 1
    return count


def check_relative_bias() -> int:
    """The gradient of the biases equals autograd's in float64: padded sequences, masked keys, parts of the batch."""
    count = 0
    for (B, T, N, H), lengths, causal in (((3, 40, 2, 20), None, True), ((5, 33, 1, 8), [33, 1, 7, 12, 33], False)):
        qkv, do = draw(B, T, N, 3, H, seed=1), draw(B, T, N, H, seed=2)
        bias = draw(N, T, T, seed=3).masked_fill(torch.ones(T, T).triu(1).bool() & causal, -torch.inf)
        q, k, v = qkv.unbind(3)
        lengths_B = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
        exact = bias.double().requires_grad_()
        scores = torch.einsum("bind,bjnd->bnij", q.double(), k.double()) * H**-0.5 + exact
        if lengths_B is not None:
            scores = scores.masked_fill((torch.arange(T) >= lengths_B[:, None])[:, None, None], -torch.inf)
        o = torch.einsum("bnij,bjnd->bind", scores.softmax(-1), v.double())
        (o * do.double()).sum().backward()
        lse = scores.logsumexp(-1).detach().float().contiguous()
        for programs in (1, 264):
            cudnn_relative.MIN_PROGRAMS, before = programs, cudnn_relative.MIN_PROGRAMS
            got = cudnn_relative.bias_grad(do, q, k, v, o.detach().float(), lse, bias, lengths_B)
            cudnn_relative.MIN_PROGRAMS = before
            assert exact.grad is not None
            assert (got.double() - exact.grad).norm() < 1e-6 * exact.grad.norm()
            count += 1
    return count


def check_attention_bits() -> int:
    """Deterministic; equals SDPA where nothing can be dropped."""
    q, k, v = (draw(50, 2, 16, seed=seed).requires_grad_() for seed in (0, 1, 2))
    cu, index_T = torch.tensor([0, 50]).int(), torch.arange(50)
    found = []
    for rate in (0.5, 0.5, 2**-50):
        pairs = AttentionDropout(torch.tensor(5), index_T, index_T, rate)
        o = triton_dropout.packed(q, k, v, cu, longest=50, equal=True, dropout=pairs)
        found.append((o.detach(), *torch.autograd.grad(o.pow(2).sum(), (q, k, v))))
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[1], strict=True))
    heads = [x.transpose(0, 1)[None] for x in (q, k, v)]
    o = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True)[0].transpose(0, 1)
    plain = (o, *torch.autograd.grad(o.pow(2).sum(), (q, k, v)))
    assert all((a - b).abs().max() < 1e-4 for a, b in zip(found[2], plain, strict=True))
    assert not torch.allclose(found[0][0], plain[0], atol=1e-2)
    return 3


def check_operators() -> int:
    """Custom operators for torch.compile: schemas, fake tensors, autograd registration."""
    q, k, v = (draw(8, n, 16, seed=n).requires_grad_() for n in (2, 1, 1))
    row, column = torch.zeros(2, 8, dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    arguments = (q, k, v, row, column, torch.tensor([0, 8]).int(), 8, True, 0, 0.25)
    torch.library.opcheck(torch.ops.colonnade.dropout_attention.default, arguments)
    return 1


def check_adamw() -> int:
    """Moments bitwise; weights to an ulp or two, because torch's CPU sqrt is not always correctly rounded."""
    count = 0
    for gradient, copy in ((torch.float32, None), (torch.float32, torch.float16), (torch.float16, torch.float16)):
        weights = random_states(gradient, copy)
        got, exact = (two_steps(run, weights) for run in (triton_adamw.adamw, adamw_reference.adamw))
        for ours, theirs in zip(got, exact, strict=True):
            tolerance = torch.finfo(ours.dtype).eps * 2
            assert ours.dtype == theirs.dtype and torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance)
            assert ours.dtype != torch.float32 or (ours != theirs).float().mean().nan_to_num() < 0.05
        kept = two_steps(triton_adamw.adamw, weights, skip=1.0)
        assert all(
            torch.equal(x, y) for x, y in zip(kept, [x for w in weights for x in w[1:] if x is not None], strict=True)
        )
        count += 2
    # Only the weights change: unaligned neighbours in the same buffer do not.
    flat = torch.arange(4 * 700.0)
    parts = flat.view(4, 700)[:, 1:601]
    adamw = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    one = torch.ones(1)
    before = flat.clone()
    triton_adamw.adamw([ParameterState(*parts)], one, one, one, one.squeeze(), torch.tensor(0.0), **adamw)
    changed = (flat != before).view(4, 700)
    assert not changed[0].any() and changed[1:, 1:601].all() and changed.sum() == 3 * 600
    return count + 1


def check_host_rows() -> int:
    """Bitwise the reference: ragged last blocks, several blocks per program, no rows; other rows stay as they are."""
    count = 0
    for (R, D), rows in itertools.product(((40, 3), (2000, 1), (300, 130)), (0, 1, 37)):
        rows_U = torch.randperm(R, generator=torch.Generator().manual_seed(R))[: rows * R // 40]
        results = []
        for run in (triton_host_rows.copy_rows, host_rows_reference.copy_rows):
            table, copy = draw(R, D, seed=0), torch.empty(len(rows_U), D)
            run(table, rows_U, copy, write=False)
            run(table, rows_U, copy + 1, write=True)
            results.append((copy, table))
        assert torch.equal(results[0][0], results[1][0])
        assert torch.equal(results[0][1], results[1][1])
        count += 1
    return count


if __name__ == "__main__":
    warnings.simplefilter("error")
    checks = (
        check_elements, check_attention, check_relative_bias, check_attention_bits, check_operators, check_adamw,
        check_host_rows,
    )  # fmt: skip
    for check in checks:
        print(f"{check.__name__}: {check()} cases", flush=True)

"""``serve.batch_invariant`` on a GPU: GEMMs, norms and whole requests are bitwise independent of the batch.

pytest -q tests/gpu/test_invariant_gpu.py        # about two minutes, half of it compiling
"""

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from colonnade.config import ServeConfig
from colonnade.errors import ConfigError
from colonnade.kernels import norm as norm_reference
from colonnade.kernels import triton_batch_invariant
from colonnade.kernels.attention.triton_merge import FEW_CHUNKS
from colonnade.kernels.linear import reference as linear_reference
from colonnade.kernels.triton_batch_invariant import CHUNK
from colonnade.serve import Engine
from tests.decoding import Case, attend_alone
from tests.serve import test_serve_invariant as cpu
from tests.serve import tiny

pytestmark = pytest.mark.filterwarnings("ignore")

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 2e-6}
"""Relative norm; float32 sums 4,096 products sequentially, which costs 1.15e-6."""


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(4096, 4096), (333, 1000), (11008, 4096)])
def test_products(dtype: torch.dtype, outputs: int, inputs: int) -> None:
    w, b = torch.randn(outputs, inputs, device="cuda").to(dtype), torch.randn(outputs, device="cuda").to(dtype)
    x = torch.randn(300, inputs, device="cuda").to(dtype)
    whole = triton_batch_invariant.linear(x, w, b)
    exact = linear_reference.linear(x.double(), w.double(), b.double())
    assert (whole - exact).norm() < TOLERANCE[dtype] * exact.norm()
    for first, last in ((0, 1), (63, 65), (1, 300), (299, 300), (100, 228)):
        assert torch.equal(triton_batch_invariant.linear(x[first:last], w, b), whole[first:last])


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("width", [128, 576, 4096, 8192])
@pytest.mark.parametrize("biased", [False, True])
def test_norms(dtype: torch.dtype, width: int, biased: bool) -> None:
    w = torch.randn(width, device="cuda").to(dtype)
    b = torch.randn(width, device="cuda").to(dtype) if biased else None
    x = torch.randn(300, width, device="cuda").to(dtype)
    whole = triton_batch_invariant.norm(x, w, b, 1e-5)
    exact = norm_reference.norm(x.double(), w.double(), None if b is None else b.double(), 1e-5)
    assert (whole - exact).norm() < TOLERANCE[dtype] * exact.norm()
    for first, last in ((0, 1), (5, 7), (1, 300)):
        assert torch.equal(triton_batch_invariant.norm(x[first:last], w, b, 1e-5), whole[first:last])


@pytest.mark.parametrize("chunks", [1, FEW_CHUNKS, 100])
@pytest.mark.parametrize("group", [1, 4, 8])
def test_attention(chunks: int, group: int) -> None:
    """Queries on both sides of a chunk boundary and of the change of summation: within a block, alone, in a batch."""
    how = {"K": 2, "group": group, "H": 128, "page": 64, "dtype": torch.float16, "chunk": CHUNK}
    made = Case([chunks * CHUNK + 9], [20], **how).made("cuda")
    whole = made.run().o
    for t in range(20):
        for ahead in (0, 16):
            assert torch.equal(attend_alone(made, t, ahead).o[0], whole[t]), (t, ahead)
    for length in (chunks * CHUNK, chunks * CHUNK + 1):
        alone = Case([length], [1], **how).made("cuda").run().o[0]
        for others in (3, 70):
            for at in (0, others // 2, others):
                lengths = [(997 * i) % 12_000 for i in range(others)]
                lengths.insert(at, length)
                queries = [3 if i % 5 == 4 else 1 for i in range(others + 1)]
                queries[at] = 1
                for ahead in (0, 16):
                    o = Case(lengths, queries, **how).made("cuda", ahead=ahead).run().o
                    assert torch.equal(o[sum(queries[:at])], alone), (length, others, at, ahead)


@pytest.mark.parametrize("name", ["llama", "gpt2", "window"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("graphed", [False, True])
def test_requests(name: str, dtype: torch.dtype, graphed: bool) -> None:
    """As on a CPU; with CUDA graphs, whose steps are padded to varying sizes, and mixed with eager steps."""
    model = cpu.model(name, dtype).to("cuda")
    alone = cpu.bits(model, graph_capture=graphed)
    assert cpu.same(cpu.bits(model, cpu.other_requests(6), at=0, graph_capture=graphed), alone)
    assert cpu.same(cpu.bits(model, cpu.other_requests(6), at=6, token_budget=7, graph_capture=graphed), alone)
    assert cpu.same(
        cpu.bits(model, cpu.other_requests(6, seed=1), at=5, after=3, prefix_cache=False, graph_capture=False), alone
    )
    # CUDA graphs are the default.
    assert cpu.same(cpu.bits(model, cpu.other_requests(6, seed=3), at=4, pages=14, max_requests=5), alone)
    drawn = cpu.bits(model, params=cpu.SAMPLED, graph_capture=False)
    assert cpu.same(cpu.bits(model, cpu.other_requests(6), at=3, params=cpu.SAMPLED, graph_capture=graphed), drawn)


def test_request_in_a_batch_of_256() -> None:
    model = cpu.model("llama", torch.bfloat16).to("cuda")
    alone = cpu.bits(model, graph_capture=False)
    for at in (0, 100, 255):
        assert cpu.same(cpu.bits(model, cpu.other_requests(255, seed=at), at=at, graph_capture=False), alone)


@pytest.mark.parametrize(("name", "what"), [("experts", "experts"), ("latent", "latent attention")])
def test_unsupported_models_are_refused(name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"no batch-invariant kernels for {what} on a GPU"):
        Engine(cpu.model(name).to("cuda"), tiny.tokenizer(), ServeConfig(batch_invariant=True))

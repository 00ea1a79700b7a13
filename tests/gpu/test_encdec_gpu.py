"""Encoder–decoders on a GPU: training and serving compute what a CPU does, and decode steps are CUDA graphs."""

from dataclasses import replace

import pytest
import torch

from colonnade.config import ModelConfig, ServeConfig
from colonnade.kernels.attention import cross
from colonnade.kernels.registry import choose
from colonnade.model import Loss
from colonnade.serve import Engine, SamplingParams
from tests.encdec import inputs, nllb, random_model, switch, t5, texts
from tests.serve import tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # torch.compile, which the loss uses, warns

MODELS = {
    "t5": t5("1.1", head_width=16), "t5-old": t5("1.0", head_width=16), "switch": switch(head_width=16),
    "nllb": nllb(width=64, vocab_size=301),
}  # fmt: skip


def loss_and_gradients(
    config: ModelConfig, device: str, dtype: torch.dtype, lengths: tuple[list[int], list[int]]
) -> list[torch.Tensor]:
    model = random_model(config).train().requires_grad_().to(device, dtype)
    stream, attend = inputs(texts(lengths[0], 50), texts(lengths[1], 50))
    on = torch.device(device)
    source = stream.source
    assert source is not None
    source = source._replace(tokens_S=source.tokens_S.to(on), positions_S=source.positions_S.to(on))
    stream = stream._replace(tokens_T=stream.tokens_T.to(on), positions_T=stream.positions_T.to(on), source=source)
    assert attend.source is not None
    memory = replace(
        attend.memory,  # type: ignore[type-var]
        cu_sources=attend.source.cu_seqlens.to(on), cu_targets=attend.own.cu_seqlens.to(on),  # type: ignore[union-attr]
    )  # fmt: skip
    attend = replace(
        attend, own=replace(attend.own, cu_seqlens=attend.own.cu_seqlens.to(on)),  # type: ignore[type-var, union-attr]
        source=replace(attend.source, cu_seqlens=attend.source.cu_seqlens.to(on)), memory=memory,
    )  # fmt: skip
    loss, _ = model(stream, attend, Loss(stream.tokens_T))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("lengths", [([16, 16], [8, 8]), ([9, 1, 31], [5, 12, 2])], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", ["t5", "t5-old"])
def test_loss_and_gradients_equal_a_cpu(name: str, lengths: tuple[list[int], list[int]]) -> None:
    right = loss_and_gradients(MODELS[name], "cpu", torch.float64, lengths)
    found = loss_and_gradients(MODELS[name], "cuda", torch.float32, lengths)
    largest = max(float(x.norm()) for x in right[1:])
    for got, exact in zip(found, right, strict=True):
        error = (got.cpu().double() - exact).norm()
        assert error < 1e-3 * max(float(exact.norm()), 0.05 * largest), (got.shape, float(error))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cross_attention_of_unequal_lengths_is_one_launch(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys = torch.tensor([0, 7, 8, 70]).int(), torch.tensor([0, 30, 31, 100]).int()
    draw = lambda n: torch.randn(n, 4, 64, generator=generator)  # noqa: E731
    q, k, v = draw(70), draw(100), draw(100)
    exact = cross.cross_reference(q.double(), k.double(), v.double(), queries, keys)
    on_gpu = [x.to("cuda", dtype) for x in (q, k, v)]
    found = cross.cross_varlen(*on_gpu, queries.cuda(), keys.cuda(), longest=(62, 69))
    assert (found.cpu().double() - exact).norm() < 6e-3 * exact.norm()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [[31] * 3, [9, 0, 31], [114, 114]])
@pytest.mark.parametrize(
    ("kernels", "dtype", "tolerance"),
    [("sdpa", torch.float32, 1e-5), ("sdpa", torch.bfloat16, 3e-2), ("cudnn", torch.bfloat16, 1e-2),
     ("cudnn", torch.float16, 2e-3)],
)  # fmt: skip
def test_relative_attention_and_its_gradients(
    lengths: list[int], causal: bool, kernels: str, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    ends, T = torch.tensor([0, *lengths]).cumsum(0).int(), sum(lengths)
    tensors, weight = [*(draw(T, 4, 64) for _ in range(3)), draw(2 * 12 + 1, 4)], draw(T, 4, 64)
    found: list[list[torch.Tensor]] = []
    for device, kind in (("cpu", torch.float64), ("cuda", dtype)):
        q, k, v, near = (x.to(device, dtype).to(kind).detach().requires_grad_() for x in tensors)
        run = cross.relative_reference if device == "cpu" else choose("relative_attention", "cuda", dtype, kernels)
        o = run(q, k, v, ends.to(device), near, causal=causal, longest=max(lengths), equal=len(set(lengths)) == 1)
        gradients = torch.autograd.grad((o * weight.to(device, dtype).to(kind)).sum(), (q, k, v, near))
        found.append([o.detach(), *gradients])
    for exact, got in zip(*found, strict=True):
        assert (got.cpu().double() - exact).norm() < tolerance * exact.norm()


def test_relative_attention_is_a_custom_operator() -> None:
    """Of queries, keys and values that are slices of one projection, as in a model; in torch.compile too."""
    qkv = torch.randn(2, 24, 4, 3, 16, device="cuda", dtype=torch.bfloat16)
    q, k, v = (x.detach().requires_grad_() for x in qkv.unbind(3))
    bias = torch.randn(4, 24, 24, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for lengths in (None, torch.tensor([24, 7], device="cuda", dtype=torch.int32)):
        arguments = q, k, v, bias, lengths
        tests = ("test_schema", "test_faketensor", "test_autograd_registration")
        torch.library.opcheck(torch.ops.colonnade.relative_attention.default, arguments, test_utils=tests)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["t5", "switch", "nllb"])
def test_the_engine_gives_a_cpus_tokens_by_cuda_graphs(name: str, beams: int) -> None:
    tokenizer = tiny.tokenizer()
    languages: dict[str, str] = {}
    if name == "nllb":
        languages = {"source_lang": "eng_Latn", "target_lang": "fra_Latn"}
        tokenizer = tokenizer.with_special(["eng_Latn", "fra_Latn"])
    config = MODELS[name].replace(vocab_size=305)
    asked = [tuple(range(10, 10 + 3 * n)) for n in (1, 5, 2, 11, 4, 3, 9)]
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, beams=beams, **languages)
        for n in (9, 30, 12, 7, 2, 8, 17)
    ]
    found = []
    for device in ("cpu", "cuda"):
        model = random_model(config).float().to(device)
        engine = Engine(model, tokenizer, ServeConfig(pages=96, page_tokens=8, max_requests=3 * beams))
        found.append([each.token_ids for each in engine.generate(asked, params)])
        engine.scheduler.audit()
    assert found[0] == found[1]
    assert engine.config.graph_capture
    assert engine.core.runner.graphs is not None
    assert all(batch._graphs for batch in engine.core.runner.graphs._batches.values())
    assert engine.core.runner.graphs._batches

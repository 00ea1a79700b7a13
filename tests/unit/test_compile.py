"""torch.compile: all blocks share one graph, and new lengths soon stop causing recompilation."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from colonnade.config import ModelConfig
from colonnade.model import Dropout, DropoutRates, KVCache, Loss, Packed, Paged, Rows, Stream
from tests.models import CONFIGS, build
from tests.worlds import assert_same

# Dynamo's tracing reads .grad of non-leaf tensors and instantiates autograd Functions; both warnings are its own.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def model_config(layers: int) -> ModelConfig:
    return ModelConfig(vocab_size=67, layers=layers, width=24, heads=4, kv_heads=2, ffn_width=26, context=64)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def loss_of(model, lengths: list[int], step: int | None = None) -> torch.Tensor:
    T = sum(lengths)
    tokens = torch.arange(T) % 67
    positions = torch.cat([torch.arange(n) for n in lengths])
    noise = None
    if step is not None:
        noise = Dropout.of(0, step, len(model.blocks), torch.arange(T) + 100 * step, DropoutRates(0.1, 0.2, 0.3))
    stream, head = Stream(tokens, positions, dropout=noise), Loss((tokens + 1) % 67)
    total, count = model(stream, Packed.of(lengths, dropout=noise), head)
    return total / count


@pytest.mark.slow
def test_blocks_share_one_graph() -> None:
    """A layer index inside the block would compile one graph per layer, up to the recompile limit of eight."""
    plain, model = build(model_config(12)), build(model_config(12))
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    for lengths in ([16], [16], [8, 8], [24, 24]):
        model.zero_grad()
        plain.zero_grad()
        loss_of(model, lengths).backward()
        loss_of(plain, lengths).backward()
        for name, p in model.named_parameters():
            assert_same(p.grad, plain.get_parameter(name).grad, what=name)
    assert counter.frame_count <= 3  # one, then at most one each for a new T and a new number of sequences


@pytest.mark.slow
def test_blocks_with_dropout_share_one_graph() -> None:
    """Keys and indices are tensors, so no layer or step needs a graph of its own."""
    plain, model = build(model_config(12)), build(model_config(12))
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    for step in range(4):
        model.zero_grad()
        plain.zero_grad()
        loss_of(model, [8, 8], step).backward()
        loss_of(plain, [8, 8], step).backward()
        for name, p in model.named_parameters():
            assert_same(p.grad, plain.get_parameter(name).grad, what=name)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", ["latent", pytest.param("latent_yarn_biased", marks=pytest.mark.long)])
def test_latent_attention_compiles_to_few_graphs(name: str) -> None:
    """Values and gradients of blocks that expand keys and values from a latent vector."""
    plain, model = build(CONFIGS[name]), build(CONFIGS[name])
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter, fullgraph=True)
    for lengths in ([16], [8, 8]):
        model.zero_grad()
        plain.zero_grad()
        losses = [loss_of(m, lengths) for m in (model, plain)]
        assert_same(losses[0], losses[1], what="loss")
        for loss in losses:
            loss.backward()
        for what, p in model.named_parameters():
            expected = plain.get_parameter(what).grad
            assert p.grad is not None
            assert expected is not None
            assert_same(p.grad, expected, what=what)
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_decoding_graphs_equal_eager_decoding() -> None:
    """The graph writes the paged cache in place."""
    model, plain = build(model_config(10)), build(model_config(10))
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counter)
    caches = [KVCache(m.config, pages=8, page_tokens=4, dtype=torch.float64) for m in (model, plain)]
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 6), (6, 7), (7, 8), (8, 9)):
            logits = []
            for m, cache in zip((model, plain), caches, strict=True):
                new = stop - start
                at = torch.arange(start, stop)
                pages = torch.tensor([[0, 1, 2]], dtype=torch.int32)
                ends = torch.tensor([0, new], dtype=torch.int32)
                paged = Paged(cache, pages, at, ends, torch.tensor([stop], dtype=torch.int32), new, stop)
                logits.append(m(Stream(at % 67, at), paged, Rows()))
            assert_same(logits[0], logits[1])

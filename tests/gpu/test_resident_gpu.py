"""Offloaded experts: no buffer is read before its copy arrives or overwritten while in use."""

import gc
from pathlib import Path

import pytest
import torch

import colonnade
from colonnade import api
from colonnade.config import ExpertsConfig, MoeConfig, ServeConfig
from colonnade.model import Packed, Rows, Stream, Transformer
from colonnade.model.moe import OffloadedExperts, expert_modules
from colonnade.model.moe.expert_offload import device_bytes
from colonnade.model.moe.layer import MixtureOfExperts
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from tests.serve import tiny

DELAY_CYCLES = 20_000_000
"""Clock cycles of a delay, about ten milliseconds."""
MOE = MoeConfig(experts=8, active=2, ffn_width=512)
SIZES = {"layers": 6, "width": 256, "heads": 4, "kv_heads": 2, "head_width": 64, "init_std": 0.05, "moe": MOE}


def on_gpu(model: Transformer) -> Transformer:
    """A copy with all weights, including experts, on the GPU."""
    other = Transformer(model.config, device="cuda", dtype=torch.float32)
    other.load_state_dict(model.state_dict())
    return other.requires_grad_(False)


def offloaded(model: Transformer, buffers: int) -> Transformer:
    """A copy with its experts in host memory."""
    other = Transformer(model.config, device="cuda", dtype=torch.float32, experts_on=torch.device("cpu"))
    other.load_state_dict(model.state_dict())
    OffloadedExperts(
        expert_modules(other.requires_grad_(False)), buffers, torch.device("cuda", torch.cuda.current_device())
    )
    return other


@torch.no_grad()
def logits(model: Transformer, T: int) -> torch.Tensor:
    at = torch.arange(T, device="cuda")
    return model(Stream(at % 300, at), Packed.of([T], "cuda"), Rows())


@pytest.mark.parametrize("slow", ["nothing", "copies", "experts"])
@pytest.mark.parametrize("buffers", [1, 2, 4])
def test_offloaded_equals_resident_bitwise(buffers: int, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow copies reveal a missing wait for a copy, slow experts one for a buffer still in use.

    Passes of one token fetch only the chosen experts, longer ones whole layers.
    """
    model = tiny.model(dtype=torch.float32, **SIZES)
    plain, model = on_gpu(model), offloaded(model, buffers)
    expected = [logits(plain, T) for T in (1, 100, 7, 33)]
    if slow == "copies":
        copy = OffloadedExperts._copy

        def slow_copy(self: OffloadedExperts, *args: int) -> None:
            torch.cuda._sleep(DELAY_CYCLES)
            copy(self, *args)

        monkeypatch.setattr(OffloadedExperts, "_copy", slow_copy)
    if slow == "experts":
        for layer in model.modules():
            if isinstance(layer, MixtureOfExperts):
                layer.router.register_forward_hook(lambda *_: torch.cuda._sleep(DELAY_CYCLES))
    for _ in range(2):
        outputs = [logits(model, T) for T in (1, 100, 7, 33)]  # no synchronisation in between
        assert all(torch.equal(got, exact) for got, exact in zip(outputs, expected, strict=True))


def test_serving_with_offloaded_experts() -> None:
    model = tiny.model(dtype=torch.float32, **SIZES)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    limits = ServeConfig(pages=12, page_tokens=4, token_budget=9, max_requests=3)
    prompts = ["The quick brown", "My fellow citizens: we", "ö", "the dog sleeps on"]
    resident = Engine(on_gpu(model), tiny.tokenizer(), limits.replace(graph_capture=False))
    fetched = Engine(offloaded(model, 2), tiny.tokenizer(), limits)
    assert not fetched.config.graph_capture, "a layer that waits for its router's choice cannot be captured"
    texts = [engine.generate(prompts, greedy) for engine in (resident, fetched)]
    assert [done.token_ids for done in texts[0]] == [done.token_ids for done in texts[1]]


def test_loading_with_offload_takes_predicted_memory(tmp_path: Path) -> None:
    model = tiny.model(dtype=torch.float32, **SIZES, family="mixtral")
    colonnade.save(api.Model(model, None, DistributedContext.solo(torch.device("cpu")), "it"), tmp_path / "it")
    gc.collect()  # or tensors of earlier tests are freed while this one measures
    before = torch.cuda.memory_allocated()
    with colonnade.load(
        tmp_path / "it", dtype="float32", device="cuda", experts=ExpertsConfig(layers_on_device=2)
    ) as it:
        allocated, predicted = torch.cuda.memory_allocated() - before, device_bytes(model, 2)
        assert predicted <= allocated < predicted * 1.05 + 2**20
        assert allocated < device_bytes(model) / 2
        assert all(layer.up.is_pinned() and layer.up.device.type == "cpu" for layer in expert_modules(it.transformer))
        assert torch.equal(it.logits(list(range(40))), logits(on_gpu(model), 40))

"""Experts in host memory beside a GPU: nothing is read before it came, or overwritten before it was read."""

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

pytestmark = pytest.mark.gpu

LATE = 20_000_000
"""Clock cycles: some ten milliseconds."""
MOE = MoeConfig(experts=8, active=2, ffn_width=512)
SIZES = {"layers": 6, "width": 256, "heads": 4, "kv_heads": 2, "head_width": 64, "init_std": 0.05, "moe": MOE}


def on_gpu(model: Transformer) -> Transformer:
    """A copy whose weights are on the GPU, experts too."""
    other = Transformer(model.config, device="cuda", dtype=torch.float32)
    other.load_state_dict(model.state_dict())
    return other.requires_grad_(False)


def waiting(model: Transformer, buffers: int) -> Transformer:
    """One whose experts wait in host memory."""
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
def test_the_same_bits(buffers: int, slow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With slow copies a missing wait for them would show, with slow experts one for a buffer that is still read;
    passes of one token have chosen experts alone come, those of others whole layers.
    """
    model = tiny.model(dtype=torch.float32, **SIZES)
    plain, model = on_gpu(model), waiting(model, buffers)
    expected = [logits(plain, T) for T in (1, 100, 7, 33)]
    if slow == "copies":
        copy = OffloadedExperts._copy

        def late(self: OffloadedExperts, *which: int) -> None:
            torch.cuda._sleep(LATE)
            copy(self, *which)

        monkeypatch.setattr(OffloadedExperts, "_copy", late)
    if slow == "experts":
        for layer in model.modules():
            if isinstance(layer, MixtureOfExperts):
                layer.router.register_forward_hook(lambda *_: torch.cuda._sleep(LATE))
    for _ in range(2):
        found = [logits(model, T) for T in (1, 100, 7, 33)]  # nobody waits in between
        assert all(torch.equal(got, exact) for got, exact in zip(found, expected, strict=True))


def test_serving_requests_that_come_and_go() -> None:
    model = tiny.model(dtype=torch.float32, **SIZES)
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    limits = ServeConfig(pages=12, page_tokens=4, token_budget=9, max_requests=3)
    prompts = ["The quick brown", "My fellow citizens: we", "ö", "the dog sleeps on"]
    there = Engine(on_gpu(model), tiny.tokenizer(), limits.replace(fixed_steps=False))
    fetched = Engine(waiting(model, 2), tiny.tokenizer(), limits)
    assert not fetched.config.fixed_steps, "a layer that waits for its router's choice is not recorded"
    texts = [engine.generate(prompts, greedy) for engine in (there, fetched)]
    assert [done.token_ids for done in texts[0]] == [done.token_ids for done in texts[1]]


def test_loaded_so_it_takes_as_much_as_predicted(tmp_path: Path) -> None:
    model = tiny.model(dtype=torch.float32, **SIZES, family="mixtral")
    colonnade.save(api.Model(model, None, DistributedContext.solo(torch.device("cpu")), "it"), tmp_path / "it")
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    with colonnade.load(tmp_path / "it", dtype="float32", device="cuda", experts=ExpertsConfig(resident=2)) as it:
        took, predicted = torch.cuda.memory_allocated() - before, device_bytes(model, 2)
        assert predicted <= took < predicted * 1.05 + 2**20
        assert took < device_bytes(model) / 2
        assert all(layer.up.is_pinned() and layer.up.device.type == "cpu" for layer in expert_modules(it.transformer))
        assert torch.equal(it.logits(list(range(40))), logits(on_gpu(model), 40))

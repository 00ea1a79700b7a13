"""A BERT encoder on a GPU: pre- and post-norm equal the CPU; training steps do not synchronise."""

from pathlib import Path

import pytest
import torch

from colonnade.config import DataConfig, RunConfig, TrainConfig
from colonnade.config.presets import preset
from colonnade.data import Corpus, build
from colonnade.model import Hidden, Packed, Stream, Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.training_state import TrainingState

# torch.compile, which the loss uses on a GPU, emits warnings of its own.
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = ["column", "row", "share", "whole", "bears", "stands", "weight", "of", "the", "."]


@pytest.mark.parametrize("name", ["bert-base", "bert-336m"])
@pytest.mark.parametrize("lengths", [[64, 64, 64], [5, 64, 1, 33]], ids=["equal", "ragged"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 3e-2)])
def test_hidden_states_equal_the_cpu(name: str, lengths: list[int], dtype: torch.dtype, tolerance: float) -> None:
    config = preset(name).replace(vocab_size=500, layers=2, width=128, heads=4, ffn_width=256, context=64)
    tokens = torch.randint(500, (sum(lengths),), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths])
    found = []
    for device in ("cpu", "cuda"):
        model = initialise(Transformer(config), 0).to(device, torch.float32 if device == "cpu" else dtype)
        stream = Stream(tokens.to(device), positions.to(device), (positions > 3).long().to(device))
        with torch.no_grad():
            found.append(model(stream, Packed.of(lengths, device, causal=False), Hidden()).float().cpu())
    expected, got = found
    assert (got - expected).norm() <= tolerance * expected.norm()


def test_steps_do_not_synchronise(tmp_path: Path) -> None:
    texts = [(str(i), " ".join(WORDS[(i * j + j) % 10] for j in range(8 + 7 * i % 90))) for i in range(200)]
    build(texts, tmp_path / "corpus", wordpiece=True, vocab_size=300, validation_share=0.2)
    vocab_size = Corpus(tmp_path / "corpus").manifest.vocab_size
    model = preset("bert-336m").replace(vocab_size=vocab_size, layers=2, width=128, heads=4, ffn_width=256, context=64)
    t = TrainConfig(
        steps=8, batch=8, micro_batch=4, warmup=2, dtype="bfloat16", compile=False, fused_adamw=False, eval_every=0
    )
    data = DataConfig(path=tmp_path / "corpus", sequence=64)
    run = RunConfig(name="it", runs=tmp_path, device="cuda", model=model, data=data, train=t)
    with DistributedContext.build(run.plan, run.device) as context:
        training = TrainingState(run, context)
        training.step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            outcomes = [training.step() for _ in range(5)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.isfinite(out.loss_sum) for out in outcomes)

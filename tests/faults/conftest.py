"""A small corpus and a run over it, for tests of failures."""

from pathlib import Path

import pytest

from colonnade.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from tests import corpora


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpora.small(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture
def config(corpus: Path, tmp_path: Path) -> RunConfig:
    """12 steps of a tiny model, a row per step, no validation, a checkpoint every fourth step."""
    model = ModelConfig(vocab_size=300, layers=2, width=16, heads=4, kv_heads=2, ffn_width=24, context=32, tied=True)
    train = TrainConfig(
        steps=12, batch=4, micro_batch=1, lr=1e-2, min_lr=1e-3, warmup=2, log_every=1, eval_every=0, save_every=4
    )
    data = DataConfig(path=corpus, sequence=16)
    return RunConfig(name="it", runs=tmp_path / "runs", device="cpu", model=model, data=data, train=train)

"""Reward tuning on a GPU: an engine whose cache and CUDA graphs come and go between steps."""

from pathlib import Path

import pytest
import tokenizers
import torch

from colonnade.checkpoint import native
from colonnade.config import ModelConfig, TrainConfig, TuneConfig
from colonnade.data import Tokenizer
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.trackers import read_rows
from colonnade.tune.tuner import Tuner, tuned_run

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

REWARD = """
def low(prompt, answer, row):
    words = answer.split()
    return sum(word < "b" for word in words) / max(1, len(words))
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bandit_is_solved(dtype: str, tmp_path: Path) -> None:
    words = [f"a{i}" for i in range(8)] + [f"z{i}" for i in range(56)]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="z0"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    config = ModelConfig(vocab_size=64, layers=2, width=128, heads=2, ffn_width=256, context=64)
    start = tmp_path / "start"
    model = initialise(Transformer(config), seed=1)
    native.save(start, model, native.Meta(model=config), DistributedContext.solo(), tokenizer=Tokenizer(core))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "z1 z2"}\n{"prompt": "z3"}\n')
    (tmp_path / "reward.py").write_text(REWARD)
    train = TrainConfig(steps=40, batch=32, micro_batch=16, lr=3e-3, dtype=dtype, save_every=0, log_every=1)  # type: ignore[arg-type]
    run = tuned_run(start, runs=tmp_path, device="cuda", sequence=12, train=train)
    tune = TuneConfig(reward=f"{tmp_path / 'reward.py'}:low", group=16, max_tokens=4, kl=0.001, temperature=0.9)
    Tuner(run, tmp_path / "rows.jsonl", "grpo", tune).fit()
    rows = read_rows(run.folder)
    assert rows[0]["reward"] < 0.4
    assert max(row["reward"] for row in rows[35:]) >= 0.95
    assert max(row["mismatch_k3"] for row in rows) < (1e-6 if dtype == "float32" else 1e-2)
    assert torch.cuda.is_available()

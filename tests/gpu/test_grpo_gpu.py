"""Reward tuning on a GPU: an engine whose cache and CUDA graphs come and go between steps, and exact values."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers

from colonnade.checkpoint import native
from colonnade.config import ModelConfig, TrainConfig, TuneConfig
from colonnade.data import Tokenizer
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.trackers import read_rows
from colonnade.tune.tuner import Tuner, tuned_run

pytestmark = pytest.mark.filterwarnings("ignore")

REWARD = """
def low(prompt, answer, row):
    words = answer.split()
    return sum(word < "b" for word in words) / max(1, len(words))
"""


def tuned_rows(folder: Path, dtype: str, steps: int, **settings: Any) -> list[dict[str, Any]]:
    """The metrics of a run that rewards words among 8 of 64."""
    words = [f"a{i}" for i in range(8)] + [f"z{i}" for i in range(56)]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="z0"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    config = ModelConfig(vocab_size=64, layers=2, width=128, heads=2, ffn_width=256, context=64)
    start = folder / "start"
    model = initialise(Transformer(config), seed=1)
    native.save(start, model, native.Meta(model=config), DistributedContext.solo(), tokenizer=Tokenizer(core))
    (folder / "rows.jsonl").write_text('{"prompt": "z1 z2"}\n{"prompt": "z3"}\n')
    (folder / "reward.py").write_text(REWARD)
    train = TrainConfig(steps=steps, batch=32, micro_batch=16, lr=3e-3, dtype=dtype, save_every=0, log_every=1)  # type: ignore[arg-type]
    run = tuned_run(start, runs=folder, device="cuda", sequence=12, train=train)
    tune = TuneConfig(reward=f"{folder / 'reward.py'}:low", group=16, max_tokens=4, temperature=0.9, **settings)
    Tuner(run, folder / "rows.jsonl", "grpo", tune).fit()
    return read_rows(run.folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bandit_is_solved(dtype: str, tmp_path: Path) -> None:
    rows = tuned_rows(tmp_path, dtype, 40, kl=0.001)
    assert rows[0]["reward"] < 0.4
    assert max(row["reward"] for row in rows[35:]) >= 0.95
    assert max(row["mismatch_k3"] for row in rows) < (1e-6 if dtype == "float32" else 1e-2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exact_ratios_are_one_bit_for_bit(dtype: str, tmp_path: Path) -> None:
    """Engine and trainer compute with the same batch-invariant kernels; the run learns as it does without them."""
    rows = tuned_rows(tmp_path, dtype, 40, exact=True)
    assert [row["mismatch_max"] for row in rows] == [0.0] * 40
    assert max(row["reward"] for row in rows[35:]) >= 0.95

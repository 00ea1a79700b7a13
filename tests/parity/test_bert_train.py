"""``colonnade train`` on encoders (BERTs) and a bidirectional decoder.

They learn; any plan gives the same run, and so does resuming.
"""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch

import colonnade
from colonnade.config import DataConfig, ModelConfig, Plan, RunConfig, TrainConfig
from colonnade.config.presets import preset
from colonnade.data import Corpus, build
from colonnade.errors import ConfigError, DataError
from colonnade.train import Trainer
from colonnade.train.loop import train
from tests.worlds import run as in_world

TEXT = "we the people of this union hold that a column stands in a row . it bears its share of the weight !"
TRAIN = TrainConfig(
    steps=8, batch=4, micro_batch=2, lr=1e-2, min_lr=1e-3, warmup=2, dtype="float64", eval_every=4, eval_samples=5,
    save_every=4, schedule="linear",
)  # fmt: skip


def model(family: str, vocab_size: int) -> ModelConfig:
    if family == "qwen3":
        decoder = preset("qwen3-0.6b").replace(causal=False, layers=2, width=24, heads=4, kv_heads=2, head_width=12)
        return decoder.replace(vocab_size=vocab_size, ffn_width=30, context=32)
    whole = preset("bert-base" if family == "bert" else "bert-336m")
    return whole.replace(vocab_size=vocab_size, layers=2, width=24, heads=4, ffn_width=30, context=32)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, words = tmp_path_factory.mktemp("data") / "corpus", TEXT.split()
    texts = [(str(i), " ".join(words[(i + j) % len(words)] for j in range(1 + i % 60))) for i in range(120)]
    build(texts, folder, wordpiece=True, vocab_size=256, validation_share=0.2)
    return folder


def config(corpus: Path, runs: Path, family: str = "megatron-bert", **train: object) -> RunConfig:
    return RunConfig(
        name="it",
        runs=runs,
        device="cpu",
        model=model(family, Corpus(corpus).manifest.vocab_size),
        data=DataConfig(path=corpus, sequence=16),
        train=TRAIN.replace(**train),
    )


def history(run: RunConfig) -> dict[int, tuple[float, ...]]:
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    found: dict[int, tuple[float, ...]] = {}
    for row in rows:
        values = [row[key] for key in ("loss", "grad_norm", "validation_loss") if key in row]
        found[row["step"]] = found.get(row["step"], ()) + tuple(values)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "plan"),
    [
        ("bert", Plan(tp=2)),
        ("megatron-bert", Plan(tp=2, dp=2)),
        ("bert", Plan(dp=4)),
        ("megatron-bert", Plan(tp=4)),
        ("bert", Plan(tp=2, cp=2, sequence_parallel=True)),
        ("megatron-bert", Plan(cp=3)),
        ("megatron-bert", Plan(pp=2, tp=2, sequence_parallel=True)),
        ("bert", Plan(pp=2, cp=2)),
        ("qwen3", Plan(tp=2, cp=2, sequence_parallel=True)),
    ],
)
def test_any_plan_gives_the_same_run(family: str, plan: Plan, corpus: Path, tmp_path: Path) -> None:
    alone = config(corpus, tmp_path / "alone", family)
    Trainer(alone).fit()
    several = alone.replace(runs=tmp_path / "several", plan=plan, train=alone.train.replace(micro_batch=1))
    in_world(plan.world, train, several)
    expected, found = history(alone), history(several)
    assert expected.keys() == found.keys() == set(range(1, 9)) and len(expected[8]) == 3
    for step, values in expected.items():
        assert found[step] == pytest.approx(values, rel=1e-9), step


@pytest.mark.slow
def test_resumed_run_equals_the_uninterrupted_one(corpus: Path, tmp_path: Path) -> None:
    whole = config(corpus, tmp_path / "whole")
    Trainer(whole).fit()
    half = config(corpus, tmp_path / "half")
    Trainer(half).fit()
    shutil.rmtree(half.folder / "step-8")  # the run continues from step 4
    Trainer(half).fit()
    for file in (whole.folder / "step-8").glob("*.safetensors"):
        assert file.read_bytes() == (half.folder / "step-8" / file.name).read_bytes()


TOPICS = ["oak elm ash fir", "red tan sky jet", "cat dog hen cow", "pie jam tea bun"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bert", "megatron-bert", "qwen3"])
def test_learns_and_predicts_masked_tokens(family: str, tmp_path: Path) -> None:
    """All words of a text belong to one topic, which context on both sides of a mask reveals."""
    corpus, words = tmp_path / "corpus", [topic.split() for topic in TOPICS]
    texts = [("", " ".join(words[i % 4][(i // 4 + j * j) % 4] for j in range(13 + i % 9))) for i in range(160)]
    build(texts, corpus, wordpiece=True, vocab_size=256, validation_share=0.2)
    learning = config(
        corpus,
        tmp_path,
        family,
        steps=450 if family == "qwen3" else 300,
        lr=3e-3,
        batch=16,
        micro_batch=16,
        dtype="float32",
        warmup=15,
    )
    summary = Trainer(learning).fit()
    decoder = family == "qwen3"  # it does not predict the order of two segments
    chance = math.log(learning.model.vocab_size) + (0 if decoder else math.log(2))
    assert history(learning)[1][0] == pytest.approx(chance, rel=0.1), "losses start at chance level"
    assert summary.validation_loss is not None and summary.validation_loss < 0.7 * chance
    model, ids = colonnade.load(learning.folder, device="cpu"), []
    for topic in words:
        ids = model.tokenizer.encode(" ".join([*topic, topic[1], "[MASK]", *topic[1:], topic[2]]))
        at = ids.index(model.tokenizer.token_id("[MASK]"))
        best = model.logits(ids)[at].topk(4).indices.tolist()
        found = {str(model.tokenizer.token(i)) for i in best}
        assert len(found & set(topic)) >= (3 if decoder else 4), (found, topic)
    colonnade.save(model, tmp_path / "hf", format="hf")
    import transformers

    auto = transformers.AutoModelForCausalLM if decoder else transformers.AutoModelForPreTraining
    with torch.no_grad():
        out = auto.from_pretrained(tmp_path / "hf")(input_ids=torch.tensor([ids]))
    logits = (out.logits if decoder else out.prediction_logits)[0]
    assert (logits - model.logits(ids)).abs().max() < 1e-3
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").mask_token == "[MASK]"


def test_untrainable_models_and_corpora_are_refused(corpus: Path, tmp_path: Path) -> None:
    good = config(corpus, tmp_path)
    with pytest.raises(ConfigError, match="task_head = 'encoder' predicts no tokens"):
        Trainer(good.replace(model=good.model.replace(task_head="encoder")))
    build([("", TEXT), ("", TEXT[::-1])], tmp_path / "bytes", vocab_size=257, validation_share=0)
    other = good.replace(
        data=good.data.replace(path=tmp_path / "bytes"),
        model=good.model.replace(vocab_size=300),
        train=TRAIN.replace(eval_every=0),
    )
    with pytest.raises(DataError, match=r"no \[CLS\], \[MASK\], \[SEP\]"):
        Trainer(other).fit()

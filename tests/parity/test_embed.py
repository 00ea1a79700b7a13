"""Embedding tuning: the loss of the global batch under any plan and micro-batch, duplicates, and serving."""

from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import colonnade
from colonnade.checkpoint.hf.pooling import StoredPooling, read_pooling
from colonnade.checkpoint.load_model import open_model
from colonnade.cli import main
from colonnade.config import LoraConfig, Plan, ServeConfig, TrainConfig, TuneConfig
from colonnade.errors import ConfigError, DataError
from colonnade.model import Hidden, Packed, Stream, Transformer
from colonnade.model.contrastive import Contrast, contrastive_losses
from colonnade.parallel.axis import SOLO
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve.pooler_spec import PoolerSpec
from colonnade.serve.resolve_pooler import resolve_pooler
from colonnade.train.training_state import TrainingState
from colonnade.tune.chats import Conversation, Conversations
from colonnade.tune.embed import embed_feed
from colonnade.tune.tuner import Tuner, tuned_run
from tests import tuning
from tests.models import build
from tests.serve import encoders, tiny
from tests.serve.encoders import TEXTS
from tests.serve.test_serve_pooling import served
from tests.worlds import assert_same
from tests.worlds import run as in_world

SETTINGS = {
    "mean": Contrast("mean", 0.05, (24, 8), texts=3),
    "last": Contrast("last", 0.2, (24,), texts=2),
}
NONE = Conversations([])


def texts(count: int) -> Conversations:
    """Of 1 to 12 tokens; the first positive is the second sample's too."""
    generator = torch.Generator().manual_seed(5)
    lengths = torch.randint(1, 13, (count,), generator=generator).tolist()
    rows = [torch.randint(301, (n,), generator=generator).tolist() for n in lengths]
    rows[4] = rows[1]
    return Conversations([Conversation(row, [True] * len(row)) for row in rows])


def plain(model: Transformer, data: Conversations, samples: list[int], it: Contrast) -> Tensor:
    """The mean loss of a batch in plain torch, one text and one pair at a time."""

    def embed(text: int) -> Tensor:
        tokens = torch.from_numpy(data.at(text)[0])
        x_TD = model(Stream(tokens, torch.arange(len(tokens))), Packed.of([len(tokens)]), Hidden())
        return x_TD.mean(0) if it.pooling == "mean" else x_TD[-1]

    def same(a: int, b: int) -> bool:
        return np.array_equal(data.at(a)[0], data.at(b)[0])

    vectors = {text: embed(text) for i in samples for text in range(i * it.texts, (i + 1) * it.texts)}
    losses = []
    for i in samples:
        query, positive = i * it.texts, i * it.texts + 1
        others = [text for text in vectors if text % it.texts and text != positive]
        kept = [positive, *(text for text in others if not same(text, query) and not same(text, positive))]
        for width in it.widths:
            scores = [F.cosine_similarity(vectors[query][:width], vectors[text][:width], dim=0) for text in kept]
            losses.append(-(torch.stack(scores) / it.temperature).log_softmax(0)[0])
    return torch.stack(losses).mean()


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("micro_batch", [8, 3])
def test_loss_and_gradient_equal_plain_torch(kind: str, micro_batch: int, tmp_path: Path) -> None:
    """In one pass, and with cached gradients."""
    it = SETTINGS[kind]
    data, run = texts(8 * it.texts), tuning.settings(tmp_path, tuning.start(tmp_path), batch=8, micro_batch=micro_batch)
    with (
        DistributedContext.build(run.plan, "cpu") as context,
        TrainingState(run, context, feed=embed_feed(data, NONE, it)) as training,
    ):
        samples = training.feed.samples.numbers(0)
        outcome = training.step()
    model = build(tuning.MODEL)
    loss = plain(model, data, samples, it)
    loss.backward()
    assert int(outcome.count) == 8
    assert_same(outcome.loss_sum / outcome.count, loss.detach())
    assert_same(outcome.norm, tuning.norm(model))


PLANS = [
    pytest.param(Plan(dp=2), 2),
    pytest.param(Plan(dp=2), 4, marks=pytest.mark.slow),
    pytest.param(Plan(tp=2, sequence_parallel=True), 3),
    pytest.param(Plan(dp=2, tp=2), 1, marks=pytest.mark.slow),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("plan", "micro_batch"), PLANS, ids=str)
def test_any_plan_and_micro_batch_give_the_same_losses(plan: Plan, micro_batch: int, tmp_path: Path) -> None:
    it = SETTINGS["mean"]
    feed = embed_feed(texts(30), texts(15), it)
    alone = tuning.settings(tmp_path / "alone", tuning.start(tmp_path), batch=8, micro_batch=8, steps=3, eval_every=3)
    several = alone.replace(
        runs=tmp_path / "several", plan=plan, train=alone.train.replace(micro_batch=micro_batch, eval_every=0)
    )
    tuning.fit(alone, feed)
    in_world(plan.world, tuning.fit, several, feed)
    ours, theirs = ([row for row in tuning.read_rows(run.folder) if "loss" in row] for run in (several, alone))
    for key in ("loss", "grad_norm"):
        assert [row[key] for row in ours] == pytest.approx([row[key] for row in theirs], rel=1e-10)


def test_a_duplicate_is_no_negative_and_a_sample_left_out_no_candidate() -> None:
    x_SD = torch.eye(6, 4, dtype=torch.float64)
    it = Contrast("mean", 1.0, (4,), texts=2)
    ids, valid = torch.tensor([1, 2, 3, 2, 5, 6]), torch.tensor([True, True, False])
    loss_Q = contrastive_losses(x_SD, ids, valid, it, SOLO)
    assert loss_Q.tolist() == [0.0, 0.0, 0.0]
    loss_Q = contrastive_losses(x_SD, torch.arange(6), torch.tensor([True] * 3), it, SOLO)
    assert_same(loss_Q[0], torch.tensor(3.0, dtype=torch.float64).log())


@pytest.mark.slow
def test_resumed_bit_for_bit(tmp_path: Path) -> None:
    feed = embed_feed(texts(30), NONE, SETTINGS["mean"])
    config = tuning.MODEL.replace(lora=LoraConfig(rank=2))
    whole = tuning.settings(tmp_path / "whole", tuning.start(tmp_path), config, batch=8, micro_batch=3)
    tuning.fit(whole, feed)
    resumed = whole.replace(runs=tmp_path / "resumed", train=whole.train.replace(steps=2))
    tuning.fit(resumed, feed)
    tuning.fit(resumed.replace(train=whole.train), feed)
    ours = tuning.weights(resumed)
    for name, x in tuning.weights(whole).items():
        assert torch.equal(x, ours[name]), name


ROWS = [
    {"query": "The quick", "positive": "brown fox", "negatives": ["We the people"]},
    {"query": "We the", "positive": "people of", "negatives": ["The lazy dog"]},
    {"query": "lazy", "positive": "dog", "negatives": ["of the people"]},
]


def _tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that separates :data:`ROWS`."""
    start, file = tuning.start(tmp_path), tuning.write_rows(tmp_path / "rows.jsonl", ROWS)
    monkeypatch.chdir(tmp_path)
    flags = ["--device", "cpu", "--train.steps", "20", "--train.batch", "3", "--train.micro_batch", "2"]
    flags += ["--train.lr", "1e-2", "--tune.pooling", "mean", "--tune.widths", "24", "12"]
    main(["finetune", str(start), "--method", "embed", "--data", str(file), "--held_out", str(file), *flags])
    rows = tuning.read_rows(tmp_path / "runs" / "embed")
    losses = [row["loss"] for row in rows if "loss" in row]
    assert losses[-1] < 0.5 * losses[0]
    return tmp_path / "runs" / "embed"


def test_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_model(_tune(tmp_path, monkeypatch)).path
    spec = resolve_pooler(tuning.MODEL, folder, ServeConfig(), "it", cp=1)
    assert spec == PoolerSpec("embed", 24, 64, "mean")
    assert resolve_pooler(tuning.MODEL, folder, ServeConfig(task="generate"), "it", cp=1) is None
    main(["convert", str(tmp_path / "runs" / "embed"), str(tmp_path / "hf")])
    assert read_pooling(tmp_path / "hf") == StoredPooling("mean", normalize=True)


@pytest.mark.slow
def test_the_server_embeds_without_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _tune(tmp_path, monkeypatch)
    with served(run, "--serve.log", "off") as it:
        reply = httpx.post(f"{it.url}/v1/embeddings", json={"input": ["The quick", "brown fox", "dog"]}, timeout=60)
    vectors = torch.tensor([each["embedding"] for each in reply.json()["data"]])
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2]
    tuned = colonnade.load(run, device="cpu")
    tokens = torch.tensor(tiny.tokenizer().encode("The quick"))
    x_TD = tuned.transformer(Stream(tokens, torch.arange(len(tokens))), Packed.of([len(tokens)]), Hidden())
    assert_same(vectors[0], F.normalize(x_TD.float().mean(0), dim=0).detach(), 1e-5)


@pytest.mark.slow
def test_an_encoder(tmp_path: Path) -> None:
    """Pooled by the mean, and served by what the checkpoint says."""
    start = encoders.write(tmp_path / "start", encoders.config(), None)
    file = tuning.write_rows(tmp_path / "rows.jsonl", [{"query": text, "positive": text[::-1]} for text in TEXTS])
    train = TrainConfig(steps=12, batch=len(TEXTS), micro_batch=2, lr=1e-2, save_every=0, log_every=1, eval_every=0)
    run = tuned_run(start, runs=tmp_path, device="cpu", train=train)
    tuner = Tuner(run, file, "embed", TuneConfig(pooling="cls"))
    assert tuner.run.resolved("cuda").train.compile is False, "a GPU compiles only what has one shape"
    tuner.fit()
    losses = [row["loss"] for row in tuning.read_rows(run.folder) if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    opened = open_model(run.folder)
    spec = resolve_pooler(opened.config, opened.path, ServeConfig(), "it", cp=1)
    assert spec is not None
    assert (spec.task, spec.pooling) == ("embed", "cls")


def test_refusals(tmp_path: Path) -> None:
    start = tuning.start(tmp_path)
    run = tuned_run(start, device="cpu")
    for row, message in (
        ({"query": "x"}, "needs the strings 'query' and 'positive'"),
        ({"query": "x", "positive": "y", "negatives": "z"}, "must be a list of strings"),
        ({"query": "x", "positive": "y"}, "has 0 negatives, but the rows before it have 1"),
    ):
        file = tuning.write_rows(tmp_path / "rows.jsonl", [ROWS[0], row])
        with pytest.raises(DataError, match=message):
            Tuner(run, file, "embed")
    file = tuning.write_rows(tmp_path / "rows.jsonl", ROWS)
    with pytest.raises(ConfigError, match=r"widths are 25; choose from 1 to 24"):
        Tuner(run, file, "embed", TuneConfig(widths=(25,)))
    with pytest.raises(ConfigError, match="supports only dp and tp"):
        Tuner(run.replace(plan=Plan(cp=2)), file, "embed")
    with pytest.raises(ConfigError, match="dropout would make the two differ"):
        Tuner(run.replace(train=run.train.replace(dropout=0.1, micro_batch=2)), file, "embed")

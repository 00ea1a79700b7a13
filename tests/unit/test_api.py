"""The public Python API as documented: names, prompts, chat, streams and user-supplied data."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import colonnade
from colonnade import DataConfig, ModelConfig, RunConfig, TrainConfig
from colonnade.checkpoint import native
from colonnade.cli import main
from colonnade.config import Config, Plan
from colonnade.data import Corpus, write_tokens
from colonnade.errors import CheckpointError, ConfigError, DataError, RequestError
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.trackers import read_rows
from tests.serve import tiny


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose tokenizer has a chat template."""
    tokenizer = tiny.tokenizer()
    config = ModelConfig(vocab_size=tokenizer.vocab_size, layers=1, width=16, heads=2, ffn_width=16, context=96)
    out = tmp_path_factory.mktemp("models") / "tiny"
    native.save(
        out,
        initialise(Transformer(config), 0),
        native.Meta(model=config),
        DistributedContext.solo(),
        tokenizer=tokenizer,
    )
    return out


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Iterator[colonnade.Model]:
    with colonnade.load(model_folder) as loaded:
        yield loaded


# -- names -------------------------------------------------------------------------------------------------------------


def test_every_public_name_is_listed_and_exists() -> None:
    assert set(colonnade.__all__) <= set(dir(colonnade))
    for name in colonnade.__all__:
        assert getattr(colonnade, name) is not None
    assert colonnade.__version__.count(".") >= 1
    configs = {kind.__name__ for kind in Config.__subclasses__() if kind.__module__.startswith("colonnade.config")}
    assert configs <= set(colonnade.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'loda'"):
        _ = colonnade.loda  # type: ignore[attr-defined]


def test_torch_dtypes_and_devices_are_accepted(model_folder: Path, tmp_path: Path) -> None:
    with colonnade.load(model_folder, dtype=torch.bfloat16, device=torch.device("cpu")) as loaded:
        assert next(loaded.transformer.parameters()).dtype == torch.bfloat16
        colonnade.save(loaded, tmp_path / "hf", format="hf", dtype=torch.float16)
    assert '"dtype": "float16"' in (tmp_path / "hf/config.json").read_text()
    assert TrainConfig(dtype=torch.bfloat16).dtype == "bfloat16"  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dtype is 'int8'; it must be 'auto', 'float32'"):
        colonnade.load(model_folder, dtype=torch.int8)
    with pytest.raises(ConfigError, match="device is 'cuda:1'; it must be 'auto', 'cpu' or 'cuda'"):
        colonnade.load(model_folder, device=torch.device("cuda", 1))


# -- prompts -----------------------------------------------------------------------------------------------------------

GREEDY: dict[str, Any] = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def test_a_list_of_prompts_gives_the_same_as_each_alone(model: colonnade.Model) -> None:
    texts = ["once upon", "a column bears", "x"]
    assert model.generate(texts, **GREEDY) == [model.generate(text, **GREEDY) for text in texts]
    ids = [model.tokenizer.encode(text) for text in texts]
    assert model.generate(ids, **GREEDY) == [model.generate(one, **GREEDY) for one in ids]
    assert model.generate([torch.tensor(one) for one in ids], **GREEDY) == model.generate(ids, **GREEDY)  # type: ignore[list-item]
    mixed = model.generate([texts[0], ids[1]], **GREEDY)  # type: ignore[list-item]
    assert mixed == [model.generate(texts[0], **GREEDY), model.generate(ids[1], **GREEDY)]
    with pytest.raises(RequestError, match="the prompt is empty"):
        model.generate([], **GREEDY)


def test_a_stream_yields_the_answer_in_pieces(model: colonnade.Model) -> None:
    pieces = list(model.stream("once upon", **GREEDY))
    assert "".join(pieces) == model.generate("once upon", **GREEDY)
    ids = model.tokenizer.encode("once upon")
    assert list(model.stream(ids, **GREEDY)) == model.generate(ids, **GREEDY)
    with pytest.raises(RequestError, match="unknown parameter 'max_token'; did you mean 'max_tokens'"):
        model.stream("once", max_token=3)  # raised immediately, not at the first read
    first = next(iter(reader := model.stream(ids, **GREEDY)))
    assert first == model.generate(ids, **GREEDY)[0]
    del reader
    assert not model._serving_engine.busy, "an abandoned stream ends its request"


def test_chat_equals_template_plus_generation(model: colonnade.Model) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "why?"}]
    prompt = model.tokenizer.encode_chat(messages)
    expected = model.tokenizer.decode(model.generate(prompt, **GREEDY))
    assert model.chat(messages, **GREEDY) == expected == "".join(model.stream(messages, **GREEDY))
    assert model.chat("why?", **GREEDY) == model.chat([{"role": "user", "content": "why?"}], **GREEDY)
    for wrong in ([], ["why?"], 3):
        with pytest.raises(RequestError, match=r"pass a string, or a list of \{'role'"):
            model.chat(wrong, **GREEDY)  # type: ignore[arg-type]


# -- user-supplied data ------------------------------------------------------------------------------------------------


class Squares(Dataset):
    """A map-style dataset whose ``__getitem__`` never raises IndexError."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([(i * i + j) % 23 for j in range(5 + i % 7)])}


class Endless(IterableDataset):
    """An iterable dataset without an end."""

    def __iter__(self) -> Iterator[list[int]]:
        return ([i % 23, (i + 1) % 23, (i + 2) % 23] for i in itertools.count())


def make_run(folder: Path, name: str, **train: Any) -> RunConfig:
    settings = {"steps": 4, "batch": 4, "micro_batch": 2, "lr": 1e-2, "log_every": 1, "save_every": 2} | train
    return RunConfig(
        name=name,
        runs=folder,
        device="cpu",
        model=ModelConfig(vocab_size=23, layers=1, width=8, heads=2, ffn_width=8, context=8),
        data=DataConfig(sequence=8),
        train=TrainConfig(**settings),
    )


def losses(run: RunConfig) -> list[float]:
    return [row["loss"] for row in read_rows(run.folder, "metrics.jsonl") if "loss" in row]


@pytest.mark.slow
def test_every_kind_of_data_gives_the_same_tokens(tmp_path: Path) -> None:
    lists = [Squares()[i]["input_ids"].tolist() for i in range(40)]
    kinds = {
        "lists": lists,
        "arrays": [np.array(one, np.int32) for one in lists],
        "map-style": Squares(),
        "generator": (one for one in [*lists, []]),
    }
    losses_by_kind: dict[str, list[float]] = {}
    for name, data in kinds.items():
        run = make_run(tmp_path, name, steps=10)  # enough to read every sample
        colonnade.Trainer(run, data=data, validation=lists[:9]).fit()
        losses_by_kind[name] = losses(run)
        split = Corpus(run.folder / "tokens").split("train")
        assert split.read(0, split.tokens).tolist() == [token for one in lists for token in one]
        assert split.documents == 40
    assert len(losses_by_kind["lists"]) == 10
    assert all(each == losses_by_kind["lists"] for each in losses_by_kind.values())


@pytest.mark.slow
def test_a_resumed_run_continues_with_the_next_sample(tmp_path: Path) -> None:
    whole = make_run(tmp_path, "whole", schedule="constant", warmup=0)
    colonnade.Trainer(whole, data=Squares()).fit()
    half = make_run(tmp_path, "half", steps=2, schedule="constant", warmup=0)
    colonnade.Trainer(half, data=Squares()).fit()
    rest = half.replace(train=half.train.replace(steps=4))
    summary = colonnade.Trainer(rest, data=Squares()).fit()
    assert summary.steps == 4
    assert losses(rest) == losses(whole)
    with pytest.raises(
        DataError, match=r"the data differs from .*tokens, with which the run was started; pass the same"
    ):
        colonnade.Trainer(rest, data=[[1, 2, 3]] * 40)
    again = rest.replace(data=rest.data.replace(path=rest.folder / "tokens"), train=rest.train.replace(steps=5))
    assert colonnade.Trainer(again).fit().steps == 5, "resumes from the stored tokens, without the data"


@pytest.mark.slow
def test_endless_data_is_read_only_as_far_as_needed(tmp_path: Path) -> None:
    run = make_run(tmp_path, "endless")
    colonnade.Trainer(run, data=Endless()).fit()
    assert Corpus(run.folder / "tokens").manifest.train.tokens == 4 * 4 * 8 + 1
    colonnade.Trainer(make_run(tmp_path, "two").replace(plan=Plan(dp=2)), data=Endless()).fit()
    assert losses(make_run(tmp_path, "two")) == pytest.approx(losses(run), rel=1e-5), "any plan reads the same samples"


@pytest.mark.slow
def test_tokenizer_is_saved_in_the_checkpoint(tmp_path: Path) -> None:
    tokenizer = tiny.tokenizer()
    run = make_run(tmp_path, "spoken")
    run = run.replace(model=run.model.replace(vocab_size=tokenizer.vocab_size))
    documents = [tokenizer.encode(f"column {i} bears loads") for i in range(40)]
    colonnade.Trainer(run, data=documents, tokenizer=tokenizer).fit()
    with colonnade.load(run.folder) as loaded:
        assert isinstance(loaded.generate("a", max_tokens=3), str)
    with pytest.raises(ConfigError, match="validation and tokenizer require data"):
        colonnade.Trainer(run, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([[1, 2], [3, 23]], "item 1 of the data has token 23, and the vocabulary is 23; use ids from 0 to 22"),
        ([[1, -2]], "item 0 of the data has token -2"),
        ([[1, 2], [0.5]], r"item 1 of the data is \[0.5\]; pass a list of token ids, or a mapping with input_ids"),
        ([[[1, 2]], [[3]]], r"item 0 of the data is \[\[1, 2\]\]"),
        ([3, 4], "item 0 of the data is 3"),
        ([{"text": "x"}], r"item 0 of the data is \{'text': 'x'\}"),
        (["once"], "item 0 of the data is text, 'once'; .* or build a corpus from text"),
        ("once", "the data is 'once'; pass documents"),
        ({"a": [1]}, r"the data is \{'a': \[1\]\}; pass documents"),
        (7, "the data is a int; pass an iterable of token lists, or a PyTorch dataset"),
        (iter(()), "the data has no tokens; if it is an exhausted iterator, create a new one"),
        ([[True, False]], "item 0 of the data is"),
    ],
)
def test_invalid_data_is_refused(tmp_path: Path, data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_tokens(data, tmp_path / "tokens", vocab_size=23)
    assert list(tmp_path.iterdir()) == []


def test_paths_that_the_system_refuses_are_errors_of_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """As folders without permission are, which root may read."""
    name = str(tmp_path / ("x" * 300))
    with pytest.raises(CheckpointError, match="cannot be read: File name too long"):
        colonnade.load(name)
    with pytest.raises(SystemExit):
        main(["generate", name, "a"])
    assert "File name too long" in capsys.readouterr().err

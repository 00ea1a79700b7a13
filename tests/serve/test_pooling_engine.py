"""The pooling engine: vectors equal those of one text alone, of transformers, and of the fine-tuning code."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import colonnade
from colonnade.checkpoint.hf.pooling import read_pooling
from colonnade.checkpoint.load_model import find_packaged, open_model
from colonnade.config import ModelConfig, Plan, ServeConfig
from colonnade.data.readers import sotu_documents
from colonnade.errors import CheckpointError, ColonnadeError, ConfigError, PlanError, RequestError
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve.pooler_spec import PoolerSpec
from colonnade.serve.pooling_engine import PoolingEngine, pack, unpack
from colonnade.serve.pooling_queue import PoolingQueue
from colonnade.serve.pooling_request import PoolingItem, PoolingRequest, name_of
from colonnade.serve.resolve_pooler import resolve_pooler
from colonnade.tune import Example
from colonnade.tune.classify import class_logits
from tests.serve import encoders, tiny
from tests.serve.encoders import CONTEXT, TEXTS, add, engine, run
from tests.worlds import run as run_ranks

EMBED = PoolerSpec("embed", 24, CONTEXT)


def ids() -> list[list[int]]:
    return [encoders.tokenizer().encode(text) for text in TEXTS]


def numbers(it: PoolingEngine) -> dict[str, torch.Tensor]:
    return {key: torch.tensor(output.numbers()) for key, output in run(it).items()}


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_packed_texts_equal_each_alone(pooling: Any, async_scheduling: bool) -> None:
    model = encoders.model(encoders.config())
    spec = PoolerSpec("embed", 24, CONTEXT, pooling=pooling)
    it = engine(model, spec, token_budget=24, async_scheduling=async_scheduling)
    keys, cut = add(it, "a", ids()), add(it, "b", ids(), dimensions=5)
    found = numbers(it)
    assert it.stats.steps > 2 and it.stats.finished == {"stop": 2 * len(TEXTS)}
    for key, short, tokens in zip(keys, cut, ids(), strict=True):
        expected = encoders.embedding(model, tokens, pooling)
        torch.testing.assert_close(found[key], expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(found[short], expected[:5] / expected[:5].norm(), rtol=0, atol=1e-5)


def test_embeddings_are_not_scaled_if_the_model_does_not() -> None:
    model, tokens = encoders.model(encoders.config()), ids()[2]
    it = engine(model, PoolerSpec("embed", 24, CONTEXT, normalize=False))
    (key,) = add(it, "a", [tokens])
    torch.testing.assert_close(numbers(it)[key], encoders.hidden(model, tokens).mean(0), rtol=0, atol=1e-5)


def test_a_decoder_embeds_by_its_last_token() -> None:
    model = tiny.model(dtype=torch.float32).eval().requires_grad_(False)
    spec = resolve_pooler(model.config, Path("nowhere"), ServeConfig(task="embed"), "tiny", cp=1)
    assert spec is not None and spec.pooling == "last"
    it = PoolingEngine(model, tiny.tokenizer(), ServeConfig(), spec)
    keys = add(it, "a", [[5, 6, 7], list(range(30)), [9]])
    found = numbers(it)
    for key, tokens in zip(keys, [[5, 6, 7], list(range(30)), [9]], strict=True):
        torch.testing.assert_close(found[key], encoders.embedding(model, tokens, "last"), rtol=0, atol=1e-5)


def test_minilm_equals_transformers() -> None:
    try:
        folder = find_packaged("minilm")
    except CheckpointError as why:
        pytest.skip(str(why))
    speech = sotu_documents()[100][1]
    texts = [speech[:900], "Café, naïve & 中文: Fellow-Citizens!", speech[5000:5200], "a", ""]
    model = colonnade.load(folder, dtype="float32", device="cpu")
    spec = resolve_pooler(model.config, folder, ServeConfig(), "minilm", cp=1)
    assert spec == PoolerSpec("embed", 384, 256, pooling="mean", normalize=True)
    it = PoolingEngine(model.transformer, model.tokenizer, ServeConfig(), spec)
    keys = add(it, "a", [model.tokenizer.encode(text) for text in texts])
    found = numbers(it)
    theirs = transformers.BertModel.from_pretrained(folder, dtype=torch.float32).eval()
    batch = transformers.AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        x_BTD, mask_BT1 = theirs(**batch).last_hidden_state, batch["attention_mask"][..., None]
    expected = torch.nn.functional.normalize((x_BTD * mask_BT1).sum(1) / mask_BT1.sum(1))
    torch.testing.assert_close(torch.stack([found[key] for key in keys]), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("classes", "activation"), [(3, "softmax"), (1, "sigmoid")])
def test_classes_equal_the_fine_tuned_models(tmp_path: Path, classes: int, activation: str) -> None:
    folder = encoders.write(tmp_path / "it", encoders.classifier(classes))
    model = colonnade.load(folder, dtype="float32", device="cpu")
    spec = resolve_pooler(model.config, folder, ServeConfig(), "it", cp=1)
    labels = tuple(f"LABEL_{i}" for i in range(classes))
    assert spec is not None and (spec.labels, spec.activation, spec.width) == (labels, activation, classes)
    it = PoolingEngine(model.transformer, model.tokenizer, ServeConfig(token_budget=20), spec)
    pairs = [model.tokenizer.encode_pair("a dog", text) for text in TEXTS]
    it.add([str(i) for i in range(len(TEXTS))], pairs, fields=[("input", len(TEXTS))])
    found = numbers(it)
    for i, (tokens, segments) in enumerate(pairs):
        with torch.no_grad():
            logits = class_logits(model.transformer, [Example(tokens, 0, segments)])[0]
        expected = logits.softmax(0) if activation == "softmax" else logits.sigmoid()
        torch.testing.assert_close(found[str(i)], expected, rtol=0, atol=1e-5)


def test_the_checkpoint_names_classes_and_activation(tmp_path: Path) -> None:
    folder = encoders.write(tmp_path / "it", encoders.classifier(2))
    file = folder / "config.json"
    stored = json.loads(file.read_text())
    for more, activation in (
        ({"problem_type": "multi_label_classification"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity"),
    ):
        file.write_text(json.dumps({**stored, "id2label": {"1": "bad", "0": "good"}, "label2id": {}, **more}))
        spec = resolve_pooler(open_model(folder).config, folder, ServeConfig(), "it", cp=1)
        assert spec is not None and (spec.labels, spec.activation) == (("good", "bad"), activation)


def _follow(plan: dict[str, int], it: ModelConfig, texts: list[list[int]]) -> list[list[float]]:
    with DistributedContext.build(Plan(**plan)) as context:
        served = engine(encoders.model(it, context.axes.serving()), EMBED, token_budget=24)
        if context.rank:
            served.follow()
            return []
        served.heartbeat()
        keys = add(served, "a", texts)
        found = run(served)
        served.stop()
        return [found[key].numbers() for key in keys]


def test_tensor_parallel_ranks_give_the_same_vectors() -> None:
    found = torch.tensor(run_ranks(2, _follow, {"tp": 2}, encoders.config(), ids())[0])
    model = encoders.model(encoders.config())
    expected = torch.stack([encoders.embedding(model, tokens) for tokens in ids()])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_work_survives_the_broadcast() -> None:
    it = engine(encoders.model(encoders.config()), EMBED)
    it.add(["p"], [([1, 5, 2, 6, 2], [0, 0, 0, 1, 1])], fields=[("input", 0)])
    it.add(["q"], [([1, 2], None)], fields=[("input", 0)])
    work = it._schedule()
    assert unpack(pack(work)) == work._replace(items=None)
    assert work.segments == [0, 0, 0, 1, 1, 0, 0]


def test_rows_that_are_not_finite_fail_alone() -> None:
    model = encoders.model(encoders.config())
    model.get_parameter("embed.tokens.weight")[77] = torch.nan
    it = engine(model, EMBED)
    keys = add(it, "a", [[1, 77, 2], [1, 5, 2]])
    found = run(it)
    assert [found[key].finish_reason for key in keys] == ["error", "stop"]
    assert it.stats.finished == {"error": 1, "stop": 1}


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_cancelled_texts_are_dropped(async_scheduling: bool) -> None:
    it = engine(encoders.model(encoders.config()), EMBED, token_budget=8, async_scheduling=async_scheduling)
    gone, kept = add(it, "a", [[1, 5, 2]] * 50), add(it, "b", [[1, 6, 2]])
    first = it.step()
    assert it.cancel(gone[-1])
    for key in gone[:-1]:
        it.cancel(key)
    assert not it.cancel(gone[0])
    found = run(it) | {output.id: output for output in first}
    assert kept[0] in found and len(found) <= 3 and not it.busy and it.stats.waiting == it.stats.running == 0


# -- the queue ---------------------------------------------------------------------------------------------------------


def items(name: str, *lengths: int) -> list[PoolingItem]:
    return [PoolingItem(f"{name}{i}", [1] * length, None) for i, length in enumerate(lengths)]


def take(queue: PoolingQueue, budget: int, most: int = 99) -> list[str]:
    return [item.id for item in queue.take(budget, most)]


def test_requests_take_turns() -> None:
    queue = PoolingQueue()
    queue.add("a", items("a", *[4] * 6))
    assert take(queue, 8) == ["a0", "a1"]
    queue.add("b", items("b", 4))
    queue.add("c", items("c", 4, 4))
    assert take(queue, 12) == ["a2", "b0", "c0"] and len(queue) == 2
    assert take(queue, 99, most=2) == ["a3", "c1"]
    queue.cancel("a")
    queue.cancel("unknown")
    assert take(queue, 99) == [] and len(queue) == 0


def test_a_long_text_runs_alone_and_is_not_overtaken_for_ever() -> None:
    queue = PoolingQueue()
    queue.add("long", items("long", 50))
    assert take(queue, 10) == ["long0"], "longer than the budget"
    queue.add("short", items("short", 6, 6))
    queue.add("long", items("long", 8))
    assert [take(queue, 10) for _ in range(3)] == [["short0"], ["long0"], ["short1"]]


def test_a_full_queue_refuses_requests_not_texts() -> None:
    it = engine(encoders.model(encoders.config()), EMBED, max_waiting=2)
    add(it, "a", [[1, 2]] * 100)
    add(it, "b", [[1, 2]])
    with pytest.raises(RequestError, match="2 requests are already waiting") as refusal:
        add(it, "c", [[1, 2]])
    assert refusal.value.status == 429
    assert len(run(it)) == 101


def test_a_request_with_a_bad_text_is_not_queued_at_all() -> None:
    it, good = engine(encoders.model(encoders.config()), EMBED), [1, 5, 2]
    for bad, words in (
        ([], "input.1 is empty"),
        ([5] * 41, "input.1 has 41 tokens, more than the model's context of 40"),
        ([9999], "input.1 has the token 9999"),
        ([-1], "input.1 has the token -1"),
    ):
        with pytest.raises(RequestError, match=words) as refusal:
            add(it, "a", [good, bad])
        assert refusal.value.param == "input" and not it.busy


def test_texts_are_named_as_in_the_body() -> None:
    fields = [("query", 0), ("documents", 2)]
    assert [name_of(fields, i) for i in range(3)] == ["query", "documents.0", "documents.1"]
    text = "x " * 100_000
    with pytest.raises(RequestError, match=r"documents\.1 has 200000 bytes; .* at most 11520") as refusal:
        PoolingRequest(["a", "b", text], fields).check_lengths(40, 18, 40)
    assert refusal.value.param == "documents"
    PoolingRequest(["a", "b", text], fields, truncate=40).check_lengths(40, 18, 40)


# -- truncation --------------------------------------------------------------------------------------------------------


def test_truncation_keeps_the_beginning_and_the_special_tokens() -> None:
    tokenizer = encoders.tokenizer()
    whole = tokenizer.encode(text := "we the people in order to form a more perfect union")
    assert tokenizer.encode_truncated(text)[0] == whole
    assert tokenizer.encode_truncated(text, max_tokens=6)[0] == [*whole[:5], whole[-1]]
    assert tokenizer.encode_truncated(text, max_tokens=6, special=False)[0] == whole[1:7]
    spaces = " " * 100_000 + text
    assert tokenizer.encode_truncated(spaces, max_tokens=6)[0] == [*whole[:5], whole[-1]]
    assert tokenizer.encode_truncated(text * 10_000, max_tokens=6)[0] == [*whole[:5], whole[-1]]
    with pytest.raises(RequestError, match="truncate_prompt_tokens is 2, but 2 special tokens are added; set it to"):
        tokenizer.encode_truncated(text, max_tokens=2)


@pytest.mark.parametrize(
    ("lengths", "kept"), [((3, 20), (3, 6)), ((20, 3), (6, 3)), ((20, 20), (5, 4)), ((2, 3), (2, 3))]
)
def test_of_a_pair_the_longer_text_is_truncated(lengths: tuple[int, int], kept: tuple[int, int]) -> None:
    first, second = ("x " * length for length in lengths)
    tokens, segments = encoders.tokenizer().encode_truncated(first, second, max_tokens=12)
    counts = [len(list(group)) for _, group in itertools.groupby(segments)]
    assert counts == [kept[0] + 2, kept[1] + 1] and len(tokens) == len(segments)


# -- configuration -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("serve", "changes", "error", "words"),
    [
        ({"task": "generate"}, {}, ConfigError, "cannot generate text"),
        ({"pooling": "cls"}, {"causal": True, "task_head": "unembed"}, ConfigError, "add --serve.task embed"),
        ({"pooling": "cls"}, {"task_head": "classes", "classes": 2}, ConfigError, "its own pooler"),
        ({"batch_invariant": True}, {}, ConfigError, "applies to generation only"),
        ({}, {}, PlanError, "no key/value cache to share over cp=2"),
    ],
)
def test_settings_that_contradict_the_model(
    tmp_path: Path, serve: dict[str, Any], changes: dict[str, Any], error: type[ColonnadeError], words: str
) -> None:
    cp = 2 if error is PlanError else 1
    with pytest.raises(error, match=words):
        resolve_pooler(encoders.config(**changes), tmp_path, ServeConfig(**serve), "it", cp=cp)


def test_sentence_transformers_files(tmp_path: Path) -> None:
    def module(name: str, path: str = "") -> dict[str, str]:
        return {"type": f"sentence_transformers.models.{name}", "path": path}

    modules = [module("Transformer"), module("Pooling", "1_Pooling")]
    (tmp_path / "1_Pooling").mkdir()
    pooling = tmp_path / "1_Pooling" / "config.json"
    for values, kind in (
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode": "lasttoken", "embedding_dimension": 4}, "last"),
    ):
        (tmp_path / "modules.json").write_text(json.dumps(modules))
        pooling.write_text(json.dumps(values))
        stored = read_pooling(tmp_path)
        assert (stored.kind, stored.normalize) == (kind, False)
        (tmp_path / "modules.json").write_text(json.dumps([*modules, module("Normalize")]))
        assert read_pooling(tmp_path).normalize is True
    pooling.write_text(json.dumps({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}))
    with pytest.raises(CheckpointError, match="pools by pooling_mode_max_tokens and pooling_mode_cls_token"):
        read_pooling(tmp_path)
    assert read_pooling(tmp_path, kind=False).kind is None
    for content, words in (
        ("{}", "is not a list of modules"),
        ("[", "is not JSON"),
        (json.dumps([module("Dense")]), "'Dense'"),
    ):
        (tmp_path / "modules.json").write_text(content)
        with pytest.raises(CheckpointError, match=words):
            read_pooling(tmp_path)

"""Encoders served by the command line on a real socket: embeddings, classes, scores and rankings."""

import base64
import json
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from pydantic import TypeAdapter

import colonnade
from colonnade.errors import RequestError
from colonnade.serve.api import pooling_replies
from colonnade.serve.api.pooling_routes import pooler_for
from colonnade.serve.engine_client import EngineClient
from colonnade.serve.pooler_spec import PoolerSpec
from colonnade.serve.pooling_request import PoolingOutput
from colonnade.serve.served_models import ServedModel
from colonnade.tune import Example
from colonnade.tune.classify import class_logits
from tests.serve import encoders
from tests.serve.encoders import TEXTS
from tests.serve.fuzzing import BODIES, send_mutated
from tests.serve.schemathesis_run import run_schemathesis
from tests.serve.serving import Running
from tests.serve.test_serve_http import metric, settle

NAN_TOKEN = 4
"""[MASK], which is in no text."""


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[Running]:
    """``colonnade serve FOLDER``; killed at the end if it still runs."""
    command = [sys.executable, "-u", "-m", "colonnade", "serve", str(folder), "--serve.port", "0", "--device", "cpu"]
    pipes: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *flags], **pipes) as process:
        try:
            assert process.stderr is not None
            assert process.stderr.readline() == f"loading {folder.name}\n"
            line = process.stderr.readline()
            assert line.startswith(f"serving {folder.name} at http://"), line
            yield Running(process, line.split()[3], folder, line)
        finally:
            if process.poll() is None:
                process.kill()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("encoders")
    kinds = {"tiny": (encoders.config(), None), "judge": (encoders.classifier(1), NAN_TOKEN)}
    return {name: encoders.write(base / name, config, poison) for name, (config, poison) in kinds.items()}


@pytest.fixture(scope="module")
def running(folders: dict[str, Path]) -> Iterator[Running]:
    with served(folders["tiny"], "--serve.log", "off", "--serve.max_body_bytes", "9000000") as it:
        yield it
        settle(it)
        assert it.stop(signal.SIGINT)[0] == 0


@pytest.fixture(scope="module")
def judge(folders: dict[str, Path]) -> Iterator[Running]:
    with served(folders["judge"], "--serve.log", "off") as it:
        yield it


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with running.client as it:
        yield it


@pytest.fixture(scope="module")
def vectors(folders: dict[str, Path]) -> torch.Tensor:
    model = colonnade.load(folders["tiny"], dtype="float32", device="cpu")
    return torch.stack([encoders.embedding(model.transformer, encoders.tokenizer().encode(text)) for text in TEXTS])


def post(running: Running, path: str, reply: type | None = None, **body: Any) -> Any:
    """The answer, which must be of the type ``reply``."""
    answer = httpx.post(f"{running.url}{path}", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json() if reply is None else TypeAdapter(reply).validate_json(answer.content, strict=True)


def refused(running: Running, path: str, body: dict[str, Any] | bytes, status: int = 400) -> dict[str, Any]:
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    answer = httpx.post(f"{running.url}{path}", content=sent, headers=headers, timeout=120)
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


# -- embeddings --------------------------------------------------------------------------------------------------------


def test_the_openai_client_gets_the_models_embeddings(client: openai.OpenAI, vectors: torch.Tensor) -> None:
    """The client asks for base64, and decodes it."""
    answer = client.embeddings.create(model="tiny", input=TEXTS)
    torch.testing.assert_close(torch.tensor([each.embedding for each in answer.data]), vectors, rtol=0, atol=1e-5)
    tokens = sum(len(encoders.tokenizer().encode(text)) for text in TEXTS)
    assert [each.index for each in answer.data] == list(range(len(TEXTS))) and answer.model == "tiny"
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)


def test_numbers_and_base64_are_the_same(running: Running, client: openai.OpenAI, vectors: torch.Tensor) -> None:
    numbers = post(running, "/v1/embeddings", pooling_replies.EmbeddingReply, input=TEXTS[0])["data"][0]["embedding"]
    encoded = post(running, "/v1/embeddings", input=TEXTS[0], encoding_format="base64")["data"][0]["embedding"]
    assert list(struct.unpack("<24f", base64.b64decode(encoded))) == numbers
    assert client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float").data[0].embedding == numbers
    torch.testing.assert_close(torch.tensor(numbers), vectors[0], rtol=0, atol=1e-5)


def test_token_ids_are_taken_as_they_are(client: openai.OpenAI, vectors: torch.Tensor) -> None:
    ids = [encoders.tokenizer().encode(text) for text in TEXTS]
    for sent, expected in ((ids, vectors), (ids[2], vectors[2:3])):
        answer = client.embeddings.create(model="tiny", input=sent)
        found = torch.tensor([each.embedding for each in answer.data])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_dimensions_are_cut_and_scaled_again(client: openai.OpenAI, vectors: torch.Tensor) -> None:
    answer = client.embeddings.create(model="tiny", input=TEXTS, dimensions=7)
    cut = torch.nn.functional.normalize(vectors[:, :7])
    torch.testing.assert_close(torch.tensor([each.embedding for each in answer.data]), cut, rtol=0, atol=1e-5)


def test_long_texts_are_refused_or_truncated(running: Running) -> None:
    text = "the dog " * 50
    error = refused(running, "/v1/embeddings", {"input": ["a", text]})
    assert "input.1 has 102 tokens, more than the model's context of 40" in error["message"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    whole = post(running, "/v1/embeddings", input=[text, text * 1000], truncate_prompt_tokens=-1)
    ids = encoders.tokenizer().encode(text)
    same = post(running, "/v1/embeddings", input=[*ids[:39], ids[-1]])
    assert whole["usage"]["prompt_tokens"] == 80
    for each in whole["data"]:
        assert each["embedding"] == pytest.approx(same["data"][0]["embedding"], abs=1e-5)
    bare = post(running, "/v1/embeddings", input=text, truncate_prompt_tokens=5, add_special_tokens=False)
    assert bare["usage"]["prompt_tokens"] == 5
    cut = post(running, "/v1/embeddings", input=ids, truncate_prompt_tokens=5)
    assert cut["usage"]["prompt_tokens"] == 5


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": []}, "input", "input is an empty list"),
        ({"input": [[]]}, "input", "input must be a string, a list of token ids, or a list of either"),
        ({"input": ["a", 5]}, "input", "input must be"),
        ({"input": [True]}, "input", "input must be"),
        ({"input": {}}, "input", "input must be"),
        ({}, "input", "'input' is missing"),
        ({"input": "a", "dimensions": 25}, "dimensions", "dimensions is 25, but the model's embeddings have 24"),
        ({"input": "a", "dimensions": 0}, "dimensions", "ask for 1 to 24"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "'hex'"),
        ({"input": "a", "truncate_prompt_tokens": 41}, "truncate_prompt_tokens", "context of 40"),
        ({"input": "a", "truncate_prompt_tokens": 2}, "truncate_prompt_tokens", "2 special tokens are added"),
        ({"input": "a", "dimension": 3}, "dimension", "did you mean 'dimensions'?"),
        ({"input": ["x"] * 2049}, "input", "input has 2049 texts; at most 2048"),
        ({"input": [[1], [99999]]}, "input", "input.1 has the token 99999"),
        ({"input": [2**80]}, "input", "input has the token 1208925819614629174706176"),
        ({"input": "", "add_special_tokens": False}, "input", "input is empty"),
        (rb'{"input": ["a", "\ud83d"]}', "input", "input.1 has the lone surrogate U+D83D"),
        (b'{"input": "a"', None, "not valid JSON"),
        (b'"a"', None, "send a JSON object"),
    ],
    ids=range(19),
)
def test_bad_bodies_are_refused(running: Running, body: dict[str, Any] | bytes, param: str | None, words: str) -> None:
    error = refused(running, "/v1/embeddings", body)
    assert error["param"] == param and words in error["message"], error
    assert "--" not in error["message"], "a client cannot set the server's flags"


def test_an_unknown_model_is_not_found(running: Running) -> None:
    assert refused(running, "/v1/embeddings", {"input": "a", "model": "other"}, 404)["code"] == "model_not_found"


@pytest.mark.slow
def test_large_bodies(running: Running) -> None:
    """2,048 texts of 8 MB in all are truncated; one text of 8 MB is refused without tokenising it."""
    many = post(running, "/v1/embeddings", input=["the dog " * 500] * 2048, truncate_prompt_tokens=10)
    assert len(many["data"]) == 2048 and many["usage"]["prompt_tokens"] == 20480
    error = refused(running, "/v1/embeddings", {"input": "the dog " * 1_000_000})
    assert "input has 8000000 bytes; a model with a context of 40 tokens accepts at most" in error["message"]
    assert refused(running, "/v1/embeddings", {"input": "x" * 9_000_001}, 413)["code"] == "body_too_large"


# -- scores and rankings -----------------------------------------------------------------------------------------------


def test_scores_are_cosines_of_embeddings(running: Running, vectors: torch.Tensor) -> None:
    for path in ("/v1/score", "/score"):
        many = post(running, path, pooling_replies.ScoreReply, text_1=TEXTS[0], text_2=TEXTS)
        assert [each["score"] for each in many["data"]] == pytest.approx((vectors @ vectors[0]).tolist(), abs=1e-5)
    pairs = post(running, "/v1/score", text_1=TEXTS[:3], text_2=TEXTS[3:])
    expected = (vectors[:3] * vectors[3:]).sum(1).tolist()
    assert [each["score"] for each in pairs["data"]] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_rankings_are_sorted_by_score(running: Running, vectors: torch.Tensor, path: str) -> None:
    documents: list[Any] = [TEXTS[0], {"text": TEXTS[1]}, *TEXTS[2:]]
    answer = post(running, path, pooling_replies.RerankReply, query=TEXTS[1], documents=documents)
    scores = (vectors @ vectors[1]).tolist()
    order = sorted(range(len(TEXTS)), key=lambda i: -scores[i])
    assert [each["index"] for each in answer["results"]] == order and order[0] == 1
    assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[i] for i in order]
    values = [each["relevance_score"] for each in answer["results"]]
    assert values == pytest.approx([scores[i] for i in order], abs=1e-5)
    best = post(running, path, query=TEXTS[1], documents=documents, top_n=2, return_documents=False)
    assert [set(each) for each in best["results"]] == [{"index", "relevance_score"}] * 2


@pytest.mark.slow
def test_a_head_of_one_class_scores_pairs(judge: Running, folders: dict[str, Path]) -> None:
    model = colonnade.load(folders["judge"], dtype="float32", device="cpu")
    pairs = [Example(*_pair(TEXTS[0], text)) for text in TEXTS]
    with torch.no_grad():
        expected = class_logits(model.transformer, pairs).sigmoid()[:, 0]
    answer = post(judge, "/v1/score", pooling_replies.ScoreReply, text_1=TEXTS[0], text_2=TEXTS)
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected.tolist(), abs=1e-5)
    assert answer["usage"]["prompt_tokens"] == sum(len(pair.tokens) for pair in pairs)
    ranked = post(judge, "/rerank", query=TEXTS[0], documents=TEXTS)
    assert [each["index"] for each in ranked["results"]] == expected.argsort(descending=True).tolist()
    error = refused(judge, "/v1/rerank", {"query": "a", "documents": ["b", "the dog " * 50]})
    assert error["param"] == "documents" and "documents.1 has 104 tokens" in error["message"]


def _pair(first: str, second: str) -> tuple[list[int], int, list[int]]:
    tokens, segments = encoders.tokenizer().encode_pair(first, second)
    return tokens, 0, segments


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "text_1 has 2 texts and text_2 has 1"),
        ("/v1/score", {"text_1": [], "text_2": ["c"]}, "text_1", "text_1 is an empty list"),
        ("/v1/score", {"text_1": "a", "text_2": [5]}, "text_2", "text_2 must be a string"),
        ("/v1/score", {"text_1": "a", "text_2": ["the dog " * 50]}, "text_2", "text_2.0 has 102 tokens"),
        ("/rerank", {"query": "a", "documents": []}, "documents", "documents is an empty list"),
        ("/rerank", {"query": "a", "documents": ["a", {"title": "b"}]}, "documents", "documents.1 is an object"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "it must be 1 or more"),
        ("/rerank", {"query": "the dog " * 50, "documents": ["b"]}, "query", "query has 102 tokens"),
        ("/rerank", {"query": "a", "documents": ["x"] * 2049}, "documents", "documents has 2049 texts"),
    ],
    ids=range(9),
)
def test_bad_pairs_are_refused(running: Running, path: str, body: dict[str, Any], param: str, words: str) -> None:
    error = refused(running, path, body)
    assert error["param"] == param and words in error["message"], error


# -- classes, and the wrong kind of model ------------------------------------------------------------------------------


def test_classes_have_labels_and_probabilities(judge: Running, folders: dict[str, Path]) -> None:
    model = colonnade.load(folders["judge"], dtype="float32", device="cpu")
    examples = [Example(encoders.tokenizer().encode(text), 0) for text in TEXTS]
    with torch.no_grad():
        expected = class_logits(model.transformer, examples).sigmoid()
    answer = post(judge, "/classify", pooling_replies.ClassifyReply, input=TEXTS)
    for each, probabilities in zip(answer["data"], expected, strict=True):
        assert each["probs"] == pytest.approx(probabilities.tolist(), abs=1e-5) and each["num_classes"] == 1
        assert each["label"] == "LABEL_0"
    vector = base64.b64encode(struct.pack("<3f", 0.25, 0.5, 0.25)).decode()
    spec = PoolerSpec("classify", 3, 40, labels=("bad", "good", "neither"))
    reply = json.loads(pooling_replies.classes([PoolingOutput("a", vector, 5, "stop")], "three", spec))
    assert reply["data"] == [{"index": 0, "label": "good", "probs": [0.25, 0.5, 0.25], "num_classes": 3}]


def test_numbers_that_are_not_finite_are_an_error(judge: Running) -> None:
    error = refused(judge, "/classify", {"input": [[5], [NAN_TOKEN]]}, 500)
    assert error["code"] == "not_finite"
    assert post(judge, "/classify", input=[[5]])["usage"]["prompt_tokens"] == 1


def test_the_wrong_endpoint_names_the_right_one(running: Running, judge: Running) -> None:
    messages = [{"role": "user", "content": "a"}]
    for it, kind, right in (
        (running, "is served for embeddings", "/v1/embeddings, /v1/score or /v1/rerank"),
        (judge, "is a classifier", "/classify, /v1/score or /v1/rerank"),
    ):
        for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": messages})):
            error = refused(it, path, body)
            assert f"{kind}; use {right}" in error["message"] and error["param"] == "model"
    three = EngineClient()
    three.pooler = PoolerSpec("classify", 3, 40, labels=("a", "b", "c"))
    model = ServedModel("three", three)
    with pytest.raises(RequestError, match="still loading"):
        pooler_for(model, "score")
    three.ready.set()
    for wanted in ("embed", "score"):
        with pytest.raises(RequestError, match=r"'three' is a classifier with 3 classes; use /classify$"):
            pooler_for(model, wanted)
    error = refused(running, "/classify", {"input": "a"})
    assert error["message"] == "the model 'tiny' has no class head; use /v1/embeddings, /v1/score or /v1/rerank"
    assert "is a classifier with 1 class; use /classify" in refused(judge, "/v1/embeddings", {"input": "a"})["message"]


# -- life --------------------------------------------------------------------------------------------------------------


def test_probes_and_metrics(running: Running, client: openai.OpenAI) -> None:
    assert httpx.get(f"{running.url}/ready").json() == {"status": "ready"}
    card = httpx.get(f"{running.url}/v1/models/tiny").json()
    assert card["max_model_len"] == encoders.CONTEXT
    assert "/v1/embeddings" in httpx.get(f"{running.url}/openapi.json").json()["paths"]
    names = ("prompt_tokens_total", "request_success_total", "e2e_request_latency_seconds_count")
    before = [metric(running, name) for name in names]
    usage = client.embeddings.create(model="tiny", input=TEXTS).usage
    after = [metric(running, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [usage.prompt_tokens, len(TEXTS), 1]


def test_a_client_that_leaves_cancels_its_texts(running: Running) -> None:
    before = metric(running, "request_success_total")
    body = json.dumps({"input": ["the dog " * 19] * 2048}).encode()
    head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    host, port = running.url.removeprefix("http://").split(":")
    line = socket.create_connection((host, int(port)))
    line.sendall(b"POST /v1/embeddings HTTP/1.1\r\n" + head.encode() + body)
    limit_s = time.monotonic() + 20
    while metric(running, "request_success_total") == before:  # until it runs
        assert time.monotonic() < limit_s
        time.sleep(0.01)  # each look at the metrics takes CPU time from the server
    line.close()
    settle(running)
    assert 'finished_reason="cancelled"' in httpx.get(f"{running.url}/metrics").text
    assert metric(running, "request_success_total") == before + 2048


@pytest.mark.sample(1)
@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize(
    ("of", "path"),
    [("running", "/v1/embeddings"), ("judge", "/classify"), ("running", "/v1/score"), ("judge", "/v1/rerank")],
)
def test_mutated_bodies_are_answered_or_refused(request: pytest.FixtureRequest, of: str, path: str, count: int) -> None:
    """No status of 500 or more, and no broken connection."""
    at: Running = request.getfixturevalue(of)
    for body in BODIES[path]:
        assert httpx.post(f"{at.url}{path}", json=body).status_code == 200, body
    statuses = send_mutated(at, path, count)
    assert statuses[200] > 0.05 * count and sum(statuses.values()) == count
    settle(at)


@pytest.mark.slow
@pytest.mark.parametrize("examples", [3, pytest.param(300, marks=[pytest.mark.long, pytest.mark.timeout(1800)])])
def test_schemathesis(judge: Running, tmp_path: Path, examples: int) -> None:
    report = run_schemathesis(judge, tmp_path, "--include-path-regex", "classify|score|rerank", examples=examples)
    assert "Tested: 3" in report

"""lm-eval through HTTP gives the log-likelihoods of transformers in one process."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serve import tiny
from tests.serve.serving import Running

lm_eval = pytest.importorskip("lm_eval", reason="needs lm-eval: pip install --group clients")
pytest.importorskip("tenacity", reason="needs lm-eval[api]: pip install --group clients")

pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # of packages that are not ours
]

QUESTIONS = 20
CONTEXT = 1024
WORDS = " ".join(tiny.TEXT).split()


def greedy_answer(model: Any, question: str) -> list[str]:
    """The model's own continuation, if text can spell just those tokens."""
    tokenizer = tiny.tokenizer(tools=True)
    ids = tokenizer.encode(question)
    answer = tiny.greedy_tokens(model, ids, 2)
    text = tokenizer.decode(answer)
    return [text] if text and text == text.strip() and tokenizer.encode(question + text) == [*ids, *answer] else []


def write_tasks(folder: Path) -> list[dict[str, Any]]:
    """20 questions with two to five answers each, some of them the model's own; and 6 documents."""
    model = tiny.model(dtype=torch.float32, context=CONTEXT)
    questions = []
    for i in range(QUESTIONS):
        question = " ".join(WORDS[2 * i : 2 * i + 1 + i % 4])
        choices = [" " + " ".join(WORDS[i * j % 30 : i * j % 30 + j]) for j in range(1, 3 + i % 3)]
        choices += greedy_answer(model, question)
        questions.append({"question": question, "choices": choices, "answer": i % 2})
    texts = [{"text": " ".join(WORDS[i:] * (i + 1))} for i in range(6)]
    for name, rows in (("questions", questions), ("texts", texts)):
        (folder / f"{name}.json").write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")

    def task(name: str, **more: str) -> dict[str, Any]:
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / f"{name}.json")}}}
        return {"task": f"tiny_{name}", **data, "test_split": "test", "target_delimiter": "", **more}

    choice = {"doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}"}
    return [
        task("questions", output_type="multiple_choice", **choice),
        task("texts", output_type="loglikelihood_rolling", doc_to_text="", doc_to_target="{{text}}"),
    ]


def evaluate(
    model: str, arguments: dict[str, Any], tasks: list[dict[str, Any]]
) -> tuple[list[Any], list[float], float]:
    """The model's (log-likelihood, whether greedy) of each answer, log-likelihood of each document, and accuracy."""
    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=tasks,
        task_manager=lm_eval.tasks.TaskManager(),
        log_samples=True,
        bootstrap_iters=0,
    )
    answers = [
        (float(score), str(greedy) == "True")
        for sample in found["samples"]["tiny_questions"]
        for ((score, greedy),) in sample["resps"]
    ]
    texts = [float(sample["resps"][0][0]) for sample in found["samples"]["tiny_texts"]]
    return answers, texts, found["results"]["tiny_questions"]["acc,none"]


def test_lm_eval_loglikelihood_is_hf(running: Running, folder: Path, tmp_path: Path):
    """The last document is longer than the context; both sides then move a window over it."""
    tasks = write_tasks(tmp_path)
    # lm-eval keeps two tokens of a server's context: the same windows here.
    theirs = {"pretrained": str(folder), "dtype": "float32", "device": "cpu", "max_length": CONTEXT - 2}
    expected, documents, accuracy = evaluate("hf", theirs, tasks)
    assert len(expected) > QUESTIONS * 2 and 3 < sum(greedy for _, greedy in expected) < len(expected) / 2
    url = f"{running.url}/v1/completions"
    client = {"model": "tiny", "base_url": url, "tokenizer": str(folder), "max_length": CONTEXT}
    for more in ({"num_concurrent": 8}, {"batch_size": 4}, {"tokenized_requests": False}):
        answers, texts, correct = evaluate("local-completions", {**client, **more}, tasks)
        assert [score for score, _ in answers] == pytest.approx([score for score, _ in expected], abs=1e-4)
        assert [greedy for _, greedy in answers] == [greedy for _, greedy in expected]
        assert texts == pytest.approx(documents, rel=1e-6) and correct == accuracy

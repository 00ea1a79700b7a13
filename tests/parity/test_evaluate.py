"""Evaluation: scores equal a full log-softmax and lm-eval's own HFLM; our tasks; files; the command."""

import importlib
import json
import math
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.api import Model, save
from colonnade.cli import main
from colonnade.config import LatentConfig, Plan
from colonnade.errors import ConfigError, DataError, RequestError
from colonnade.evaluate import run as evaluation
from colonnade.evaluate.harness import HarnessModel, sampling
from colonnade.evaluate.run import TaskOptions, bundled_tasks, evaluate_model
from colonnade.evaluate.scorer import Request, Scorer
from colonnade.evaluate.tasks import speeches
from colonnade.evaluate.zeroshot import detokenize_wikitext, lambada, wikitext103
from colonnade.parallel.distributed_context import DistributedContext
from tests.serve import tiny
from tests.worlds import run

pytestmark = pytest.mark.filterwarnings("default:::(?!colonnade)")  # of packages that are not ours
WORDS = tiny.TEXT if isinstance(tiny.TEXT, str) else " ".join(tiny.TEXT)
CONTEXT = 128


def requests(count: int = 40, seed: int = 3) -> list[Request]:
    """Requests of many lengths; some share their inputs, one is longer than the context, one has no targets."""
    choose = random.Random(seed)
    made = [
        Request(
            choose.choices(range(300), k=choose.randrange(1, 60)), choose.choices(range(300), k=choose.randrange(1, 9))
        )
        for _ in range(count)
    ]
    made += [Request(made[0].context, [token]) for token in range(5)]
    return [*made, Request(list(range(200)), [1, 2, 3]), Request([5], [])]


def reference(model: Any, request: Request) -> tuple[float, bool]:
    tokens = (request.context + request.targets)[-(CONTEXT + 1) :]
    if not request.targets:
        return 0.0, True
    logits = tiny.logits(model, tokens[:-1])[-len(request.targets) :]
    targets = torch.tensor(request.targets)
    logp = logits.log_softmax(-1).gather(1, targets[:, None])
    return float(logp.sum()), bool((logits.argmax(-1) == targets).all())


@torch.no_grad()
def test_scores_equal_a_full_log_softmax() -> None:
    model = tiny.model(context=CONTEXT)
    made = requests()
    best = tiny.greedy_tokens(model, [1, 2, 3], 4)
    made.append(Request([1, 2, 3], best))
    expected = [reference(model, each) for each in made]
    for budget in (1, 100, 100_000):
        found = Scorer(model, budget).score(made)
        assert [each.logp for each in found] == pytest.approx([logp for logp, _ in expected], abs=1e-10)
        assert [each.greedy for each in found] == [greedy for _, greedy in expected]
    assert found[-1].greedy and not found[0].greedy


def test_equal_inputs_are_run_once() -> None:
    model, runs = tiny.model(context=CONTEXT), []
    scorer = Scorer(model)
    model.register_forward_hook(lambda *_: runs.append(1))
    made = [Request([1, 2, 3], [token]) for token in range(10)]
    progress = []
    scorer.score(made, lambda done, total: progress.append((done, total)))
    assert len(runs) == 1 and progress == [(10, 10)]
    assert sum(
        math.exp(each.logp) for each in scorer.score([Request([1, 2, 3], [t]) for t in range(301)])
    ) == pytest.approx(1)


def answers(contexts: int = 4, seed: int = 5) -> list[Request]:
    """Questions with several answers of different lengths, some of them equal or one the beginning of another."""
    choose, made = random.Random(seed), list[Request]()
    for length in choose.sample(range(10, 110), contexts):
        context = choose.choices(range(300), k=length)
        first = choose.choices(range(300), k=6)
        made += [Request(context, first), Request(context, first[:3]), Request(context, [first[0]])]
        made += [Request(context, choose.choices(range(300), k=choose.randrange(1, 12))) for _ in range(3)]
    return choose.sample(made, len(made))


@pytest.mark.parametrize("kind", ["grouped", "window", "latent", "learned"])
def test_answers_that_share_a_context_equal_a_full_log_softmax(kind: str) -> None:
    settings: dict[str, Any] = {
        "grouped": {}, "window": {"window": 24},
        "latent": {"latent": LatentConfig(kv_rank=5, rope_width=2, v_width=5), "kv_heads": 6},
        "learned": {"positions": "learned", "norm": "layernorm"},
    }[kind]  # fmt: skip
    model, lengths = tiny.model(context=CONTEXT, **settings), []
    made = answers()
    expected = [reference(model, each) for each in made]
    model.register_forward_hook(lambda _, inputs, __: lengths.append(len(inputs[0].tokens_T)))
    for budget in (100, 100_000):
        lengths.clear()
        found = Scorer(model, budget).score(made)
        assert [each.logp for each in found] == pytest.approx([logp for logp, _ in expected], abs=1e-10)
        assert [each.greedy for each in found] == [greedy for _, greedy in expected]
    assert sum(lengths) < 0.4 * sum(len(context) + len(targets) - 1 for context, targets in made)


def test_impossible_requests() -> None:
    scorer = Scorer(tiny.model(context=CONTEXT))
    with pytest.raises(RequestError, match="request 1 has no context"):
        scorer.score([Request([1], [2]), Request([], [2])])
    with pytest.raises(RequestError, match=r"request 0 scores 129 tokens, more than the context of 128"):
        scorer.score([Request([1], [2] * 129)])
    assert scorer.score([]) == []
    with pytest.raises(ConfigError, match="need a causal model"):
        Scorer(tiny.model(context=CONTEXT, causal=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama in float32 as a Hugging Face folder."""
    model = tiny.model(dtype=torch.float32, context=1024)
    solo = DistributedContext.solo(torch.device("cpu"))
    return save(Model(model, tiny.tokenizer(), solo, "tiny"), tmp_path_factory.mktemp("tiny") / "hf", format="hf")


def write_tasks(folder: Path) -> list[str]:
    """YAML files of tasks with answers to choose, documents longer than the context, and text to generate."""
    words = WORDS.split()
    model = tiny.model(dtype=torch.float32, context=CONTEXT)
    tokenizer = tiny.tokenizer()
    rows = []
    for i in range(12):
        question = " ".join(words[2 * i : 2 * i + 1 + i % 4])
        choices = [" " + " ".join(words[i * j % 30 : i * j % 30 + j]) for j in range(1, 4)]
        text = tokenizer.decode(tiny.greedy_tokens(model, tokenizer.encode(question), 3))
        rows.append(
            {
                "question": question,
                "choices": choices,
                "answer": i % 2,
                "text": " ".join(words[i:] * (i + 1)),
                "own": text,
            }
        )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
    }
    tasks = {
        "choices": {
            "output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
        },
        "own": {"output_type": "loglikelihood", "doc_to_text": "{{question}}", "doc_to_target": "{{own}}"},
        "texts": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
        "written": {
            "output_type": "generate_until", "doc_to_text": "{{question}}", "doc_to_target": "{{own}}",
            "generation_kwargs": {"until": ["e"], "max_gen_toks": 9},
        },
    }  # fmt: skip
    for name, task in tasks.items():
        (folder / f"{name}.yaml").write_text(
            json.dumps({"task": name, "target_delimiter": "", **data, **task}), "utf-8"
        )
    return [str(folder / f"{name}.yaml") for name in tasks]


def all_responses(lm: Any, tasks: list[str]) -> dict[str, list[Any]]:
    """Every response of a model to the tasks."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    loaded = [evaluation._load_yaml(Path(task)) for task in tasks]
    manager = TaskManager(include_defaults=False)
    found: Any = lm_eval.simple_evaluate(lm, tasks=loaded, task_manager=manager, bootstrap_iters=0, log_samples=True)
    return {name: [sample["resps"] for sample in samples] for name, samples in found["samples"].items()}


def flat(responses: Any) -> list[Any]:
    if isinstance(responses, list | tuple):
        return [value for each in responses for value in flat(each)]
    return [responses]


@pytest.mark.slow
def test_harness_equals_hflm(folder: Path, tmp_path: Path) -> None:
    """All kinds of requests, with windows over long documents, to 1e-5 in float32; the same text."""
    from lm_eval.models.huggingface import HFLM

    tasks = write_tasks(tmp_path)
    theirs = all_responses(HFLM(str(folder), device="cpu", dtype="float32", batch_size=4, max_length=CONTEXT), tasks)
    model = tiny.model(dtype=torch.float32, context=CONTEXT)
    ours = all_responses(
        HarnessModel(Scorer(model, 256), tiny.tokenizer(), evaluation._serve_config(model), "tiny"), tasks
    )
    assert ours.keys() == theirs.keys() == {"choices", "own", "texts", "written"}
    assert flat(ours["written"]) == flat(theirs["written"]) and any(flat(ours["written"]))
    greedy = 0
    for name in ("choices", "own", "texts"):
        for own, their in zip(flat(ours[name]), flat(theirs[name]), strict=True):
            if isinstance(their, float):
                assert abs(own - their) <= 1e-5 * max(1, abs(their))
            else:
                assert own == their
                greedy += bool(own)
    assert greedy >= 3


def _responses(tasks: list[str], plan: Plan) -> list[tuple[str, dict[str, float], Any]] | None:
    with DistributedContext.build(plan) as context:
        own = context.replica()
        model = tiny.model(own.axes, context=CONTEXT)
        results = evaluate_model(
            model, tiny.tokenizer(), TaskOptions(tuple(tasks), budget_tokens=200), data=context.axes.dp
        )
        return None if results is None else [(each.task, each.metrics, each.samples) for each in results]


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [Plan(tp=2), Plan(dp=2), pytest.param(Plan(tp=2, dp=2), marks=pytest.mark.long)], ids=["tp", "dp", "both"]
)
def test_several_ranks_give_the_same(plan: Plan, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path)
    (alone,), (first, *others) = run(1, _responses, tasks, Plan()), run(plan.world, _responses, tasks, plan)
    assert not any(others) and first is not None and alone is not None and len(first) == 4
    for (task, metrics, samples), (_, expected, theirs) in zip(first, alone, strict=True):
        assert metrics == pytest.approx(expected, rel=1e-9), task
        if task == "written":
            assert samples == theirs


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_command_with_replicas(folder: Path, tmp_path: Path, offline: None) -> None:
    tables = []
    for plan in ([], ["--plan.dp", "2"]):
        out = tmp_path / f"out{len(plan)}"
        command = [sys.executable, "-m", "colonnade", "eval", str(folder), "--device", "cpu", "--dtype", "float32"]
        command += ["--tasks", "sotu_next", "sotu_repeat", "--limit", "3", "--out", str(out), *plan]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr
        tables.append(json.loads((out / "results.json").read_text())["tasks"])
    assert tables[0] == tables[1]


def test_special_tokens_and_prefix() -> None:
    model = tiny.model(context=CONTEXT)
    lm = HarnessModel(Scorer(model), tiny.tokenizer(), evaluation._serve_config(model), "tiny")
    assert lm.prefix_token_id == lm.eot_token_id == tiny.tokenizer().eos_ids[0]
    assert lm.tok_encode("one") == tiny.tokenizer().encode("one")
    with pytest.raises(ConfigError, match="a task generates 128 tokens, and the model's context is 128"):
        lm.generate_until([type("Instance", (), {"args": ("x", {"until": ["a"], "max_gen_toks": 128})})()])
    with pytest.raises(ConfigError, match="generates with typical_p"):
        sampling({"until": "a", "typical_p": 0.3})
    params = sampling({"do_sample": True, "temperature": 0.5, "top_p": 0.9, "until": ["\n"]})
    assert (params.temperature, params.top_p, params.stop) == (0.5, 0.9, ("\n",))
    assert sampling({"temperature": 0.7, "do_sample": False}).temperature == 0


def test_wikitext_detokenizer_is_megatrons() -> None:
    """lm-eval has a copy of it."""
    import lm_eval

    file = Path(lm_eval.__file__).parent / "tasks" / "wikitext" / "preprocess_wikitext.py"
    spec = importlib.util.spec_from_file_location("preprocess_wikitext", file)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    choose = random.Random(0)
    pieces = [" @-@ ", " @,@ ", " @.@ ", " = = ", " = ", " ° ", " N ", " 's", "s '", " ( ", " ) ", ' " ', " ' ", "\n",
              " ", "a", "7", " [ x ] ", " { y } ", " , ", " . ", " ; ", " : ", " ! ", " ? ", "/' 3/"]  # fmt: skip
    for _ in range(300):
        text = "".join(choose.choices(pieces, k=25))
        assert detokenize_wikitext(text) == theirs.wikitext_detokenizer({"page": text})


@torch.no_grad()
def test_wikitext_adjusted_perplexity_is_that_of_windows() -> None:
    model, tokenizer = tiny.model(context=CONTEXT), tiny.tokenizer()
    raw = " " + " , ".join(WORDS.split() * 4) + " \n " + WORDS
    tokens = tokenizer.encode(detokenize_wikitext(raw.strip()), special=False)
    assert len(tokens) > CONTEXT + 64
    nll, predicted = 0.0, 0
    for start in range(0, len(tokens), 32):  # windows of 128; the first is scored whole, the others in their last 32
        window = tokens[start : start + CONTEXT + 1]
        logp = tiny.logits(model, window[:-1]).log_softmax(-1)
        scores = -logp.gather(1, torch.tensor(window[1:])[:, None]).squeeze(1)
        new = scores if not start else scores[CONTEXT - 32 :]
        nll, predicted = nll + float(new.sum()), predicted + len(new)
        if start + CONTEXT + 1 >= len(tokens):
            break
    assert predicted == len(tokens) - 1
    found = wikitext103(Scorer(model), tokenizer, raw)
    assert found["nll"] == pytest.approx(nll, abs=1e-9)
    words = len(raw.strip().split(" "))
    assert found["adjusted_perplexity"] == pytest.approx(math.exp(nll / (words - 1))) and found["words"] == words


@torch.no_grad()
def test_lambada_counts_words_that_are_argmax_as_a_whole() -> None:
    model, tokenizer = tiny.model(context=CONTEXT), tiny.tokenizer()
    texts = [" ".join(WORDS.split()[i : i + 6]) for i in range(10)]
    expected, nll = [], 0.0
    for text in texts:
        context, word = text.rsplit(" ", 1)
        logp, greedy = reference(model, Request(tokenizer.encode(context), tokenizer.encode(" " + word)))
        expected.append(greedy)
        nll -= logp
    found = lambada(Scorer(model), tokenizer, texts)
    assert found["acc"] == sum(expected) / 10 and found["perplexity"] == pytest.approx(math.exp(nll / 10))
    with pytest.raises(DataError, match="'word' has no last word"):
        lambada(Scorer(model), tokenizer, ["word"])


def test_our_tasks_are_sound() -> None:
    """The same examples every time; the answer is among the choices; a cloze's word was said before."""
    assert bundled_tasks() == ["sotu_century", "sotu_cloze", "sotu_next", "sotu_repeat", "sotu_text"]
    assert speeches.cloze() == speeches.cloze()
    examples = {
        name: getattr(speeches, name)()["test"] for name in ("cloze", "following", "century", "whole", "repeat")
    }
    assert {name: len(each) for name, each in examples.items()} == {
        "cloze": pytest.approx(150, abs=60), "following": pytest.approx(190, abs=50),
        "century": pytest.approx(240, abs=40), "whole": 20, "repeat": 100,
    }  # fmt: skip
    for each in examples["cloze"]:
        assert re.search(rf"\b{re.escape(each['word'])}\b", each["context"])
    for each in examples["following"]:
        assert len(set(each["choices"])) == 4 and each["choices"][each["label"]] not in each["context"]
    labels = [each["label"] for each in examples["following"]]
    assert all(0.12 < labels.count(label) / len(labels) < 0.4 for label in range(4))
    assert (
        len(
            {labels.count(label) for label in ()}
            | {sum(e["label"] == c for e in examples["century"]) for c in range(4)}
        )
        == 1
    )


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "TQDM_DISABLE", "1")


@pytest.mark.slow
def test_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], offline: None) -> None:
    out = tmp_path / "out"
    (tmp_path / "wiki.test.tokens").write_text(" = A = \n \n " + WORDS)
    (tmp_path / "lambada_test.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in (WORDS[:60], WORDS[:90]))
    )
    arguments = ["eval", str(folder), "--device", "cpu", "--dtype", "float32", "--out", str(out)]
    main(
        [
            *arguments,
            "--tasks",
            "sotu_century",
            "sotu_next",
            "wikitext103",
            "lambada",
            "--limit",
            "2",
            "--data",
            str(tmp_path),
        ]
    )
    printed = capsys.readouterr().out
    assert re.search(r"sotu_century +2 +acc ", printed) and "adjusted_perplexity" in printed
    results = json.loads((out / "results.json").read_text())
    assert [each["task"] for each in results["tasks"]] == ["sotu_century", "sotu_next", "wikitext103", "lambada"]
    assert results["tasks"][0]["samples"] and results["tasks"][3]["examples"] == 2
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 2 and "sotu_century: the first examples" in page
    for wrong, message in (
        (["--tasks", "sotu_clozes"], "lm-eval has no task 'sotu_clozes'; did you mean 'sotu_cloze'?"),
        (["--tasks", "lambada"], 'task lambada needs the file lambada_test.jsonl (lines like {"text": "…"})'),
        (["--tasks", "wikitext103", "--data", "nowhere"], "task wikitext103 needs nowhere"),
        (["--limit", "3"], "--limit, --shots, --data and --chat apply to tasks"),
        (["--plan.dp", "2"], "--plan.dp 2 applies to --tasks, whose requests are shared by replicas; remove it"),
        (["--tasks", "sotu_next", "--limit", "0"], "--limit 0 is not positive"),
        (["--tasks", "sotu_next", "--stride", "3"], "--routing, --context and --stride apply to --text"),
        (["--tasks", "none.yaml"], "there is no task file none.yaml"),
    ):
        with pytest.raises(SystemExit):
            main([*arguments, *wrong])
        assert message in capsys.readouterr().err.replace("\n", " ")


def test_hostile_and_broken_tasks(tmp_path: Path, offline: None) -> None:
    model = tiny.model(context=CONTEXT)
    evil = tmp_path / "evil.yaml"
    evil.write_text("task: evil\nprocess_docs: !function evil.run\n")
    for content, message in (
        (
            "task: evil\nprocess_docs: !function evil.run\n",
            "evil.yaml is not a task in YAML: could not determine a constructor",
        ),
        ("[1, 2", "is not a task in YAML"),
        ("- a\n", "it has no key 'task'"),
    ):
        evil.write_text(content)
        with pytest.raises(ConfigError, match=message):
            evaluate_model(model, tiny.tokenizer(), TaskOptions((str(evil),)))
    missing = tmp_path / "missing.yaml"
    data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(tmp_path / "none.jsonl")}}}
    missing.write_text(
        json.dumps(
            {"task": "missing", "output_type": "loglikelihood", "test_split": "test", "doc_to_text": "a", **data}
        )
    )
    with pytest.raises(DataError, match=r"missing\.yaml cannot load its data: Unable to find .*none\.jsonl"):
        evaluate_model(model, tiny.tokenizer(), TaskOptions((str(missing),)))
    (tmp_path / "lambada_test.jsonl").write_text('{"text": "a b"}\n{"texts": "a"}\n')
    with pytest.raises(DataError, match=r"lambada_test\.jsonl:2: no text"):
        evaluate_model(model, tiny.tokenizer(), TaskOptions(("lambada",), data=(tmp_path,)))


def test_results_of_groups_and_filters() -> None:
    scores = [
        {"acc": each, "filter": "none", "arguments": [("q", "a")], "target": 1, "filtered_resps": []}
        for each in (1, 0, 1, 0)
    ]
    found = {
        "results": {"x": {"acc,none": 0.5, "acc_stderr,none": "N/A", "em,strict": 1, "alias": "x"}},
        "n-samples": {"x": {"effective": 4}}, "samples": {"x": scores},
    }  # fmt: skip
    result = evaluation._result("x", found)
    assert (result.metrics, result.examples) == ({"acc": 0.5, "em (strict)": 1.0}, 4)
    assert result.stderr == {"acc": pytest.approx(math.sqrt(1 / 3) / 2)}

"""Answers with penalties equal a plain loop, and answers with a grammar match it, under every schedule."""

import json
import random
import re
from typing import Any

import jsonschema
import pytest
import torch

from colonnade.config import Plan, ServeConfig
from colonnade.errors import RequestError
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Completion, Engine, SamplingParams
from colonnade.serve.grammar import GrammarCompiler
from colonnade.serve.logits_changes import apply_changes
from colonnade.serve.logits_processor import LogitsProcessor
from colonnade.serve.sample_args import SampleArgs
from colonnade.serve.structured_outputs import MAX_GRAMMAR_BYTES, StructuredOutputs
from tests.serve import tiny
from tests.worlds import run

PROMPTS = [[5, 9, 100, 7, 20, 31, 44, 2, 250, 17, 3], [5, 9, 100, 7, 20, 31, 44, 2, 8], [42], list(range(40, 57))]
CHOICES = ["the quick brown fox", "the quiet", "ö"]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, repetition_penalty=1.5, logprobs=2),
    SamplingParams(
        temperature=0, max_tokens=9, min_tokens=4, frequency_penalty=2, presence_penalty=1, logit_bias={7: 9}
    ),
    SamplingParams(temperature=0, max_tokens=30, structured_outputs=StructuredOutputs(choice=CHOICES)),
    SamplingParams(temperature=0, max_tokens=9, ignore_eos=True),
]
LIMITS = {"roomy": ServeConfig(), "tight": ServeConfig(pages=10, page_tokens=3, token_budget=7, max_requests=3)}


@torch.no_grad()
def reference(prompt: list[int], params: SamplingParams) -> tuple[int, ...]:
    """Greedy tokens of one long forward pass after another."""
    model, tokenizer, ids = tiny.model(), tiny.tokenizer(), list(prompt)
    wanted = params.structured_outputs
    matcher = GrammarCompiler(tokenizer, 301).matcher(wanted) if wanted else None
    processor = LogitsProcessor.of(prompt, params, tokenizer, matcher)
    for index in range(params.max_tokens or 0):
        changes = processor.changes(ids, index) if processor else None
        logits_RV = apply_changes(tiny.logits(model, ids)[-1:], [SampleArgs.of(params, 0, index, changes)], 0)
        ids.append(token := int(logits_RV.argmax()))
        if processor:
            processor.accept(token)
        if (token in tokenizer.eos_ids and not params.ignore_eos) or (matcher and matcher.finished):
            break
    return tuple(ids[len(prompt) :])


EXPECTED = [reference(prompt, params) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


def check(completions: list[Completion]) -> None:
    assert [each.token_ids for each in completions] == EXPECTED
    assert completions[2].text in CHOICES and completions[2].finish_reason == "stop"
    raw_TV = tiny.logits(tiny.model(), [*PROMPTS[0], *EXPECTED[0]]).log_softmax(-1)[len(PROMPTS[0]) - 1 : -1]
    assert completions[0].logprobs is not None
    got = [each.logprob for each in completions[0].logprobs]
    assert got == pytest.approx([row[token].item() for row, token in zip(raw_TV, EXPECTED[0], strict=True)], abs=1e-9)


def test_the_reference_is_not_that_without_changes():
    for prompt, tokens in list(zip(PROMPTS, EXPECTED, strict=True))[:3]:
        assert tokens != tuple(tiny.greedy_tokens(tiny.model(), prompt, len(tokens)))


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("limits", LIMITS)
def test_tokens_are_those_of_a_plain_loop(limits: str, ahead: bool):
    engine = Engine(tiny.model(), tiny.tokenizer(), LIMITS[limits].replace(async_scheduling=ahead, graph_capture=ahead))
    check(engine.generate(PROMPTS, PARAMS))
    engine.scheduler.audit()
    assert (engine.stats.preemptions > 0) == (limits == "tight")


def test_tokens_are_those_of_a_plain_loop_batch_invariant():
    check(Engine(tiny.model(), tiny.tokenizer(), ServeConfig(batch_invariant=True)).generate(PROMPTS, PARAMS))


def _serve(plan: dict[str, int]) -> list[Completion]:
    with DistributedContext.build(Plan(**plan)) as context:
        limits = LIMITS["tight"]
        engine = Engine(tiny.model(context.axes.serving()), tiny.tokenizer(), limits.replace(async_scheduling=True))
        if context.rank:
            engine.follow()
            return []
        completions = engine.generate(PROMPTS, PARAMS)
        engine.stop()
        return completions


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [{"tp": 2}, {"cp": 2}], ids=["tp", "cp"])
def test_changes_reach_every_rank(plan: dict[str, int]):
    check(run(2, _serve, plan)[0])


# -- grammars ----------------------------------------------------------------------------------------------------------


def answers(wanted: StructuredOutputs, seeds: int, max_tokens: int = 100, **params: Any) -> list[Completion]:
    engine = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), ServeConfig(pages=2048, max_requests=64))
    every = [
        SamplingParams(max_tokens=max_tokens, seed=seed, structured_outputs=wanted, **params) for seed in range(seeds)
    ]
    completions = engine.generate([[seed % 300] for seed in range(seeds)], every)
    assert not engine.busy and engine.scheduler.pool.free == engine.scheduler.pool.pages
    return completions


def test_regular_expressions_choices_and_grammars():
    for done in answers(StructuredOutputs(regex=r"[a-f]{3}-[0-9]{2}"), 16):
        assert re.fullmatch(r"[a-f]{3}-[0-9]{2}", done.text) and done.finish_reason == "stop"
    hard = ['"', "\\n", "\n\t\x01", "ö🙂", '\' | "x"', "/a/", "%ignore", "\x7f\u2028\ufffe\0"]
    found = {done.text for done in answers(StructuredOutputs(choice=hard), 64)}
    assert found <= set(hard) and len(found) > 3
    for grammar in (
        'start: "<" inner ">"\ninner: /[xy]+/ | "(" inner ")"',
        'root ::= "<" i ">"\ni ::= [xy]+ | "(" i ")"',
    ):
        for done in answers(StructuredOutputs(grammar=grammar), 16, logit_bias={31: 20}):
            assert done.finish_reason == "length" or re.fullmatch(r"<\(*[xy]+\)*>", done.text), done.text
    for done in answers(StructuredOutputs(json_object=True), 16):
        assert done.finish_reason == "length" or isinstance(json.loads(done.text), dict)


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema with the keywords that people use."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const"]
    kind = rng.choice([*kinds, *([] if depth == 2 else ["object", "object", "array", "anyOf"])])
    match kind:
        case "object":
            names = rng.sample(["name", "äge", "a b", "x", 'q"'], rng.randint(1, 3))
            properties = {name: random_schema(rng, depth + 1) for name in names}
            required = rng.sample(names, rng.randint(0, len(names)))
            return {"type": kind, "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            return {"type": kind, "items": random_schema(rng, depth + 1), "minItems": rng.randint(0, 1), "maxItems": 2}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
        case "enum":
            return {"enum": rng.sample(["red", "grün", 3, None, True, [1, "x"]], 3)}
        case "const":
            return {"const": rng.choice(["only", 12, False])}
        case "integer":
            return {"type": kind, "minimum": rng.randint(-20, 0), "maximum": rng.randint(1, 300)}
        case "string":
            more = [{}, {"pattern": "^[A-Z][a-z]{1,3}$"}, {"minLength": 2, "maxLength": 6}, {"format": "date"}]
            return {"type": kind, **rng.choice(more)}
    return {"type": kind}


def check_schemas(schemas: int, seeds: int) -> None:
    complete = 0
    for index in range(schemas):
        schema = random_schema(random.Random(index))
        for done in answers(StructuredOutputs(json=schema), seeds):
            if done.finish_reason == "stop":
                jsonschema.validate(json.loads(done.text), schema)
                complete += 1
            else:
                assert done.finish_reason == "length"
    assert complete > 0.5 * schemas * seeds, "too few answers were complete"


def test_schema_answers_validate():
    check_schemas(12, 6)


@pytest.mark.long
def test_many_schema_answers_validate():
    check_schemas(200, 20)


def test_a_grammar_outlives_end_tokens_and_min_tokens():
    bias = {token: -100 for token in range(301) if tiny.tokenizer().token_bytes(token).startswith(b"y")}
    for done in answers(StructuredOutputs(choice=["yes", "no"]), 4, min_tokens=90, ignore_eos=True, logit_bias=bias):
        assert (done.text, done.finish_reason) == ("no", "stop")
    (only,) = answers(StructuredOutputs(choice=["yes"]), 1, bad_words=["yes", "y"], logit_bias={90: -100})
    assert only.text == "yes", "bad words give way to the grammar"


def test_deep_rules_and_many_choices():
    """Rules that refer to one another thousands of times would overflow a usual stack of 8 MiB, and end the process."""
    rules = "start: r0\n" + "".join(f"r{i}:r{i + 1}\n" for i in range(4000)) + 'r4000: "x"'
    (only,) = answers(StructuredOutputs(grammar=rules), 1)
    assert (only.text, only.finish_reason) == ("x", "stop")
    many = [f"value {i}" for i in range(4000)]
    assert {done.text for done in answers(StructuredOutputs(choice=many), 3)} <= set(many)
    (anything,) = answers(StructuredOutputs(json=True), 1, logit_bias={17: 40})
    assert isinstance(json.loads(anything.text), int)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"json": {"type": "objec"}}, "json cannot be compiled: Invalid type: objec"),
        ({"json": {"type": "array", "uniqueItems": True}}, "Unimplemented keys: .*uniqueItems"),
        ({"json": {"$ref": "http://127.0.0.1/x"}}, "cannot be compiled"),
        ({"json": '{"type": '}, "cannot be read as JSON"),
        ({"json": 3}, "is not a JSON schema"),
        ({"json": "null"}, "is not a JSON schema"),
        ({"json": False}, "is false, which nothing matches"),
        ({"json": '{"const": NaN}'}, "NaN is not JSON"),
        ({"json": {"const": float("inf")}}, "cannot be written as JSON"),
        ({"json": '{"const": "\\ud83d"}'}, "has the lone surrogate U\\+D83D"),
        ({"json": "[" * 101 + "]" * 101}, "more than 100 levels deep"),
        ({"json": '{"a":' * 9000}, "nests lists or objects too deeply"),
        ({"json": {"$ref": "#"}}, "no text matches it"),
        ({"json": {"const": -(2**63)}}, "has -9223372036854775808, which is too close"),
        ({"json": {"type": "integer", "minimum": -(2**63), "maximum": 9 - 2**63}}, "has -9223372036854775799"),
        ({"grammar": 'start: %json {"enum":[1,-9223372036854775807]}'}, "has -9223372036854775807"),
        ({"regex": "(a"}, "regex cannot be compiled"),
        ({"grammar": "start: nope"}, 'unknown name: "nope"'),
        ({"grammar": "root ::= " + "(" * 30000}, "grammar cannot be"),
        ({"grammar": "root ::= ["}, "grammar cannot be read: Unexpected end of input"),
        ({"choice": []}, "a list of non-empty strings"),
        ({"regex": "a", "choice": ["b"]}, "has regex and choice of json"),
        ({}, "has none of json, regex, choice, grammar, json_object"),
        ({"regex": "a" * (MAX_GRAMMAR_BYTES + 1)}, "has 65537 bytes; at most 65536"),
    ],
)
def test_bad_grammars_are_refused(given: dict[str, Any], words: str):
    engine = Engine(tiny.model(), tiny.tokenizer(), ServeConfig(pages=8))
    with pytest.raises(RequestError, match=words) as refused:
        engine.add([1], SamplingParams(structured_outputs=StructuredOutputs(**given)))
    assert refused.value.param == "structured_outputs" and refused.value.status == 400
    assert not engine.busy

"""An encoder–decoder behind /v1/completions: the prompt is the source; what does not fit is refused with a reason."""

from pathlib import Path

import openai
import pytest

import colonnade
from colonnade.checkpoint import native
from colonnade.parallel.distributed_context import DistributedContext
from tests.encdec import random_model, t5
from tests.serve import tiny
from tests.serve.serving import Running, server

GREEDY = {"temperature": 0, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = t5("1.1", vocab_size=301)
    assert config.encoder is not None
    config = config.replace(context=64, encoder=config.encoder.replace(context=40))
    out = tmp_path_factory.mktemp("models") / "t5"
    model = random_model(config).float()
    native.save(out, model, native.Meta(model=config), DistributedContext.solo(), tokenizer=tiny.tokenizer(chat=False))
    return out


@pytest.fixture(scope="module")
def running(folder: Path):
    with server({"path": str(folder)}, page_tokens=4, pages=64) as it:
        yield it


def test_the_prompt_is_the_source(running: Running, folder: Path) -> None:
    model, texts = colonnade.load(folder, device="cpu"), ["The quick brown fox", "My fellow"]
    expected = model.generate(texts, max_tokens=9, temperature=0, ignore_eos=True)
    with running.client as client:
        both = client.completions.create(model="tiny", prompt=texts, max_tokens=9, **GREEDY)
        assert [choice.text for choice in both.choices] == expected
        assert both.usage is not None
        tokens = sum(len(model.tokenizer.encode(text)) + 1 for text in texts)
        assert both.usage.prompt_tokens == tokens
        stream = client.completions.create(model="tiny", prompt=texts[0], max_tokens=9, stream=True, **GREEDY)
        assert "".join(piece.choices[0].text for piece in stream if piece.choices) == expected[0]


def test_beams_are_a_parameter(running: Running, folder: Path) -> None:
    model, text = colonnade.load(folder, device="cpu"), "The quick brown fox"
    expected = model.generate(text, max_tokens=9, temperature=0, beams=3, ignore_eos=True)
    extra = {"ignore_eos": True, "beams": 3, "length_penalty": 1.0}
    with running.client as client:
        found = client.completions.create(model="tiny", prompt=text, max_tokens=9, temperature=0, extra_body=extra)
        assert found.choices[0].text == expected != model.generate(text, max_tokens=9, temperature=0, ignore_eos=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 2, "extra_body": {"beams": 2}}, "n and beams are mutually exclusive"),
        ({"extra_body": {"beams": 2, "temperature": 0.5}}, "set temperature to 0"),
        ({"echo": True}, "echo is for models that continue the prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"extra_body": {"target_lang": "fra_Latn"}}, "target_lang is for models that translate"),
        ({"prompt": "word " * 50}, "this model's encoder accepts 40"),
        ({"prompt": ""}, "empty"),
    ],
)
def test_refused_with_a_reason(running: Running, options: dict, message: str) -> None:
    with running.client as client, pytest.raises(openai.BadRequestError, match=message):
        client.completions.create(**{"model": "tiny", "prompt": "The quick", "max_tokens": 3, **options})


def test_chat_without_a_template_is_refused(running: Running) -> None:
    with running.client as client, pytest.raises(openai.BadRequestError, match="template"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])

"""Chat templates render as transformers does, and the sandbox stops hostile templates."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from colonnade.data.chat_template import ChatTemplate
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import DataError, RequestError
from tests import tokens

MESSAGES = [
    {"role": "system", "content": "Be brief & kind."},
    {"role": "user", "content": "Wie geht's, <b>you</b>?"},
    {"role": "assistant", "content": "Fine. ", "tool_calls": [{"name": "f", "arguments": {"a": [1, "é"]}}]},
    {"role": "tool", "content": "2"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "description": "añadir"}}]

TEMPLATES = {
    "block tags remove their lines": """
    {% for m in messages %}
        {% if m.role == 'user' %}
Q: {{ m.content | trim }}
        {% else %}
{{ m.role | upper }}: {{ m['content'] }}
        {% endif %}
    {% endfor %}
""",
    "tools as json": "{{ tools | tojson }}|{{ tools | tojson(indent=4) }}|{% for m in messages if m.tool_calls %}"
    "{{ m.tool_calls[0].arguments | tojson }}{% endfor %}",
    "loops break and continue": "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{% break %}{% endif %}{% endfor %}",
    "generation marks": "{% for m in messages %}{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
    "{% endfor %}",
    "namespace": "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.last = m.role %}{% endfor %}{{ ns.n }} {{ ns.last }}",
    "undefined is empty": "{{ bos_token }}{{ nothing }}{% if nothing is defined %}no{% endif %}{{ messages[0].name }}",
    "macros and prompts": "{% macro say(m) %}[{{ m.role }}]{{ m.content }}{% endmacro %}{{ say(messages[0]) }}"
    "{% if add_generation_prompt %}>{% endif %}{% if enable_thinking %}<think>{% endif %}",
    "the date": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [True, False])
def test_rendering_equals_transformers(name, prompt):
    variables = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": True}
    reference, _ = render_jinja_template(
        [MESSAGES], tools=TOOLS, chat_template=TEMPLATES[name], add_generation_prompt=prompt, **variables
    )
    ours = ChatTemplate(TEMPLATES[name]).render(MESSAGES, tools=TOOLS, add_generation_prompt=prompt, **variables)
    assert ours == reference[0]


def test_chat_passes_special_tokens_and_variables():
    core = tokens.byte_level()._core
    tokenizer = Tokenizer(core, 0, (0,), "{{ bos_token }}{{ messages[0].content }}{{ mood }}{{ eos_token }}")
    assert tokenizer.chat([{"role": "user", "content": "x"}], mood="!") == "<|endoftext|>x!<|endoftext|>"


def test_no_template_is_a_request_error():
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokens.byte_level().chat([{"role": "user", "content": "x"}])
    assert caught.value.param == "messages"


def test_raise_exception_is_a_request_error():
    template = ChatTemplate("{% if messages[0].role != 'user' %}{{ raise_exception('user first') }}{% endif %}")
    assert template.render([{"role": "user"}]) == ""
    with pytest.raises(RequestError, match="user first"):
        template.render([{"role": "tool"}])


def test_messages_that_the_template_rejects_are_a_request_error():
    with pytest.raises(RequestError, match="chat template refuses these messages") as caught:
        ChatTemplate("{{ messages[0].content + 'x' }}").render([{"role": "user", "content": 3}])
    assert "\n" not in str(caught.value)


def test_an_invalid_template_names_its_line():
    with pytest.raises(DataError, match="chat template, line 2"):
        ChatTemplate("fine\n{% for %}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ lipsum.__globals__['os'].system('true') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ namespace(__html__=strftime_now) }}",
        "{% set ns = namespace() %}{% set ns.__html__ = strftime_now %}{{ ns }}",
        "{{ range(10000000) | list }}",
    ],
)
def test_sandbox_blocks_attacks(attack):
    messages = [{"role": "user", "content": "x"}]
    try:
        output = ChatTemplate(attack).render(messages)
    except RequestError:
        output = ""
    assert output == ""
    assert messages == [{"role": "user", "content": "x"}]

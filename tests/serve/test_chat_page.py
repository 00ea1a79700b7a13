"""The chat page in headless Chromium, against a real server with a tiny model."""

import json
import re
from collections.abc import Iterator
from importlib import resources

import httpx
import pytest

from colonnade.serve.api.chat_page import page_headers
from tests.serve.browser import MISSING, PATH, Browser, browser
from tests.serve.serving import Running, server

needs_browser = pytest.mark.skipif(PATH is None, reason=MISSING)

HOSTILE = "<script>document.title='owned'</script> <img src=x onerror=\"document.title='owned'\"> <b>bold</b>"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server({"slow_s": 0.08}) as it:
        yield it


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as it:
        yield it


@pytest.fixture
def page(running: Running, chromium: Browser) -> Iterator[Browser]:
    """The page with an empty conversation; whatever the page does, its policy is not violated."""
    chromium.open(f"{running.url}/health")
    chromium.evaluate("localStorage.clear(); sessionStorage.clear()")
    visit(chromium, running)
    yield chromium
    assert not chromium.problems


def visit(page: Browser, running: Running) -> None:
    """Load the page anew, without stubs."""
    page.open(f"{running.url}/health")
    page.open(f"{running.url}/")
    page.wait("model !== null")


def stub(page: Browser, path: str, body: object, status: int = 200, *, key: str = "") -> None:
    """Answer requests of the page to ``path``, that lack the ``key``, with ``body``: text, or an object as JSON."""
    text = body if isinstance(body, str) else json.dumps(body)
    page.evaluate(
        f"""globalThis.real ??= fetch;
        fetch = ((before) => async (url, options) =>
            url === {json.dumps(path)} && (!{json.dumps(key)} || options.headers.authorization !== {json.dumps(key)})
            ? new Response({json.dumps(text)}, {{status: {status}}}) : before(url, options))(fetch); 0"""
    )


def ask(page: Browser, text: str) -> None:
    page.evaluate("byId('input').focus()")
    page.type(text)
    page.press("Enter")


def answered(page: Browser, count: int) -> list[dict]:
    """All messages, once there are ``count`` and nothing runs."""
    page.wait(f"running === null && state.messages.length === {count}")
    return page.evaluate("JSON.parse(localStorage.getItem(STORE)).messages")


def visible(page: Browser) -> str:
    return page.evaluate("document.body.innerText")


@needs_browser
def test_chat_page(page: Browser, running: Running):
    """A conversation: streamed, stopped, generated again, edited, kept over a reload and deleted."""
    assert page.evaluate("byId('model').textContent") == "tiny" == page.evaluate("document.title")
    assert page.evaluate("document.activeElement.id") == "input"
    page.click("Settings")
    for name, value in {"system": "Be brief.", "temperature": "0", "max_tokens": "12", "seed": "3"}.items():
        page.evaluate(f"byId('{name}').focus()")
        page.type(value)
    page.click("Done")

    page.evaluate("byId('input').focus()")
    page.type("Hello")
    page.press("Enter", shift=True)
    page.type("you")
    assert page.evaluate("byId('input').value") == "Hello\nyou"
    page.press("Enter")
    page.wait("byId('log').getAttribute('aria-busy') === 'true' && byId('stop').checkVisibility()")
    first = answered(page, 2)
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello\nyou"}]
    body = {"messages": asked, "max_tokens": 12, "temperature": 0, "seed": 3}
    reply = httpx.post(f"{running.url}/v1/chat/completions", json=body).json()
    assert first[1]["content"] == reply["choices"][0]["message"]["content"]
    assert first[1]["usage"]["total_tokens"] == reply["usage"]["total_tokens"] and first[1]["end"] == "length"
    shown = visible(page)
    assert re.search(r"12 tokens · [\d.]+ tokens/s · prompt \d+ tokens · ended at the limit of tokens", shown), shown
    assert "The answer is complete." in shown

    page.evaluate("byId('temperature').value = byId('seed').value = byId('max_tokens').value = ''; 0")
    page.evaluate("for (const name of FIELDS) byId(name).dispatchEvent(new Event('input'))")
    page.evaluate("globalThis.texts = new Set(); 0")
    page.click("Regenerate")
    page.wait("running !== null && texts.add(document.querySelector('.assistant .body').textContent).size > 3")
    page.press("Escape")
    stopped = answered(page, 2)[1]
    assert stopped["end"] == "stopped" and 0 < stopped["usage"]["completion_tokens"] < 90
    assert "stopped by you" in visible(page)

    page.click("Edit")
    assert page.evaluate("byId('input').value") == "Hello\nyou"
    page.press("Escape")
    assert page.evaluate("byId('input').value") == "" and len(answered(page, 2)) == 2
    page.click("Edit")
    page.evaluate("byId('input').select()")
    ask(page, "Bye")
    page.wait("running !== null")
    page.click("Stop")
    page.wait("running === null")
    assert page.evaluate("state.messages[0].content") == "Bye"

    page.click("Theme")
    visit(page, running)
    assert "Bye" in visible(page) and page.evaluate("byId('system').value") == "Be brief."
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.click("Theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 31)"
    page.click("Clear")
    assert answered(page, 0) == [] and "No messages yet." in visible(page)


@needs_browser
def test_text_never_becomes_markup(page: Browser, running: Running):
    """Of the user, of the model while it streams, in code, in an error, and from the store of an earlier visit."""
    code = f"{HOSTILE}\n\n`{HOSTILE}`\n\n```<img src=x>\n{HOSTILE}\n```\nend"
    chunks = [{"choices": [{"delta": {"content": each}}]} for each in code]
    chunks.append({"choices": [{"delta": {}, "finish_reason": "stop"}]})
    events = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks)
    stub(page, "v1/chat/completions", events + "data: [DONE]\n\n")
    ask(page, HOSTILE)
    assert [each["content"] for each in answered(page, 2)] == [HOSTILE, code]
    assert visible(page).count(HOSTILE) == 4
    assert page.evaluate("document.querySelector('.assistant pre').textContent") == HOSTILE
    stub(page, "v1/chat/completions", {"error": {"message": HOSTILE}}, status=400)
    ask(page, "x")
    page.wait("!byId('error').hidden")
    assert page.evaluate("byId('error').textContent") == HOSTILE
    visit(page, running)
    assert visible(page).count(HOSTILE) == 4
    assert page.evaluate("document.querySelectorAll('body > :not(script) :is(script, img, b)').length") == 0
    stub(page, "v1/models", {"data": [{"id": HOSTILE, "capabilities": [HOSTILE]}]})
    page.evaluate("loadModel()")
    assert page.evaluate("document.title") == page.evaluate("byId('model').textContent") == HOSTILE
    page.evaluate("try { document.body.innerHTML = '<b>x</b>'; globalThis.became = true } catch {} 0")
    assert page.evaluate("globalThis.became") is None, "trusted types are not enforced"
    assert any("TrustedHTML" in each for each in page.problems)
    page.problems.clear()


@needs_browser
def test_errors_are_shown_in_words(page: Browser, running: Running):
    page.evaluate("byId('max_tokens').value = '500'; byId('max_tokens').dispatchEvent(new Event('input'))")
    ask(page, "Hello")
    page.wait("!byId('error').hidden")
    assert re.search(r"context length is 128 tokens; .*max_tokens 500 make them \d+: ask for at", visible(page))
    page.evaluate("byId('max_tokens').value = '2'; byId('max_tokens').dispatchEvent(new Event('input'))")
    page.click("Try again")
    assert len(answered(page, 2)) == 2 and page.evaluate("byId('error').hidden")

    events = 'data: {"choices": [{"text": ""}]}\n\ndata: {"error": {"message": "the engine failed"}}\n\n'
    stub(page, "v1/chat/completions", events)
    page.click("Regenerate")
    page.wait("byId('error').textContent === 'the engine failed'")
    stub(page, "v1/chat/completions", 'data: {"choices": [{"delta": {"content": "par"}}]}\n\n')
    page.click("Try again")
    page.wait("byId('error').textContent.startsWith('The connection ended before the answer did')")
    assert answered(page, 2)[1]["content"] == "par"

    visit(page, running)
    refusal = {"error": {"message": "no valid API key"}}
    stub(page, "v1/chat/completions", refusal, 401, key="Bearer secret")
    page.click("Regenerate")
    page.wait("byId('key-form').checkVisibility()")
    assert "no valid API key" in visible(page)
    assert page.evaluate("document.activeElement.id") == "key"
    page.type("secret")
    page.press("Enter")
    assert len(answered(page, 2)) == 2 and not page.evaluate("byId('key-form').checkVisibility()")
    assert "secret" not in page.evaluate("JSON.stringify(localStorage)")


@needs_browser
def test_models_without_chat(page: Browser, running: Running):
    """A base model continues a text; a model that generates none is said to."""

    def serve_as(*capabilities: str) -> None:
        card = {"id": "tiny", "capabilities": capabilities}
        stub(page, "v1/models", {"data": [card]})
        page.evaluate("loadModel()")

    serve_as("completions")
    page.wait("byId('mode').checkVisibility()")
    assert "This model has no chat template, so it cannot chat. It continues a text" in visible(page)
    page.evaluate("state.settings.temperature = '0'; state.settings.max_tokens = '9'; 0")
    ask(page, "The quick")
    body = {"prompt": "The quick", "max_tokens": 9, "temperature": 0}
    reply = httpx.post(f"{running.url}/v1/completions", json=body).json()
    assert answered(page, 2)[1]["content"] == reply["choices"][0]["text"]
    serve_as("embeddings")
    page.wait("byId('input').disabled")
    assert "This model generates no text. It is served for: embeddings." in visible(page)
    stub(page, "v1/models", {"error": {"message": "the model is still loading; try again later"}}, 503)
    page.evaluate("loadModel()")
    page.wait("byId('status').textContent.startsWith('the model is still loading')")


@needs_browser
def test_a_model_can_be_chosen(page: Browser, running: Running):
    """The first one that chats answers, until another one is chosen; the choice is kept."""
    assert not page.evaluate("byId('choice').checkVisibility()")
    cards = [
        {"id": name, "capabilities": [can]} for name, can in (("minilm", "embeddings"), ("a", "chat"), ("b", "chat"))
    ]

    def load() -> None:
        stub(page, "v1/models", {"data": cards})
        page.evaluate("loadModel()")
        page.wait("byId('choice').checkVisibility()")

    load()
    assert page.evaluate("[...byId('models').options].map((each) => each.value)") == ["minilm", "a", "b"]
    assert page.evaluate("[byId('models').value, bodyOfRequest().model, document.title]") == ["a"] * 3
    page.evaluate("byId('models').value = 'b'; byId('models').dispatchEvent(new Event('change'))")
    assert page.evaluate("[bodyOfRequest().model, document.title]") == ["b"] * 2
    visit(page, running)
    assert page.evaluate("document.title") == "tiny"
    load()
    assert page.evaluate("bodyOfRequest().model") == "b"


@needs_browser
@pytest.mark.parametrize("width", [320, 1200])
def test_page_is_labelled_and_fits(page: Browser, width: int):
    """Every control has a name, and nothing is wider than the window."""
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=700, deviceScaleFactor=1, mobile=False)
    long = "x" * 200
    page.evaluate(
        f"state.messages.push({{role: 'user', content: '{long}'}}, {{role: 'assistant', end: 'stop', "
        f"content: '{long}\\n\\n```\\n{long}\\n```'}}); draw(); askForKey(); fail('{long}')"
    )
    assert page.evaluate("document.documentElement.scrollWidth") == width
    assert page.evaluate("byId('scroller').scrollWidth <= byId('scroller').clientWidth")
    page.click("Settings")
    tree = page.call("Accessibility.getFullAXTree")["nodes"]
    controls = [it for it in tree if it.get("role", {}).get("value") in ("button", "textbox", "spinbutton", "dialog")]
    assert len(controls) >= 8
    assert all(it.get("name", {}).get("value") for it in controls), controls
    page.click("Done")


def test_page_is_confined(running: Running):
    """GET and HEAD; the policy has the hashes of the file's own script and style."""
    reply = httpx.get(f"{running.url}/")
    assert reply.status_code == 200 and reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(each.partition(" ")[::2] for each in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["require-trusted-types-for"] == "'script'"
    assert re.fullmatch(r"'sha256-[\w+/]{43}='", policy["script-src"]) and "unsafe" not in str(policy)
    assert reply.headers["x-content-type-options"] == "nosniff" and reply.headers["referrer-policy"] == "no-referrer"
    for name in ("content-security-policy", "content-type", "content-length", "x-content-type-options"):
        assert httpx.head(f"{running.url}/").headers[name] == reply.headers[name]
    assert page_headers("<style>a</style><script>b</script>") != page_headers("<style>a</style><script>c</script>")


def test_page_is_one_file_without_markup_from_text():
    page = (resources.files("colonnade.serve.api") / "chat_page.html").read_text("utf-8")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|\son\w+=|//\w", page)
    assert not re.search(r"\b(src|href)=(?!\"data:,\")|@import|url\(", page)

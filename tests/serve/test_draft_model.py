"""Drafts by a second model change no text, good ones save passes of the target, and useless ones end."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import colonnade
from colonnade.config import Plan, ServeConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.errors import ConfigError
from colonnade.model import Transformer
from colonnade.model_spec import ModelSpec
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams, StructuredOutputs
from colonnade.serve.draft_planner import PassTime, PassTimes
from colonnade.serve.request import Stats
from colonnade.serve.weight_swap import WeightSwap
from tests.serve import tiny
from tests.serve.checkpoints import save
from tests.serve.serving import server
from tests.serve.test_weight_swap import swap_weights
from tests.worlds import run

LIMITS = ServeConfig(pages=400, page_tokens=4, draft="small", draft_tokens=4, max_requests=64)
TIGHT = LIMITS.replace(pages=24, page_tokens=3, token_budget=23, max_requests=6)
NOISE = {"same": 0.0, "close": 0.05, "useless": 3.0}


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of the target takes 1 whatever it holds, one of the draft model 0.05: measured times are noise here."""
    make_cheap(monkeypatch)


def make_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PassTime, "update", lambda *_: None)
    monkeypatch.setattr(PassTimes, "target_s", lambda *_: 1.0)
    monkeypatch.setattr(PassTimes, "draft_s", lambda *_: 0.05)


def serve(model: Transformer, draft: Transformer | None, limits: ServeConfig = LIMITS) -> Engine:
    return Engine(model, tiny.tokenizer(), limits if draft is not None else limits.replace(draft=None), draft)


def mixed(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """Requests of several kinds, with prompts that share their beginnings and others."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.3},
        {"temperature": 1, "top_p": 0.9, "logprobs": 2},
        {"temperature": 1.3, "top_k": 9, "min_tokens": 9},
        {"temperature": 0.7, "min_p": 0.05, "prompt_logprobs": 1},
        {"temperature": 1, "frequency_penalty": 0.5},
        {"temperature": 1, "structured_outputs": StructuredOutputs(regex="[a-z]{14}")},
        {"temperature": 1, "logit_bias": {7: 6.0, 9: 6.0}},
    ]
    prompts = [[*range(20, 20 + i % 13), *[5, 3] * (i % 3), i % 300] for i in range(count)]
    params = [SamplingParams(seed=i, max_tokens=9 + i % 23, **kinds[i % len(kinds)]) for i in range(count)]
    return prompts, params


def check_texts(count: int, plain: Engine, drafted: Engine) -> Stats:
    """Compare the completions of both engines; all pages are free at the end."""
    prompts, params = mixed(count)
    expected, got = plain.generate(prompts, params), drafted.generate(prompts, params)
    for each, one, other in zip(params, expected, got, strict=True):
        assert one.token_ids == other.token_ids and one.text == other.text, each
        assert one.finish_reason == other.finish_reason
        for mine, theirs in ((one.logprobs, other.logprobs), (one.prompt_logprobs, other.prompt_logprobs)):
            assert [x.logprob for x in mine or ()] == pytest.approx([x.logprob for x in theirs or ()], abs=1e-5)
    drafted.scheduler.audit()
    assert drafted.scheduler.pool.free == drafted.scheduler.pool.pages
    return drafted.stats


@pytest.mark.sample(1)
@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("ahead", [False, True], ids=["", "ahead"])
@pytest.mark.parametrize("noise", NOISE)
@pytest.mark.parametrize("limits", [LIMITS, TIGHT], ids=["roomy", "tight"])
def test_speculation_changes_no_text(limits: ServeConfig, noise: str, ahead: bool):
    model = tiny.model(dtype=torch.float32)
    limits = limits.replace(async_scheduling=ahead, graph_capture=ahead)
    drafted = serve(model, tiny.noisy_copy(NOISE[noise], dtype=torch.float32), limits)
    stats = check_texts(48, serve(model, None, limits), drafted)
    assert (stats.preemptions > 0) == (limits.pages == TIGHT.pages)
    assert stats.draft_tokens > 0
    share = stats.accepted_draft_tokens / stats.draft_tokens
    assert share > 0.97 if noise == "same" else share > 0.4 if noise == "close" else share < 0.3


@pytest.mark.long
@pytest.mark.usefixtures("cheap")
def test_speculation_changes_no_text_of_a_thousand_requests():
    model = tiny.model(dtype=torch.float32)
    limits = LIMITS.replace(pages=120)  # which leave rows for drafts
    drafted = serve(model, tiny.noisy_copy(0.05, dtype=torch.float32), limits)
    stats = check_texts(1000, serve(model, None, limits), drafted)
    assert stats.accepted_draft_tokens > 0.4 * stats.draft_tokens > 1000


@pytest.mark.sample(2)
@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("count", [1, 7])
def test_a_good_draft_saves_passes(count: int, temperature: float):
    """With the target as its own draft all drafts are right, also where tokens are sampled: the noise is shared."""
    model = tiny.model()
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=61, ignore_eos=True) for i in range(count)]
    plain, drafted = serve(model, None), serve(model, tiny.model())
    prompts = [[9, i, 4, 5, 6] for i in range(count)]
    assert plain.generate(prompts, params) == drafted.generate(prompts, params)
    stats = drafted.stats
    assert stats.accepted_draft_tokens == stats.draft_tokens == 48 * count
    assert (plain.stats.steps, stats.steps) == (61, 13), "a prefill, then five tokens a pass"


@pytest.mark.slow
@pytest.mark.usefixtures("cheap")
def test_useless_drafts_end_and_useful_ones_begin_again():
    model, params = tiny.model(), SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
    draft = tiny.noisy_copy(3.0)
    drafted = serve(model, draft)
    first = drafted.generate([[5, 6, 7]], params)
    used = drafted.stats.draft_tokens
    assert 0 < used < 100 and drafted.stats.accepted_draft_tokens < 0.3 * used
    assert drafted.generate([[5, 6, 7]], params) == first == serve(model, None).generate([[5, 6, 7]], params)
    assert drafted.stats.draft_tokens - used < 20, "a new request starts with the rate of the others"
    with torch.no_grad():  # now its drafts are right
        for mine, theirs in zip(draft.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs)
    for seed in range(12):
        drafted.generate([[5, 6, seed]], params)
    before = drafted.stats.steps
    drafted.generate([[5, 6, 20]], params)
    assert drafted.stats.steps - before < 50, "probes have noticed"


@pytest.mark.usefixtures("cheap")
def test_the_draft_model_runs_shared_prefixes_once():
    model, draft = tiny.model(), tiny.model()
    drafted, seen = serve(model, draft), list[int]()
    draft.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0].tokens_T)))
    prompt, params = list(range(3, 44)), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    drafted.generate([prompt], params)
    assert max(seen) == 41
    seen.clear()
    drafted.generate([[*prompt, i] for i in (60, 61, 62)], params)
    assert max(seen) <= 6 and drafted.stats.accepted_draft_tokens == drafted.stats.draft_tokens


@pytest.mark.usefixtures("cheap")
def test_cancelled_requests_free_their_pages():
    drafted = serve(tiny.model(), tiny.noisy_copy(0.05), LIMITS.replace(async_scheduling=True))
    params = SamplingParams(temperature=1, seed=3, max_tokens=60, ignore_eos=True)
    expected = [serve(tiny.model(), None).generate([[7, i]], params)[0].token_ids for i in range(3)]
    keys = [drafted.add([7, i], params) for i in range(6)]
    tokens: dict[str, list[int]] = {key: [] for key in keys}
    while drafted.busy:
        for output in drafted.step():
            assert output.token is not None
            tokens[output.id].append(output.token)
            if output.id in keys[3:] and len(tokens[output.id]) == 3 * keys.index(output.id):
                drafted.cancel(output.id)
        drafted.scheduler.audit()
    assert [tuple(tokens[key]) for key in keys[:3]] == expected
    assert drafted.scheduler.pool.free == drafted.scheduler.pool.pages and drafted.stats.draft_tokens > 0


@pytest.mark.usefixtures("cheap")
def test_a_resumed_request_is_drafted_for():
    model, params = tiny.model(), SamplingParams(temperature=1, seed=3, max_tokens=40, ignore_eos=True)
    whole = serve(model, None).generate([[7, 8]], params)[0].token_ids
    drafted = serve(model, tiny.model())
    drafted.add([7, 8], params, resume=whole[:17])
    tokens = [output.token for _ in range(20) for output in drafted.step()]
    assert tuple(tokens) == whole[17:] and drafted.stats.draft_tokens == drafted.stats.accepted_draft_tokens > 10


@pytest.mark.usefixtures("cheap")
def test_a_draft_model_of_a_shorter_context_stops_there():
    model, params = tiny.model(), SamplingParams(temperature=0, max_tokens=90, ignore_eos=True)
    drafted, seen = serve(model, draft := tiny.model(context=40)), list[int]()
    draft.register_forward_pre_hook(lambda _, inputs: seen.append(int(inputs[0].positions_T.max())))
    assert drafted.generate([[4, 5]], params) == serve(model, None).generate([[4, 5]], params)
    assert max(seen) == 39 and 20 < drafted.stats.draft_tokens < 40


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("size", [150, 310])
def test_padded_vocabularies_may_differ(size: int):
    """Tokens that one of the models lacks are neither drafted nor run."""
    model, prompts = tiny.model(), [[4, 5], [4, 299], *([7, i] for i in range(20))]
    params = [SamplingParams(temperature=1, seed=i, max_tokens=30, ignore_eos=True) for i in range(22)]
    drafted = serve(model, tiny.model(vocab_size=size))
    assert drafted.generate(prompts, params) == serve(model, None).generate(prompts, params)
    assert drafted.stats.draft_tokens > 0


@pytest.mark.usefixtures("cheap")
def test_drafts_that_are_not_finite_are_none():
    model, draft, params = tiny.model(), tiny.model(), SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with torch.no_grad():
        next(draft.parameters()).fill_(torch.nan)
    drafted = serve(model, draft)
    assert drafted.generate([[4, 5]], params) == serve(model, None).generate([[4, 5]], params)
    assert drafted.stats.draft_tokens == 0


@pytest.mark.usefixtures("cheap")
def test_drafts_have_the_same_bits_under_batch_invariance():
    model = tiny.model(dtype=torch.float32)
    limits = LIMITS.replace(batch_invariant=True)
    prompts, params = mixed(24)
    drafted = serve(model, tiny.noisy_copy(0.05, dtype=torch.float32), limits)
    assert drafted.generate(prompts, params) == serve(model, None, limits).generate(prompts, params)
    assert drafted.stats.accepted_draft_tokens > 0


def test_measured_times_decide_about_a_useless_draft():
    """As large as the target and mostly wrong: the first requests try it, the others do not."""
    drafted = serve(tiny.model(dtype=torch.float32), tiny.noisy_copy(3.0, dtype=torch.float32))
    params = SamplingParams(temperature=1, seed=1, max_tokens=60, ignore_eos=True)
    assert drafted.generate([[3, 4]], params) == serve(tiny.model(dtype=torch.float32), None).generate([[3, 4]], params)
    assert drafted.stats.draft_tokens < 40


def _serve(plan: dict[str, int], count: int, limits: ServeConfig) -> tuple[list[Any], Stats]:
    with pytest.MonkeyPatch.context() as patch, DistributedContext.build(Plan(**plan)) as context:
        make_cheap(patch)
        draft = None if context.rank else tiny.noisy_copy(0.05)
        engine = Engine(tiny.model(context.axes.serving()), tiny.tokenizer(), limits, draft)
        if context.rank:
            engine.follow()
            return [], Stats()
        completions = engine.generate(*mixed(count))
        engine.scheduler.audit()
        engine.stop()
        return completions, engine.stats


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{"tp": 2}, {"cp": 2}], ids=["tp", "cp"])
@pytest.mark.parametrize("count", [40, pytest.param(1000, marks=pytest.mark.long)])
def test_speculation_changes_no_text_on_two_ranks(plan: dict[str, int], count: int):
    limits = LIMITS.replace(pages=120, page_tokens=3, graph_capture=True)
    plain = serve(tiny.model(), None).generate(*mixed(count))
    completions, stats = run(2, _serve, plan, count, limits)[0]
    assert [each.token_ids for each in completions] == [each.token_ids for each in plain]
    assert stats.accepted_draft_tokens > 0.4 * stats.draft_tokens > count / 2


def test_swapped_weights_keep_the_draft_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make_cheap(monkeypatch)
    old, new = save(tmp_path / "old"), save(tmp_path / "new", 3)
    drafted = serve(old, save(tmp_path / "draft", 3))
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    drafted.add([4, 5], params)
    tokens = [output.token for _ in range(3) for output in drafted.step()]
    count = len(tokens)
    answer = swap_weights(drafted, WeightSwap(drafted, DistributedContext.solo()), tmp_path / "new")
    assert answer["event"] == "answer" and answer["preempted"] == 1, answer
    before = drafted.stats.accepted_draft_tokens
    while drafted.busy:
        tokens += [output.token for output in drafted.step()]
    assert tokens[count:] == tiny.greedy_tokens(new, [4, 5, *tokens[:count]], 40 - count)
    assert drafted.stats.accepted_draft_tokens - before > 10, "the draft model agrees with the new weights"


# -- refusals, before any weights are read -----------------------------------------------------------------------------


def spec(target: Path, draft: Path | str, **serve: Any) -> ModelSpec:
    return ModelSpec(str(target), Plan(), ServeConfig(draft=str(draft), **serve), "cpu", "auto")


def test_unsuitable_draft_models_are_refused(tmp_path: Path):
    save(tmp_path / "big")
    save(tmp_path / "small", layers=1)
    for name, changes in (("encoder", {"causal": False}), ("longer", {"vocab_size": 310})):
        save(tmp_path / name, **changes)
    other = Tokenizer.train(["Äpfel und Öl sind größer", *tiny.TEXT[1:]], 301)
    save(tmp_path / "other", tokenizer=other)
    for name, words in {
        "missing": r"--serve.draft .*missing: .*missing does not exist.*; or use --serve.draft ngram",
        "encoder": r"--serve.draft .*encoder attends in both directions",
        "other": r"--serve.draft .*other has a different vocabulary: [\d,]+ of the served model's 3\d\d tokens "
        r"differ, such as \d+, which is .* and there .* \(vocabularies of 301 and 301 tokens\); use a model",
    }.items():
        with pytest.raises(ConfigError, match=words):
            spec(tmp_path / "big", tmp_path / name).open_loader()
    spec(tmp_path / "big", tmp_path / "small").open_loader()
    spec(tmp_path / "big", tmp_path / "longer").open_loader()
    with pytest.raises(ConfigError, match=r"serve.draft is .*small, but drafts need text generation"):
        spec(tmp_path / "big", tmp_path / "small", task="embed").open_loader()
    with pytest.raises(ConfigError, match="the engine was given no draft model"):
        Engine(tiny.model(), tiny.tokenizer(), LIMITS)


def test_a_python_engine_loads_its_draft_model(tmp_path: Path):
    save(tmp_path / "big")
    save(tmp_path / "small", layers=1)
    with colonnade.load(tmp_path / "big") as model:
        params = SamplingParams(temperature=1, seed=2, max_tokens=20)
        plain = colonnade.Engine(model, LIMITS.replace(draft=None)).generate(["The fox"], params)
        drafted = colonnade.Engine(model, LIMITS.replace(draft=str(tmp_path / "small")))
        assert drafted.generate(["The fox"], params) == plain
        with pytest.raises(ConfigError, match="missing does not exist"):
            colonnade.Engine(model, LIMITS.replace(draft=str(tmp_path / "missing")))


# -- over HTTP ---------------------------------------------------------------------------------------------------------


def completion(url: str, seed: int) -> str:
    body = {"prompt": "The dog", "seed": seed, "max_tokens": 40, "temperature": seed / 2}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    return reply.raise_for_status().json()["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.parametrize("plan", [{}, {"tp": 2}], ids=["one", "tp"])
def test_a_server_drafts(plan: dict[str, int]):
    model, tokenizer, _ = tiny.load(DistributedContext.solo(), deep=True)
    params = [SamplingParams(temperature=seed / 2, seed=seed, max_tokens=40) for seed in range(3)]
    expected = Engine(model, tokenizer, LIMITS.replace(draft=None)).generate(["The dog"] * 3, params)
    with server({"deep": True, "drafts": True}, plan, page_tokens=4, pages=64, draft="small") as drafted:
        assert [completion(drafted.url, seed) for seed in range(3)] == [each.text for each in expected]
        metrics = httpx.get(f"{drafted.url}/metrics").text
        found = re.search(r"accepted_tokens_total\S* ([\d.]+)\n", metrics)
        assert found and float(found[1]) > 0


@pytest.mark.slow
def test_the_command_line_serves_with_a_draft_model(tmp_path: Path):
    save(tmp_path / "big")
    save(tmp_path / "small", layers=1)
    command = [sys.executable, "-m", "colonnade", "serve", str(tmp_path / "big"), "--serve.port", "0", "--serve.draft"]
    with subprocess.Popen([*command, str(tmp_path / "small")], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            lines = iter(process.stderr.readline, "")
            line = next(line for line in lines if "serving" in line or "rror" in line)
            assert (url := re.search(r"http://\S+", line)), line
            assert completion(url[0], 0)
        finally:
            process.terminate()
            process.stderr.read()
    assert process.wait(60) == 0
    done = subprocess.run([*command, str(tmp_path / "none")], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and "does not exist" in done.stderr and "Traceback" not in done.stderr, done.stderr

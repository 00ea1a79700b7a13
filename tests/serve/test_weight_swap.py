"""Swapping the weights of a running engine: the same values as after loading them, on all ranks or on none."""

import json
import queue
import shutil
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import colonnade
from colonnade.config import ExpertsConfig, LatentConfig, MoeConfig, Plan, ServeConfig
from colonnade.data.tokenizer import Tokenizer
from colonnade.model.weight_only_quant import quantised_parameters
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.ipc import Message
from colonnade.serve.pooler_spec import PoolerSpec
from colonnade.serve.pooling_engine import PoolingEngine
from colonnade.serve.staged_weights import StagedWeights, check_replacement, staged_bytes
from colonnade.serve.weight_swap import WeightSwap
from tests import worlds
from tests.serve import tiny
from tests.serve.checkpoints import save
from tests.serve.serving import Running, server

PROMPTS = [[5, 3, 5, 8, 9, 7, 9, 3], [3], list(range(40, 57))]
LIMITS = ServeConfig(pages=64, page_tokens=4, token_budget=16, max_requests=4)
MOE = MoeConfig(experts=4, active=2, ffn_width=64, shared_width=64)
SIZES = {"width": 64, "heads": 4, "kv_heads": 2, "head_width": 16, "ffn_width": 128}
"""Multiples of the groups of int4, also over two ranks."""
MODELS: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "tied": {**SIZES, "tied": True},
    "experts": {**SIZES, "moe": MOE},
    "latent": {**SIZES, "kv_heads": 4, "latent": LatentConfig(kv_rank=8, q_rank=8, rope_width=4, v_width=16)},
}


def greedy(max_tokens: int = 9) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)


def texts(engine: Engine) -> list[tuple[int, ...]]:
    return [each.token_ids for each in engine.generate(PROMPTS, greedy())]


def swap_weights(engine: Engine | PoolingEngine, swap: WeightSwap, path: Path | str) -> Message:
    """Start a swap and take steps until it has ended; returns the answer."""
    events: queue.SimpleQueue[None] = queue.SimpleQueue()
    swap.notify = lambda: events.put(None)
    assert swap.start({"ids": ["swap"], "path": str(path)}) is None
    while True:
        events.get(timeout=120)
        if answer := swap.advance():
            return answer
        engine.heartbeat()


# -- one rank ----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("model", "weights"),
    [
        ("llama", "stored"),
        ("llama", "int8"),
        ("tied", "int4"),
        ("experts", "stored"),
        ("experts", "int8"),
        ("latent", "float8"),
    ],
)
def test_texts_are_those_of_the_new_weights(tmp_path: Path, model: str, weights: Any):
    for seed in (1, 2):
        save(tmp_path / str(seed), seed, **MODELS[model])
    loaded = [colonnade.load(tmp_path / str(seed), weights=weights) for seed in (1, 2)]
    old, new = (texts(colonnade.Engine(each, LIMITS)) for each in loaded)
    engine = colonnade.Engine(loaded[0], LIMITS)
    assert texts(engine) == old != new
    addresses = [x.data_ptr() for x in loaded[0].transformer.parameters()]
    answer = swap_weights(engine, WeightSwap(engine, loaded[0].context), tmp_path / "2")
    assert answer["event"] == "answer" and answer["path"] == str(tmp_path / "2"), answer
    assert texts(engine) == new
    assert addresses == [x.data_ptr() for x in loaded[0].transformer.parameters()], "CUDA graphs read these"


def test_hugging_face_weights_replace_native_ones(tmp_path: Path):
    save(tmp_path / "old", 1)
    save(tmp_path / "new", 2, init_std=0.02)
    with colonnade.load(tmp_path / "new") as model:
        colonnade.save(model, tmp_path / "hf", format="hf")
    with colonnade.load(tmp_path / "old") as model, colonnade.load(tmp_path / "hf") as other:
        engine = colonnade.Engine(model, LIMITS)
        assert swap_weights(engine, WeightSwap(engine, model.context), tmp_path / "hf")["event"] == "answer"
        assert texts(engine) == texts(colonnade.Engine(other, LIMITS))


@pytest.mark.parametrize("limits", [{}, {"async_scheduling": True}, {"draft": "ngram"}, {"graph_capture": True}])
def test_running_requests_keep_their_text_and_go_on(tmp_path: Path, limits: dict[str, Any]):
    new = save(tmp_path / "new")
    engine = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), LIMITS.replace(**limits))
    swap = WeightSwap(engine, DistributedContext.solo())
    keys = [engine.add(prompt, greedy(30)) for prompt in PROMPTS]
    tokens: dict[str, list[int]] = {key: [] for key in keys}
    swapped: dict[str, int] = {}
    while engine.busy:
        if not swapped and min(map(len, tokens.values())) >= 5:
            answer = swap_weights(engine, swap, tmp_path / "new")
            assert answer["preempted"] == 3, answer
            assert not engine.scheduler.running
            swapped = {key: len(each) for key, each in tokens.items()}
        for output in engine.step():
            assert output.token is not None and output.finish_reason in (None, "length")
            tokens[output.id].append(output.token)
        engine.scheduler.audit()
    for key, prompt in zip(keys, PROMPTS, strict=True):
        generated = tokens[key]
        assert len(generated) == 30
        # The pass in flight at the swap may have sampled one more with the old weights.
        tails = [
            generated[count:] == tiny.greedy_tokens(new, [*prompt, *generated[:count]], 30 - count)
            for count in (swapped[key], swapped[key] + 1)
        ]
        assert any(tails)
    assert engine.stats.prefix_hits == 0


def test_encoders_swap_unless_their_pooling_differs(tmp_path: Path):
    save(tmp_path / "new")
    model, spec = tiny.model(dtype=torch.float32), PoolerSpec("embed", 24, 128, "last")
    engine = PoolingEngine(model, tiny.tokenizer(), ServeConfig(task="embed"), spec)
    swap = WeightSwap(engine, DistributedContext.solo())
    answer = swap_weights(engine, swap, tmp_path / "new")
    assert answer["event"] == "answer", answer
    new = save(tmp_path / "same")
    for mine, theirs in zip(model.parameters(), new.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    engine.spec = PoolerSpec("embed", 24, 128, "mean")
    refused = swap_weights(engine, swap, tmp_path / "new")
    assert "pooling is 'last', and 'mean' in the served model" in refused["error"]["message"]


@pytest.mark.parametrize("weights", ["stored", "int8"])
def test_a_copy_that_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Any):
    save(tmp_path / "new", **SIZES)
    model = colonnade.load(tmp_path / "new", weights=weights)
    staged, needed = StagedWeights(model.transformer), staged_bytes(model.transformer)
    staged.read(check_replacement(tmp_path / "new", model.transformer, model.tokenizer), model.context)
    assert sum(x.nbytes for x in staged._staged.values()) <= needed  # type: ignore[union-attr]
    engine = colonnade.Engine(model, LIMITS)
    monkeypatch.setattr("colonnade.serve.staged_weights.usable_bytes", lambda _: needed - 1)
    answer = swap_weights(engine, WeightSwap(engine, model.context), tmp_path / "new")
    assert answer["error"]["status"] == 400 and "host memory" in answer["error"]["message"]


@pytest.mark.parametrize(
    ("weights", "part"), [("int8", "scales"), ("int4", "scales"), ("float8", "scales"), ("float8", "values")]
)
def test_quantised_weights_that_are_not_finite_are_refused(tmp_path: Path, weights: Any, part: str):
    """As they are stored: no other weights are computed from them first."""
    save(tmp_path / "new")
    with colonnade.load(tmp_path / "new", weights=weights) as model:
        colonnade.save(model, tmp_path / "old")
        poisoned = quantised_parameters(model.transformer)["blocks.0.ffn.up.weight"]
        if part == "scales":
            poisoned.scales.view(-1)[-1] = torch.inf
        else:
            poisoned.values.view(torch.uint8)[-1, -1] = 0xFF
        colonnade.save(model, tmp_path / "bad")
    with colonnade.load(tmp_path / "old") as model:
        engine = colonnade.Engine(model, LIMITS)
        before = texts(engine)
        refused = swap_weights(engine, WeightSwap(engine, model.context), tmp_path / "bad")
        assert f"'blocks.0.ffn.up.weight' is not finite in {weights}" in refused["error"]["message"]
        assert texts(engine) == before


def test_offloaded_experts_are_refused(tmp_path: Path):
    save(tmp_path / "new", **MODELS["experts"])
    model = colonnade.load(tmp_path / "new", experts=ExpertsConfig(layers_on_device=1))
    engine = colonnade.Engine(model, LIMITS)
    refused = swap_weights(engine, WeightSwap(engine, model.context), tmp_path / "new")
    assert "experts offloaded to host memory" in refused["error"]["message"]


def test_a_second_swap_waits_for_the_end_of_the_first(tmp_path: Path):
    save(tmp_path / "new")
    engine = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), LIMITS)
    swap = WeightSwap(engine, DistributedContext.solo())
    swap.start({"ids": ["a"], "path": str(tmp_path / "new")})
    refusal = swap.start({"ids": ["b"], "path": str(tmp_path / "new")})
    assert refusal and refusal["ids"] == ["b"] and refusal["error"]["status"] == 409


# -- several ranks -----------------------------------------------------------------------------------------------------


def swap_over_ranks(plan: dict[str, int], weights: Any, folders: list[str], limits: ServeConfig) -> list[Any]:
    """On rank 0 texts before, and after a swap to each of ``folders[1:]``, with its answer."""
    with DistributedContext.build(Plan(**plan)) as context:
        model = colonnade.load(folders[0], context=context, weights=weights)
        engine = colonnade.Engine(model, limits)
        swap = WeightSwap(engine, context)
        if context.rank:
            engine.follow(swap.follow)
            return []
        results: list[Any] = [texts(engine)]
        results += [(swap_weights(engine, swap, folder), texts(engine)) for folder in folders[1:]]
        engine.stop()
        return results


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("plan", "model", "weights"),
    [({"tp": 2}, "llama", "stored"), ({"tp": 2, "ep": 2}, "experts", "int8"), ({"tp": 2}, "llama", "int8")],
)
def test_ranks_swap_together_or_not_at_all(tmp_path: Path, plan: dict[str, int], model: str, weights: Any):
    changes = MODELS[model]
    save(tmp_path / "old", 1, **changes)
    save(tmp_path / "new", 2, **changes)
    save(tmp_path / "bad", 3, poison="blocks.1.attention.qkv.weight", **changes)  # a row of rank 1
    (old, new) = (
        texts(colonnade.Engine(colonnade.load(tmp_path / name, weights=weights), LIMITS)) for name in ("old", "new")
    )
    folders = [str(tmp_path / name) for name in ("old", "bad", "new", "missing")]
    before, bad, swapped, missing = worlds.run(2, swap_over_ranks, plan, weights, folders, LIMITS)[0]
    assert before == old and bad[1] == old, "a rank that fails leaves the old weights on all"
    assert "rank 1: " in bad[0]["error"]["message"] and "not finite" in bad[0]["error"]["message"]
    assert swapped[0]["event"] == "answer" and swapped[1] == new, swapped
    assert missing[0]["event"] == "refused" and missing[1] == new


# -- over HTTP ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def running():
    with server({"slow_s": 0.005}, page_tokens=4, pages=256, admin_key="root", max_requests=8) as it:
        yield it


def post(at: Running, path: str, body: dict[str, Any], key: str = "root") -> httpx.Response:
    return httpx.post(f"{at.url}{path}", json=body, headers={"authorization": f"Bearer {key}"}, timeout=120)


def text(at: Running) -> str:
    body = {"prompt": PROMPTS[0], "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    return post(at, "/v1/completions", body).json()["choices"][0]["text"]


def expected(seed: int) -> str:
    model = tiny.initialise(tiny.Transformer(tiny.config(), dtype=torch.float32), seed=seed)
    return tiny.tokenizer().decode(tiny.greedy_tokens(model, PROMPTS[0], 9))


def test_swap_under_load(running: Running, tmp_path: Path):
    for seed in (1, 2, 3):
        save(tmp_path / str(seed), seed)
    assert text(running) == expected(1)
    done, failures, finished = threading.Event(), [], []

    def stream() -> None:
        body = {"prompt": PROMPTS[0], "max_tokens": 60, "ignore_eos": True, "stream": True}
        while not done.is_set():
            with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=120) as reply:
                lines = [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
            chunks = [json.loads(line) for line in lines[:-1]]
            ended = lines[-1] == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "length"
            (finished if ended else failures).append(lines)

    threads = [threading.Thread(target=stream) for _ in range(6)]
    for thread in threads:
        thread.start()
    try:
        for seed in (2, 3, 1, 2):
            reply = post(running, "/admin/weights", {"path": str(tmp_path / str(seed))})
            assert reply.status_code == 200, reply.text
            assert reply.json()["status"] == "swapped" and reply.json()["path"] == str(tmp_path / str(seed))
            assert text(running) == expected(seed)
    finally:
        done.set()
        for thread in threads:
            thread.join(timeout=120)
    assert len(finished) >= 6 and not failures, failures[:1]
    assert post(running, "/admin/weights", {"path": str(tmp_path / "1")}).status_code == 200


def test_bad_checkpoints_leave_the_old_weights(running: Running, tmp_path: Path):
    save(tmp_path / "good")
    save(tmp_path / "wide", ffn_width=40)
    save(tmp_path / "nan", poison="blocks.0.ffn.up.weight")
    parts = tiny.tokenizer()
    save(tmp_path / "tokens", tokenizer=Tokenizer.train(tiny.TEXT, 290))
    save(tmp_path / "ends", tokenizer=Tokenizer(parts._core, None, (1,), parts.chat_template))
    for name in ("truncated", "damaged", "lost"):
        shutil.copytree(tmp_path / "good", tmp_path / name)
    (weights,) = (tmp_path / "truncated").glob("weights*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-100])
    (weights,) = (tmp_path / "damaged").glob("weights*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    (tmp_path / "lost" / "checkpoint.json").unlink()
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/swap/owned'\ntR.")
    with colonnade.load(tmp_path / "good") as model:
        colonnade.save(model, tmp_path / "hf", format="hf")
    file = tmp_path / "hf" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    cases = {
        "missing": "does not exist", "wide": "ffn_width is 40, and 35", "nan": "not finite", "tokens": "tokenizer",
        "ends": "tokenizer.eos_ids is (1,), and (0,)", "truncated": "weights", "damaged": "weights", "lost": "",
        "pickle": "", "hf": "truncated", "x" * 300: "", "good/tokenizer": "",
    }  # fmt: skip
    for name, words in cases.items():
        reply = post(running, "/admin/weights", {"path": str(tmp_path / name)})
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, "path"), (name, reply.text)
        assert words in error["message"] and "\n" not in error["message"], error
    assert text(running) == expected(1)


@pytest.mark.parametrize(
    ("body", "status"), [({}, 400), ({"path": ""}, 400), ({"path": "a\0b"}, 400), ({"path": ["a"]}, 400)]
)
def test_bad_bodies_are_refused(running: Running, body: dict[str, Any], status: int):
    reply = post(running, "/admin/weights", body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (status, "path")
    assert post(running, "/admin/weights", {"path": "x"}, key="user").status_code == 403

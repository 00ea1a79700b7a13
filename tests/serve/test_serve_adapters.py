"""Adapters served together with their model: chosen by name, mixed in one step, each equal to the merged model."""

from pathlib import Path

import httpx
import pytest
import torch

from colonnade.checkpoint.peft import Adapter, write_peft
from colonnade.config import LoraConfig, ModelConfig, Plan, ServeConfig
from colonnade.errors import CheckpointError, ConfigError
from colonnade.model import Transformer
from colonnade.model.lora import is_adapter, merged_delta
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.adapters import check_adapters
from colonnade.serve.model_inputs import pack_work, unpack_work
from colonnade.serve.page_pool import extend_page_hashes
from colonnade.serve.served_models import ServedModels
from colonnade.serve.work import Slice, Work
from tests.serve import tiny
from tests.serve.serving import server
from tests.worlds import run as in_world

LORAS = {"all": LoraConfig(rank=3, alpha=9.0), "some": LoraConfig(rank=2, alpha=8.0, targets=("k", "v", "down"))}
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS = ["The quick brown fox", "The quick brown fox jumps over the lazy dog, and", "We the people"]


def adapter(name: str, config: ModelConfig) -> Adapter:
    whole = config.replace(lora=LORAS[name])
    generator = torch.Generator().manual_seed(len(name))
    shapes = Transformer(whole, device="meta").global_shapes()
    tensors = {n: torch.randn(s, generator=generator) * 0.3 for n, s in shapes.items() if is_adapter(n)}
    return Adapter(whole, tensors, "")


def write(folder: Path) -> tuple[str, ...]:
    """``serve.adapters`` of both."""
    for name in LORAS:
        if not (folder / name).exists():
            write_peft(folder / name, adapter(name, tiny.config()))
    return tuple(f"{name}={folder / name}" for name in LORAS)


def merged(name: str | None, dtype: torch.dtype = torch.float64) -> Transformer:
    model = tiny.model(dtype=dtype)
    if name is not None:
        one = adapter(name, model.config)
        with torch.no_grad():
            for n, p in model.named_parameters():
                if (delta := merged_delta(n, one.tensors, one.model)) is not None:
                    p.add_(delta.to(dtype))
    return model


def expected(name: str | None, dtype: torch.dtype = torch.float64) -> list[tuple[int, ...]]:
    engine = Engine(merged(name, dtype), tiny.tokenizer(), ServeConfig())
    return [completion.token_ids for completion in engine.generate(PROMPTS, PARAMS)]


def mixed(engine: Engine) -> dict[str | None, list[tuple[int, ...]]]:
    """All prompts with each adapter and without, in one batch."""
    keys = {(name, i): engine.add(p, PARAMS, adapter=name) for i, p in enumerate(PROMPTS) for name in (None, *LORAS)}
    tokens: dict[str, list[int]] = {key: [] for key in keys.values()}
    while engine.busy:
        for output in engine.step():
            assert output.token is not None
            tokens[output.id].append(output.token)
        engine.scheduler.audit()
    return {name: [tuple(tokens[keys[name, i]]) for i in range(len(PROMPTS))] for name in (None, *LORAS)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("settings", [{}, {"token_budget": 7, "max_requests": 4}, {"async_scheduling": True}], ids=str)
def test_mixed_in_one_step_equals_merged(settings: dict[str, int], tmp_path: Path) -> None:
    """In small chunks too, and again from the prefix cache, which keeps each adapter's pages apart."""
    engine = Engine(tiny.model(), tiny.tokenizer(), ServeConfig(adapters=write(tmp_path), page_tokens=8, **settings))
    reference = {name: expected(name) for name in (None, *LORAS)}
    assert len({tuple(tokens) for tokens in reference.values()}) == 3
    assert mixed(engine) == reference
    hits = engine.stats.prefix_hits
    assert mixed(engine) == reference
    assert engine.stats.prefix_hits > hits


def test_preempted_requests_keep_their_adapter(tmp_path: Path) -> None:
    config = ServeConfig(adapters=write(tmp_path), page_tokens=8, pages=9, prefix_cache=False)
    engine = Engine(tiny.model(), tiny.tokenizer(), config)
    assert mixed(engine) == {name: expected(name) for name in (None, *LORAS)}
    assert engine.stats.preemptions > 0


def test_native_steps_without_an_adapter_stay_fused(tmp_path: Path) -> None:
    """float32 on a CPU: recorded steps run for the base model, before and after steps with adapters."""
    engine = Engine(tiny.model(dtype=torch.float32), tiny.tokenizer(), ServeConfig(adapters=write(tmp_path)))
    base = [completion.token_ids for completion in engine.generate(PROMPTS, PARAMS)]
    assert base == expected(None, torch.float32)
    tuned = [completion.token_ids for completion in engine.generate(PROMPTS, PARAMS, adapter="all")]
    assert tuned == expected("all", torch.float32)
    assert [completion.token_ids for completion in engine.generate(PROMPTS, PARAMS)] == base
    assert [output.token for output in engine.stream(PROMPTS[0], PARAMS, adapter="some")] == list(
        expected("some", torch.float32)[0]
    )


def _on_two_ranks(adapters: tuple[str, ...], plan: Plan) -> object:
    with DistributedContext.build(plan) as context:
        model = tiny.model(context.axes.serving())
        engine = Engine(model, tiny.tokenizer(), ServeConfig(adapters=adapters, page_tokens=8))
        if context.rank:
            engine.follow()
            return None
        try:
            return mixed(engine)
        finally:
            engine.stop()


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [Plan(tp=2), Plan(cp=2)], ids=str)
def test_ranks_share_adapters(plan: Plan, tmp_path: Path) -> None:
    found, _ = in_world(2, _on_two_ranks, write(tmp_path), plan)
    assert found == {name: expected(name) for name in (None, *LORAS)}


def test_work_and_hashes_carry_the_adapter() -> None:
    work = Work((Slice(0, (5, 6), (1,), None, adapter=2), Slice(3, (7,), (2,), None)))
    assert unpack_work(*pack_work(work)).slices == work.slices
    found: list[list[bytes]] = [[], [], []]
    for number, hashes in enumerate(found):
        extend_page_hashes(hashes, [1, 2, 3, 4], 2, bytes([number]) if number else b"")
    assert not set(found[0]) & set(found[1]) | set(found[1]) & set(found[2])


def test_refusals(tmp_path: Path) -> None:
    adapters = write(tmp_path)
    with pytest.raises(ConfigError, match="write NAME=PATH"):
        ServeConfig(adapters=("x",))
    with pytest.raises(ConfigError, match="two adapters called 'a'"):
        ServeConfig(adapters=("a=x", "a=y"))
    with pytest.raises(ConfigError, match="mutually exclusive"):
        ServeConfig(adapters=adapters, batch_invariant=True)
    with pytest.raises(ConfigError, match="apply to one model"):
        ServedModels({"a": None, "b": None}, ["c"])  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match="both called 'a'"):
        ServedModels({"a": None}, ["a"])  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="has no adapters"):
        check_adapters(ServeConfig(adapters=("a=nowhere",)), tiny.config())
    with pytest.raises(CheckpointError, match="of shape"):
        check_adapters(ServeConfig(adapters=adapters), tiny.config(width=36))
    engine = Engine(tiny.model(), tiny.tokenizer(), ServeConfig(adapters=adapters))
    with pytest.raises(ConfigError, match="there is no adapter 'b' here, only all, some"):
        engine.add("x", PARAMS, adapter="b")


def test_http_chooses_an_adapter_by_the_model_name(tmp_path: Path) -> None:
    with server(adapters=list(write(tmp_path)), model_name="tiny") as running:
        listed = httpx.get(f"{running.url}/v1/models", timeout=120).json()["data"]
        assert [model["id"] for model in listed] == ["tiny", "all", "some"]
        texts = {}
        for name in ("tiny", *LORAS):
            body = {"model": name, "prompt": PROMPTS[0], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            reply = httpx.post(
                f"{running.url}/v1/completions", json=body | {"return_token_ids": True}, timeout=120
            ).json()
            assert reply["model"] == name
            texts[name] = tuple(reply["choices"][0]["token_ids"])
        assert texts == {name: expected(None if name == "tiny" else name, torch.float32)[0] for name in texts}
        reply = httpx.post(f"{running.url}/v1/completions", json={"model": "x", "prompt": "a"}, timeout=120)
        assert reply.status_code == 404
        assert "'tiny', 'all' or 'some'" in reply.json()["error"]["message"]

"""Memory of an engine: accurate estimates, refusal with a table before allocation, and sufficient remedies."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from colonnade import api, chat
from colonnade.config import ExpertsConfig, MoeConfig, Plan, ServeConfig
from colonnade.config.presets import preset
from colonnade.errors import CapacityError
from colonnade.model import KVCache, Transformer
from colonnade.model.moe import expert_modules
from colonnade.model.weight_only_quant import weight_bytes
from colonnade.parallel.axis import SOLO_AXES, Axes, Axis
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from colonnade.serve.memory_advice import check_memory, combined_remedy, remedies
from colonnade.serve.memory_estimate import EngineSpec
from tests.serve import tiny

CPU = torch.device("cpu")


def engine_spec(model: Transformer, serve: ServeConfig, **more: object) -> EngineSpec:
    return EngineSpec(model.config, serve, next(model.parameters()).dtype, CPU, **more)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("changes", [{}, {"tied": True}, {"moe": MoeConfig(experts=4, active=2, ffn_width=6)}], ids=str)
def test_weights_and_cache_match_an_engine(tp: int, changes: dict) -> None:
    model = tiny.model(**changes)
    serve = ServeConfig(cache_bytes=100_000, page_tokens=4)
    whole = engine_spec(model, serve).needs()
    engine = Engine(model, tiny.tokenizer(), serve)
    assert (whole.weights, whole.cache) == (weight_bytes(model), engine.cache.bytes)
    share = engine_spec(model, serve, tp=2).needs()
    first = Transformer(model.config, Axes(tp=Axis("tp", 2)), dtype=torch.float64, device="meta")
    assert share.weights == sum(p.nbytes for p in (*first.parameters(), *first.buffers()))


@pytest.mark.parametrize("cp", [1, 3])
def test_a_draft_model_is_counted(cp: int) -> None:
    """Its weights and, in each page, its keys and values; over context ranks rank 0 has those of all pages."""
    model, draft = tiny.model(), tiny.model(layers=1, kv_heads=1, heads=3)
    serve = ServeConfig(pages=30, page_tokens=4, draft="small")
    with_draft = engine_spec(model, serve, draft=draft.config, cp=cp)
    needs, plain = with_draft.needs(), engine_spec(model, serve.replace(draft=None), draft=draft.config, cp=cp).needs()
    assert needs.draft == weight_bytes(draft) and plain.draft == 0
    page, draft_page = (KVCache.bytes_per_page(each.config, SOLO_AXES, 4, torch.float64) for each in (model, draft))
    assert with_draft.page_bytes == page + cp * draft_page
    assert needs.cache - plain.cache == plain.cache // page * cp * draft_page
    assert needs.total == plain.total + needs.draft + needs.cache - plain.cache
    assert "draft model" in str(needs.use(1 << 20)) and "draft" not in str(plain.use(1 << 20))
    short = needs.total - plain.total - 1
    with pytest.raises(CapacityError, match=r"(?s)draft model.*--serve.draft None .*enough"):
        check_memory(replace(with_draft, serve=serve.replace(memory_bytes=plain.total + short)))


def test_the_cache_of_a_draft_model_is_part_of_cache_bytes() -> None:
    model, draft = tiny.model(), tiny.model(layers=1)
    serve = ServeConfig(cache_bytes=100_000, page_tokens=4, draft="small")
    engine = Engine(model, tiny.tokenizer(), serve, draft)
    assert engine.core.draft_model is not None
    caches = engine.cache, engine.core.draft_model.run.cache  # type: ignore[attr-defined]
    page_bytes = sum(each.bytes for each in caches) // engine.cache.pages
    assert caches[0].pages == caches[1].pages == 100_000 // page_bytes
    assert engine_spec(model, serve, draft=draft.config).needs().cache == sum(each.bytes for each in caches)


@pytest.mark.parametrize("weights", ["int8", "int4", "float8"])
@pytest.mark.parametrize(
    "moe", [None, MoeConfig(experts=4, active=2, ffn_width=6, first_k_dense_replace=1, shared_width=5)], ids=bool
)
def test_quantised_weights_are_estimated_to_the_byte(weights: str, moe: MoeConfig | None, tmp_path: Path) -> None:
    whole = api.Model(tiny.model(dtype=torch.float32, layers=4, moe=moe), None, DistributedContext.solo(CPU), "tiny")
    api.save(whole, tmp_path / "m")
    on = {"dtype": "float32", "device": "cpu", "weights": weights, "weight_group": 32}
    model = api.load(tmp_path / "m", **on).transformer
    serve = ServeConfig(weights=weights, weight_group=32)
    assert engine_spec(model, serve).needs().weights == weight_bytes(model)
    if moe is not None:  # of three layers' experts two are on the device
        layers = expert_modules(model)
        on_device = engine_spec(model, serve, layers_on_device=2).needs().weights
        assert on_device == weight_bytes(model) - layers[0].size_bytes
        waiting = expert_modules(api.load(tmp_path / "m", **on, experts=ExpertsConfig(layers_on_device=2)).transformer)
        assert waiting[0].fetch is not None
        assert on_device == weight_bytes(model) - 3 * layers[0].size_bytes + 2 * sum(
            stack.nbytes for stack in waiting[0].fetch(None, 0).tensors
        )


@pytest.mark.parametrize(
    ("changes", "serve"),
    [
        ({"width": 128, "heads": 4, "kv_heads": 4, "head_width": 32, "ffn_width": 700, "context": 512},
         ServeConfig(token_budget=256, max_requests=4)),
        ({"width": 64, "heads": 8, "kv_heads": 8, "head_width": 32, "ffn_width": 100, "context": 600},
         ServeConfig(token_budget=512, max_requests=4)),
        ({"vocab_size": 20_000}, ServeConfig(token_budget=16, max_requests=16)),
    ],
    ids=["hidden", "heads", "logits"],
)  # fmt: skip
def test_activation_estimate_bounds_a_forward_pass(changes: dict, serve: ServeConfig) -> None:
    """At least the bytes that torch reports as allocated, and less than twice as much."""
    model = tiny.model(dtype=torch.float32, **changes)
    engine = Engine(model, tiny.tokenizer(), serve)
    assert serve.token_budget is not None
    prompts = [[1], [2], [3], [i % 300 for i in range(serve.token_budget - 3)], *[[4]] * (serve.max_requests - 4)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        engine.generate(prompts, SamplingParams(temperature=1, max_tokens=6, ignore_eos=True))
    allocated = peak = 0
    for event in sorted(watched.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            allocated += event.nbytes()
            peak = max(peak, allocated)
    assert peak < engine_spec(model, serve).needs().activations < 2 * peak


def test_refusal_has_a_table_and_each_remedy_suffices() -> None:
    model = tiny.model(dtype=torch.float32)
    serve = ServeConfig(memory_bytes=300_000, max_requests=8, cache_bytes=1 << 20, token_budget=64)
    needs = engine_spec(model, serve).needs()
    with pytest.raises(CapacityError) as caught:
        Engine(model, tiny.tokenizer(), serve)
    message = str(caught.value)
    for what, number in (("weights", needs.weights), ("key/value cache", needs.cache), ("total", needs.total)):
        share = re.search(rf"{what} +[\d.]+ \w+ +([\d.]+)%", message)
        assert share is not None and float(share[1]) == pytest.approx(100 * number / 300_000, abs=0.06)
    assert re.search(r"free +293 KiB", message)
    offered = remedies(engine_spec(model, serve), needs, 300_000)
    enough = [flags for flags, saves, _ in offered if "enough" in message and needs.total - saves <= 300_000]
    assert any("cache_bytes" in flags for flags in enough)
    for flags in enough:
        assert f"{flags} " in message
        name, value = flags.removeprefix("--").split()
        if name.startswith("serve.") and name != "serve.weights":
            changed = serve.replace(**{name.removeprefix("serve."): int(value) if value.isdecimal() else value})
            assert Engine(model, tiny.tokenizer(), changed).generate([[1, 2]], SamplingParams(max_tokens=2))


@pytest.mark.parametrize("free", [200_000, 150_000, 80_000])
@pytest.mark.parametrize("sized", [{"cache_bytes": 1 << 20}, {"pages": 200}], ids=str)
def test_remedies_are_combined_where_none_suffices_alone(free: int, sized: dict[str, int]) -> None:
    """No more than are needed; a server started with these flags fits."""
    model = tiny.model(dtype=torch.float32, context=512)
    serve = ServeConfig(memory_bytes=free, max_requests=8, token_budget=128, **sized)
    needs = engine_spec(model, serve).needs()
    single = remedies(engine_spec(model, serve), needs, free, number=99)
    assert all(needs.total - saves > free for _, saves, _ in single)
    (size,) = sized
    assert any(flags.startswith(f"--serve.{size} ") for flags, _, _ in single), "a smaller cache helps as well"

    def total(flags: list[str]) -> int:
        changes, rest = {}, {}
        for name, value in (flag.removeprefix("--").split() for flag in flags):
            if name.startswith("serve."):
                changes[name.removeprefix("serve.")] = int(value) if value.isdecimal() else value
            else:
                rest |= {"dtype": {"dtype": torch.bfloat16}, "plan.tp": {"tp": 2}}[name]
        return replace(engine_spec(model, serve.replace(**changes)), **rest).needs().total

    several = combined_remedy(engine_spec(model, serve), needs, free)
    assert several is not None
    flags, saves, tokens = several
    assert total(flags) == needs.total - saves <= free < total(flags[:-1])
    with pytest.raises(CapacityError) as caught:
        Engine(model, tiny.tokenizer(), serve)
    row = str(caught.value).splitlines()[-1]
    assert row.startswith(f"  {' '.join(flags)} ") and row.endswith(f"(a cache of {tokens} tokens, enough)")


def test_far_too_little_memory_is_reported_as_a_factor() -> None:
    model = tiny.model(dtype=torch.float32)
    with pytest.raises(CapacityError, match=r"total +[\d.]+ \w+ +[\d,]{3,}×\n") as caught:
        Engine(model, tiny.tokenizer(), ServeConfig(memory_bytes=1000))
    assert "%" not in str(caught.value).split("options, and what")[0].replace(" 0.0%", "")
    assert re.search(r"together:\n  --.*\(a cache of 16 tokens, \S+ \w+ still too much\)$", str(caught.value)), (
        "every remedy together is still too little"
    )


def test_offered_remedies_depend_on_the_model() -> None:
    llama = EngineSpec(preset("llama-2-7b"), ServeConfig(graph_capture=True), torch.bfloat16, torch.device("cuda"))
    offered = {flags: saves for flags, saves, _ in remedies(llama, llama.needs(), 12 << 30, number=9)}
    blocks = 32 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    head = 32000 * 4096
    written_out = 2 * head
    assert offered["--serve.weights int8"] == pytest.approx(blocks + head - written_out, rel=0.01)
    assert offered["--serve.weights int4"] == pytest.approx(blocks * (2 - 4.5 / 8) + head - written_out, rel=0.01)
    assert offered["--plan.tp 2"] == pytest.approx(llama.needs().total / 2, rel=0.03)
    assert llama.needs().graphs > 32000 * 2 * 64
    mixtral = EngineSpec(preset("mixtral-8x7b"), ServeConfig(), torch.bfloat16, torch.device("cuda"))
    offered = {flags: saves for flags, saves, _ in remedies(mixtral, mixtral.needs(), 80 << 30, number=9)}
    assert offered["--experts.layers_on_device 2"] == pytest.approx(30 * 8 * 3 * 4096 * 14336 * 2, rel=0.01)
    experts = 32 * 8 * 3 * 4096 * 14336
    assert offered["--serve.weights int8"] == pytest.approx(experts, rel=0.05)
    assert offered["--serve.weights int4"] == pytest.approx(experts * (2 - 4.5 / 8), rel=0.05)
    assert not any("tp" in flags for flags in offered)
    eight = replace(mixtral, tp=8, ep=4, etp=2).needs()
    assert eight.weights == pytest.approx(mixtral.needs().weights / 8, rel=0.02)
    odd = tiny.config(kv_heads=3, heads=3, moe=None)
    assert not any(
        "tp" in f for f, _, _ in remedies(EngineSpec(odd, ServeConfig(), torch.float32, CPU), llama.needs(), 1, 9)
    )


def test_server_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    whole = api.Model(tiny.model(dtype=torch.float32), tiny.tokenizer(), DistributedContext.solo(CPU), "tiny")
    api.save(whole, tmp_path / "m")
    where = chat.ModelSpec(str(tmp_path / "m"), Plan(), ServeConfig(memory_bytes=100_000), "cpu", "float32")
    load = where.open_loader()
    for file in (tmp_path / "m").glob("weights-*"):
        file.write_bytes(bytes(file.stat().st_size))  # the contents are never read
    with pytest.raises(CapacityError, match=r"does not fit into the memory of a rank on cpu(.|\n)*free +97.66 KiB"):
        load(DistributedContext.solo(CPU))
    small = replace(where, serve=ServeConfig(cache_bytes=100))
    load = small.open_loader()
    with pytest.raises(
        CapacityError, match=r"cache_bytes 100 is less than one page of 16 tokens, .* 3072 bytes; use 24576"
    ):
        load(DistributedContext.solo(CPU))


def test_failed_allocation_reports_the_same_table() -> None:
    """When the system itself refuses the allocation."""
    serve = ServeConfig(memory_bytes=1 << 60, pages=1 << 38)
    with pytest.raises(CapacityError, match=r"key/value cache +[\d.e+]+ GiB(.|\n)*free(.|\n)*--serve.pages \d+"):
        Engine(tiny.model(), tiny.tokenizer(), serve)


def test_ranks_of_one_host_share_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = ServeConfig(cache_bytes=1 << 20)
    needed = engine_spec(tiny.model(), serve).needs().total
    monkeypatch.setattr("colonnade.parallel.device_memory.free_host_bytes", lambda: 2 * needed)
    check_memory(engine_spec(tiny.model(), serve))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(CapacityError, match="does not fit into the memory of a rank on cpu"):
        check_memory(engine_spec(tiny.model(), serve))


def test_sharded_cache_has_a_share_and_a_scratch_page_per_rank():
    sized = ServeConfig(graph_capture=False)
    for serve in (sized.replace(pages=1000), sized.replace(max_requests=1, cache_bytes=1 << 40, page_tokens=32)):
        one, four = (EngineSpec(preset("llama-2-7b"), serve, torch.bfloat16, CPU, cp=cp).needs().cache for cp in (1, 4))
        page_bytes = KVCache.bytes_per_page(preset("llama-2-7b"), SOLO_AXES, serve.page_tokens or 16, torch.bfloat16)
        assert four == one // 4 + page_bytes

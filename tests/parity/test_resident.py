"""Experts in host memory: bitwise the same values, with the requested number of device buffers."""

from pathlib import Path
from typing import Any

import pytest
import torch

import colonnade
from colonnade import api
from colonnade.checkpoint import load_model
from colonnade.config import ExpertsConfig, ModelConfig, MoeConfig, Plan, ServeConfig, format_bytes
from colonnade.errors import CapacityError, ConfigError
from colonnade.model import Transformer
from colonnade.model.moe import MixtureOfExperts, OffloadedExperts, expert_modules
from colonnade.model.moe.expert_offload import device_bytes
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine
from colonnade.serve.sampling_params import SamplingParams
from tests.serve import tiny
from tests.worlds import assert_same, run

CPU = torch.device("cpu")
MOE = MoeConfig(experts=4, active=2, ffn_width=10, first_k_dense_replace=1, shared_width=5)
SIZES: dict[str, Any] = {"layers": 5, "moe": MOE, "family": "deepseek_v2"}
"""Four of five layers have experts."""
PLAIN: dict[str, Any] = {
    "layers": 4,
    "family": "mixtral",
    "moe": MOE.replace(first_k_dense_replace=0, shared_width=0, ffn_width=35),
}
"""A model that Mixtral files can express."""


def offload(model: Transformer, buffers: int) -> OffloadedExperts:
    return OffloadedExperts(expert_modules(model), buffers, CPU)


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_serving_offloaded_experts_gives_the_same_output(buffers: int) -> None:
    """Requests arrive and finish, prompt chunks together with single tokens; then one pass again, bitwise."""
    plain, model = tiny.model(**SIZES), tiny.model(**SIZES)
    offloaded = offload(model, buffers)
    assert offloaded.size_bytes == buffers * expert_modules(model)[0].size_bytes
    texts: list[list[list[int]]] = []
    for it in (plain, model):
        engine = Engine(it, tiny.tokenizer(), ServeConfig(pages=40, page_tokens=4, max_requests=3, token_budget=7))
        prompts = [list(range(5, 5 + n)) for n in (9, 1, 4, 17, 2)]
        lengths = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True) for n in (3, 9, 1, 5, 7)]
        texts.append([list(done.token_ids) for done in engine.generate(prompts, lengths)])
    assert texts[0] == texts[1]
    for n in (1, 20, 3):
        assert torch.equal(tiny.logits(model, list(range(n))), tiny.logits(plain, list(range(n))))


def test_experts_are_copied_once_per_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer's experts are copied once per pass, in order, and the next pass's are prefetched."""
    model, copied = tiny.model(**SIZES), []
    copy = OffloadedExperts._copy

    def record_copy(self: OffloadedExperts, place: int, *rest: int) -> None:
        copied.append(place)
        copy(self, place, *rest)

    monkeypatch.setattr(OffloadedExperts, "_copy", record_copy)
    offload(model, 2)
    expected = tiny.logits(tiny.model(**SIZES), [1, 2, 3])
    for _ in range(3):
        assert torch.equal(tiny.logits(model, [1, 2, 3]), expected)
    assert copied == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0]
    with torch.no_grad():
        for layer in expert_modules(model):
            layer.up.zero_()
    assert not torch.equal(tiny.logits(model, [1, 2, 3]), expected), "the last experts were copied from host memory"


@pytest.mark.parametrize("buffers", [1, 2, 3])
def test_few_tokens_copy_only_the_chosen_experts(buffers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fully resident layers need no copies; large and small passes may follow one another."""
    many = {**SIZES, "moe": MOE.replace(experts=8)}
    plain, model, copied = tiny.model(**many), tiny.model(**many), []
    copy = OffloadedExperts._copy

    def record_copy(self: OffloadedExperts, place: int, buffer: int, expert: int | None = None) -> None:
        copied.append((place, expert))
        copy(self, place, buffer, expert)

    monkeypatch.setattr(OffloadedExperts, "_copy", record_copy)
    offload(model, buffers)
    chosen = []
    for layer in plain.modules():
        if isinstance(layer, MixtureOfExperts):
            layer.router.register_forward_hook(lambda *call: chosen.append(call[2][0].ids_TA.unique().tolist()))
    for n in (1, 2, 1, 30, 1, 2, 30, 30, 1):
        copied.clear()
        chosen.clear()
        ids = [(7 * n + i) % 300 for i in range(n)]
        assert torch.equal(tiny.logits(model, ids), tiny.logits(plain, ids))
        if n < 3:
            wanted = [(place, e) for place, experts in enumerate(chosen) for e in experts]
            there = {place for place in range(4) if not any(place == p for p, _ in copied)}
            assert copied == [(place, e) for place, e in wanted if place not in there]
            assert len(there) <= buffers
        else:
            assert all(e is None for _, e in copied)


def test_next_pass_works_after_a_failed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = tiny.model(**SIZES), tiny.model(**SIZES)
    offload(model, 2)

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    hook = model.blocks.get_submodule("3").register_forward_pre_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        tiny.logits(model, [4, 5])
    hook.remove()
    assert torch.equal(tiny.logits(model, [4, 5]), tiny.logits(plain, [4, 5]))


# -- loading -------------------------------------------------------------------------------------------------------


def saved(place: Path, format: api.Format) -> Transformer:
    model = tiny.model(**(SIZES if format == "colonnade" else PLAIN))
    colonnade.save(api.Model(model, tiny.tokenizer(), DistributedContext.solo(CPU), "it"), place, format=format)
    return model


@pytest.mark.parametrize("format", ["colonnade", "hf"])
@pytest.mark.parametrize("number", [1, 3, 4])
def test_load_offloads_experts(format: api.Format, number: int, tmp_path: Path) -> None:
    """With as many buffers as layers, all experts stay on the model's device."""
    model = saved(tmp_path / "it", format)
    with colonnade.load(
        tmp_path / "it", dtype="float64", device="cpu", experts=ExpertsConfig(layers_on_device=number)
    ) as it:
        assert torch.equal(it.logits([3, 1, 2]), tiny.logits(model, [3, 1, 2]))
        assert all((layer.fetch is not None) == (number < 4) for layer in expert_modules(it.transformer))
        text = it.generate([7, 8, 9], max_tokens=6, temperature=0, ignore_eos=True)
        assert text == tiny.greedy_tokens(model, [7, 8, 9], 6)
        assert it.score(list(range(30))) == api.Model(model, None, DistributedContext.solo(CPU), "it").score(
            list(range(30))
        )


def _on_ranks(place: Path, plan: Plan) -> torch.Tensor:
    with DistributedContext.build(plan) as context:
        it = colonnade.load(
            place, dtype="float64", context=context, experts=ExpertsConfig(layers_on_device=2, active=3)
        )
        return torch.stack([it.logits([3, 1, 2, 9]) for _ in range(3)])


def test_offloaded_experts_on_several_ranks(tmp_path: Path) -> None:
    """Each rank offloads its own share of the experts."""
    saved(tmp_path / "it", "colonnade")
    with colonnade.load(tmp_path / "it", dtype="float64", device="cpu", experts=ExpertsConfig(active=3)) as it:
        expected = it.logits([3, 1, 2, 9])
    for got in run(2, _on_ranks, tmp_path / "it", Plan(tp=2)):
        assert_same(got, expected.expand_as(got))


# -- memory ----------------------------------------------------------------------------------------------------------


def test_device_memory_is_predicted() -> None:
    model = tiny.model(**SIZES)
    whole, layer = sum(p.nbytes for p in model.parameters()), 4 * 3 * 10 * 24 * 8
    assert [device_bytes(model, n) for n in (None, 4, 3, 1)] == [whole, whole, whole - layer, whole - 3 * layer]


@pytest.mark.parametrize("experts", [{}, {"layers_on_device": 2}, {"layers_on_device": 1}])
def test_out_of_memory_error_names_size_and_remedy(
    experts: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, place = saved(tmp_path / "it", "colonnade"), tmp_path / "it"

    class Full(Transformer):
        def __init__(self, config: ModelConfig, *args: Any, **options: Any):
            if options["device"] != "meta":
                raise torch.OutOfMemoryError("out of memory")
            super().__init__(config, *args, **options)

    monkeypatch.setattr(load_model, "Transformer", Full)
    with pytest.raises(CapacityError) as refusal:
        colonnade.load(place, dtype="float64", device="cpu", experts=ExpertsConfig(**experts))
    # On a CPU, offloaded experts share the memory with the buffers.
    offloaded = device_bytes(model) + device_bytes(model, experts.get("layers_on_device", 0)) - device_bytes(model, 0)
    assert f"{place} does not fit: it takes {format_bytes(offloaded)} of a rank's memory (cpu)" in str(refusal.value)
    assert f"any of these would be enough: --dtype bfloat16 ({format_bytes(offloaded // 4)})" in str(refusal.value)


def test_dense_model_cannot_offload_experts(tmp_path: Path) -> None:
    colonnade.save(api.Model(tiny.model(), None, DistributedContext.solo(CPU), "it"), tmp_path / "it")
    with pytest.raises(
        ConfigError, match=r"--experts\.layers_on_device would change a mixture of experts, and this model"
    ):
        colonnade.load(tmp_path / "it", experts=ExpertsConfig(layers_on_device=2))

"""Quantised experts: matrices like a dense layer's; loading, generating and offloading."""

import itertools
import math
from pathlib import Path

import pytest
import torch

from colonnade import api
from colonnade.checkpoint.hf.write import write_hf
from colonnade.config import ExpertsConfig, ServeConfig
from colonnade.errors import CheckpointError
from colonnade.kernels import permute
from colonnade.kernels.experts import reference
from colonnade.kernels.experts.quantised import QuantisedWeights
from colonnade.kernels.experts.reference import Weights
from colonnade.kernels.linear import reference as quantised
from colonnade.kernels.linear.quantise import dequantise, quantise
from colonnade.kernels.registry import KERNELS
from colonnade.model import Transformer
from colonnade.model.moe import expert_modules
from colonnade.model.moe.experts import Experts
from colonnade.model.tensor_parallel_linear import QuantisableMatrix
from colonnade.model.weight_only_quant import quantised_kind, weight_bytes, weight_bytes_as
from colonnade.parallel.axis import SOLO_AXES
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from tests.experts import LOADS, Case, dequantise_experts, quantise_experts
from tests.models import MOES, build
from tests.serve import tiny
from tests.serve.ranks import COUNT, EXPERTS, GPT2, PROMPTS
from tests.worlds import assert_same

CPU = torch.device("cpu")
KINDS = [("int8", 64), ("int4", 32), ("float8", 64)]
SHAPES = [(37, 2, 5, 24, 20), (1, 2, 4, 70, 9), (0, 2, 3, 8, 8), (9, 3, 8, 16, 33)]


@pytest.mark.sample(4)
@pytest.mark.parametrize("row", [r for r in KERNELS if r.operation == "quantised_experts"], ids=lambda row: row.name)
@pytest.mark.parametrize(("kind", "group"), KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_match_the_reference_with_dequantised_weights(
    row, kind: str, group: int, shape: tuple, monkeypatch
) -> None:
    if "cpu" not in row.devices:
        pytest.skip("a GPU's: tests/interpreted_quantised.py and tests/gpu/test_quantised_gpu.py")
    monkeypatch.setattr(quantised, "BAND_ELEMENTS", 100)
    activations = itertools.cycle(reference.ACTIVATIONS)
    for load, gated, biased in itertools.product(LOADS, (True, False), (True, False)):
        case = Case(*shape, load=load, gated=gated, biased=biased, activation=next(activations))
        x, routing, *stacks = case.leaves(torch.float64, "cpu")
        with torch.no_grad():
            kept = quantise_experts(Weights(*stacks), kind, group)
            order_R, ends_E = permute.sort(case.ids(), case.E, case.rows())
            got = row.run(x, order_R, ends_E, routing, kept, case.activation)
            plain = dequantise_experts(kept, torch.float64)
            assert_same(got, reference.routed(x, order_R, ends_E, routing, plain, case.activation), 1e-12)


def layer_of(experts: int, hidden: int, width: int) -> Experts:
    config = tiny.config(width=width, moe=EXPERTS.replace(experts=experts, ffn_width=hidden))
    return Experts(config, config.moe, SOLO_AXES, device=CPU, dtype=torch.float32)


@pytest.mark.parametrize(("kind", "group"), KINDS)
def test_matrices_equal_a_dense_layer_and_error_is_bounded(kind: str, group: int) -> None:
    """The bits equal a dense layer's, so weight errors have the same bound; products then do too."""
    layer, draw = layer_of(3, 40, 50), torch.Generator().manual_seed(0)
    x = torch.randn(7, 50, generator=draw)
    for part in ("up", "gate", "down"):
        stack = torch.randn(3, 40, 50, generator=draw) + 0.3
        layer.quantise(part, stack, kind, group, SOLO_AXES.experts.etp, CPU)
        for e, w in enumerate(stack.mT if part == "down" else stack):
            dense, mine = quantise(w, kind, group), layer.quantised[part].matrix(e)
            assert torch.equal(mine.values.view(torch.uint8), dense.values.contiguous().view(torch.uint8))
            assert torch.equal(mine.scales, dense.scales) and mine[3:] == dense[3:]
            highest = w.abs().amax(1, keepdim=True)
            moved = {"int8": highest / 127 / 2, "float8": (w.abs() / 16).maximum(highest * 2.0**-17)}
            if kind == "int4":
                span = torch.nn.functional.pad(w, (0, -w.shape[1] % group)).unflatten(1, (-1, group))
                span = span.amax(2).clamp(min=0) - span.amin(2).clamp(max=0)
                moved["int4"] = (span / 15 * 0.6).repeat_interleave(group, 1)[:, : w.shape[1]]
            rows = x[:, : w.shape[1]]
            apart = (quantised.quantised_linear(rows, mine) - rows @ w.T).abs()
            bound = rows.abs() @ moved[kind].expand_as(w).T
            assert (apart <= 1.001 * bound + 1e-5).all() and (apart > bound / 100).any()
    assert not hasattr(layer, "up") and isinstance(layer.stored, QuantisedWeights)


@pytest.mark.parametrize("part", ["up", "down"])
def test_non_finite_weights_are_refused(part: str) -> None:
    layer, stack = layer_of(2, 4, 6), torch.ones(2, 4, 6)
    stack[1, 2, 3] = math.nan
    with pytest.raises(CheckpointError, match="is not finite and cannot be quantised to int8"):
        layer.quantise(part, stack, "int8", 64, SOLO_AXES.experts.etp, CPU)
    assert not layer.quantised


def dequantised(model: Transformer, like: Transformer) -> Transformer:
    """``like`` with the dequantised weights of the quantised ``model``."""
    with torch.no_grad():
        for name, module in like.named_modules():
            theirs = model.get_submodule(name)
            if isinstance(theirs, QuantisableMatrix) and theirs.quantised is not None:
                module.weight.copy_(dequantise(theirs.quantised, torch.float64))
            elif isinstance(theirs, Experts):
                for destination, values in zip(
                    module.stored, dequantise_experts(theirs.stored, torch.float64), strict=True
                ):
                    if destination is not None:
                        destination.copy_(values)
        for name, p in model.named_parameters():  # not quantised
            like.get_parameter(name).copy_(p)
    return like


@pytest.mark.parametrize("weights", ["int8", "int4", "float8"])
@pytest.mark.parametrize(("name", "format"), [("gated", "hf"), ("biased_shared", "colonnade")])
def test_moe_model_is_quantised_while_loading(name: str, format: str, weights: str, tmp_path: Path) -> None:
    """Also with one dense layer. Routers and their weights stay unquantised."""
    config = MOES[name].replace(family="mixtral") if format == "hf" else MOES[name]
    whole = build(config, dtype=torch.float32)
    if format == "hf":
        write_hf(whole, tmp_path / "m", shard_bytes=10_000)
    else:
        api.save(api.Model(whole, None, DistributedContext.solo(CPU), "tiny"), tmp_path / "m")
    model = api.load(tmp_path / "m", dtype="float64", device="cpu", weights=weights, weight_group=32)
    assert quantised_kind(model.transformer) == weights
    made = {n for n, m in model.transformer.named_modules() if getattr(m, "quantised", None)}
    expected = ["blocks.1.ffn.experts"]
    expected += ["blocks.0.ffn.up", "blocks.1.ffn.shared.down"] if name == "biased_shared" else ["blocks.0.ffn.experts"]
    assert made.issuperset(expected)
    for n, p in model.transformer.named_parameters():
        assert torch.equal(p, whole.get_parameter(n).double()), n
        assert any(word in n for word in ("embed", "norm", "bias", "router", "shared_gate")), n
    plain = dequantised(model.transformer, build(config, dtype=torch.float64))
    exact = api.Model(plain, None, model.context, "tiny")
    tokens = torch.arange(20)
    assert_same(model.logits(tokens), exact.logits(tokens), 1e-10)
    assert weight_bytes(model.transformer) < weight_bytes(plain) / 2
    stored = Transformer(config, dtype=torch.float64, device="meta")
    assert weight_bytes(model.transformer) == weight_bytes_as(stored, weights, 32)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("changes", "weights"), [({}, "int8"), (GPT2, "int4")], ids=["gated", "biased"])
def test_engine_output_matches_the_reference_forward(changes: dict, weights: str, tmp_path: Path) -> None:
    """Prompts in chunks together with single tokens; bitwise the same with experts offloaded to host memory."""
    moe = EXPERTS.replace(experts=8, ffn_width=33)
    whole = tiny.model(dtype=torch.float32, **changes, layers=3, moe=moe)
    api.save(api.Model(whole, tiny.tokenizer(), DistributedContext.solo(CPU), "tiny"), tmp_path / "m")
    on = {"dtype": "float64", "device": "cpu", "weights": weights, "weight_group": 32}
    model = api.load(tmp_path / "m", **on)
    plain = dequantised(model.transformer, tiny.model(**changes, layers=3, moe=moe))
    params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    limits = ServeConfig(pages=16, page_tokens=3, token_budget=7, max_requests=3, weights=weights)
    outputs = Engine(model.transformer, tiny.tokenizer(), limits).generate(PROMPTS, [params] * len(PROMPTS))
    assert [list(c.token_ids) for c in outputs] == [tiny.greedy_tokens(plain, prompt, COUNT) for prompt in PROMPTS]
    waiting = api.load(tmp_path / "m", **on, experts=ExpertsConfig(layers_on_device=2))
    assert all(layer.fetch is not None for layer in expert_modules(waiting.transformer))
    again = Engine(waiting.transformer, tiny.tokenizer(), limits).generate(PROMPTS, [params] * len(PROMPTS))
    assert [c.token_ids for c in again] == [c.token_ids for c in outputs]
    for n in (1, 20):
        assert torch.equal(waiting.logits(list(range(n))), model.logits(list(range(n))))

"""Upcycling keeps a dense model's outputs; pruning experts that were never chosen keeps a MoE's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from colonnade import api
from colonnade.checkpoint.hf.write import write_hf
from colonnade.config import ModelConfig, MoeConfig, Plan, RouterConfig, ServeConfig
from colonnade.config.model import divisors
from colonnade.errors import ConfigError, DataError, PlanError
from colonnade.model import Packed, Rows, Stream, Transformer
from colonnade.model.moe import DispatchOptions, Routing
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from colonnade.tune import measure, prune, upcycle
from tests.gguf_files import speech
from tests.hf import load
from tests.models import CONFIGS, build, ragged
from tests.worlds import assert_same, run


@pytest.mark.parametrize("name", ["gpt2", "llama_grouped_biased", "qwen3_window_tied", "latent"])
@pytest.mark.parametrize(
    "fields", [{}, {"layer_freq": 2, "first_k_dense_replace": 1}, {"active": 3, "experts": 5}], ids=str
)
def test_upcycled_model_computes_the_same(name: str, fields: dict[str, int]) -> None:
    dense = build(CONFIGS[name])
    sparse = upcycle(dense, **({"experts": 4} | fields))
    stream, attend, _ = ragged(dense.config)
    with torch.no_grad():
        assert_same(sparse(stream, attend, Rows()), dense(stream, attend, Rows()), what="logits")
    moe = sparse.config.moe
    assert moe is not None
    assert sum(p.numel() for p in sparse.parameters()) == sparse.config.parameters > dense.config.parameters
    gates = [p for name, p in sparse.named_parameters() if "router.gates" in name]
    assert len(gates) == (1 if fields.get("layer_freq") == 2 else 2)
    assert all(gate.std() > 0 for gate in gates), "the router is initialised"


def test_upcycle_refuses_settings_that_change_the_outputs() -> None:
    dense = build(CONFIGS["llama"])
    for fields, message in (
        ({"active": 1}, "with one expert per token"),
        ({"router": RouterConfig(normalise=False)}, "must sum to 1"),
        ({"shared_width": 5}, "must sum to 1"),
        ({"capacity": 1.0}, "must sum to 1"),
        ({"active": 5}, "cannot go to 5 of 4 experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            upcycle(dense, 4, **fields)
    with pytest.raises(ConfigError, match="already has 4 experts"):
        upcycle(upcycle(dense, 4), 4)
    whole: Any = api.Model(dense, None, DistributedContext.solo("cpu"), "tour")
    for work in (
        lambda: upcycle(whole, 4),
        lambda: measure(whole, []),
        lambda: prune(whole, torch.zeros(2, 4), 2),
    ):
        with pytest.raises(ConfigError, match=r"expected a Transformer, not a Model; pass its \.transformer"):
            work()
    texts: Any = ["words"]
    with pytest.raises(DataError, match=r"a tensor of token ids, not a str; encode it"):
        measure(upcycle(dense, 4), texts)
    run(2, _upcycle_a_shard)


def _upcycle_a_shard() -> None:
    with DistributedContext.build(Plan(tp=2)) as context, pytest.raises(PlanError, match="whole model"):
        upcycle(build(CONFIGS["llama"], context.axes), 4)


# -- real weights ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> api.Model:
    return api.load("smollm2", dtype="float32", device="cpu")


def _logits(folder: Path, plan: Plan, tokens: Tensor) -> Tensor:
    with DistributedContext.build(plan, "cpu") as context:
        model = load(folder, context.axes, torch.float32)
        with torch.no_grad():
            return model(Stream(tokens, torch.arange(len(tokens))), Packed.of([len(tokens)]), Rows())


@pytest.mark.slow
def test_upcycled_smollm2_equals_smollm2(smollm2: api.Model, tmp_path: Path) -> None:
    """In float32, from a file, under layouts of 1, 2 and 3 processes; the engine generates the same text."""
    tokens = torch.tensor(smollm2.tokenizer.encode(speech())[:120])
    expected = smollm2.logits(tokens)
    prompt, words = "The capital of France is", {"max_tokens": 12, "temperature": 0}
    expected_tokens = smollm2.generate(prompt, **words)
    sparse = api.Model(upcycle(smollm2.transformer, 4), smollm2.tokenizer, smollm2.context, "upcycled")
    assert sparse.config.family == "mixtral"
    assert (sparse.logits(tokens) - expected).abs().max() < 1e-3
    assert sparse.generate(prompt, **words) == expected_tokens
    assert "Paris" in expected_tokens

    api.save(sparse, tmp_path / "hf", format="hf")
    for plan in (Plan(dp=2, ep=2), Plan(tp=3, etp=3)):
        for logits in run(plan.world, _logits, tmp_path / "hf", plan, tokens):
            assert (logits - expected).abs().max() < 1e-3, str(plan)
    with api.load(tmp_path / "hf", dtype="float32", device="cpu") as again:
        assert again.generate(prompt, **words) == expected_tokens


GRIDS = [
    Plan(),
    Plan(dp=2, ep=2),
    Plan(dp=2, etp=2),
    Plan(dp=4, ep=2),
    Plan(dp=4, etp=2),
    Plan(dp=4, ep=4),
    Plan(dp=4, ep=2, etp=2),
    Plan(dp=4, ep=2, etp=2, hierarchical_a2a_size=2),
    Plan(dp=4, etp=4),
]
"""Every (W, Sh) of one, two and four processes."""


def _max_difference(folder: Path, plan: Plan, tokens: Tensor, expected: Tensor) -> dict[int, float]:
    """The largest difference of the logits from the dense model's, by degree."""
    degrees = (0, *divisors(plan.etp))
    with DistributedContext.build(plan, "cpu") as context, torch.no_grad():
        model, T = load(folder, context.axes, torch.float32), len(tokens)
        found: dict[int, float] = {}
        for degree in degrees:
            routing = Routing(torch.arange(T), dispatch=(DispatchOptions(degree, overlap=2 if degree else 1),))
            logits = model(Stream(tokens, torch.arange(T), routing=routing), Packed.of([T]), Rows())
            found[degree] = (logits - expected).abs().max().item()
        return found


def _generate(folder: Path, plan: Plan, prompt: list[int]) -> tuple[int, ...] | None:
    """The tokens that an engine over several ranks generates; None on follower ranks."""
    with DistributedContext.build(plan, "cpu") as context:
        api_model = api.load(folder, dtype="float32", device="cpu")  # for its tokenizer
        engine = Engine(load(folder, context.axes.serving(), torch.float32), api_model.tokenizer, ServeConfig(pages=16))
        if context.rank:
            return engine.follow()
        engine.heartbeat()
        (done,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
        engine.stop()
        return done.token_ids


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_upcycled_smollm2_on_every_grid_and_degree(smollm2: api.Model, tmp_path: Path) -> None:
    tokens = torch.tensor(smollm2.tokenizer.encode(speech())[:60])
    sparse = api.Model(upcycle(smollm2.transformer, 4), smollm2.tokenizer, smollm2.context, "upcycled")
    api.save(sparse, tmp_path / "hf", format="hf")
    expected = smollm2.logits(tokens)
    for plan in GRIDS:
        for differences in run(plan.world, _max_difference, tmp_path / "hf", plan, tokens, expected):
            assert differences.keys() == {0, *divisors(plan.etp)} and max(differences.values()) < 1e-3, (
                f"{plan}: {differences}"
            )
    prompt = smollm2.tokenizer.encode("The capital of France is")
    dense = Engine(smollm2.transformer, smollm2.tokenizer, ServeConfig(pages=16))
    (expected_tokens,) = dense.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    for plan in (Plan(cp=2, ep=2), Plan(cp=2, etp=2), Plan(cp=4, ep=2, etp=2), Plan(tp=3, etp=3)):
        assert run(plan.world, _generate, tmp_path / "hf", plan, prompt)[0] == expected_tokens.token_ids, str(plan)


# -- fewer experts ---------------------------------------------------------------------------------------------------

_SIZES = {"vocab_size": 101, "layers": 3, "width": 16, "heads": 4, "ffn_width": 20}
ROUTERS = {"softmax": RouterConfig(), "scaled": RouterConfig(scale=1.7, bias=True)}


def _routed(router: RouterConfig, unused: set[int]) -> Transformer:
    """A model whose tokens never go to the ``unused`` experts, because of a large negative bias."""
    moe = MoeConfig(experts=6, active=2, ffn_width=8, first_k_dense_replace=1, router=router)
    model = build(ModelConfig(**_SIZES, moe=moe))
    with torch.no_grad():
        for layer in (1, 2):
            model.get_parameter(f"blocks.{layer}.ffn.router.gates.0.weight").mul_(20)
            if router.bias:
                model.get_parameter(f"blocks.{layer}.ffn.router.gates.0.bias")[list(unused)] = -1e4
    return model


def test_pruning_unused_experts_keeps_the_outputs(tmp_path: Path) -> None:
    model = _routed(ROUTERS["scaled"], {1, 4})
    texts = [torch.arange(n) * 7 % 101 for n in (9, 1, 30)]
    load_LE = measure(model, texts)
    assert load_LE.shape == (3, 6)
    assert load_LE[0].sum() == 0, "the first layer is dense"
    assert load_LE[1:].sum(1).tolist() == [80, 80], "forty tokens, two choices each"
    assert load_LE[1:, [1, 4]].sum() == 0
    small = prune(model, load_LE, 4)
    assert small.config.moe is not None
    assert small.config.moe.experts == 4
    for text in texts:
        stream, attend = Stream(text, torch.arange(len(text))), Packed.of([len(text)])
        with torch.no_grad():
            assert_same(small(stream, attend, Rows()), model(stream, attend, Rows()), what="logits")


def test_measure_uses_the_models_attention_mask() -> None:
    causal = _routed(ROUTERS["softmax"], set())
    model = Transformer(causal.config.replace(causal=False), dtype=torch.float64)
    model.load_state_dict(causal.state_dict())
    text = torch.arange(30) * 7 % 101
    routing = Routing(torch.arange(30))
    stream, attend = Stream(text, torch.arange(30), routing=routing), Packed.of([30], causal=False)
    model(stream, attend, Rows())
    load_LE = measure(model, [text])
    assert all(torch.equal(load_LE[layer], report.load_E) for layer, report in routing.reports.items())
    assert not torch.equal(load_LE, measure(causal, [text]))


def test_prune_keeps_the_most_used_in_order() -> None:
    model = _routed(ROUTERS["softmax"], set())
    load_LE = torch.tensor([[0] * 6, [5, 1, 9, 0, 2, 7], [0, 0, 3, 3, 3, 1]])
    small = prune(model, load_LE, 3)
    for layer, kept in ((1, [0, 2, 5]), (2, [2, 3, 4])):
        for name in ("experts.up", "experts.gate", "experts.down", "router.gates.0.weight"):
            at = f"blocks.{layer}.ffn.{name}"
            assert torch.equal(small.get_parameter(at), model.get_parameter(at)[kept]), at
    assert torch.equal(small.get_parameter("blocks.0.ffn.up.weight"), model.get_parameter("blocks.0.ffn.up.weight"))
    stream, attend, _ = ragged(model.config)
    assert torch.isfinite(small(stream, attend, Rows())).all()


def test_prune_refuses_bad_arguments() -> None:
    model = _routed(ROUTERS["softmax"], set())
    load_LE = torch.ones(3, 6, dtype=torch.int64)
    for keep in (1, 7):
        with pytest.raises(ConfigError, match=f"{keep} of 6 experts cannot be kept"):
            prune(model, load_LE, keep)
    with pytest.raises(ConfigError, match="belong to another model"):
        prune(model, load_LE[:2], 3)
    with pytest.raises(DataError, match="no text"):
        measure(model, [])
    dense = build(CONFIGS["llama"])
    with pytest.raises(ConfigError, match="no experts"):
        measure(dense, [])
    grouped = model.config.replace(
        moe=MoeConfig(experts=6, ffn_width=8, first_k_dense_replace=1, router=RouterConfig(groups=3, groups_kept=2))
    )
    with pytest.raises(ConfigError, match="3 groups"):
        prune(build(grouped), load_LE, 4)


def test_pruned_model_saves_and_loads(tmp_path: Path) -> None:
    model = build(upcycle(build(CONFIGS["llama"].replace(layers=3)), 6).config)
    small = prune(model, torch.arange(18).view(3, 6), 3)
    write_hf(small, tmp_path / "hf")
    again = load(tmp_path / "hf")
    assert again.config == small.config.replace(moe=again.config.moe)
    for name, parameter in small.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name

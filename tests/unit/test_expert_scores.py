"""Experts scored by what they contribute, pruned by the score, and replaced by a dense layer."""

from itertools import combinations

import pytest
import torch

from colonnade import api
from colonnade.cli import main
from colonnade.config import MoeConfig, RouterConfig
from colonnade.data import Corpus, build
from colonnade.errors import ConfigError, DataError
from colonnade.model import Packed, Rows, Stream, Transformer, initialise
from colonnade.model.moe import Routing
from colonnade.model.weight_only_quant import quantised_parameters
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.tune import keep_by_output, measure, prune, score_experts, to_dense
from colonnade.tune.to_dense import RIDGE
from tests.corpora import TEXT
from tests.models import CONFIGS, MOES
from tests.models import build as built
from tests.worlds import assert_same

TEXTS = [torch.randint(67, (n,), generator=torch.Generator().manual_seed(n)) for n in (40, 33)]
SIGMOID = CONFIGS["llama"].replace(
    vocab_size=101, moe=MoeConfig(experts=5, active=2, ffn_width=12, router=RouterConfig(kind="sigmoid"))
)
GATED = CONFIGS["llama"].replace(vocab_size=101, moe=MoeConfig(experts=6, active=2, ffn_width=12))


def logits(model: Transformer, tokens: torch.Tensor = TEXTS[0]) -> torch.Tensor:
    positions = torch.arange(len(tokens))
    with torch.no_grad():
        return model(Stream(tokens, positions, routing=Routing(positions)), Packed.of([len(tokens)]), Rows())


def make_useless(model: Transformer, layer: int, expert: int) -> None:
    """An expert that outputs zero."""
    with torch.no_grad():
        model.get_parameter(f"blocks.{layer}.ffn.experts.down")[expert] = 0


def test_scores_equal_a_loop_over_tokens() -> None:
    model = built(GATED).requires_grad_(False)
    scores = score_experts(model, TEXTS)
    assert torch.equal(scores.load_LE, measure(model, TEXTS))
    block, seen = model.blocks.get_submodule("1"), []
    handle = block.ffn.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    for text in TEXTS:
        logits(model, text)
    handle.remove()
    x, gates = torch.cat(seen), block.ffn.router.gates[0].weight
    chance = (x @ gates.T).softmax(1)
    top = chance.topk(2, 1)
    weights = top.values / top.values.sum(1, keepdim=True)
    experts, total = block.ffn.experts, [[] for _ in range(6)]
    for token in range(len(x)):
        for j in range(2):
            e = int(top.indices[token, j])
            h = torch.nn.functional.silu(experts.gate[e] @ x[token]) * (experts.up[e] @ x[token])
            total[e].append((float(weights[token, j]), float((h @ experts.down[e]).norm())))
    for e, found in enumerate(total):
        if found:
            assert scores.gate_LE[1, e] == pytest.approx(sum(g for g, _ in found) / len(found), rel=1e-6)
            assert scores.reap_LE[1, e] == pytest.approx(sum(g * n for g, n in found) / len(found), rel=1e-6)


def test_reap_keeps_what_load_would_prune() -> None:
    model = built(GATED)
    most_used = int(measure(model, TEXTS)[1].argmax())
    make_useless(model, 1, most_used)
    scores = score_experts(model, TEXTS)
    assert scores.reap_LE[1, most_used] == 0
    smaller = prune(model, scores.reap_LE, 5)
    kept = model.get_parameter("blocks.1.ffn.experts.down")
    expected = torch.cat((kept[:most_used], kept[most_used + 1 :]))
    assert torch.equal(smaller.get_parameter("blocks.1.ffn.experts.down"), expected)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["gated", "biased_shared", "sigmoid"])
@torch.no_grad()
def test_the_subset_that_changes_the_layers_outputs_least_is_kept(name) -> None:
    """Every subset, by pruning the model and running its layers on the inputs of the whole model's."""
    config = SIGMOID if name == "sigmoid" else MOES[name]
    model, keep = built(config).requires_grad_(False), config.moe.active + 1
    kept_LE = keep_by_output(model, TEXTS, keep)
    layer = config.layers - 1
    inputs, outputs = [], []
    module = model.get_submodule(f"blocks.{layer}.ffn")

    def record(_, args, out) -> None:
        inputs.append(args)
        outputs.append(out[0])

    handle = module.register_forward_hook(record)
    for text in TEXTS:
        logits(model, text)
    handle.remove()
    errors = {}
    for subset in combinations(range(config.moe.experts), keep):
        score = torch.zeros(config.layers, config.moe.experts)
        score[:, list(subset)] = 1
        smaller = prune(model, score, keep).get_submodule(f"blocks.{layer}.ffn")
        errors[subset] = sum(
            float((smaller(*args)[0] - out).square().sum()) for args, out in zip(inputs, outputs, strict=True)
        )
    assert tuple(kept_LE[layer].nonzero()[:, 0].tolist()) == min(errors, key=errors.__getitem__)
    assert (kept_LE.sum(1) == torch.tensor([keep if config.experts_of(i) else 0 for i in range(config.layers)])).all()


def test_a_useless_expert_leaves_by_its_output() -> None:
    model = built(GATED)
    make_useless(model, 0, 4)
    make_useless(model, 1, 1)
    kept_LE = keep_by_output(model, TEXTS, 5)
    assert kept_LE.sum(1).tolist() == [5, 5]
    with pytest.raises(DataError, match="no text"):
        keep_by_output(model, [], 5)
    many = built(GATED.replace(moe=GATED.moe.replace(experts=20)))
    with pytest.raises(ConfigError, match=r"10 of 20 experts are 184,756 subsets.*--score reap"):
        keep_by_output(many, TEXTS, 10)


@pytest.mark.parametrize("name", ["gated", "biased_shared"])
def test_one_expert_becomes_the_same_dense_model(name) -> None:
    config = MOES[name]
    moe = config.moe.replace(experts=1, active=1, shared_gate=False)
    model = built(config.replace(moe=moe))
    dense = to_dense(model, TEXTS)
    assert dense.config.moe is None
    assert_same(logits(dense), logits(model))


def test_all_experts_with_constant_gates_become_the_same_dense_model() -> None:
    """A router of zeros gives every expert the same weight."""
    model = built(GATED.replace(moe=GATED.moe.replace(experts=3, active=3)))
    with torch.no_grad():
        for layer in range(2):
            model.get_parameter(f"blocks.{layer}.ffn.router.gates.0.weight").zero_()
    dense = to_dense(model, TEXTS)
    assert dense.config.ffn_width == 36
    assert_same(logits(dense), logits(model))


@pytest.mark.parametrize("name", ["gated", "biased_shared"])
@torch.no_grad()
def test_the_dense_layer_is_the_best_fit_of_the_units_that_contribute_most(name) -> None:
    """The chosen units by a loop over experts; the output weights by the normal equations' gradient, which is zero."""
    config = MOES[name]
    config = config.replace(moe=config.moe.replace(shared_gate=False))
    model, layer, count = (
        built(config).requires_grad_(False),
        config.layers - 1,
        config.moe.active * config.moe.ffn_width,
    )
    dense = to_dense(model, TEXTS).get_submodule(f"blocks.{layer}.ffn")
    mixture, seen = model.get_submodule(f"blocks.{layer}.ffn"), []
    handle = mixture.register_forward_hook(lambda _, args, out: seen.append((args[0], out[0])))
    routed = mixture.router.register_forward_hook(lambda _, args, out: seen.append((out[0].ids_TA, out[0].weights_TA)))
    for text in TEXTS:
        logits(model, text)
    handle.remove()
    routed.remove()
    (ids_TA, w_TA), (x_TD, y_TD) = ([torch.cat(part) for part in zip(*seen[i::2], strict=True)] for i in range(2))
    experts, linear, energy, means = mixture.experts, torch.nn.functional.linear, [], []

    def hidden(up, up_bias, gate, gate_bias) -> torch.Tensor:
        return dense.act(linear(x_TD, up, up_bias) if gate is None else linear(x_TD, gate, gate_bias)) * (
            1 if gate is None else linear(x_TD, up, up_bias)
        )

    def row(stack, e: int) -> torch.Tensor | None:
        return None if stack is None else stack[e]

    for e in range(config.moe.experts):
        w_T = (w_TA * (ids_TA == e)).sum(1)
        h_TF = hidden(experts.up[e], row(experts.up_bias, e), row(experts.gate, e), row(experts.gate_bias, e))
        energy.append((h_TF * w_T[:, None]).square().sum(0) * experts.down[e].square().sum(1))
        means.append(w_T.mean())
    chosen = torch.cat(energy).topk(count).indices.sort().values
    assert_same(dense.up.weight[:count], experts.up.flatten(0, 1)[chosen])
    prior_fD = (torch.stack(means)[:, None, None] * experts.down).flatten(0, 1)[chosen]
    if mixture.shared is not None:
        prior_fD = torch.cat((prior_fD, mixture.shared.down.weight.T))
    gate, bias = dense.gate, dense.down.bias is not None
    h_Tf = hidden(dense.up.weight, dense.up.bias, gate and gate.weight, gate and gate.bias)
    error_TD = y_TD - dense(x_TD, len(x_TD))
    scale = (h_Tf.square().sum() + bias * len(x_TD)) / (h_Tf.shape[1] + bias)
    gradient_fD = h_Tf.T @ error_TD - RIDGE * scale * (dense.down.weight.T - prior_fD)
    assert gradient_fD.abs().max() < 1e-9 * (h_Tf.T @ y_TD).abs().max()
    assert error_TD.square().sum() < (y_TD - h_Tf @ prior_fD).square().sum()


def test_refusals() -> None:
    model = built(GATED)
    with pytest.raises(DataError, match="no text"):
        score_experts(model, [])
    with pytest.raises(ConfigError, match="no experts to score"):
        score_experts(built(CONFIGS["llama"]), TEXTS)
    scores = score_experts(model, TEXTS)
    with pytest.raises(ConfigError, match="7 of 6 experts cannot be kept"):
        to_dense(model, TEXTS, 7)
    with pytest.raises(ConfigError, match="1 of 6 experts cannot be kept, because a token uses 2"):
        prune(model, scores.reap_LE, 1)
    with pytest.raises(DataError, match="20 tokens are too few to fit layers of 24 hidden units"):
        to_dense(model, [TEXTS[0][:20]])
    shared = built(MOES["biased_shared"])
    with pytest.raises(ConfigError, match="gate of shared experts"):
        to_dense(shared, TEXTS)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "words",
    [["--keep", "3", "--score", "output"], ["--keep", "3", "--score", "load", "--weights", "int8"], ["--dense"]],
    ids=["keep", "keep and int8", "dense"],
)
def test_the_verb(words, tmp_path, capsys) -> None:
    build([(f"doc{i}", f"{i} {TEXT}") for i in range(9)], tmp_path / "corpus", vocab_size=300, validation_share=0.2)
    config = GATED.replace(family="mixtral", vocab_size=300)
    whole = initialise(Transformer(config), 1)
    solo = DistributedContext.solo(torch.device("cpu"))
    api.save(api.Model(whole, Corpus(tmp_path / "corpus").tokenizer, solo, "m"), tmp_path / "m")
    main(
        [
            "compress",
            *map(str, (tmp_path / "m", tmp_path / "out", "--text", tmp_path / "corpus", "--tokens", 400)),
            *words,
        ]
    )
    with api.load(tmp_path / "out", device="cpu") as loaded:
        assert bool(quantised_parameters(loaded.transformer)) == ("int8" in words)
        if "--dense" in words:
            assert loaded.config.moe is None and loaded.config.ffn_width == 24
        else:
            assert loaded.config.moe.experts == 3
    for bad, message in (
        (["--keep", "1"], "1 of 6 experts cannot be kept"),
        (["--keep", "3", "--dense"], "use only one"),
    ):
        with pytest.raises(SystemExit):
            main(["compress", str(tmp_path / "m"), str(tmp_path / "x"), "--text", str(tmp_path / "corpus"), *bad])
        assert message in " ".join(capsys.readouterr().err.split())

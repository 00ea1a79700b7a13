"""Each router against its formula, token by token; custom routers; refused settings."""

import math
import re
from pathlib import Path

import pytest
import torch

from colonnade.config import MoeConfig, RouterConfig
from colonnade.errors import ConfigError
from colonnade.model import Transformer, initialise
from colonnade.model.moe import (
    DispatchOptions,
    LayerRouting,
    MixtureOfExperts,
    Router,
    RouterInput,
    RouterOutput,
    RouterParameter,
    Routing,
    TokenGroups,
    router,
)
from colonnade.model.moe.router import INPUT, ROUTERS, SCORES, SECOND, uses_noise
from colonnade.model.moe.routing_context import find_nonfinite_scores
from colonnade.parallel.axis import SOLO_AXES
from tests.routers import EXPERTS, KINDS, TOKENS, WIDTH, config_of, kind_of, moe_of, noise_for, router_of, tokens
from tests.worlds import assert_same

E = EXPERTS


def weights_of(router: Router) -> dict[str, torch.Tensor]:
    return {name.removeprefix("gates.0."): p.detach() for name, p in router.named_parameters()}


def softmax(row: list[float]) -> list[float]:
    highest = max(row)
    exps = [math.exp(v - highest) for v in row]
    return [v / sum(exps) for v in exps]


def descending_order(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda e: -row[e])


def gate_rows(router: Router, x_TD: torch.Tensor) -> list[list[float]]:
    own = weights_of(router)
    bias = own.get("bias", torch.zeros(E, dtype=x_TD.dtype)).tolist()
    units = list(zip(own["weight"].tolist(), bias, strict=True))
    return [[sum(w * v for w, v in zip(ws, x, strict=True)) + b for ws, b in units] for x in x_TD.tolist()]


def normalise_and_scale(moe: MoeConfig, chosen: list[float]) -> list[float]:
    total = sum(chosen) if moe.router.normalise and moe.active > 1 else 1.0
    return [v / total * moe.router.scale for v in chosen]


def within_groups(moe: MoeConfig, row: list[float]) -> list[int]:
    """Experts by score, without those of the excluded groups."""
    groups = moe.router.groups
    size = E // groups
    rows = [row[g * size : (g + 1) * size] for g in range(groups)]
    top = 1 if moe.router.group_score == "max" else 2
    score = [sum(sorted(part, reverse=True)[:top]) for part in rows]
    kept_groups = descending_order(score)[: moe.router.groups_kept]
    return [e for e in descending_order(row) if e // size in kept_groups]


def reference_choice(name: str, moe: MoeConfig, router: Router) -> tuple[list[list[int]], list[list[float]]]:
    """(ids, weights) of each token by the formula of the router's paper, in plain Python; an unused slot is E and 0."""
    x_TD, _, index_T, units = tokens()
    noise, own, config = noise_for(moe, index_T), weights_of(router), moe.router
    kind, A = kind_of(name), moe.active
    if config.jitter:
        u = noise.uniform(WIDTH, INPUT)
        x_TD = x_TD * (1 - config.jitter + 2 * config.jitter * u)
    rows = gate_rows(router, x_TD) if "weight" in own else []
    if kind == "cosine":
        factor = math.exp(min(own["own.temperature"].item(), math.log(100)))
        for x in x_TD:
            p = own["own.project"] @ x
            rows.append([(p @ s / p.norm() / s.norm()).item() * factor for s in own["own.experts"]])
    if kind == "task":
        rows = [own["own.table"][u].tolist() for u in units.group_T]
    if config.noise:
        normal = noise.normal(E, SCORES).tolist()
        rows = [
            [v + config.noise / E * n for v, n in zip(r, ns, strict=True)] for r, ns in zip(rows, normal, strict=True)
        ]
    if kind == "noisy":
        normal = noise.normal(E, SCORES).tolist()
        spread = (x_TD @ own["own.noise"].T).tolist()
        rows = [
            [v + n * (math.log1p(math.exp(s)) + 0.01) for v, n, s in zip(*three, strict=True)]
            for three in zip(rows, normal, spread, strict=True)
        ]
    if kind == "sequence":
        of = units.group_T.tolist()
        members = {u: [t for t in range(TOKENS) if of[t] == u] for u in of}
        rows = [
            [sum(rows[m][e] for m in members[of[t]]) / len(members[of[t]]) for e in range(E)] for t in range(TOKENS)
        ]
    bias = router.bias_E.tolist() if router.bias_E is not None else [0.0] * E
    if kind == "expert_choice":
        probs = [softmax(row) for row in rows]
        C = math.ceil(TOKENS * A / E)
        takers = [sorted(range(TOKENS), key=lambda t, e=e: -probs[t][e])[:C] for e in range(E)]
        ids = [[e for e in descending_order(probs[t]) if t in takers[e]] for t in range(TOKENS)]
        weights = [[probs[t][e] for e in ids[t]] for t in range(TOKENS)]
        return ids, weights
    if kind == "topology":
        return reference_topology(moe, [softmax(row) for row in rows])
    if kind == "hash":
        return [[] for _ in range(TOKENS)], [[1 / A] * A for _ in range(TOKENS)]
    ids, weights = [], []
    for t, row in enumerate(rows):
        scores = [1 / (1 + math.exp(-v)) for v in row] if kind == "sigmoid" else softmax(row)
        chosen = within_groups(moe, [s + b for s, b in zip(scores, bias, strict=True)])[:A]
        if kind == "noisy":
            chosen = descending_order(row)[:A]
            ids.append(chosen)
            weights.append(softmax([row[e] for e in chosen]))
            continue
        kept_weights = normalise_and_scale(moe, [scores[e] for e in chosen])
        if kind == "gshard":
            g2 = scores[chosen[1]] / (scores[chosen[0]] + scores[chosen[1]])
            if 2 * g2 < noise.uniform(1, SECOND)[t].item():
                chosen, kept_weights = chosen[:1], kept_weights[:1]
        ids.append(chosen)
        weights.append(kept_weights)
    return ids, weights


def reference_topology(moe: MoeConfig, probs: list[list[float]]) -> tuple[list[list[int]], list[list[float]]]:
    nodes = moe.router.nodes
    home = [t * nodes // TOKENS for t in range(TOKENS)]
    experts = [[e for e in range(E) if e * nodes // E == n] for n in range(nodes)]
    may_leave: set[int] = set()
    for n in range(nodes):
        ours = [t for t in range(TOKENS) if home[t] == n]
        leavers = sorted(
            (t for t in ours if descending_order(probs[t])[0] not in experts[n]), key=lambda t: -max(probs[t])
        )
        may_leave |= set(leavers[: int(moe.router.outgoing_fraction * len(ours))])
    ids = []
    for t in range(TOKENS):
        best = descending_order(probs[t])
        if best[0] not in experts[home[t]] and t not in may_leave:
            first = next(e for e in best if e in experts[home[t]])
            best = [first] + [e for e in best if e != first]
        ids.append(best[: moe.active])
    return ids, [normalise_and_scale(moe, [probs[t][e] for e in ids[t]]) for t in range(TOKENS)]


def chosen(name: str, moe: MoeConfig, router: Router, **how) -> RouterOutput:
    x_TD, tokens_T, index_T, units = tokens()
    return router(x_TD, tokens_T, index_T, noise_for(moe, index_T), training=True, token_groups=units, **how)[0]


@pytest.mark.parametrize("name", KINDS)
def test_router_matches_its_formula(name):
    moe = moe_of(name)
    router = router_of(moe)
    choice = chosen(name, moe, router)
    ids, weights = reference_choice(name, moe, router)
    for t in range(TOKENS):
        real = [j for j, e in enumerate(choice.ids_TA[t].tolist()) if e < E]
        assert real == list(range(len(real))), "unused slots are last"
        if kind_of(name) != "hash":
            assert choice.ids_TA[t, : len(real)].tolist() == ids[t], t
        assert_same(choice.weights_TA[t, : len(real)], torch.tensor(weights[t], dtype=torch.float64), what=f"token {t}")
        assert not choice.weights_TA[t, len(real) :].any()


@pytest.mark.parametrize("name", [name for name in KINDS if name != "hash"])
def test_ties_go_to_the_lowest_index(name):
    """Ties between experts, groups, and tokens (where experts choose); in float32 and float64."""
    moe = moe_of(name, experts=60, noise=0.0, jitter=0.0)
    for dtype in (torch.float32, torch.float64):
        router = router_of(moe).to(dtype)
        for tensor in router.state_dict().values():
            tensor.zero_()
        x_TD, tokens_T, index_T, units = tokens()
        ids_TA = router(x_TD.to(dtype), tokens_T, index_T, None, token_groups=units)[0].ids_TA
        if name == "expert_choice":
            assert torch.equal(ids_TA[:1], torch.arange(60)[None])  # one token per expert: the first
            assert (ids_TA[1:] == 60).all()
        else:
            assert torch.equal(ids_TA, torch.arange(moe.active).expand(TOKENS, -1))


def test_cases_cover_every_registered_router():
    # Other tests, and the documentation's, register their own routers in the same process.
    ours = {name for name, rule in ROUTERS.items() if rule.choose.__module__.startswith("colonnade.")}
    assert {kind_of(name) for name in KINDS} == ours


def test_docs_and_config_list_every_router():
    names = {kind_of(name) for name in KINDS}
    page = (Path(__file__).parents[2] / "docs/ideas/routing.md").read_text(encoding="utf-8")
    table = page[page.index("| `moe.router.kind`") : page.index("Besides `kind`")]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == names
    described = RouterConfig.model_fields["kind"].description
    assert set(re.split(r"[,.]\s+", described.removeprefix("The routing algorithm: ").split(", or one")[0])) == names


@pytest.mark.parametrize("name", KINDS)
def test_router_with_zero_tokens_and_one(name):
    moe = moe_of(name)
    router = router_of(moe)
    x_TD, tokens_T, index_T, units = tokens()
    for T in (0, 1):
        noise = noise_for(moe, index_T[:T])
        choice, _ = router(x_TD[:T], tokens_T[:T], index_T[:T], noise, training=True, token_groups=units.rows(slice(T)))
        assert len(choice.ids_TA) == len(choice.weights_TA) == T
        assert choice.weights_TA.isfinite().all()


@pytest.mark.parametrize("name", KINDS)
def test_inference_has_no_noise(name):
    """Inference equals training with the router's noise at 0."""
    moe = moe_of(name)
    router = router_of(moe)
    x_TD, tokens_T, index_T, units = tokens()
    choice, _ = router(x_TD, tokens_T, index_T, None, token_groups=units)
    calm = moe_of(name, jitter=0.0, noise=0.0)
    quiet = router_of(calm)
    expected, _ = quiet(x_TD, tokens_T, index_T, None, token_groups=units)
    assert torch.equal(choice.ids_TA, expected.ids_TA)
    assert torch.equal(choice.weights_TA, expected.weights_TA)
    assert choice.expected_TE is None
    if uses_noise(moe):
        noisy = chosen(name, moe, router)
        assert not torch.equal(noisy.weights_TA, choice.weights_TA), "the noise changed nothing"


def test_gshard_samples_the_second_expert_by_its_weight():
    moe = moe_of("gshard")
    T = 20_000
    noise = noise_for(moe, torch.arange(T))
    g2 = 0.2
    logits_TE = torch.zeros(T, E, dtype=torch.float64)
    logits_TE[:, 0], logits_TE[:, 3] = math.log(1 - g2) + 9, math.log(g2) + 9
    none = torch.empty(0)
    seen = RouterInput(none, logits_TE, logits_TE, moe, {}, None, noise, none, none, SOLO_AXES.experts.tokens)
    kept_share = (ROUTERS["gshard"].choose(seen).ids_TA[:, 1] < E).double().mean().item()
    assert abs(kept_share - 2 * g2) < 4 * math.sqrt(0.4 * 0.6 / T)
    seen = seen._replace(noise=None)
    assert (ROUTERS["gshard"].choose(seen).ids_TA < E).all()


def test_noisy_load_is_the_share_of_draws_choosing_an_expert():
    """P_te by its definition: one expert's noise drawn many times."""
    moe = moe_of("noisy")
    router = router_of(moe)
    x_TD, _, index_T, _ = tokens()
    choice = chosen("noisy", moe, router)
    own, noise = weights_of(router), noise_for(moe, index_T)
    clean_TE = x_TD @ own["weight"].T
    sigma_TE = torch.nn.functional.softplus(x_TD @ own["own.noise"].T) + 0.01
    h_TE = clean_TE + sigma_TE * noise.normal(E, SCORES)
    drawn = torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for t, e in [(0, 0), (5, 3), (17, 5)]:
        rows = h_TE[t].expand(len(drawn), E).clone()
        rows[:, e] = clean_TE[t, e] + sigma_TE[t, e] * drawn
        share = (rows.topk(moe.active).indices == e).any(1).double().mean()
        assert abs(share - choice.expected_TE[t, e]) < 0.015


@pytest.mark.parametrize("name", ["softmax_tutel_noise", "cosine", "sigmoid", "sequence"])
def test_load_under_noise_is_the_probability_of_the_top_k(name):
    """Above the others' noisy scores; the mean noise of n tokens of a sequence is √n times narrower."""
    moe = moe_of(name, noise=1.5, balance="importance", bias_rate=0.0)
    router, (x_TD, tokens_T, index_T, units) = router_of(moe), tokens()
    choice, noisy_TE = router(x_TD, tokens_T, index_T, noise_for(moe, index_T), training=True, token_groups=units)
    _, clean_TE = router(x_TD, tokens_T, index_T, None, token_groups=units)
    sizes = torch.bincount(units.group_T)[units.group_T].tolist() if name == "sequence" else [1] * TOKENS
    for t, (clean, noisy) in enumerate(zip(clean_TE.tolist(), noisy_TE.tolist(), strict=True)):
        for e in range(E):
            least = sorted(noisy[:e] + noisy[e + 1 :], reverse=True)[moe.active - 1]
            z = (clean[e] - least) / (1.5 / E / math.sqrt(sizes[t]))
            assert choice.expected_TE[t, e].item() == pytest.approx(math.erfc(-z / math.sqrt(2)) / 2, abs=1e-12)


def test_single_normalised_weight_is_1_without_gradient():
    for name, scale in (("softmax", 1.0), ("switch", 1.7), ("sigmoid", 2.5)):
        for single in (True, False):
            moe = moe_of(name, active=1, normalise_single=single, jitter=0.0, scale=scale)
            router = router_of(moe)
            weights_TA = chosen(name, moe, router).weights_TA
            assert (weights_TA == scale).all() if single else (weights_TA < scale).all()
            (weights_TA * torch.randn(TOKENS, 1, generator=torch.Generator().manual_seed(0))).sum().backward()
            assert router.gates[0].weight.grad.any() == (not single)


def test_cosine_scale_is_limited_to_100():
    moe = moe_of("cosine", noise=0.0)
    router = router_of(moe)
    logits = {}
    for temperature in (math.log(100), 7.0):
        router.gates[0].own["temperature"].data.fill_(temperature)
        logits[temperature] = chosen("cosine", moe, router).logits_TE
    assert 1 < logits[7.0].abs().max() <= 100
    assert_same(logits[7.0], logits[math.log(100)])


def test_expert_choice_balances_load_and_bounds_rows():
    moe = moe_of("expert_choice")
    choice = chosen("expert_choice", moe, router_of(moe))
    C = math.ceil(TOKENS * moe.active / E)
    assert torch.bincount(choice.ids_TA.flatten(), minlength=E + 1)[:E].tolist() == [C] * E
    assert (choice.ids_TA < E).sum() <= choice.max_choices


def test_hash_router_is_distinct_deterministic_and_even():
    moe = moe_of("hash", active=2)
    router = router_of(moe)
    ids_T = torch.arange(6000)
    first, _ = router(torch.zeros(6000, WIDTH, dtype=torch.float64), ids_T, ids_T, None)
    again, _ = router(torch.ones(6000, WIDTH, dtype=torch.float64), ids_T, ids_T + 7, None)
    assert torch.equal(first.ids_TA, again.ids_TA)
    assert (first.ids_TA[:, 0] != first.ids_TA[:, 1]).all()
    counts = torch.bincount(first.ids_TA.flatten(), minlength=E)
    assert (counts - 2000).abs().max() < 5 * math.sqrt(2000)


def test_few_tokens_leave_their_node_in_training_only():
    moe = moe_of("topology", outgoing_fraction=0.2)
    router = router_of(moe)
    choice = chosen("topology", moe, router)
    home_T, node = torch.arange(TOKENS) * 3 // TOKENS, choice.ids_TA[:, 0] * 3 // E
    for n in range(3):
        assert (node[home_T == n] != n).sum() <= int(0.2 * (home_T == n).sum())
    x_TD, tokens_T, index_T, _ = tokens()
    free, _ = router(x_TD, tokens_T, index_T, None)
    assert torch.equal(free.ids_TA, free.probs_TE.topk(2).indices)
    assert not torch.equal(free.ids_TA, choice.ids_TA)


def test_sequence_router_chooses_once_per_sequence():
    moe = moe_of("sequence")
    choice = chosen("sequence", moe, router_of(moe))
    by_sequence = choice.ids_TA.split([7, 1, 13, 8])
    assert all((part == part[0]).all() for part in by_sequence)
    assert len({tuple(part[0].tolist()) for part in by_sequence}) > 1


def test_sequences_are_numbered_by_their_starts():
    """The padding at the end of cu_seqlens has no token."""
    cu_seqlens = torch.tensor([0, 7, 8, 21, 29, 29, 29, 29, 29], dtype=torch.int32)
    units = TokenGroups.sequences(cu_seqlens, 29, SOLO_AXES.dp)
    assert units.group_T.tolist() == [0] * 7 + [1] + [2] * 13 + [3] * 8
    assert units.count == 8


def test_each_gate_of_a_layer_uses_its_own_weights():
    moe = moe_of("noisy", gates=2)
    router = router_of(moe)
    assert {name for name, _ in router.named_parameters()} == {
        f"gates.{g}.{name}" for g in (0, 1) for name in ("weight", "own.noise")
    }
    first, second = (chosen("noisy", moe, router, gate=g) for g in (0, 1))
    assert not torch.equal(first.ids_TA, second.ids_TA)
    router.gates[1].load_state_dict(router.gates[0].state_dict())
    assert torch.equal(chosen("noisy", moe, router, gate=1).weights_TA, first.weights_TA)
    with pytest.raises(ConfigError, match=r"no gate 2 in a layer of 2; raise model\.moe\.router\.gates"):
        chosen("noisy", moe, router, gate=2)


def test_scores_of_a_bfloat16_model_are_float32_by_default():
    x_TD, tokens_T, index_T, _ = tokens()
    for dtype, expected in (("float32", torch.float32), ("model", torch.bfloat16)):
        moe = moe_of("softmax", dtype=dtype)
        router = router_of(moe).to(torch.bfloat16)
        choice, logits_TE = router(x_TD.bfloat16(), tokens_T, index_T, None)
        assert choice.weights_TA.dtype == logits_TE.dtype == expected


def test_excluded_groups_stay_excluded_with_negative_scores():
    """Zero instead of -∞ would let an excluded expert beat one whose biased score is negative."""
    moe = moe_of("sigmoid_groups")
    logits_TE = torch.tensor([[4.0, 3.0, -6.0, 1.0, 1.0, 1.0]], dtype=torch.float64)
    bias_E = torch.tensor([0.5, -2.0, -2.0, -0.9, -0.9, -0.9], dtype=torch.float64)
    none = torch.empty(0)
    seen = RouterInput(none, logits_TE, logits_TE, moe, {}, bias_E, None, none, none, SOLO_AXES.experts.tokens)
    scores = (logits_TE.sigmoid() + bias_E)[0].tolist()
    assert ROUTERS["sigmoid"].choose(seen).ids_TA[0].tolist() == within_groups(moe, scores)[:2]
    assert min(scores[:3]) < 0


def test_bias_update_opposes_the_load():
    router = router_of(moe_of("softmax_biased", bias_rate=0.25))
    router.bias_E.fill_(0.5)
    router.rebalance(torch.tensor([9, 5, 0, 5, 5, 6]))
    assert router.bias_E.tolist() == [0.25, 0.5, 0.75, 0.5, 0.5, 0.25]
    # The float32 nearest to a third of these is not one of them.
    third = 2**24 + 1
    router.rebalance(torch.tensor([third] * 6))
    assert router.bias_E.tolist() == [0.25, 0.5, 0.75, 0.5, 0.5, 0.25]


# -- initial values and sizes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_parameter_count_includes_the_router(name):
    config = config_of(moe_of(name, gates=2, balance="none"))
    model = Transformer(config, device="meta")
    assert sum(p.numel() for p in model.parameters()) == config.parameters


def test_routers_define_their_initial_values():
    model = initialise(Transformer(config_of(moe_of("cosine", temperature=0.25))), seed=0)
    own = model.get_submodule("blocks.0.ffn.router.gates.0.own")
    assert own.temperature.item() == pytest.approx(math.log(4))
    assert 0.01 < own.project.std() < 0.03
    model = initialise(Transformer(config_of(moe_of("noisy"))), seed=0)
    assert not model.get_parameter("blocks.0.ffn.router.gates.0.own.noise").any()
    assert model.get_parameter("blocks.0.ffn.router.gates.0.weight").std() > 0.01


# -- custom routers, and refused settings -----------------------------------------------------------------------------


@router("first_letters", lambda config, moe: {"push": RouterParameter((moe.experts,), 2.0)})
def first_letters(seen: RouterInput) -> RouterOutput:
    ids_TA = (seen.tokens_T[:, None] + torch.arange(seen.moe.active)) % seen.moe.experts
    probs_TE = (seen.logits_TE * seen.parameters["push"]).softmax(1)
    return RouterOutput(ids_TA, probs_TE.gather(1, ids_TA), probs_TE)


@router("careless", gate=False)
def careless(seen: RouterInput) -> RouterOutput:
    return RouterOutput(seen.tokens_T, seen.tokens_T.double(), seen.logits_TE)


def test_custom_router_needs_one_function():
    moe = MoeConfig(experts=E, active=3, ffn_width=8, router=RouterConfig(kind="first_letters"))
    model = initialise(Transformer(config_of(moe)), seed=0)
    layer = model.get_submodule("blocks.0.ffn")
    assert isinstance(layer, MixtureOfExperts)
    assert (layer.router.gates[0].own["push"] == 2).all()
    x_TD, tokens_T, index_T, _ = tokens()
    y_TD, report = layer(x_TD.float(), TOKENS, LayerRouting(tokens_T, Routing(index_T, 1.0), DispatchOptions()))
    assert y_TD.shape == x_TD.shape
    assert report.load_E.sum() == 3 * TOKENS
    y_TD.square().sum().backward()
    assert layer.router.gates[0].own["push"].grad.any()


@pytest.mark.parametrize(
    ("router", "moe", "message"),
    [
        ({"kind": "sofmax"}, {}, "no router 'sofmax'; did you mean 'softmax'"),
        ({"kind": "os.system"}, {}, "there is no router 'os.system'"),
        ({"kind": "switch"}, {}, "'switch' sends a token to 1 of the experts, not 2; set model.moe.active to 1"),
        ({"kind": "gshard"}, {"active": 3}, "'gshard' sends a token to 2 of the experts, not 3"),
        ({"kind": "noisy"}, {"bias_rate": 0.1}, r"'noisy' does not support model\.moe\.bias_rate; .* softmax"),
        ({"kind": "hash", "groups": 2}, {}, r"'hash' does not support model\.moe\.router\.groups"),
        ({"nodes": 7}, {}, "6 experts cannot be spread over 7 nodes"),
        ({}, {"active": 7}, "a token cannot go to 7 of 6 experts"),
        ({"groups": 4}, {}, "6 experts cannot be divided into 4 groups"),
        (
            {"noise": 1.0},
            {"balance": "importance", "bias_rate": 0.1},
            r"not implemented with model\.moe\.bias_rate; set that to 0, model\.moe\.router\.noise to 0, or",
        ),
        (
            {"noise": 1.0, "groups": 2},
            {"balance": "importance"},
            r"not implemented with model\.moe\.router\.groups; set that to 1",
        ),
        (
            {},
            {"balance": "gshard", "balance_over": "model"},
            r"is a loss of one layer; set model\.moe\.balance_over to",
        ),
    ],
)
def test_invalid_settings_are_refused_with_a_remedy(router, moe, message):
    base = {"experts": E, "active": 2, "ffn_width": 8}
    with pytest.raises(ConfigError, match=message):
        router_of(MoeConfig(**(base | moe), router=RouterConfig(**router)))


def test_invalid_router_output_is_reported():
    moe = MoeConfig(experts=E, active=2, ffn_width=8, router=RouterConfig(kind="careless"))
    with pytest.raises(ConfigError, match=r"'careless' returned ids of \(29,\).*must return int64 \(29, A\)"):
        chosen("careless", moe, router_of(moe))


@pytest.mark.parametrize("kind", ["sequence", "task"])
def test_sequence_router_requires_sequences(kind):
    moe = moe_of(kind)
    x_TD, tokens_T, index_T, units = tokens()
    with pytest.raises(ConfigError, match=f"selects experts once per {kind}, but the stream does not assign"):
        router_of(moe)(x_TD, tokens_T, index_T, None)
    if kind == "task":
        few = moe_of("task", tasks=2)
        with pytest.raises(ConfigError, match="has 5 tasks, but the router has 2"):
            router_of(few)(x_TD, tokens_T, index_T, None, token_groups=units)


def test_layer_trains_with_a_parameterless_router():
    """The hash router has no parameters: losses are reported, and the experts still get gradients."""
    moe = moe_of("hash")
    model = initialise(Transformer(config_of(moe), dtype=torch.float64), seed=0)
    layer = model.get_submodule("blocks.0.ffn")
    x_TD, tokens_T, index_T, _ = tokens()
    y_TD, report = layer(x_TD, TOKENS, LayerRouting(tokens_T, Routing(index_T, 1.0), DispatchOptions()))
    y_TD.square().sum().backward()
    assert report.balance > 1
    assert report.z == 0
    assert bool(report.finite)
    assert all(p.grad is not None for p in layer.experts.parameters())


# -- non-finite scores ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in KINDS if kind_of(name) not in ("hash", "task")])
def test_nan_scores_reach_the_loss_and_name_their_layer(name):
    """Without synchronising the device: the check of the gradient norm at the end of the step finds the NaN."""
    moe = moe_of(name)
    layer = MixtureOfExperts(config_of(moe), moe, SOLO_AXES, device=torch.device("cpu"), dtype=torch.float64)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    x_TD, tokens_T, index_T, units = tokens()
    weight = next(p for name, p in layer.router.named_parameters() if name.endswith(("gates.0.weight", "own.project")))
    for broken in (False, True):
        if broken:
            weight.data[1, 2] = math.nan
        layer.zero_grad()
        noise = noise_for(moe, index_T)
        y_TD, report = layer(
            x_TD, TOKENS, LayerRouting(tokens_T, Routing(index_T, 1.0, token_groups=units), DispatchOptions()), noise
        )
        y_TD.square().sum().backward()
        assert layer.router.gates[0].weight is None or weight.grad.isfinite().all() == (not broken)
        assert y_TD.isfinite().all() == (not broken)
        assert bool(report.finite) == (not broken)


def test_first_layer_with_nan_is_named_with_its_ranks():
    fine = [True] * 4
    assert find_nonfinite_scores([fine, fine]) is None
    table = [fine, [True, True, False, False], fine, [True, True, False, True]]
    assert find_nonfinite_scores(table) == "the router's scores in layer 2 are not finite on rank 1, 3 of 4"

"""The building blocks of colonnade.nn in a user's own model: on one process and over ranks."""

import itertools
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from colonnade.cli.main import main
from colonnade.config import MoeConfig, Plan, RouterConfig, plugins
from colonnade.errors import CapacityError, ConfigError, PlanError
from colonnade.model.moe.router import ROUTERS
from colonnade.nn import (
    SOLO_AXES,
    Axes,
    ColumnParallelLinear,
    MoE,
    Packed,
    PagedCache,
    RowParallelLinear,
    TokenGroups,
    clip_gradients,
    distributed_context,
    kernel_names,
    reduce_gradients,
)
from colonnade.parallel.launch import launch
from colonnade.parallel.layout import WHOLE, local_part, placements
from tests.worlds import assert_same, run

D = 12
EXPERTS = MoeConfig(experts=4, active=2, ffn_width=10, z_weight=0.1, balance_weight=0.3)


class Block(nn.Module):
    """A user's block: torch's norm and projection, heads and hidden units over tp, experts over the grid."""

    def __init__(self, axes: Axes = SOLO_AXES, moe: MoeConfig = EXPERTS):
        super().__init__()
        torch.manual_seed(7)
        on = {"dtype": torch.float64}
        self.axes = axes
        self.norm = nn.LayerNorm(D, **on)
        self.qkv = ColumnParallelLinear(D, 3 * 4 * 6, axes.tp, init_std=0.3, **on)
        self.out = RowParallelLinear(4 * 6, D, axes.tp, init_std=0.3, **on)
        self.moe = MoE(D, moe, axes, init_std=0.5, **on)
        self.logits = ColumnParallelLinear(D, 5, axes.tp, gather_output=True, init_std=0.3, **on)

    def forward(self, x_TD: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
        q, k, v = self.qkv(self.norm(x_TD)).unflatten(1, (-1, 3, 6)).unbind(2)
        attend = Packed.of(lengths)
        x_TD = x_TD + self.out(attend(q, k, v).flatten(1))
        units = TokenGroups.sequences(attend.cu_seqlens, len(x_TD), self.axes.batch)
        found = self.moe(x_TD, token_groups=units)
        return self.logits(x_TD + found.y), found.loss


def _text(lengths: list[int]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    x_TD = torch.randn(sum(lengths), D, generator=generator, dtype=torch.float64)
    return x_TD, torch.randint(5, (len(x_TD),), generator=generator)


LENGTHS = [[5, 3], [4, 6], [1, 2, 3], [7]]


def _train(axes: Axes, moe: MoeConfig, batches: list[list[int]], total: int) -> tuple[list[float], dict[str, Tensor]]:
    """Three AdamW steps on these batches, with ``total`` tokens over all ranks; returns losses, norms and weights."""
    model = Block(axes, moe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.03, weight_decay=0.1)
    numbers: list[float] = []
    for _ in range(3):
        optimizer.zero_grad()
        lengths = list(itertools.chain(*batches))
        texts = [_text(one) for one in batches]
        x_TD, targets_T = (torch.cat(parts) for parts in zip(*texts, strict=True))
        logits, aux = model(x_TD, lengths)
        task = F.cross_entropy(logits, targets_T, reduction="sum") / total
        (task + aux).backward()
        reduce_gradients(model, axes)
        norm = clip_gradients(model, axes, 0.5)
        optimizer.step()
        numbers += [axes.batch.sum_(task).item(), aux.item(), norm.item()]
    return numbers, {name: p.detach() for name, p in model.named_parameters()}


def _check_training(plan: Plan, moe: MoeConfig) -> None:
    data = plan.world // plan.tp
    batches, total = LENGTHS[:data], sum(map(sum, LENGTHS[:data]))
    expected, whole = _train(SOLO_AXES, moe, batches, total)
    assert max(abs(a - b) for a, b in itertools.pairwise(expected[2::3])) > 1e-6, "training changes the losses"
    with distributed_context(plan) as context:
        axes = context.axes
        found, mine = _train(axes, moe, [batches[axes.batch.rank]], total)
        assert_same(torch.tensor(found), torch.tensor(expected), what=f"losses and norms of {plan}")
        table = placements(Block(axes, moe))
        for name, p in mine.items():
            assert_same(p, local_part(whole[name], table.get(name, WHOLE), axes), what=name)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("plan", "moe"),
    [
        (Plan(tp=2), EXPERTS),
        (Plan(dp=2, ep=2), EXPERTS),
        (Plan(dp=2, etp=2), EXPERTS.replace(shared_width=6, balance="importance")),
        (Plan(dp=2, ep=2), EXPERTS.replace(balance="sequence", capacity=0.75)),
        (Plan(tp=2, dp=2, ep=2, etp=2), EXPERTS.replace(router=RouterConfig(noise=1.0), balance="gshard")),
    ],
    ids=["tp", "ep", "etp", "capacity", "tp_dp_ep_etp"],
)
def test_model_of_these_blocks_trains_the_same_over_ranks(plan: Plan, moe: MoeConfig) -> None:
    run(plan.world, _check_training, plan, moe)


def _by_hand(layer: MoE, x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """(y, loss) of softmax-routed experts, token by token, from the layer's own weights."""
    own = dict(layer.layer.named_parameters())
    logits = x_TD @ own["router.gates.0.weight"].T
    probs = logits.softmax(1)
    top = probs.topk(2, 1)
    rows = []
    for t, x in enumerate(x_TD):
        y = torch.zeros_like(x)
        for w, e in zip(top.values[t] / top.values[t].sum(), top.indices[t].tolist(), strict=True):
            hidden = F.silu(own["experts.gate"][e] @ x) * (own["experts.up"][e] @ x)
            y = y + w * (hidden @ own["experts.down"][e])
        rows.append(y)
    share_E = torch.bincount(top.indices.flatten(), minlength=4).double() / (2 * len(x_TD))
    loss = 0.3 * 4 * (share_E * probs.mean(0)).sum() + 0.1 * logits.logsumexp(1).square().mean()
    return torch.stack(rows), loss


def test_moe_layer_equals_the_equations_in_values_and_gradients() -> None:
    torch.manual_seed(3)
    layer = MoE(D, EXPERTS, init_std=0.7, dtype=torch.float64)
    x = torch.randn(3, 5, D, dtype=torch.float64, requires_grad=True)
    target = torch.randn(15, D, dtype=torch.float64)

    def gradients(y: Tensor, loss: Tensor, factor: float) -> list[Tensor]:
        leaves = [x, *layer.parameters()]
        return list(torch.autograd.grad((y.reshape(15, D) - target).square().mean() + factor * loss, leaves))

    y, loss = _by_hand(layer, x.reshape(15, D))
    found = layer(x)
    assert found.y.shape == x.shape
    assert_same(found.y.reshape(15, D), y, what="y")
    assert_same(found.loss, loss, what="loss")
    assert found.load_E.sum() == 30 and found.dropped == 0
    for factor in (0.0, 1.0, 2.5):
        for mine, theirs in zip(
            gradients(*layer(x)[:2], factor), gradients(*_by_hand(layer, x.reshape(15, D)), factor), strict=True
        ):
            assert_same(mine, theirs, what=f"gradient with the loss {factor} times")
    layer.eval()
    evaluated = layer(x)
    assert_same(evaluated.y.reshape(15, D), y, what="y in evaluation")
    assert evaluated.loss == 0
    assert layer(x[:0]).y.shape == (0, 5, D)


def test_equal_seeds_give_equal_layers() -> None:
    torch.manual_seed(1)
    a, b = ColumnParallelLinear(4, 6), ColumnParallelLinear(4, 6)
    torch.manual_seed(1)
    again = ColumnParallelLinear(4, 6)
    assert torch.equal(a.weight, again.weight) and not torch.equal(a.weight, b.weight)
    assert a.bias is not None and not a.bias.any()
    x = torch.randn(3, 4)
    torch.testing.assert_close(a(x), x @ a.weight.T)
    row = RowParallelLinear(6, 4, input_is_parallel=False)
    torch.testing.assert_close(row(a(x)), a(x) @ row.weight.T)


def test_paged_attention_equals_packed_attention() -> None:
    torch.manual_seed(2)
    lengths = [9, 4]
    q, k, v = (torch.randn(13, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    packed = Packed.of(lengths)(q, k, v)
    cache = PagedCache(layers=2, kv_heads=2, head_width=8, pages=6, page_tokens=4, dtype=torch.float64)
    pages, rows = [[5, 0, 3], [1]], [range(9), range(9, 13)]
    for begin, end in ((0, 3), (3, 4), (4, 9)):  # a prefill, a decode step, the rest; the second request ends early
        lengths_now = [min(end, n) for n in lengths]
        new = [n - min(begin, m) for n, m in zip(lengths_now, lengths, strict=True)]
        index = [i for r, n, m in zip(rows, new, lengths_now, strict=True) for i in r[m - n : m]]
        attend = cache.batch(pages, lengths_now, new)
        assert_same(attend.at(1, None)(q[index], k[index], v[index]), packed[index], what=f"tokens {begin} to {end}")
    assert not cache.k[0].any(), "pages of the other layer stay empty"


def test_errors_name_the_numbers_and_the_remedy() -> None:
    layer = MoE(D, MoeConfig(experts=2, active=1, ffn_width=4, router=RouterConfig(kind="hash")))
    with pytest.raises(ConfigError, match="routes by token ids; pass tokens="):
        layer(torch.randn(3, D))
    assert layer(torch.randn(3, D), tokens=torch.tensor([4, 4, 9])).load_E.sum() == 3
    with pytest.raises(ConfigError, match=r"2 token ids for 3 tokens; pass one per token"):
        layer(torch.randn(3, D), tokens=torch.tensor([4, 4]))
    with pytest.raises(ConfigError, match=rf"an input of shape \(3, 5\); pass \(…, {D}\)"):
        layer(torch.randn(3, 5))
    with pytest.raises(PlanError, match="without sequence_parallel"):
        MoE(D, EXPERTS, Axes(sequence_parallel=True))
    with pytest.raises(ConfigError, match=r"nn\.MoE is a single layer; set balance_over 'layer'"):
        MoE(D, EXPERTS.replace(balance_over="model"))
    cache = PagedCache(layers=1, kv_heads=1, head_width=4, pages=2, page_tokens=4)
    with pytest.raises(CapacityError, match="request 0 has 9 tokens and 2 pages of 4; it needs 3"):
        cache.batch([[0, 1]], [9], [1])
    with pytest.raises(ConfigError, match="request 1 has page 2 of a cache of 2; use 0 to 1"):
        cache.batch([[0], [2]], [1, 1], [1, 1])
    with pytest.raises(ConfigError, match="request 0 has 3 new tokens of 2; use 0 to 2"):
        cache.batch([[0]], [2], [3])
    with pytest.raises(ConfigError, match="2 page tables, 1 lengths"):
        cache.batch([[0], [1]], [1], [1])
    q = torch.randn(2, 1, 4)
    with pytest.raises(ConfigError, match=r"no kernel 'refrence' for packed_attention .* did you mean 'reference'"):
        Packed.of([2], kernels="refrence")(q, q, q)
    assert kernel_names("packed_attention", "cpu", torch.float32) == ["sdpa", "reference"]


OWN_ROUTER = """
import torch
from colonnade.nn import RouterInput, RouterOutput, router

@router("first_two", gate=False)
def first_two(inputs: RouterInput) -> RouterOutput:
    T, E = len(inputs.raw_TD), inputs.moe.experts
    ids = torch.arange(2).expand(T, 2).contiguous()
    return RouterOutput(ids, inputs.logits_TE.new_full((T, 2), 0.5), inputs.logits_TE.new_full((T, E), 1 / E))
"""


def _is_registered() -> bool:
    return "first_two" in ROUTERS


@pytest.fixture
def own_router(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module with a router, which is not registered yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(plugins, "_loaded", [])
    monkeypatch.delitem(sys.modules, "my_routers", raising=False)
    monkeypatch.setitem(ROUTERS, "first_two", ROUTERS["softmax"])  # removed again at the end
    del ROUTERS["first_two"]
    (tmp_path / "my_routers.py").write_text(OWN_ROUTER)


@pytest.mark.slow
def test_import_registers_a_router_in_all_processes(own_router: None) -> None:
    with pytest.raises(SystemExit):
        main(["no_such_verb", "--import", "my_routers"])
    assert launch(_is_registered, (), Plan(dp=2))


def test_import_registers_a_router(own_router: None, capsys: pytest.CaptureFixture[str]) -> None:
    moe = MoeConfig(experts=4, ffn_width=6, router=RouterConfig(kind="first_two"))
    with pytest.raises(ConfigError, match=r"there is no router 'first_two'.*; a custom router needs --import MODULE"):
        MoE(D, moe)
    with pytest.raises(SystemExit):
        main(["no_such_verb", "--import", "my_routers"])
    assert MoE(D, moe)(torch.randn(3, D)).load_E.tolist() == [3, 3, 0, 0]
    for words in (["train", "--import"], ["train", "--import", "--train.lr"], ["train", "--import="]):
        with pytest.raises(SystemExit):
            main(words)
        assert "--import needs the name of a module" in capsys.readouterr().err


def test_import_errors_name_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from colonnade.config.plugins import load_plugin

    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"--import my_lost_routers: no module 'my_lost_routers' in .* set PYTHONPATH"
    ):
        load_plugin("my_lost_routers")
    (tmp_path / "my_broken_routers.py").write_text("import no_such_thing")
    with pytest.raises(ConfigError, match="no module 'no_such_thing', which my_broken_routers imports"):
        load_plugin("my_broken_routers")
    (tmp_path / "my_failing_routers.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match="the module failed with ZeroDivisionError"):
        load_plugin("my_failing_routers")

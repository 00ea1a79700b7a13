"""Ring attention equals attention in one process: values, and gradients of queries, keys and values."""

import itertools

import pytest
import torch

from colonnade.config import Plan
from colonnade.model import Dropout, DropoutRates
from colonnade.model.attend import Packed
from colonnade.model.context_parallel import Ring
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import PARTIAL, layout_of, local_part
from colonnade.train.train_step import forward
from colonnade.verify.trial import batch
from tests.models import BERTS, CONFIGS, build
from tests.worlds import assert_same, run

N, K, H = 4, 2, 3
CASES = {
    "equal, divides by two chunks a rank": [24],
    "two equal": [12, 12],
    "equal, does not divide": [7, 7],
    "ragged": [5, 0, 1, 17, 4, 0],
    "one long among short": [1, 30, 1],
    "fewer tokens than chunks": [3],
    "one token": [1],
}


def _ring(world: int) -> None:
    with DistributedContext.build(Plan(cp=world)) as context:
        for (name, lengths), causal, window, rate in itertools.product(
            CASES.items(), (True, False), (None, 1, 4), (0.0, 0.3)
        ):
            what = f"{name}, {causal=}, {window=}, {rate=}"
            T = sum(lengths)
            draw = torch.Generator().manual_seed(T)
            q, k, v, go = (
                torch.randn(T, heads, H, generator=draw, dtype=torch.float64).requires_grad_() for heads in (N, K, K, N)
            )
            noise = Dropout.of(0, 1, 3, torch.arange(T) + 50, DropoutRates(attention=rate))
            packed = Packed.of(lengths, causal=causal, window=window, kernels="reference", dropout=noise, first_head=5)
            o = packed.at(2, window)(q, k, v)
            o.backward(go)
            ring = Ring.of(packed, T, context.axes.cp)
            mine = ring.index_t
            here = [x.detach()[mine].requires_grad_() for x in (q, k, v)]
            o_t = ring.at(2, window)(*here)
            o_t.backward(go[mine])
            assert_same(o_t, o[mine], what=what)
            for x, part in zip((q, k, v), here, strict=True):
                assert part.grad is not None and x.grad is not None
                assert_same(part.grad, x.grad[mine], what=f"{what}, gradient")


@pytest.mark.sample(1)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_ring_attention_equals_one_process(world: int) -> None:
    run(world, _ring, world)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("lengths", CASES.values(), ids=CASES.keys())
def test_each_token_is_assigned_to_one_rank(lengths: list[int], ranks: int) -> None:
    from colonnade.model.context_parallel import zigzag_shards

    indices = torch.cat([share.both.index_T for share in zigzag_shards(Packed.of(lengths), sum(lengths), ranks)])
    assert indices.sort().values.tolist() == list(range(sum(lengths)))


def test_zigzag_shards_balance_causal_work() -> None:
    """The queries of each rank attend to the same number of keys: the purpose of the zig-zag."""
    from colonnade.model.context_parallel import zigzag_shards

    visible = [int((share.both.index_T + 1).sum()) for share in zigzag_shards(Packed.of([64]), 64, 4)]
    assert len(set(visible)) == 1


def _fewer_tokens_than_ranks(plan: Plan, lengths: list[int]) -> None:
    with DistributedContext.build(plan) as context:
        for name, config in {"llama": CONFIGS["llama"], "bert": BERTS["pre_pretraining"]}.items():
            micro = batch(lengths, 0, 4, config)
            whole, mine = build(config), build(config, context.axes)
            loss = forward(whole, micro)
            loss.backward()
            here = forward(mine, micro)
            here.backward()
            cp, tp, layout = context.axes.cp, context.axes.tp, layout_of(mine)
            assert_same(cp.sum_(here), loss, what=name)
            for key, p in mine.named_parameters():
                assert p.grad is not None, "a rank without gradients would miss FSDP's reduce-scatter"
                grad = cp.sum_(p.grad)
                grad = tp.sum_(grad) if layout[key] is PARTIAL else grad
                assert_same(
                    grad, local_part(whole.get_parameter(key).grad, layout[key], context.axes), what=f"{name} {key}"
                )


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("plan", "lengths"),
    [(Plan(cp=3), [2]), (Plan(cp=3), [1, 1]), (Plan(cp=2), [1]), (Plan(cp=2, tp=2, sequence_parallel=True), [1])],
    ids=str,
)
def test_ranks_without_tokens_are_supported(plan: Plan, lengths: list[int]) -> None:
    """With fewer tokens than ranks, the last ranks have neither masked tokens nor first tokens of a sequence."""
    run(plan.world, _fewer_tokens_than_ranks, plan, lengths)

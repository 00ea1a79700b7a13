"""A tensor-parallel model equals one process: loss, logits, every gradient, greedy tokens."""

import pytest
import torch

from colonnade.config import ModelConfig, Plan
from colonnade.errors import PlanError
from colonnade.model import Loss, Packed, Rows, Stream
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.layout import PARTIAL, layout_of, local_part
from tests.models import CONFIGS, THREE_KV_HEADS, build, pairwise, ragged
from tests.worlds import assert_same, run


def _check(config: ModelConfig, world: int, sequence_parallel: bool = False) -> None:
    with DistributedContext.build(Plan(tp=world, sequence_parallel=sequence_parallel)) as context:
        tp = context.axes.tp
        whole, mine = build(config), build(config, context.axes)
        layout = layout_of(mine)
        for name, p in whole.named_parameters():
            assert_same(mine.get_parameter(name), local_part(p, layout[name], context.axes), what=f"initial {name}")
        stream, attend, targets = ragged(config)
        for smoothing in (0.0, 0.1):
            for model in (whole, mine):
                model.zero_grad()
                total, count = model(stream, attend, Loss(targets, smoothing))
                (total / count).backward()
                model.last = total.detach(), count
            assert_same(mine.last[0], whole.last[0], what="loss")
            assert mine.last[1] == whole.last[1]
            for name, p in mine.named_parameters():
                grad = tp.sum_(p.grad) if layout[name] is PARTIAL else p.grad
                assert_same(
                    grad,
                    local_part(whole.get_parameter(name).grad, layout[name], context.axes),
                    what=f"gradient of {name}",
                )
        with torch.no_grad():
            assert_same(mine(stream, attend, Rows()), whole(stream, attend, Rows()), what="logits")
            assert greedy(mine) == greedy(whole)


def greedy(model, steps: int = 6) -> list[int]:
    tokens = [1, 2, 3]
    for _ in range(steps):
        T = len(tokens)
        stream = Stream(torch.tensor(tokens), torch.arange(T))
        tokens.append(int(model(stream, Packed.of([T]), Rows(torch.tensor([T - 1]))).argmax()))
    return tokens


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "world", "sequence_parallel"), pairwise(CONFIGS))
def test_tensor_parallel_equals_one_process(name: str, world: int, sequence_parallel: bool) -> None:
    run(world, _check, CONFIGS[name], world, sequence_parallel)


def test_fewer_tokens_than_ranks() -> None:
    """With sequence parallelism, a rank may hold no rows of the residual stream."""
    assert run(4, _fewer_tokens_than_ranks, [1, 1]) == run(4, _fewer_tokens_than_ranks, [2]) == [None] * 4


def _fewer_tokens_than_ranks(lengths: list[int]) -> None:
    config = CONFIGS["gpt2"]
    with DistributedContext.build(Plan(tp=4, sequence_parallel=True)) as context:
        whole, mine = build(config), build(config, context.axes)
        stream, attend, targets = ragged(config, lengths)
        targets = targets.clamp(min=0)
        for model in (whole, mine):
            model(stream, attend, Loss(targets))[0].backward()
        layout = layout_of(mine)
        for name, p in mine.named_parameters():
            grad = context.axes.tp.sum_(p.grad) if layout[name] is PARTIAL else p.grad
            assert_same(grad, local_part(whole.get_parameter(name).grad, layout[name], context.axes), what=name)


def test_three_kv_heads_with_tp_3() -> None:
    run(3, _check, THREE_KV_HEADS, 3)


def test_kv_heads_must_divide() -> None:
    with pytest.raises(PlanError, match=r"3 key/value heads cannot be divided over tp=2; use tp of 1 or 3"):
        Plan(tp=2).check(THREE_KV_HEADS)


def _logits_gradient() -> None:
    """The gradient of the Rows head: every rank differentiates the same joined logits."""
    config = CONFIGS["llama"]
    with DistributedContext.build(Plan(tp=2)) as context:
        whole, mine = build(config), build(config, context.axes)
        stream, attend, _ = ragged(config)
        for model in (whole, mine):
            model(stream, attend, Rows(torch.tensor([3, 5]))).pow(2).sum().backward()
        layout = layout_of(mine)
        for name, p in mine.named_parameters():
            assert_same(p.grad, local_part(whole.get_parameter(name).grad, layout[name], context.axes), what=name)


def test_gradient_through_joined_logits() -> None:
    run(2, _logits_gradient)

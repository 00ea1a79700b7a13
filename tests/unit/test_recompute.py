"""Recomputation gives the same bits and saves memory, within a budget."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import set_checkpoint_debug_enabled

from colonnade.config import ModelConfig, TrainConfig
from colonnade.errors import CapacityError, ConfigError
from colonnade.model import Loss, Transformer
from colonnade.model.activation_checkpointing import RECOMPUTE_KINDS, RecomputeKind, set_recompute
from colonnade.parallel.axis import SOLO, world_axis
from colonnade.train.activation_memory import (
    RecomputeChoice,
    choose_kinds,
    configure_recompute,
    measure_block_bytes,
    saved_for_backward_bytes,
)
from tests import encdec
from tests.models import CONFIGS, build, ragged
from tests.worlds import assert_same
from tests.worlds import run as in_world

MIXED: list[RecomputeKind] = ["full", "attention", "none"]


def train_once(config: ModelConfig, kinds: list[RecomputeKind]):
    """(loss, gradients, saved bytes) of one forward and backward pass in float64."""
    model = build(config)
    set_recompute(model.blocks, kinds)
    stream, attend, targets = ragged(config)
    saved_bytes = saved_for_backward_bytes(model, lambda: model(stream, attend, Loss(targets))[0])
    loss, _ = model(stream, attend, Loss(targets))
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, saved_bytes


@pytest.mark.parametrize("name", CONFIGS)
def test_values_and_gradients_are_bitwise_equal(name: str) -> None:
    config = CONFIGS[name].replace(layers=3)
    loss, grads, saved = train_once(config, ["none"] * 3)
    for kinds in (["attention"] * 3, ["full"] * 3, MIXED):
        again, others, less = train_once(config, kinds)
        assert torch.equal(again, loss)
        for parameter, grad in grads.items():
            assert torch.equal(others[parameter], grad), f"{parameter} with {kinds}"
        assert less < saved


@pytest.mark.parametrize("name", ["t5", "switch", "nllb"])
def test_both_stacks_recompute_bit_for_bit(name: str) -> None:
    config = {"t5": encdec.t5("1.1"), "switch": encdec.switch(), "nllb": encdec.nllb()}[name]

    def once(kind: RecomputeKind) -> tuple[Tensor, dict[str, Tensor | None], int]:
        model = encdec.random_model(config).train().requires_grad_()
        configure_recompute(model, TrainConfig(recompute=kind), pytest.fail, pytest.fail, SOLO)
        stream, attend = encdec.inputs(encdec.texts([7, 4], 50), encdec.texts([5, 3], 50))
        run = lambda: model(stream, attend, Loss(stream.tokens_T))[0]  # noqa: E731
        saved = saved_for_backward_bytes(model, run)
        loss = run()
        loss.backward()
        return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, saved

    loss, gradients, saved = once("none")
    assert gradients["encoder_blocks.1.ffn.up.weight" if name == "t5" else "encoder_blocks.0.ffn.up.weight"] is not None
    for kind in ("attention", "full"):
        again, others, less = once(kind)
        assert torch.equal(again, loss)
        for parameter, gradient in gradients.items():
            other = others[parameter]
            assert (other is None) == (gradient is None)
            assert other is None or (gradient is not None and torch.equal(other, gradient)), f"{parameter}, {kind}"
        assert less < saved
        saved = less


def test_a_budget_over_two_stacks_is_refused() -> None:
    model, train = encdec.random_model(encdec.t5()), TrainConfig(recompute="budget", activation_bytes=1)
    with pytest.raises(ConfigError, match=r"budget supports one stack of blocks.* set train.recompute to attention"):
        configure_recompute(model, train, pytest.fail, pytest.fail, SOLO)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("kind", ["none", "full"])
def test_blocks_of_two_stacks_compile_once(kind: RecomputeKind) -> None:
    """One graph for all layers of a stack, relative biases and cross attention included; the same gradients."""
    torch._dynamo.reset()
    config = encdec.t5("1.1")
    model, plain = (encdec.random_model(config).train().requires_grad_() for _ in range(2))
    counter = CompileCounterWithBackend("aot_eager")
    for net in (model, plain):
        stacks = [*net.blocks, *net.encoder_blocks]
        set_recompute(stacks, [kind for _ in stacks])
    for block in (*model.blocks, *model.encoder_blocks):
        block.compile(backend=counter, fullgraph=True)
    found = []
    for net in (model, plain):
        stream, attend = encdec.inputs(encdec.texts([7, 7], 50), encdec.texts([5, 5], 50))
        loss, _ = net(stream, attend, Loss(stream.tokens_T))
        loss.backward()
        found.append((loss.detach(), *(p.grad for p in net.parameters())))
    assert counter.frame_count == 2
    for got, right in zip(*found, strict=True):
        assert_same(got, right, 1e-12)


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("kind", ["attention", "full"])
def test_compiled_blocks_recompute(kind: RecomputeKind) -> None:
    torch._dynamo.reset()
    config = CONFIGS["qwen3_window_tied"].replace(window=None)
    model, plain = build(config), build(config)
    set_recompute(model.blocks, [kind] * 2)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    stream, attend, targets = ragged(config, [9, 9])  # one graph cannot read the lengths of ragged ones
    losses = []
    for it in (model, plain):
        loss, _ = it(stream, attend, Loss(targets))
        loss.backward()
        losses.append(loss)
    assert_same(losses[0], losses[1])
    for name, p in model.named_parameters():
        assert_same(p.grad, plain.get_parameter(name).grad, what=name)
    saved = [saved_for_backward_bytes(it, lambda it=it: it(stream, attend, Loss(targets))[0]) for it in (model, plain)]
    assert saved[0] < saved[1]
    torch._dynamo.reset()


def test_measured_bytes_of_a_block_are_right() -> None:
    """Three more blocks save three times the measured bytes; fully recomputed blocks save only their input."""
    config = CONFIGS["llama"]
    stream, attend, targets = ragged(config)

    def run(model: Transformer) -> torch.Tensor:
        return model(stream, attend, Loss(targets))[0]

    block = measure_block_bytes(lambda it: Transformer(it, dtype=torch.float64), config, run, SOLO)
    assert block["full"] == stream.tokens_T.numel() * config.width * 8 < block["attention"] < block["none"]
    for kind in RECOMPUTE_KINDS:
        five, two = (train_once(config.replace(layers=layers), [kind] * layers)[2] for layers in (5, 2))
        assert five - two == 3 * block[kind]


def _measure_on_rank(sizes: tuple[int, ...]) -> dict[RecomputeKind, int]:
    """The measured bytes of a block where rank r's block saves ``sizes[r]`` numbers."""

    def run(model: Transformer) -> torch.Tensor:
        x = torch.zeros(sizes[world_axis().rank], dtype=torch.float64, requires_grad=True)
        for _ in model.blocks:
            x = x.exp()
        return x

    make = lambda it: Transformer(it, dtype=torch.float64)  # noqa: E731
    return measure_block_bytes(make, CONFIGS["llama"], run, world_axis())


def test_measured_bytes_are_the_maximum_over_ranks() -> None:
    assert in_world(2, _measure_on_rank, (30, 40)) == [dict.fromkeys(RECOMPUTE_KINDS, 40 * 8)] * 2


@given(
    costs=st.tuples(*[st.integers(1, 1000)] * 3), blocks=st.integers(1, 40), share=st.floats(0, 1.5),
)  # fmt: skip
def test_budget_is_met_with_the_least_recomputation(costs: tuple[int, int, int], blocks: int, share: float) -> None:
    full, attention, none = sorted(costs)
    block: dict[RecomputeKind, int] = {"none": none, "attention": attention, "full": full}
    allowed = int(share * blocks * none)
    if allowed < blocks * full:
        with pytest.raises(CapacityError, match=f"set it to at least {blocks * full}"):
            choose_kinds(block, blocks, allowed)
        return
    kinds = choose_kinds(block, blocks, allowed)
    assert len(kinds) == blocks and sum(block[kind] for kind in kinds) <= allowed
    assert kinds == sorted(kinds, key=["full", "attention", "none"].index), "the first blocks are recomputed"
    for lighter in (("full", "attention"), ("attention", "none"), ("full", "none")):
        if lighter[0] in kinds and not ("full" in kinds and lighter[0] == "attention"):
            spared = [*kinds]
            spared[kinds.index(lighter[0])] = lighter[1]
            assert sum(block[kind] for kind in spared) > allowed, f"one block less in {lighter[0]} would have fitted"


def test_attention_recompute_that_frees_nothing_is_skipped() -> None:
    assert choose_kinds({"none": 10, "attention": 12, "full": 1}, 3, 21) == ["full", "none", "none"]


def test_first_line_of_a_run_reports_recomputation() -> None:
    choice = RecomputeChoice(["full", "none"], {"none": 1 << 20, "attention": 1 << 19, "full": 1 << 10}, 3 << 19)
    assert str(choice) == (
        "recompute in 2 blocks: 1 none, 1 full; they save 1.001 MiB of the 1.5 MiB allowed for a micro-batch "
        "(2 MiB without recomputation, 2 KiB with full)"
    )


def test_recomputation_runs_the_same_operators() -> None:
    with set_checkpoint_debug_enabled(True):
        train_once(CONFIGS["gpt2"], ["full", "attention"])

"""Training steps as CUDA graphs, tested on a CPU: graph inputs, graph keys, replay, and refusals."""

from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from colonnade.config import DataConfig, ModelConfig, MoeConfig, Plan, RunConfig, TrainConfig
from colonnade.config.presets import preset
from colonnade.data import Batch
from colonnade.errors import ConfigError
from colonnade.parallel.axis import SOLO
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.parallel.fsdp import masters
from colonnade.train import Trainer
from colonnade.train.cuda_graph import CapturedGraph, GraphedForwardBackward, graph_inputs, graph_key, with_graph_inputs
from colonnade.train.loss_scaler import LossScaler
from colonnade.train.model_inputs import StepContext, step_dropout
from colonnade.train.train_step import StepMetrics, TrainStep, count_targets, forward_backward, order_loss_weight
from colonnade.train.training_state import make_optimizer
from tests.models import build
from tests.parity.train_cases import CASES, ragged

MODEL = ModelConfig(vocab_size=300, layers=1, width=16, heads=2, ffn_width=32, context=32)
TRAIN = TrainConfig(batch=4, micro_batch=4, dtype="bfloat16", cuda_graph=True)
RUN = RunConfig(model=MODEL, train=TRAIN, data=DataConfig(sequence=16), device="cpu")


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_a_captured_step_reads_only_its_graph_inputs(name: str) -> None:
    """After the step's own tensors are zeroed, running on copies still gives the same loss and gradients."""
    config = CASES[name]
    model = build(config)
    train = TrainConfig(dropout=0.2, attention_dropout=0.2, embedding_dropout=0.2)
    batch = ragged(1, config)
    count = count_targets([batch], SOLO)
    terms = StepContext(0.05, order_loss_weight([batch], count, SOLO), step_dropout(train, 3, config, count.device))
    exact = forward_backward(model, batch, count, terms).clone()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)

    inputs = graph_inputs(batch, count, terms)
    copies = {name: x.clone() for name, x in inputs.items()}
    graph_arguments = with_graph_inputs(batch, terms, copies)
    for x in inputs.values():
        x.zero_()
    assert torch.equal(forward_backward(model, *graph_arguments), exact)
    for p, gradient in zip(model.parameters(), gradients, strict=True):
        assert (p.grad is None) is (gradient is None)
        assert p.grad is None or gradient is None or torch.equal(p.grad, gradient)
    tensors = {field.name for field in fields(Batch) if isinstance(getattr(batch, field.name), torch.Tensor)}
    assert set(copies) == tensors | {"divisor", "keys"} | ({"order_loss_weight"} if name == "bert" else set())


def test_graph_key_depends_on_shapes_and_settings_not_on_values() -> None:
    config = CASES["gpt2"]
    batch, count = ragged(1, config), torch.tensor(13)
    train = TrainConfig(dropout=0.2)

    def key(batch: Batch, step: int = 0, train: TrainConfig = train, smoothing: float = 0.0) -> object:
        terms = StepContext(smoothing, dropout=step_dropout(train, step, config, torch.device("cpu")))
        return graph_key(batch, terms, graph_inputs(batch, count, terms))

    same = replace(batch, tokens_T=batch.tokens_T + 1)
    assert key(same, 7) == key(batch, 0) and hash(key(same)) == hash(key(batch))
    others = [
        key(replace(batch, cu_seqlens=torch.cat((batch.cu_seqlens, batch.cu_seqlens[-1:])))),
        key(replace(batch, longest=batch.longest + 1)),
        key(replace(batch, first=5)),
        key(batch, train=train.replace(dropout=0.1)),
        key(batch, train=train.replace(dropout=0.0)),
        key(batch, smoothing=0.1),
    ]
    assert len({key(batch), *others}) == 1 + len(others)


class FakeGraphedForwardBackward(GraphedForwardBackward):
    """A stand-in without CUDA graphs: replay reruns the passes on the graph's inputs into its outputs."""

    def _capture(self, batch: Batch, terms: StepContext, inputs: dict[str, torch.Tensor]) -> CapturedGraph:
        captured = super()._capture(batch, terms, inputs)

        def replay() -> None:
            for x, _ in captured.gradients:
                x.grad = None
            captured.loss_sum.copy_(self._run(*with_graph_inputs(batch, terms, captured.inputs)))
            for x, gradient in captured.gradients:
                assert x.grad is not None
                gradient.copy_(x.grad)

        replays = mock.Mock()
        replays.replay = replay
        return replace(captured, graph=replays)


@pytest.mark.sample(1)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_replayed_steps_equal_eager_steps(fused: bool, dtype: str) -> None:
    """Two shapes, dropout, clipping and a float16 overflow: weights, moments and metrics are bitwise equal."""
    config, results = CASES["gpt2"], []
    train = TRAIN.replace(
        dtype=dtype, fused_adamw=fused, dropout=0.2, clip=0.05, steps=12, warmup=2, loss_scale=2.0**40
    )
    cpu = torch.device("cpu")
    cuda_stubs = dict.fromkeys(
        ("Stream", "CUDAGraph", "current_stream", "stream", "graph", "graph_pool_handle"), mock.DEFAULT
    ) | {"max_memory_allocated": lambda _: 77}
    for graphed in (False, True):
        model = build(config, dtype=torch.float32)
        master_weights = masters(model, DistributedContext.solo(), getattr(torch, dtype), single=fused)
        scaler = LossScaler(train, cpu) if dtype == "float16" else None
        step = TrainStep(model, master_weights, make_optimizer(master_weights, train), train, SOLO, scaler=scaler)
        outcomes: list[StepMetrics] = []
        with mock.patch.multiple(torch.cuda, **cuda_stubs), mock.patch("colonnade.train.cuda_graph.check_device"):
            if graphed:
                step.forward_backward = FakeGraphedForwardBackward(
                    step.forward_backward, (*model.parameters(), *master_weights.local.values()), cpu
                )
            for i in range(12):
                batch = replace(ragged(i, config), longest=13)
                if i % 3 == 2:
                    batch = replace(batch, cu_seqlens=torch.cat((batch.cu_seqlens, batch.cu_seqlens[-1:])))
                outcomes.append(step(i, [batch]))
        if graphed:
            assert isinstance(step.forward_backward, FakeGraphedForwardBackward)
            assert len(step.forward_backward._graphs) >= 2 and step.capture_peak_bytes == 77
        results.append((master_weights.local, step.optimizer_step.optimizer.state, outcomes))
    (weights, moments, outcomes), (graph_weights, graph_moments, graph_outcomes) = results
    for name, w in weights.items():
        assert torch.equal(graph_weights[name], w), name
    for name, moment in moments.items():
        assert torch.equal(graph_moments[name], moment), name
    for ours, theirs in zip(graph_outcomes, outcomes, strict=True):
        assert torch.equal(ours.loss_sum, theirs.loss_sum) and ours.lr == theirs.lr
        assert torch.equal(ours.norm.nan_to_num(), theirs.norm.nan_to_num())
    assert len({float(outcome.loss_sum) for outcome in outcomes}) == 12


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": Plan(pp=2), "model": MODEL.replace(layers=2), "train": TRAIN.replace(micro_batch=2)}, "pp=2"),
        ({"plan": Plan(cp=2)}, "cp=2"),
        ({"plan": Plan(dp=2)}, "dp=2"),
        ({"plan": Plan(dp=1, replicate=2)}, "dp=2"),
        ({"model": MODEL.replace(moe=MoeConfig(experts=4, active=2, ffn_width=8))}, "dense"),
        ({"train": TRAIN.replace(micro_batch=2)}, "2 micro-batches of 2; set train.micro_batch 4"),
        ({"train": TRAIN.replace(dtype="float32")}, "one at a time.*separate_documents"),
        ({"model": MODEL.replace(head_width=4)}, "heads of width 4"),
        ({"model": preset("bert-base").replace(head_width=4)}, "one at a time"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_captured_is_refused_with_a_remedy(changes: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RUN.replace(**changes)
    assert RUN.replace(plan=Plan(tp=2)).train.cuda_graph
    equal = RUN.data.replace(separate_documents=False)
    assert RUN.replace(train=TRAIN.replace(dtype="float32"), data=equal).train.cuda_graph


def test_a_cpu_is_refused(tmp_path: Path) -> None:
    for call in (
        lambda: GraphedForwardBackward(lambda *_: torch.zeros(()), [], torch.device("cpu")),
        lambda: Trainer(RUN.replace(runs=tmp_path, plan=Plan(tp=2))),
    ):
        with pytest.raises(ConfigError, match="needs a GPU, but this run is on the cpu"):
            call()

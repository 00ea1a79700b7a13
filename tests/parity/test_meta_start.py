"""A sharded run is built from shards: no rank ever holds a full model that FSDP shards, however it starts."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from colonnade.config import DataConfig, ModelConfig, Plan, RunConfig, TrainConfig
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.loop import train
from colonnade.train.training_state import TrainingState
from tests import corpora
from tests.worlds import run as in_world

MODEL = ModelConfig(vocab_size=300, layers=12, width=64, heads=4, ffn_width=176, context=32, tied=True)
TRAIN = TrainConfig(steps=1, batch=4, micro_batch=1, eval_every=0, async_save=False)
WHOLE_BYTES = 4 * MODEL.parameters
MOST = 1.2
"""In units of the full model; a rank that held all weights would need 1.5. Buffers of the allocator vary by 0.1."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("data")
    data = DataConfig(path=corpora.small(folder / "corpus"), sequence=16)
    return RunConfig(name="it", runs=folder / "runs", device="cpu", model=MODEL, data=data, train=TRAIN)


def _peak(run: RunConfig, checked: bool) -> float:
    """Peak memory while a run starts, in units of the full model; checks that its weights equal one process's."""
    with DistributedContext.build(run.plan, "cpu") as context:
        with (
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
            TrainingState(run, context) as training,
        ):
            pass
        if checked:
            whole = dict(initialise(Transformer(run.model), run.train.seed).named_parameters())
            for name, shard in training.masters.local.items():
                start, stop = context.shard.part(len(whole[name]))
                assert torch.equal(shard, whole[name][start:stop]), name
    assert profiled.profiler is not None and profiled.profiler.kineto_results is not None
    mapped = {
        path.stat().st_size for path in run.runs.rglob("*.safetensors")
    }  # mapped files are counted, but use no memory of the process
    deltas = [event.nbytes() for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    deltas = [delta for delta in deltas if abs(delta) not in mapped]
    assert deltas, "the profiler recorded allocations"
    return torch.tensor(deltas).cumsum(0).max().item() / WHOLE_BYTES


@pytest.mark.sample(1)
@pytest.mark.parametrize("plan", [Plan(dp=4), Plan(dp=2, cp=2)], ids=str)
def test_no_rank_ever_holds_the_whole_model(config: RunConfig, plan: Plan) -> None:
    """A quarter of the weights and of each moment plus the largest parameter, not 1 and 2/4 of the model."""
    for share in in_world(4, _peak, config.replace(plan=plan), True):
        assert 0.7 < share < MOST


@pytest.mark.slow
def test_loading_weights_or_resuming_never_holds_the_whole_model(config: RunConfig, tmp_path: Path) -> None:
    one = config.replace(name="one", runs=tmp_path)
    train(one)
    from_weights = one.replace(
        name="began", plan=Plan(dp=4), train=TRAIN.replace(pretrained_checkpoint=str(one.folder))
    )
    resumed = one.replace(plan=Plan(dp=4), train=TRAIN.replace(steps=2))
    for run in (from_weights, resumed):
        for share in in_world(4, _peak, run, False):
            assert 0.7 < share < MOST

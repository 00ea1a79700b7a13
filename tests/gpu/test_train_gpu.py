"""Training on a GPU: no synchronisation between log lines, and resuming is bitwise exact."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from colonnade.config import DataConfig, ModelConfig, MoeConfig, RouterConfig, RunConfig, TrainConfig
from colonnade.data import build
from colonnade.errors import CapacityError
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train import Trainer
from colonnade.train.loop import StopSignal
from colonnade.train.memory_estimate import estimate
from colonnade.train.optimizer import FusedAdamW
from colonnade.train.run_log import RunLog
from colonnade.train.training_state import TrainingState

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic

# torch.compile, which the loss uses on a GPU, emits warnings of its own.
pytestmark = pytest.mark.filterwarnings("ignore")

WORDS = ["column", "row", "share", "whole", "bears", "stands", "weight", "of", "the", "and"]
MOE = MoeConfig(experts=8, active=2, ffn_width=64, shared_width=32, z_weight=0.01, bias_rate=0.01)
MOES: dict[str, MoeConfig | None] = {
    "none": None,
    "dropless": MOE,
    "capacity": MOE.replace(capacity=1.0, router=RouterConfig(noise=1.0, jitter=0.1)),
    "hash": MOE.replace(bias_rate=0.0, router=RouterConfig(kind="hash")),
    "topology": MOE.replace(bias_rate=0.0, router=RouterConfig(kind="topology", nodes=2)),
}
MODEL = ModelConfig(vocab_size=300, layers=2, width=128, heads=4, kv_heads=2, ffn_width=256, context=64, tied=True)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    texts = [(str(i), " ".join(WORDS[(i * j + j) % 10] for j in range(8 + 7 * i % 90))) for i in range(200)]
    build(texts, tmp_path / "corpus", vocab_size=300, validation_share=0.2)
    t = TrainConfig(
        steps=8,
        batch=8,
        micro_batch=4,
        warmup=2,
        dtype="bfloat16",
        compile=False,
        fused_adamw=False,
        save_every=4,
        eval_every=0,
    )
    data = DataConfig(path=tmp_path / "corpus", sequence=64)
    return RunConfig(name="it", runs=tmp_path, device="cuda", model=MODEL, data=data, train=t)


# Float32 attention loops over ragged sequences, so it needs their lengths on the host: equal ones only.
@pytest.mark.parametrize(
    ("dtype", "separate_documents", "experts"),
    [("float32", False, "none"), ("bfloat16", True, "none"), *(("bfloat16", False, name) for name in MOES)],
)
def test_steps_do_not_synchronise(config: RunConfig, dtype: str, separate_documents: bool, experts: str) -> None:
    config = config.replace(model=MODEL.replace(moe=MOES[experts]))
    data, t = config.data.replace(separate_documents=separate_documents), config.train.replace(dtype=dtype)
    config = config.replace(data=data, train=t)
    with DistributedContext.build(config.plan, config.device) as context:
        training = TrainingState(config, context)
        with StopSignal(training.world) as stop, RunLog(training) as log:
            log.record(training.step())
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(5):
                    log.record(training.step())
                    assert stop.received() is None
            finally:
                torch.cuda.set_sync_debug_mode("default")
            log.report()
            assert log.row["loss"] < 7


@pytest.mark.parametrize("experts", ["none", "dropless", "capacity"])
def test_deterministic_run_resumes_bitwise(config: RunConfig, experts: str) -> None:
    config = config.replace(model=MODEL.replace(moe=MOES[experts]), train=config.train.replace(deterministic=True))
    Trainer(config).fit()
    again = config.replace(name="again")
    shutil.copytree(config.folder / "step-4", again.folder / "step-4")
    Trainer(again).fit()
    for path in sorted((config.folder / "step-8").glob("*.safetensors")):
        assert path.read_bytes() == (again.folder / "step-8" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("experts", ["none", "dropless"])
def test_gpu_defaults(config: RunConfig, experts: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Defaults: bfloat16 with float32 masters, fused AdamW, dense models compiled; the first log line names them."""
    dense = experts == "none"
    t = TrainConfig(steps=30, batch=8, warmup=2, lr=3e-3, min_lr=3e-4, save_every=0, eval_every=0, log_every=1)
    config = config.replace(model=MODEL.replace(moe=MOES[experts]), train=t)
    with DistributedContext.build(config.plan, config.device) as context:
        training = TrainingState(config, context)
        assert {p.dtype for p in training.model.parameters()} == {torch.bfloat16}
        assert {w.dtype for w in training.masters.local.values()} == {torch.float32}
        assert all((block._compiled_call_impl is not None) == dense for block in training.model.blocks)
        assert isinstance(training.optimizer, FusedAdamW)
    summary = Trainer(config).fit()
    compiled = "compiled, " if dense else ""
    assert f"on cuda, bfloat16 with float32 masters, {compiled}fused AdamW, " in capsys.readouterr().out
    assert summary.loss is not None and summary.loss < 3


def test_deterministic_disables_fast_defaults(config: RunConfig) -> None:
    with DistributedContext.build(config.plan, config.device) as context:
        training = TrainingState(config.replace(train=TrainConfig(deterministic=True)), context)
        assert {p.dtype for p in training.model.parameters()} == {torch.float32}
        assert all(block._compiled_call_impl is None for block in training.model.blocks)
        assert not isinstance(training.optimizer, FusedAdamW)


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}, {"recompute": "full"}], ids=str)
def test_memory_estimate_matches_peak(config: RunConfig, settings: dict) -> None:
    """Within a quarter of the allocator's peak."""
    model = ModelConfig(vocab_size=4096, layers=6, width=1024, heads=16, kv_heads=16, ffn_width=4096, context=1024)
    t = TrainConfig(steps=3, batch=8, micro_batch=8, warmup=1, save_every=0, eval_every=0, **settings)
    data = config.data.replace(sequence=512, separate_documents=False)
    config = config.replace(model=model, train=t, data=data)
    torch.cuda.empty_cache()
    with DistributedContext.build(config.plan, config.device) as context:
        before = torch.cuda.memory_allocated()
        training = TrainingState(config, context)
        peak = max(training.step().memory_bytes for _ in range(3)) - before
    assert sum(estimate(config, "cuda").device.values()) == pytest.approx(peak, rel=0.25)


def test_run_larger_than_free_memory_is_refused(config: RunConfig) -> None:
    """Refused before anything is allocated on the device."""
    huge = MODEL.replace(width=16384, heads=128, kv_heads=128, head_width=128, ffn_width=65536, layers=64)
    before = torch.cuda.memory_allocated()
    with pytest.raises(CapacityError, match=r"of a GPU's memory, and .* is free; nothing was allocated"):
        Trainer(config.replace(model=huge))
    with (
        DistributedContext.build(config.plan, config.device) as context,
        pytest.raises(CapacityError, match="nothing was allocated"),
    ):
        TrainingState(config.replace(model=huge), context)
    assert torch.cuda.memory_allocated() <= before  # less if garbage of other tests is collected meanwhile

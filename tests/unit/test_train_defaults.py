"""Device-dependent defaults: bfloat16, compiled, fused AdamW on a GPU; float32 and neither on a CPU."""

from pathlib import Path

import pytest

from colonnade.cli.main import main
from colonnade.config import ModelConfig, MoeConfig, Plan, RunConfig, TrainConfig
from colonnade.config.toml import dumps, parse
from colonnade.errors import ConfigError
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train import Trainer
from colonnade.train.run_log import precision_summary
from colonnade.train.training_state import TrainingState
from tests import corpora

MODEL = ModelConfig(vocab_size=300, layers=2, width=16, heads=2, kv_heads=1, ffn_width=32, context=512)
CPU, GPU = ("float32", False, False), ("bfloat16", True, True)


def resolved_settings(device: str, plan: Plan | None = None, **settings: object) -> tuple[str, object, object]:
    model = (
        MODEL.replace(moe=MoeConfig(experts=4, active=2, ffn_width=8)) if plan is not None and plan.ep > 1 else MODEL
    )
    t = RunConfig(model=model, plan=plan or Plan(), train=TrainConfig(**settings)).resolved(device).train
    return t.dtype, t.compile, t.fused_adamw


def test_unset_settings_follow_the_device() -> None:
    assert resolved_settings("cpu") == CPU
    assert resolved_settings("cuda") == GPU
    assert resolved_settings("cuda", deterministic=True) == CPU, "one flag restores it"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_explicit_settings_are_unchanged(device: str, dtype: str) -> None:
    for on in (False, True):
        assert resolved_settings(device, dtype=dtype, compile=on, fused_adamw=on) == (dtype, on, on)
        assert resolved_settings(device, dtype=dtype, compile=on, fused_adamw=on, deterministic=True) == (dtype, on, on)


def test_unsupported_settings_are_not_the_default() -> None:
    assert resolved_settings("cuda", offload="optimizer") == ("bfloat16", True, False)
    assert resolved_settings("cuda", Plan(pp=2, schedule="zero_bubble"), micro_batch=16) == ("bfloat16", False, True)
    assert resolved_settings("cuda", Plan(dp=2, ep=2)) == ("bfloat16", False, True), (
        "experts' loads change from step to step"
    )
    assert resolved_settings("cuda", float8="rowwise") == GPU
    assert resolved_settings("cpu", float8="rowwise") == ("bfloat16", False, False)
    graph = {"cuda_graph": True, "batch": 8, "micro_batch": 8}
    assert resolved_settings("cuda", **graph) == GPU, "16-bit ragged sequences can be captured"
    with pytest.raises(ConfigError, match="sequences of unequal lengths in float32"):
        resolved_settings("cuda", deterministic=True, **graph)


def test_saved_config_leaves_unset_settings_unset() -> None:
    run = RunConfig(model=MODEL)
    assert parse(RunConfig, dumps(run)) == run
    assert parse(RunConfig, dumps(run.resolved("cuda"))).train.fused_adamw is True


def test_first_line_reports_the_resolved_settings() -> None:
    t = TrainConfig()
    assert precision_summary(t.resolved("cpu")) == "float32"
    assert precision_summary(t.resolved("cuda")) == "bfloat16 with float32 masters, compiled, fused AdamW"
    assert precision_summary(t.replace(dtype="float16", compile=False).resolved("cuda")) == (
        "float16 with float32 masters, fused AdamW"
    )


def test_cpu_run_is_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = corpora.small(tmp_path / "corpus")
    train = TrainConfig(steps=1, batch=1, warmup=0, eval_every=0)
    run = RunConfig(runs=tmp_path, device="cpu", model=MODEL, train=train)
    run = run.replace(data=run.data.replace(path=corpus, sequence=16))
    Trainer(run).fit()
    assert "one process on cpu, float32, 16 tokens per step" in capsys.readouterr().out
    with DistributedContext.build(run.plan, "cpu") as context:
        t = TrainingState(run, context).run.train
        assert (t.dtype, t.compile, t.fused_adamw) == CPU, "the checkpoint's config must match"


def test_dry_run_reports_settings_and_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = corpora.small(tmp_path / "corpus")
    words = ["train", "--preset", "llama-3-8b", "--data.path", str(corpus), "--dry_run"]
    main([*words, "--device", "cpu"])
    output = capsys.readouterr()
    assert 'dtype = "auto"' in output.out
    assert "on cpu: float32; memory: about 23" in output.err
    main([*words, "--device", "cuda"])
    assert "on cuda: bfloat16 with float32 masters, compiled, fused AdamW; memory: about " in capsys.readouterr().err

"""Peak memory of short training runs and their estimates; a program, because it resets its process's peak."""

import gc
import json
import sys
from pathlib import Path

from colonnade.config import RunConfig
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.memory_estimate import estimate
from colonnade.train.training_state import TrainingState


def resident(row: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{row}:"))) << 10


def measured(run: RunConfig) -> int:
    """Peak growth of the process in bytes while ``run`` takes its steps and saves after each."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # resets the peak
    before = resident("VmRSS")
    with DistributedContext.build(run.plan, run.device) as context, TrainingState(run, context) as training:
        for _ in range(run.train.steps):
            training.step()
            if run.train.async_save:
                training.save()
                training.finish_save(wait=True)
    return resident("VmHWM") - before


if __name__ == "__main__":
    runs = [RunConfig.model_validate(run) for run in json.loads(sys.stdin.read())]
    pairs = [(measured(run), sum(estimate(run, "cpu").device.values())) for run in runs]
    print(json.dumps(pairs))

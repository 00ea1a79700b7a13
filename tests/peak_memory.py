"""The peak memory of short training runs and their estimates; run as a program, for it resets its own peak."""

import gc
import json
import sys
from pathlib import Path

from colonnade.config import RunConfig
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.memory_estimate import estimate
from colonnade.train.session import Session


def resident(row: str) -> int:
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(f"{row}:"))) << 10


def measured(run: RunConfig) -> int:
    """What the process grew by at most while ``run`` took its steps and saved after each [bytes]."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # the peak begins anew
    before = resident("VmRSS")
    with DistributedContext.build(run.plan, run.device) as context, Session(run, context) as session:
        for _ in range(run.train.steps):
            session.step()
            if run.train.async_save:
                session.save()
                session.finish_save(wait=True)
    return resident("VmHWM") - before


if __name__ == "__main__":
    runs = [RunConfig.model_validate(run) for run in json.loads(sys.stdin.read())]
    pairs = [(measured(run), sum(estimate(run, "cpu").device.values())) for run in runs]
    print(json.dumps(pairs))

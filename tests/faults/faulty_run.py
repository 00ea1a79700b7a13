"""A run whose rank 1 suffers faults, each once: ``python faulty_run.py FAULT,FAULT CONFIG``, by our
launcher or torchrun.
"""

import os
import signal
import sys
import time
from typing import Any
from unittest.mock import patch

from colonnade.checkpoint.dcp_storage import Writer
from colonnade.config import RunConfig
from colonnade.errors import ColonnadeError
from colonnade.parallel.launch import launch
from colonnade.train.loop import train
from colonnade.train.training_state import TrainingState

AT = 9
"""Steps taken when a fault strikes; the checkpoint of step 4 is complete by then, because that of step
8 was started.
"""


def work(faults: str, run: RunConfig) -> int:
    """Train; rank 1 fails in the middle of step 10, or while it writes step 8, the first time it gets there."""
    rank = int(os.environ["RANK"])
    run.runs.mkdir(parents=True, exist_ok=True)
    (run.runs / f"pid-{rank}").write_text(str(os.getpid()))

    def cause_fault(fault: str) -> None:
        struck = run.runs / f"struck by {fault}"
        if rank == 1 and fault in faults.split(",") and not struck.exists():
            struck.touch()
            if fault == "stuck":
                time.sleep(1000)
            os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)

    real_write, real_on_device = Writer.write_data, TrainingState._on_device

    def write_data(self: Writer, *args: Any) -> Any:
        if self.folder.name == "step-8":
            cause_fault("kill in save")
        return real_write(self, *args)

    def on_device(self: TrainingState, batches: Any) -> Any:
        if self.steps_taken == AT:
            for fault in ("kill in step", "stop", "stuck"):
                cause_fault(fault)
        return real_on_device(self, batches)

    with patch.object(Writer, "write_data", write_data), patch.object(TrainingState, "_on_device", on_device):
        return train(run).steps


if __name__ == "__main__":
    faults, run = sys.argv[1], RunConfig.model_validate_json(sys.argv[2])
    try:
        print("ended", launch(work, (faults, run), run.plan, run.train.restarts), flush=True)
    except ColonnadeError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        sys.exit(1)

"""Starts ``colonnade serve`` in a separate process."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.report import ROOT


@contextmanager
def running_server(
    model: str | Path, *flags: str, device: str = "cpu", root: Path = ROOT, **environment: str
) -> Iterator[tuple[str, int]]:
    """(URL, process id) of a server of ``model`` on any free port, from the checkout ``root``; stopped at the end."""
    command = [sys.executable, "-u", "-m", "colonnade", "serve", str(model), "--serve.port", "0", "--device", device]
    path = os.pathsep.join([str(root), *filter(None, sys.path)])  # also packages that only this process sees
    process = subprocess.Popen(
        [*command, *flags],
        cwd=root,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stderr is not None
        said = []
        try:
            for text in process.stderr:
                said.append(text)
                if text.startswith("serving "):
                    yield text.split()[3], process.pid
                    return
            raise RuntimeError(f"the server of {root} did not start: {''.join(said)}")
        finally:
            process.send_signal(signal.SIGTERM)
            process.stderr.read()

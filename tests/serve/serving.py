"""Server processes for tests: ``python -m tests.serve.serving JSON`` and context managers around it."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colonnade.config import Plan, ServeConfig
from colonnade.errors import ColonnadeError, Interrupted
from colonnade.model_spec import ModelSpec
from tests.serve import tiny

if TYPE_CHECKING:  # engine processes import this module too, and need neither client nor server
    import openai


AUXILIARY = ("colonnade.serve.grammar_check", "fork server for")
"""In the command lines of processes other than engines: grammars compile in one, tests start others from one."""


@dataclass
class Running:
    """A server that listens at ``url`` and keeps its temporary files in ``folder``."""

    process: subprocess.Popen
    url: str
    folder: Path
    greeting: str = ""

    @property
    def client(self) -> "openai.OpenAI":
        import openai

        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    @property
    def async_client(self) -> "openai.AsyncOpenAI":
        import openai

        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def engine_pids(self) -> list[int]:
        """Processes of the engine's session, whose leader is a child of the server, but for auxiliary ones."""
        command = ["ps", "-ww", "-eo", "pid=,ppid=,sid=,stat=,args="]
        rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        table = [row.split(maxsplit=4) for row in rows.splitlines() if not any(name in row for name in AUXILIARY)]
        leaders = {row[0] for row in table if int(row[1]) == self.process.pid and row[0] == row[2]}
        return [int(row[0]) for row in table if row[2] in leaders and not row[3].startswith("Z")]

    def stop(self, number: int = signal.SIGINT) -> tuple[int, str, str]:
        """Send a signal (0 sends none) and wait: exit code, output, errors."""
        if number:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


@contextmanager
def start(
    load: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    models: dict[str, dict[str, Any]] | None = None,
    **config: Any,
) -> Iterator[Running]:
    """A server that is still starting, without a URL; killed at the end if it still runs."""
    options = json.dumps(
        {
            "load": load or {}, "plan": plan or {}, "limits": limits or {}, "models": models or {},
            "config": {"port": 0, "log": "off", **config},
        }
    )  # fmt: skip
    command = [sys.executable, "-u", "-W", "error::RuntimeWarning", "-m", "tests.serve.serving", options]
    with tempfile.TemporaryDirectory(prefix="serve-") as folder:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder},
        )
        with process:
            try:
                yield Running(process, "", Path(folder))
            finally:
                if process.poll() is None:
                    process.terminate()
                    try:
                        process.communicate(timeout=120)
                    except subprocess.TimeoutExpired:
                        process.kill()


@contextmanager
def server(
    load: dict[str, Any] | None = None,
    plan: dict[str, Any] | None = None,
    limits: dict[str, Any] | None = None,
    models: dict[str, dict[str, Any]] | None = None,
    **config: Any,
) -> Iterator[Running]:
    """A tiny model served on a real socket, or several ``models``; ``limits`` are those of its connections."""
    names = ", ".join(models or ["tiny"])
    with start(load, plan, limits, models, **config) as running:
        assert running.process.stdout is not None
        line = running.process.stdout.readline()
        while "cores" in line or "ranks launch each kernel" in line:  # warnings that depend on the machine and the plan
            line = running.process.stdout.readline()
        assert line == f"loading {names}\n"
        line = running.process.stdout.readline()
        if not line.startswith(f"serving {names} at http://"):
            raise AssertionError(f"the server did not start: {line}{running.stop(0)}")
        running.url, running.greeting = line.removeprefix(f"serving {names} at ").split()[0], line
        yield running


def _open_model(load: dict[str, Any]) -> Any:
    """A model of these arguments of :func:`tiny.load`, or the one in the folder ``path``."""
    if "path" in load:
        return ModelSpec(load["path"], Plan(), ServeConfig(), "cpu", "float32").open_loader
    return partial(partial, tiny.load, **load)


def main() -> None:
    """Run ``colonnade serve`` for a tiny model: errors are one line and an exit code."""
    from colonnade.serve.api.connection import ConnectionLimits
    from colonnade.serve.server import serve

    options = json.loads(sys.argv[1])
    loads = options["models"] or {"tiny": options["load"]}
    try:
        serve(
            {name: _open_model(load) for name, load in loads.items()},
            Plan(**options["plan"]),
            ServeConfig(**options["config"]),
            device="cpu",
            limits=ConnectionLimits(**options["limits"]),
        )
    except ColonnadeError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except Interrupted as stop:
        sys.exit(128 + stop.signal)


if __name__ == "__main__":
    main()

"""Runs schemathesis, with all its checks, over a server's /openapi.json."""

import subprocess
import sys
from pathlib import Path

from tests.serve.serving import Running

CONFIG = """
[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 504]
[checks.positive_data_acceptance]
expected-statuses = ["2xx", 400, 404, 504]
"""
"""A body that fits the description can ask for another model or endpoint (404, 400), for more than the context, for a
grammar that nothing matches, or for less time than it takes (504)."""


def run_schemathesis(running: Running, folder: Path, *options: str, examples: int) -> str:
    """The report of a run without failures, which sends the same requests each time."""
    config = folder / "schemathesis.toml"
    config.write_text(CONFIG)
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        *("--config-file", str(config), "--no-color", "run", f"{running.url}/openapi.json", "--checks", "all"),
        *("--seed", "1", "--max-examples", str(examples), "--generation-database", "none", "--continue-on-failure"),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-3000:]
    return done.stdout

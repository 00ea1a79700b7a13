"""A short benchmark of guidellm, with synthetic prompts, has no error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.serving import Running

pytest.importorskip("guidellm", reason="needs guidellm: pip install --group clients")

pytestmark = pytest.mark.timeout(600)

REQUESTS = 40
OUTPUT_TOKENS = 8


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(running: Running, folder: Path, tmp_path: Path, route: str):
    report = tmp_path / "report.json"
    data = f"kind=synthetic_text,prompt_tokens=32,output_tokens={OUTPUT_TOKENS}"
    command = [
        *(sys.executable, "-m", "guidellm", "run", "--disable-console"),
        *("--backend", f"kind=openai_http,target={running.url},model=tiny,request_format={route}"),
        *("--tokenizer", f"kind=huggingface_auto,model={folder}", "--data", data),
        *("--profile", "kind=concurrent,streams=4", "--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", f"kind=json,path={report}"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (REQUESTS, 0, 0)
    for request in benchmark["requests"]["successful"]:  # the server's counts, which it streams with every chunk
        assert (
            request["output_metrics"]["text_tokens"] == OUTPUT_TOKENS and request["input_metrics"]["text_tokens"] > 30
        )

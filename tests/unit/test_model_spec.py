"""What a server's HTTP process finds out about a model without importing torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from colonnade.model_spec import _may_read_audio


@pytest.mark.parametrize(
    ("files", "may"),
    [
        ({"config.json": '{"model_type": "llama"}'}, False),
        ({"config.json": '{"model_type": "Whisper"}'}, True),
        ({"config.json": "{}", "model.bin": ""}, True),
        ({"checkpoint.json": '{"model": {"layers": 2}}'}, False),
        ({"step-1/checkpoint.json": '{"model": {"encoder": {"reads": "audio"}}}'}, True),
        ({"step-1/checkpoint.json": "{}"}, False),
        ({"adapter_config.json": "{}"}, True),
        ({}, True),
    ],
)
def test_only_models_that_may_read_audio_are_opened(files: dict[str, str], may: bool, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert _may_read_audio(tmp_path) == may


def test_packages_and_files() -> None:
    assert not _may_read_audio(Path("smollm2")) and not _may_read_audio(Path("some/model.gguf"))
    assert _may_read_audio(Path("whisper-tiny.en")) and _may_read_audio(Path("owner/name"))


def test_torch_is_not_imported_for_a_model_of_text() -> None:
    program = (
        "import sys; from colonnade.config import Plan, ServeConfig; from colonnade.model_spec import ModelSpec; "
        "spec = ModelSpec('smollm2', Plan(), ServeConfig(), 'cpu', 'auto'); "
        "sys.exit(spec.reads_audio() or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0

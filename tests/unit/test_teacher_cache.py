"""The identity of a teacher whose answers are cached."""

from pathlib import Path

from colonnade.train.teacher_cache import fingerprint


def test_teachers_that_differ_late_have_other_fingerprints(tmp_path: Path) -> None:
    for name, end in (("a", b"1"), ("b", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(bytes(1 << 20) + end)
    assert fingerprint(tmp_path / "a") != fingerprint(tmp_path / "b")

"""Disk space: too little is refused before writing, and a disk that fills up leaves no partial files."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from colonnade.checkpoint import atomic_folder, dcp_storage, native
from colonnade.checkpoint import atomic_folder as folders
from colonnade.config import Plan, RunConfig
from colonnade.errors import CapacityError, ConfigError
from colonnade.train import Trainer
from colonnade.train.loop import train
from colonnade.train.trackers import JsonLines
from tests.corpora import tensors
from tests.worlds import run as in_world


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A 640 KiB file system; a checkpoint of the tiny model takes about 110 KiB."""
    mount_point = tmp_path / "disk"
    mount_point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", str(mount_point)]
    if (
        os.geteuid()
        or not shutil.which("mount")
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("needs permission to mount a tmpfs")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "-l", str(mount_point)], check=True)


def _run_until_full(config: RunConfig) -> str:
    with pytest.raises(CapacityError) as caught:
        train(config)
    return str(caught.value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("is_async", [True, False])
def test_too_little_space_is_refused_before_writing(config: RunConfig, small_disk: Path, is_async: bool) -> None:
    t = config.train.replace(save_every=1, async_save=is_async)
    it = config.replace(runs=small_disk, plan=Plan(dp=2), train=t)
    messages: list[str] = in_world(2, _run_until_full, it)
    assert messages[0] == messages[1]
    assert "bytes free; nothing was written: free some space" in messages[0]
    (newest, good), *_ = folders.list_steps(it.folder)
    assert f"{it.folder}/step-{newest + 1} needs " in messages[0]
    assert not list(it.folder.glob(".*"))
    assert native.newest(it.folder) == good


@pytest.mark.slow
def test_a_run_out_of_space_resumes_with_space_again(config: RunConfig, small_disk: Path) -> None:
    t = config.train.replace(save_every=1)
    it = config.replace(runs=small_disk, plan=Plan(dp=2), train=t)
    in_world(2, _run_until_full, it)
    with_retention = it.replace(train=t.replace(keep=2))
    in_world(2, train, config.replace(name="whole", plan=Plan(dp=2)))
    for step, folder in folders.list_steps(it.folder)[1:]:
        assert step and not shutil.rmtree(folder)
    in_world(2, train, with_retention)
    assert tensors(it.folder / "step-12") == tensors(config.runs / "whole" / "step-12")


def test_disk_that_fills_up_leaves_no_partial_checkpoint(config: RunConfig, small_disk: Path) -> None:
    """Another process takes the space after the check."""
    it = config.replace(runs=small_disk)
    Trainer(it.replace(train=config.train.replace(steps=4))).fit()
    good = tensors(it.folder / "step-4")
    filler = small_disk / "hog"

    def check_then_fill(folder: Path, needs_bytes: int) -> None:
        atomic_folder.check_disk_space(folder, needs_bytes)
        filler.write_bytes(bytes(shutil.disk_usage(small_disk).free - 40_000))

    with (
        patch.object(dcp_storage, "check_disk_space", check_then_fill),
        pytest.raises(CapacityError, match=r"the disk is full: .*step-8"),
    ):
        Trainer(it).fit()
    assert [step for step, _ in folders.list_steps(it.folder)] == [4]
    assert not list(it.folder.glob(".*"))
    assert tensors(it.folder / "step-4") == good
    filler.unlink()
    assert Trainer(it).fit().steps == 12


def test_full_disk_while_writing_metrics_is_reported(config: RunConfig) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        patch.object(JsonLines, "record", side_effect=full),
        pytest.raises(
            CapacityError, match=r"the disk is full: the metrics of step 1 could not be written to .*/it; free"
        ),
    ):
        Trainer(config).fit()
    with (
        patch.object(JsonLines, "record", side_effect=OSError(errno.EIO, "broken")),
        pytest.raises(OSError, match="brok"),
    ):
        Trainer(config).fit()
    assert Trainer(config).fit().steps == 12


def test_space_estimate_equals_the_bytes_written(config: RunConfig) -> None:
    asked: list[int] = []
    with patch.object(dcp_storage, "check_disk_space", lambda folder, needs_bytes: asked.append(needs_bytes)):
        Trainer(config.replace(train=config.train.replace(save_every=0))).fit()
    written = config.folder / "step-12"
    whole_bytes = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
    assert whole_bytes <= asked[0] <= whole_bytes + native.MAX_MANIFEST_BYTES + 30_000


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("keep", "keep_every", "remaining"),
    [
        (None, None, [12, 10, 8, 6, 4, 2]),
        (2, None, [12, 10]),
        (1, None, [12]),
        (1, 4, [12, 8, 4]),
        (100, None, [12, 10, 8, 6, 4, 2]),
    ],
)
def test_newest_checkpoints_are_kept(
    config: RunConfig, keep: int | None, keep_every: int | None, remaining: list[int]
) -> None:
    Trainer(config.replace(train=config.train.replace(save_every=2, keep=keep, keep_every=keep_every))).fit()
    assert [step for step, _ in folders.list_steps(config.folder)] == remaining
    assert not list(config.folder.glob(".*"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep": 0}, "train.keep is 0 and must be 1 or more; .* remove it: then all checkpoints are kept"),
        ({"keep": -2}, "train.keep is -2"),
        ({"keep": 2, "keep_every": 0}, "train.keep_every is 0 .* remove it: then only keep decides"),
        ({"keep_every": 3}, "without it all are kept; set train.keep, or remove keep_every"),
    ],
)
def test_bad_retention_settings_are_refused(config: RunConfig, settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.train.replace(**settings)


def test_only_good_checkpoint_is_kept(config: RunConfig) -> None:
    """Newer checkpoints with missing files do not count, and are left for inspection."""
    Trainer(config.replace(train=config.train.replace(save_every=2))).fit()
    for step in (12, 10, 8, 6):
        (config.folder / f"step-{step}" / "weights-00000.safetensors").unlink()
    assert [folder.name for folder in atomic_folder.prune(config.folder, 1)] == ["step-2"]
    assert [step for step, _ in folders.list_steps(config.folder)] == [12, 10, 8, 6, 4]
    assert atomic_folder.prune(config.folder, 1) == []

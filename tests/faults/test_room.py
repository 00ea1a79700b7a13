"""Room on the disk: too little is refused before anything is touched, and a disk that fills up leaves nothing half."""

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

pytestmark = pytest.mark.xdist_group("worlds")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 640 KiB: a checkpoint of the tiny model takes about 110 KiB of it."""
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=640k", "tmpfs", str(place)]
    if (
        os.geteuid()
        or not shutil.which("mount")
        or subprocess.run(command, capture_output=True, check=False).returncode
    ):
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def _runs_full(config: RunConfig) -> str:
    with pytest.raises(CapacityError) as caught:
        train(config)
    return str(caught.value)


@pytest.mark.parametrize("behind", [True, False])
def test_too_little_room_is_refused_before_anything_is_touched(
    config: RunConfig, small_disk: Path, behind: bool
) -> None:
    t = config.train.replace(save_every=1, async_save=behind)
    it = config.replace(runs=small_disk, plan=Plan(dp=2), train=t)
    begun: list[str] = in_world(2, _runs_full, it)
    assert begun[0] == begun[1]
    assert "bytes free; nothing was written: free some space" in begun[0]
    (newest, good), *_ = folders.list_steps(it.folder)
    assert f"{it.folder}/step-{newest + 1} needs " in begun[0]
    assert not list(it.folder.glob(".*"))
    assert native.newest(it.folder) == good
    # With room again the same command goes on, to where the run would have come without the trouble.
    roomy = it.replace(train=t.replace(keep=2))
    in_world(2, train, config.replace(name="whole", plan=Plan(dp=2)))
    for step, folder in folders.list_steps(it.folder)[1:]:
        assert step and not shutil.rmtree(folder)
    in_world(2, train, roomy)
    assert tensors(it.folder / "step-12") == tensors(config.runs / "whole" / "step-12")


def test_a_disk_that_fills_up_midway_leaves_nothing_half(config: RunConfig, small_disk: Path) -> None:
    """Somebody else takes the room after it was looked at."""
    it = config.replace(runs=small_disk)
    Trainer(it.replace(train=config.train.replace(steps=4))).fit()
    good = tensors(it.folder / "step-4")
    hog = small_disk / "hog"

    def looked_at(folder: Path, needs_bytes: int) -> None:
        atomic_folder.check_disk_space(folder, needs_bytes)
        hog.write_bytes(bytes(shutil.disk_usage(small_disk).free - 40_000))

    with (
        patch.object(dcp_storage, "check_disk_space", looked_at),
        pytest.raises(CapacityError, match=r"the disk is full: .*step-8"),
    ):
        Trainer(it).fit()
    assert [step for step, _ in folders.list_steps(it.folder)] == [4]
    assert not list(it.folder.glob(".*"))
    assert tensors(it.folder / "step-4") == good
    hog.unlink()
    assert Trainer(it).fit().steps == 12


def test_a_full_disk_under_the_metrics_is_told_as_one(config: RunConfig) -> None:
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


def test_what_is_needed_is_what_is_written(config: RunConfig) -> None:
    asked: list[int] = []
    with patch.object(dcp_storage, "check_disk_space", lambda folder, needs_bytes: asked.append(needs_bytes)):
        Trainer(config.replace(train=config.train.replace(save_every=0))).fit()
    written = config.folder / "step-12"
    whole_bytes = sum(path.stat().st_size for path in written.rglob("*") if path.is_file())
    assert whole_bytes <= asked[0] <= whole_bytes + native.MAX_MANIFEST_BYTES + 30_000


@pytest.mark.parametrize(
    ("keep", "keep_every", "left"),
    [
        (None, None, [12, 10, 8, 6, 4, 2]),
        (2, None, [12, 10]),
        (1, None, [12]),
        (1, 4, [12, 8, 4]),
        (100, None, [12, 10, 8, 6, 4, 2]),
    ],
)
def test_the_newest_stay(config: RunConfig, keep: int | None, keep_every: int | None, left: list[int]) -> None:
    Trainer(config.replace(train=config.train.replace(save_every=2, keep=keep, keep_every=keep_every))).fit()
    assert [step for step, _ in folders.list_steps(config.folder)] == left
    assert not list(config.folder.glob(".*"))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"keep": 0}, "train.keep is 0 and must be 1 or more; .* leave it out: then all checkpoints are kept"),
        ({"keep": -2}, "train.keep is -2"),
        ({"keep": 2, "keep_every": 0}, "train.keep_every is 0 .* leave it out: then only keep decides"),
        ({"keep_every": 3}, "without it all are kept; set train.keep, or leave keep_every out"),
    ],
)
def test_a_retention_that_keeps_none_is_refused(config: RunConfig, settings: dict[str, int], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        config.train.replace(**settings)


def test_the_only_good_one_stays(config: RunConfig) -> None:
    """Newer ones that lost a file do not count, and are left for somebody to look at."""
    Trainer(config.replace(train=config.train.replace(save_every=2))).fit()
    for step in (12, 10, 8, 6):
        (config.folder / f"step-{step}" / "weights-00000.safetensors").unlink()
    assert [folder.name for folder in atomic_folder.prune(config.folder, 1)] == ["step-2"]
    assert [step for step, _ in folders.list_steps(config.folder)] == [12, 10, 8, 6, 4]
    assert atomic_folder.prune(config.folder, 1) == []

"""A run over several machines: network namespaces with their own names and addresses, one torchrun in each.

Each host has one interface, to a bridge that acts as the switch, and no other connection. The command is the one in
docs/howto/launch.md, and the result is compared with one process.
"""

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from colonnade.checkpoint import native
from colonnade.config import DataConfig, ModelConfig, Plan, RunConfig, TrainConfig
from colonnade.config.toml import dumps
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train import Trainer
from colonnade.train.trackers import read_rows
from tests import corpora
from tests.models import build as build_model
from tests.worlds import assert_same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = ModelConfig(vocab_size=300, layers=2, width=16, heads=4, kv_heads=4, ffn_width=26, context=32, tied=True)
NAMED = Path("/etc/netns")
"""``ip netns exec NAME`` replaces files of /etc by those of /etc/netns/NAME."""


def ip(*arguments: str) -> None:
    """Run ``ip``; skip the test if it is not permitted."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"needs permission to create network namespaces: ip {' '.join(arguments)}: {done.stderr.strip()}")


@contextmanager
def hosts(number: int) -> Iterator[list[list[str]]]:
    """The command prefix that runs a command on each host; the hosts call each other machine0, machine1, …"""
    for tool in ("ip", "unshare", "hostname"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs the program {tool}")
    prefix = f"colonnade-{uuid.uuid4().hex[:6]}"
    switch = f"{prefix}-switch"
    table = "127.0.0.1 localhost\n" + "".join(f"10.213.7.{i + 1} machine{i}\n" for i in range(number))
    before: list[list[str]] = []
    with ExitStack() as after:

        def namespace(name: str) -> None:
            ip("netns", "add", name)
            after.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
            ip("-n", name, "link", "set", "lo", "up")

        namespace(switch)
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for i in range(number):
            name = f"{prefix}-{i}"
            namespace(name)
            ip("link", "add", "wire", "netns", name, "type", "veth", "peer", "name", f"port{i}", "netns", switch)
            ip("-n", switch, "link", "set", f"port{i}", "master", "bridge", "up")
            ip("-n", name, "address", "add", f"10.213.7.{i + 1}/24", "dev", "wire")
            ip("-n", name, "link", "set", "wire", "up")
            made = not NAMED.exists()
            (NAMED / name).mkdir(parents=True)
            if made:
                after.callback(NAMED.rmdir)
            after.callback(shutil.rmtree, NAMED / name)
            (NAMED / name / "hosts").write_text(table)
            with_hostname = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"machine{i}"]
            before.append(["ip", "netns", "exec", name, *with_hostname])
        yield before


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return corpora.small(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def single(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The same run in one process, finished."""
    t = TrainConfig(steps=6, batch=4, micro_batch=2, lr=1e-2, min_lr=1e-3, warmup=2, dtype="float64", dropout=0.1)
    data = DataConfig(path=corpus, sequence=16)
    runs = tmp_path_factory.mktemp("runs")
    run = RunConfig(name="single", runs=runs, device="cpu", model=MODEL, data=data, train=t)
    Trainer(run).fit()
    return run


@pytest.mark.parametrize(
    ("plan", "local"),
    [
        pytest.param(Plan(tp=2), 1, id="tensor parallel across hosts"),
        pytest.param(
            Plan(tp=2, dp=2), 2, id="tensor parallel within hosts, data parallel across", marks=pytest.mark.long
        ),
    ],
)
def test_two_hosts_train_as_one_process(single: RunConfig, plan: Plan, local: int, tmp_path: Path) -> None:
    run = single.replace(name="hosts", runs=tmp_path, plan=plan)
    (tmp_path / "run.toml").write_text(dumps(run))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(local),
        "--rdzv-id", "run1", "--rdzv-backend", "c10d", "--rdzv-endpoint", "machine0:29500",
        "-m", "colonnade", "train", "--config", str(tmp_path / "run.toml"),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with hosts(2) as before:
        started = [
            subprocess.Popen(
                [*arguments, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
            )
            for arguments in before
        ]
        try:
            outputs = [process.communicate(timeout=200) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    assert [process.returncode for process in started] == [0, 0], outputs
    assert "step 6/6" in outputs[0][0] and "step 6/6" not in outputs[1][0], "rank 0 runs on the rendezvous host"
    rows, expected = read_rows(run.folder), read_rows(single.folder)
    for name in ("loss", "grad_norm", "validation_loss"):
        got, want = ([row[name] for row in it if name in row] for it in (rows, expected))
        assert want and got == pytest.approx(want, rel=1e-10, abs=1e-10), name
    got, want = (weights(it.folder) for it in (run, single))
    for name, reference in want.items():
        assert_same(got[name], reference, what=name)


def weights(folder: Path) -> dict:
    """The weights of the newest checkpoint, loaded in one process."""
    model = build_model(MODEL)
    checkpoint = native.newest(folder)
    assert checkpoint is not None and checkpoint.name == "step-6"
    native.load(checkpoint, model, DistributedContext.solo())
    return dict(model.named_parameters())

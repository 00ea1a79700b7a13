"""The launch examples: scripts parse in their shells, and their commands parse in ours."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from colonnade.config import ServeConfig
from tests.unit.test_docs import command_error

EXAMPLES = Path(__file__).parents[2] / "examples"


def torchrun(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """(torchrun's own options, our command line) of ``torchrun … -m colonnade …``."""
    middle = argv.index("-m")
    assert argv[0] == "torchrun" and argv[middle + 1] == "colonnade"
    joined = " ".join(argv[1:middle]).replace("=", " ").split()
    return dict(zip(joined[::2], joined[1::2], strict=True)), argv[middle + 2 :]


def check(argv: list[str], machines: int) -> None:
    options, ours = torchrun(argv)
    assert command_error(ours) is None
    plan = {ours[i]: int(ours[i + 1]) for i, word in enumerate(ours) if re.fullmatch(r"--plan\.(tp|dp|cp|pp)", word)}
    world = 1
    for size in plan.values():
        world *= size
    assert world == machines * int(options["--nproc-per-node"]), (
        "the number of processes must equal the plan's world size"
    )
    assert set(options) >= {"--nnodes", "--rdzv-id", "--rdzv-backend", "--rdzv-endpoint"}
    from torch.distributed.run import get_args_parser

    get_args_parser().parse_args(argv[1:])


def test_slurm_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the script with stubs for Slurm's two programs; the stub of srun prints its arguments."""
    script = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(script)], check=True)
    for name, body in {"scontrol": 'printf "node7\\nnode8\\n"', "srun": 'printf "%s\\n" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2"}
    printed = subprocess.run(
        ["bash", str(script)], env={"PATH": f"{tmp_path}:/usr/bin:/bin"} | slurm, capture_output=True, text=True,
        check=True,
    ).stdout.splitlines()  # fmt: skip
    argv = printed[printed.index("torchrun") :]
    monkeypatch.chdir(tmp_path)
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(), re.MULTILINE))
    check(argv, int(directives["nodes"]))
    options, _ = torchrun(argv)
    assert options["--rdzv-endpoint"] == "node7:29500"
    assert options["--nproc-per-node"] == directives["gpus-per-node"]


def test_kubernetes_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, job = yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text())
    spec: dict[str, Any] = job["spec"]
    pod: dict[str, Any] = spec["template"]["spec"]
    (container,) = pod["containers"]
    argv = [part for word in container["command"] + container["args"] for part in word.split("=", 1)]
    monkeypatch.chdir(tmp_path)
    check(argv, spec["completions"])
    options, _ = torchrun(argv)
    name = job["metadata"]["name"]
    assert options["--rdzv-endpoint"] == f"{name}-0.{pod['subdomain']}:29500"
    assert pod["subdomain"] == service["metadata"]["name"] and service["spec"]["selector"] == {"job-name": name}
    assert spec["parallelism"] == spec["completions"] == int(options["--nnodes"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(options["--nproc-per-node"])
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_shell_words_of_the_examples_are_quoted() -> None:
    for script in EXAMPLES.glob("*.sh"):
        for line in script.read_text().splitlines():
            shlex.split(line.removesuffix("\\"), comments=True)


def test_kubernetes_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands parse, probes and ports agree, the drain fits the grace period, and the front finds its pods."""
    documents = list(yaml.safe_load_all((EXAMPLES / "kubernetes_serve.yaml").read_text()))
    by_kind = {(each["kind"], each["metadata"]["name"]): each for each in documents}
    monkeypatch.chdir(tmp_path)
    for kind, name in (("StatefulSet", "colonnade-engine"), ("Deployment", "colonnade-front")):
        spec = by_kind[kind, name]["spec"]
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        argv = [part for word in container["args"] for part in word.split("=", 1)]
        assert container["command"] == ["colonnade"] and command_error(argv) is None
        options = dict(zip(argv[2::2], argv[3::2], strict=True))
        assert float(options.get("--serve.drain_s", 25)) + 5 <= pod["terminationGracePeriodSeconds"]
        assert spec["selector"]["matchLabels"] == spec["template"]["metadata"]["labels"]
        (port,) = (each["containerPort"] for each in container["ports"])
        probes = [container[f"{each}Probe"]["httpGet"] for each in ("liveness", "readiness")]
        assert probes == [{"path": "/health", "port": port}, {"path": "/ready", "port": port}]
        assert port == ServeConfig().port
    engines = by_kind["StatefulSet", "colonnade-engine"]["spec"]
    headless = by_kind["Service", engines["serviceName"]]["spec"]
    assert headless["selector"] == engines["selector"]["matchLabels"] and headless["ports"] == [{"port": 8000}]
    urls = [f"http://colonnade-engine-{i}.colonnade-engines:8000" for i in range(engines["replicas"])]
    assert ServeConfig(upstreams=(options["--serve.upstreams"],)).upstreams == tuple(urls)
    service = by_kind["Service", "colonnade"]["spec"]
    assert service["selector"] == {"app": "colonnade-front"} and service["ports"][0]["targetPort"] == 8000

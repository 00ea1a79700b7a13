"""Gathering and scattering Tutel checkpoints: the same outputs on every number of ranks."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from colonnade.compat.tutel import moe, net
from colonnade.compat.tutel.checkpoint import gather, scatter
from colonnade.errors import CheckpointError
from tests.worlds import assert_same, run

D = 6
PATTERN = "{rank}-of-{size}.ckpt"


class Model(torch.nn.Module):
    """An expert layer after a dense one."""

    def __init__(self, kind: str, experts: int, seed: int = 0):
        super().__init__()
        world = net.get_world_size()
        local = experts // world if experts >= world else -(world // experts)
        options: dict[str, Any] = {"type": kind, "num_experts_per_device": local, "hidden_size_per_expert": 12}
        if kind == "ffn":
            options["output_dim"] = 5  # the bias of this width cannot be divided over 2 or 4 ranks
        torch.manual_seed(seed)
        self.before = torch.nn.Linear(D, D)
        self.moe = moe.moe_layer({"type": "top", "k": min(2, experts), "capacity_factor": 0}, D, options).eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.before(x))


def _write(kind: str, experts: int, folder: str, legacy: bool) -> torch.Tensor:
    """Each rank writes its file; returns the output for the same tokens."""
    rank, world = net.get_world_rank(), net.get_world_size()
    model = Model(kind, experts)
    torch.manual_seed(rank + 10)
    with torch.no_grad():
        for p in model.moe.experts.parameters():
            p.normal_()
    state = model.state_dict()
    if legacy:
        del state["moe._num_global_experts"]
    path = Path(folder, PATTERN.format(rank=rank, size=world))
    torch.save({"epoch": 3, "nested": {"model": state}}, path)
    return model(_tokens()).detach()


def _read(kind: str, experts: int, pattern: str) -> torch.Tensor:
    rank, world = net.get_world_rank(), net.get_world_size()
    model = Model(kind, experts, seed=77)
    loaded = torch.load(pattern.format(rank=rank, size=world), weights_only=True)
    assert loaded["epoch"] == 3
    model.load_state_dict(loaded["nested"]["model"])
    net.barrier()
    return model(_tokens()).detach()


def _tokens() -> torch.Tensor:
    return torch.randn(9, D, generator=torch.Generator().manual_seed(1))


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["ffn", "llama_ffn"])
@pytest.mark.parametrize(
    ("experts", "saved_on", "loaded_on"), [(4, 2, (1, 4)), (2, 4, (1, 2)), (1, 2, (1,)), (2, 1, (4,)), (1, 1, (4,))]
)
def test_checkpoint_converts_to_other_numbers_of_ranks(
    kind: str, experts: int, saved_on: int, loaded_on: tuple[int, ...], tmp_path: Path
) -> None:
    expected = run(saved_on, _write, kind, experts, str(tmp_path), False)[0]
    gather.main(
        f"--inputs {tmp_path}/{PATTERN} --input_size {saved_on} "
        f"--output {tmp_path}/all --namespace nested/model".split()
    )
    for world in loaded_on:
        pattern = f"{tmp_path}/new/{PATTERN}"
        if world == 1:
            pattern = f"{tmp_path}/all"
        else:
            scatter.scatter(f"{tmp_path}/all", world, pattern, "nested/model")
        for found in run(world, _read, kind, experts, pattern):
            assert_same(found, expected, 1e-5)


def test_legacy_files_are_gathered(tmp_path: Path) -> None:
    expected = run(2, _write, "ffn", 4, str(tmp_path), True)[0]
    files = (f"{tmp_path}/{PATTERN}", 2, f"{tmp_path}/all", "nested/model")
    with pytest.raises(CheckpointError, match=r"no layer of experts; set --namespace .* --default_num_global_experts"):
        gather.gather(*files)
    gather.gather(*files, default_num_global_experts=4)
    assert torch.load(f"{tmp_path}/all", weights_only=True)["nested"]["model"]["moe._num_global_experts"] == 4
    (found,) = run(1, _read, "ffn", 4, f"{tmp_path}/all")
    assert_same(found, expected, 1e-5)


class Malicious:
    """An object that must not be unpickled: doing so would exit."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('unpickled')",))


def _files(folder: Path, **changes: Any) -> None:
    """Two ranks' files of 4 experts; ``changes`` apply to the second."""
    for rank in range(2):
        state: dict[str, Any] = {"_num_global_experts": torch.tensor(4), "experts.w": torch.zeros(2, 3)}
        torch.save(state | (changes if rank else {}), folder / f"{rank}")


def test_gather_refuses_bad_files(tmp_path: Path) -> None:
    def refused(match: str, size: int = 2, namespace: str = "", pattern: str = "{rank}") -> None:
        with pytest.raises(CheckpointError, match=match):
            gather.gather(f"{tmp_path}/{pattern}", size, f"{tmp_path}/all", namespace)
        assert not (tmp_path / "all").exists()

    _files(tmp_path)
    refused("4 experts cannot be divided among 3 ranks", size=3)
    refused("cannot read '.*/2': No such file", size=4)
    refused("has no dictionary 'model' on the path 'model'", namespace="model")
    refused(r"no \{rank\} in", pattern="0")
    refused("has 2 experts on each of 1 ranks, which is not 4", size=1)
    _files(tmp_path, **{"experts.w": torch.zeros(2, 4)})
    refused("the shape of 'experts.w'")
    torch.save({"other": torch.zeros(1)}, tmp_path / "1")
    refused("lacks 'experts.w', which rank 0 has")
    _files(tmp_path, args=Malicious())
    refused("objects are not unpickled")
    (tmp_path / "1").write_bytes(b"hello")
    refused("'.*/1' is damaged")
    torch.save([1], tmp_path / "1")
    refused("holds a list, not a dictionary")


def test_scatter_refuses_bad_files(tmp_path: Path) -> None:
    def refused(match: str, state: dict[str, Any], size: int = 2, outputs: str = "{rank}") -> None:
        torch.save(state, tmp_path / "all")
        with pytest.raises(CheckpointError, match=match):
            scatter.scatter(f"{tmp_path}/all", size, f"{tmp_path}/{outputs}")

    one = {"_num_global_experts": torch.tensor(1), "experts.w": torch.zeros(1, 3, 4)}
    refused(r"of shape \(3, 4\), cannot be divided over 2 ranks", one)
    refused("cannot be divided over 2 ranks", one | {"experts.w": torch.zeros(1)})
    refused("is not one of 2 experts", one | {"_num_global_experts": torch.tensor(2)} | {"experts.w": torch.zeros(5)})
    refused("2 experts cannot be divided among 3 ranks", {"a._num_global_experts": torch.tensor(2)}, 3)
    refused("no layer of experts with an entry '_num_global_experts'", {"w": torch.zeros(2)})
    refused(r"no \{rank\} in", one, outputs="out")
    for count in (torch.tensor(0), torch.zeros(2), "4"):
        refused("'_num_global_experts' is .*, not a number of experts", one | {"_num_global_experts": count})


def test_gather_and_scatter_as_programs(tmp_path: Path) -> None:
    """Both modules run as programs; an error is one line."""
    _files(tmp_path)

    def program(name: str, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", f"colonnade.compat.tutel.checkpoint.{name}", *words],
            cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, capture_output=True,
            text=True, timeout=100, check=False,
        )  # fmt: skip

    done = program("gather", "--inputs={rank}", "--input_size=2", "--output=all")
    assert (done.returncode, done.stdout) == (0, "2 files, 1 parameters of experts: all\n"), done.stderr
    assert torch.load(tmp_path / "all", weights_only=True)["experts.w"].shape == (4, 3)
    failed = program("scatter", "--input=all", "--output_size=3", "--outputs=new/{rank}")
    assert failed.returncode == 1
    assert failed.stderr.startswith("CheckpointError: 4 experts cannot be divided among 3 ranks")
    assert failed.stderr.count("\n") == 1

"""Pools of gloo processes that are reused between tests, because importing torch costs more than most checks.

    results = run(4, check, argument, …)        # check(*arguments) in 4 processes; the list of results by rank

``check`` must be a function at a module's top level; inside it a process group of that size is initialised, so
``DistributedContext.build(plan)`` only builds the mesh. The first rank that fails fails the test with its traceback.
"""

import atexit
import datetime
import faulthandler
import gc
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LIMIT_S = 120


class WorkerFailure(AssertionError):
    """A rank raised; the message is its traceback."""


def _worker(pipe: Connection, rank: int, crash_log: str) -> None:
    torch.set_num_threads(1)
    faulthandler.enable(Path(crash_log).open("w"))  # noqa: SIM115 - open for the life of the process
    os.environ["COLUMNS"] = "120"
    gc.freeze()  # imported modules stay alive; this makes later collections cheap
    while True:
        try:
            world, store, check, args = pipe.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.FileStore(store, world),
                rank=rank,
                world_size=world,
                timeout=datetime.timedelta(seconds=LIMIT_S),
            )
            result, failure = check(*args), None
            dist.barrier()  # no rank may leave while another is still connecting to it
        except BaseException:
            result, failure = None, traceback.format_exc()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()  # FSDP models are reference cycles that keep process groups, and their polling threads, alive
        pipe.send((result, failure))


class _Pool:
    """As many workers as the largest world so far; rank r of any world is worker r."""

    def __init__(self) -> None:
        self.workers: list[tuple[Any, Connection]] = []
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self.context = mp.get_context("spawn")  # by the fork server: in milliseconds
        atexit.register(self.close)

    def grow(self, world: int) -> None:
        while len(self.workers) < world:
            ours, theirs = self.context.Pipe()
            rank = len(self.workers)
            process = self.context.Process(target=_worker, args=(theirs, rank, self._crash_log(rank)), daemon=True)
            process.start()
            theirs.close()
            self.workers.append((process, ours))

    def _crash_log(self, rank: int) -> str:
        if self.folder is None:  # not before: a process forked from this one would remove it when it ends
            self.folder = tempfile.TemporaryDirectory()
        return f"{self.folder.name}/{rank}"

    def _describe_exit(self, rank: int) -> str:
        """How a process ended, with its faulthandler output."""
        process, _ = self.workers[rank]
        process.join(5)
        where = Path(self._crash_log(rank)).read_text(encoding="utf-8", errors="replace")
        return f"the process died with exit code {process.exitcode}\n{where}"

    def close(self) -> None:
        for process, pipe in self.workers:
            pipe.close()
            process.kill()
            process.join()
        self.workers.clear()

    def run(self, world: int, check: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        self.grow(world)
        with tempfile.TemporaryDirectory() as folder:
            pipes = [pipe for _, pipe in self.workers[:world]]
            for pipe in pipes:
                pipe.send((world, f"{folder}/store", check, args))
            results: dict[Connection, Any] = {}
            while len(results) < world:
                ready = wait([pipe for pipe in pipes if pipe not in results], timeout=LIMIT_S)
                if not ready:
                    self.close()
                    raise WorkerFailure(f"ranks {[r for r, p in enumerate(pipes) if p not in results]} hang")
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    try:
                        result, failure = pipe.recv()
                    except EOFError:
                        result, failure = None, self._describe_exit(pipes.index(pipe))
                    if failure:
                        rank = pipes.index(pipe)
                        self.close()  # its peers may be waiting for it
                        raise WorkerFailure(f"rank {rank} of {world}:\n{failure}")
                    results[pipe] = result
            return [results[pipe] for pipe in pipes]


_pool = _Pool()


def run(world: int, check: Callable[..., Any], *args: Any) -> list[Any]:
    """Run ``check(*args)`` in ``world`` processes of one gloo group; returns the results by rank."""
    return _pool.run(world, check, args)


def assert_same(got: torch.Tensor, reference: torch.Tensor, tolerance: float = 1e-10, what: str = "") -> None:
    """max|Δ| <= tolerance · max(1, ‖reference‖∞), which NaN never passes."""
    assert got.shape == reference.shape, f"{what}: shape {tuple(got.shape)} against {tuple(reference.shape)}"
    if reference.numel():
        error = (got - reference).abs().max().item()
        limit = tolerance * max(1.0, reference.abs().max().item())
        assert error <= limit, f"{what}: error {error:.3g} over {limit:.3g}"

"""A tiny Llama in a Hugging Face folder, served by the command line: one server for all clients."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from colonnade.api import Model, save
from colonnade.parallel.distributed_context import DistributedContext
from tests.serve import tiny
from tests.serve.serving import Running
from tests.serve.test_serve_http import settle
from tests.serve.test_serve_pooling import served


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights, in float32, with the tokenizer and a chat template that shows tools."""
    model = tiny.model(dtype=torch.float32, context=1024)
    path = tmp_path_factory.mktemp("clients") / "tiny"
    return save(
        Model(model, tiny.tokenizer(tools=True), DistributedContext.solo(torch.device("cpu")), "tiny"),
        path,
        format="hf",
    )


@pytest.fixture(scope="session")
def running(folder: Path) -> Iterator[Running]:
    """Its server; at the end it is idle and has all its pages."""
    with served(folder, "--serve.log", "off", "--dtype", "float32") as it:
        yield it
        settle(it)

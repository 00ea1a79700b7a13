"""Engines that benchmarks run in processes of their own."""

import sys
from pathlib import Path

import pytest
import torch

import colonnade
from colonnade.api import Model
from colonnade.config import ServeConfig
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.serve import Engine, SamplingParams
from harness import decode_peers
from tests.serve import tiny

PROMPTS = [[1, 2, 3, 4], [50, 7, 9, 20]]


@pytest.mark.slow
def test_a_peer_in_a_process_of_its_own_gives_our_tokens(tmp_path: Path) -> None:
    model = tiny.model(dtype=torch.float32)
    whole = Model(model, tiny.tokenizer(), DistributedContext.solo(), "tiny")
    folder = colonnade.save(whole, tmp_path / "model", format="hf")
    with (
        (tmp_path / "log").open("w") as log,
        decode_peers.peer_process("transformers", Path(sys.executable), folder, "float32", log) as run,
    ):
        took = [run(PROMPTS, count) for count in (5, 3)]
    engine = Engine(model, tiny.tokenizer(), ServeConfig(pages=40, page_tokens=4))
    for each, count in zip(took, (5, 3), strict=True):
        outputs = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        assert each.ids == [list(output.token_ids) for output in outputs]
        assert each.first_s > 0 and each.rest_s > 0


@pytest.mark.slow
def test_a_peer_that_ends_says_why(tmp_path: Path) -> None:
    with (
        (tmp_path / "log").open("w") as log,
        pytest.raises(RuntimeError, match=r"(?s)transformers ended: .*nowhere"),
        decode_peers.peer_process("transformers", Path(sys.executable), tmp_path / "nowhere", "float32", log),
    ):
        pass

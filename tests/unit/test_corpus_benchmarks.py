"""The benchmarks of cleaning and evaluation, at toy sizes: they run to the end and draw the right conclusions."""

import json

import pytest
import torch

import corpus_clean
import corpus_workers
import duplicates_study
import evaluate
from colonnade.api import Model
from colonnade.parallel.distributed_context import DistributedContext
from tests.serve import tiny


@pytest.mark.slow
def test_cleaning_benchmark(tmp_path):
    record = json.loads(corpus_clean.main(["--tiny", "--out", str(tmp_path)]).read_text())
    whole, near, peer = record["rows"]
    assert near["pairs_found"] == near["true_pairs"] > 5 and near["texts_kept"] == 72 - near["true_pairs"]
    assert peer["method"].startswith("datatrove") and peer["pairs_found"] > 0
    assert whole["texts_kept"] <= near["texts_kept"] and record["headlines"][0]["peer_value"] == peer["mb_per_cpu_s"]


@pytest.mark.slow
def test_workers_benchmark(tmp_path):
    record = json.loads(corpus_workers.main(["--tiny", "--copies", "2", "--out", str(tmp_path)]).read_text())
    one, two, independent = record["rows"]
    assert [row["stay"] for row in record["rows"]] == [100] * 3 and two["peak_worker_mb"] > 10
    assert independent["megabytes"] == pytest.approx(2 * one["megabytes"], abs=0.1)


def test_evaluation_benchmark(tmp_path, monkeypatch):
    solo = DistributedContext.solo(torch.device("cpu"))
    model = Model(tiny.model(dtype=torch.float32, context=2048), tiny.tokenizer(), solo, "tiny")
    monkeypatch.setattr(evaluate.HFLM, "max_length", 2048)
    record = json.loads(evaluate.main(["--tiny", "--out", str(tmp_path)], model).read_text())
    assert [row["requests"] for row in record["rows"]] == [8, 8]
    assert all(row["largest_difference_nats"] < 0.02 and row["same_greedy"] == 8 for row in record["rows"])


@pytest.mark.slow
def test_duplicates_study(tmp_path):
    record = json.loads(duplicates_study.main(["--tiny", "--out", str(tmp_path)]).read_text())
    clean, dirty = record["rows"]
    assert (clean["documents"], dirty["documents"]) == (30, 150)
    assert (tmp_path / "duplicates_study.svg").read_text().startswith("<?xml")

"""``colonnade bench``: bounds, bytes per token, and the verb with a tiny model."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from colonnade.bench import ceilings
from colonnade.bench.roofline import DecodeSpeed, read_bytes
from colonnade.checkpoint import native
from colonnade.cli import main
from colonnade.config import ModelConfig, MoeConfig
from colonnade.model import Transformer, initialise
from colonnade.model.moe.experts import Experts
from colonnade.model.weight_only_quant import build as build_quantised
from colonnade.parallel.axis import SOLO_AXES
from colonnade.parallel.distributed_context import DistributedContext
from tests.serve import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny untrained model with a tokenizer."""
    config = ModelConfig(vocab_size=301, layers=2, width=64, heads=4, kv_heads=2, ffn_width=96, context=64, tied=True)
    path = tmp_path_factory.mktemp("bench") / "tiny"
    transformer = initialise(Transformer(config), 0)
    native.save(path, transformer, native.Meta(model=config), DistributedContext.solo(), tokenizer=tiny.tokenizer())
    return path


@pytest.mark.parametrize(("rows", "inputs", "outputs"), [(1, 64, 32), (7, 33, 5), (32, 128, 96)])
def test_int8_product_is_exact(rows: int, inputs: int, outputs: int):
    x_TD = torch.randint(0, 128, (rows, inputs), dtype=torch.uint8)  # no pair of products saturates
    weight_FD = torch.randint(-127, 128, (outputs, inputs), dtype=torch.int8)
    assert torch.equal(ceilings.int8_product(x_TD, weight_FD)(), x_TD.float() @ weight_FD.T.float())


def test_thread_counts():
    assert [ceilings.thread_counts(n) for n in (1, 2, 3, 12)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8, 12]]


def test_fastest_repeats_at_least_three_times():
    runs: list[int] = []
    assert 0 < ceilings.fastest(lambda: runs.append(1), "cpu", budget_s=0) < 1
    assert len(runs) == 4, "the first one does not count"


def test_ceilings_are_measured_for_each_number_of_threads():
    before = torch.get_num_threads()
    found = list(ceilings.measure_ceilings("cpu", [1, 2], 0.0, buffer_bytes=1 << 20, size=64))
    assert [each.threads for each in found] == [1, 2] and torch.get_num_threads() == before
    for each in found:
        assert each.read_bytes_per_s > 0 and {"float32", "bfloat16"} <= set(each.flops) and min(each.flops.values()) > 0


def test_a_token_reads_one_row_of_an_untied_embedding():
    sizes = {"vocab_size": 90, "layers": 1, "width": 32, "heads": 2, "ffn_width": 40, "context": 16}
    tied, untied = (Transformer(ModelConfig(**sizes, tied=each)) for each in (True, False))  # type: ignore[arg-type]
    whole = sum(weight.nbytes for weight in tied.parameters())
    assert read_bytes(tied, 1) == whole
    assert read_bytes(untied, 1) == whole + 4 * 32 and read_bytes(untied, 5) == whole + 5 * 4 * 32


def test_quantised_weights_count_with_their_scales():
    """Those of a tied embedding too: it is the output projection."""
    config = ModelConfig(vocab_size=90, layers=1, width=64, heads=2, ffn_width=64, context=16, tied=True)
    quantised, assign = build_quantised(config, SOLO_AXES, device="cpu", dtype=torch.float32, kind="int8", group=64)
    plain = initialise(Transformer(config), 0)
    with torch.no_grad():
        for name, weight in [*quantised.named_parameters()]:
            assign(name, weight, plain.get_parameter(name))
    matrices = [weight for weight in plain.parameters() if weight.dim() == 2]
    saved = sum(weight.nbytes - weight.numel() - 4 * len(weight) for weight in matrices)
    assert read_bytes(quantised, 1) == read_bytes(plain, 1) - saved


@pytest.mark.parametrize("kind", ["stored", "int8"])
def test_only_chosen_experts_are_read(kind: str):
    moe = MoeConfig(experts=8, active=2, ffn_width=64)
    config = ModelConfig(vocab_size=90, layers=1, width=64, heads=2, ffn_width=64, context=16, tied=True, moe=moe)
    model = initialise(Transformer(config), 0)
    stacks = sum(weight.nbytes for name, weight in model.named_parameters() if ".experts." in name)
    if kind == "int8":
        quantised, assign = build_quantised(config, SOLO_AXES, device="cpu", dtype=torch.float32, kind="int8", group=64)
        with torch.no_grad():
            for name, weight in [*quantised.named_parameters()]:
                assign(name, weight, model.get_parameter(name))
        model = quantised
        stacks = sum(stack.nbytes for each in model.modules() if isinstance(each, Experts)
                     for stack in each.quantised.values())  # fmt: skip
    assert stacks > 0
    assert read_bytes(model, 1000) - read_bytes(model, 1) == pytest.approx(0.75 * stacks)


def test_share_of_the_bound():
    speed = DecodeSpeed("int8", bytes_per_token=50.0, flops_per_token=100.0, bound_tokens_per_s=8.0, tokens_per_s=2.0)
    assert (speed.share, speed.intensity) == (0.25, 2.0)


@pytest.mark.slow
def test_verb_prints_json_and_draws(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plot = tmp_path / "roofline.svg"
    main(["bench", str(model), "--seconds", "0.1", "--device", "cpu", "--json", "--plot", str(plot)])
    record = json.loads(capsys.readouterr().out)
    bandwidth = max(each["read_bytes_per_s"] for each in record["ceilings"])
    assert [each["weights"] for each in record["decoding"]] == ["float32", "bfloat16", "int8", "int4"]
    sizes = [each["bytes_per_token"] for each in record["decoding"]]
    assert sizes[0] > sizes[1] and sizes[0] > sizes[2] > sizes[3]
    for each in record["decoding"]:
        assert each["bound_tokens_per_s"] == pytest.approx(bandwidth / each["bytes_per_token"])
        assert each["share_of_bound"] == pytest.approx(each["tokens_per_s"] / each["bound_tokens_per_s"])
    assert "<svg" in plot.read_text()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seconds", "0"], r"--seconds 0 is not over 0"),
        (["--plot", "roofline.txt"], r"--plot roofline.txt has no supported image format; end it in \.svg, \.png"),
        (["--plot", "missing/roofline.svg"], r"there is no folder missing; create it"),
        (["minilm"], r"generate"),
        (["no-such-model"], r"no-such-model"),
    ],
)
def test_mistakes_are_refused_before_measuring(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *argv])
    said = capsys.readouterr().err
    assert stop.value.code == 1 and "measuring" not in said
    assert re.search(message, said)


@pytest.mark.slow
def test_ctrl_c_prints_what_is_measured(model: Path):
    rounds = ["int8"] * 200
    command = [sys.executable, "-u", "-m", "colonnade", "bench", str(model), "--seconds", "1", "--weights", *rounds]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "with weights in" in line:
                process.send_signal(signal.SIGINT)
                break
        out, err = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGINT and "Traceback" not in err
    assert re.search(r"^ +1 +\d+\.\d ", out, re.MULTILINE), "bandwidth with one thread"
    assert out.count("int8") < len(rounds)

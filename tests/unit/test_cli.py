"""The command line: what it does, and above all what it says when it cannot."""

import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from rich.console import Console

import colonnade
from colonnade.checkpoint import native
from colonnade.cli import VERBS, main, parse
from colonnade.config import ModelConfig, Plan, TrainConfig, plural
from colonnade.config.presets import PRESETS, preset
from colonnade.data import Corpus, build
from colonnade.errors import ColonnadeError, Interrupted, PlanError
from colonnade.model import Transformer, initialise
from colonnade.parallel.distributed_context import DistributedContext
from colonnade.train.lr_schedule import learning_rate

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("data") / "corpus"
    build([(f"doc{i}", f"{i} {TEXT}") for i in range(30)], out, vocab_size=300, validation_share=0.2)
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A tiny untrained model with a tokenizer, in our format."""
    config = ModelConfig(vocab_size=300, layers=2, width=24, heads=4, kv_heads=2, ffn_width=26, context=64)
    place = tmp_path_factory.mktemp("models") / "tiny"
    transformer = initialise(Transformer(config), 0)
    native.save(
        place, transformer, native.Meta(model=config), DistributedContext.solo(), tokenizer=Corpus(corpus).tokenizer
    )
    return place


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The same as a Hugging Face folder."""
    out = tmp_path_factory.mktemp("hf") / "tiny"
    main(["convert", str(model), str(out)])
    return out


def refused(capsys: pytest.CaptureFixture[str], *argv: str | Path, code: int = 1) -> str:
    """What the command line says when it exits with ``code``; always one line, never a traceback."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in argv])
    assert end.value.code == code
    said = capsys.readouterr().err
    assert "Traceback" not in said
    if code == 1:
        errors = [line for line in said.splitlines() if "Error: " in line]
        assert len(errors) == 1
        return errors[0]
    return said


def test_every_verb_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        with pytest.raises(SystemExit) as end:
            main([verb, "--help"])
        assert end.value.code == 0
        said = capsys.readouterr().out
        assert f"usage: colonnade {verb}" in said
        assert "--help" in said


def test_help_needs_no_torch() -> None:
    """Start-up stays instant: torch is imported by the verbs that use it."""
    code = "import sys, colonnade.cli; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out.startswith("colonnade ")


def test_unknown_flag_offers_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "train", "--model.layres", "3", code=2)
    assert "--model.layers" in said
    assert "run colonnade train --help" in said


def test_help_is_a_verb_too(capsys: pytest.CaptureFixture[str]) -> None:
    for words, usage in (
        (["help"], "usage: colonnade [-h]"),
        (["help", "convert"], "usage: colonnade convert"),
        (["help", "train"], "usage: colonnade train"),
    ):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0
        assert usage in capsys.readouterr().out
    assert "no verb 'convret'; did you mean 'convert'?" in refused(capsys, "help", "convret", code=2)


def test_presets_are_listed_with_their_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["presets"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["name", "family", "total", "active", "layers", "width", "context"]
    assert [row[0] for row in rows[1:] if row and row[0] in PRESETS] == list(PRESETS)
    assert ["smollm2-135m", "llama", "135", "M", "135", "M", "30", "576", "8,192"] in rows
    assert ["mixtral-8x7b", "mixtral", "46.7", "B", "12.9", "B", "32", "4,096", "32,768"] in rows
    assert not any("…" in word for row in rows for word in row), "nothing is cut off"
    main(["presets", "--match", "qwen3_moe"])
    assert "qwen3-30b-a3b" in (said := capsys.readouterr().out) and "tour" not in said
    assert "no preset or family has 'llma' in its name; did you mean" in refused(capsys, "presets", "--match", "llma")


def test_unknown_verb_offers_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no verb 'trian'; did you mean 'train'?" in refused(capsys, "trian", code=2)


def test_unknown_key_in_toml(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nlearning_rate = 1\n")
    said = refused(capsys, "train", "--config", file)
    assert "run.toml:2: TrainConfig has no key 'learning_rate'; " in said


def test_missing_toml(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "train", "--config", "nope.toml")
    assert said == "ConfigError: nope.toml cannot be read: No such file or directory; give a file of settings in TOML"


def test_a_plan_in_words() -> None:
    assert "703 of 703 hidden units, 4096 of 4096" in Plan().table(preset("tour").replace(ffn_width=703))[0][2]
    assert [plural(1, "rank"), plural(0, "rank"), plural(2, "process")] == ["1 rank", "0 ranks", "2 processes"]
    assert (
        "up to 352 of 703 hidden units, 2048 of 4096" in Plan(tp=2).table(preset("tour").replace(ffn_width=703))[0][2]
    )


def test_unknown_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no preset 'gpt3'; did you mean 'gpt2'?" in refused(capsys, "train", "--preset", "gpt3")


def test_kv_heads_must_divide(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "train", "--plan.tp", "3")
    assert "PlanError: 4 key/value heads do not divide over tp=3; use tp of 1, 2 or 4" in said


@pytest.mark.parametrize(
    "verb", [["generate", "hi"], ["eval"], ["chat"], ["serve", "--serve.port", "0"]], ids=lambda v: v[0]
)
def test_a_plan_is_checked_before_any_process_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, hf: Path, verb: list[str]
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("colonnade.parallel.launch.elastic_launch", started)
    monkeypatch.setattr("colonnade.serve.engine_process._spawn", started)
    for place in (model, hf):
        said = refused(capsys, verb[0], place, *verb[1:], "--plan.tp", "4")
        assert said == "PlanError: 2 key/value heads do not divide over tp=4; use tp of 1 or 2"


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_batch_invariance_over_ranks_is_refused_before_any_process_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, axis: str
) -> None:
    monkeypatch.setattr("colonnade.serve.engine_process._spawn", lambda *_: pytest.fail("a process was started"))
    said = refused(capsys, "serve", model, "--serve.port", "0", "--serve.batch_invariant", f"--plan.{axis}", "2")
    assert f"serve.batch_invariant is for one rank, and this model is on {axis}=2" in said


@pytest.mark.parametrize("verb", [["generate", "hi"], ["eval"], ["chat"], ["serve"]], ids=lambda v: v[0])
def test_verbs_take_only_what_they_use(capsys: pytest.CaptureFixture[str], model: Path, verb: list[str]) -> None:
    """A plan for training, and (but for serve) a server's address, say nothing about one model's answers."""
    for flag in ("--plan.dp", "--plan.stages", *(["--serve.port"] if verb != ["serve"] else [])):
        assert f"Unrecognized options: {flag}" in refused(capsys, verb[0], model, *verb[1:], flag, "3", code=2)


def test_chat_needs_a_template(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """Refused at the start, whether or not a question comes."""
    said = refused(capsys, "chat", model)
    assert said == (
        f"CheckpointError: {model} has no chat template, so it cannot chat; continue a text instead: "
        f"colonnade generate {model} PROMPT"
    )


def test_sizes_follow_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """A width given alone changes the heads' width with it."""
    main(["train", "--preset", "tour", "--model.width", "512", "--plan.tp", "2", "--dry_run"])
    said = capsys.readouterr().out
    assert "head_width = 64" in said
    assert "tp = 2" in said


def test_precedence(capsys: pytest.CaptureFixture[str], tmp_path: Path, corpus: Path) -> None:
    """Command line over TOML over preset over default; the vocabulary follows the corpus."""
    file = tmp_path / "run.toml"
    file.write_text('[train]\nlr = 0.25\nsteps = 7\nwarmup = 1\n[model]\nlayers = 3\n[data]\npath = "nowhere"\n')
    argv = ["train", "--config", str(file), "--train.steps", "9", "--data.path", str(corpus), "--dry_run"]
    main(argv)
    run = colonnade.RunConfig(**tomllib.loads(capsys.readouterr().out))
    assert (run.train.lr, run.train.steps, run.model.layers, run.model.width) == (0.25, 9, 3, 256)
    assert run.model.vocab_size == 300
    assert run.data.path == corpus


def test_only_the_first_process_speaks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun each process runs the command line."""
    monkeypatch.setenv("RANK", "1")
    main(["train", "--dry_run"])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("argv", [["demo"], ["chat", "tiny"], ["serve", "tiny"]])
def test_verbs_that_start_their_own_processes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert f"PlanError: {argv[0]} starts the processes of its plan itself" in refused(capsys, *argv)


def test_world_size_mismatch(tmp_path: Path, corpus: Path) -> None:
    """Two processes under torchrun, and a plan of four."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "colonnade", "train", "--plan.dp", "4", "--data.path", str(corpus), "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    expected = "PlanError: the plan (dp=4) needs 4 processes but 2 were started; start 4, or set --plan.dp 2"
    assert expected in done.stderr
    assert f"traceback : {expected}" in done.stderr[done.stderr.index("Root Cause") :], "torchrun ends with it, too"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("sentences", "said"), [(40, "its end is held out"), (9000, r"\d+ spans of it are held out")])
def test_a_corpus_of_one_file_says_what_is_held_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sentences: int, said: str
) -> None:
    (tmp_path / "book.txt").write_text("The quick brown fox jumps. " * sentences)
    main(["corpus", str(tmp_path / "book.txt"), "--out", str(tmp_path / "book"), "--vocab_size", "260"])
    assert re.search(f"one document was given: {said} for validation", capsys.readouterr().err)


def test_empty_corpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "void.txt").write_text("")
    assert "DataError: " in refused(capsys, "corpus", tmp_path / "void.txt", "--out", tmp_path / "corpus")
    assert [path.name for path in tmp_path.iterdir()] == ["void.txt"]


def test_file_that_is_not_text(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "photo.txt").write_bytes(b"plain so far \xff\xfe\x00\x01")
    said = refused(capsys, "corpus", tmp_path / "photo.txt", "--out", tmp_path / "corpus")
    assert "DataError: " in said
    assert "photo.txt" in said
    assert not (tmp_path / "corpus").exists()


def test_missing_corpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = refused(capsys, "train", "--data.path", tmp_path / "nowhere", "--runs", tmp_path / "runs")
    assert "is not a corpus" in said
    (tmp_path / "book.txt").write_text(TEXT)
    said = refused(capsys, "train", "--data.path", tmp_path / "book.txt", "--runs", tmp_path / "runs")
    assert f"make one of it: colonnade corpus {tmp_path / 'book.txt'} --out {tmp_path / 'book'}" in said
    assert not (tmp_path / "runs").exists()


def test_vocabulary_of_another_corpus(capsys: pytest.CaptureFixture[str], tmp_path: Path, corpus: Path) -> None:
    argv = ["train", "--data.path", corpus, "--runs", tmp_path / "runs", "--model.vocab_size", "200"]
    assert "vocab" in refused(capsys, *argv)


def test_missing_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "CheckpointError: /nowhere does not exist" in refused(capsys, "generate", "/nowhere", "hi")


def test_truncated_safetensors(capsys: pytest.CaptureFixture[str], hf: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in hf.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert str(weights) in refused(capsys, "generate", broken, "hi")
    weights.unlink()
    assert "model.safetensors" in refused(capsys, "generate", broken, "hi")


def test_wrong_checksum(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    for file in model.rglob("*"):
        if file.is_file():
            target = broken / file.relative_to(model)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    weights = next(broken.glob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert str(weights) in refused(capsys, "generate", broken, "hi")


def test_port_in_use(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refused(capsys, "serve", model, "--serve.port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}: address already in use; choose another --serve.port" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--train.steps", "0"], "--train.steps is 0: input should be greater than 0"),
        (["train", "--plan.tp=0"], "--plan.tp is 0: input should be greater than or equal to 1"),
        (["train", "--model.ffn-width", "-1"], "--model.ffn_width is -1: input should be greater than 0"),
        (["serve", "m", "--serve.page_tokens", "0"], "--serve.page_tokens is 0: input should be greater than 0"),
        (["generate", "m", "hi", "--serve.cache_bytes", "0"], "--serve.cache_bytes is 0: input should be greater"),
    ],
    ids=lambda x: x if isinstance(x, str) else x[1],
)
def test_a_number_out_of_range_is_named_by_its_flag(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert refused(capsys, *words).startswith(f"ConfigError: {said}")


def test_a_number_out_of_range_in_a_file_is_named_as_the_file_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 0\n")
    said = refused(capsys, "train", "--config", tmp_path / "run.toml", "--train.lr", "1e-3")
    assert "run.toml:2: TrainConfig.steps is 0" in said


def test_generate_says_that_it_loads_and_then_only_the_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    told = []

    @contextmanager
    def status(self: Console, what: str) -> Iterator[None]:
        told.append(what)
        yield
        told.append(capsys.readouterr().out)

    monkeypatch.setattr(Console, "status", status)
    main(["generate", str(model), "the quick", "--max_tokens", "3"])
    assert told == ["loading the model", ""]
    assert capsys.readouterr().out.endswith("\n")


def test_prompt_over_the_context(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    said = refused(capsys, "generate", model, "fox " * 100)
    assert "RequestError: " in said
    assert "64" in said


def test_pool_too_small_for_one_request(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    said = refused(
        capsys, "generate", model, "the quick brown fox jumps over", "--serve.pages", "1", "--max_tokens", "20"
    )
    assert "CapacityError: " in said
    assert "--serve." in said


def test_a_cache_that_holds_nothing_is_refused_before_weights_are_read(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, place := tmp_path / "m")
    for file in place.glob("weights-*"):
        file.write_bytes(bytes(file.stat().st_size))
    for verb in (["generate", place, "hi"], ["serve", place, "--serve.port", "0"]):
        said = refused(capsys, *verb, "--device", "cpu", "--serve.cache_bytes", "10")
        assert "CapacityError: --serve.cache_bytes 10 holds no page of 16 tokens" in said


def test_generate_eval_and_convert(capsys: pytest.CaptureFixture[str], model: Path, hf: Path, tmp_path: Path) -> None:
    """The same text from our format, from a Hugging Face folder, and from that converted back."""
    back = tmp_path / "back"
    main(["convert", str(hf), str(back), "--format", "colonnade"])
    (tmp_path / "text.txt").write_text(TEXT)
    texts, scores = set(), set()
    for place in (model, hf, back):
        capsys.readouterr()
        main(["generate", str(place), "the quick", "--temperature", "0", "--max_tokens", "8"])
        texts.add(capsys.readouterr().out)
        main(["eval", str(place), "--text", str(tmp_path / "text.txt")])
        scores.add(capsys.readouterr().out)
    assert len(texts) == 1
    assert len(scores) == 1
    assert "perplexity" in scores.pop()
    assert "already" in refused(capsys, "convert", str(hf), str(back))


def test_convert_makes_experts_of_a_dense_model(capsys: pytest.CaptureFixture[str], hf: Path, tmp_path: Path) -> None:
    main(["convert", str(hf), str(tmp_path / "four"), "--upcycle", "4"])
    with colonnade.load(hf, device="cpu") as dense, colonnade.load(tmp_path / "four", device="cpu") as sparse:
        assert sparse.config.moe is not None
        assert (sparse.config.moe.experts, sparse.config.moe.active) == (4, 2)
        assert (dense.logits([1, 2, 3]) - sparse.logits([1, 2, 3])).abs().max() < 1e-4
    words = ["convert", str(tmp_path / "four"), str(tmp_path / "eight"), "--upcycle", "8"]
    assert "has 4 experts already" in refused(capsys, *words)
    words[1] = str(hf)
    assert "with one expert a token" in refused(capsys, *words, "--active", "1")
    assert "cannot go to 9 of 8 experts; make 9 or more, or" in refused(capsys, *words, "--active", "9")
    assert "add --upcycle with their number" in refused(capsys, *words[:3], "--active", "2")
    assert not (tmp_path / "eight").exists()


def test_experts_do_as_they_are_told(capsys: pytest.CaptureFixture[str], hf: Path, tmp_path: Path) -> None:
    """Equal experts: with one a token the router's weight is what changes; where they wait changes nothing."""
    four, text = tmp_path / "four", tmp_path / "text.txt"
    main(["convert", str(hf), str(four), "--upcycle", "4"])
    text.write_text(TEXT)
    capsys.readouterr()
    said = {}
    for flags in ("", "--experts.resident 1", "--experts.active 3", "--experts.active 1 --experts.capacity 8"):
        main(["eval", str(four), "--text", str(text), *flags.split()])
        said[flags] = capsys.readouterr().out
    assert said[""] == said["--experts.resident 1"] == said["--experts.active 3"]
    assert said["--experts.active 1 --experts.capacity 8"] != said[""]
    main(
        [
            "generate",
            str(four),
            "the quick",
            "--max_tokens",
            "3",
            "--experts.capacity",
            "off",
            "--experts.resident",
            "1",
        ]
    )
    message = refused(capsys, "eval", four, "--text", text, "--experts.active", "5")
    assert "ConfigError: a token cannot go to 5 of 4 experts; set --experts.active 4 or less" in message
    assert "this model has none; leave it out" in refused(capsys, "generate", hf, "the", "--experts.resident", "1")
    message = refused(capsys, "serve", four, "--experts.resident", "3")
    assert "--experts.resident 3 is more than the 2 layers of experts" in message
    message = refused(capsys, "generate", four, "the", "--plan.ep", "2")
    assert "does not divide their number 1; set --plan.tp or --plan.cp to 2" in message


def test_a_corpus_with_tasks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("web", "books"):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(TEXT.split(".")))
    words = [str(tmp_path / "web.txt"), str(tmp_path / "books.txt"), "--separator", "\n\n", "--vocab_size", "280"]
    main(["corpus", *words, "--out", str(tmp_path / "it"), "--tasks", "source"])
    assert f"2 tasks: 0 {words[0]}, 1 {words[1]}" in capsys.readouterr().err
    assert Corpus(tmp_path / "it").manifest.tasks == tuple(words[:2])
    assert "neither source nor field:NAME" in refused(
        capsys, "corpus", *words, "--out", tmp_path / "no", "--tasks", "x"
    )


@pytest.mark.parametrize("format", ["hf", "colonnade"])
def test_convert_overwrites_only_a_model(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, format: str
) -> None:
    out, precious = tmp_path / "out", tmp_path / "precious"
    precious.mkdir()
    (precious / "novel.txt").write_text("chapter 1")
    words = ["convert", str(model), str(out), "--format", format]
    main(words)
    (out / "of-the-old-one").touch()
    assert "exists already; choose another name, or replace it (--overwrite)" in refused(capsys, *words)
    main([*words, "--overwrite"])
    assert not (out / "of-the-old-one").exists()
    assert colonnade.load(out).logits([1, 2]).shape == (2, 300)
    words = ["convert", str(model), str(precious), "--format", format, "--overwrite"]
    assert "is not a model, so it is not overwritten" in refused(capsys, *words)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.suffix == ".txt") == ["novel.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "precious"], "nothing is left beside them"


@pytest.mark.parametrize("format", ["hf", "colonnade"])
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_files_are_as_readable_as_the_umask_says(model: Path, tmp_path: Path, format: str, mask: int) -> None:
    before = os.umask(mask)
    try:
        main(["convert", str(model), str(tmp_path / "out"), "--format", format])
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o666 & ~mask}
    assert any(path.suffix == ".safetensors" for path in files)


TINY = [
    *("--model.layers", "1", "--model.width", "16", "--model.heads", "2", "--model.kv_heads", "1"),
    *("--model.ffn_width", "24", "--model.context", "32", "--data.sequence", "32", "--device", "cpu"),
    *("--train.batch", "4", "--train.micro_batch", "2", "--train.eval_samples", "2"),
]


def test_eval_tells_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    """Where there is no terminal to draw on: at once, then now and then."""
    (tmp_path / "text.txt").write_text(TEXT * 30)
    words = ["eval", str(model), "--text", str(tmp_path / "text.txt")]
    main(words)
    (once,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"scoring: 0 of \d+ windows", once)
    monkeypatch.setattr("colonnade.cli.evaluation.PROGRESS_INTERVAL_S", 0)
    main(words)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1 and lines[0] == once


def test_ones_own_text(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file, or a few short ones: both become a corpus, and train, without another flag."""
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    for i in range(12):
        Path(f"notes/{i}.txt").write_text(f"note {i}: {TEXT[: 5 + 2 * i]}")
    Path("book.txt").write_text("\n".join(f"chapter {i}: {TEXT}" for i in range(20)))
    for source, validated in (("book.txt", True), ("notes", False)):
        main(["corpus", source, "--out", f"{source}-corpus", "--vocab_size", "280"])
        assert " 1 document, " in capsys.readouterr().err or source == "notes"
        words = ["train", "--data.path", f"{source}-corpus", "--name", source, "--train.steps", "3", *TINY]
        main(words)
        said = capsys.readouterr().out
        assert ("validation loss" in said) is validated
        assert ("validation is off: notes-corpus holds out " in said) is not validated
    assert "the validation split has" in refused(capsys, *words, "--train.eval_every", "2"), "asked for, and impossible"


def test_the_warm_up_follows_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--train.steps", "30", "--dry_run"])
    said = refused(capsys, "train", "--train.steps", "30", "--train.warmup", "31", "--dry_run")
    assert "--train.warmup 31 is longer than the run of 30 steps" in said
    rates = [learning_rate(step, TrainConfig(steps=30)) for step in range(30)]
    assert rates.index(max(rates)) == 3 == TrainConfig(steps=30).warmup_steps
    assert TrainConfig(steps=5000).warmup_steps == 100


def test_a_run_that_cannot_start_shows_no_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path
) -> None:
    """Everything is checked before the plan is printed and before any process starts."""
    monkeypatch.setattr("colonnade.parallel.launch.elastic_launch", None)
    empty = tmp_path / "empty"
    build([(str(i), f"{i} {TEXT}") for i in range(9)], empty, vocab_size=300, validation_share=0)
    runs = ["--runs", str(tmp_path / "runs"), "--plan.tp", "2"]
    for words, says in (
        (["--data.path", str(tmp_path / "nowhere")], "is not a corpus"),
        (["--data.path", str(corpus), "--device", "cuda"], "use --device cpu"),
        (["--data.path", str(empty), "--train.eval_every", "5", "--data.sequence", "32"], "no validation documents"),
    ):
        with pytest.raises(SystemExit):
            main(["train", *words, *runs])
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
    main(["train", "--data.path", str(tmp_path / "nowhere"), "--dry_run"])
    assert "nowhere is no corpus yet: the vocabulary is the model's own" in capsys.readouterr().err
    said = refused(capsys, "train", "--preset", "tour-moe", "--model.moe.router.kind", "swich", "--dry_run")
    assert "there is no router 'swich'" in said and "switch" in said


def test_resuming_says_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path
) -> None:
    words = ["train", "--data.path", str(corpus), "--runs", str(tmp_path), "--name", "it", *TINY, "--train.steps", "2"]
    main(words)
    assert "already" not in capsys.readouterr().out
    main([*words[:-1], "1"])
    assert "already at step 2 of 1; raise --train.steps to go on" in capsys.readouterr().out
    shutil.copytree(tmp_path / "it", tmp_path / "hurt")
    (weights,) = (tmp_path / "hurt" / "step-2").glob("weights-*")
    weights.write_bytes(weights.read_bytes()[:-9])
    assert f"{weights} has " in refused(capsys, "eval", tmp_path / "hurt"), "its one checkpoint, which is damaged"
    words[words.index("--model.layers") + 1] = "3"
    monkeypatch.setattr("colonnade.parallel.launch.elastic_launch", None)
    said = refused(capsys, *words, "--plan.dp", "2")  # before any process starts
    assert "is a checkpoint of another model (model.layers: 1 -> 3); resume with the model settings" in said


def test_experts_for_a_dense_preset(capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path) -> None:
    """How many there are makes a mixture of the preset; all other flags about them need that, and say so."""
    words = ["train", "--data.path", str(corpus), "--runs", str(tmp_path), *TINY, "--train.steps", "1"]
    main([*words, "--model.moe.experts", "3", "--model.moe.router.kind", "sigmoid", "--dry_run"])
    model = tomllib.loads(capsys.readouterr().out)["model"]
    assert (model["family"], model["moe"]["experts"], model["moe"]["active"]) == ("mixtral", 3, 2)
    assert (model["moe"]["ffn_width"], model["moe"]["router"]["kind"]) == (24, "sigmoid")
    main([*words, "--model.moe.experts=3", "--model.moe.ffn-width=8", "--name", "experts"])
    assert "experts: 0.0" in capsys.readouterr().out
    for flag in ("--model.moe.active=1", "--model.moe.ffn-width=3"):
        said = refused(capsys, *words, flag)
        assert "is about experts, and this model has none; set their number with --model.moe.experts" in said
    said = refused(capsys, *words, "--model.latent.kv_rank", "8")
    assert "put the complete table [model.latent] into a file for --config" in said
    main([*words, "--name", "dense", "--train.fused_adamw", "True"])
    assert "on cpu, float32, fused AdamW, " in capsys.readouterr().out, "the first lines say what the run uses"
    said = refused(capsys, *words, "--train.start", tmp_path / "dense", "--model.moe.experts", "3")
    assert f"colonnade convert {tmp_path / 'dense'} OUT --format colonnade --upcycle 3" in said


def test_train_and_use(capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path) -> None:
    """A run from the command line: trains, resumes to the end, and its folder is a model."""
    argv = ["train", "--data.path", str(corpus), "--runs", str(tmp_path), "--name", "tiny", "--device", "cpu"]
    argv += ["--model.layers", "1", "--model.width", "16", "--model.heads", "2", "--model.kv_heads", "1"]
    argv += ["--model.ffn_width", "24", "--model.context", "32", "--data.sequence", "32", "--train.warmup", "1"]
    argv += ["--train.batch", "4", "--train.micro_batch", "2", "--train.eval_samples", "2"]
    main([*argv, "--train.steps", "3"])
    rows = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    main([*argv, "--train.steps", "3"])  # nothing left to do, and no harm done
    capsys.readouterr()
    main(["generate", str(tmp_path / "tiny"), "the", "--max_tokens", "4", "--seed", "1"])
    assert capsys.readouterr().out.strip()


def test_parsing_calls_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(parse(["serve", "/nowhere", "--serve.port", "0"]))
    assert capsys.readouterr() == ("", "")


def test_a_stopped_run_says_how_to_go_on(corpus: Path, tmp_path: Path) -> None:
    """Ctrl-C saves, and the exit code keeps ``train && serve`` from going on."""
    command = [sys.executable, "-m", "colonnade", "train", "--data.path", str(corpus), "--runs", str(tmp_path)]
    command += ["--model.layers", "1", "--data.sequence", "32", "--train.batch", "1", "--train.log_every", "1"]
    run = subprocess.Popen(
        [*command, "--train.steps", "1000000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("step"):
            break
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=60)
    assert run.returncode == 130
    (checkpoint,) = (tmp_path / "run").glob("step-*")
    assert f"stopped by SIGINT; the same command continues from {checkpoint}" in said
    assert "Traceback" not in said


def test_stopped_workers_are_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stopped() -> None:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setitem(VERBS, "demo", stopped)
    refused(capsys, "demo", code=128 + signal.SIGTERM)


def test_a_run_that_is_not_there_is_no_hub_id(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """The runs there are stand in the message; the Hub does, where it may have been meant."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    assert refused(capsys, "generate", "runs/typo", "hi").startswith(
        "CheckpointError: runs/typo does not exist; give a"
    )
    for name in ("speeches", "book"):
        shutil.copytree(model, f"runs/{name}/step-3")
    Path("runs/empty").mkdir()
    assert "runs/spechees does not exist; here are runs/speeches, runs/book" in refused(capsys, "eval", "runs/spechees")
    Path("words").mkdir()
    Path("words/manifest.json").write_text("{}")  # as a corpus has one
    assert refused(capsys, "eval", "words").endswith("safetensors; here are runs/speeches, runs/book")
    assert "; here are smollm2, minilm (an encoder), runs/" in refused(capsys, "eval", "smollm")
    assert "similar presets: tour" in refused(capsys, "verify", "tuor")
    said = refused(capsys, "eval", "run/speeches")
    assert "Hub" in said and "; here are runs/speeches, runs/book" in said


def test_one_model_that_may_have_been_meant_is_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "runs/book/step-3")
    assert refused(capsys, "eval", "runs/bok").endswith("does not exist; here is runs/book")


def test_what_is_wrong_with_the_words_is_said_before_torch_is_imported() -> None:
    """Else a typo costs three seconds."""
    code = """
import sys
from colonnade.cli import main
for verb in (["generate", "smollm2", "hi"], ["chat", "smollm2"]):
    for flags in ("--temperature -1", "--top_p 2", "--stop=", "--plan.cp 0", "--serve.cache_bytes 0"):
        try:
            main([*verb, *flags.split()])
        except SystemExit as end:
            assert end.code == 1 and "torch" not in sys.modules, flags
        else:
            raise AssertionError(flags)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    for said in ("temperature is -1", "top_p is 2", "strings that are not empty", "--plan.cp is 0", "cache_bytes is 0"):
        assert done.stderr.count(said) == 2, done.stderr


def test_an_encoder_is_not_offered_to_write_and_refused_before_any_process_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("colonnade.serve.engine_process._spawn", lambda *_: pytest.fail("a process was started"))
    config = ModelConfig(
        family="bert", causal=False, vocab_size=300, layers=1, width=8, heads=2, ffn_width=8, context=16,
        norm="layernorm", positions="learned", segments=2, gated=False, activation="gelu", top="encoder", tied=True,
    )  # fmt: skip
    decoder = ModelConfig(causal=False, vocab_size=300, layers=1, width=8, heads=2, ffn_width=8, context=16)
    native.save(
        tmp_path / "it", initialise(Transformer(config), 0), native.Meta(model=config), DistributedContext.solo()
    )
    native.save(
        tmp_path / "decoder", initialise(Transformer(decoder), 0), native.Meta(model=decoder), DistributedContext.solo()
    )
    for verb in (["generate", "hi"], ["chat"], ["serve", "--serve.port", "0"]):
        for name in ("it", "decoder"):
            said = refused(capsys, verb[0], tmp_path / name, *verb[1:])
            assert said.startswith(f"ConfigError: {tmp_path / name} attends in both directions (causal = False)")
        with pytest.raises(SystemExit):
            main([verb[0], "--help"])
        assert "minilm" not in capsys.readouterr().out


def test_a_prompt_from_the_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    words = [str(model), "--temperature", "0", "--max_tokens", "5", "--serve.cache", "float8", "--serve.page_tokens=3"]
    main(["generate", *words, "the quick"])
    expected = capsys.readouterr().out

    def typed(text: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))

    typed(b"the quick\n")
    main(["generate", *words, "-"])
    assert capsys.readouterr().out == expected
    typed(b"the \xff")
    assert "RequestError: the standard input is not UTF-8 text (byte 4)" in refused(capsys, "generate", *words, "-")


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ColonnadeError):
        main(["--debug", "generate", "/nowhere", "hi"])
    with pytest.raises(ColonnadeError):
        main(["generate", "/nowhere", "hi", "--debug"])


def test_load_outside_a_group_names_the_command(hf: Path) -> None:
    with pytest.raises(PlanError, match="torchrun --nproc-per-node 2"):
        colonnade.load(hf, plan=colonnade.Plan(tp=2))


def test_python_surface(hf: Path, tmp_path: Path) -> None:
    with colonnade.load(hf, dtype="float64") as loaded:
        parameters = f"{loaded.config.parameters:,} parameters"
        assert repr(loaded) == f"Model('{hf}', llama, {parameters}, float64, one process on cpu)"
        ids = loaded.tokenizer.encode("the quick brown")
        logits = loaded.logits(ids)
        assert logits.shape == (len(ids), loaded.config.vocab_size)
        assert logits.dtype == torch.float64
        answer = loaded.generate(ids, max_tokens=1, temperature=0)
        assert answer == [int(logits[-1].argmax())]
        assert isinstance(loaded.generate("the quick", max_tokens=3), str)
        colonnade.save(loaded, tmp_path / "again", format="hf")
    assert torch.equal(colonnade.load(tmp_path / "again", dtype="float64").logits(ids), logits)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda m: m.logits([]), "tokens is empty; give at least one token"),
        (lambda m: m.logits([1, 10**6]), "token 1000000 is not in the vocabulary of 300; give ids from 0 to 299"),
        (lambda m: m.logits([-1]), "token -1 is not in the vocabulary"),
        (lambda m: m.logits("text"), r"tokens is 'text'; give a list of token ids, such as model.tokenizer.encode"),
        (lambda m: m.logits([1.5]), r"tokens is \[1.5\]; give a list of token ids"),
        (lambda m: m.logits(torch.tensor([[1, 2]])), r"tokens is tensor\(\[\[1, 2\]\]\); give a list"),
        (lambda m: m.hidden([1, 2], [0]), "1 segment for 2 tokens; give one for each"),
        (lambda m: m.score(["a", "b"]), r"the text is \['a', 'b'\]; give a text, or a list of token ids"),
        (lambda m: m.generate([["a"], "b"]), r"the prompt is \['a'\]; give one text"),
        (lambda m: m.generate("a", temprature=0), "unknown parameter 'temprature'; did you mean 'temperature'?"),
        (
            lambda m: colonnade.Engine("smollm2"),
            "an Engine serves a loaded model, not 'smollm2'; give it colonnade.load",
        ),
        (lambda m: colonnade.Engine(m.transformer), "not a Transformer; give it colonnade.load"),
        (lambda m: colonnade.Engine(m, {"pages": 3}), "an Engine's config is no dict; give it ServeConfig"),
    ],
)
def test_plain_mistakes_are_one_line_with_the_remedy(hf: Path, ask: Callable, message: str) -> None:
    with colonnade.load(hf) as loaded, pytest.raises(ColonnadeError, match=message) as refusal:
        ask(loaded)
    assert "\n" not in str(refusal.value)

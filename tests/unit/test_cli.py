"""The command line: results of the verbs, and one-line errors with a remedy."""

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
from colonnade.config import ModelConfig, Plan, TrainConfig, TuneConfig, plural
from colonnade.config.presets import PRESETS, preset
from colonnade.config.tune import METHODS_OF_SETTING, check_method_settings
from colonnade.data import Corpus, build
from colonnade.errors import ColonnadeError, ConfigError, Interrupted, PlanError
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
    """A tiny untrained model with a tokenizer, in the native format."""
    config = ModelConfig(vocab_size=300, layers=2, width=24, heads=4, kv_heads=2, ffn_width=26, context=64)
    path = tmp_path_factory.mktemp("models") / "tiny"
    transformer = initialise(Transformer(config), 0)
    native.save(
        path, transformer, native.Meta(model=config), DistributedContext.solo(), tokenizer=Corpus(corpus).tokenizer
    )
    return path


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The same model as a Hugging Face folder."""
    out = tmp_path_factory.mktemp("hf") / "tiny"
    main(["convert", str(model), str(out)])
    return out


def opened_here(supervisor: tuple[object, ...], _placement: object) -> None:
    """In place of starting a server's supervisor: opens the model as it does before it starts the ranks."""
    _plugins, open_model, *_ = supervisor
    assert callable(open_model)
    open_model()
    pytest.fail("ranks were started")


def error_of(capsys: pytest.CaptureFixture[str], *argv: str | Path, code: int = 1) -> str:
    """The error output of a command that exits with ``code``: one line, never a traceback."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in argv])
    assert end.value.code == code
    output = capsys.readouterr().err
    assert "Traceback" not in output
    if code == 1:
        errors = [line for line in output.splitlines() if "Error: " in line]
        assert len(errors) == 1
        return errors[0]
    return output


def test_every_verb_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        with pytest.raises(SystemExit) as end:
            main([verb, "--help"])
        assert end.value.code == 0
        output = capsys.readouterr().out
        assert f"usage: colonnade {verb}" in output
        assert "--help" in output


def test_help_needs_no_torch() -> None:
    """Start-up stays fast: only the verbs that use torch import it."""
    code = "import sys, colonnade.cli; assert 'torch' not in sys.modules, 'torch was imported'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--version"])
    assert capsys.readouterr().out.startswith("colonnade ")


def test_unknown_flag_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    output = error_of(capsys, "train", "--model.layres", "3", code=2)
    assert "--model.layers" in output
    assert "run colonnade train --help" in output


def test_help_works_as_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, usage in (
        (["help"], "usage: colonnade [-h]"),
        (["help", "convert"], "usage: colonnade convert"),
        (["help", "train"], "usage: colonnade train"),
    ):
        with pytest.raises(SystemExit) as end:
            main(argv)
        assert end.value.code == 0
        assert usage in capsys.readouterr().out
    assert "no verb 'convret'; did you mean 'convert'?" in error_of(capsys, "help", "convret", code=2)


def test_presets_are_listed_with_their_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    main(["presets"])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["name", "family", "total", "active", "layers", "width", "context"]
    assert [row[0] for row in rows[1:] if row and row[0] in PRESETS] == list(PRESETS)
    assert ["smollm2-135m", "llama", "135", "M", "135", "M", "30", "576", "8,192"] in rows
    assert ["mixtral-8x7b", "mixtral", "46.7", "B", "12.9", "B", "32", "4,096", "32,768"] in rows
    assert not any("…" in word for row in rows for word in row), "no cell is truncated"
    main(["presets", "--match", "qwen3_moe"])
    assert "qwen3-30b-a3b" in (output := capsys.readouterr().out) and "tour" not in output
    assert "no preset or family has 'llma' in its name; did you mean" in error_of(capsys, "presets", "--match", "llma")


def test_unknown_verb_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no verb 'trian'; did you mean 'train'?" in error_of(capsys, "trian", code=2)


def test_unknown_key_in_toml_names_file_and_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nlearning_rate = 1\n")
    output = error_of(capsys, "train", "--config", file)
    assert "run.toml:2: TrainConfig has no key 'learning_rate'; " in output


def test_missing_toml_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    output = error_of(capsys, "train", "--config", "nope.toml")
    assert output == "ConfigError: nope.toml cannot be read: No such file or directory; use a TOML file of settings"


def test_table_of_a_plan_and_plurals() -> None:
    assert "703 of 703 hidden units, 4096 of 4096" in Plan().table(preset("tour").replace(ffn_width=703))[0][2]
    assert [plural(1, "rank"), plural(0, "rank"), plural(2, "process")] == ["1 rank", "0 ranks", "2 processes"]
    assert (
        "up to 352 of 703 hidden units, 2048 of 4096" in Plan(tp=2).table(preset("tour").replace(ffn_width=703))[0][2]
    )


def test_unknown_preset_suggests_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no preset 'gpt3'; did you mean 'gpt2'?" in error_of(capsys, "train", "--preset", "gpt3")


def test_kv_heads_must_divide_over_tp(capsys: pytest.CaptureFixture[str]) -> None:
    output = error_of(capsys, "train", "--plan.tp", "3")
    assert "PlanError: 4 key/value heads cannot be divided over tp=3; use tp of 1, 2 or 4" in output


@pytest.mark.parametrize(
    "verb", [["generate", "hi"], ["eval"], ["chat"], ["serve", "--serve.port", "0"]], ids=lambda v: v[0]
)
def test_a_plan_is_checked_before_any_process_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, hf: Path, verb: list[str]
) -> None:
    def started(*_: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("colonnade.parallel.launch.elastic_launch", started)
    monkeypatch.setattr("colonnade.serve.engine_process._spawn", opened_here)
    for path in (model, hf):
        output = error_of(capsys, verb[0], path, *verb[1:], "--plan.tp", "4")
        assert output == "PlanError: 2 key/value heads cannot be divided over tp=4; use tp of 1 or 2"


@pytest.mark.parametrize("axis", ["tp", "cp"])
def test_batch_invariance_over_ranks_is_refused_before_any_process_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, axis: str
) -> None:
    monkeypatch.setattr("colonnade.serve.engine_process._spawn", opened_here)
    output = error_of(capsys, "serve", model, "--serve.port", "0", "--serve.batch_invariant", f"--plan.{axis}", "2")
    assert f"serve.batch_invariant is for one rank, and this model is on {axis}=2" in output


@pytest.mark.parametrize("verb", [["generate", "hi"], ["eval"], ["chat"], ["serve"]], ids=lambda v: v[0])
def test_verbs_accept_only_flags_that_they_use(
    capsys: pytest.CaptureFixture[str], model: Path, verb: list[str]
) -> None:
    """Flags of training plans and, except for serve, of the server's address are refused."""
    flags = {"--plan.dp", "--plan.stages", "--serve.port"}
    for flag in flags - {"serve": {"--serve.port"}, "eval": {"--plan.dp"}}.get(verb[0], set()):
        assert f"Unrecognized options: {flag}" in error_of(capsys, verb[0], model, *verb[1:], flag, "3", code=2)


@pytest.mark.parametrize(
    ("method", "flags", "message"),
    [
        ("sft", "--tune.beta 0.2", "tune.beta (a setting of dpo); remove it, or choose another --method"),
        ("sft", "--tune.beta=0.1", "tune.beta (a setting of dpo); remove it, or choose another --method"),
        ("dpo", "--tune.temperature 2", "tune.temperature (a setting of grpo and embed); remove it, or choose"),
        ("grpo", "--tune.truncate", "tune.truncate (a setting of sft, dpo and embed); remove it, or choose"),
        ("embed", "--tune.kl 1 --tune.loss ipo", "tune.loss (a setting of dpo), tune.kl (a setting of grpo); remove"),
    ],
)  # fmt: skip
def test_finetune_refuses_flags_of_other_methods(
    capsys: pytest.CaptureFixture[str], method: str, flags: str, message: str
) -> None:
    """Also a flag that is set to its default."""
    output = error_of(capsys, "finetune", "absent", "--data", "absent", "--method", method, *flags.split())
    assert output.startswith(f"ConfigError: method {method} does not use {message}")


def test_the_help_of_finetune(capsys: pytest.CaptureFixture[str]) -> None:
    def help_of(*flags: str) -> str:
        with pytest.raises(SystemExit):
            parse(["finetune", *flags, "--help"])
        return " ".join(capsys.readouterr().out.replace("│", " ").split())

    shown = help_of()
    assert "MODEL and --data are required, as in: colonnade finetune smollm2 --data rows.jsonl." in shown
    assert "smollm2, or (--method embed) minilm. (required)" in shown
    assert "unless it is set, 2e-5, or 2e-4 with adapters (any --lora flag). (default: 2e-05)" in shown
    assert "(any --lora flag). (default: 0.0002)" in help_of("--lora.rank", "4")
    assert "pretrained_checkpoint" not in shown
    assert "data.sequence" not in shown
    output = error_of(capsys, "finetune", "absent", "--data", "absent", "--train.steps", "0")
    assert output == "ConfigError: --train.steps is 0: input should be greater than 0"
    output = error_of(capsys, "finetune", "absent", "--data", "absent", "--train.steps", "3", "--tune.epochs", "2")
    assert output == "ConfigError: --tune.epochs and --train.steps both set the length of the run; remove one of them"


def test_the_help_names_the_methods_of_each_setting() -> None:
    for name, field in TuneConfig.model_fields.items():
        named = re.findall(r"\b(sft|dpo|grpo|embed): ", field.description or "")
        if name != "truncate":  # grpo only lacks it
            assert tuple(named) == METHODS_OF_SETTING.get(name, ()), name
    changed = TuneConfig(beta=0.2, group=4).model_dump(exclude_defaults=True)
    with pytest.raises(ConfigError, match=r"tune.beta \(a setting of dpo\), tune.group \(a setting of grpo\)"):
        check_method_settings("sft", changed)
    check_method_settings("mine", changed)  # a method of Tuner(methods=...)


def test_chat_needs_a_template(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    """Refused at the start, before any prompt is read."""
    output = error_of(capsys, "chat", model)
    assert output == (
        f"CheckpointError: {model} has no chat template, so it cannot chat; continue a text instead: "
        f"colonnade generate {model} PROMPT"
    )


def test_sizes_are_derived_from_the_flags(capsys: pytest.CaptureFixture[str]) -> None:
    """Setting the width alone also changes the width of the heads."""
    main(["train", "--preset", "tour", "--model.width", "512", "--plan.tp", "2", "--dry_run"])
    output = capsys.readouterr().out
    assert "head_width = 64" in output
    assert "tp = 2" in output


def test_precedence_of_flags_files_presets_and_defaults(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, corpus: Path
) -> None:
    """Command line before TOML before preset before default; the vocabulary comes from the corpus."""
    file = tmp_path / "run.toml"
    file.write_text('[train]\nlr = 0.25\nsteps = 7\nwarmup = 1\n[model]\nlayers = 3\n[data]\npath = "nowhere"\n')
    argv = ["train", "--config", str(file), "--train.steps", "9", "--data.path", str(corpus), "--dry_run"]
    main(argv)
    run = colonnade.RunConfig(**tomllib.loads(capsys.readouterr().out))
    assert (run.train.lr, run.train.steps, run.model.layers, run.model.width) == (0.25, 9, 3, 256)
    assert run.model.vocab_size == 300
    assert run.data.path == corpus


def test_only_the_first_process_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun each process runs the command line, and only rank 0 prints."""
    monkeypatch.setenv("RANK", "1")
    main(["train", "--dry_run"])
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("argv", [["demo"], ["chat", "tiny"], ["serve", "tiny"]])
def test_verbs_that_start_processes_are_refused_under_torchrun(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argv: list[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert f"PlanError: {argv[0]} starts the processes of its plan itself" in error_of(capsys, *argv)


@pytest.mark.slow
def test_world_size_mismatch_is_reported_under_torchrun(tmp_path: Path, corpus: Path) -> None:
    """Two processes under torchrun with a plan for four."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "colonnade", "train", "--plan.dp", "4", "--data.path", str(corpus), "--runs", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    expected = "PlanError: the plan (dp=4) needs 4 processes but 2 were started; start 4, or set --plan.dp 2"
    assert expected in done.stderr
    assert f"traceback : {expected}" in done.stderr[done.stderr.index("Root Cause") :], (
        "torchrun's summary ends with the same message"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sentences", "message"), [(40, "its end is held out"), (9000, r"\d+ spans of it are held out")]
)
def test_a_corpus_of_one_file_reports_what_is_held_out(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, sentences: int, message: str
) -> None:
    (tmp_path / "book.txt").write_text("The quick brown fox jumps. " * sentences)
    main(["corpus", str(tmp_path / "book.txt"), "--out", str(tmp_path / "book"), "--vocab_size", "260"])
    assert re.search(f"one document was given: {message} for validation", capsys.readouterr().err)


def test_empty_corpus_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "void.txt").write_text("")
    assert "DataError: " in error_of(capsys, "corpus", tmp_path / "void.txt", "--out", tmp_path / "corpus")
    assert [path.name for path in tmp_path.iterdir()] == ["void.txt"]


def test_file_that_is_not_text_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "photo.txt").write_bytes(b"plain so far \xff\xfe\x00\x01")
    output = error_of(capsys, "corpus", tmp_path / "photo.txt", "--out", tmp_path / "corpus")
    assert "DataError: " in output
    assert "photo.txt" in output
    assert not (tmp_path / "corpus").exists()


def test_missing_corpus_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    output = error_of(capsys, "train", "--data.path", tmp_path / "nowhere", "--runs", tmp_path / "runs")
    assert "is not a corpus" in output
    (tmp_path / "book.txt").write_text(TEXT)
    output = error_of(capsys, "train", "--data.path", tmp_path / "book.txt", "--runs", tmp_path / "runs")
    assert f"colonnade corpus {tmp_path / 'book.txt'} --out {tmp_path / 'book'}" in output
    assert not (tmp_path / "runs").exists()


def test_vocab_size_of_another_corpus_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, corpus: Path
) -> None:
    argv = ["train", "--data.path", corpus, "--runs", tmp_path / "runs", "--model.vocab_size", "200"]
    assert "vocab" in error_of(capsys, *argv)


def test_missing_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "CheckpointError: /nowhere does not exist" in error_of(capsys, "generate", "/nowhere", "hi")


def test_truncated_safetensors_are_named(capsys: pytest.CaptureFixture[str], hf: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for file in hf.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert str(weights) in error_of(capsys, "generate", broken, "hi")
    weights.unlink()
    assert "model.safetensors" in error_of(capsys, "generate", broken, "hi")


def test_wrong_checksum_names_the_file(capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path) -> None:
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
    assert str(weights) in error_of(capsys, "generate", broken, "hi")


def test_port_in_use_is_refused(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        output = error_of(capsys, "serve", model, "--serve.port", str(port))
    assert f"cannot listen on 127.0.0.1:{port}: address already in use; choose another --serve.port" in output


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["train", "--train.steps", "0"], "--train.steps is 0: input should be greater than 0"),
        (["train", "--plan.tp=0"], "--plan.tp is 0: input should be greater than or equal to 1"),
        (["train", "--model.ffn-width", "-1"], "--model.ffn_width is -1: input should be greater than 0"),
        (["serve", "m", "--serve.page_tokens", "0"], "--serve.page_tokens is 0: input should be greater than 0"),
        (["generate", "m", "hi", "--int8", "--serve.weights", "int4"], "--int8 is --serve.weights int8_dynamic"),
        (["generate", "m", "hi", "--serve.cache_bytes", "0"], "--serve.cache_bytes is 0: input should be greater"),
    ],
    ids=lambda x: x if isinstance(x, str) else x[1],
)
def test_a_number_out_of_range_is_reported_by_flag(
    capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert error_of(capsys, *argv).startswith(f"ConfigError: {message}")


def test_a_number_out_of_range_in_a_file_is_reported_by_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text("[train]\nsteps = 0\n")
    output = error_of(capsys, "train", "--config", tmp_path / "run.toml", "--train.lr", "1e-3")
    assert "run.toml:2: TrainConfig.steps is 0" in output


def test_generate_shows_loading_and_prints_only_the_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    events = []

    @contextmanager
    def status(self: Console, text: str) -> Iterator[None]:
        events.append(text)
        yield
        events.append(capsys.readouterr().out)

    monkeypatch.setattr(Console, "status", status)
    main(["generate", str(model), "the quick", "--max_tokens", "3"])
    assert events == ["loading the model", ""]
    assert capsys.readouterr().out.endswith("\n")


def test_prompt_over_the_context_is_refused(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    output = error_of(capsys, "generate", model, "fox " * 100)
    assert "RequestError: " in output
    assert "64" in output


def test_cache_too_small_for_one_request_is_refused(capsys: pytest.CaptureFixture[str], model: Path) -> None:
    output = error_of(
        capsys, "generate", model, "the quick brown fox jumps over", "--serve.pages", "1", "--max_tokens", "20"
    )
    assert "CapacityError: " in output
    assert "--serve." in output


def test_a_cache_below_one_page_is_refused_before_weights_are_read(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, path := tmp_path / "m")
    for file in path.glob("weights-*"):
        file.write_bytes(bytes(file.stat().st_size))
    for verb in (["generate", path, "hi"], ["serve", path, "--serve.port", "0"]):
        output = error_of(capsys, *verb, "--device", "cpu", "--serve.cache_bytes", "10")
        assert "CapacityError: --serve.cache_bytes 10 is less than one page of 16 tokens" in output


def test_generate_and_eval_agree_across_formats(
    capsys: pytest.CaptureFixture[str], model: Path, hf: Path, tmp_path: Path
) -> None:
    """The native format, a Hugging Face folder and its conversion back generate the same text."""
    back = tmp_path / "back"
    main(["convert", str(hf), str(back), "--format", "colonnade"])
    (tmp_path / "text.txt").write_text(TEXT)
    texts, scores = set(), set()
    for path in (model, hf, back):
        capsys.readouterr()
        main(["generate", str(path), "the quick", "--temperature", "0", "--max_tokens", "8"])
        texts.add(capsys.readouterr().out)
        main(["eval", str(path), "--text", str(tmp_path / "text.txt")])
        scores.add(capsys.readouterr().out)
    assert len(texts) == 1
    assert len(scores) == 1
    assert "perplexity" in scores.pop()
    assert "already" in error_of(capsys, "convert", str(hf), str(back))


def test_convert_upcycles_a_dense_model(capsys: pytest.CaptureFixture[str], hf: Path, tmp_path: Path) -> None:
    main(["convert", str(hf), str(tmp_path / "four"), "--upcycle", "4"])
    with colonnade.load(hf, device="cpu") as dense, colonnade.load(tmp_path / "four", device="cpu") as sparse:
        assert sparse.config.moe is not None
        assert (sparse.config.moe.experts, sparse.config.moe.active) == (4, 2)
        assert (dense.logits([1, 2, 3]) - sparse.logits([1, 2, 3])).abs().max() < 1e-4
    argv = ["convert", str(tmp_path / "four"), str(tmp_path / "eight"), "--upcycle", "8"]
    assert "already has 4 experts" in error_of(capsys, *argv)
    argv[1] = str(hf)
    assert "with one expert per token" in error_of(capsys, *argv, "--active", "1")
    assert "cannot go to 9 of 8 experts; create 9 or more, or" in error_of(capsys, *argv, "--active", "9")
    assert "add --upcycle with their number" in error_of(capsys, *argv[:3], "--active", "2")
    assert not (tmp_path / "eight").exists()


def test_experts_flags_take_effect_or_are_refused(capsys: pytest.CaptureFixture[str], hf: Path, tmp_path: Path) -> None:
    """With equal experts, only one active expert changes the result (its routing weight); residency does not."""
    four, text = tmp_path / "four", tmp_path / "text.txt"
    main(["convert", str(hf), str(four), "--upcycle", "4"])
    text.write_text(TEXT)
    capsys.readouterr()
    output = {}
    for flags in ("", "--experts.layers_on_device 1", "--experts.active 3", "--experts.active 1 --experts.capacity 8"):
        main(["eval", str(four), "--text", str(text), *flags.split()])
        output[flags] = capsys.readouterr().out
    assert output[""] == output["--experts.layers_on_device 1"] == output["--experts.active 3"]
    assert output["--experts.active 1 --experts.capacity 8"] != output[""]
    main(
        [
            "generate",
            str(four),
            "the quick",
            "--max_tokens",
            "3",
            "--experts.capacity",
            "off",
            "--experts.layers_on_device",
            "1",
        ]
    )
    message = error_of(capsys, "eval", four, "--text", text, "--experts.active", "5")
    assert "ConfigError: a token cannot go to 5 of 4 experts; set --experts.active 4 or less" in message
    assert "this model has none; remove it" in error_of(
        capsys, "generate", hf, "the", "--experts.layers_on_device", "1"
    )
    message = error_of(capsys, "serve", four, "--experts.layers_on_device", "3")
    assert "--experts.layers_on_device 3 is more than the 2 layers of experts" in message
    message = error_of(capsys, "generate", four, "the", "--plan.ep", "2")
    assert "does not divide their number 1; set --plan.tp or --plan.cp to 2" in message


def test_corpus_with_tasks_by_source(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for name in ("web", "books"):
        (tmp_path / f"{name}.txt").write_text("\n\n".join(TEXT.split(".")))
    argv = [str(tmp_path / "web.txt"), str(tmp_path / "books.txt"), "--separator", "\n\n", "--vocab_size", "280"]
    main(["corpus", *argv, "--out", str(tmp_path / "it"), "--tasks", "source"])
    assert f"2 tasks: 0 {argv[0]}, 1 {argv[1]}" in capsys.readouterr().err
    assert Corpus(tmp_path / "it").manifest.tasks == tuple(argv[:2])
    assert "neither source nor field:NAME" in error_of(
        capsys, "corpus", *argv, "--out", tmp_path / "no", "--tasks", "x"
    )


@pytest.mark.parametrize("format", ["hf", "colonnade"])
def test_convert_overwrites_only_a_model(
    capsys: pytest.CaptureFixture[str], model: Path, tmp_path: Path, format: str
) -> None:
    out, precious = tmp_path / "out", tmp_path / "precious"
    precious.mkdir()
    (precious / "novel.txt").write_text("chapter 1")
    argv = ["convert", str(model), str(out), "--format", format]
    main(argv)
    (out / "of-the-old-one").touch()
    assert "already exists; choose another name, or replace it (--overwrite)" in error_of(capsys, *argv)
    main([*argv, "--overwrite"])
    assert not (out / "of-the-old-one").exists()
    assert colonnade.load(out).logits([1, 2]).shape == (2, 300)
    argv = ["convert", str(model), str(precious), "--format", format, "--overwrite"]
    assert "is not a model, so it is not overwritten" in error_of(capsys, *argv)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.suffix == ".txt") == ["novel.txt"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "precious"], "no other files are left"


@pytest.mark.parametrize("format", ["hf", "colonnade"])
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_file_modes_follow_the_umask(model: Path, tmp_path: Path, format: str, mask: int) -> None:
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


def test_eval_reports_progress(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path
) -> None:
    """Without a terminal, progress is printed at the start and then at intervals."""
    (tmp_path / "text.txt").write_text(TEXT * 30)
    argv = ["eval", str(model), "--text", str(tmp_path / "text.txt")]
    main(argv)
    assert capsys.readouterr().err == "scoring\n"
    monkeypatch.setattr("colonnade.cli.common.PROGRESS_INTERVAL_S", 0)
    main(argv)
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == "scoring" and len(lines) > 1
    assert all(re.fullmatch(r"scoring: \d+ of \d+ windows", line) for line in lines)


def test_corpus_and_train_on_user_text(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file or a few short ones become a corpus and train without further flags."""
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    for i in range(12):
        Path(f"notes/{i}.txt").write_text(f"note {i}: {TEXT[: 5 + 2 * i]}")
    Path("book.txt").write_text("\n".join(f"chapter {i}: {TEXT}" for i in range(20)))
    for source, validated in (("book.txt", True), ("notes", False)):
        main(["corpus", source, "--out", f"{source}-corpus", "--vocab_size", "280"])
        assert " 1 document, " in capsys.readouterr().err or source == "notes"
        argv = ["train", "--data.path", f"{source}-corpus", "--name", source, "--train.steps", "3", *TINY]
        main(argv)
        output = capsys.readouterr().out
        assert ("validation loss" in output) is validated
        assert ("validation is off: notes-corpus holds out " in output) is not validated
    assert "the validation split has" in error_of(capsys, *argv, "--train.eval_every", "2"), (
        "validation was requested and is impossible"
    )


def test_warmup_is_derived_from_the_steps(capsys: pytest.CaptureFixture[str]) -> None:
    main(["train", "--train.steps", "30", "--dry_run"])
    output = error_of(capsys, "train", "--train.steps", "30", "--train.warmup", "31", "--dry_run")
    assert "--train.warmup 31 is longer than the run of 30 steps" in output
    rates = [learning_rate(step, TrainConfig(steps=30)) for step in range(30)]
    assert rates.index(max(rates)) == 3 == TrainConfig(steps=30).warmup_steps
    assert TrainConfig(steps=5000).warmup_steps == 100


def test_a_run_that_cannot_start_prints_no_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path
) -> None:
    """All checks come before the plan is printed and before any process starts."""
    monkeypatch.setattr("colonnade.parallel.launch.elastic_launch", None)
    empty = tmp_path / "empty"
    build([(str(i), f"{i} {TEXT}") for i in range(9)], empty, vocab_size=300, validation_share=0)
    runs = ["--runs", str(tmp_path / "runs"), "--plan.tp", "2"]
    for argv, message in (
        (["--data.path", str(tmp_path / "nowhere")], "is not a corpus"),
        (["--data.path", str(corpus), "--device", "cuda"], "use --device cpu"),
        (["--data.path", str(empty), "--train.eval_every", "5", "--data.sequence", "32"], "no validation documents"),
    ):
        with pytest.raises(SystemExit):
            main(["train", *argv, *runs])
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    main(["train", "--data.path", str(tmp_path / "nowhere"), "--dry_run"])
    assert "nowhere is not built yet: using the model's vocabulary" in capsys.readouterr().err
    output = error_of(capsys, "train", "--preset", "tour-moe", "--model.moe.router.kind", "swich", "--dry_run")
    assert "there is no router 'swich'" in output and "switch" in output


@pytest.mark.slow
def test_resuming_reports_what_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, corpus: Path, tmp_path: Path
) -> None:
    argv = ["train", "--data.path", str(corpus), "--runs", str(tmp_path), "--name", "it", *TINY, "--train.steps", "2"]
    main(argv)
    assert "already" not in capsys.readouterr().out
    main([*argv[:-1], "1"])
    assert "already at step 2 of 1; raise --train.steps to continue" in capsys.readouterr().out
    shutil.copytree(tmp_path / "it", tmp_path / "hurt")
    (weights,) = (tmp_path / "hurt" / "step-2").glob("weights-*")
    weights.write_bytes(weights.read_bytes()[:-9])
    assert f"{weights} has " in error_of(capsys, "eval", tmp_path / "hurt"), "its only checkpoint is damaged"
    argv[argv.index("--model.layers") + 1] = "3"
    monkeypatch.setattr("colonnade.parallel.launch.elastic_launch", None)
    output = error_of(capsys, *argv, "--plan.dp", "2")  # before any process starts
    assert "is a checkpoint of another model (model.layers: 1 -> 3); resume with the model settings" in output


@pytest.mark.slow
def test_experts_flags_turn_a_dense_preset_into_a_mixture(
    capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path
) -> None:
    """The number of experts turns a dense preset into a mixture; all other flags of experts require it."""
    argv = ["train", "--data.path", str(corpus), "--runs", str(tmp_path), *TINY, "--train.steps", "1"]
    main([*argv, "--model.moe.experts", "3", "--model.moe.router.kind", "sigmoid", "--dry_run"])
    model = tomllib.loads(capsys.readouterr().out)["model"]
    assert (model["family"], model["moe"]["experts"], model["moe"]["active"]) == ("mixtral", 3, 2)
    assert (model["moe"]["ffn_width"], model["moe"]["router"]["kind"]) == (24, "sigmoid")
    main([*argv, "--model.moe.experts=3", "--model.moe.ffn-width=8", "--name", "experts"])
    assert "experts: 0.0" in capsys.readouterr().out
    for flag in ("--model.moe.active=1", "--model.moe.ffn-width=3"):
        output = error_of(capsys, *argv, flag)
        assert "applies to experts, and this model has none; set their number with --model.moe.experts" in output
    output = error_of(capsys, *argv, "--model.latent.kv_rank", "8")
    assert "put the complete table [model.latent] in a file for --config" in output
    main([*argv, "--name", "dense", "--train.fused_adamw", "True"])
    assert "on cpu, float32, fused AdamW, " in capsys.readouterr().out, "the first lines describe the run"
    output = error_of(capsys, *argv, "--train.pretrained_checkpoint", tmp_path / "dense", "--model.moe.experts", "3")
    assert f"colonnade convert {tmp_path / 'dense'} OUT --format colonnade --upcycle 3" in output


def test_a_trained_run_resumes_and_generates(capsys: pytest.CaptureFixture[str], corpus: Path, tmp_path: Path) -> None:
    """A run trains from the command line, resumes at its end, and its folder loads as a model."""
    argv = ["train", "--data.path", str(corpus), "--runs", str(tmp_path), "--name", "tiny", "--device", "cpu"]
    argv += ["--model.layers", "1", "--model.width", "16", "--model.heads", "2", "--model.kv_heads", "1"]
    argv += ["--model.ffn_width", "24", "--model.context", "32", "--data.sequence", "32", "--train.warmup", "1"]
    argv += ["--train.batch", "4", "--train.micro_batch", "2", "--train.eval_samples", "2"]
    main([*argv, "--train.steps", "3"])
    rows = [json.loads(line) for line in (tmp_path / "tiny" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3]
    main([*argv, "--train.steps", "3"])  # no steps left: does nothing
    capsys.readouterr()
    main(["generate", str(tmp_path / "tiny"), "the", "--max_tokens", "4", "--seed", "1"])
    assert capsys.readouterr().out.strip()


def test_parsing_runs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(parse(["serve", "/nowhere", "--serve.port", "0"]))
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_a_stopped_run_says_how_to_continue(corpus: Path, tmp_path: Path) -> None:
    """Ctrl-C saves a checkpoint, and the exit code stops ``train && serve``."""
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
    _, output = run.communicate(timeout=120)
    assert run.returncode == 130
    (checkpoint,) = (tmp_path / "run").glob("step-*")
    assert f"stopped by SIGINT; the same command resumes from {checkpoint}" in output
    assert "Traceback" not in output


def test_stopped_workers_print_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped() -> None:
        raise Interrupted(signal.SIGTERM)

    monkeypatch.setitem(VERBS, "demo", stopped)
    error_of(capsys, "demo", code=128 + signal.SIGTERM)


def test_a_missing_run_is_not_taken_for_a_hub_id(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    """The message lists existing runs, and mentions the Hub where an id of it may have been meant."""
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    assert error_of(capsys, "generate", "runs/typo", "hi").startswith(
        "CheckpointError: runs/typo does not exist; use a"
    )
    for name in ("speeches", "book"):
        shutil.copytree(model, f"runs/{name}/step-3")
    Path("runs/empty").mkdir()
    assert "runs/spechees does not exist; here are runs/speeches, runs/book" in error_of(
        capsys, "eval", "runs/spechees"
    )
    Path("words").mkdir()
    Path("words/manifest.json").write_text("{}")  # a corpus has one
    assert error_of(capsys, "eval", "words").endswith("safetensors; here are runs/speeches, runs/book")
    assert "; here are smollm2, minilm (an encoder), runs/" in error_of(capsys, "eval", "smollm")
    assert "similar presets: tour" in error_of(capsys, "verify", "tuor")
    output = error_of(capsys, "eval", "run/speeches")
    assert "Hub" in output and "; here are runs/speeches, runs/book" in output


def test_a_single_similar_model_is_suggested_in_the_singular(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(model, "runs/book/step-3")
    assert error_of(capsys, "eval", "runs/bok").endswith("does not exist; here is runs/book")


@pytest.mark.slow
def test_invalid_flags_are_refused_before_torch_is_imported() -> None:
    """Otherwise a typo would cost the three seconds of importing torch."""
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
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    for message in (
        "temperature is -1",
        "top_p is 2",
        "non-empty strings",
        "--plan.cp is 0",
        "cache_bytes is 0",
    ):
        assert done.stderr.count(message) == 2, done.stderr


@pytest.mark.slow
def test_an_encoder_is_refused_for_generation_before_any_process_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("colonnade.serve.engine_process._spawn", opened_here)
    config = ModelConfig(
        family="bert", causal=False, vocab_size=300, layers=1, width=8, heads=2, ffn_width=8, context=16,
        norm="layernorm", positions="learned", segments=2, gated=False, activation="gelu", task_head="encoder",
        tied=True,
    )  # fmt: skip
    decoder = ModelConfig(causal=False, vocab_size=300, layers=1, width=8, heads=2, ffn_width=8, context=16)
    native.save(
        tmp_path / "it", initialise(Transformer(config), 0), native.Meta(model=config), DistributedContext.solo()
    )
    native.save(
        tmp_path / "decoder", initialise(Transformer(decoder), 0), native.Meta(model=decoder), DistributedContext.solo()
    )
    for verb in (["generate", "hi"], ["chat"], ["serve", "--serve.port", "0", "--serve.task", "generate"]):
        for name in ("it", "decoder"):
            output = error_of(capsys, verb[0], tmp_path / name, *verb[1:])
            assert output.startswith(f"ConfigError: {tmp_path / name} attends in both directions (causal = False)")
        with pytest.raises(SystemExit):
            main([verb[0], "--help"])
        assert ("minilm" in capsys.readouterr().out) == (verb[0] == "serve")
    output = error_of(capsys, "serve", tmp_path / "it", "--plan.cp", "2")
    assert output.startswith("PlanError: without generation there is no key/value cache to share over cp=2")


def test_a_prompt_is_read_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: Path
) -> None:
    argv = [str(model), "--temperature", "0", "--max_tokens", "5", "--serve.cache", "float8", "--serve.page_tokens=3"]
    main(["generate", *argv, "the quick"])
    expected = capsys.readouterr().out

    def set_stdin(text: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text)))

    set_stdin(b"the quick\n")
    main(["generate", *argv, "-"])
    assert capsys.readouterr().out == expected
    set_stdin(b"the \xff")
    assert "RequestError: the standard input is not UTF-8 text (byte 4)" in error_of(capsys, "generate", *argv, "-")


def test_debug_shows_the_traceback() -> None:
    with pytest.raises(ColonnadeError):
        main(["--debug", "generate", "/nowhere", "hi"])
    with pytest.raises(ColonnadeError):
        main(["generate", "/nowhere", "hi", "--debug"])


def test_load_without_a_process_group_names_the_torchrun_command(hf: Path) -> None:
    with pytest.raises(PlanError, match="torchrun --nproc-per-node 2"):
        colonnade.load(hf, plan=colonnade.Plan(tp=2))


def test_python_api(hf: Path, tmp_path: Path) -> None:
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
    ("call", "message"),
    [
        (lambda m: m.logits([]), "tokens is empty; pass at least one token"),
        (lambda m: m.logits([1, 10**6]), "token 1000000 is not in the vocabulary of 300; use ids from 0 to 299"),
        (lambda m: m.logits([-1]), "token -1 is not in the vocabulary"),
        (lambda m: m.logits("text"), r"tokens is 'text'; pass a list of token ids, such as model.tokenizer.encode"),
        (lambda m: m.logits([1.5]), r"tokens is \[1.5\]; pass a list of token ids"),
        (lambda m: m.logits(torch.tensor([[1, 2]])), r"tokens is tensor\(\[\[1, 2\]\]\); pass a list"),
        (lambda m: m.hidden([1, 2], [0]), "1 segment for 2 tokens; pass one per token"),
        (lambda m: m.score(["a", "b"]), r"the text is \['a', 'b'\]; pass a string, or a list of token ids"),
        (lambda m: m.generate([["a"], "b"]), r"the prompt is \['a'\]; pass a single string"),
        (lambda m: m.generate("a", temprature=0), "unknown parameter 'temprature'; did you mean 'temperature'?"),
        (
            lambda m: colonnade.Engine("smollm2"),
            "an Engine serves a loaded model, not 'smollm2'; pass colonnade.load",
        ),
        (lambda m: colonnade.Engine(m.transformer), "not a Transformer; pass colonnade.load"),
        (lambda m: colonnade.Engine(m, {"pages": 3}), "an Engine's config is not a dict; pass ServeConfig"),
    ],
)
def test_common_mistakes_get_one_line_with_a_remedy(hf: Path, call: Callable, message: str) -> None:
    with colonnade.load(hf) as loaded, pytest.raises(ColonnadeError, match=message) as refusal:
        call(loaded)
    assert "\n" not in str(refusal.value)

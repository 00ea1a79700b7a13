"""Whole cleanings: what stays, what leaves and why; the same bytes however the work is divided or interrupted."""

import gzip
import importlib
import importlib.util
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from datatrove.pipeline import filters

from colonnade.cli import main
from colonnade.config import Recipe
from colonnade.data import Corpus
from colonnade.data.readers import ReadOptions
from colonnade.data.refine import inputs, parts, signatures, steps, storage
from colonnade.data.refine.run import Executor, run
from colonnade.errors import ConfigError, DataError
from tests.passages import edited, grams, passages, similarity

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded, use of fork:DeprecationWarning")
SHORT = Recipe(min_tokens=20)


def corpus_texts() -> list[str]:
    """60 passages; 20 near copies of some, each of another similarity, five copies and five too short texts."""
    base = list(passages(60))
    near = [edited(base[i], 1 + i // 2, i) for i in range(20)]
    copies = [base[i].upper().replace(" ", "\n ") for i in range(30, 35)]
    return [*base, *near, *copies, *(f"Too short {i}." for i in range(5))]


def write_jsonl(folder: Path, texts: list[str], files: int = 3, name: str = "texts") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(files):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[i::files]]
        (folder / f"{name}-{i}.jsonl").write_text("".join(lines), "utf-8")
    return folder


def read(folder: Path) -> dict[str, bytes]:
    """The results of a cleaning."""
    files = [*folder.glob("documents/*"), *folder.glob("removed/*"), folder / "report.json", folder / "report.html"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(files)}


def without_sources(results: dict[str, bytes]) -> dict[str, Any]:
    """The same without the names of files."""
    kept: dict[str, Any] = {name: each for name, each in results.items() if name.startswith("documents")}
    for name, content in results.items():
        if name.startswith("removed"):
            kept[name] = sorted((r["id"], r["text"]) for r in map(json.loads, content.splitlines()))
    return kept


def records(folder: Path, step: str) -> list[dict[str, str]]:
    return [json.loads(each) for each in (folder / "removed" / f"{step}.jsonl").read_text("utf-8").splitlines()]


def documents(folder: Path) -> list[dict[str, str]]:
    return [
        json.loads(each) for file in sorted(folder.glob("documents/*")) for each in file.read_text("utf-8").splitlines()
    ]


@pytest.fixture(scope="module")
def cleaned(tmp_path_factory):
    """(folder, texts, report) of one cleaning."""
    folder = tmp_path_factory.mktemp("cleaned")
    texts = corpus_texts()
    return folder, texts, run([write_jsonl(folder / "in", texts)], folder / "out", SHORT)


def test_kept_and_removed_are_those_of_brute_force(cleaned):
    folder, texts, report = cleaned
    kept, near = documents(folder / "out"), records(folder / "out", "near")
    assert {r["text"] for r in records(folder / "out", "length")} == {f"Too short {i}." for i in range(5)}
    assert {r["reason"] for r in records(folder / "out", "length")} == {"4 tokens are fewer than 20"}
    assert len(records(folder / "out", "exact")) == 5
    # Recall: of the true pairs none stays whole. Precision: each document that leaves has a twin that stays.
    pairs = [(a, b) for i, a in enumerate(kept) for b in kept[:i] if similarity(a["text"], b["text"]) > 0.7]
    assert not pairs
    by_id = {document["id"]: document["text"] for document in kept}
    for record in near:
        value, twin = record["reason"].removeprefix("similarity ").split(" with ")
        assert similarity(record["text"], by_id[twin]) == pytest.approx(float(value), abs=1e-3) and float(value) > 0.7
    true = sum(similarity(texts[i], texts[60 + i]) > 0.7 for i in range(20))
    assert len(near) == true and 8 < true < 20
    assert report.read == len(texts) == len(kept) + len(near) + 5 + 5
    assert report.removed["near"][0] == true and report.documents == len(kept)
    assert sum(report.similarities.values()) == true and sum(report.lengths.values()) == len(kept)


def test_report_page(cleaned):
    page = (cleaned[0] / "out" / "report.html").read_text("utf-8")
    assert page.count("<svg") == 3 and "near" in page and "http-equiv" in page and "src=" not in page


@pytest.mark.slow
def test_recall_of_many_pairs(tmp_path):
    base = passages(300)
    near = [edited(base[i], 1 + i % 6, i) for i in range(300)]
    run([write_jsonl(tmp_path / "in", [*base, *near])], tmp_path / "out", SHORT)
    gone = {record["text"] for record in records(tmp_path / "out", "near")}
    values = [similarity(a, b) for a, b in zip(base, near, strict=True)]
    for low, share in ((0.7, 0.99), (0.8, 0.999)):
        true = [i for i, value in enumerate(values) if value > low]
        assert sum(base[i] in gone or near[i] in gone for i in true) >= share * len(true) and len(true) > 100


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.long)])
def test_same_bytes_for_any_number_of_workers(cleaned, workers, tmp_path):
    folder, _, _ = cleaned
    run([folder / "in"], tmp_path / "out", SHORT, Executor(workers=workers))
    assert read(tmp_path / "out") == read(folder / "out")


def test_same_bytes_for_any_order_of_files(cleaned, tmp_path):
    folder, _, _ = cleaned
    files = sorted((folder / "in").iterdir())
    # The names of sources are in the report; everything else is equal.
    run(files[::-1], tmp_path / "out", SHORT)
    assert without_sources(read(tmp_path / "out")) == without_sources(read(folder / "out"))


@pytest.mark.slow
def test_same_bytes_in_small_units(cleaned, tmp_path, monkeypatch):
    """Striped files and more parts than files may be open; copies and pairs fall into different tasks."""
    folder, _, _ = cleaned
    for module, name, value in (
        (inputs, "UNIT_BYTES", 20_000), (inputs, "MIN_PARTS", 30), (steps, "CHUNK_BYTES", 9_000),
        (signatures, "_CHUNK_ROWS", 30), (parts, "OPEN_FILES", 5), (storage, "OPEN_FILES", 5),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 20, hard))
    try:
        run([folder / "in"], tmp_path / "out", SHORT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    own, other = read(tmp_path / "out"), read(folder / "out")
    assert len(list((tmp_path / "out" / "documents").iterdir())) == 30
    join = lambda results: b"".join(v for k, v in results.items() if k.startswith("documents"))  # noqa: E731
    assert join(own) == join(other)
    assert {k: v for k, v in own.items() if "documents" not in k} == {
        k: v for k, v in other.items() if "documents" not in k
    }


def test_work_is_divided_by_uncompressed_size(tmp_path):
    table = pyarrow.table({"text": [f"text {i} " * 5000 for i in range(200)]})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    assert inputs._text_bytes(tmp_path / "a.parquet") > 8_000_000 > 50 * (tmp_path / "a.parquet").stat().st_size
    with (tmp_path / "large.jsonl").open("wb") as file:
        file.truncate(1 << 40)  # without blocks on the disk
    files = [file for _, file in inputs.source_files([tmp_path / "large.jsonl"], SHORT, None)]
    job = inputs.make_job(tmp_path / "work", SHORT, files, ReadOptions(), ())
    assert job.units == 16 and job.parts == 1 << 15  # reading a file takes 16 passes at most


@pytest.mark.slow
def test_which_copy_stays_does_not_depend_on_the_names_of_files(tmp_path):
    text = passages(3)[0]
    copies = [text, text.upper(), text.replace(" ", "  "), edited(text, 1, 1), edited(text, 2, 2)]
    results = []
    for order in (range(5), (3, 1, 4, 0, 2)):
        folder = tmp_path / "-".join(map(str, order))
        for name, i in zip("abcde", order, strict=True):
            write_jsonl(folder / "in", [copies[i]], files=1, name=name)
        run([folder / "in"], folder / "out", SHORT)
        results.append(without_sources(read(folder / "out")))
    assert results[0] == results[1]


@pytest.mark.slow
def test_preferred_sources_keep_their_copies(tmp_path):
    text, other = passages(3)[:2]
    web = write_jsonl(tmp_path / "web", [text, other], 1)
    wiki = write_jsonl(tmp_path / "wiki", [text.upper(), edited(other, 2, 1)], 1)
    books = write_jsonl(tmp_path / "books1", [passages(3)[2]], 1)
    for first, expected in (("wiki", {text.upper(), edited(other, 2, 1)}), ("web", {text, other})):
        run([web, wiki, books], tmp_path / "out" / first, SHORT.replace(prefer=(first,), drop_sources=("books*",)))
        assert {document["text"] for document in documents(tmp_path / "out" / first)} == expected


class Killed(BaseException):
    pass


def test_killed_at_any_write_and_resumed(cleaned, tmp_path, monkeypatch):
    folder, _, _ = cleaned
    whole = Path.replace
    for at in random.Random(4).sample(range(1, 60), 4):
        out, calls = tmp_path / str(at), []

        def replace(self, target, at=at, calls=calls):
            calls.append(target)
            if len(calls) == at:
                raise Killed
            return whole(self, target)

        monkeypatch.setattr(Path, "replace", replace)
        with pytest.raises(Killed):
            run([folder / "in"], out, SHORT)
        monkeypatch.setattr(Path, "replace", whole)
        done = set((out / "logs").rglob("completions/*"))
        times = {file: file.stat().st_mtime_ns for file in done}
        run([folder / "in"], out, SHORT)
        assert {file: file.stat().st_mtime_ns for file in done} == times  # finished tasks are not run again
        assert read(out) == read(folder / "out")


SCRIPT = """
import sys
from pathlib import Path
from colonnade.config import Recipe
from colonnade.data.refine.run import Executor, run
run([sys.argv[1]], sys.argv[2], Recipe(min_tokens=20), Executor(workers=2))
"""


def children(process: int) -> list[int]:
    """The processes that ``process`` and its children started."""
    own = [int(each) for file in Path(f"/proc/{process}/task").glob("*/children") for each in file.read_text().split()]
    return [*own, *(each for child in own for each in children(child))]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_a_program_killed_in_each_stage_is_resumed(cleaned, tmp_path):
    """SIGKILL for the program alone: its processes end too. Killed again in each later stage, it is resumed."""
    folder, _, _ = cleaned
    command = [sys.executable, "-", str(folder / "in"), str(tmp_path / "out")]  # its main module cannot be imported
    kills = 0
    for stage in ("1-read", "2-exact", "3-buckets", "4-group", "5-near", "8-write", "9-finish"):
        with subprocess.Popen(command, stdin=subprocess.PIPE, text=True) as process:
            process.stdin.write(SCRIPT)
            process.stdin.close()
            deadline = time.monotonic() + 200
            while not (tmp_path / "out" / "logs" / stage / "logs").exists() and process.poll() is None:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            started = children(process.pid)
            process.kill()
        kills += process.returncode == -signal.SIGKILL
        while any(map(is_running, started)):
            assert time.monotonic() < deadline + 200
            time.sleep(0.02)
    assert kills >= 6  # the last stage may have ended
    subprocess.run(command, input=SCRIPT, text=True, check=True, timeout=200)
    assert read(tmp_path / "out") == read(folder / "out")


@pytest.mark.slow
def test_a_killed_worker_is_reported_and_the_rest_resumed(cleaned, tmp_path, monkeypatch):
    folder, _, _ = cleaned

    def kill_one():
        deadline = time.monotonic() + 200
        while not (tmp_path / "out" / "logs" / "2-exact").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        forkserver = next(each for each in children(os.getpid()) if children(each))
        os.kill(children(forkserver)[0], signal.SIGKILL)

    thread = threading.Thread(target=kill_one)
    thread.start()
    with pytest.raises(DataError, match="a cleaning process was killed, perhaps because memory ran out; rerun the"):
        run([folder / "in"], tmp_path / "out", SHORT, Executor(workers=2))
    thread.join()
    run([folder / "in"], tmp_path / "out", SHORT)
    assert read(tmp_path / "out") == read(folder / "out")


def test_a_finished_folder_is_not_made_again_and_another_recipe_is(cleaned, tmp_path):
    folder, _, report = cleaned
    shutil.copytree(folder / "out", tmp_path / "out")
    before = read(tmp_path / "out")
    assert run([folder / "in"], tmp_path / "out", SHORT) == report
    assert read(tmp_path / "out") == before
    assert run([folder / "in"], tmp_path / "out", Recipe(min_tokens=20, similarity=1)).removed["near"] == (0, 0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("precious")
    with pytest.raises(DataError, match="mine exists and is not a cleaned corpus"):
        run([folder / "in"], tmp_path / "mine", SHORT)


def test_evaluation_texts_are_cut_and_reported(tmp_path):
    base = passages(12, 400)
    sentence = "Whoever plants this particular sentence in a corpus will find that it is cut out of it again."
    others = [f"Variant {i} of a sentence that somebody may have planted {i} times in document {i}." for i in range(12)]
    common = "These thirteen words are in all documents and so they stay where they are."
    words = base[0].split(" ")
    planted = " ".join([*words[:200], ".", sentence, *words[200:]])
    filler = [" ".join(f"Sentence {k} of part {i} says something else." for k in range(20)) for i in range(12)]
    many = " ".join(f"{each} {between}" for each, between in zip(others, filler, strict=True))
    texts = [f"{text} {common}" for text in (planted, many, *base[1:11])]
    write_jsonl(tmp_path / "in", texts)
    tests = tmp_path / "test.jsonl"
    evaluated = [sentence, common, " ".join(base[10].split()[:20]), *others]
    tests.write_text("".join(json.dumps({"text": text}) + "\n" for text in evaluated))
    other = tmp_path / "lines.txt"
    other.write_text(
        "this file has one text of more than eight words\nand another that no document of the corpus has\n"
    )
    recipe = SHORT.replace(common=9, max_pieces=10)
    report = run([tmp_path / "in"], tmp_path / "out", recipe, decontaminate=[tests, other])
    kept = documents(tmp_path / "out")
    assert not any(sentence in document["text"] for document in kept)
    reasons = sorted(record["reason"] for record in records(tmp_path / "out", "decontaminate"))
    assert reasons[0].endswith("pieces are more than 10") and len(reasons) == 3
    assert reasons[1:] == ["evaluation texts in 1 place; kept 1 piece", "evaluation texts in 1 place; kept 2 pieces"]
    assert [document["id"][-3:] for document in kept if "-" in document["id"]].count("-01") == 1
    assert sum(common in document["text"] for document in kept) >= 9
    found, total = report.overlap["test.jsonl"]
    test_set = set().union(*(grams(text, 8) for text in evaluated))
    assert total == len(test_set)
    assert found == len(test_set & set().union(*(grams(document["text"], 8) for document in kept))) >= 7
    assert report.overlap["lines.txt"] == (0, 3 + 2)
    assert report.pieces == 3 and report.summary().endswith("; 3 pieces of cut documents are kept")
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "Test sets in the corpus" in page and "<td>pieces of cut documents</td><td>3</td>" in page
    assert "<td>decontaminate</td><td>evaluation texts in 1 place; kept 1 piece</td>" in page


def test_titles_language_and_named_filters(tmp_path, monkeypatch):
    german = "Der Reichstag trat gestern zusammen und beriet über den Haushalt des kommenden Jahres in Berlin. " * 3
    rows = [
        {"text": passages(3)[0], "title": "Robert Boulter"}, {"text": passages(3)[1], "title": "Other"},
        {"text": german}, {"text": "\n".join(f"line without an end {i}" for i in range(40))},
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "titles.txt").write_text("Robert Boulter\n\nTower Building\n")
    recipe = SHORT.replace(drop_titles=str(tmp_path / "titles.txt"), language="en", filters=("c4-quality",), mend=False)

    def named(name, removed):
        return filters.RegexFilter("line without an end", exclusion_writer=removed)

    monkeypatch.setattr(steps, "named_filter", named)  # datatrove's own ones need spacy
    monkeypatch.setattr(inputs, "check_filter", lambda name: None)
    report = run([tmp_path / "in.jsonl"], tmp_path / "out", recipe)
    assert [document["text"] for document in documents(tmp_path / "out")] == [rows[1]["text"]]
    assert report.removed["titles"][0] == report.removed["language"][0] == report.removed["filters"][0] == 1
    assert records(tmp_path / "out", "titles")[0]["reason"] == "title 'Robert Boulter' is listed"
    assert records(tmp_path / "out", "language")[0]["reason"] == "language de, not en"
    assert records(tmp_path / "out", "filters")[0]["text"] == rows[3]["text"]


@pytest.mark.parametrize("name", ["gopher-quality", "gopher-repetition", "c4-quality", "fineweb-quality"])
def test_datatroves_filters_run_or_name_the_missing_package(name, tmp_path):
    write_jsonl(tmp_path / "in", list(passages(3)), 1)
    recipe = SHORT.replace(filters=(name,))
    if importlib.util.find_spec("spacy") is None:
        with pytest.raises(ConfigError, match=f"filter '{name}' of datatrove needs more packages: .*spacy"):
            run([tmp_path / "in"], tmp_path / "out", recipe)
    else:
        assert run([tmp_path / "in"], tmp_path / "out", recipe).read == 3


@pytest.mark.slow
def test_all_kinds_of_sources_give_the_same_documents(tmp_path):
    import datasets

    texts = list(passages(9))
    write_jsonl(tmp_path / "jsonl", texts, 1)
    with gzip.open(tmp_path / "texts.jsonl.gz", "wb") as file:
        file.write((tmp_path / "jsonl" / "texts-0.jsonl").read_bytes())
    table = pyarrow.table({"text": texts, "title": [f"t{i}" for i in range(9)]})
    pyarrow.parquet.write_table(table, tmp_path / "texts.parquet")
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    with pyarrow.ipc.new_file(tmp_path / "texts.arrow", table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "texts.txt").write_text("<<<>>>".join(texts))
    sources = ["jsonl", "texts.jsonl.gz", "texts.parquet", "saved", "texts.arrow", "texts.txt"]
    expected = None
    for source in [*sources, "memory"]:
        given = [(f"{i}", text) for i, text in enumerate(texts)] if source == "memory" else [tmp_path / source]
        run(given, tmp_path / "out" / source, SHORT, separator="<<<>>>")
        expected = expected or read(tmp_path / "out" / source)["documents/000000.jsonl"]
        assert read(tmp_path / "out" / source)["documents/000000.jsonl"] == expected


def test_stripes_of_a_file_are_all_of_it(tmp_path):
    from colonnade.data.readers import ReadOptions, read_documents

    texts = [f"text {i}" for i in range(700)]
    write_jsonl(tmp_path, texts, 1)
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "texts.parquet")
    (tmp_path / "texts.txt").write_text("|".join(texts))
    for file in (tmp_path / "texts-0.jsonl", tmp_path / "texts.parquet", tmp_path / "texts.txt"):
        stripes = [
            [chunk.text for chunk in read_documents([file], ReadOptions(separator="|", stripe=(part, 3)))]
            for part in range(3)
        ]
        assert [stripes[i % 3][i // 3] for i in range(700)] == texts


def test_mistakes(tmp_path):
    write_jsonl(tmp_path / "in", list(passages(3)), 1)
    with pytest.raises(DataError, match=r"no document is kept: 3 documents read; length removed 3; change the recipe"):
        run([tmp_path / "in"], tmp_path / "empty", Recipe(min_tokens=10_000))
    with pytest.raises(ConfigError, match="workers 0 is not from 1"):
        Executor(workers=0)
    with pytest.raises(DataError, match="excluded by the recipe's drop_sources"):
        run([tmp_path / "in"], tmp_path / "out", Recipe(drop_sources=("in",)))
    with pytest.raises(DataError, match="cannot read the titles"):
        run([tmp_path / "in"], tmp_path / "out", Recipe(drop_titles=str(tmp_path / "none")))
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "x"}\n' * 1000)[:-9])
    with pytest.raises(DataError, match=r"cut\.jsonl\.gz is not a whole gzip file"):
        run([tmp_path / "cut.jsonl.gz"], tmp_path / "out", SHORT)
    (tmp_path / "bad.arrow").write_bytes(b"ARROW1 or not")
    with pytest.raises(DataError, match=r"bad\.arrow is not a readable Arrow file"):
        run([tmp_path / "bad.arrow"], tmp_path / "out", SHORT)
    with pytest.raises(ConfigError, match="slurm needs the program sbatch"):
        run([tmp_path / "in"], tmp_path / "out", SHORT, Executor("slurm"))


def test_an_error_in_a_worker_reaches_the_user(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{"texts": "y"}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:2: no field 'text'"):
        run([tmp_path / "bad.jsonl"], tmp_path / "out", SHORT, Executor(workers=2))


def test_a_full_disk_names_the_file(cleaned, tmp_path, monkeypatch):
    def full(self, *_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(DataError, match=r"cannot write .*: No space left on device; free some space"):
        run([cleaned[0] / "in"], tmp_path / "out", SHORT)


def test_command(cleaned, tmp_path, capsys, monkeypatch):
    folder, texts, _ = cleaned
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.toml").write_text("min_tokens = 20\n")
    main(
        [
            "corpus",
            str(folder / "in"),
            "--out",
            "c",
            "--clean",
            "recipe.toml",
            "--vocab_size",
            "300",
            "--tasks",
            "source",
        ]
    )
    printed = capsys.readouterr().err
    assert (
        "95 documents read" not in printed
        and f"{len(texts)} documents read; length removed 5, exact removed 5" in printed
    )
    corpus = Corpus("c", verify=True)
    kept = documents(tmp_path / "c" / "clean")
    assert corpus.manifest.documents == len(kept) and corpus.manifest.tasks == ("in",)
    assert (tmp_path / "c" / "clean" / "report.html").is_file() and not list(tmp_path.glob(".c*"))
    for arguments, message in (
        (["--workers", "2"], "--decontaminate, --executor and --workers are for cleaning"),
        (["--clean", "megatorn"], "did you mean 'megatron'"),
        (["--clean", "recipe.toml", "--out", "c"], "c already has a corpus"),
    ):
        with pytest.raises(SystemExit):
            main(["corpus", str(folder / "in"), "--out", "d", *arguments])
        assert message in capsys.readouterr().err


SBATCH = """#!{python}
import os, re, subprocess, sys
script = sys.argv[-1]
first, last = map(int, re.search(r"#SBATCH --array=(\\d+)-(\\d+)", open(script).read()).groups())
environment = dict(os.environ, RUN_OFFSET="0", SLURM_NODELIST="node1", SLURM_JOB_ID="7")
for task in range(first, last + 1):
    environment.update(SLURM_ARRAY_TASK_ID=str(task))
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True)
    if done.returncode and "merge_stats" not in open(script).read():
        sys.exit(done.stdout + done.stderr)
print("Submitted batch job 7")
"""
SRUN = """#!/bin/bash
while [[ "$1" == -* ]]; do [[ "$1" == -n ]] && shift; shift; done
exec "$@"
"""


@pytest.mark.long
def test_slurm_gives_the_same_bytes(cleaned, tmp_path, monkeypatch):
    """With programs in the place of Slurm's that run the jobs at once, one after the other."""
    folder, _, _ = cleaned
    (tmp_path / "bin").mkdir()
    for name, content in (
        ("sbatch", SBATCH.replace("{python}", sys.executable)),
        ("srun", SRUN),
        ("scontrol", "#!/bin/sh\necho node1\n"),
    ):
        (tmp_path / "bin" / name).write_text(content)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}")
    executor = Executor("slurm", 2, {"partition": "cpu", "time": "1:00:00"})
    assert run([folder / "in"], tmp_path / "out", SHORT, executor) is None
    report = run([folder / "in"], tmp_path / "out", SHORT, executor)
    assert report is not None and read(tmp_path / "out") == read(folder / "out")


@pytest.mark.long
@pytest.mark.timeout(2400)
@pytest.mark.filterwarnings("default")  # datatrove uses names that Ray deprecates
def test_two_ray_workers_give_the_same_bytes(cleaned, tmp_path):
    """A real local cluster of two nodes of two cores: with one core each, Ray's placement groups wait for ever."""
    ray = pytest.importorskip("ray", reason="needs ray")
    Cluster = importlib.import_module("ray.cluster_utils").Cluster

    folder, _, _ = cleaned
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 1 << 27})
    cluster.add_node(num_cpus=2, object_store_memory=1 << 27)
    try:
        ray.init(address=cluster.address)
        assert len([node for node in ray.nodes() if node["Alive"]]) == 2
        executor = Executor("ray", 2, {"mem_per_cpu_gb": 0.5})
        report = run([folder / "in"], tmp_path / "out", SHORT, executor)
        (tmp_path / "bad.jsonl").write_text('{"texts": "y"}\n')
        with pytest.raises(DataError, match="1 task of the stage 1-read failed; see"):
            run([tmp_path / "bad.jsonl"], tmp_path / "failed", SHORT, executor)
    finally:
        ray.shutdown()
        cluster.shutdown()
    assert report is not None and read(tmp_path / "out") == read(folder / "out")

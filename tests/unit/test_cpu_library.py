"""Compiling, caching and loading the C++ kernels; their memory safety under sanitizers."""

import logging
import multiprocessing
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from colonnade.kernels.cpu import kernels, library

pytestmark = pytest.mark.skipif(
    not any(map(shutil.which, library.COMPILERS)), reason="needs a C++ compiler: apt install g++"
)
SOURCES = Path(__file__).parents[1]
KERNELS = library.SOURCE
TINY = 'extern "C" { long colonnade_run(const void*, long, long) { return 7; } long colonnade_lanes() { return 4; } }'


@pytest.fixture(autouse=True)
def tiny_source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A source that compiles at once, and a cache of its own."""
    source = tmp_path / "tiny.cpp"
    source.write_text(TINY)
    monkeypatch.setattr(library, "SOURCE", source)
    monkeypatch.setattr(library, "CACHE_FOLDER", tmp_path / "cache")
    library.load_for.cache_clear()
    library.load.cache_clear()
    yield
    library.load_for.cache_clear()
    library.load.cache_clear()


def files() -> list[Path]:
    return sorted(library.CACHE_FOLDER.iterdir())


def test_a_library_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.load_for("portable").colonnade_run(None, 0, 1) == 7
    (path,) = files()
    assert path.suffix == ".so" and path.stat().st_mode & 0o077 == 0
    library.load_for.cache_clear()
    monkeypatch.setattr(library, "_compile", lambda *_: pytest.fail("compiled again"))
    assert library.load_for("portable").colonnade_lanes() == 4
    library.SOURCE.write_text(TINY + "\n")  # another source is another file
    with pytest.raises(pytest.fail.Exception, match="compiled again"):
        library._compiled("portable", library.CACHE_FOLDER)


def test_an_edited_header_is_compiled_again(tmp_path: Path) -> None:
    header = tmp_path / "lanes.h"
    header.write_text("constexpr long LANES = 4;")
    library.SOURCE.write_text('#include "lanes.h"\n' + TINY.replace("return 4", "return LANES"))
    assert library.load_for("portable").colonnade_lanes() == 4
    header.write_text("constexpr long LANES = 8;")
    library.load_for.cache_clear()
    assert library.load_for("portable").colonnade_lanes() == 8 and len(files()) == 2


def test_the_key_covers_all_that_is_compiled() -> None:
    compiler = next(filter(None, map(shutil.which, library.COMPILERS)))
    rule = subprocess.run(
        [compiler, "-std=c++17", "-MM", str(KERNELS)], capture_output=True, text=True, check=True
    ).stdout
    read = rule.partition(":")[2].replace("\\\n", " ").split()
    library.SOURCE = KERNELS  # the fixture restores it
    assert sorted(map(Path, read)) == sorted(library.sources()) and len(read) > 10


def test_a_damaged_file_is_compiled_again() -> None:
    path = library._compiled("portable", library.CACHE_FOLDER)
    good = path.read_bytes()
    for bad in (b"", good[:1000], good[:-1] + bytes([good[-1] ^ 1])):
        path.write_bytes(bad)
        assert library._compiled("portable", library.CACHE_FOLDER) == path and library._is_whole(path)


def test_a_wheel_s_library_needs_no_compiler(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    built = library.SOURCE.parent / "built"
    built.mkdir()
    (built / library.built_name("portable")).write_bytes(b"for another machine")
    with monkeypatch.context() as patch:
        patch.setattr(library.shutil, "which", lambda _: None)
        with pytest.raises(library.BuildError, match="no compiler"):
            library.load_for("portable")
    assert "does not load" in caplog.text
    paths = library.build_all(built)
    names = ["avx512", "avx2"] if library.platform.machine() == "x86_64" else ["portable"]
    assert [path.name for path in paths] == [library.built_name(name) for name in names]
    monkeypatch.setattr(library.shutil, "which", lambda _: None)
    for name in names:
        assert library.load_for(name).colonnade_run(None, 0, 1) == 7
    library.load_for.cache_clear()
    library.SOURCE.write_text(TINY + "\n")  # of another version
    with pytest.raises(library.BuildError, match="no compiler"):
        library.load_for(names[0])


def compile_one(folder: Path, source: Path) -> str:
    library.SOURCE = source
    return str(library._compiled("portable", folder))


@pytest.mark.slow
def test_processes_may_compile_at_the_same_time() -> None:
    folder, source = library.CACHE_FOLDER, library.SOURCE
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = pool.starmap(compile_one, [(folder, source)] * 3)
    assert len(set(paths)) == 1 and files() == [Path(paths[0])]


@pytest.mark.parametrize("problem", ["folder", "link", "file"])
def test_a_cache_that_others_can_write_is_not_trusted(
    problem: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    path = library._compiled("portable", library.CACHE_FOLDER)
    if problem == "folder":
        library.CACHE_FOLDER.chmod(0o777)
    elif problem == "link":
        library.CACHE_FOLDER.rename(tmp_path / "elsewhere")
        library.CACHE_FOLDER.symlink_to(tmp_path / "elsewhere")
    else:
        path.chmod(0o722)
    with caplog.at_level(logging.WARNING):
        again = library._compiled("portable", library.CACHE_FOLDER)
    if problem == "file":
        assert again == path and path.stat().st_mode & 0o077 == 0
        return
    assert again.parent != library.CACHE_FOLDER and again.parent.stat().st_mode & 0o077 == 0
    expected = {"folder": "others may write to", "link": "is a symbolic link"}[problem]
    assert [expected in message for message in caplog.messages] == [True]
    shutil.rmtree(again.parent)


@pytest.mark.parametrize("reason", ["no compiler", "does not compile", "no AVX2", "no folder"])
def test_without_the_library_torch_runs_after_one_warning(
    reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if reason == "no compiler":
        monkeypatch.setattr(library, "COMPILERS", ("no-such-compiler",))
    elif reason == "does not compile":
        library.SOURCE.write_text("int main( {")
    elif reason == "no folder":

        def full(**_: object) -> str:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(library, "CACHE_FOLDER", library.SOURCE / "cache")
        monkeypatch.setattr(library.tempfile, "mkdtemp", full)
    else:
        monkeypatch.setattr(library, "CPU_FLAGS", {"avx2": frozenset(("avx9",))})
        monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not kernels.available(torch.float32)
    assert len(caplog.messages) == 1 and library.COST in caplog.text
    causes = {"no compiler": "install", "does not compile": "error", "no AVX2": "no AVX2", "no folder": "no folder"}
    assert causes[reason] in caplog.text
    x, w = torch.randn(2, 5), torch.randn(3, 5)
    assert (kernels.linear(x, w) - x @ w.T).abs().max() < 1e-6


def test_the_instruction_set_follows_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(library.platform, "machine", lambda: "x86_64")
    for flags, expected in (("fma avx2 avx512f avx512bw avx512vl avx512_vnni", "avx512"), ("fma avx2 avx512f", "avx2")):
        info.write_text(f"model name\t: x\nflags\t\t: sse {flags}\n\n")
        assert library.best_instruction_set(info) == expected
    info.write_text("flags\t\t: sse avx\n")
    with pytest.raises(library.BuildError, match="no AVX2"):
        library.best_instruction_set(info)
    monkeypatch.setattr(library.platform, "machine", lambda: "aarch64")
    assert library.best_instruction_set(info) == "portable"


def sanitized(source: str, sanitizer: str, options: tuple[str, ...], folder: Path) -> Path:
    """A program of this folder, compiled with the kernels and a sanitizer."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++ with its sanitizers")
    program = folder / "sanitized"
    fixed = ["-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-pthread", f"-I{KERNELS.parent}"]
    sanitize = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    command = ["g++", *fixed, *sanitize, *options, str(SOURCES / source), "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True, timeout=150)
    return program


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    # gcc aligns the copies of stack variables that detect_stack_use_after_return makes to 32 bytes, so that reading
    # one as a vector of 64 bytes fails without optimisation (gcc's bug 110027, seen with 13.3 and AVX-512).
    environment = {**os.environ, "ASAN_OPTIONS": "detect_stack_use_after_return=0"}
    command = [str(program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)


def best_instructions() -> tuple[str, ...]:
    return library.INSTRUCTION_SETS[library.best_instruction_set(Path("/proc/cpuinfo"))]


def test_each_kernel_is_clean_under_sanitizers(tmp_path: Path) -> None:
    """Each kernel and format once, compiled in few seconds; AddressSanitizer sees null pointers and ends of objects.

    Undefined behaviour stops the program without a message; the slow test below says where it is.
    """
    cheap = ["--param=asan-instrumentation-with-call-threshold=0", "-fsanitize-undefined-trap-on-error"]
    options = ("-O0", *cheap, "-fno-sanitize=null,object-size", *best_instructions())
    done = run(sanitized("cpu_sanitized.cpp", "address,undefined", options, tmp_path), "few")
    assert done.returncode == 0 and done.stdout == "done\n", done.stdout + done.stderr


def test_threads_are_clean_under_a_sanitizer(tmp_path: Path) -> None:
    """Without the barrier between the phases it reports a race, so it does look."""
    program = sanitized("cpu_threads.cpp", "thread", ("-O0",), tmp_path)
    done = run(program)
    assert done.returncode == 0 and done.stdout == "done\n", done.stdout + done.stderr
    racing = run(program, "without the barrier")
    assert racing.returncode != 0 and "data race" in racing.stderr, racing.stderr


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_kernels_are_clean_under_sanitizers(sanitizer: str, tmp_path: Path) -> None:
    done = run(sanitized("cpu_sanitized.cpp", sanitizer, ("-O1", "-g", *best_instructions()), tmp_path))
    assert done.returncode == 0 and done.stdout == "done\n", done.stdout + done.stderr

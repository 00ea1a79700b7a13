"""CUDA C++ compiled at run time: the disk cache and, where NVRTC is installed, the kernels."""

import logging
import re
import subprocess
from pathlib import Path

import pytest
import torch

from colonnade.kernels import nvrtc
from colonnade.kernels.attention import cuda_decode
from colonnade.kernels.attention.decode_plan import KernelLayout
from colonnade.kernels.attention.decode_tiles import Tiles
from colonnade.kernels.attention.split_plan import FIELDS

KERNEL = 'extern "C" __global__ void fill(int* x) { x[threadIdx.x] = NUMBER; }'
compiles = pytest.mark.skipif(
    nvrtc.unavailable_reason() is not None, reason=f"nothing can be compiled: {nvrtc.unavailable_reason()}"
)


def test_binary_round_trips_through_the_cache(tmp_path: Path) -> None:
    path, binary = tmp_path / "new" / "folder" / "a.cubin", bytes(range(256)) * 9
    assert nvrtc._read_cache(path) is None
    nvrtc._write_cache(path, binary)
    assert nvrtc._read_cache(path) == binary
    assert [file.name for file in path.parent.iterdir()] == ["a.cubin"], "a temporary file is left"


@pytest.mark.parametrize(
    "damage", [lambda x: x[:-1], lambda x: b"", lambda x: x[: nvrtc.HASH_BYTES], lambda x: x + b"1"]
)
def test_damaged_binary_is_not_read(tmp_path: Path, damage) -> None:
    path = tmp_path / "a.cubin"
    nvrtc._write_cache(path, b"some instructions")
    path.write_bytes(damage(path.read_bytes()))
    assert nvrtc._read_cache(path) is None


def test_single_bit_damage_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "a.cubin"
    nvrtc._write_cache(path, b"some instructions")
    for at in range(len(path.read_bytes())):
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        (tmp_path / "b.cubin").write_bytes(data)
        assert nvrtc._read_cache(tmp_path / "b.cubin") is None


def test_unwritable_cache_folder_is_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the place of a folder")
    with caplog.at_level(logging.WARNING):
        nvrtc._write_cache(tmp_path / "file" / "a.cubin", b"some instructions")
    assert len(caplog.records) == 1 and "not cached" in caplog.text
    assert nvrtc._read_cache(tmp_path / "file" / "a.cubin") is None


@compiles
def test_cache_key_covers_source_options_and_arch(tmp_path: Path) -> None:
    def files() -> set[str]:
        return {file.name for file in tmp_path.iterdir()}

    first = nvrtc.compile_cubin(KERNEL, ["-DNUMBER=1"], "sm_90", tmp_path)
    assert first[:4] == b"\x7fELF"
    (name,) = files()
    times = (tmp_path / name).stat().st_mtime_ns
    assert nvrtc.compile_cubin(KERNEL, ["-DNUMBER=1"], "sm_90", tmp_path) == first
    assert (tmp_path / name).stat().st_mtime_ns == times, "it must compile once"
    (tmp_path / name).write_bytes(b"damaged")
    assert nvrtc.compile_cubin(KERNEL, ["-DNUMBER=1"], "sm_90", tmp_path) == first
    assert (tmp_path / name).read_bytes() != b"damaged", "it must be written again"
    for source, options, arch in (
        (KERNEL, ["-DNUMBER=2"], "sm_90"), (KERNEL, ["-DNUMBER=1"], "sm_80"), (KERNEL + " ", ["-DNUMBER=1"], "sm_90"),
    ):  # fmt: skip
        before = files()
        nvrtc.compile_cubin(source, options, arch, tmp_path)
        assert len(files() - before) == 1


@compiles
def test_compile_error_shows_the_compiler_output(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"NVRTC with .*-DNUMBER=one:\n.*identifier .one. is undefined"):
        nvrtc.compile_cubin(KERNEL, ["-DNUMBER=one"], "sm_90", tmp_path)
    assert not list(tmp_path.iterdir())


@compiles
@pytest.mark.sample(3)
@pytest.mark.parametrize("width", [64, 80, 128, 256])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize(("group", "lines"), [(5, 1), (8, 500)])
def test_decode_kernel_has_no_spills(width: int, cache: torch.dtype, group: int, lines: int, tmp_path: Path) -> None:
    q = torch.empty(1, group, width, dtype=torch.bfloat16)
    k = torch.empty(1, 64, 1, width).to(cache)
    rows = cuda_decode.padded_rows(group, 1)
    tiles = cuda_decode.choose_block(rows, width, k.element_size(), lines, 132)
    queries = rows == 8 and tiles.workers == 1
    sized = cuda_decode.BlockSizes(tiles.warps, tiles.stages)
    queries = (
        queries and cuda_decode.shared_memory_size(width, k.element_size(), rows, sized, queries=True) <= 227 * 1024
    )
    assert cuda_decode.shared_memory_size(width, k.element_size(), rows, sized) <= 227 * 1024
    for more in ({}, {"window": True, "cap": True, "slopes": True, "sinks": True, "single": False, "merge": False}):
        scaled = cache != torch.bfloat16
        macros = cuda_decode.compile_macros(q, k, group, rows, tiles, queries=queries, scaled=scaled, **more)
        binary = nvrtc.compile_cubin(cuda_decode.source(), cuda_decode.compiler_options(macros), "sm_90", tmp_path)
        (tmp_path / "kernel.cubin").write_bytes(binary)
        assert resource_usage(tmp_path / "kernel.cubin", "STACK") <= (128 if more and rows > 8 else 0)
        assert resource_usage(tmp_path / "kernel.cubin", "REG") * tiles.warps * 32 <= 2**16


@compiles
@pytest.mark.sample(2)
@pytest.mark.parametrize(("rows", "lines"), [(8, 1), (8, 200), (8, 700), (16, 1)])
@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_kernel_with_fixed_splits_has_no_spills(cache: torch.dtype, rows: int, lines: int, tmp_path: Path) -> None:
    """Its stack holds the sums of 24 levels of chunks, 32 bytes for each 4 numbers that a thread adds."""
    q, k = torch.empty(1, 8, 128, dtype=torch.bfloat16), torch.empty(1, 64, 1, 128).to(cache)
    tiles = cuda_decode.choose_block(rows, 128, k.element_size(), lines, 132, fixed=True)
    macros = cuda_decode.compile_macros(q, k, 8, rows, tiles, single=rows == 8, chunk=512)
    binary = nvrtc.compile_cubin(cuda_decode.source(), cuda_decode.compiler_options(macros), "sm_90", tmp_path)
    (tmp_path / "kernel.cubin").write_bytes(binary)
    sums = rows // 8 * 8 // (tiles.warps // tiles.workers)
    assert resource_usage(tmp_path / "kernel.cubin", "STACK") <= sums * 24 * 32
    assert resource_usage(tmp_path / "kernel.cubin", "REG") * tiles.warps * 32 <= 2**16


@compiles
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("width", "group", "keys"), [(64, 1, 5), (96, 7, 40), (128, 16, 256), (256, 8, 16), (256, 4, 8), (256, 4, 114)]
)
def test_kernel_for_a_few_keys_has_no_spills(width: int, group: int, keys: int, tmp_path: Path) -> None:
    q, k = torch.empty(1, group, width, dtype=torch.bfloat16), torch.empty(1, 64, 1, width, dtype=torch.bfloat16)
    for lines in (5, 1000):
        warps, team = cuda_decode.short_block(keys, lines, 132)
        tiles = Tiles(16, warps, stages=1, workers=warps // team, pieces=1, part=1)
        more = {"window": True, "cap": True, "slopes": True, "sinks": True} if lines > 5 else {}
        macros = cuda_decode.compile_macros(q, k, group, 8, tiles, short=True, half=keys <= 8, **more)
        options = cuda_decode.compiler_options(macros)
        binary = nvrtc.compile_cubin(cuda_decode.source("attend_short"), options, "sm_90", tmp_path)
        (tmp_path / "kernel.cubin").write_bytes(binary)
        assert resource_usage(tmp_path / "kernel.cubin", "STACK") == 0
        # As many registers as leave room for 16 warps, of two blocks or more.
        assert resource_usage(tmp_path / "kernel.cubin", "REG") * warps * 32 <= 2**16 // max(1, 16 // warps)


@compiles
@pytest.mark.sample(2)
@pytest.mark.parametrize(("heads", "queries"), [(16, 1), (5, 3), (8, 1), (1, 1)])
def test_kernel_for_latents_has_no_spills(heads: int, queries: int, tmp_path: Path) -> None:
    q, k = torch.empty(1, heads, 576, dtype=torch.bfloat16), torch.empty(1, 64, 1, 576, dtype=torch.bfloat16)
    rows = cuda_decode.padded_rows(heads, queries)
    assert cuda_decode.mla_shared_memory_size(576, rows) <= cuda_decode.HOPPER_BYTES
    tiles = cuda_decode.mla_tiles(rows, 576)
    for window in (False, True):
        macros = cuda_decode.compile_macros(q, k, heads, rows, tiles, single=queries == 1, window=window, rank=512)
        options = cuda_decode.compiler_options(macros)
        binary = nvrtc.compile_cubin(cuda_decode.source("attend_mla"), options, "sm_90", tmp_path)
        (tmp_path / "kernel.cubin").write_bytes(binary)
        assert resource_usage(tmp_path / "kernel.cubin", "STACK") == 0
        assert resource_usage(tmp_path / "kernel.cubin", "REG") * 32 * tiles.warps <= 2**16


def test_blocks_of_the_kernel_for_a_few_keys() -> None:
    assert cuda_decode.short_block(1, 132, 132) == (1, 1)
    assert cuda_decode.short_block(17, 132, 132) == (2, 2)
    assert cuda_decode.short_block(16, 133, 132) == (4, 1)
    assert cuda_decode.short_block(33, 133, 132) == (3, 3)
    assert cuda_decode.short_block(65, 133, 132) == (6, 6)
    assert cuda_decode.short_block(128, 133, 132) == (8, 8)
    assert cuda_decode.short_block(cuda_decode.SHORT_KEYS, 133, 132) == (16, 16)


@pytest.mark.parametrize(
    ("keys", "megabytes", "lines", "width", "few"),
    [
        (0, 0, 5, 64, True), (128, 30, 9000, 128, True), (128, 34, 9000, 128, False), (114, 22, 192, 256, False),
        (157, 6, 280, 64, True), (256, 2, 752, 64, False), (254, 1, 28, 128, True), (257, 1, 1, 64, False),
    ],
)  # fmt: skip
def test_steps_that_use_the_kernel_for_a_few_keys(keys: int, megabytes: int, lines: int, width: int, few: bool) -> None:
    """As measured on an H200 (docs/log.md)."""
    assert cuda_decode.few_keys(keys, megabytes * 10**6, lines, width) == few


def test_request_of_a_line_by_multiplication() -> None:
    """A line over the lines of a request, as it is computed with ``lines_inverse``."""
    for heads in (*range(2, 130), 1000):
        inverse = -(-(2**32) // heads)
        assert all((line * inverse) >> 32 == line // heads for line in (*range(3000), 2**22 - 1, 2**22))


def resource_usage(image: Path, what: str) -> int:
    """Registers, or stack bytes per thread."""
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    text = subprocess.run([tool, "--dump-resource-usage", image], check=True, capture_output=True, text=True).stdout
    found = re.search(rf"\b{what}:(\d+)", text)
    assert found, text
    return int(found[1])


def test_thread_teams_divide_a_block_and_shared_memory_fits() -> None:
    for width in (64, 80, 96, 112, 128, 192, 256):
        for size in (1, 2):
            for lines in (1, 132, 133, 300, 700, 1500, 9000):
                tiles = cuda_decode.choose_block(8, width, size, lines, 132)
                assert tiles.warps % tiles.workers == 0
                assert tiles.stages >= 3
                sized = cuda_decode.BlockSizes(tiles.warps, tiles.stages)
                assert cuda_decode.shared_memory_size(width, size, 8, sized) <= cuda_decode.HOPPER_BYTES
                assert size == 2 or tiles.stages == 3
    assert cuda_decode.choose_block(8, 128, 2, 132, 132).workers == 1
    assert cuda_decode.choose_block(8, 128, 2, 133, 132).workers == 2
    assert cuda_decode.choose_block(8, 128, 2, 2000, 132).workers == 4


def test_cpu_tensors_do_not_use_the_cuda_kernel() -> None:
    """CPU tensors use the Triton kernel, and no CUDA driver is loaded."""
    q, k = torch.empty(1, 8, 128, dtype=torch.bfloat16), torch.empty(1, 64, 1, 128, dtype=torch.bfloat16)
    assert not KernelLayout.of(q, k, 1).cuda
    with pytest.raises(LookupError, match="does not support 8 rows of 128"):
        KernelLayout.of(q, k, 1, kernels="cuda")
    q, k = torch.empty(1, 16, 576, dtype=torch.bfloat16), torch.empty(1, 64, 1, 576, dtype=torch.bfloat16)
    assert not KernelLayout.for_mla(q, k, 1, rank=512).cuda
    with pytest.raises(LookupError, match=r"does not support latents of 512 \+ 64 numbers .* 16 rows"):
        KernelLayout.for_mla(q, k, 1, rank=512, kernels="cuda")
    assert FIELDS * 4 % 16 == 0, "items are read 16 bytes at a time"


@pytest.mark.parametrize(
    ("capability", "installed", "reason"),
    [((8, 0), True, "compute capability 9.0"), ((12, 0), True, "compute capability 9.0"), ((9, 0), False, "bindings")],
)
def test_unsupported_machines_fall_back_with_one_log_line(
    capability: tuple[int, int], installed: bool, reason: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Other GPUs, and a Hopper GPU without NVRTC, use the Triton kernel."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    missing = None if installed else "cuda-bindings is not installed"
    monkeypatch.setattr(nvrtc, "unavailable_reason", lambda: missing)
    cuda_decode._device_supported.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert not any(cuda_decode._device_supported(torch.device("cuda", 0)) for _ in range(3))
    finally:
        cuda_decode._device_supported.cache_clear()
    assert len(caplog.records) == 1
    assert "runs in Triton" in caplog.text and reason in caplog.text


def test_kernel_choice_by_rows_and_lines() -> None:
    assert cuda_decode.preferred(8, 256, 1) and cuda_decode.preferred(16, 128, 16)
    assert not cuda_decode.preferred(16, 128, 15) and not cuda_decode.preferred(16, 192, 500)
    assert not cuda_decode.preferred(24, 64, 500)


def test_missing_compiler_is_reported() -> None:
    why = nvrtc.unavailable_reason()
    assert why is None or "cuda-bindings" in why or "NVRTC" in why

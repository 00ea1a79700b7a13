"""Quantised weights as a CPU's kernels read them, packed once into a file in the user's cache.

Quantising a checkpoint and putting it into blocks of outputs takes CPU time at each start, and memory in each replica.
The first engine writes the result; the next ones read it, or map it:

    copied    one read into huge pages, which decoding reads fastest
    mapped    replicas on one host share the file's pages; a write (a swap of weights) copies the page that it changes

The file is named by a hash of everything that it depends on: the checkpoint's contents, config, dtype, format, the
instruction set, and the source of the code that reads and packs. It ends with a checksum of all before it, which is
verified at each start: a damaged or truncated file is made again. It is written under a temporary name and then linked
to its own: of processes that pack at the same time one is first, and the others use its file. Without a usable folder,
or on a full disk, engines pack for themselves, after one line. Files that no start has used for :data:`MAX_UNUSED_DAYS`
are deleted.

    magic, length of the header     8 + 8 bytes
    header                          JSON: a table of tensors
    tensors                         each at a multiple of 64 bytes, from a page on
    SHA-256                         32 bytes
"""

import functools
import hashlib
import json
import logging
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from colonnade.checkpoint.digest import digest_of
from colonnade.checkpoint.load_model import OpenedModel
from colonnade.config import ExpertsConfig, ModelConfig, WeightFormat
from colonnade.kernels.cpu import library
from colonnade.kernels.cpu.huge_pages import LINE, Arena
from colonnade.kernels.linear.quantise import Kind, Quantised
from colonnade.model import Transformer, fused_block, weight_only_quant
from colonnade.model.weight_only_quant import assign_quantised, quantisable_modules, stored_quantised
from colonnade.parallel.axis import SOLO_AXES
from colonnade.parallel.distributed_context import DistributedContext

log = logging.getLogger(__name__)

PackedUse = Literal["never", "copied", "mapped"]
"""How an engine uses packed weights."""
FOLDER = Path("~/.cache/colonnade/weights")
MIN_PACKED_BYTES = 16 << 20
"""Weights of fewer bytes are packed at each start, which takes less than a second."""
MAX_UNUSED_DAYS = 30
PACKAGE, SOURCES = Path(__file__).parents[1], ("checkpoint", "model", "kernels/linear")
"""The package, and its folders whose code decides the bytes of packed weights."""
MAGIC = b"clnpack1"
PAGE = 4096
HASH_BYTES = 32


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file."""

    name: str
    """Of the parameter or buffer; of a quantised matrix, with its part behind it."""
    dtype: str
    shape: tuple[int, ...]
    start: int
    """From the first tensor on [bytes]."""
    part: Literal["parameter", "buffer", "values", "scales"]
    kind: Kind | None = None
    inputs: int = 0
    group: int = 0
    blocked: bool = False

    @property
    def nbytes(self) -> int:
        """Its size."""
        return torch.Size(self.shape).numel() * getattr(torch, self.dtype).itemsize


def load_packed(
    opened: OpenedModel, kind: Kind, group: int, dtype: torch.dtype, use: PackedUse, pack: Callable[[], Transformer]
) -> Transformer:
    """The model of ``opened``, from its packed file, or by ``pack`` if there is none; then one is written."""
    try:
        path = _folder() / f"{_key(opened, kind, group, dtype)}.packed"
        found = _read(path, opened.config, dtype, use)
    except OSError as error:
        _warn(error)
        return pack()
    if found is not None:
        return found
    model = pack()
    fused_block.store_in_blocks(model)
    if weight_only_quant.weight_bytes(model) < MIN_PACKED_BYTES:
        return model
    try:
        _write(model, path)
        _delete_old(path.parent)
        if use == "copied":
            return model
        return _read(path, opened.config, dtype, use) or model
    except OSError as error:
        _warn(error)
        return model


def packable(
    opened: OpenedModel, context: DistributedContext, experts: ExpertsConfig, weights: WeightFormat
) -> Kind | None:
    """The format of packed weights of ``opened``; None if they have no file: on a GPU, over ranks, with adapters."""
    if weights not in ("int8", "int4") or context.world > 1 or context.device.type != "cpu" or opened.adapters:
        return None
    return weights if experts.layers_on_device is None and library.load() is not None else None


def _folder() -> Path:
    """The cache's folder; raises OSError if it cannot be used."""
    folder = FOLDER.expanduser()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if problem := library.untrusted(folder):
        raise OSError(problem)
    return folder


def _warn(error: OSError) -> None:
    log.warning("packed weights are not cached, so each start packs them again: %s", error)


def _key(opened: OpenedModel, kind: Kind, group: int, dtype: torch.dtype) -> str:
    """A hash of everything that the packed weights depend on."""
    parts = [
        opened.config.model_dump_json(), kind, str(group), str(dtype), _instruction_set(), _source_hash(PACKAGE),
        *_checksums(opened.path),
    ]  # fmt: skip
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _checksums(location: Path) -> Iterator[str]:
    """Names and SHA-256 of a checkpoint's files."""
    files = [location] if location.is_file() else sorted(path for path in location.rglob("*") if path.is_file())
    for path in files:
        yield path.name if path == location else str(path.relative_to(location))
        yield digest_of(path).sha256


@functools.cache
def _source_hash(package: Path) -> str:
    """A hash of the code that reads, maps, arranges and quantises packed weights, which determines their bytes."""
    digest = hashlib.sha256()
    for path in (path for folder in SOURCES for path in sorted((package / folder).rglob("*.py"))):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _instruction_set() -> str:
    return library.best_instruction_set(Path("/proc/cpuinfo"))


# -- reading -----------------------------------------------------------------------------------------------------------


def _read(path: Path, config: ModelConfig, dtype: torch.dtype, use: PackedUse) -> Transformer | None:
    """The model in ``path``; None if there is none, or if it is damaged or another user's."""
    if not path.exists():
        return None
    data = _verified(path, use)
    if data is None:
        log.warning("%s is damaged, or others can write to it; it is made again", path)
        path.unlink()
        return None
    os.utime(path)
    length = int.from_bytes(bytes(data[8:16].tolist()), "little")
    entries = [_entry(each) for each in json.loads(bytes(data[16 : 16 + length].numpy()))]
    return _assemble(data[_first_tensor(length) :], entries, config, dtype)


def _verified(path: Path, use: PackedUse) -> Tensor | None:
    """The bytes of the file without their checksum, if that is right."""
    if library.untrusted(path):
        return None
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size <= PAGE + HASH_BYTES:
            return None
        if use == "mapped":
            pages = mmap.mmap(file.fileno(), size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
            data = torch.frombuffer(pages, dtype=torch.uint8)
        else:
            data = Arena(size).take(size)
            if file.readinto(data.numpy()) != size:  # type: ignore[attr-defined]
                return None
    contents, checksum = data[:-HASH_BYTES].numpy(), bytes(data[-HASH_BYTES:].numpy())
    whole = contents[:8].tobytes() == MAGIC and hashlib.sha256(contents.data).digest() == checksum
    return data[:-HASH_BYTES] if whole else None


def _entry(fields: dict[str, Any]) -> _Entry:
    fields["shape"] = tuple(fields["shape"])
    return _Entry(**fields)


def _first_tensor(header: int) -> int:
    """Offset of the tensors of a file with a header of this many bytes."""
    return -(-(16 + header) // PAGE) * PAGE


def _assemble(data: Tensor, entries: list[_Entry], config: ModelConfig, dtype: torch.dtype) -> Transformer:
    """A model whose weights are the tensors in ``data``."""
    model = Transformer(config, SOLO_AXES, device="meta", dtype=dtype)
    layers, values = quantisable_modules(model), dict[str, Tensor]()
    for entry in entries:
        x = data[entry.start : entry.start + entry.nbytes].view(getattr(torch, entry.dtype)).view(entry.shape)
        prefix, _, last = entry.name.rpartition(".")
        if entry.part == "values":
            values[entry.name] = x
        elif entry.part == "scales":
            assert entry.kind is not None
            weight = Quantised(entry.kind, values[entry.name], x, entry.inputs, entry.group, entry.blocked)
            assign_quantised(layers[entry.name], entry.name, weight)
        else:
            parameter = nn.Parameter(x, requires_grad=False) if entry.part == "parameter" else x
            setattr(model.get_submodule(prefix), last, parameter)
    return model.eval().requires_grad_(False)


# -- writing -----------------------------------------------------------------------------------------------------------


def _write(model: Transformer, path: Path) -> None:
    """Write the weights of ``model``; if another process was first, its file stays."""
    parts: list[tuple[_Entry, Tensor]] = []
    at = 0

    def add(name: str, x: Tensor, part: Literal["parameter", "buffer", "values", "scales"], **more: object) -> None:
        nonlocal at
        x = x.detach().contiguous()
        dtype = str(x.dtype).removeprefix("torch.")
        parts.append((_Entry(name, dtype, tuple(x.shape), at, part, **more), x))  # type: ignore[arg-type]
        at += -(-x.nbytes // LINE) * LINE

    for name, weight in stored_quantised(model).items():
        more = {"kind": weight.kind, "inputs": weight.inputs, "group": weight.group, "blocked": weight.blocked}
        add(name, weight.values, "values", **more)
        add(name, weight.scales, "scales", **more)
    for name, x in model.named_parameters():
        add(name, x, "parameter")
    for name, x in model.named_buffers():
        add(name, x, "buffer")
    header = json.dumps([asdict(entry) for entry, _ in parts]).encode()
    start, digest = _first_tensor(len(header)), hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=path.parent, suffix=".part") as file:
        position = 0

        def put(data: bytes | memoryview) -> None:
            nonlocal position
            file.write(data)
            digest.update(data)
            position += len(data)

        put(MAGIC + len(header).to_bytes(8, "little") + header)
        for entry, x in parts:
            put(bytes(start + entry.start - position))
            put(x.flatten().view(torch.uint8).numpy().data)
        put(bytes(start + at - position))
        file.write(digest.digest())
        file.flush()
        os.fsync(file.fileno())
        try:
            os.link(file.name, path)
        except FileExistsError:
            log.debug("another process has packed %s", path)


def _delete_old(folder: Path) -> None:
    """Delete files that have not been used for long, and leftovers of killed processes."""
    for path in folder.iterdir():
        try:
            age_s = time.time() - path.stat().st_mtime
            if age_s > MAX_UNUSED_DAYS * 86_400 or (path.suffix == ".part" and age_s > 86_400):
                path.unlink()
        except FileNotFoundError:  # another process has deleted it
            continue

"""``tensors.json`` of a native checkpoint: the shape, the type and the pieces of each tensor, by key.

Keys are ``part/parameter`` with the parts ``weights``, ``exp_avg`` and ``exp_avg_sq``.

torch.distributed.checkpoint's plug for storage: safetensors files and a JSON index, nothing pickled.

torch plans who writes which shard and which saved pieces each rank must read (that is what makes a checkpoint load
under any layout); this file only moves the pieces. torch's own file storage keeps its metadata in a pickle, which
would run whatever a stranger's checkpoint holds, hence this one (docs/decisions/0003-checkpoint-format.md).

Each rank writes one file a part; :mod:`colonnade.checkpoint.dcp_storage` says which piece of which tensor is where.
Imported when something is saved or loaded: torch's part takes a second.
"""

import dataclasses
import math
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from colonnade.checkpoint import atomic_folder as folders
from colonnade.checkpoint.atomic_folder import FULL, Digest, Manifest, check_room
from colonnade.config import Config
from colonnade.errors import CapacityError, CheckpointError, ColonnadeError, ConfigError

INDEX = "tensors.json"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
)}  # fmt: skip


class Piece(Config):
    """One saved box of a tensor."""

    offsets: tuple[int, ...]
    """Where it begins in the whole."""
    sizes: tuple[int, ...]
    """Its shape."""
    file: str
    """The safetensors file that holds it, under the parameter's name."""


class Entry(Config):
    """One tensor."""

    shape: tuple[int, ...]
    """Of the whole."""
    dtype: str = Field(pattern=f"^({'|'.join(DTYPES)})$")
    """As torch calls it."""
    pieces: list[Piece]
    """Together the whole."""


class Index(Config):
    """All tensors of a checkpoint, by key."""

    tensors: dict[str, Entry]
    """``part/parameter`` to where it is."""

    @staticmethod
    def read(folder: Path) -> "Index":
        """The index of a checkpoint, whose own checksum has been verified."""
        try:
            index = Index(**folders.read_json(folder / INDEX))
        except ConfigError as why:
            raise CheckpointError(f"{folder / INDEX} is damaged: {why}; use another checkpoint") from None
        for key, entry in index.tensors.items():
            if sum(math.prod(piece.sizes) for piece in entry.pieces) != math.prod(entry.shape):
                raise CheckpointError(f"{folder / INDEX} has only parts of {key}; use another checkpoint")
            if len({piece.offsets for piece in entry.pieces}) < len(entry.pieces):
                raise CheckpointError(f"{folder / INDEX} has parts of {key} twice; use another checkpoint")
            for piece in entry.pieces:
                if not _within(piece, entry.shape) or not piece.file.startswith(f"{part_of(key)[0]}-"):
                    raise CheckpointError(
                        f"{folder / INDEX} has a piece {piece.sizes} at {piece.offsets} in {piece.file} of '{key}' "
                        f"{entry.shape}, where none can be; use another checkpoint"
                    )
        return index


def _within(piece: Piece, shape: tuple[int, ...]) -> bool:
    if not len(piece.offsets) == len(piece.sizes) == len(shape):
        return False
    return all(
        a >= 0 and n > 0 and a + n <= whole for a, n, whole in zip(piece.offsets, piece.sizes, shape, strict=True)
    )


def part_of(key: str) -> tuple[str, str]:
    """``part/parameter`` taken apart."""
    part, _, name = key.partition("/")
    return part, name


BLOCK_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class _Written:
    """What a rank tells the coordinator about one piece."""

    piece: Piece
    digest: Digest


class Writer(StorageWriter):
    """Writes a checkpoint folder; ``seal`` adds the coordinator's own files just before the folder appears.

    ``after`` is the coordinator's work once it is there; a failure in it reaches all ranks, as any other does.
    """

    def __init__(
        self,
        folder: Path,
        seal: Callable[[Path], None],
        after: Callable[[], object] = lambda: None,
        *,
        overwrite: bool = False,
        seal_bytes: int = 0,
    ):
        """``overwrite`` replaces a model that is there; ``seal_bytes`` is what the coordinator's own files take at
        most.
        """
        self.folder, self.seal, self.after = folder, seal, after
        self.overwrite, self.seal_bytes = overwrite, seal_bytes

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A writer serves one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As planned, but for pieces without elements (a rank beyond the rows of a small tensor)."""
        kept = [item for item in plan.items if item.tensor_data is None or math.prod(item.tensor_data.chunk.sizes)]
        return dataclasses.replace(plan, items=kept)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before anyone writes: see that all fits, make the place, number the ranks' files."""
        folders.refuse_existing(self.folder, self.overwrite)
        folders.discard(self.folder)
        check_room(self.folder, self.seal_bytes + sum(_size_bytes(plan) for plan in plans))
        folders.begin(self.folder, self.overwrite)
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """On each rank: one file a part, flushed to the disk."""
        parts: defaultdict[str, list[Any]] = defaultdict(list)
        for item in plan.items:
            parts[part_of(item.index.fqn)[0]].append(item)
        written: list[WriteResult] = []
        for part, items in parts.items():
            name = f"{part}-{plan.storage_data:05d}.safetensors"
            path = folders.partial(self.folder) / name
            tensors: dict[str, Tensor] = {}
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor), "a checkpoint holds tensors only"
                tensors[part_of(item.index.fqn)[1]] = tensor.detach().cpu().contiguous()
            try:
                folders.write_tensors(path, tensors)
            except SafetensorError as why:
                raise _cannot_write(path, why) from None
            folders.flush(path)
            digest = folders.digest_of(path)
            for item in items:
                box = item.tensor_data.chunk
                piece = Piece(offsets=tuple(box.offsets), sizes=tuple(box.sizes), file=name)
                size_bytes = tensors[part_of(item.index.fqn)[1]].nbytes
                written.append(WriteResult(item.index, size_bytes, _Written(piece, digest)))
        return _done(written)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, when all have written: the index, the seal, the manifest, the rename."""
        pieces: defaultdict[str, list[Piece]] = defaultdict(list)
        digests: dict[str, Digest] = {}
        for result in (result for rank in results for result in rank):
            written: _Written = result.storage_data
            pieces[result.index.fqn].append(written.piece)
            digests[written.piece.file] = written.digest
        tensors: dict[str, Entry] = {}
        for key, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata)
            dtype = str(tensor.properties.dtype).removeprefix("torch.")
            tensors[key] = Entry(shape=tuple(tensor.size), dtype=dtype, pieces=pieces[key])
        place = folders.partial(self.folder)
        folders.write_json(place / INDEX, Index(tensors=tensors).model_dump(mode="json"))
        self.seal(place)
        folders.commit(self.folder, digests)
        self.after()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """A writer is always made with its folder."""
        return False


class Reader(StorageReader):
    """Reads the boxes that this rank needs, after every file that anyone needs was checked by someone."""

    def __init__(self, folder: Path, manifest: Manifest, index: Index, parts: set[str], *, rank: int, world: int):
        """``parts`` are read by some rank or other, by each what it needs of them."""
        self.folder, self.manifest, self.index = folder, manifest, index
        needed = {
            piece.file for key, entry in index.tensors.items() if part_of(key)[0] in parts for piece in entry.pieces
        }
        self._to_check = sorted(needed)[rank::world]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A reader serves one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The index in torch's terms."""
        tensors: dict[str, Any] = {}
        files: dict[MetadataIndex, Piece] = {}
        for key, entry in self.index.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.pieces]
            properties = TensorProperties(dtype=DTYPES[entry.dtype])
            tensors[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            files |= {MetadataIndex(key, p.offsets): p for p in entry.pieces}
        return Metadata(state_dict_metadata=tensors, storage_data=files)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check this rank's share of the checksums; a failure reaches all ranks with the plan."""
        self.manifest.check_contents(self.folder, self._to_check)
        self._files = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As planned."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As planned."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy each planned box into its place, straight from the (memory-mapped) file."""
        by_file: defaultdict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._files[item.storage_index].file].append(item)
        for name, items in by_file.items():
            try:
                with safe_open(self.folder / name, framework="pt") as file:
                    for item in items:
                        box = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
                        _, parameter = part_of(item.storage_index.fqn)
                        stored, sizes = file.get_slice(parameter), self._files[item.storage_index].sizes
                        if tuple(stored.get_shape()) != sizes:
                            raise CheckpointError(
                                f"{self.folder / name} holds '{parameter}' of shape {tuple(stored.get_shape())}, and "
                                f"{INDEX} says {sizes}; restore it or use another checkpoint"
                            )
                        planner.resolve_tensor(item).detach().copy_(stored[box])
            except (SafetensorError, OSError) as why:
                raise CheckpointError(
                    f"{self.folder / name} cannot be read: {why}; restore it or use another checkpoint"
                ) from None
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """A reader is always made with its folder."""
        return False


def _size_bytes(plan: SavePlan) -> int:
    """What a rank takes on the disk: numbers, their lines in headers and index, and files that fill whole blocks."""
    total = 0
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, "a checkpoint holds tensors only"
        lines = 4 * len(item.index.fqn) + 300
        total += math.prod(data.chunk.sizes) * data.properties.dtype.itemsize + lines
    return total + BLOCK_BYTES * len({part_of(item.index.fqn)[0] for item in plan.items})


def _cannot_write(path: Path, why: SafetensorError) -> ColonnadeError:
    """safetensors tells the operating system's error in words only."""
    if any(f"os error {full}" in str(why) for full in FULL):
        return CapacityError(f"the disk is full: {path} was not written; free some space")
    return CheckpointError(f"{path} cannot be written: {why}")


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future

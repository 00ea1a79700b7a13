"""Storage backend for torch.distributed.checkpoint (DCP): safetensors files and a JSON index, no pickle.

DCP plans which rank writes which shard and which saved pieces each rank must read; that is what lets a checkpoint load
under any layout. This module only reads and writes the pieces. DCP's own file storage keeps its metadata in a pickle,
which would run code from an untrusted checkpoint, hence this one (docs/decisions/0003-checkpoint-format.md).

Each rank writes one file per part; :mod:`colonnade.checkpoint.tensor_index` says which file contains which piece.
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

from colonnade.atomic_rename import fsync
from colonnade.checkpoint import atomic_folder
from colonnade.checkpoint.atomic_folder import DISK_FULL_ERRNOS, Digest, Manifest, check_disk_space
from colonnade.checkpoint.tensor_index import DTYPES, INDEX, Entry, Index, Piece, split_key
from colonnade.errors import CapacityError, CheckpointError, ColonnadeError

BLOCK_BYTES = 4096
"""Block size of the file system, for estimates."""


@dataclasses.dataclass(frozen=True)
class _Written:
    """A rank's report to the coordinator about one piece."""

    piece: Piece
    digest: Digest


class Writer(StorageWriter):
    """Writes one checkpoint folder."""

    def __init__(
        self,
        folder: Path,
        write_metadata: Callable[[Path], None],
        on_commit: Callable[[], object] = lambda: None,
        *,
        overwrite: bool = False,
        metadata_bytes: int = 0,
    ):
        """The coordinator calls ``write_metadata`` to add its own files just before the folder is renamed, which take
        at most ``metadata_bytes``, and ``on_commit`` afterwards; a failure in either reaches all ranks. ``overwrite``
        replaces an existing model.
        """
        self.folder, self.write_metadata, self.on_commit = folder, write_metadata, on_commit
        self.overwrite, self.metadata_bytes = overwrite, metadata_bytes

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a writer is used for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Drops empty pieces (of ranks beyond the rows of a small tensor)."""
        items = [item for item in plan.items if item.tensor_data is None or math.prod(item.tensor_data.chunk.sizes)]
        return dataclasses.replace(plan, items=items)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, before any write: checks disk space, creates the folder, numbers the ranks' files."""
        atomic_folder.refuse_existing(self.folder, self.overwrite)
        atomic_folder.remove_partial(self.folder)
        check_disk_space(self.folder, self.metadata_bytes + sum(_plan_bytes(plan) for plan in plans))
        atomic_folder.create_partial(self.folder, self.overwrite)
        return [dataclasses.replace(plan, storage_data=rank) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """On each rank: writes one file per part and flushes it to the disk."""
        parts: defaultdict[str, list[Any]] = defaultdict(list)
        for item in plan.items:
            parts[split_key(item.index.fqn)[0]].append(item)
        results: list[WriteResult] = []
        for part, items in parts.items():
            name = f"{part}-{plan.storage_data:05d}.safetensors"
            path = atomic_folder.partial_path(self.folder) / name
            tensors: dict[str, Tensor] = {}
            for item in items:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, Tensor), "a checkpoint contains tensors only"
                tensors[split_key(item.index.fqn)[1]] = tensor.detach().cpu().contiguous()
            try:
                atomic_folder.write_tensors(path, tensors)
            except SafetensorError as why:
                raise _write_error(path, why) from None
            fsync(path)
            digest = atomic_folder.digest_of(path)
            for item in items:
                chunk = item.tensor_data.chunk
                piece = Piece(offsets=tuple(chunk.offsets), sizes=tuple(chunk.sizes), file=name)
                size_bytes = tensors[split_key(item.index.fqn)[1]].nbytes
                results.append(WriteResult(item.index, size_bytes, _Written(piece, digest)))
        return _completed(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, after all ranks have written: writes index and metadata, commits the folder."""
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
        partial = atomic_folder.partial_path(self.folder)
        atomic_folder.write_json(partial / INDEX, Index(tensors=tensors).model_dump(mode="json"))
        self.write_metadata(partial)
        atomic_folder.commit(self.folder, digests)
        self.on_commit()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Always False: a writer is constructed with its folder."""
        return False


class Reader(StorageReader):
    """Reads the boxes that this rank needs; the ranks share the verification of the files' checksums."""

    def __init__(self, folder: Path, manifest: Manifest, index: Index, parts: set[str], *, rank: int, world: int):
        """``parts`` are the parts whose files are verified: those that any rank reads."""
        self.folder, self.manifest, self.index = folder, manifest, index
        files = {
            piece.file for key, entry in index.tensors.items() if split_key(key)[0] in parts for piece in entry.pieces
        }
        self._to_verify = sorted(files)[rank::world]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a reader is used for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Converts the index to DCP's metadata."""
        tensors: dict[str, Any] = {}
        pieces: dict[MetadataIndex, Piece] = {}
        for key, entry in self.index.tensors.items():
            chunks = [ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.sizes)) for p in entry.pieces]
            properties = TensorProperties(dtype=DTYPES[entry.dtype])
            tensors[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), chunks)
            pieces |= {MetadataIndex(key, p.offsets): p for p in entry.pieces}
        return Metadata(state_dict_metadata=tensors, storage_data=pieces)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Verifies this rank's share of the checksums; DCP reports a failure to all ranks with the plan."""
        self.manifest.check_contents(self.folder, self._to_verify)
        self._pieces = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies each planned box from the memory-mapped file to its destination."""
        by_file: defaultdict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self._pieces[item.storage_index].file].append(item)
        for name, items in by_file.items():
            try:
                with safe_open(self.folder / name, framework="pt") as file:
                    for item in items:
                        box = tuple(slice(a, a + n) for a, n in zip(item.storage_offsets, item.lengths, strict=True))
                        _, parameter = split_key(item.storage_index.fqn)
                        saved, sizes = file.get_slice(parameter), self._pieces[item.storage_index].sizes
                        if tuple(saved.get_shape()) != sizes:
                            raise CheckpointError(
                                f"{self.folder / name} contains '{parameter}' of shape {tuple(saved.get_shape())}, but "
                                f"{INDEX} says {sizes}; restore it or use another checkpoint"
                            )
                        planner.resolve_tensor(item).detach().copy_(saved[box])
            except (SafetensorError, OSError) as why:
                raise CheckpointError(
                    f"{self.folder / name} cannot be read: {why}; restore it or use another checkpoint"
                ) from None
        return _completed(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Always False: a reader is constructed with its folder."""
        return False


def _plan_bytes(plan: SavePlan) -> int:
    """An upper bound for a rank's files: values, headers, index entries, and a partly filled block for each file."""
    total = 0
    for item in plan.items:
        data = item.tensor_data
        assert data is not None, "a checkpoint contains tensors only"
        entry_bytes = 4 * len(item.index.fqn) + 300
        total += math.prod(data.chunk.sizes) * data.properties.dtype.itemsize + entry_bytes
    return total + BLOCK_BYTES * len({split_key(item.index.fqn)[0] for item in plan.items})


def _write_error(path: Path, why: SafetensorError) -> ColonnadeError:
    """The error for a failed write; safetensors gives the operating system's errno only in its message."""
    if any(f"os error {errno}" in str(why) for errno in DISK_FULL_ERRNOS):
        return CapacityError(f"the disk is full: {path} was not written; free some space")
    return CheckpointError(f"{path} cannot be written: {why}")


def _completed(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future

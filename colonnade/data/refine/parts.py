"""The stages that work on ranges of ids: duplicates, near duplicates, evaluation texts, and writing the kept
documents.
"""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from colonnade.config import plural
from colonnade.data.refine.near import BucketTable, label_components, near_copies, split_buckets
from colonnade.data.refine.overlap import Grams, count_grams, cut
from colonnade.data.refine.shingles import shingles
from colonnade.data.refine.signatures import Signer, band_buckets, sorted_rows, write_bands
from colonnade.data.refine.steps import Documents, Job, Stage, removed_record
from colonnade.data.refine.storage import (
    OPEN_FILES,
    Record,
    json_line,
    read_lines,
    read_part,
    write_array,
    write_bytes,
    write_json,
    write_lines,
)


class ExactDuplicates(Stage):
    """Removes exact duplicates in a range of ids, and computes signatures of the kept documents."""

    name = "exact"

    def _task(self, data: Documents, rank: int) -> None:
        job, folder = self.job, self.job.work / "exact"
        records = sorted(
            read_part(job.work / "read", rank),
            key=lambda each: (each["id"], each["rank"], each["key"], each["source"], each.get("task", "")),
        )
        kept, removed, size = list[Record](), list[bytes](), 0
        for record in records:
            if job.recipe.exact and kept and kept[-1]["id"] == record["id"]:
                removed.append(json_line(removed_record(record["text"], "copy", record["source"], record["id"])))
                size += len(record["text"].encode())
            else:
                kept.append(record)
        if not job.recipe.exact:  # copies keep distinct ids, in a stable order
            for number, record in enumerate(kept):
                record["id"] += f".{number:06d}" if number and kept[number - 1]["id"][:32] == record["id"] else ""
        write_lines(folder / f"{rank:06d}.jsonl", map(json_line, kept))
        write_lines(job.removed("exact", rank, "exact"), sorted(removed))
        write_json(job.stats("exact", rank), {"exact": [len(removed), size]})
        if job.finds_near:
            self._sign(kept, rank)

    def _sign(self, kept: list[Record], rank: int) -> None:
        job, folder = self.job, self.job.work / "exact"
        signer = Signer(job.recipe.bands, job.recipe.rows)
        sets = [shingles(record["text"]) for record in kept]
        numbers = np.array([i for i, each in enumerate(sets) if len(each)], np.int64)
        signed = [signer.sign(sets[i]) for i in numbers]
        shape = (len(signed), signer.bands, signer.rows)
        write_array(folder / f"{rank:06d}.starts", np.cumsum([0, *map(len, sets)]).astype(np.int64))
        write_array(folder / f"{rank:06d}.shingles", np.concatenate([*sets, np.empty(0, np.uint64)]))
        keys = [(record["rank"], int(record["key"][:16], 16), int(record["key"][16:], 16)) for record in kept]
        write_array(folder / f"{rank:06d}.keys", np.array(keys, np.uint64).reshape(-1, 3))
        write_array(folder / f"{rank:06d}.ids", np.array([record["id"] for record in kept], _ID))
        write_bands(job.work / "bands", rank, np.array(signed, np.uint32).reshape(shape), numbers)


_ID = "S39"
"""An id; with the number of the copy if copies are kept."""


class MatchingBuckets(Stage):
    """Finds the documents of each part with equal signatures in a band."""

    name = "buckets"

    def _task(self, data: Documents, rank: int) -> None:
        folder = self.job.work / "buckets" / f"{rank:06d}"
        shutil.rmtree(folder, ignore_errors=True)
        chunks = band_buckets(self.job.work / "bands" / f"bucket_{rank:03d}", self.job.recipe.rows)
        for number, (sizes, documents) in enumerate(chunks):
            write_array(folder / f"{number:06d}.sizes", sizes.astype(np.int64))
            write_array(folder / f"{number:06d}.documents", documents)


class BucketComponents(Stage):
    """Distributes the connected components of buckets: each goes to the part of its lowest document.

    Labels are in a file and buckets are streamed, so that memory does not grow with the corpus.
    """

    name = "group"

    def _task(self, data: Documents, rank: int) -> None:
        work, parts = self.job.work, self.job.parts
        shutil.rmtree(work / "group", ignore_errors=True)
        (work / "group").mkdir()
        counts = [(work / "exact" / f"{part:06d}.starts").stat().st_size // 8 - 1 for part in range(parts)]
        first = np.cumsum([0, *counts])  # documents are numbered through all parts

        def chunks() -> Iterator[BucketTable]:
            for sizes, documents in self._stored():
                yield sizes, first[documents >> 32] + (documents & 0xFFFFFFFF)

        path = work / "group" / "labels"
        write_array(path, np.empty(0, np.int64))
        labels = np.empty(0, np.int64)
        if first[-1]:
            labels = np.memmap(path, np.int64, "r+", shape=(int(first[-1]),))
            for start in range(0, len(labels), 1 << 20):
                labels[start : start + (1 << 20)] = np.arange(start, min(start + (1 << 20), len(labels)))
        label_components(labels, chunks)
        for sizes, documents in self._stored():
            begins = np.cumsum(sizes) - sizes
            numbers = first[documents[begins] >> 32] + (documents[begins] & 0xFFFFFFFF)
            owners = np.searchsorted(first, labels[numbers], "right") - 1
            owner_of_each = np.repeat(owners, sizes)
            for part in np.unique(owners):
                for kind, own in (("sizes", sizes[owners == part]), ("documents", documents[owner_of_each == part])):
                    with (work / "group" / f"{part:06d}.{kind}").open("ab") as file:
                        file.write(own.tobytes())

    def _stored(self) -> Iterator[BucketTable]:
        for file in sorted((self.job.work / "buckets").glob("*/*.sizes")):
            yield np.fromfile(file, np.int64), np.fromfile(file.with_suffix(".documents"), np.int64)


def _open_table(folder: Path, part: int, kind: str, dtype: str) -> np.ndarray:
    path = folder / f"{part:06d}.{kind}"
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


class SignedParts:
    """Shingles, keys and ids of all documents; a document is part << 32 | number."""

    def __init__(self, folder: Path):
        self._file = lru_cache(OPEN_FILES)(partial(_open_table, folder))

    def _rows(self, document: int, kind: str, dtype: str, start: int, stop: int) -> np.ndarray:
        return self._file(document >> 32, kind, dtype)[start:stop]

    def shingles(self, document: int) -> np.ndarray:
        """The sorted shingles of ``document``."""
        number = document & 0xFFFFFFFF
        start, stop = self._rows(document, "starts", "i8", number, number + 2)
        return self._rows(document, "shingles", "u8", start, stop)

    def order(self, document: int) -> tuple[int, ...]:
        """Key of the order in which documents are visited; earlier ones are kept."""
        number = document & 0xFFFFFFFF
        return (*(int(each) for each in self._rows(document, "keys", "u8", 3 * number, 3 * number + 3)), document)

    def id(self, document: int) -> str:
        """The id of ``document``."""
        number = document & 0xFFFFFFFF
        return self._rows(document, "ids", _ID, number, number + 1)[0].decode()


class NearDuplicates(Stage):
    """Selects which documents of its components to remove."""

    name = "near"

    def _task(self, data: Documents, rank: int) -> None:
        signed, path = SignedParts(self.job.work / "exact"), self.job.work / "group" / f"{rank:06d}.sizes"
        leaving = list[tuple[int, int, int]]()
        if path.is_file():
            buckets = split_buckets(np.fromfile(path, np.int64), np.fromfile(path.with_suffix(".documents"), np.int64))
            copies = near_copies(buckets, signed.shingles, self.job.recipe.similarity, signed.order)
            leaving = [(copy.document, copy.twin, round(copy.similarity * 1e6)) for copy in copies]
        write_array(self.job.work / "near" / f"{rank:06d}.leaving", np.array(sorted(leaving), np.int64).reshape(-1, 3))


class ReadPart(Stage):
    """Reads a part without its near duplicates."""

    def leaving(self, part: int) -> dict[int, tuple[int, int]]:
        """(twin, similarity in millionths) of the removed documents of ``part``."""
        files = sorted((self.job.work / "near").glob("*.leaving")) if self.job.finds_near else []
        tables = [sorted_rows(file, "i8", 3, part << 32, (part + 1) << 32) for file in files]
        return {
            int(document) & 0xFFFFFFFF: (int(twin), int(similarity))
            for table in tables
            for document, twin, similarity in table
        }

    def records(self, part: int) -> Iterator[tuple[int, Record]]:
        """The numbered records of ``part`` after removing exact duplicates."""
        return enumerate(read_lines(self.job.work / "exact" / f"{part:06d}.jsonl"))


def load_grams(job: Job, name: str) -> Grams:
    """Grams of evaluation texts: ``cut``, or those of a test set by its number."""
    hashes = np.fromfile(job.work / "tests" / f"{name}.grams", np.uint64)
    return Grams(hashes, tuple(json.loads((job.work / "tests" / f"{name}.json").read_text())["lengths"]))


def save_grams(job: Job, name: str, grams: Grams) -> None:
    """Write what :func:`load_grams` reads."""
    write_array(job.work / "tests" / f"{name}.grams", grams.hashes)
    write_json(job.work / "tests" / f"{name}.json", {"lengths": list(grams.lengths)})


class CountGrams(ReadPart):
    """Counts the grams of evaluation texts in a part."""

    name = "count"

    def _task(self, data: Documents, rank: int) -> None:
        leaving = self.leaving(rank)
        texts = (record["text"] for number, record in self.records(rank) if number not in leaving)
        write_array(self.job.work / "count" / f"{rank:06d}.counts", count_grams(load_grams(self.job, "cut"), texts))


class SelectRareGrams(Stage):
    """Selects the grams to cut out: those that are not common in the corpus."""

    name = "rare"

    def _task(self, data: Documents, rank: int) -> None:
        grams = load_grams(self.job, "cut")
        counts = np.zeros(len(grams.hashes), np.int64)
        for file in sorted((self.job.work / "count").glob("*.counts")):
            counts += np.fromfile(file, np.int64)
        save_grams(self.job, "rare", Grams(grams.hashes[counts < self.job.recipe.common], grams.lengths))


class WritePart(ReadPart):
    """Writes the kept documents of a part, and those that the last two steps removed."""

    name = "write"

    def _task(self, data: Documents, rank: int) -> None:
        job, leaving = self.job, self.leaving(rank)
        signed = SignedParts(job.work / "exact")
        rare = load_grams(job, "rare") if job.tests else Grams(np.empty(0, np.uint64), ())
        overlaps = [load_grams(job, str(number)) for number in range(len(job.tests))]
        found = [np.zeros(len(grams.hashes), bool) for grams in overlaps]
        removed: dict[str, list[bytes]] = {"near": [], "decontaminate": []}
        sizes: Counter[str] = Counter()
        lengths: Counter[int] = Counter()
        similarities: Counter[int] = Counter()

        def remove(step: str, record: Record, text: str, reason: str) -> None:
            removed[step].append(json_line(removed_record(text, reason, record["source"], record["id"])))
            sizes[step] += len(text.encode())

        def kept_documents() -> Iterator[bytes]:
            for number, record in self.records(rank):
                if number in leaving:
                    twin, similarity = leaving[number]
                    similarities[similarity // 10_000] += 1
                    remove("near", record, record["text"], f"similarity {similarity / 1e6:.3f} with {signed.id(twin)}")
                    continue
                pieces = cut(record["text"], rare, job.recipe.margin) if len(rare.hashes) else None
                texts = [record["text"]] if pieces is None else self._pieces(record, pieces, remove)
                for at, text in enumerate(texts):
                    more = {"task": record["task"]} if "task" in record else {}
                    name = record["id"] if pieces is None else f"{record['id']}-{at:02d}"
                    sizes["kept"] += len(text.encode())
                    lengths[len(text).bit_length()] += 1
                    for test, grams in enumerate(overlaps):
                        found[test] |= count_grams(grams, [text]) > 0
                    yield json_line({"id": name, "text": text, **more})

        write_lines(job.work / "documents" / f"{rank:06d}.jsonl", kept_documents())
        for step, lines in removed.items():
            write_lines(job.removed("write", rank, step), sorted(lines))
        for number, seen in enumerate(found):
            write_bytes(job.work / "overlap" / f"{number}-{rank:06d}.found", np.packbits(seen).tobytes())
        write_json(
            job.stats("write", rank),
            {
                "kept": [sum(lengths.values()), sizes["kept"]], "lengths": lengths, "similarities": similarities,
                **{step: [len(lines), sizes[step]] for step, lines in removed.items()},
            },
        )  # fmt: skip

    def _pieces(self, record: Record, pieces: list[str], remove: Any) -> list[str]:
        """The kept pieces of a document with evaluation texts."""
        margin, most = self.job.recipe.margin, self.job.recipe.max_pieces
        whole = [piece.strip() for piece in pieces if len(piece.strip()) >= max(margin, 1)]
        if len(pieces) > most:
            remove("decontaminate", record, record["text"], f"{len(pieces)} pieces are more than {most}")
            return []
        reason = f"evaluation texts in {plural(len(pieces) - 1, 'place')}; kept {plural(len(whole), 'piece')}"
        remove("decontaminate", record, record["text"], reason)
        return whole

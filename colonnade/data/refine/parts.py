"""The stages that work on parts of the ids: copies, near copies, evaluation texts, and the documents that stay."""

import json
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from colonnade.data.refine.near import components, near_copies
from colonnade.data.refine.overlap import Grams, count_grams, cut
from colonnade.data.refine.shingles import shingles
from colonnade.data.refine.signatures import Signer, read_buckets, write_bands
from colonnade.data.refine.steps import Documents, Job, Stage, removed_record
from colonnade.data.refine.storage import (
    Record,
    line,
    read_lines,
    read_part,
    write_array,
    write_bytes,
    write_json,
    write_lines,
)


class Exact(Stage):
    """Removes exact copies in a range of ids, and signs the documents that stay."""

    name = "exact"

    def _task(self, data: Documents, rank: int) -> None:
        job, folder = self.job, self.job.work / "exact"
        records = sorted(
            read_part(job.work / "read", len(job.units), rank),
            key=lambda each: (each["id"], each["rank"], each["key"], each["source"], each.get("task", "")),
        )
        kept, removed = list[Record](), list[bytes]()
        for record in records:
            if job.recipe.exact and kept and kept[-1]["id"] == record["id"]:
                removed.append(line(removed_record(record["text"], "copy", record["source"], record["id"])))
            else:
                kept.append(record)
        if not job.recipe.exact:  # copies keep distinct ids, in a stable order
            for number, record in enumerate(kept):
                record["id"] += f".{number:06d}" if number and kept[number - 1]["id"][:32] == record["id"] else ""
        write_lines(folder / f"{rank:06d}.jsonl", map(line, kept))
        write_lines(job.removed("exact", rank, "exact"), sorted(removed))
        size = sum(len(json.loads(each)["text"].encode()) for each in removed)
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
        write_bands(job.work / "bands", rank, np.array(signed, np.uint32).reshape(shape), numbers)


class Group(Stage):
    """Distributes the connected components of buckets; uses memory for each document with a candidate."""

    name = "group"

    def _task(self, data: Documents, rank: int) -> None:
        files = sorted((self.job.work / "buckets").rglob("*.dups"))
        found = {((each[:, 0] << 32) | each[:, 1]).tobytes() for each in read_buckets(files)}
        buckets = [np.frombuffer(each, np.int64) for each in sorted(found)]
        shares: list[list[np.ndarray]] = [[] for _ in range(self.job.parts)]
        for component in components(buckets):
            own = [buckets[number] for number in component]
            shares[min(int(bucket[0]) for bucket in own) >> 32].append(_packed(own))
        for part, share in enumerate(shares):
            write_array(
                self.job.work / "group" / f"{part:06d}.components", np.concatenate([*share, np.empty(0, np.int64)])
            )


def _packed(buckets: list[np.ndarray]) -> np.ndarray:
    """A component in one array: the number of its buckets, then each with its length."""
    parts = [np.array([len(buckets)], np.int64)]
    for bucket in buckets:
        parts += [np.array([len(bucket)], np.int64), bucket]
    return np.concatenate(parts)


def _unpacked(numbers: np.ndarray) -> Iterator[list[np.ndarray]]:
    at = 0
    while at < len(numbers):
        count, component = int(numbers[at]), list[np.ndarray]()
        at += 1
        for _ in range(count):
            length = int(numbers[at])
            component.append(numbers[at + 1 : at + 1 + length])
            at += 1 + length
        yield component


class SignedParts:
    """Shingles and keys of all documents in memory-mapped files; a document is part << 32 | number."""

    def __init__(self, folder: Path):
        self._folder, self._files = folder, dict[tuple[int, str], np.ndarray]()

    def _file(self, part: int, kind: str, dtype: type) -> np.ndarray:
        if (part, kind) not in self._files:
            path = self._folder / f"{part:06d}.{kind}"
            empty = not path.stat().st_size
            self._files[part, kind] = np.empty(0, dtype) if empty else np.memmap(path, dtype, "r")
        return self._files[part, kind]

    def shingles(self, document: int) -> np.ndarray:
        """The sorted shingles of ``document``."""
        part, number = document >> 32, document & 0xFFFFFFFF
        start, stop = self._file(part, "starts", np.int64)[number : number + 2]
        return self._file(part, "shingles", np.uint64)[start:stop]

    def order(self, document: int) -> tuple[int, ...]:
        """Documents that stay come first in this order."""
        part, number = document >> 32, document & 0xFFFFFFFF
        key = self._file(part, "keys", np.uint64)[3 * number : 3 * number + 3]
        return (*(int(each) for each in key), document)


class Near(Stage):
    """Decides which documents of its components leave."""

    name = "near"

    def _task(self, data: Documents, rank: int) -> None:
        signed, leaving = SignedParts(self.job.work / "exact"), list[tuple[int, int, int]]()
        path = self.job.work / "group" / f"{rank:06d}.components"
        for component in _unpacked(np.fromfile(path, np.int64)):
            for copy in near_copies(component, signed.shingles, self.job.recipe.similarity, signed.order):
                leaving.append((copy.document, copy.twin, round(copy.similarity * 1e6)))
        write_array(self.job.work / "near" / f"{rank:06d}.leaving", np.array(leaving, np.int64).reshape(-1, 3))


class Part(Stage):
    """Reads a part without its near copies."""

    @cached_property
    def _leaving(self) -> np.ndarray:
        files = sorted((self.job.work / "near").glob("*.leaving"))
        tables = [np.fromfile(file, np.int64).reshape(-1, 3) for file in files]
        return np.concatenate([*tables, np.empty((0, 3), np.int64)])

    def leaving(self, part: int) -> dict[int, tuple[int, int]]:
        """(twin, millionths of similarity) of the documents of ``part`` that leave."""
        own = self._leaving[self._leaving[:, 0] >> 32 == part] if self.job.finds_near else np.empty((0, 3), np.int64)
        return {int(document) & 0xFFFFFFFF: (int(twin), int(similarity)) for document, twin, similarity in own}

    def records(self, part: int) -> Iterator[tuple[int, Record]]:
        """The records of ``part`` after removing exact copies, numbered."""
        return enumerate(read_lines(self.job.work / "exact" / f"{part:06d}.jsonl"))


def load_grams(job: Job, name: str) -> Grams:
    """Grams of evaluation texts: ``cut``, or those of a test set by its number."""
    hashes = np.fromfile(job.work / "tests" / f"{name}.grams", np.uint64)
    return Grams(hashes, tuple(json.loads((job.work / "tests" / f"{name}.json").read_text())["lengths"]))


def save_grams(job: Job, name: str, grams: Grams) -> None:
    """Write what :func:`load_grams` reads."""
    write_array(job.work / "tests" / f"{name}.grams", grams.hashes)
    write_json(job.work / "tests" / f"{name}.json", {"lengths": list(grams.lengths)})


class Count(Part):
    """Counts the grams of evaluation texts in a part."""

    name = "count"

    def _task(self, data: Documents, rank: int) -> None:
        leaving = self.leaving(rank)
        texts = (record["text"] for number, record in self.records(rank) if number not in leaving)
        write_array(self.job.work / "count" / f"{rank:06d}.counts", count_grams(load_grams(self.job, "cut"), texts))


class Write(Part):
    """Writes the documents of a part that stay, and what near copies and evaluation texts took."""

    name = "write"

    def _task(self, data: Documents, rank: int) -> None:
        job, leaving = self.job, self.leaving(rank)
        twins = self._twin_ids([twin for twin, _ in leaving.values()])
        rare = self._rare_grams()
        overlaps = [load_grams(job, str(number)) for number in range(len(job.tests))]
        found = [np.zeros(len(grams.hashes), bool) for grams in overlaps]
        removed: dict[str, list[bytes]] = {"near": [], "decontaminate": []}
        sizes: Counter[str] = Counter()
        lengths: Counter[int] = Counter()
        similarities: Counter[int] = Counter()

        def remove(step: str, record: Record, text: str, reason: str) -> None:
            removed[step].append(line(removed_record(text, reason, record["source"], record["id"])))
            sizes[step] += len(text.encode())

        def stay() -> Iterator[bytes]:
            for number, record in self.records(rank):
                if number in leaving:
                    twin, similarity = leaving[number]
                    similarities[similarity // 10_000] += 1
                    remove("near", record, record["text"], f"similarity {similarity / 1e6:.3f} with {twins[twin]}")
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
                    yield line({"id": name, "text": text, **more})

        write_lines(job.work / "documents" / f"{rank:06d}.jsonl", stay())
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
        """The pieces that stay of a document with evaluation texts."""
        margin, most = self.job.recipe.margin, self.job.recipe.max_pieces
        whole = [piece.strip() for piece in pieces if len(piece.strip()) >= max(margin, 1)]
        if len(pieces) > most:
            remove("decontaminate", record, record["text"], f"{len(pieces)} pieces are more than {most}")
            return []
        places = f"{len(pieces) - 1} place" + "s" * (len(pieces) > 2)
        remove("decontaminate", record, record["text"], f"evaluation texts in {places}; {len(whole)} pieces stay")
        return whole

    def _twin_ids(self, twins: list[int]) -> dict[int, str]:
        """The ids of documents, which may be in other parts."""
        names: dict[int, str] = {}
        for part in sorted({twin >> 32 for twin in twins}):
            wanted = {twin & 0xFFFFFFFF for twin in twins if twin >> 32 == part}
            names |= {part << 32 | number: record["id"] for number, record in self.records(part) if number in wanted}
        return names

    def _rare_grams(self) -> Grams:
        """The grams to cut out: those that are not common in the corpus."""
        if not self.job.tests:
            return Grams(np.empty(0, np.uint64), ())
        grams = load_grams(self.job, "cut")
        counts = sum(np.fromfile(file, np.int64) for file in sorted((self.job.work / "count").glob("*.counts")))
        return Grams(grams.hashes[counts < self.job.recipe.common], grams.lengths)

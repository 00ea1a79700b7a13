"""Spoken lines and their texts in the talkie version of the freeware game Flight of the Amazon Queen.

    apt-get download flight-of-the-amazon-queen; dpkg -x FILE.deb game

``queen.1c`` is a table of files (name, offset, size), one after another. A line is an MP3 file of 16 kbit/s at 11 kHz.
Its name says where its text stands: in a conversation (.DOG: number of the conversation, number of the text, who
speaks), in a scene (.CUT: number of the object), or among the remarks (QUEEN2.JAS: number of the text); the last
digit is the part of the text, which ``*`` and an animation's number end. Offsets and names are those that ScummVM's
engine ``queen`` reads. Scenes say nothing of where their texts begin, so the place is taken from which most lines have
a plausible speed.
"""

import re
import struct
from pathlib import Path
from typing import NamedTuple

from colonnade.errors import DataError

BYTES_PER_S = 2000
HEADER = 20
"""Bytes before the data of a file of a conversation or a scene."""
TEXTS, PERSONS = 32, 11
"""Bytes before a conversation's choices; the place of the offset of what the other person says."""
CHOICE = 96
"""Bytes of the choices of one level of a conversation."""
REMARKS = 40
"""Number of the first remark."""
MAX_OBJECTS = 99
"""Objects of a scene: names have two digits."""
MIN_RATE, MAX_RATE = 6.0, 22.0
"""Plausible letters per second."""
TEXT, PRINTABLE = re.compile(rb"[\t\r\n\x20-\xff]*\*[\t\r\n\x20-\xff]*"), re.compile(rb"[\x20-\xff]*")
"""The bytes of a text of a conversation, which has at least one animation, and of a text of a scene."""
MIN_SHARE = 0.8
"""Smallest share of plausible lines of a scene."""


class Line(NamedTuple):
    """A spoken line."""

    name: str
    text: str
    mp3: bytes

    @property
    def plausible(self) -> bool:
        """Whether a text of this length fits the time."""
        return MIN_RATE <= len(self.text) * BYTES_PER_S / max(1, len(self.mp3)) <= MAX_RATE


def lines(folder: Path) -> list[Line]:
    """All lines with a text of a plausible length, by name."""
    sources = sorted(folder.rglob("queen.1c"))
    if not sources:
        raise DataError(f"{folder} has no queen.1c; unpack the package flight-of-the-amazon-queen there")
    files = _files(sources[0].read_bytes())
    spoken = [line for name, data in files.items() for line in _lines(name, data, files)]
    return sorted({line.name: line for line in spoken if line.plausible}.values())


def _files(data: bytes) -> dict[str, bytes]:
    """The files by name; the table begins after a version and a kind of compression, which must be MP3."""
    if data[:4] != b"QTBL" or data[12] != 1:
        raise DataError("queen.1c is not the talkie version with MP3 files; use the Debian package")
    files: dict[str, bytes] = {}
    for i in range(struct.unpack_from(">H", data, 13)[0]):
        name, _, offset, size = struct.unpack_from(">12sBII", data, 15 + 21 * i)
        files[name.rstrip(b"\0").decode("latin1")] = data[offset : offset + size]
    return files


def _lines(name: str, data: bytes, files: dict[str, bytes]) -> list[Line]:
    if name.endswith(".DOG"):
        return _conversation(data[HEADER:], files)
    if name.endswith(".CUT"):
        return _scene(name.removesuffix(".CUT"), data[HEADER:], files)
    if name == "QUEEN2.JAS":
        texts = enumerate(data.decode("cp850").split("\r\n"), REMARKS + 1)
        return [line for i, text in texts for line in _parts(f"JOE{i:04}", text, files)]
    return []


def _parts(stem: str, text: str, files: dict[str, bytes]) -> list[Line]:
    """The lines of the parts of a text."""
    parts = enumerate(re.split(r"\*(?:\d\d|[A-Z]{2}\d*)", text), 1)
    named = [(f"{stem}{i}.SB".upper(), part.strip()) for i, part in parts]
    return [Line(name, part, files[name]) for name, part in named if part and name in files]


def _conversation(data: bytes, files: dict[str, bytes]) -> list[Line]:
    """The lines of both who speak."""
    levels, _, key = struct.unpack_from(">hhh", data)
    persons = struct.unpack_from(">16H", data)[PERSONS]
    own, others = TEXTS + CHOICE * abs(levels), persons
    found: list[Line] = []
    for who, first, last in (("J", own, persons), ("P", others, len(data))):
        for number, text in _numbered(data, first, last):
            found += _parts(f"{key:02}{number:04x}{who}", text, files)
    return found


def _numbered(data: bytes, place: int, end: int) -> list[tuple[int, str]]:
    """(number, text) of what stands from ``place`` on: two bytes of 0, the number, the length, the text, padding."""
    found: list[tuple[int, str]] = []
    while place + 5 <= end:
        zeros, number, length = struct.unpack_from(">HHB", data, place)
        text = data[place + 5 : place + 5 + length]
        if zeros == 0 and 0 < number < 1024 and length > 3 and len(text) == length and TEXT.fullmatch(text):
            found.append((number, text.decode("cp850")))
            place += 5 + length
        else:
            place += 1
    return found


def _scene(stem: str, data: bytes, files: dict[str, bytes]) -> list[Line]:
    """The lines of a scene: its texts follow each other, one an object, each at an even place."""
    best: list[Line] = []
    for first in (i for i in range(0, len(data), 2) if data[i]):
        place, number, found = first, 0, list[Line]()
        while number < MAX_OBJECTS and place < len(data) - 1:
            text = data[place + 1 : place + 1 + data[place]]
            if len(text) < data[place] or not PRINTABLE.fullmatch(text):
                break
            number += 1
            found += _parts(f"{stem:_<5}{number:02}", text.decode("cp850"), files)
            place += 1 + len(text)
            place += place % 2
        if sum(line.plausible for line in found) > sum(line.plausible for line in best):
            best = found
    return best if sum(line.plausible for line in best) >= MIN_SHARE * len(best) else []

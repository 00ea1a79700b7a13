"""benchmarks/harness/game_speech.py on a made game."""

import struct
from pathlib import Path

import pytest

from colonnade.errors import DataError
from harness import game_speech


def conversation(key: int, own: list[tuple[int, str]], others: list[tuple[int, str]]) -> bytes:
    """A conversation without choices."""

    def block(texts: list[tuple[int, str]]) -> bytes:
        return b"".join(struct.pack(">HHB", 0, i, len(text)) + text.encode() + b"\0" for i, text in texts)

    offsets = [0, 9, key] + [0] * 13
    offsets[game_speech.PERSONS] = game_speech.TEXTS + len(block(own))
    return bytes(game_speech.HEADER) + struct.pack(">16H", *offsets) + block(own) + block(others)


def scene(texts: list[str]) -> bytes:
    """A scene: something else, then a text of each object at even places."""
    data = bytes([1, 2, 3, 4])
    for text in texts:
        data += bytes([len(text)]) + text.encode()
        data += bytes(len(data) % 2)
    return bytes(game_speech.HEADER) + data


def write(folder: Path, files: dict[str, bytes], kind: int = 1) -> None:
    table, place = b"", 15 + 21 * len(files)
    for name, data in files.items():
        table += struct.pack(">12sBII", name.encode(), 1, place, len(data))
        place += len(data)
    head = b"QTBL" + b"CEM10\0" + b"\0\0" + bytes([kind]) + struct.pack(">H", len(files))
    (folder / "queen.1c").write_bytes(head + table + b"".join(files.values()))


def mp3(seconds: float) -> bytes:
    return bytes(round(seconds * game_speech.BYTES_PER_S))


def test_lines_have_their_texts(tmp_path: Path) -> None:
    write(tmp_path, {
        "BOB1.DOG": conversation(7, [(26, "Hello there, Bob.*16")], [(6, "Watch out!*03Here they come again.*FL")]),
        "C18B.CUT": scene(["*", "I have been locked up in here.*14", "*"]),
        "QUEEN2.JAS": b"It looks nice*03\r\nNothing was recorded*02",
        "07001AJ1.SB": mp3(1.4), "070006P1.SB": mp3(0.9), "070006P2.SB": mp3(1.6), "C18B_021.SB": mp3(2.0),
        "JOE00411.SB": mp3(1.0), "JOE00991.SB": mp3(1.0),
    })  # fmt: skip
    found = {line.name: line.text for line in game_speech.lines(tmp_path)}
    assert found == {
        "07001AJ1.SB": "Hello there, Bob.", "070006P1.SB": "Watch out!", "070006P2.SB": "Here they come again.",
        "C18B_021.SB": "I have been locked up in here.", "JOE00411.SB": "It looks nice",
    }  # fmt: skip


def test_lines_of_an_implausible_length_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, {"QUEEN2.JAS": b"It looks nice*03", "JOE00411.SB": mp3(20.0)})
    assert not game_speech.lines(tmp_path)


def test_what_is_no_game(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no queen\.1c"):
        game_speech.lines(tmp_path)
    write(tmp_path, {"QUEEN2.JAS": b"It looks nice*03"}, kind=0)
    with pytest.raises(DataError, match="not the talkie version"):
        game_speech.lines(tmp_path)

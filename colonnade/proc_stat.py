"""Reads ``/proc/PID/stat``: one line, with the program's name in parentheses as its second field."""

from pathlib import Path

PROC = Path("/proc")


def stat_fields(process: int | str, proc: Path = PROC) -> list[str]:
    """The fields of ``process``, a process id or "self", from the third on: its state, its parent, and so on.

    The name may contain any bytes, because Linux cuts it after 15, within a character or not. Raises
    FileNotFoundError or ProcessLookupError when there is no such process.
    """
    text = (proc / str(process) / "stat").read_text(encoding="utf-8", errors="replace")
    return text.rpartition(")")[2].split()

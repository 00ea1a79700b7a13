"""Search for settings that save enough memory, and tables of memory use; shared by training and serving.

The caller gives :class:`Option` objects in order of preference, and a function that estimates whether changed settings
fit. Nothing here depends on the meaning of the settings.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from colonnade.config.base import format_bytes

Changes = dict[str, object]
"""Settings by dotted names: ``{"train.micro_batch": 4}``."""
Fits = Callable[[Changes], bool]


@dataclass(frozen=True)
class Option:
    """A setting that saves memory: what it costs, and its values from the mildest to the strongest."""

    cost: str
    values: Sequence[Changes]

    @property
    def strongest(self) -> Changes:
        """The value that saves most."""
        return self.values[-1]


def merge(options: Iterable[Option]) -> Changes:
    """The changes of all ``options`` at their strongest."""
    return {name: value for option in options for name, value in option.strongest.items()}


def mildest(values: Iterable[Changes], fits: Fits) -> Changes | None:
    """The first of ``values`` that fits."""
    return next((changes for changes in values if fits(changes)), None)


def combine(
    options: Iterable[Option],
    helps: Callable[[Changes, Changes], bool],
    fits: Fits,
    *,
    drop_newest_first: bool = False,
) -> list[Option]:
    """A small set of ``options`` that fits together; all that help if none does.

    Options are added in order until they fit, then those not needed are dropped. ``helps(with_it, without_it)`` decides
    whether an option is added; one that changes a setting for the second time is not.
    """
    chosen: list[Option] = []
    for option in options:
        changes = merge(chosen)
        if option.strongest.keys() & changes.keys() or not helps(changes | option.strongest, changes):
            continue
        chosen.append(option)
        if fits(merge(chosen)):
            break
    else:
        return chosen
    earlier = chosen[:-1]
    for option in reversed(earlier) if drop_newest_first else earlier:
        if fits(merge(fewer := [other for other in chosen if other is not option])):
            chosen = fewer
    return chosen


def flags(changes: Changes) -> str:
    """The changes on the command line: ``--train.micro_batch 4 --train.no_async_save``."""
    return " ".join(_flag(name, value) for name, value in changes.items())


def _flag(name: str, value: object) -> str:
    if isinstance(value, bool):
        section, _, field = name.rpartition(".")
        return f"--{name}" if value else f"--{section}.no_{field}"
    return f"--{name} {value}"


@dataclass(frozen=True)
class MemoryUse:
    """Bytes used of one memory, by purpose, and the bytes available there."""

    where: str
    rows: Mapping[str, int]
    free: int

    @property
    def total(self) -> int:
        """The sum of all rows."""
        return sum(self.rows.values())

    def __str__(self) -> str:
        return memory_table({**self.rows, "total": self.total}, self.free)


def memory_table(rows: Mapping[str, int], available: int, label: str = "free") -> str:
    """A line for each row with its share of the ``available`` bytes, and a last line with these."""
    lines = [f"  {what:<26}{format_bytes(n):>12}  {_share(n / max(available, 1)):>7}" for what, n in rows.items()]
    return "\n".join([*lines, f"  {label:<26}{format_bytes(available):>12}"])


def _share(part: float) -> str:
    """``"41.3%"``; from tenfold on ``"538,060×"``."""
    return f"{part:.1%}" if part < 10 else f"{part:,.0f}×"

"""Everything Colonnade raises for a user's mistake, or for a fault of the world around it.

    ColonnadeError
    ├── ConfigError       an unknown key, a value out of range, two settings that contradict each other
    ├── PlanError         a layout that does not divide, a world of the wrong size
    │   └── WorkerError   a process that was killed, fell silent, or failed with a bug; to start again may help
    ├── CheckpointError   a missing, truncated, tampered or foreign file of weights
    ├── CapacityError     memory: a page pool, a device or a disk that is too small
    ├── RequestError      a request that cannot be served: too long, malformed, for an unknown model
    └── DataError         a corpus that is empty, not text, or changed since its manifest was written

A message is one line: what is wrong, with the numbers, then the remedy. ``assert`` is for our own bugs; these are
for yours, and the command line prints them without a traceback (``--debug`` shows it).

Beside the tree stands Interrupted, which is nobody's mistake: a signal asked a run of several processes to end.
"""

import signal


class ColonnadeError(Exception):
    """The root of the tree above: ``except ColonnadeError`` catches all that a user can mend."""


class ConfigError(ColonnadeError):
    """A configuration that cannot be: unknown key, bad value, contradiction."""


class PlanError(ColonnadeError):
    """A parallel layout that cannot run, or (:class:`WorkerError`) whose workers failed."""


class WorkerError(PlanError):
    """A process of the run that was killed, fell silent, or failed with a bug; starting again may help."""


class CheckpointError(ColonnadeError):
    """Weights that cannot be read or written; the message names the file."""


class CapacityError(ColonnadeError):
    """Not enough room: cache pages, device memory or disk."""


class RequestError(ColonnadeError):
    """A generation request that cannot be served; ``param`` names the offending field, as OpenAI's errors do."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400, code: str | None = None):
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class DataError(ColonnadeError):
    """Text or token shards that cannot be used; the message names the file."""


class Interrupted(Exception):
    """The user (or the machine) asked the processes to stop, and they did; ``signal`` is the signal's number."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number

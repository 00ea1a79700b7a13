"""The exceptions that Colonnade raises for user mistakes and for failures of its environment.

    ColonnadeError
    ├── ConfigError       an unknown key, a value out of range, two settings that contradict each other
    ├── PlanError         a layout that does not divide, a wrong number of processes
    │   └── WorkerError   a process that was killed, stopped responding, or failed with a bug; a restart may help
    ├── CheckpointError   a missing, truncated, corrupt or unsupported weight file
    ├── CapacityError     memory: a page pool, a device or a disk that is too small
    ├── RequestError      a request that cannot be served: too long, malformed, for an unknown model
    └── DataError         a corpus that is empty, not text, or changed since its manifest was written

A message is one line: what is wrong, with the numbers, then the remedy. ``assert`` is for bugs of Colonnade; the
command line prints these errors without a traceback (``--debug`` shows it).

Interrupted is outside this tree: a signal ended a run of several processes.
"""

import signal


class ColonnadeError(Exception):
    """Base class: ``except ColonnadeError`` catches every error that a user can fix.

    ``operator_hint`` names a setting that whoever runs the engine can change. It is the end of ``str(error)``; the HTTP
    API sends ``message``, which does not have it.
    """

    def __init__(self, *args: object, operator_hint: str | None = None):
        super().__init__(*args)
        self.operator_hint = operator_hint

    @property
    def message(self) -> str:
        """The text without the hint."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.message}; {self.operator_hint}" if self.operator_hint else self.message


class ConfigError(ColonnadeError):
    """An invalid configuration: an unknown key, a bad value, a contradiction."""


class PlanError(ColonnadeError):
    """A parallel layout that cannot run, or with workers that failed (:class:`WorkerError`)."""


class WorkerError(PlanError):
    """A process of the run was killed, stopped responding, or failed with a bug; a restart may help."""


class CheckpointError(ColonnadeError):
    """Weights that cannot be read or written; the message names the file."""


class CapacityError(ColonnadeError):
    """Too few cache pages, or too little device memory or disk space."""


class RequestError(ColonnadeError):
    """A generation request that cannot be served; ``param`` names the invalid field, as in OpenAI's errors.

    ``retry_after_s`` is the time after which it would be accepted, if that is known.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        retry_after_s: float | None = None,
        operator_hint: str | None = None,
    ):
        super().__init__(message, operator_hint=operator_hint)
        self.param, self.status, self.code, self.retry_after_s = param, status, code, retry_after_s


class DataError(ColonnadeError):
    """Text or token shards that cannot be used; the message names the file."""


class Interrupted(Exception):
    """The processes were stopped by the signal number ``signal``."""

    def __init__(self, number: int):
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.signal = number

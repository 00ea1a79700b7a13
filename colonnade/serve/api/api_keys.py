"""API keys: read from a file, looked up by their SHA-256 in constant time, reloaded while the server runs.

The file is TOML, a table ``[[keys]]`` for each key, or JSON lines, an object for each (a suffix .jsonl, .ndjson or
.json). It contains only hashes of keys: ``printf %s KEY | sha256sum``.
"""

import hashlib
import hmac
import json
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints

from colonnade.config import Config
from colonnade.config.base import plural
from colonnade.errors import ConfigError
from colonnade.serve.api.rate_limit import Excess, Limits, RateLimiter

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")

Count = Annotated[int, Field(gt=0, strict=True)]


class ApiKey(Config):
    """One key, as the file describes it."""

    name: Annotated[str, StringConstraints(pattern=r"^[\w.-]{1,64}$")]
    """Its name in logs, and its client name in the fair queue."""
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-fA-F]{64}$", to_lower=True)]
    """SHA-256 of the key, in hexadecimal digits."""
    models: tuple[str, ...] | None = None
    """Names of the models that it may use; None for all."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    """Tokens of prompts and completions."""
    concurrent_requests: Count | None = None
    priority: Annotated[int, Field(ge=-100, le=100, strict=True)] = 0
    """Priority of its requests, unless they request a lower priority (a higher number)."""

    @property
    def limits(self) -> Limits:
        """Its rate limits."""
        return Limits(self.requests_per_minute, self.tokens_per_minute, self.concurrent_requests)


class KeyState:
    """A key and its use."""

    def __init__(self, key: ApiKey):
        self.key, self.limiter = key, RateLimiter(key.limits, time.monotonic())

    async def start(self) -> Excess | None:
        """Count a request that begins, unless it would exceed a limit, which is returned."""
        return self.limiter.start(time.monotonic())

    def end(self) -> None:
        """Count a request that ends."""
        self.limiter.end()

    def take_tokens(self, count: int) -> None:
        """Count tokens of a prompt or a completion."""
        self.limiter.take_tokens(count, time.monotonic())

    async def headers(self) -> dict[str, str]:
        """OpenAI's headers about its limits."""
        return self.limiter.headers(time.monotonic())


class KeyRing:
    """The keys of a server: those of ``file``, which :meth:`reload` reads again, and ``api_key`` without limits.

    ``keys``, if given, are used instead of the file's. Raises :class:`ConfigError` if the file cannot be used.
    """

    def __init__(self, file: str | None, api_key: str | None, keys: Sequence[ApiKey] | None = None):
        self._file = file
        self._single = None if api_key is None else _sha256(api_key.encode())
        self._states: dict[str, KeyState] = {}
        if keys is not None:
            self.replace(keys)
        elif file is not None:
            self.reload()

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return self._file is not None or self._single is not None

    @property
    def counts_tokens(self) -> bool:
        """Whether a key has a limit of tokens."""
        return any(state.key.tokens_per_minute is not None for state in self._states.values())

    def reload(self) -> str:
        """Read the file again; returns a line for the log. Keys that are unchanged keep their counts."""
        if self._file is None:
            return "there is no key file to read again"
        keys = read_keys(Path(self._file))
        self.replace(keys)
        return f"read {plural(len(keys), 'key')} from {self._file}"

    @property
    def all(self) -> list[ApiKey]:
        """Those of the file."""
        return [state.key for state in self._states.values()]

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Use ``keys`` instead of the file's; unchanged ones keep their counts."""
        old = self._states
        self._states = {
            key.sha256: state if (state := old.get(key.sha256)) and state.key == key else self.make_state(key)
            for key in keys
        }

    def make_state(self, key: ApiKey) -> KeyState:
        """The state of a new key."""
        return KeyState(key)

    def state(self, sha256: str) -> KeyState | None:
        """The state of the key with this hash, if it comes from the file."""
        return self._states.get(sha256)

    def find(self, secret: bytes) -> tuple[bool, KeyState | None]:
        """(whether ``secret`` is a key, its state if it comes from the file); takes constant time."""
        digest, known, found = _sha256(secret), False, None
        if self._single is not None:
            known = hmac.compare_digest(digest, self._single)
        for state in self._states.values():
            if hmac.compare_digest(digest, state.key.sha256):
                known, found = True, state
        return known, found


def read_keys(file: Path) -> list[ApiKey]:
    """The keys in ``file``; raises :class:`ConfigError`, naming the file and the key."""
    try:
        entries = _read_json(file) if file.suffix.lower() in JSON_SUFFIXES else _read_toml(file)
    except OSError as error:
        raise ConfigError(f"cannot read the key file {file}: {(error.strerror or str(error)).lower()}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the key file {file} is malformed: {' '.join(str(error).split())}") from None
    if not entries:
        raise ConfigError(f"the key file {file} has no keys; add a table [[keys]] with name and sha256 for each")
    keys: list[ApiKey] = []
    for number, entry in enumerate(entries, 1):
        if not isinstance(entry, dict) or not all(isinstance(name, str) for name in entry):
            raise ConfigError(f"key {number} in the key file {file} is not a table; set its name and sha256")
        try:
            keys.append(ApiKey(**entry))
        except ConfigError as error:
            raise ConfigError(f"key {number} in the key file {file}: {error}") from None
        for one in ("name", "sha256"):
            if getattr(keys[-1], one) in [getattr(key, one) for key in keys[:-1]]:
                raise ConfigError(f"key {number} in the key file {file} has the {one} of an earlier one; change it")
    return keys


def _read_toml(file: Path) -> list[Any]:
    values = tomllib.loads(file.read_text(encoding="utf-8"))
    entries = values.pop("keys", [])
    if values or not isinstance(entries, list):
        raise ValueError("it may contain only tables [[keys]]")
    return entries


def _read_json(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def _sha256(secret: bytes) -> str:
    return hashlib.sha256(secret).hexdigest()

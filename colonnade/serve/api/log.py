"""The access log: uvicorn's own, one line a request on stderr, with what was asked of whom and never what was said.

2026-11-22 03:15:32,118 127.0.0.1:53406 "POST /v1/chat/completions HTTP/1.1" 200 OK
"""

import logging
from typing import Any

PROBES = ("/health", "/metrics")
"""What machines ask every few seconds; only worth a line when it goes wrong."""


class WithoutProbes(logging.Filter):
    """Drops probes that went well."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether uvicorn's ``record`` (client, method, path, version, status) is shown."""
        if not isinstance(record.args, tuple):
            return True
        *_, path, _version, status = record.args
        return path not in PROBES or status != 200


ACCESS_LOG: dict[str, Any] = {
    "version": 1,
    "disable_existing_loggers": False,
    "filters": {"probes": {"()": WithoutProbes}},
    "formatters": {
        "access": {
            "()": "uvicorn.logging.AccessFormatter",
            "fmt": '%(asctime)s %(client_addr)s "%(request_line)s" %(status_code)s',
            "use_colors": False,
        }
    },
    "handlers": {"access": {"class": "logging.StreamHandler", "formatter": "access", "filters": ["probes"]}},
    "loggers": {"uvicorn.access": {"handlers": ["access"], "level": "INFO", "propagate": False}},
}
"""For :func:`logging.config.dictConfig`."""

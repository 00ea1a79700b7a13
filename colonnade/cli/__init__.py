"""The command line: one function per verb, which handles only arguments; ``colonnade help`` lists them.

A user error is one line on stderr and a non-zero exit code; ``--debug``, anywhere, shows the traceback.
Each verb imports the modules that need torch when it runs, so that ``--help`` is instant. An engine's process of
``colonnade serve`` starts before this process imports anything, and both import at the same time.
"""

import sys
from multiprocessing import parent_process

from colonnade.serve.child_process import prestart

OTHER_PROCESSES = ("-h", "--help", "--plan", "--serve.replicas", "--serve.upstreams")
"""Beginnings of arguments with which a server has no engine, or one with fewer cores than the machine."""

if (
    sys.argv[1:2] == ["serve"]
    and not any(argument.startswith(OTHER_PROCESSES) for argument in sys.argv)
    and parent_process() is None
):
    prestart()

from colonnade.cli.main import SUBCOMMANDS, VERBS, main, parse  # noqa: E402 - the process has started

__all__ = ["SUBCOMMANDS", "VERBS", "main", "parse"]

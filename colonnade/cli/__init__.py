"""The command line: one function per verb, which handles only arguments; ``colonnade help`` lists them.

A user error is one line on stderr and a non-zero exit code; ``--debug``, anywhere, shows the traceback.
Each verb imports the modules that need torch when it runs, so that ``--help`` is instant.
"""

from colonnade.cli.main import SUBCOMMANDS, VERBS, main, parse

__all__ = ["SUBCOMMANDS", "VERBS", "main", "parse"]

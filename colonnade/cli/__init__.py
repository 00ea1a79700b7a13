"""The command line: one function a verb, and nothing but argument handling.

    colonnade demo | corpus | train | eval | generate | chat | serve | convert | verify | presets | help

A mistake of the user's is one line on stderr and a non-zero exit; ``--debug``, anywhere, shows the traceback.
Modules that need torch are imported by the verb that needs them, so that ``--help`` is instant.
"""

from colonnade.cli.main import VERBS, main, parse

__all__ = ["VERBS", "main", "parse"]

"""``colonnade`` and ``python -m colonnade``: the command line.

The engine's process of ``colonnade serve`` starts before this process imports the verbs, and both import at the same
time.
"""

import sys

from colonnade.serve.child_process import prestart

OTHER_PROCESSES = ("-h", "--help", "--plan", "--serve.replicas", "--serve.upstreams")
"""Beginnings of arguments with which a server has no engine, or one with fewer cores than the machine."""


def main() -> None:
    """Run the verb in ``sys.argv``."""
    if sys.argv[1:2] == ["serve"] and not any(argument.startswith(OTHER_PROCESSES) for argument in sys.argv):
        prestart()
    from colonnade.cli import main as run

    run()


if __name__ == "__main__":
    main()

"""``python -m colonnade``: the command line."""

from colonnade.cli import main

main()

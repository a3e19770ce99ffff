"""`python -m lbopt` is the `lbopt` command."""

from lbopt.cli.main import run

run()

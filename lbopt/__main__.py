"""`python -m lbopt` is the `lbopt` command."""

from lbopt.cli import run

run()

"""Jobs that end with their test."""

from jobs import start  # noqa: F401  a fixture

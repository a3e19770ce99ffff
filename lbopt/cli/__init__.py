"""The `lbopt` command."""

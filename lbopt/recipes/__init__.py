"""The one place where names in a config become objects."""

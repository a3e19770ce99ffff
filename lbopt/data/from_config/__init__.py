"""Data sets as a config asks for them: by name, with the fields of `DataConfig`."""

"""Data sets by name, read as the fields of `DataConfig` say."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

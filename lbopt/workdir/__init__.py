"""The folder or bucket of a run: who may write there, and the files that are written."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

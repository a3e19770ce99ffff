"""The commands as functions: train, sweep and plan from a program or a notebook, without files."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

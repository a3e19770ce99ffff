"""Trials on devices: programs that many share, and the lanes they run in."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

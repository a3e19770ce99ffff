"""Trials on devices: compiled programs, each with lanes (trial slots) for several trials."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

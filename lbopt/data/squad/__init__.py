"""SQuAD v1.1: questions whose answers are spans of a text."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

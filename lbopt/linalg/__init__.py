"""Linear algebra of optimizers, on one device or over a mapped axis: QR, sketches, roots."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

"""lbopt: training with very large batches in JAX.

The public names are in `__init__.pyi`. JAX is imported with the first name that is used, so a
program that only watches others, as the guard of a job's process does, need not wait for it.
"""

import lazy_loader

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

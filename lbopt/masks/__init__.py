"""Masks of the leaves that a transform touches: by role, by path, by function, and combined.

Masks are callables `params -> pytree of bools`, as Optax takes them, and combine by `&`, `|` and
`~`:

    weights_only & ~select_paths("embed")     the default of lbopt, without embeddings
    all_leaves & exclude_paths("embed")       biases and normalization leaves too
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

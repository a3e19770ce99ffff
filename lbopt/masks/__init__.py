"""Masks of the leaves that a transform touches: by role, by path, by function, and combined.

Masks are callables `params -> pytree of bools`, as Optax takes them, and combine by `&`, `|` and
`~`:

    weights_only & ~select_paths("embed")     the default of lbopt, without embeddings
    all_leaves & exclude_paths("embed")       biases and normalization leaves too

Roles come from names and shapes, and from the types of modules where `params` has module objects.
`with_known_roles(mask, module_roles(model))` keeps what types tell for a dict of parameters.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)

# JAX keys its caches by all contexts that exist. If a trace were the first to ask for this one, the
# traced function would be compiled a second time.
__getattr__("record_choice")

"""Print a variant, or the table of all."""

from __future__ import annotations

import textwrap
from typing import Any

from lbopt.transforms.variants import VARIANTS, Variant

_WIDTH = 100


def describe(variant: str | None = None, optimizer: str | None = None) -> None:
    """Print where a variant of `lbopt.lamb` or `lbopt.lars` comes from, what is peculiar to it, and its options.

    Options that differ from the paper's row are marked with a star.

    Args:
      variant: its name; None lists all variants, one line each.
      optimizer: "lamb" or "lars"; None for both, where both have a variant of that name.

    Raises:
      ValueError: listing the known names.

    >>> describe("cybertron")
    lamb, variant "cybertron": cybertronai/pytorch-lamb, pytorch_lamb/lamb.py
      The first version of the paper: ||w|| is clamped to [0, 10]. adam=True is trust_ratio_mask=False.
        b1                      0.9
        b2                      0.999
        eps                     1e-06
        eps_root                0.0
        weight_decay            0.0
      * weight_decay_mask       None
        weight_decay_placement  'inside'
      * trust_ratio_mask        None
        adapt_undecayed         True
        trust_ratio_bounds      None
      * weight_norm_bounds      (0.0, 10.0)
        zero_norm_ratio         1.0
      * debias                  False
        grad_averaging          True
        max_grad_norm           None
        max_grad_norm_eps       0.0
        gradient_normalization  None
    """
    if optimizer is not None and optimizer not in VARIANTS:
        raise ValueError(f"optimizer = {optimizer!r}: use one of {', '.join(VARIANTS)}")
    rows = [row for name in VARIANTS if optimizer in (None, name) for row in VARIANTS[name].values()]
    if variant is None:
        print("\n".join(f"{row.optimizer}  {row.name:<12}  {row.source}" for row in rows))
        return
    found = [row for row in rows if row.name == variant]
    if not found:
        names = "; ".join(f"{name}: {', '.join(VARIANTS[name])}" for name in VARIANTS if optimizer in (None, name))
        raise ValueError(f"variant = {variant!r}: use one of ({names})")
    print("\n\n".join(_page(row) for row in found))


def _page(row: Variant) -> str:
    paper = VARIANTS[row.optimizer]["paper"].options
    about = textwrap.fill(row.about, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    width = max(map(len, row.options))
    options = [
        f"  {'*' if _differs(value, paper[name]) else ' '} {name:<{width}}  {value!r}"
        for name, value in row.options.items()
    ]
    return "\n".join([f'{row.optimizer}, variant "{row.name}": {row.source}', about, *options])


def _differs(value: Any, paper: Any) -> bool:
    return type(value) is not type(paper) or value != paper

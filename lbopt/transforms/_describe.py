"""Variants of optimizers as text: one in full, or a table of all."""

from __future__ import annotations

import textwrap
from typing import Any

from lbopt import masks
from lbopt._shown import show
from lbopt.errors import UserError, require_choice
from lbopt.transforms._layerwise_options import Variant
from lbopt.transforms._matrix_variants import MATRIX_VARIANTS, WITHOUT_VARIANTS
from lbopt.transforms._variants import VARIANTS

_ALL: dict[str, Any] = {**VARIANTS, **WITHOUT_VARIANTS, **MATRIX_VARIANTS}
_WIDTH = 100


def describe(variant: str | None = None, optimizer: str | None = None) -> None:
    """Print the source of a variant of an optimizer, its peculiarities and options.

    A star marks the options that differ from those of the paper, of Keller Jordan's code for Muon
    and its family.

    Args:
      variant: Name of the variant; None prints a table of all variants.
      optimizer: "lamb", "lars", or one of the relative and matrix optimizers: "adamh", "dion",
        "kron", "muloco", "muon", "muonh", "muown", "normuon", "scion", "shampoo", "soap" or
        "soaph". None for all.

    Raises:
      UserError: For an unknown name; it lists the known ones.

    >>> describe("cybertron")  # doctest: +ELLIPSIS
    lamb, variant "cybertron": cybertronai/pytorch-lamb@...:pytorch_lamb/lamb.py
      The first version of the paper: ... adam=True is trust_ratio_mask=False.
        b1                            0.9
    ...
      * weight_norm_bounds            (0.0, 10.0)
        zero_norm_ratio               1.0
      * debias                        False
    ...
    """
    if optimizer is not None:
        require_choice("optimizer", optimizer, _ALL)
    optimizers = [name for name in _ALL if optimizer in (None, name)]
    if variant is None:
        pages = [variants_table(name) for name in optimizers]
    else:
        named = [_ALL[name].get(variant) for name in optimizers if isinstance(variant, str)]
        pages = [_page(found) for found in named if found is not None]
    if not pages:
        known = "; ".join(f"{name}: {', '.join(_ALL[name])}" for name in optimizers)
        fix = f"use one of ({known})"
        if isinstance(variant, str) and variant in _ALL:
            fix = f"it is an optimizer: use describe(optimizer={variant!r})"
        raise UserError("variant", variant, fix, code="choice")
    show(*"\n\n".join(pages).split("\n"))


_MATRIX_COLUMNS = {
    "momentum": "momentum_form",
    "polynomials": "coefficients",
    "products": "products_dtype",
    "shape": "shape_rule",
    "decay": "weight_decay",
    "rest": "rest",
    "rate of rest": "rest_learning_rate_ratio",
}
_COLUMNS = {
    "lamb": {
        "debias": "debias",
        "clip": "max_grad_norm",
        "decay": "weight_decay",
        "decayed": "weight_decay_mask",
        "adapted": "trust_ratio_mask",
    },
    "lars": {
        "denominator": "denominator",
        "rate": "learning_rate_placement",
        "ratio": "trust_ratio_placement",
        "eps": "eps",
        "decay": "weight_decay",
        "decayed": "weight_decay_mask",
        "adapted": "trust_ratio_mask",
    },
}


def variants_table(optimizer: str) -> str:
    """Return a table of all variants of an optimizer, one per line.

    Its columns are the main options, the other options that differ from the paper, and the source.
    """
    columns = _COLUMNS.get(optimizer) or _own_columns(optimizer)
    lines = [(optimizer, *columns, "else", "source")]
    for variant in _ALL[optimizer].values():
        values = [_cell(option, variant) for option in columns.values()]
        others = _others(variant, set(columns.values())) or "-"
        lines.append((variant.name, *values, others, variant.source))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _own_columns(optimizer: str) -> dict[str, str]:
    """Return the columns of a matrix optimizer, those that its options have."""
    options = vars(next(iter(_ALL[optimizer].values())).options)
    return {title: option for title, option in _MATRIX_COLUMNS.items() if option in options}


def differences(optimizer: str) -> str:
    """Return the list of variants for an optimizer's docstring: how each differs from the paper."""
    width = max(map(len, VARIANTS[optimizer]))
    lines = []
    for variant in VARIANTS[optimizer].values():
        options = [f"{name}={value!r}" for name, value in variant.differences().items()]
        # A line breaks between two options, not inside one.
        text = ", ".join(option.replace(" ", "\0") for option in options) or "-"
        first = f"      {variant.name:<{width}}  "
        lines.append(
            textwrap.fill(
                text, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first)
            ).replace("\0", " ")
        )
    return "\n".join(lines)


def _others(variant: Variant, shown: set[str]) -> str:
    """Return the options that differ from the paper, without those that other columns show."""
    hidden = shown | {"adapt_undecayed"}
    differences = variant.differences().items()
    return ", ".join(f"{name}={value}" for name, value in differences if name not in hidden)


def _cell(option: str, variant: Variant) -> str:
    value = getattr(variant.options, option)
    if option == "trust_ratio_mask" and not variant.options.adapt_undecayed:
        return "decayed, if wd > 0"
    if option.endswith("_mask"):
        return _chosen(value)
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _chosen(mask: Any) -> str:
    if isinstance(mask, masks.RoleMask):
        missing = [role for role in masks.ROLES if role not in mask.roles]
        return "weights" if mask == masks.weights_only else f"not {', '.join(missing)}"
    return "all" if mask is None else "decayed"


def _page(variant: Variant) -> str:
    own = variant.differences()
    about = textwrap.fill(variant.about, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    width = max(map(len, vars(variant.options)))
    # The options of a class before those it inherits.
    first = type(variant.options).__annotations__
    names = sorted(vars(variant.options), key=lambda name: name not in first)
    options = [
        f"  {'*' if name in own else ' '} {name:<{width}}  {getattr(variant.options, name)!r}"
        for name in names
    ]
    title = f'{variant.optimizer}, variant "{variant.name}": {variant.source}'
    return "\n".join([title, about, *options])

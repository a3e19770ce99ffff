"""Print a variant, or the table of all."""

from __future__ import annotations

import textwrap
from typing import Any

from lbopt import masks, tree
from lbopt._shown import show
from lbopt.transforms._variants import VARIANTS, Variant

_WIDTH = 100


def describe(variant: str | None = None, optimizer: str | None = None) -> None:
    """Print the source of a variant of `lbopt.lamb` or `lbopt.lars`, its peculiarities and options.

    Options that differ from the paper's row are marked with a star.

    Args:
      variant: its name; None prints a table of all variants.
      optimizer: "lamb" or "lars"; None for both, where both have a variant of that name.

    Raises:
      ValueError: listing the known names.

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
    if optimizer is not None and optimizer not in VARIANTS:
        raise ValueError(f"optimizer = {tree.said(optimizer)}: use one of {', '.join(VARIANTS)}")
    rows = [
        row for name in VARIANTS if optimizer in (None, name) for row in VARIANTS[name].values()
    ]
    if variant is None:
        show(
            *"\n\n".join(
                variants_table(name) for name in VARIANTS if optimizer in (None, name)
            ).split("\n")
        )
        return
    found = [row for row in rows if row.name == variant]
    if not found:
        names = "; ".join(
            f"{name}: {', '.join(VARIANTS[name])}" for name in VARIANTS if optimizer in (None, name)
        )
        raise ValueError(f"variant = {tree.said(variant)}: use one of ({names})")
    show(*"\n\n".join(map(_page, found)).split("\n"))


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
    """Return the table of all variants of one optimizer: the main options, what else differs from the paper, the source."""
    columns = _COLUMNS[optimizer]
    rows = VARIANTS[optimizer]
    lines = [(optimizer, *columns, "else", "source")]
    for row in rows.values():
        values = [_cell(option, row) for option in columns.values()]
        lines.append((row.name, *values, _others(row, set(columns.values())) or "-", row.source))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def differences(optimizer: str) -> str:
    """Return the list of variants in an optimizer's docstring: where each differs from the paper."""
    width = max(map(len, VARIANTS[optimizer]))
    lines = []
    for row in VARIANTS[optimizer].values():
        options = [f"{name}={value!r}" for name, value in row.differences().items()]
        # A line breaks between two options, not inside one.
        text = ", ".join(option.replace(" ", "\0") for option in options) or "-"
        first = f"      {row.name:<{width}}  "
        lines.append(
            textwrap.fill(
                text, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first)
            ).replace("\0", " ")
        )
    return "\n".join(lines)


def _others(row: Variant, shown: set[str]) -> str:
    hidden = shown | {"adapt_undecayed"}
    return ", ".join(
        f"{name}={value}" for name, value in row.differences().items() if name not in hidden
    )


def _cell(option: str, row: Variant) -> str:
    value = getattr(row.options, option)
    if option.endswith("_mask"):
        chosen = _chosen(value)
        return (
            "decayed, if wd > 0"
            if option == "trust_ratio_mask" and not row.options.adapt_undecayed
            else chosen
        )
    if value is None:
        return "-"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _chosen(mask: Any) -> str:
    if isinstance(mask, masks.RoleMask):
        missing = [role for role in masks.ROLES if role not in mask.roles]
        return "weights" if mask == masks.weights_only else f"not {', '.join(missing)}"
    return "all" if mask is None else "decayed"


def _page(row: Variant) -> str:
    own = row.differences()
    about = textwrap.fill(row.about, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    width = max(map(len, vars(row.options)))
    options = [
        f"  {'*' if name in own else ' '} {name:<{width}}  {value!r}"
        for name, value in vars(row.options).items()
    ]
    return "\n".join([f'{row.optimizer}, variant "{row.name}": {row.source}', about, *options])

"""What a scaling rule makes of a recipe, and how it is shown."""

from __future__ import annotations

import dataclasses
import html
from typing import Any

from lbopt._shown import shell_line


@dataclasses.dataclass(frozen=True)
class ScaledNumber:
    """A number of a recipe at its own batch and at another.

    Attributes:
      name: Field of the config, "optimizer.b2" for instance, or the key of a mapping; a number that
        follows from fields has its words, "learning rate".
      before: Its value at the recipe's batch.
      after: Its value at the new batch.
      formula: How it follows the batch: k is the new batch over the old one, d the new length over
        the old one, q the new learning rate over the old one; "" for a number that stays.
      source: The rule and its public source; "" for a length, and for a number that stays.
      number: What the rules call it, "b2" for instance; "" for a length.

    >>> from lbopt import scale_recipe
    >>> numbers = {"global_batch_size": 512, "b2": 0.99}
    >>> scale_recipe(numbers, global_batch_size=1024, rule="token_half_life").numbers[0].formula
    'x^k'
    """

    name: str
    before: float
    after: float
    formula: str = ""
    source: str = ""
    number: str = ""


@dataclasses.dataclass(frozen=True)
class ScaledRecipe:
    """A recipe for another batch size. `print` shows what changes and what stays.

    Attributes:
      recipe: The new recipe, of the kind that was given: a `TrainConfig`, or a dict.
      rule: The rule, or rules joined by "+".
      global_batch_sizes: The batch before and after, in examples.
      numbers: Every number that a rule may change, and the length, before and after.
      regime: Sentences about where the rule is said to hold, and whether that is so here.
      out_of_range: Sentences about numbers that leave their usual range, () if none does.
      flags: Flags of `lbopt train` that make the old config the new one; () for a mapping.

    >>> from lbopt import scale_recipe
    >>> numbers = {"global_batch_size": 512, "learning_rate": 0.001, "momentum": 0.9}
    >>> print(scale_recipe(numbers, global_batch_size=2048, rule="sqrt", noise_scale=30_000))
                   batch 512  batch 2048  rule sqrt
    learning_rate  0.001      0.002       x sqrt(k)
    <BLANKLINE>
    stays: momentum 0.9
    source: sqrt: You et al., arXiv 1904.00962v5, square root learning rate scaling
    regime: sqrt holds where noise dominates the gradient of a batch: by the noise scale of 3e+04 \
examples, noise is 98% of the mean square of the gradient at batch 512 and 94% at 2048, so it holds
    """

    recipe: Any
    rule: str
    global_batch_sizes: tuple[int, int]
    numbers: tuple[ScaledNumber, ...]
    regime: tuple[str, ...]
    out_of_range: tuple[str, ...]
    flags: tuple[str, ...] = ()

    @property
    def changed(self) -> tuple[ScaledNumber, ...]:
        """The numbers that change."""
        return tuple(one for one in self.numbers if one.before != one.after)

    @property
    def kept(self) -> tuple[ScaledNumber, ...]:
        """The numbers that stay."""
        return tuple(one for one in self.numbers if one.before == one.after)

    def __str__(self) -> str:
        before, after = self.global_batch_sizes
        rows = [("", f"batch {before}", f"batch {after}", f"rule {self.rule}")]
        rows += [
            (one.name, f"{one.before:.6g}", f"{one.after:.6g}", one.formula) for one in self.changed
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = [
            "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True))
            for row in rows
        ]

        stays = ", ".join(f"{one.name} {one.before:.6g}" for one in self.kept)
        lines += ["", f"stays: {stays or 'nothing'}"]
        sources = dict.fromkeys(one.source for one in self.changed if one.source)
        lines += [f"source: {source}" for source in sources]
        lines += [f"regime: {line}" for line in self.regime]
        lines += [f"out of range: {line}" for line in self.out_of_range]
        if self.flags:
            lines += ["", shell_line(self.flags)]
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

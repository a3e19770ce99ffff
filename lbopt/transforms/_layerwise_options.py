"""The options of `lbopt.lamb` and `lbopt.lars` that variants set, and how they are chosen."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar, cast

import jax

from lbopt import _scalars, masks, types
from lbopt.errors import UserError, require_choice
from lbopt.transforms._moments import Debias
from lbopt.transforms._normalization import Per
from lbopt.transforms._trust_ratio import ClipMode, Denominator

Number = float | jax.Array
Bounds = tuple[float, float]
LambDecayPlacement = Literal["inside", "outside", "decoupled", "gradient"]
LarsDecayPlacement = Literal["inside", "outside", "norm_only", "decoupled"]
Placement = Literal["inside", "outside"]
NormalizationStage = Literal["after_clip", "before_clip"]

AS_DECAYED: Literal["as_weight_decay"] = "as_weight_decay"
"""A `trust_ratio_mask`: the leaves that `weight_decay_mask` selects."""


@dataclasses.dataclass(frozen=True)
class LambOptions:
    """The options of `lbopt.lamb` that a variant sets; the defaults are the paper's."""

    b1: Number = 0.9
    b2: Number = 0.999
    eps: Number = 1e-6
    eps_root: Number = 0.0
    weight_decay: Number = 0.0
    weight_decay_mask: types.Mask = masks.weights_only
    weight_decay_placement: LambDecayPlacement = "inside"
    trust_ratio_mask: types.Mask = masks.weights_only
    adapt_undecayed: bool = True
    trust_ratio_bounds: Bounds | None = None
    weight_norm_bounds: Bounds | None = None
    zero_norm_ratio: Number | None = 1.0
    debias: Debias = True
    grad_averaging: bool = True
    max_grad_norm: Number | None = None
    max_grad_norm_eps: Number = 0.0
    gradient_normalization: Per | None = None
    gradient_normalization_stage: NormalizationStage = "after_clip"


@dataclasses.dataclass(frozen=True)
class LarsOptions:
    """The options of `lbopt.lars` that a variant sets; the defaults are the paper's."""

    weight_decay: Number = 0.0
    momentum: Number = 0.9
    trust_coefficient: Number = 0.001
    eps: Number = 0.0
    nesterov: bool = False
    dampening: Number | Literal["momentum"] = 0.0
    undamped_start: bool = False
    denominator: Denominator = "sum_of_norms"
    learning_rate_placement: Placement = "inside"
    plain_learning_rate_placement: Placement | None = None
    trust_ratio_placement: Placement = "inside"
    weight_decay_mask: types.Mask = masks.weights_only
    weight_decay_placement: LarsDecayPlacement = "inside"
    trust_ratio_mask: types.Mask = masks.weights_only
    adapt_undecayed: bool = True
    clip_mode: ClipMode = "scale"
    trust_ratio_bounds: Bounds | None = None
    weight_norm_bounds: Bounds | None = None
    update_bounds: Bounds | None = None
    zero_norm_ratio: Number | None = 1.0


Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True)
class Variant(Generic[Options]):
    """One public code.

    Attributes:
      optimizer: Name of the optimizer, "lamb" for instance.
      name: Name of the variant.
      source: File at a commit, or paper with its version.
      about: Peculiarities of the code, and differences that no option expresses.
      options: All options of the optimizer, with this variant's values.
    """

    optimizer: str
    name: str
    source: str
    about: str
    options: Options

    def differences(self) -> dict[str, Any]:
        """Return the options whose values are not the paper's."""
        paper = vars(type(self.options)())
        return {
            name: value
            for name, value in vars(self.options).items()
            if type(value) is not type(paper[name]) or value != paper[name]
        }


def choose(variants: Mapping[str, Variant[Options]], name: str, **given: Any) -> Options:
    """Return the options of a variant, except where the caller gives others.

    Args:
      variants: Variants of one optimizer by name, `LAMB` for instance.
      name: Name of the variant.
      **given: Every option; a `types.Default` is an option that the caller did not give.

    Raises:
      UserError: For an unknown variant; it lists the known ones.

    >>> from lbopt.transforms._variants import LARS
    >>> choose(LARS, "nus", eps=types.default(0.0)).eps, choose(LARS, "nus", eps=0.0).eps
    (1e-05, 0.0)
    """
    require_choice("variant", name, variants)
    chosen = {
        option: value for option, value in given.items() if not isinstance(value, types.Default)
    }
    return cast(Options, dataclasses.replace(cast(Any, variants[name].options), **chosen))


def trust_ratio_mask(options: LambOptions | LarsOptions) -> types.Mask:
    """Return the mask of adapted leaves, "as_weight_decay" resolved."""
    return options.weight_decay_mask if _as_decayed(options) else options.trust_ratio_mask


def _as_decayed(options: LambOptions | LarsOptions) -> bool:
    # A mask may be a tree of arrays, which `==` would compare one by one.
    mask = options.trust_ratio_mask
    return isinstance(mask, str) and mask == AS_DECAYED


def check_adaptation(options: LambOptions | LarsOptions, optimizer: str, variant: str) -> None:
    """Raise `UserError`, or warn, if the options adapt no leaf without saying so."""
    if _as_decayed(options) and options.weight_decay_mask is False:
        fix = "with {weight_decay_mask} = False no leaf would be adapted; pass another mask too"
        also = ["weight_decay_mask"]
        raise UserError("trust_ratio_mask", AS_DECAYED, fix, code="conflict", also=also)

    if _scalars.require_flag("adapt_undecayed", options.adapt_undecayed):
        return
    if options.trust_ratio_mask is False:
        return

    if options.weight_decay_mask is False:
        fix = (
            "with {weight_decay_mask} = False no leaf would be adapted; pass "
            "{trust_ratio_mask}=False if that is meant, or adapt_undecayed=True"
        )
        also = ["weight_decay_mask", "trust_ratio_mask"]
        raise UserError("adapt_undecayed", False, fix, code="conflict", also=also)
    # A variant that adapts only decayed leaves is another optimizer without decay.
    decay = options.weight_decay
    if _scalars.is_number(decay) and decay == 0:
        plain = "Adam" if optimizer == "lamb" else "momentum SGD"
        warnings.warn(
            f'{optimizer}(variant="{variant}") with weight_decay = 0 adapts no layer, like its '
            f"source, so it is {plain}; pass adapt_undecayed=True to adapt, or "
            "trust_ratio_mask=False if this is meant.",
            stacklevel=3,
        )

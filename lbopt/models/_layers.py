"""The layers of a Transformer in a row: unrolled or scanned, rematerialised or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import flax.linen as nn
import jax

from lbopt.errors import UserError, require, require_choice

SAVED = {
    "attention": ("qkv", "context", "attention_output", "inner", "output"),
    "dots": ("qkv", "scores", "context", "attention_output", "inner", "output"),
    "inner": ("qkv", "context", "attention_output", "output"),
    "layer": (),
}
"""Arrays of a layer that each rematerialisation policy saves for the backward pass."""
REMATS = ("none", *SAVED)


def run_layers(
    layer: type[nn.Module],
    options: Mapping[str, Any],
    x_BLD: jax.Array,
    *others: Any,
    num_layers: int,
    scan: bool,
    remat: str,
    remat_layers: int | None,
) -> jax.Array:
    """Return [B, L, D] after all layers; call it in a compact method of their network.

    Args:
      layer: Class of a layer, called as `layer(**options)(x, *others)`, which returns (x, None).
      options: Attributes of all layers.
      x_BLD: Input of the first layer.
      *others: Arrays that all layers take.
      num_layers: Number of layers.
      scan: As in `lbopt.models.Bert`.
      remat: As in `lbopt.models.Bert`.
      remat_layers: As in `lbopt.models.Bert`.
    """
    again = layer
    if remat != "none":
        policy = jax.checkpoint_policies.save_only_these_names(*SAVED[remat])
        # Without a scan the compiler would merge the recomputation with the forward pass, which
        # keeps the arrays after all; inside a scan it cannot.
        again = nn.remat(layer, policy=policy, prevent_cse=not scan)

    if scan:
        stacked = nn.scan(
            again,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True, "example": True},
            in_axes=nn.broadcast,
            length=num_layers,
        )
        return stacked(**options, name="layers")(x_BLD, *others)[0]

    how_many = num_layers if remat_layers is None else remat_layers
    for number in range(num_layers):
        chosen = again if number < how_many else layer
        x_BLD, _ = chosen(**options, name=f"layer{number}")(x_BLD, *others)
    return x_BLD


def check_remat(remat: str, remat_layers: int | None, scan: bool = False) -> None:
    """Raise `UserError` for a rematerialisation that `run_layers` does not take."""
    require_choice("remat", remat, REMATS)
    fits = remat_layers is None or remat_layers >= 0
    require(fits, "remat_layers", remat_layers, "give a number >= 0, or None")
    if scan and remat_layers is not None:
        fix = "a scan has one layer for all; set {scan}=False, or leave it out"
        raise UserError("remat_layers", remat_layers, fix, code="conflict", also=["scan"])

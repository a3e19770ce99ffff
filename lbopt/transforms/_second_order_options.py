"""The options of SOAP and Dion, and the public codes that set them, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from lbopt import masks, types
from lbopt.transforms._layerwise_options import Number, Variant
from lbopt.transforms._newton_schulz import ShapeRule


@dataclasses.dataclass(frozen=True)
class SoapOptions:
    """The options of `lbopt.soap` and `soaph` that a variant sets; the defaults are SOAP's."""

    b1: Number = 0.95
    b2: Number = 0.95
    eps: Number = 1e-8
    shampoo_b2: Number | None = None
    every_steps: int = 10
    debias: bool = True
    kl: bool = False
    sphere: bool = False
    weight_decay: Number = 0.01
    weight_decay_mask: types.Mask = masks.weights_only
    rest: Any = "adamw"
    rest_learning_rate_ratio: Number = 1.0
    rest_b1: Number = 0.95
    rest_b2: Number = 0.95
    rest_eps: Number = 1e-8
    rest_weight_decay: Number | None = None


@dataclasses.dataclass(frozen=True)
class DionOptions:
    """The options of `lbopt.dion` that a variant sets; the defaults are Microsoft's."""

    momentum: Number = 0.95
    rank: int | None = None
    rank_fraction: float = 1.0
    eps: Number = 1e-8
    shape_rule: ShapeRule = "spectral"
    weight_decay: Number = 0.01
    weight_decay_mask: types.Mask = None
    rest: Any = "adamw"
    rest_learning_rate_ratio: Number = 1.0
    rest_b1: Number = 0.9
    rest_b2: Number = 0.95
    rest_eps: Number = 1e-8
    rest_weight_decay: Number | None = None


SOAP: Mapping[str, Variant[SoapOptions]] = {
    "paper": Variant(
        "soap",
        "paper",
        "nikhilvyas/SOAP@a1e553530fde97d0e6b307d7c82ac6d38b072340:soap.py",
        "The code decays the weights after the step, by lr wd of the new weights, and not in its "
        "first step, which only starts the statistics. It treats every leaf of two dimensions or "
        "more so, a convolution with a factor for each dimension; here it is one matrix.",
        SoapOptions(),
    ),
    "kl": Variant(
        "soap",
        "kl",
        "KellerJordan/modded-nanogpt@330d3fbf62e34fd4b473de008e31e848425df641:records/"
        "track_3_optimization/results/20260511_klsoap_h_lr_power_decay",
        "The directions of the record, without its sphere. Lin et al., arXiv:2509.03378.",
        SoapOptions(
            b2=0.9,
            every_steps=1,
            debias=False,
            kl=True,
            weight_decay=0.0,
            rest_b1=0.8,
            rest_eps=1e-10,
        ),
    ),
}

SOAPH: Mapping[str, Variant[SoapOptions]] = {
    "modded_nanogpt": Variant(
        "soaph",
        "modded_nanogpt",
        "KellerJordan/modded-nanogpt@330d3fbf62e34fd4b473de008e31e848425df641:records/"
        "track_3_optimization/results/20260511_klsoap_h_lr_power_decay",
        "KL-SOAP on a sphere. The rates of the record are 0.018, and 0.3, 1/320 and 0.01 for "
        "embedding, head and the rest.",
        SoapOptions(
            b2=0.9,
            every_steps=1,
            debias=False,
            kl=True,
            sphere=True,
            weight_decay=0.0,
            rest_learning_rate_ratio=0.5556,
            rest_b1=0.8,
            rest_eps=1e-10,
        ),
    ),
    "paper": Variant(
        "soaph",
        "paper",
        "arXiv:2606.16899 (abstract); nikhilvyas/SOAP@a1e55353:soap.py",
        "SOAP's directions on a sphere.",
        SoapOptions(sphere=True, weight_decay=0.0),
    ),
}

DION: Mapping[str, Variant[DionOptions]] = {
    "microsoft": Variant(
        "dion",
        "microsoft",
        "microsoft/dion@0a059a4542e5aa74b40dcd1dce363836c7afcd48:dion/dion_simple.py",
        "Householder's QR, as in the simple version; the reference version has a randomised "
        "CholeskyQR too. A zero momentum keeps its basis, as in the reference version.",
        DionOptions(),
    ),
}

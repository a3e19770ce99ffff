"""The options of the matrix optimizers, and the public codes that set them, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jax.typing import DTypeLike

from lbopt import types
from lbopt.linalg import Coefficients
from lbopt.transforms._kron import Diagonal
from lbopt.transforms._layerwise_options import Number, Variant
from lbopt.transforms._matrix_optimizer import MatrixOptions
from lbopt.transforms._newton_schulz import ShapeRule
from lbopt.transforms._shampoo import Graft, Sides

MomentumForm = Literal["average", "sum", "debiased"]


@dataclasses.dataclass(frozen=True)
class MuonOptions(MatrixOptions):
    """The options of `lbopt.muon`, `normuon`, `muonh` and `scion` that a variant sets.

    The defaults are those of KellerJordan/Muon, whose rates are 0.02 and 3e-4: hence the ratio.
    """

    momentum: Number = 0.95
    nesterov: bool = True
    momentum_form: MomentumForm = "average"
    coefficients: Coefficients = "muon"
    steps: int | None = None
    products_dtype: DTypeLike | None = "bfloat16"
    eps: Number = 1e-7
    neuron_b2: Number | None = None
    shape_rule: ShapeRule = "width"
    shape_factor: Number = 1.0
    rest_learning_rate_ratio: Number = 0.015
    rest_eps: Number = 1e-10


@dataclasses.dataclass(frozen=True)
class SoapOptions(MatrixOptions):
    """The options of `lbopt.soap` and `soaph` that a variant sets; the defaults are SOAP's."""

    b1: Number = 0.95
    b2: Number = 0.95
    eps: Number = 1e-8
    shampoo_b2: Number | None = None
    every_steps: int = 10
    debias: bool = True
    kl: bool = False
    weight_decay: Number = 0.01
    rest_b1: Number = 0.95


@dataclasses.dataclass(frozen=True)
class DionOptions(MatrixOptions):
    """The options of `lbopt.dion` that a variant sets; the defaults are Microsoft's."""

    momentum: Number = 0.95
    rank: int | None = None
    rank_fraction: float = 1.0
    eps: Number = 1e-8
    shape_rule: ShapeRule = "spectral"
    weight_decay: Number = 0.01
    weight_decay_mask: types.Mask = None


@dataclasses.dataclass(frozen=True)
class ShampooOptions(MatrixOptions):
    """The options of `lbopt.shampoo` that a variant sets; the defaults are Meta's for AdamW."""

    b1: Number = 0.9
    b2: Number = 0.999
    eps: Number = 1e-12
    every_steps: int = 100
    side: Sides = "both"
    root: float | None = None
    method: Literal["eigh", "newton"] = "eigh"
    debias: bool = True
    graft: Graft | None = "adam"
    graft_b2: Number = 0.999
    graft_eps: Number = 1e-8
    weight_decay: Number = 1e-5
    weight_decay_mask: types.Mask = None
    rest_b2: Number = 0.999


@dataclasses.dataclass(frozen=True)
class KronOptions(MatrixOptions):
    """The options of `lbopt.kron` that a variant sets; the defaults are those of psgd_jax."""

    b1: Number = 0.9
    preconditioner_rate: Number = 0.1
    diagonal: Diagonal = "long"
    max_side: int = 8192


@dataclasses.dataclass(frozen=True)
class MuownOptions(MatrixOptions):
    """The options of `lbopt.muown` that a variant sets; the defaults are NVIDIA's."""

    momentum: Number = 0.95
    b1: Number = 0.9
    b2: Number = 0.95
    adam_eps: Number = 1e-8
    coefficients: Coefficients = "quintic"
    steps: int | None = None
    products_dtype: DTypeLike | None = "bfloat16"
    eps: Number = 1e-15
    shape_factor: Number = 1.0


@dataclasses.dataclass(frozen=True)
class AdamHOptions:
    """The defaults of `lbopt.adamh`, which follows one code."""

    b1: Number = 0.9
    b2: Number = 0.95
    eps: Number = 1e-8
    rest_learning_rate_ratio: Number = 1.0


@dataclasses.dataclass(frozen=True)
class MuLoCoOptions:
    """The defaults of `lbopt.muloco`, which follows one code, but those of its inner `muon`."""

    outer_learning_rate: Number = 0.5
    outer_momentum: Number = 0.5
    sync_steps: int = 30


def _rows(optimizer: str, rows: Mapping[str, tuple[str, str, Any]]) -> dict[str, Variant]:
    return {
        name: Variant(optimizer, name, source, about, options)
        for name, (source, about, options) in rows.items()
    }


MUON: Mapping[str, Variant[MuonOptions]] = _rows(
    "muon",
    {
        "keller": (
            "KellerJordan/Muon@857d1adc159e098212f828d927460782d3da59e9:muon.py",
            "Muon with auxiliary Adam. The code takes the Frobenius norm after rounding to bf16, "
            "here it is taken in fp32. Its factor for a convolution is made of the sides of the "
            "window; here a convolution is one matrix for the factor too.",
            MuonOptions(),
        ),
        "moonlight": (
            "MoonshotAI/Moonlight@c2ad5b20c605086526a179d36901bfc41b52b44b:examples/toy_train.py",
            "Updates have the RMS of AdamW's, so that one rate and one decay serve all leaves. The "
            "code decays biases and norms too: weight_decay_mask=None.",
            MuonOptions(
                rest_learning_rate_ratio=1.0,
                momentum_form="sum",
                shape_rule="rms",
                shape_factor=0.2,
                weight_decay=0.1,
                rest_eps=1e-8,
            ),
        ),
        "polar": (
            "microsoft/dion@0a059a4542e5aa74b40dcd1dce363836c7afcd48:dion/muon.py",
            "Polar Express polynomials, the spectral rule and plain momentum. The code decays "
            "biases and norms too: weight_decay_mask=None.",
            MuonOptions(
                rest_learning_rate_ratio=1.0,
                nesterov=False,
                momentum_form="sum",
                coefficients="polar_express_5",
                eps=1e-8,
                shape_rule="spectral",
                weight_decay=0.01,
                rest_eps=1e-8,
            ),
        ),
        "optax": (
            "google-deepmind/optax@v0.2.8:optax/contrib/_muon.py",
            "optax.contrib.muon with the same dimension numbers, with its state in fp32. Its "
            "default without dimension numbers takes every leaf of two dimensions, embeddings too.",
            MuonOptions(
                rest_learning_rate_ratio=1.0,
                momentum_form="debiased",
                products_dtype=None,
                eps=1e-8,
                rest="nadamw",
                rest_b2=0.999,
                rest_eps=1e-8,
                rest_weight_decay=0.0,
                weight_decay_mask=None,
            ),
        ),
    },
)

NORMUON: Mapping[str, Variant[MuonOptions]] = _rows(
    "normuon",
    {
        "paper": (
            "zichongli5/NorMuon@d45c9a4280d758e2cf0b2b8333765d040e953937:normuon.py",
            "Muon whose neurons are divided by the root of their mean square. The code treats a "
            "convolution as one matrix for the products only, here for the norms too.",
            MuonOptions(neuron_b2=0.95),
        ),
    },
)

MUONH: Mapping[str, Variant[MuonOptions]] = _rows(
    "muonh",
    {
        "marin": (
            "marin-community/marin@05422e243ad24b426998b8c33d4db437aca1129e:"
            "lib/levanter/src/levanter/optim/muonh.py",
            "Hidden matrices and output heads keep their norm, heads by Adam's direction. The code "
            "also clips the gradients of each group to norm 1. The polynomials are the default of "
            "levanter/optim/util.py@054a715f; this version of the code had Keller Jordan's.",
            MuonOptions(
                rest_learning_rate_ratio=1.0,
                momentum_form="sum",
                coefficients="quintic",
                products_dtype=None,
                eps=1e-8,
                sphere=True,
                rest="adamh",
                rest_eps=1e-8,
                rest_weight_decay=0.0,
            ),
        ),
        "modded_nanogpt": (
            "KellerJordan/modded-nanogpt@1ee24075ec89727f56db9e8f520c0917651a52e6:records/"
            "track_3_optimization/results/20260430_muonh/train_gpt_simple_muonh.py",
            "Twelve Newton steps. The rates of the record are 0.018, and 0.3, 1/320 and 0.01 for "
            "embedding, head and the rest.",
            MuonOptions(
                coefficients="newton",
                sphere=True,
                rest_b1=0.8,
                rest_learning_rate_ratio=0.5556,
                rest_weight_decay=0.0,
            ),
        ),
    },
)

SCION: Mapping[str, Variant[MuonOptions]] = _rows(
    "scion",
    {
        "nvidia": (
            "NVIDIA-NeMo/Emerging-Optimizers@fd7729267109a8848709e9406bf19e53e970c3f4:"
            "emerging_optimizers/orthogonalized_optimizers/scion.py",
            "A Frank-Wolfe step towards the ball of a spectral norm: the decay is 1. The radius is "
            "shape_factor. The rest takes signs, in the ball of the largest entry, as the paper's "
            "first and last layers do; NVIDIA's code leaves it to the user.",
            MuonOptions(
                rest_learning_rate_ratio=1.0,
                nesterov=False,
                coefficients="quintic",
                eps=1e-15,
                shape_rule="spectral",
                weight_decay=1.0,
                weight_decay_mask=None,
                rest="sign",
                rest_b1=0.95,
            ),
        ),
    },
)

SOAP: Mapping[str, Variant[SoapOptions]] = _rows(
    "soap",
    {
        "paper": (
            "nikhilvyas/SOAP@a1e553530fde97d0e6b307d7c82ac6d38b072340:soap.py",
            "The code decays the weights after the step, by lr wd of the new weights, and not in "
            "its first step, which only starts the statistics. It treats every leaf of two "
            "dimensions or more so, a convolution with a factor for each dimension; here it is one "
            "matrix. It decays biases and norms too, which the default mask leaves out.",
            SoapOptions(),
        ),
        "kl": (
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
    },
)

SOAPH: Mapping[str, Variant[SoapOptions]] = _rows(
    "soaph",
    {
        "modded_nanogpt": (
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
        "paper": (
            "arXiv:2606.16899 (abstract); nikhilvyas/SOAP@a1e55353:soap.py",
            "SOAP's directions on a sphere.",
            SoapOptions(sphere=True, weight_decay=0.0),
        ),
    },
)

DION: Mapping[str, Variant[DionOptions]] = _rows(
    "dion",
    {
        "microsoft": (
            "microsoft/dion@0a059a4542e5aa74b40dcd1dce363836c7afcd48:dion/dion_simple.py",
            "Householder's QR, as in the simple version; the reference version has a randomised "
            "CholeskyQR too. A zero momentum keeps its basis, as in the reference version. The "
            "default rank of the code is 768, or the smaller side; here it is the smaller side.",
            DionOptions(),
        ),
    },
)

SHAMPOO: Mapping[str, Variant[ShampooOptions]] = _rows(
    "shampoo",
    {
        "meta": (
            "facebookresearch/optimizers@f60660669:distributed_shampoo",
            "As its README replaces AdamW, with Adam's size for each matrix. The code splits and "
            "merges axes to blocks; here a matrix is whole.",
            ShampooOptions(),
        ),
        "one_sided": (
            "facebookresearch/optimizers@f60660669:distributed_shampoo, inverse_exponent_override",
            "The shorter side of each matrix alone, with the square root. The code takes one side "
            "by its axis.",
            ShampooOptions(side="shorter"),
        ),
    },
)

KRON: Mapping[str, Variant[KronOptions]] = _rows(
    "kron",
    {
        "psgd": (
            "evanatyourservice/psgd_jax@be955244:psgd_jax/kron.py",
            "PSGD-Kron. The code takes vectors too, with a diagonal factor, and embeddings; here "
            "they are the rest. It decays all leaves, also biases and norms.",
            KronOptions(),
        ),
    },
)

MUOWN: Mapping[str, Variant[MuownOptions]] = _rows(
    "muown",
    {
        "nvidia": (
            "NVIDIA-NeMo/Emerging-Optimizers@fd7729267109a8848709e9406bf19e53e970c3f4:"
            "emerging_optimizers/contrib/muown.py",
            "The code leaves the rest to the user.",
            MuownOptions(),
        ),
    },
)

WITHOUT_VARIANTS: dict[str, Any] = {
    "adamh": _rows(
        "adamh",
        {
            "marin": (
                "marin-community/marin@00843426:lib/levanter/src/levanter/optim/adamh.py",
                "Adam on spheres. The code clips the gradients of each group too, and keeps the "
                "norm of the last step in place of the first.",
                AdamHOptions(),
            ),
        },
    ),
    "muloco": _rows(
        "muloco",
        {
            "modded_nanogpt": (
                "KellerJordan/modded-nanogpt@370106ff:records/track_3_optimization/results/"
                "20260504_muloco_normuonh",
                "MuLoCo with one worker around `lbopt.muon`, whose variants it takes. Therien et "
                "al., arXiv:2505.23725v2.",
                MuLoCoOptions(),
            ),
        },
    ),
}
"""The rows of optimizers that take no variant of their own, to be printed."""

MATRIX_VARIANTS: dict[str, Any] = {
    "dion": DION,
    "kron": KRON,
    "muon": MUON,
    "muonh": MUONH,
    "muown": MUOWN,
    "normuon": NORMUON,
    "scion": SCION,
    "shampoo": SHAMPOO,
    "soap": SOAP,
    "soaph": SOAPH,
}
"""The variants of each matrix optimizer."""

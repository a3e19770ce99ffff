"""The public LAMB and LARS codes as rows of data: where each comes from, and what it does.

A row names its source and gives every option of `lbopt.lamb` or `lbopt.lars` that differs from the paper's row. Any
option given explicitly overrides the row.

The sources exclude by substrings of variable names of their own frameworks; here that is said by role (see
`lbopt.masks.leaf_role`), which is what those lists mean, and holds for Flax names too.
"""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from collections.abc import Mapping
from typing import Any

from lbopt import masks, tree, types
from lbopt.transforms import arguments

AS_DECAYED = "as_weight_decay"
"""A `trust_ratio_mask`: the leaves that `weight_decay_mask` selects."""

NO_NORM_NO_BIAS = masks.exclude_roles("norm", "bias")
NO_NORM = masks.exclude_roles("norm")


@dataclasses.dataclass(frozen=True)
class Variant:
    """One public code.

    Attributes:
      optimizer: "lamb" or "lars".
      name: of the variant.
      source: repository, file, era.
      about: what is peculiar, and what a row cannot say.
      options: every option of the alias, with this variant's value.
    """

    optimizer: str
    name: str
    source: str
    about: str
    options: Mapping[str, Any]


_LAMB_PAPER: dict[str, Any] = {
    "b1": 0.9,
    "b2": 0.999,
    "eps": 1e-6,
    "eps_root": 0.0,
    "weight_decay": 0.0,
    "weight_decay_mask": masks.weights_only,
    "weight_decay_placement": "inside",
    "trust_ratio_mask": masks.weights_only,
    "adapt_undecayed": True,
    "trust_ratio_bounds": None,
    "weight_norm_bounds": None,
    "zero_norm_ratio": 1.0,
    "debias": True,
    "grad_averaging": True,
    "max_grad_norm": None,
    "max_grad_norm_eps": 0.0,
    "gradient_normalization": None,
    "gradient_normalization_stage": "after_clip",
}

_LARS_PAPER: dict[str, Any] = {
    "weight_decay": 0.0,
    "momentum": 0.9,
    "trust_coefficient": 0.001,
    "eps": 0.0,
    "nesterov": False,
    "dampening": 0.0,
    "undamped_start": False,
    "denominator": "sum_of_norms",
    "learning_rate_placement": "inside",
    "plain_learning_rate_placement": None,
    "trust_ratio_placement": "inside",
    "weight_decay_mask": masks.weights_only,
    "weight_decay_placement": "inside",
    "trust_ratio_mask": masks.weights_only,
    "adapt_undecayed": True,
    "clip_mode": "scale",
    "trust_ratio_bounds": None,
    "weight_norm_bounds": None,
    "update_bounds": None,
    "zero_norm_ratio": 1.0,
}

_PER_REPLICA_CLIP = (
    "The source clips each replica's own gradient before the sum over replicas [recalled 97%]; lamb clips what it is given. "
    'To clip per replica: make_train_step(..., clip_stage="replica", max_grad_norm=1.0) and lamb(..., max_grad_norm=None).'
)
_WITHOUT_DECAY_ADAM = (
    "The ratio is taken only where decay is not zero: weight_decay = 0 turns it into Adam."
)
_FORMS = {"weight_decay_mask": None, "trust_ratio_mask": None}


def _rows(
    optimizer: str, paper: dict[str, Any], *rows: tuple[str, str, str, dict[str, Any]]
) -> dict[str, Variant]:
    variants = {}
    for name, source, about, options in rows:
        unknown = set(options) - set(paper)
        assert not unknown, f"{optimizer} {name}: {unknown}"
        variants[name] = Variant(optimizer, name, source, about, {**paper, **options})
    return variants


LAMB: dict[str, Variant] = _rows(
    "lamb",
    _LAMB_PAPER,
    (
        "paper",
        "You et al., arXiv 1904.00962v5, Algorithm 2 [recalled 80%]",
        "Decay inside the direction and inside its norm. Biases and normalization leaves are neither decayed nor adapted: "
        "the paper does not say, its authors' BERT code does so.",
        {},
    ),
    (
        "optax",
        "google-deepmind/optax, optax/_src/alias.py and transform.py",
        "Every leaf is adapted; optax's mask is weight_decay_mask alone. optax takes norms in the parameter dtype, here they are fp32.",
        {**_FORMS},
    ),
    (
        "tfa",
        "tensorflow/addons, optimizers/lamb.py",
        "exclude_from_layer_adaptation defaults to exclude_from_weight_decay, and both to nothing. The source turns eps = 0 into 1e-7.",
        {"weight_decay_mask": None, "trust_ratio_mask": AS_DECAYED},
    ),
    (
        "albert",
        "google-research/albert, lamb_optimizer.py and optimization.py",
        "Excluded: LayerNorm, layer_norm, bias. " + _PER_REPLICA_CLIP,
        {
            "debias": False,
            "weight_decay": 0.01,
            "weight_decay_mask": NO_NORM_NO_BIAS,
            "trust_ratio_mask": AS_DECAYED,
            "max_grad_norm": 1.0,
        },
    ),
    (
        "you_rn50",
        "fastalgo/imagenet_resnet50_lamb, optimization.py and run.sh",
        f"Excluded: batch_normalization, LayerNorm, layer_norm; biases are decayed. {_WITHOUT_DECAY_ADAM} {_PER_REPLICA_CLIP}",
        {
            "debias": False,
            "weight_decay": 1.5,
            "weight_decay_mask": NO_NORM,
            "trust_ratio_mask": AS_DECAYED,
            "adapt_undecayed": False,
            "max_grad_norm": 1.0,
        },
    ),
    (
        "you_mnist",
        "fastalgo/mnist_tpu, lamb/optimization.py",
        "Excluded from decay: LayerNorm, layer_norm, bias; every variable is adapted. "
        + _PER_REPLICA_CLIP,
        {
            "debias": False,
            "weight_decay": 0.01,
            "weight_decay_mask": NO_NORM_NO_BIAS,
            "trust_ratio_mask": None,
            "max_grad_norm": 1.0,
        },
    ),
    (
        "apex",
        "NVIDIA/apex, optimizers/fused_lamb.py and csrc/multi_tensor_lamb.cu",
        f"Parameter groups decide what is decayed; here biases and normalization leaves are not. {_WITHOUT_DECAY_ADAM} "
        'adam_w_mode=False is weight_decay_placement="gradient".',
        {
            "weight_decay": 0.01,
            "weight_decay_mask": NO_NORM_NO_BIAS,
            "trust_ratio_mask": None,
            "adapt_undecayed": False,
            "max_grad_norm": 1.0,
        },
    ),
    (
        "nvlamb",
        "NVIDIA/apex, optimizers/fused_lamb.py with use_nvlamb=True",
        "As apex, but every leaf is adapted.",
        {
            "weight_decay": 0.01,
            "weight_decay_mask": NO_NORM_NO_BIAS,
            "trust_ratio_mask": None,
            "max_grad_norm": 1.0,
        },
    ),
    (
        "timm",
        "huggingface/pytorch-image-models, timm/optim/lamb.py",
        f"The arithmetic of apex. {_WITHOUT_DECAY_ADAM} always_adapt is adapt_undecayed=True, trust_clip is "
        'trust_ratio_bounds=(0, 1), decoupled_decay is weight_decay_placement="decoupled"; corrected_weight_decay and '
        "caution are not offered.",
        {
            "weight_decay": 0.01,
            "weight_decay_mask": masks.weights_only,
            "trust_ratio_mask": None,
            "adapt_undecayed": False,
            "max_grad_norm": 1.0,
        },
    ),
    (
        "nus",
        "NUS-HPC-AI-Lab/pytorch-lamb, optim/lamb.py (the eps of the clip [recalled 95%])",
        f'{_WITHOUT_DECAY_ADAM} Its debias flag divides the kept moments every step: say debias="in_state" to reproduce that. '
        "The 1e-6 in the clip is PyTorch's clip_grad_norm_ [recalled 95%].",
        {
            "debias": False,
            "weight_decay_mask": NO_NORM_NO_BIAS,
            "trust_ratio_mask": None,
            "adapt_undecayed": False,
            "max_grad_norm": 1.0,
            "max_grad_norm_eps": 1e-6,
        },
    ),
    (
        "cybertron",
        "cybertronai/pytorch-lamb, pytorch_lamb/lamb.py",
        "The first version of the paper: ||w|| is clamped to [0, 10]. adam=True is trust_ratio_mask=False.",
        {**_FORMS, "debias": False, "weight_norm_bounds": (0.0, 10.0)},
    ),
    (
        "mlperf_tf",
        "mlcommons/training_results_v0.7, bert-research-TF-tpu-v3-8192/lamb_optimizer.py",
        "Excluded: LayerNorm, layer_norm, bias. The source takes a leading axis of 24 for layers; here say so: stacked=. "
        + _PER_REPLICA_CLIP,
        {
            "weight_decay": 0.0166629,
            "weight_decay_mask": NO_NORM_NO_BIAS,
            "trust_ratio_mask": AS_DECAYED,
            "max_grad_norm": 1.0,
        },
    ),
    (
        "mlperf_jax",
        "mlcommons/training_results_v0.7, bert-research-JAX-tpu-v3-8192/bert_lamb.py",
        "Excluded from decay: layer_norm, layernorm, bias; every leaf is adapted. The source takes a leading axis of 24 for "
        "layers; here say so: stacked=. " + _PER_REPLICA_CLIP,
        {
            "weight_decay": 0.0166629,
            "weight_decay_mask": NO_NORM_NO_BIAS,
            "trust_ratio_mask": None,
            "max_grad_norm": 1.0,
        },
    ),
    (
        "flax",
        "google/flax, flax/optim/lamb.py before commit cda7a4c8",
        "Zero weights get ratio 0 and never move; a zero direction on other weights gives NaN.",
        {**_FORMS, "zero_norm_ratio": None},
    ),
)

LARS: dict[str, Variant] = _rows(
    "lars",
    _LARS_PAPER,
    (
        "paper",
        "You et al., arXiv 1708.03888, Algorithm 1 [recalled 80%]",
        "The sum of two norms; learning rate and ratio inside the momentum. Biases and normalization leaves take plain momentum steps: "
        "the paper does not say, its followers do so.",
        {},
    ),
    (
        "lamb_paper",
        "You et al., arXiv 1904.00962, Algorithm 1 [recalled 95%]",
        "LARS as the LAMB paper writes it: divides by the norm of the averaged momentum, which no public LARS code does.",
        {
            "denominator": "momentum",
            "trust_coefficient": 1.0,
            "dampening": "momentum",
            "learning_rate_placement": "outside",
            "trust_ratio_placement": "outside",
        },
    ),
    (
        "contrib_2018",
        "tensorflow, contrib/opt/python/training/lars_optimizer.py as of 2018-19 (MLPerf v0.6)",
        "Learning rate and ratio outside the momentum. The decay is in the denominator only: the loss has to hold the L2 term. "
        "Later copies of the class are the tpu variant. MLPerf v0.6 ran it with eps = 1e-5.",
        {
            "weight_decay_mask": NO_NORM_NO_BIAS,
            "trust_ratio_mask": NO_NORM_NO_BIAS,
            "weight_decay_placement": "norm_only",
            "learning_rate_placement": "outside",
            "trust_ratio_placement": "outside",
        },
    ),
    (
        "tpu",
        "tensorflow/tpu, models/official/efficientnet/lars_optimizer.py",
        "EfficientNet has the L2 term in the loss as well: it decays twice unless one of them is 0.",
        {
            "weight_decay": 1e-5,
            "weight_decay_mask": NO_NORM_NO_BIAS,
            "trust_ratio_mask": NO_NORM_NO_BIAS,
        },
    ),
    (
        "mlperf_tf2",
        "mlcommons/training_results_v0.7, resnet-cloud-TF2.0-tpu-v3-32/lars_optimizer.py",
        "The source turns its eps = 0.0 into 1e-7.",
        {"eps": 1e-7, "weight_decay_mask": NO_NORM_NO_BIAS, "trust_ratio_mask": NO_NORM_NO_BIAS},
    ),
    (
        "flax",
        "google/flax, flax/optim/lars.py before commit cda7a4c8 (MLPerf v0.7 ResNet in JAX)",
        "Leaves with bias or scale in their path go to flax's Momentum: learning rate outside, no decay, no Nesterov, at the same rate.",
        {
            "weight_decay_mask": NO_NORM_NO_BIAS,
            "trust_ratio_mask": NO_NORM_NO_BIAS,
            "plain_learning_rate_placement": "outside",
        },
    ),
    (
        "optax",
        "google-deepmind/optax, optax/_src/alias.py and transform.py",
        "The norm of the sum, which is never larger: the ratio is never smaller than the paper's. Two masks decide what is skipped.",
        {**_FORMS, "denominator": "norm_of_sum"},
    ),
    (
        "nus",
        "NUS-HPC-AI-Lab/LARS-ImageNet-PyTorch, lars.py",
        "The ratio is at most 50; each number of the decayed gradient is clamped to [-10, 10], on skipped leaves too. Its 32K run has eps 0.",
        {
            "eps": 1e-5,
            "weight_decay_mask": NO_NORM_NO_BIAS,
            "trust_ratio_mask": NO_NORM_NO_BIAS,
            "learning_rate_placement": "outside",
            "trust_ratio_placement": "outside",
            "trust_ratio_bounds": (0.0, 50.0),
            "update_bounds": (-10.0, 10.0),
        },
    ),
    (
        "timm",
        "huggingface/pytorch-image-models, timm/optim/lars.py",
        "The ratio inside the momentum, the learning rate outside. Leaves without decay are not adapted, so weight_decay = 0 "
        'is plain momentum; always_adapt is adapt_undecayed=True, trust_clip is clip_mode="clip".',
        {
            "eps": 1e-8,
            "weight_decay_mask": masks.weights_only,
            "trust_ratio_mask": None,
            "adapt_undecayed": False,
            "undamped_start": True,
            "learning_rate_placement": "outside",
        },
    ),
    (
        "nvcaffe",
        "borisgin/nvcaffe-0.16, src/caffe/solvers/sgd_solver.{cpp,cu}",
        "Divides by the norm of the gradient alone and skips nothing. Its default is LARC: the local rate never exceeds the "
        'global one; clip_mode="scale" is its LARS.',
        {**_FORMS, "denominator": "gradient_only", "clip_mode": "clip"},
    ),
)

VARIANTS: dict[str, dict[str, Variant]] = {"lamb": LAMB, "lars": LARS}


def choose(optimizer: str, variant: str, **given: Any) -> dict[str, Any]:
    """Return the options of a variant with every given one that is not `UNSET` laid over them.

    Raises:
      ValueError: listing the known variants, for an unknown one.

    >>> choose("lars", "nus", eps=types.UNSET)["eps"], choose("lars", "nus", eps=0.0)["eps"]
    (1e-05, 0.0)
    """
    rows = VARIANTS[optimizer]
    if not isinstance(variant, str) or variant not in rows:
        raise ValueError(f"variant = {tree.said(variant)}: use one of {', '.join(rows)}")
    return {
        **rows[variant].options,
        **{name: value for name, value in given.items() if value is not types.UNSET},
    }


def trust_ratio_mask(row: Mapping[str, Any]) -> Any:
    """Return a row's mask of adapted leaves, "as_weight_decay" resolved."""
    mask = row["trust_ratio_mask"]
    return row["weight_decay_mask"] if isinstance(mask, str) and mask == AS_DECAYED else mask


def check_adaptation(row: Mapping[str, Any], optimizer: str, variant: str) -> None:
    """Raise ValueError, or warn, where the options of a row leave nothing to adapt without saying so."""
    if (
        isinstance(row["trust_ratio_mask"], str)
        and row["trust_ratio_mask"] == AS_DECAYED
        and row["weight_decay_mask"] is False
    ):
        raise ValueError(
            'trust_ratio_mask = "as_weight_decay" with weight_decay_mask = False: no leaf would be adapted; '
            "pass trust_ratio_mask too"
        )
    if arguments.require_flag("adapt_undecayed", row["adapt_undecayed"]):
        return
    if row["weight_decay_mask"] is False and row["trust_ratio_mask"] is not False:
        raise ValueError(
            "adapt_undecayed = False with weight_decay_mask = False: no leaf would be adapted; "
            "pass trust_ratio_mask=False if that is meant, or adapt_undecayed=True"
        )
    decay = row["weight_decay"]
    if isinstance(decay, numbers.Real) and decay == 0 and row["trust_ratio_mask"] is not False:
        warnings.warn(
            f'{optimizer}(variant="{variant}") with weight_decay = 0 has no trust ratio at all, as its source: '
            f"it is {'Adam' if optimizer == 'lamb' else 'momentum SGD'}. adapt_undecayed=True adapts all the same; "
            "trust_ratio_mask=False says that this is meant.",
            stacklevel=3,
        )

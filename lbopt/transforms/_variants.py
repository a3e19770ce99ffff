"""The public LAMB and LARS codes, as data: where each comes from, and which options it sets.

LAMB is layerwise adaptive moments for batch training, LARS layerwise adaptive rate scaling. A
variant names its source and the options in which it differs from the paper. An option that the
caller gives overrides the variant's.

The sources exclude leaves by substrings of the variable names of their own frameworks. Here roles
(see `lbopt.masks.leaf_role`) exclude the leaves that those lists mean, which holds for Flax names
too.

A source is `owner/repository@commit:path` or a paper with its version. `[recalled NN%]` marks a
paper whose text was not read for this table; the number says how sure we are of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from lbopt import masks
from lbopt.transforms._layerwise_options import (
    AS_DECAYED,
    LambOptions,
    LarsOptions,
    Options,
    Variant,
)

LambVariant = Literal[
    "paper",
    "optax",
    "tfa",
    "albert",
    "you_rn50",
    "you_mnist",
    "apex",
    "nvlamb",
    "timm",
    "nus",
    "cybertron",
    "mlperf_tf",
    "mlperf_jax",
    "flax",
]
LarsVariant = Literal[
    "paper",
    "lamb_paper",
    "contrib_2018",
    "tpu",
    "mlperf_tf2",
    "flax",
    "optax",
    "nus",
    "timm",
    "nvcaffe",
]

NO_NORM_NO_BIAS = masks.exclude_roles("norm", "bias")
NO_NORM = masks.exclude_roles("norm")


def _by_name(
    optimizer: str, *variants: tuple[str, str, str, Options]
) -> dict[str, Variant[Options]]:
    return {variant[0]: Variant(optimizer, *variant) for variant in variants}


_OPTAX = "google-deepmind/optax@2edbcbe2390da13983b92cbef94ac0460ecde1c5:optax/_src/"
_APEX = "NVIDIA/apex@6424da3b4faa6c8f062da4a48c424fff3f02d42d:"
_TIMM = "huggingface/pytorch-image-models@aa4b5850c1543fa488abf260f18390eda46cf85d:timm/optim/"
_FLAX = "google/flax@b60f7f45b90f8fc42a88b1639c9cc88a40b298d3:flax/optim/"
_MLPERF_V07 = (
    "mlcommons/training_results_v0.7@c66406115bb3c60cb9c49889b076727ccecba31e:Google/benchmarks/"
)
"""Folders that several variants come from; flax's is the last commit that has these optimizers."""

_PER_REPLICA_CLIP = (
    "The source clips each replica's own gradient before the sum over replicas; lamb clips what "
    "it is given. "
    'To clip per replica: make_train_step(..., clip=GradientClip(1.0, "replica")) and '
    "lamb(..., max_grad_norm=None)."
)
_WITHOUT_DECAY_ADAM = (
    "The ratio is taken only where decay is not zero: weight_decay = 0 turns it into Adam."
)
LAMB: dict[str, Variant[LambOptions]] = _by_name(
    "lamb",
    (
        "paper",
        "You et al., arXiv:1904.00962v5, Algorithm 2 [recalled 80%]",
        "Decay inside the direction and inside its norm. Biases and normalization leaves are "
        "neither decayed nor adapted: "
        "the paper does not say, its authors' BERT code does so.",
        LambOptions(),
    ),
    (
        "optax",
        _OPTAX + "alias.py and transform.py",
        "Every leaf is adapted; optax's mask is weight_decay_mask alone. optax takes norms in the "
        "parameter dtype, here they are fp32.",
        LambOptions(weight_decay_mask=None, trust_ratio_mask=None),
    ),
    (
        "tfa",
        "tensorflow/addons@00beec06ff86ff0f3b47ebf7a2dd60465986a3a4:"
        "tensorflow_addons/optimizers/lamb.py",
        "exclude_from_layer_adaptation defaults to exclude_from_weight_decay, and both to nothing. "
        "The source turns eps = 0 into 1e-7.",
        LambOptions(weight_decay_mask=None, trust_ratio_mask=AS_DECAYED),
    ),
    (
        "albert",
        "google-research/albert@6ca4dfd0d13495a0a0ed7931f452018e08f93ced:"
        "lamb_optimizer.py and optimization.py",
        "Excluded: LayerNorm, layer_norm, bias. " + _PER_REPLICA_CLIP,
        LambOptions(
            debias=False,
            weight_decay=0.01,
            weight_decay_mask=NO_NORM_NO_BIAS,
            trust_ratio_mask=AS_DECAYED,
            max_grad_norm=1.0,
        ),
    ),
    (
        "you_rn50",
        "fastalgo/imagenet_resnet50_lamb@b778c4c55d00d694ca8e1f87e6e8ccc5980544f3:"
        "optimization.py and run.sh",
        f"Excluded: batch_normalization, LayerNorm, layer_norm; biases are decayed. "
        f"{_WITHOUT_DECAY_ADAM} {_PER_REPLICA_CLIP}",
        LambOptions(
            debias=False,
            weight_decay=1.5,
            weight_decay_mask=NO_NORM,
            trust_ratio_mask=AS_DECAYED,
            adapt_undecayed=False,
            max_grad_norm=1.0,
        ),
    ),
    (
        "you_mnist",
        "fastalgo/mnist_tpu@9d6ba7de9fdcacb2a911b5a648993c3d05677157:lamb/optimization.py",
        "Excluded from decay: LayerNorm, layer_norm, bias; every variable is adapted. "
        + _PER_REPLICA_CLIP,
        LambOptions(
            debias=False,
            weight_decay=0.01,
            weight_decay_mask=NO_NORM_NO_BIAS,
            trust_ratio_mask=None,
            max_grad_norm=1.0,
        ),
    ),
    (
        "apex",
        _APEX + "apex/optimizers/fused_lamb.py and csrc/multi_tensor_lamb.cu",
        f"Parameter groups decide what is decayed; here biases and normalization leaves are not. "
        f"{_WITHOUT_DECAY_ADAM} "
        'adam_w_mode=False is weight_decay_placement="gradient".',
        LambOptions(
            weight_decay=0.01,
            weight_decay_mask=NO_NORM_NO_BIAS,
            trust_ratio_mask=None,
            adapt_undecayed=False,
            max_grad_norm=1.0,
        ),
    ),
    (
        "nvlamb",
        _APEX + "apex/optimizers/fused_lamb.py with use_nvlamb=True",
        "As apex, but every leaf is adapted.",
        LambOptions(
            weight_decay=0.01,
            weight_decay_mask=NO_NORM_NO_BIAS,
            trust_ratio_mask=None,
            max_grad_norm=1.0,
        ),
    ),
    (
        "timm",
        _TIMM + "lamb.py",
        f"The arithmetic of apex. {_WITHOUT_DECAY_ADAM} always_adapt is adapt_undecayed=True, "
        f"trust_clip is "
        'trust_ratio_bounds=(0, 1), decoupled_decay is weight_decay_placement="decoupled"; '
        "corrected_weight_decay and "
        "caution are not offered.",
        LambOptions(
            weight_decay=0.01,
            weight_decay_mask=masks.weights_only,
            trust_ratio_mask=None,
            adapt_undecayed=False,
            max_grad_norm=1.0,
        ),
    ),
    (
        "nus",
        "NUS-HPC-AI-Lab/pytorch-lamb@638a309ec1d64adeffe901bb64c7f009aae6c1ab:optim/lamb.py",
        f"{_WITHOUT_DECAY_ADAM} Its debias flag divides the kept moments every step: say "
        f'debias="in_state" to reproduce that. '
        "The 1e-6 in the clip is clip_grad_norm_'s: "
        "pytorch/pytorch@01a57d87bd4826d1f528b2dc47360a8087b34f5a:torch/nn/utils/clip_grad.py.",
        LambOptions(
            debias=False,
            weight_decay_mask=NO_NORM_NO_BIAS,
            trust_ratio_mask=None,
            adapt_undecayed=False,
            max_grad_norm=1.0,
            max_grad_norm_eps=1e-6,
        ),
    ),
    (
        "cybertron",
        "cybertronai/pytorch-lamb@d3ab8dccf6717977c1ad0d6b95499f6b25bba41b:pytorch_lamb/lamb.py",
        "The first version of the paper: ||w|| is clamped to [0, 10]. adam=True is "
        "trust_ratio_mask=False.",
        LambOptions(
            weight_decay_mask=None,
            trust_ratio_mask=None,
            debias=False,
            weight_norm_bounds=(0.0, 10.0),
        ),
    ),
    (
        "mlperf_tf",
        _MLPERF_V07 + "bert/implementations/bert-research-TF-tpu-v3-8192/lamb_optimizer.py",
        "Excluded: LayerNorm, layer_norm, bias. The source takes a leading axis of 24 for layers; "
        "here say so: stacked=. " + _PER_REPLICA_CLIP,
        LambOptions(
            weight_decay=0.0166629,
            weight_decay_mask=NO_NORM_NO_BIAS,
            trust_ratio_mask=AS_DECAYED,
            max_grad_norm=1.0,
        ),
    ),
    (
        "mlperf_jax",
        _MLPERF_V07 + "bert/implementations/bert-research-JAX-tpu-v3-8192/bert_lamb.py",
        "Excluded from decay: layer_norm, layernorm, bias; every leaf is adapted. The source takes "
        "a leading axis of 24 for "
        "layers; here say so: stacked=. " + _PER_REPLICA_CLIP,
        LambOptions(
            weight_decay=0.0166629,
            weight_decay_mask=NO_NORM_NO_BIAS,
            trust_ratio_mask=None,
            max_grad_norm=1.0,
        ),
    ),
    (
        "flax",
        _FLAX + "lamb.py",
        "Zero weights get ratio 0 and never move; a zero direction on other weights gives NaN.",
        LambOptions(weight_decay_mask=None, trust_ratio_mask=None, zero_norm_ratio=None),
    ),
)

LARS: dict[str, Variant[LarsOptions]] = _by_name(
    "lars",
    (
        "paper",
        "You et al., arXiv:1708.03888v3, Algorithm 1 (read in the paper's anonymous submission)",
        "The sum of two norms; learning rate and ratio inside the momentum. Biases and "
        "normalization leaves take plain momentum steps: "
        "the paper does not say, its followers do so.",
        LarsOptions(),
    ),
    (
        "lamb_paper",
        "You et al., arXiv:1904.00962v5, Algorithm 1 [recalled 95%]",
        "LARS as the LAMB paper writes it: divides by the norm of the averaged momentum, which no "
        "public LARS code does.",
        LarsOptions(
            denominator="momentum",
            trust_coefficient=1.0,
            dampening="momentum",
            learning_rate_placement="outside",
            trust_ratio_placement="outside",
        ),
    ),
    (
        "contrib_2018",
        "tensorflow/tensorflow@5c8077a6fd768817b70b344bdcddb7fef213245a:"
        "tensorflow/contrib/opt/python/training/lars_optimizer.py (MLPerf v0.6)",
        "Learning rate and ratio outside the momentum. The decay is in the denominator only: the "
        "loss has to hold the L2 term. "
        "Later copies of the class are the tpu variant. MLPerf v0.6 ran it with eps = 1e-5.",
        LarsOptions(
            weight_decay_mask=NO_NORM_NO_BIAS,
            trust_ratio_mask=NO_NORM_NO_BIAS,
            weight_decay_placement="norm_only",
            learning_rate_placement="outside",
            trust_ratio_placement="outside",
        ),
    ),
    (
        "tpu",
        "tensorflow/tpu@4b544d49d4ce5de5066a6631184c25cd29bdf9b6:"
        "models/official/efficientnet/lars_optimizer.py",
        "EfficientNet has the L2 term in the loss as well: it decays twice unless one of them is "
        "0.",
        LarsOptions(
            weight_decay=1e-5, weight_decay_mask=NO_NORM_NO_BIAS, trust_ratio_mask=NO_NORM_NO_BIAS
        ),
    ),
    (
        "mlperf_tf2",
        _MLPERF_V07 + "resnet/implementations/resnet-cloud-TF2.0-tpu-v3-32/lars_optimizer.py",
        "The source turns its eps = 0.0 into 1e-7.",
        LarsOptions(eps=1e-7, weight_decay_mask=NO_NORM_NO_BIAS, trust_ratio_mask=NO_NORM_NO_BIAS),
    ),
    (
        "flax",
        _FLAX + "lars.py (MLPerf v0.7 ResNet in JAX)",
        "Leaves with bias or scale in their path go to flax's Momentum: learning rate outside, no "
        "decay, no Nesterov, at the same rate.",
        LarsOptions(
            weight_decay_mask=NO_NORM_NO_BIAS,
            trust_ratio_mask=NO_NORM_NO_BIAS,
            plain_learning_rate_placement="outside",
        ),
    ),
    (
        "optax",
        _OPTAX + "alias.py and transform.py",
        "The norm of the sum, which is never larger: the ratio is never smaller than the paper's. "
        "Two masks decide what is skipped.",
        LarsOptions(weight_decay_mask=None, trust_ratio_mask=None, denominator="norm_of_sum"),
    ),
    (
        "nus",
        "NUS-HPC-AI-Lab/LARS-ImageNet-PyTorch@a8222c67c562f2b6bd74d78956d11f37858b7cbe:lars.py",
        "The ratio is at most 50; each number of the decayed gradient is clamped to [-10, 10], on "
        "skipped leaves too. Its 32K run has eps 0.",
        LarsOptions(
            eps=1e-5,
            weight_decay_mask=NO_NORM_NO_BIAS,
            trust_ratio_mask=NO_NORM_NO_BIAS,
            learning_rate_placement="outside",
            trust_ratio_placement="outside",
            trust_ratio_bounds=(0.0, 50.0),
            update_bounds=(-10.0, 10.0),
        ),
    ),
    (
        "timm",
        _TIMM + "lars.py",
        "The ratio inside the momentum, the learning rate outside. Leaves without decay are not "
        "adapted, so weight_decay = 0 "
        'is plain momentum; always_adapt is adapt_undecayed=True, trust_clip is clip_mode="clip".',
        LarsOptions(
            eps=1e-8,
            weight_decay_mask=masks.weights_only,
            trust_ratio_mask=None,
            adapt_undecayed=False,
            undamped_start=True,
            learning_rate_placement="outside",
        ),
    ),
    (
        "nvcaffe",
        "borisgin/nvcaffe-0.16@8896d3303cfdfb575923d6bb108a99ebda728855:"
        "src/caffe/solvers/sgd_solver.cpp and sgd_solver.cu",
        "Divides by the norm of the gradient alone and skips nothing. Its default is LARC: the "
        "local rate never exceeds the "
        'global one; clip_mode="scale" is its LARS.',
        LarsOptions(
            weight_decay_mask=None,
            trust_ratio_mask=None,
            denominator="gradient_only",
            clip_mode="clip",
        ),
    ),
)

VARIANTS: dict[str, Mapping[str, Variant[Any]]] = {"lamb": LAMB, "lars": LARS}

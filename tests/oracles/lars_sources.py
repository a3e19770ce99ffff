"""LARS as its public sources compute it: float64 transcriptions of the sources' equations.

One function per source, sharing nothing, so that a slip stays in one. Each function returns
`step(w, g, lr)`: `w` and `g` are dicts from leaf name to float64 array (any rank, 0-d included),
`lr` is the learning rate of this step, and the result is a new dict of weights. Momentum buffers
live in the closure; the weights are taken from the argument each time.

The commit and path of each source are those of the variant with the function's name in
`lbopt.transforms.VARIANTS["lars"]`.
"""

import numpy as np


def paper(
    *, weight_decay, momentum=0.9, trust_coefficient=0.001, eps=0.0, skipped=lambda name: False
):
    """arXiv 1708.03888v3, Algorithm 1 (the caller's lr holds the schedule; the paper has no eps).

    Sum of norms in the denominator, lr and ratio inside the momentum. `skipped` leaves: lr inside,
    no decay, ratio 1.
    """
    vel = {}

    def step(w, g, lr):
        new = {}
        for name in w:
            x = np.asarray(w[name], dtype=np.float64)
            d = np.asarray(g[name], dtype=np.float64)
            if skipped(name):
                scaled = lr * d
            else:
                x_norm = np.sqrt(np.sum(x**2))
                d_norm = np.sqrt(np.sum(d**2))
                local = 1.0
                if x_norm > 0 and d_norm > 0:
                    local = trust_coefficient * x_norm / (d_norm + weight_decay * x_norm + eps)
                scaled = lr * local * (d + weight_decay * x)
            vel[name] = momentum * vel.get(name, 0.0) + scaled
            new[name] = np.asarray(x - vel[name])
        return new

    return step


def lamb_paper(
    *,
    weight_decay,
    momentum=0.9,
    trust_coefficient=1.0,
    eps=0.0,
    phi=None,
    skipped=lambda name: False,
):
    """arXiv 1904.00962v5, Algorithm 1: LARS in the LAMB paper, without trust coefficient and eps.

    Divides by the norm of the momentum, which averages the decayed gradient. `phi=(low, high)`
    clamps ||w||; the zero test looks at the clamped norm. `skipped` leaves: no decay, ratio 1.
    """
    average = {}

    def step(w, g, lr):
        new = {}
        for name in w:
            x = np.asarray(w[name], dtype=np.float64)
            d = np.asarray(g[name], dtype=np.float64)
            skip = skipped(name)
            if not skip:
                d = d + weight_decay * x
            average[name] = momentum * average.get(name, 0.0) + (1.0 - momentum) * d
            ratio = 1.0
            if not skip:
                phi_x = np.linalg.norm(x.ravel())
                if phi is not None:
                    phi_x = min(max(phi_x, phi[0]), phi[1])
                average_norm = np.linalg.norm(np.ravel(average[name]))
                if phi_x > 0 and average_norm > 0:
                    ratio = trust_coefficient * phi_x / (average_norm + eps)
            new[name] = np.asarray(x - lr * ratio * average[name])
        return new

    return step


def contrib_2018(
    *,
    weight_decay,
    momentum=0.9,
    trust_coefficient=0.001,
    eps=0.0,
    nesterov=False,
    skipped=lambda name: any(part in name for part in ("batch_normalization", "bias")),
):
    """tensorflow/tensorflow `contrib/opt/.../lars_optimizer.py` as of 2018-19 (MLPerf v0.6).

    lr and ratio outside the momentum; wd is in the denominator but never added to the gradient (the
    loss holds L2).
    """
    accumulator = {}

    def step(w, g, lr):
        new = {}
        for name, var in w.items():
            var = np.asarray(var, dtype=np.float64)
            grad = np.asarray(g[name], dtype=np.float64)
            scaled_lr = lr
            if not skipped(name):
                w_norm = np.linalg.norm(np.ravel(var))
                g_norm = np.linalg.norm(np.ravel(grad))
                if w_norm > 0 and g_norm > 0:
                    scaled_lr = (
                        lr * trust_coefficient * w_norm / (g_norm + weight_decay * w_norm + eps)
                    )
            accumulator[name] = momentum * accumulator.get(name, 0.0) + grad
            if nesterov:
                new[name] = np.asarray(var - scaled_lr * (grad + momentum * accumulator[name]))
            else:
                new[name] = np.asarray(var - scaled_lr * accumulator[name])
        return new

    return step


def tpu(
    *,
    weight_decay,
    momentum=0.9,
    trust_coefficient=0.001,
    eps=0.0,
    nesterov=False,
    skipped=lambda name: any(
        part in name for part in ("batch_normalization", "bias", "beta", "gamma")
    ),
):
    """tensorflow/tpu@4b544d4 `models/official/efficientnet/lars_optimizer.py`.

    lr and ratio inside the momentum, decay added to the gradient; skipped leaves: lr inside too, no
    decay, ratio 1.
    """
    slot = {}

    def step(w, g, lr):
        new = {}
        for name in w:
            var = np.asarray(w[name], dtype=np.float64)
            grad = np.asarray(g[name], dtype=np.float64)
            ratio = 1.0
            if not skipped(name):
                w_norm = np.sqrt((var**2).sum())
                g_norm = np.sqrt((grad**2).sum())
                if w_norm > 0 and g_norm > 0:
                    ratio = trust_coefficient * w_norm / (g_norm + weight_decay * w_norm + eps)
                grad = grad + weight_decay * var
            s = lr * ratio * grad
            slot[name] = momentum * slot.get(name, 0.0) + s
            move = s + momentum * slot[name] if nesterov else slot[name]
            new[name] = np.asarray(var - move)
        return new

    return step


def mlperf_tf2(
    *,
    weight_decay,
    momentum=0.9,
    trust_coefficient=0.001,
    eps=0.0,
    nesterov=False,
    skipped=lambda name: any(part in name for part in ("batch_normalization", "bias")),
):
    """mlcommons/training_results_v0.7 `resnet-cloud-TF2.0-tpu-v3-32/lars_optimizer.py`.

    lr and ratio inside the momentum; eps 0.0 becomes the backend's 1e-7; skipped leaves: no decay,
    ratio 1.
    """
    epsilon = eps if eps != 0 else 1e-7
    velocity = {}

    def step(w, g, lr):
        new = {}
        for name in w:
            var = np.asarray(w[name], dtype=np.float64)
            grad = np.asarray(g[name], dtype=np.float64)

            if skipped(name):
                scaled = grad * lr
            else:
                var_norm = np.linalg.norm(var.reshape(-1))
                grad_norm = np.linalg.norm(grad.reshape(-1))
                if var_norm > 0 and grad_norm > 0:
                    trust = (
                        trust_coefficient
                        * var_norm
                        / (grad_norm + weight_decay * var_norm + epsilon)
                    )
                else:
                    trust = 1.0
                scaled = (grad + weight_decay * var) * trust * lr

            velocity[name] = velocity.get(name, 0.0) * momentum + scaled
            if nesterov:
                new[name] = np.asarray(var - scaled - momentum * velocity[name])
            else:
                new[name] = np.asarray(var - velocity[name])

        return new

    return step


def flax(
    *,
    weight_decay,
    momentum=0.9,
    trust_coefficient=0.001,
    eps=0.0,
    nesterov=False,
    skipped=lambda name: "bias" in name or "scale" in name,
):
    """google/flax `flax/optim/lars.py`, before commit cda7a4c8 (MLPerf v0.7 JAX).

    lr and ratio inside the momentum. Skipped leaves get flax's Momentum instead: lr OUTSIDE, no
    decay, no Nesterov.
    """
    buffers = {}

    def step(w, g, lr):
        new = {}
        for name in w:
            param = np.asarray(w[name], dtype=np.float64)
            grad = np.asarray(g[name], dtype=np.float64)

            if skipped(name):
                buffers[name] = momentum * buffers.get(name, 0.0) + grad
                new[name] = np.asarray(param - lr * buffers[name])
                continue

            param_norm = np.sqrt(np.sum(np.square(param)))
            grad_norm = np.sqrt(np.sum(np.square(grad)))
            ratio = 1.0
            if param_norm > 0 and grad_norm > 0:
                ratio = (
                    trust_coefficient * param_norm / (grad_norm + weight_decay * param_norm + eps)
                )

            s = lr * ratio * (grad + weight_decay * param)
            buffers[name] = momentum * buffers.get(name, 0.0) + s
            if nesterov:
                new[name] = np.asarray(param - (s + momentum * buffers[name]))
            else:
                new[name] = np.asarray(param - buffers[name])

        return new

    return step


def optax(
    *,
    weight_decay,
    momentum=0.9,
    trust_coefficient=0.001,
    eps=0.0,
    nesterov=False,
    decayed=lambda name: True,
    adapted=lambda name: True,
):
    """google-deepmind/optax `optax/_src/alias.py`.

    The norm is that of the decayed gradient, ||g + wd w||, and so is the zero test; lr and ratio
    inside the momentum. Two separate masks: `decayed` (weight_decay_mask) and `adapted`
    (trust_ratio_mask).
    """
    trace = {}

    def step(w, g, lr):
        new = {}
        for name in w:
            param = np.asarray(w[name], dtype=np.float64)
            update = np.asarray(g[name], dtype=np.float64)
            if decayed(name):
                update = update + weight_decay * param
            if adapted(name):
                param_norm = np.linalg.norm(np.ravel(param))
                update_norm = np.linalg.norm(np.ravel(update))
                if param_norm != 0 and update_norm != 0:
                    update = update * (trust_coefficient * param_norm / (update_norm + eps))
            update = lr * update
            trace[name] = update + momentum * trace.get(name, 0.0)
            if nesterov:
                update = update + momentum * trace[name]
            else:
                update = trace[name]
            new[name] = np.asarray(param - update)
        return new

    return step


def nus(
    *,
    weight_decay,
    momentum=0.9,
    trust_coefficient=0.001,
    eps=1e-5,
    clamp=10.0,
    max_ratio=50.0,
    skipped=lambda name: False,
):
    """NUS-HPC-AI-Lab/LARS-ImageNet-PyTorch `lars.py`.

    lr and ratio outside the momentum, ratio capped at 50, decayed gradient clamped to +-10
    elementwise. `skipped` leaves (the wd = 0 group): no decay, ratio 1, but the clamp hits them
    too.
    """
    vel = {}

    def step(w, g, lr):
        new = {}
        for name in w:
            p = np.asarray(w[name], dtype=np.float64)
            d = np.asarray(g[name], dtype=np.float64)
            ratio = 1.0
            if not skipped(name):
                p_norm = np.sqrt(np.sum(p * p))
                d_norm = np.sqrt(np.sum(d * d))
                if p_norm > 0 and d_norm > 0:
                    ratio = min(
                        trust_coefficient * p_norm / (d_norm + weight_decay * p_norm + eps),
                        max_ratio,
                    )
                d = d + weight_decay * p
            d = np.minimum(np.maximum(d, -clamp), clamp)
            vel[name] = momentum * vel.get(name, 0.0) + d
            new[name] = np.asarray(p - lr * ratio * vel[name])
        return new

    return step


def timm(
    *,
    weight_decay,
    momentum=0.9,
    trust_coefficient=0.001,
    eps=1e-8,
    dampening=0.0,
    nesterov=False,
    trust_clip=False,
    always_adapt=False,
    skipped=lambda name: False,
):
    """huggingface/pytorch-image-models@aa4b585 `timm/optim/lars.py`.

    Ratio inside the momentum, lr outside; the first buffer is the undamped direction. `skipped`
    leaves are the wd = 0 group: no ratio unless `always_adapt`. `trust_clip` (LARC) makes the ratio
    min(ratio / lr, 1).
    """
    buffer = {}

    def step(w, g, lr):
        new = {}
        for name in w:
            wd = 0.0 if skipped(name) else weight_decay
            p = np.asarray(w[name], dtype=np.float64)
            d = np.asarray(g[name], dtype=np.float64)

            if wd != 0 or always_adapt:
                w_norm = np.sqrt(np.square(p).sum())
                g_norm = np.sqrt(np.square(d).sum())
                ratio = 1.0
                if w_norm > 0 and g_norm > 0:
                    ratio = trust_coefficient * w_norm / (g_norm + wd * w_norm + eps)
                if trust_clip:
                    with np.errstate(divide="ignore"):
                        ratio = min(np.float64(ratio) / np.float64(lr), 1.0)
                d = ratio * (d + wd * p)

            if name in buffer:
                buffer[name] = momentum * buffer[name] + (1.0 - dampening) * d
            else:
                buffer[name] = np.array(d, dtype=np.float64)
            direction = d + momentum * buffer[name] if nesterov else buffer[name]

            new[name] = np.asarray(p - lr * direction)

        return new

    return step


def nvcaffe(*, weight_decay, momentum=0.9, trust_coefficient=0.001, eps=0.0, mode="clip"):
    """borisgin/nvcaffe-0.16 `src/caffe/solvers/sgd_solver.cpp`, `sgd_solver.cu` (no eps there).

    The denominator is ||g|| alone, before decay; nothing is skipped. `mode`: "clip" (the default,
    LARC) takes min(lr, ratio) as the local rate, "scale" (LARS) takes lr * ratio; the local rate is
    inside the momentum.
    """
    if mode not in ("clip", "scale"):
        raise ValueError(f"mode {mode!r}")
    history = {}

    def step(w, g, lr):
        new = {}
        for name in w:
            blob = np.asarray(w[name], dtype=np.float64)
            diff = np.asarray(g[name], dtype=np.float64)
            blob_norm = np.sqrt(np.sum(blob**2))
            diff_norm = np.sqrt(np.sum(diff**2))
            ratio = 1.0
            if blob_norm > 0 and diff_norm > 0:
                ratio = trust_coefficient * blob_norm / (diff_norm + eps)
            local_rate = min(lr, ratio) if mode == "clip" else lr * ratio
            history[name] = momentum * history.get(name, 0.0) + local_rate * (
                diff + weight_decay * blob
            )
            new[name] = np.asarray(blob - history[name])
        return new

    return step

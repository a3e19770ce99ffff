"""LAMB as its public sources compute it: float64 transcriptions of the sources' equations.

One function per source, sharing nothing, so that a slip stays in one. Each function returns
`step(w, g, lr)`: `w` and `g` are dicts from leaf name to float64 array (any rank, 0-d included),
`lr` is the learning rate of this step, and the result is a new dict of weights. Moments and the
step counter live in the closure; the weights are taken from the argument each time.

The commit and path of each source are those of the variant with the function's name in
`lbopt.transforms.VARIANTS["lamb"]`.
"""

import numpy as np


def paper(*, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.01, phi=None, skipped=lambda name: False):
    """arXiv 1904.00962v5, Algorithm 2. Debiased moments, decay inside the direction and its norm.

    `phi=(low, high)` clamps ||w||; the zero test looks at the clamped norm. `skipped` leaves: no
    decay, ratio 1.
    """
    m = {}
    v = {}
    t = 0

    def step(w, g, lr):
        nonlocal t
        t += 1

        new = {}
        for name in w:
            x = np.asarray(w[name], dtype=np.float64)
            dx = np.asarray(g[name], dtype=np.float64)
            m[name] = b1 * m.get(name, 0.0) + (1.0 - b1) * dx
            v[name] = b2 * v.get(name, 0.0) + (1.0 - b2) * dx**2
            m_hat = m[name] / (1.0 - b1**t)
            v_hat = v[name] / (1.0 - b2**t)
            u = m_hat / (np.sqrt(v_hat) + eps)

            ratio = 1.0
            if not skipped(name):
                u = u + weight_decay * x
                phi_w = np.sqrt(np.sum(x**2))
                if phi is not None:
                    low, high = phi
                    phi_w = min(max(phi_w, low), high)
                u_norm = np.sqrt(np.sum(u**2))
                if phi_w > 0 and u_norm > 0:
                    ratio = phi_w / u_norm

            new[name] = np.asarray(x - lr * ratio * u)

        return new

    return step


def optax(*, b1=0.9, b2=0.999, eps=1e-6, eps_root=0.0, weight_decay=0.0, decayed=lambda name: True):
    """google-deepmind/optax `optax/_src/alias.py`, `transform.py`.

    The mask (`decayed`) touches the decay only: the ratio is taken on all leaves. `eps_root` is
    inside the root.
    """
    mu = {}
    nu = {}
    count = 0

    def step(w, g, lr):
        nonlocal count
        count += 1
        new = {}
        for name, param in w.items():
            param = np.asarray(param, dtype=np.float64)
            grad = np.asarray(g[name], dtype=np.float64)
            mu[name] = (1 - b1) * grad + b1 * mu.get(name, 0.0)
            nu[name] = (1 - b2) * np.square(grad) + b2 * nu.get(name, 0.0)
            mu_hat = mu[name] / (1 - b1**count)
            nu_hat = nu[name] / (1 - b2**count)
            update = mu_hat / (np.sqrt(nu_hat + eps_root) + eps)
            if decayed(name):
                update = update + weight_decay * param
            param_norm = np.linalg.norm(np.ravel(param))
            update_norm = np.linalg.norm(np.ravel(update))
            trust = 1.0 if param_norm == 0 or update_norm == 0 else param_norm / update_norm
            new[name] = np.asarray(param - lr * trust * update)
        return new

    return step


def tfa(
    *,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    weight_decay=0.0,
    excluded_from_decay=lambda name: False,
    excluded_from_adaptation=None,
):
    """tensorflow/addons `optimizers/lamb.py`.

    An adaptation list that is not given copies the decay list; eps 0 becomes the backend's 1e-7.
    """
    epsilon = eps or 1e-7
    not_adapted = excluded_from_adaptation or excluded_from_decay
    first = {}
    second = {}
    iterations = 0

    def step(w, g, lr):
        nonlocal iterations
        iterations += 1

        new = {}
        for name in w:
            var = np.asarray(w[name], dtype=np.float64)
            grad = np.asarray(g[name], dtype=np.float64)
            first[name] = first.get(name, np.zeros_like(var)) * b1 + grad * (1.0 - b1)
            second[name] = second.get(name, np.zeros_like(var)) * b2 + grad * grad * (1.0 - b2)
            first_hat = first[name] / (1.0 - b1**iterations)
            second_hat = second[name] / (1.0 - b2**iterations)
            update = first_hat / (np.sqrt(second_hat) + epsilon)

            if not excluded_from_decay(name):
                update = update + weight_decay * var

            ratio = 1.0
            if not not_adapted(name):
                w_norm = np.sqrt((var * var).sum())
                u_norm = np.sqrt((update * update).sum())
                if w_norm > 0 and u_norm > 0:
                    ratio = w_norm / u_norm

            new[name] = np.asarray(var - ratio * lr * update)

        return new

    return step


def albert(
    *,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    weight_decay=0.01,
    max_grad_norm=1.0,
    excluded=lambda name: any(part in name for part in ("LayerNorm", "layer_norm", "bias")),
):
    """google-research/albert@6ca4dfd `lamb_optimizer.py`, `optimization.py`.

    No debias; global-norm clip outside the optimizer; one list switches off the decay and the
    ratio.
    """
    m = {}
    v = {}

    def step(w, g, lr):
        divisor = 1.0
        if max_grad_norm is not None:
            total = sum(float(np.sum(np.asarray(one, dtype=np.float64) ** 2)) for one in g.values())
            divisor = max(1.0, np.sqrt(total) / max_grad_norm)

        new = {}
        for name in w:
            x = np.asarray(w[name], dtype=np.float64)
            grad = np.asarray(g[name], dtype=np.float64) / divisor
            m[name] = b1 * m.get(name, 0.0) + (1.0 - b1) * grad
            v[name] = b2 * v.get(name, 0.0) + (1.0 - b2) * grad * grad
            update = m[name] / (np.sqrt(v[name]) + eps)

            ratio = 1.0
            if not excluded(name):
                update = update + weight_decay * x
                w_norm = np.linalg.norm(x.reshape(-1))
                u_norm = np.linalg.norm(np.asarray(update).reshape(-1))
                if w_norm > 0 and u_norm > 0:
                    ratio = w_norm / u_norm

            new[name] = np.asarray(x - lr * ratio * update)

        return new

    return step


def you_rn50(
    *,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    weight_decay=1.5,
    max_grad_norm=1.0,
    excluded=lambda name: any(
        part in name for part in ("batch_normalization", "LayerNorm", "layer_norm")
    ),
):
    """fastalgo/imagenet_resnet50_lamb `optimization.py`.

    No debias; the ratio sits inside the decay branch, so weight_decay 0 leaves Adam; biases are
    decayed.
    """
    m = {}
    v = {}

    def step(w, g, lr):
        scale = 1.0
        if max_grad_norm is not None:
            global_norm = np.sqrt(
                sum(np.square(np.asarray(d, dtype=np.float64)).sum() for d in g.values())
            )
            scale = max_grad_norm / max(global_norm, max_grad_norm)

        new = {}
        for name in w:
            x = np.asarray(w[name], dtype=np.float64)
            d = scale * np.asarray(g[name], dtype=np.float64)
            m[name] = b1 * m.get(name, 0.0) + (1.0 - b1) * d
            v[name] = b2 * v.get(name, 0.0) + (1.0 - b2) * np.square(d)
            u = m[name] / (np.sqrt(v[name]) + eps)

            if weight_decay != 0 and not excluded(name):
                u = u + weight_decay * x
                norm_x = np.sqrt(np.square(x).sum())
                norm_u = np.sqrt(np.square(u).sum())
                if norm_x > 0 and norm_u > 0:
                    u = norm_x / norm_u * u

            new[name] = np.asarray(x - lr * u)

        return new

    return step


def you_mnist(
    *,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    weight_decay=0.01,
    max_grad_norm=1.0,
    excluded=lambda name: any(part in name for part in ("LayerNorm", "layer_norm", "bias")),
):
    """fastalgo/mnist_tpu `lamb/optimization.py`.

    No debias; the ratio sits outside the decay branch, so every variable is adapted, the excluded
    ones too.
    """
    m = {}
    v = {}

    def step(w, g, lr):
        if max_grad_norm is None:
            shrink = 1.0
        else:
            squares = [np.sum(np.asarray(leaf, dtype=np.float64) ** 2) for leaf in g.values()]
            shrink = 1.0 / max(1.0, np.sqrt(np.sum(squares)) / max_grad_norm)
        new = {}
        for name, value in w.items():
            value = np.asarray(value, dtype=np.float64)
            grad = np.asarray(g[name], dtype=np.float64) * shrink
            m[name] = m.get(name, 0.0) * b1 + grad * (1.0 - b1)
            v[name] = v.get(name, 0.0) * b2 + grad**2 * (1.0 - b2)
            direction = m[name] / (np.sqrt(v[name]) + eps)
            if not excluded(name):
                direction = direction + weight_decay * value
            value_norm = np.sqrt(np.sum(value**2))
            direction_norm = np.sqrt(np.sum(direction**2))
            ratio = value_norm / direction_norm if value_norm > 0 and direction_norm > 0 else 1.0
            new[name] = np.asarray(value - lr * ratio * direction)
        return new

    return step


def apex(
    *,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    weight_decay=0.01,
    max_grad_norm=1.0,
    no_decay=lambda name: False,
    adam_w_mode=True,
    grad_averaging=True,
    bias_correction=True,
):
    """NVIDIA/apex@6424da3 `optimizers/fused_lamb.py`, `csrc/multi_tensor_lamb.cu`.

    Clip inside, over all groups (max_grad_norm 0 zeroes the gradient, None is no clip); the ratio
    only where the group decays. adam_w_mode=False adds wd * w to the clipped gradient before the
    moments instead.
    """
    m = {}
    v = {}
    t = 0

    def step(w, g, lr):
        nonlocal t
        t += 1

        clip = 1.0
        if max_grad_norm is not None:
            g_norm = np.sqrt(sum(np.sum(np.asarray(d, dtype=np.float64) ** 2) for d in g.values()))
            if g_norm > max_grad_norm:
                with np.errstate(divide="ignore"):
                    clip = np.float64(g_norm) / np.float64(max_grad_norm)

        beta3 = 1.0 - b1 if grad_averaging else 1.0
        correction1 = 1.0 - b1**t if bias_correction else 1.0
        correction2 = 1.0 - b2**t if bias_correction else 1.0

        new = {}
        for name in w:
            decay = 0.0 if no_decay(name) else weight_decay
            p = np.asarray(w[name], dtype=np.float64)
            scaled = np.asarray(g[name], dtype=np.float64) / clip

            if not adam_w_mode:
                scaled = scaled + decay * p
            m[name] = b1 * m.get(name, 0.0) + beta3 * scaled
            v[name] = b2 * v.get(name, 0.0) + (1.0 - b2) * scaled * scaled
            u = (m[name] / correction1) / (np.sqrt(v[name] / correction2) + eps)

            if adam_w_mode:
                u = u + decay * p

            ratio = 1.0
            if decay != 0:
                p_norm = np.sqrt(np.sum(p * p))
                u_norm = np.sqrt(np.sum(u * u))
                if p_norm != 0 and u_norm != 0:
                    ratio = p_norm / u_norm

            new[name] = np.asarray(p - lr * ratio * u)

        return new

    return step


def nvlamb(
    *,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    weight_decay=0.01,
    max_grad_norm=1.0,
    no_decay=lambda name: False,
    adam_w_mode=True,
    grad_averaging=True,
    bias_correction=True,
):
    """NVIDIA/apex@6424da3 `optimizers/fused_lamb.py`, `csrc/multi_tensor_lamb.cu`: use_nvlamb=True.

    As the plain kernel (clip inside, over all groups; 0 zeroes the gradient, None is no clip), but
    every leaf is adapted, whether its group decays or not.
    """
    exp_avg = {}
    exp_avg_sq = {}
    steps = 0

    def step(w, g, lr):
        nonlocal steps
        steps += 1

        all_gradients = [np.ravel(np.asarray(d, dtype=np.float64)) for d in g.values()]
        overall = np.linalg.norm(np.concatenate(all_gradients))
        too_long = max_grad_norm is not None and overall > max_grad_norm

        new = {}
        for name, p in w.items():
            p = np.asarray(p, dtype=np.float64)
            wd = weight_decay * (not no_decay(name))
            d = np.asarray(g[name], dtype=np.float64)

            if too_long:
                d = d * (max_grad_norm / overall)
            if not adam_w_mode:
                d = d + wd * p
            if grad_averaging:
                exp_avg[name] = b1 * exp_avg.get(name, 0.0) + (1 - b1) * d
            else:
                exp_avg[name] = b1 * exp_avg.get(name, 0.0) + d
            exp_avg_sq[name] = b2 * exp_avg_sq.get(name, 0.0) + (1 - b2) * np.square(d)

            mean = exp_avg[name]
            square = exp_avg_sq[name]
            if bias_correction:
                mean = mean / (1 - b1**steps)
                square = square / (1 - b2**steps)
            u = mean / (np.sqrt(square) + eps)

            if adam_w_mode:
                u = u + wd * p

            norm_p = np.linalg.norm(np.ravel(p))
            norm_u = np.linalg.norm(np.ravel(u))
            if norm_p > 0 and norm_u > 0:
                u = u * (norm_p / norm_u)

            new[name] = np.asarray(p - lr * u)

        return new

    return step


def timm(
    *,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    weight_decay=0.01,
    max_grad_norm=1.0,
    no_decay=lambda name: False,
    trust_clip=False,
    always_adapt=False,
    decoupled_decay=False,
    bias_correction=True,
):
    """huggingface/pytorch-image-models@aa4b585 `timm/optim/lamb.py`.

    Clip inside (None disables); the ratio only where the group decays, or `always_adapt`;
    `trust_clip` caps it at 1. `decoupled_decay` shrinks w by lr * wd before the norms and leaves wd
    out of the direction.
    """
    m = {}
    v = {}
    t = 0

    def step(w, g, lr):
        nonlocal t
        t += 1

        divide_by = 1.0
        if max_grad_norm is not None:
            norm = np.sqrt(
                sum(np.square(np.asarray(d, dtype=np.float64)).sum() for d in g.values())
            )
            divide_by = max(norm / max_grad_norm, 1.0)

        new = {}
        for name in w:
            wd = 0.0 if no_decay(name) else weight_decay
            p = np.asarray(w[name], dtype=np.float64)
            grad = np.asarray(g[name], dtype=np.float64) / divide_by
            m[name] = b1 * m.get(name, 0.0) + (1.0 - b1) * grad
            v[name] = b2 * v.get(name, 0.0) + (1.0 - b2) * np.square(grad)

            if bias_correction:
                denominator = np.sqrt(v[name]) / np.sqrt(1.0 - b2**t) + eps
                update = (m[name] / (1.0 - b1**t)) / denominator
            else:
                update = m[name] / (np.sqrt(v[name]) + eps)

            if wd != 0:
                if decoupled_decay:
                    p = p - lr * wd * p
                else:
                    update = update + wd * p

            if wd != 0 or always_adapt:
                w_norm = np.sqrt(np.sum(np.square(p)))
                u_norm = np.sqrt(np.sum(np.square(update)))
                trust = w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0
                if trust_clip:
                    trust = min(trust, 1.0)
                update = trust * update

            new[name] = np.asarray(p - lr * update)

        return new

    return step


def nus(
    *,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    weight_decay=0.0,
    max_grad_norm=1.0,
    clip_eps=1e-6,
    no_decay=lambda name: any(part in name for part in ("bn", "ln", "bias")),
    bias_correction=False,
):
    """NUS-HPC-AI-Lab/pytorch-lamb `optim/lamb.py`.

    PyTorch's clip inside, factor min(1, c / (G + 1e-6)); the ratio only where the group decays.
    With `bias_correction` the state itself is divided at each step and carried on so (the source's
    bug).
    """
    m = {}
    v = {}
    t = 0

    def step(w, g, lr):
        nonlocal t
        t += 1

        factor = 1.0
        if max_grad_norm is not None:
            g_norm = np.sqrt(sum(np.sum(np.asarray(d, dtype=np.float64) ** 2) for d in g.values()))
            factor = min(1.0, max_grad_norm / (g_norm + clip_eps))

        new = {}
        for name in w:
            group_decay = 0.0 if no_decay(name) else weight_decay
            p = np.asarray(w[name], dtype=np.float64)
            d = factor * np.asarray(g[name], dtype=np.float64)
            m[name] = b1 * m.get(name, 0.0) + (1.0 - b1) * d
            v[name] = b2 * v.get(name, 0.0) + (1.0 - b2) * d**2

            if bias_correction:
                m[name] = m[name] / (1.0 - b1**t)
                v[name] = v[name] / (1.0 - b2**t)
            u = m[name] / (np.sqrt(v[name]) + eps)

            ratio = 1.0
            if group_decay != 0:
                u = u + group_decay * p
                p_norm = np.sqrt(np.sum(p**2))
                u_norm = np.sqrt(np.sum(u**2))
                if p_norm > 0 and u_norm > 0:
                    ratio = p_norm / u_norm

            new[name] = np.asarray(p - lr * ratio * u)

        return new

    return step


def cybertron(*, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.0, max_norm=10.0, adam=False):
    """cybertronai/pytorch-lamb `pytorch_lamb/lamb.py`.

    The paper's first version: no debias, no clip, ||w|| clamped to [0, 10], every leaf decayed and
    adapted. `adam` forces the ratio to 1.
    """
    m = {}
    v = {}

    def step(w, g, lr):
        new = {}
        for name in w:
            p = np.asarray(w[name], dtype=np.float64)
            d = np.asarray(g[name], dtype=np.float64)
            m[name] = m.get(name, 0.0) * b1 + (1.0 - b1) * d
            v[name] = v.get(name, 0.0) * b2 + (1.0 - b2) * d * d
            adam_step = m[name] / (np.sqrt(v[name]) + eps)
            if weight_decay != 0:
                adam_step = adam_step + weight_decay * p
            weight_norm = min(np.sqrt(np.sum(p * p)), max_norm)
            adam_norm = np.sqrt(np.sum(adam_step * adam_step))
            if adam or weight_norm == 0 or adam_norm == 0:
                ratio = 1.0
            else:
                ratio = weight_norm / adam_norm
            new[name] = np.asarray(p - lr * ratio * adam_step)
        return new

    return step


def mlperf_tf(
    *,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    weight_decay=0.0166629,
    max_grad_norm=1.0,
    excluded=lambda name: any(part in name for part in ("LayerNorm", "layer_norm", "bias")),
):
    """mlcommons/training_results_v0.7 `bert-research-TF-tpu-v3-8192/lamb_optimizer.py`.

    Debiased; one list switches off decay and ratio; norms per slice of the first axis where a leaf
    of rank 2 or more has 24 of them (stacked layers). The clip is on local gradients; here there is
    one replica.
    """
    m = {}
    v = {}
    t = 0

    def step(w, g, lr):
        nonlocal t
        t += 1

        shrink = 1.0
        if max_grad_norm is not None:
            norm = np.sqrt(sum(np.sum(np.asarray(d, dtype=np.float64) ** 2) for d in g.values()))
            shrink = max(1.0, norm / max_grad_norm)

        new = {}
        for name in w:
            var = np.asarray(w[name], dtype=np.float64)
            grad = np.asarray(g[name], dtype=np.float64) / shrink
            m[name] = b1 * m.get(name, 0.0) + (1.0 - b1) * grad
            v[name] = b2 * v.get(name, 0.0) + (1.0 - b2) * grad**2
            update = (m[name] / (1.0 - b1**t)) / (np.sqrt(v[name] / (1.0 - b2**t)) + eps)

            if not excluded(name):
                update = update + weight_decay * var
                if var.ndim > 1 and var.shape[0] == 24:
                    inner = tuple(range(1, var.ndim))
                    w_norm = np.sqrt(np.sum(var**2, axis=inner, keepdims=True))
                    u_norm = np.sqrt(np.sum(update**2, axis=inner, keepdims=True))
                    both = (w_norm > 0) & (u_norm > 0)
                    ratio = np.where(both, w_norm / np.where(both, u_norm, 1.0), 1.0)
                else:
                    w_norm = np.sqrt(np.sum(var**2))
                    u_norm = np.sqrt(np.sum(update**2))
                    ratio = w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0
                update = ratio * update

            new[name] = np.asarray(var - lr * update)

        return new

    return step


def mlperf_jax(
    *,
    b1=0.9,
    b2=0.999,
    eps=1e-6,
    weight_decay=0.0166629,
    max_grad_norm=1.0,
    excluded=lambda name: any(part in name for part in ("layer_norm", "layernorm", "bias")),
):
    """mlcommons/training_results_v0.7 `bert-research-JAX-tpu-v3-8192/bert_lamb.py`.

    Debiased; the list switches off the decay only, every leaf is adapted; norms per slice of the
    first axis where a leaf of rank 2 or more has 24 of them. The clip is on local gradients; here
    there is one replica.
    """
    grad_ema = {}
    grad_sq_ema = {}
    count = 0

    def step(w, g, lr):
        nonlocal count
        count += 1

        grads = {name: np.array(one, dtype=np.float64) for name, one in g.items()}
        if max_grad_norm is not None:
            length = np.sqrt(sum(np.square(one).sum() for one in grads.values()))
            if length > max_grad_norm:
                grads = {name: one * max_grad_norm / length for name, one in grads.items()}

        new = {}
        for name, param in w.items():
            param = np.asarray(param, dtype=np.float64)
            grad = grads[name]
            grad_ema[name] = (1 - b1) * grad + b1 * grad_ema.get(name, 0.0)
            grad_sq_ema[name] = (1 - b2) * grad * grad + b2 * grad_sq_ema.get(name, 0.0)

            update = (
                grad_ema[name]
                / (1 - b1**count)
                / (np.sqrt(grad_sq_ema[name] / (1 - b2**count)) + eps)
            )
            if not excluded(name):
                update = update + weight_decay * param

            if param.ndim > 1 and param.shape[0] == 24:
                rows = [np.zeros_like(param[0])] * 24
                for i in range(24):
                    param_norm = np.linalg.norm(param[i].ravel())
                    update_norm = np.linalg.norm(update[i].ravel())
                    trust = param_norm / update_norm if param_norm > 0 and update_norm > 0 else 1.0
                    rows[i] = param[i] - lr * trust * update[i]
                new[name] = np.stack(rows)
            else:
                param_norm = np.linalg.norm(np.ravel(param))
                update_norm = np.linalg.norm(np.ravel(update))
                trust = param_norm / update_norm if param_norm > 0 and update_norm > 0 else 1.0
                new[name] = np.asarray(param - lr * trust * update)

        return new

    return step


def flax(*, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.0, no_decay=lambda name: False):
    """google/flax `flax/optim/lamb.py`, before commit cda7a4c8.

    Debiased, every leaf adapted. The ratio is ||w||/||u|| unless BOTH norms are 0: a zero w has
    ratio 0 and never moves, a non-zero w with u = 0 becomes inf * 0 = NaN.
    """
    m = {}
    v = {}
    t = 0

    def step(w, g, lr):
        nonlocal t
        t += 1
        new = {}
        for name in w:
            param = np.asarray(w[name], dtype=np.float64)
            grad = np.asarray(g[name], dtype=np.float64)
            m[name] = b1 * m.get(name, 0.0) + (1.0 - b1) * grad
            v[name] = b2 * v.get(name, 0.0) + (1.0 - b2) * np.square(grad)
            update = (m[name] / (1.0 - b1**t)) / (np.sqrt(v[name] / (1.0 - b2**t)) + eps)
            if not no_decay(name):
                update = update + weight_decay * param
            param_norm = np.sqrt(np.sum(np.square(param)))
            update_norm = np.sqrt(np.sum(np.square(update)))
            with np.errstate(divide="ignore", invalid="ignore"):
                trust = np.divide(param_norm, update_norm) if param_norm + update_norm > 0 else 1.0
                new[name] = np.asarray(param - lr * (trust * update))
        return new

    return step


def lans(*, b1=0.9, b2=0.999, eps=1e-6, weight_decay=0.01, skipped=lambda name: False):
    """arXiv 2006.13484v2, Algorithm 2, with phi the identity.

    Each leaf's gradient is divided by its own norm; the step mixes a normalised momentum direction
    (weight b1) and a normalised gradient direction (1 - b1). `skipped` leaves: no decay, both
    ratios 1 (gradient still normalised).
    """
    m = {}
    v = {}
    t = 0

    def step(w, g, lr):
        nonlocal t
        t += 1

        new = {}
        for name in w:
            x = np.asarray(w[name], dtype=np.float64)
            d = np.asarray(g[name], dtype=np.float64)

            d_norm = np.linalg.norm(d.ravel())
            if d_norm > 0:
                d = d / d_norm

            m[name] = b1 * m.get(name, 0.0) + (1.0 - b1) * d
            v[name] = b2 * v.get(name, 0.0) + (1.0 - b2) * d * d
            root = np.sqrt(v[name] / (1.0 - b2**t)) + eps
            along_momentum = (m[name] / (1.0 - b1**t)) / root
            along_gradient = d / root

            momentum_ratio = gradient_ratio = 1.0
            if not skipped(name):
                along_momentum = along_momentum + weight_decay * x
                along_gradient = along_gradient + weight_decay * x
                x_norm = np.linalg.norm(x.ravel())
                momentum_norm = np.linalg.norm(np.ravel(along_momentum))
                gradient_norm = np.linalg.norm(np.ravel(along_gradient))
                if x_norm > 0 and momentum_norm > 0:
                    momentum_ratio = x_norm / momentum_norm
                if x_norm > 0 and gradient_norm > 0:
                    gradient_ratio = x_norm / gradient_norm

            mixed = (
                b1 * momentum_ratio * along_momentum + (1.0 - b1) * gradient_ratio * along_gradient
            )
            new[name] = np.asarray(x - lr * mixed)

        return new

    return step

"""Shampoo, PSGD-Kron and Muown in NumPy float64, each transcribed from its public code by itself.

The sources are used as those of `matrix_sources`. `ShampooBlock` and `KronLeaf` take one tensor's
gradient and return its direction, which the learning rate then multiplies: the sources keep one of
them for each matrix. Products, roots and state are in float64, where the codes use bf16 or fp32.
"""

import numpy as np
from matrix_sources import QUINTIC, Adam, Source


class WithAdam(Source):
    """The rest takes Adam: none of the three codes prescribes it."""

    def other(self, w, g, kept, rate, leaf):
        adam = kept.setdefault("adam", Adam(*self.options.get("rest", (0.9, 0.95, 1e-8))))
        return w - self.options.get("ratio", 1.0) * rate * adam(g)

    def own(self, *names):
        """Return the options of the method, without the names, which a source reads itself."""
        return {
            name: value
            for name, value in self.options.items()
            if name not in ("rest", "ratio", *names)
        }


def inverse_root(a, exponent, eps):
    """matrix_functions.py: matrix_inverse_root with the default EigenConfig."""
    values, vectors = np.linalg.eigh(a + eps * np.eye(len(a)))
    lowest = np.min(values)
    if lowest < eps:
        values = values - lowest + eps
    return vectors * values**-exponent @ vectors.T


class Graft:
    """adagrad_preconditioner_list.py and sgd_preconditioner_list.py.

    Args:
      kind: "sgd", "adagrad", "rmsprop" or "adam".
      b2: Decay of the squares; None takes the default of the kind.
      eps: What is added to the root of the squares.
    """

    def __init__(self, kind, b2=None, eps=1e-10):
        default = {"sgd": 1.0, "adagrad": 1.0, "rmsprop": 0.99, "adam": 0.999}[kind]
        self.kind = kind
        self.b2 = 1.0 if kind in ("sgd", "adagrad") else default if b2 is None else b2
        self.eps = eps
        self.t = 0
        self.v = 0.0

    def accumulate(self, g):
        self.t += 1
        self.v = self.b2 * self.v + (1 - self.b2 if self.b2 != 1 else 1.0) * g**2

    def __call__(self, g):
        if self.kind == "sgd":
            return g
        correction = 1 - self.b2**self.t if self.kind == "adam" and self.b2 < 1 else 1.0
        return g / (np.sqrt(self.v / correction) + self.eps)


class ShampooBlock:
    """facebookresearch/optimizers@f6066066: distributed_shampoo.py, shampoo_preconditioner_list.py.

    One block, neither merged nor split, with RootInvShampooPreconditionerConfig.

    Args:
      b1: Decay of the filtered gradient, betas[0]; 0 takes the gradient itself.
      b2: Decay of the factor matrices, betas[1]; 1 sums them.
      b3: beta3; None takes b1.
      eps: epsilon, added to the eigenvalues of each factor matrix.
      exponents: inverse_exponent_override[order], {axis: exponent}, where 0 leaves out the axis.
        {0: 0.5, 1: 0.0} is one-sided Shampoo. Other axes take 1 / (2 * order).
      every: precondition_frequency.
      start: start_preconditioning_step, counted from 1; None takes `every`.
      bias_correction: use_bias_correction.
      graft: None or the arguments of `Graft`, as ("adam", 0.999, 1e-8).
      momentum: ClassicMomentumConfig.momentum; 0 has none.
      dampening: ClassicMomentumConfig.dampening.
      nesterov: ClassicMomentumConfig.use_nesterov.
      trace_scaling: trace_scaling_exponent with use_trace_scaling; None has none.
    """

    def __init__(
        self,
        b1=0.9,
        b2=1.0,
        b3=None,
        eps=1e-12,
        exponents=None,
        every=1,
        start=None,
        bias_correction=True,
        graft=None,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
        trace_scaling=None,
    ):
        self.b1 = b1
        self.b2 = b2
        self.b3 = b1 if b3 is None else b3
        self.eps = eps
        self.exponents = exponents or {}
        self.every = every
        self.start = every if start is None else start
        self.bias_correction = bias_correction
        self.graft = None if graft is None else Graft(*graft)
        self.momentum = momentum
        self.dampening = dampening
        self.nesterov = nesterov
        self.trace_scaling = trace_scaling
        self.t = 0
        self.filtered = 0.0
        self.buffer = 0.0
        self.factors = {}
        self.roots = {}

    def exponent(self, axis, order):
        return self.exponents.get(axis, 1 / (2 * max(order, 1)))

    def update(self, g):
        """BaseShampooPreconditionerList.update_preconditioners."""
        weight = 1.0 if self.b2 == 1 else 1 - self.b2
        for axis in range(g.ndim):
            if self.exponent(axis, g.ndim) == 0:
                continue
            flat = np.moveaxis(g, axis, 0).reshape(g.shape[axis], -1)
            self.factors[axis] = self.b2 * self.factors.get(axis, 0.0) + weight * flat @ flat.T
            self.roots.setdefault(axis, np.eye(g.shape[axis]))
        if not ((self.t % self.every == 0 and self.t > self.start) or self.t == self.start):
            return

        correction = 1 - self.b2**self.t if self.bias_correction and self.b2 < 1 else 1.0
        for axis, factor in self.factors.items():
            corrected = factor / correction
            if self.trace_scaling is not None:
                trace = max(np.trace(corrected), self.eps)
                corrected = corrected * trace**-self.trace_scaling
            self.roots[axis] = inverse_root(corrected, self.exponent(axis, g.ndim), self.eps)

    def filter(self, g):
        """DistributedShampoo._compute_filtered_grad_list."""
        if self.b1 == 0:
            return g
        now = self.b3 * self.filtered + (1 - self.b3) * g
        self.filtered = self.b1 * self.filtered + (1 - self.b1) * g
        return now / (1 - self.b3 * self.b1 ** (self.t - 1)) if self.bias_correction else now

    def precondition(self, g):
        """DistributedShampoo._precondition_and_grafting."""
        if self.graft is not None and self.t < self.start:
            return self.graft(g)
        p = g
        for axis, root in self.roots.items():
            p = np.moveaxis(np.tensordot(p, root, axes=(axis, 0)), -1, axis)
        if self.graft is not None:
            p = p * (np.linalg.norm(self.graft(g)) / (np.linalg.norm(p) + 1e-16))
        return p

    def __call__(self, g, decay=0.0):
        """Return the direction, with `decay`, as weight decay times weights, inside momentum."""
        self.t += 1
        self.update(g)
        if self.graft is not None:
            self.graft.accumulate(g)
        p = self.precondition(self.filter(g)) + decay
        if self.momentum == 0:
            return p
        self.buffer = self.momentum * self.buffer + (1 - self.dampening) * p
        if self.nesterov:
            return (1 - self.dampening) * p + self.momentum * self.buffer
        return self.buffer


class Shampoo(WithAdam):
    """facebookresearch/optimizers@f6066066: distributed_shampoo/distributed_shampoo.py.

    Takes the arguments of `ShampooBlock`, whose axis 0 is the outputs, as torch has it;
    `weight_decay`; and `l2=True` for WeightDecayType.L2 in place of DECOUPLED.
    """

    def matrix(self, w, g, kept, rate):
        if "block" not in kept:
            kept["block"] = ShampooBlock(**self.own("weight_decay", "l2"))
        decay = self.options.get("weight_decay", 0.0) * w
        if self.options.get("l2", False):
            return w - rate * kept["block"](g + decay)
        return w - rate * kept["block"](g, decay)


class ShampooShorter(Shampoo):
    """`Shampoo` with the inverse square root of the factor of each matrix's shorter side alone."""

    def matrix(self, w, g, kept, rate):
        shorter = int(g.shape[1] < g.shape[0])
        self.options["exponents"] = {shorter: 0.5, 1 - shorter: 0.0}
        return super().matrix(w, g, kept, rate)


def kron_probability(n, max_prob=1.0, min_prob=0.03, decay=0.001, flat_start=500):
    """kron.py: precond_update_prob_schedule, at the step n, counted from 1."""
    return min(max(max_prob * np.exp(-decay * (n - flat_start)), min_prob), max_prob)


def kron_updates(steps, probability=kron_probability):
    """Return whether each step, counted from 0, updates the preconditioner."""
    found = []
    waited = 0
    for n in range(1, steps + 1):
        waited += 1
        found.append(bool(waited >= 1 / probability(n)))
        waited = 0 if found[-1] else waited
    return found


def norm_lower_bound(a):
    """kron.py: _norm_lower_bound."""
    largest = np.max(np.abs(a))
    if not largest > 0:
        return largest
    a = a / largest
    columns = np.sum(a * a, axis=0)
    rows = np.sum(a * a, axis=1)
    i = np.argmax(columns)
    j = np.argmax(rows)
    if columns[i] > rows[j]:
        x = a[:, i] @ a
        return largest * np.linalg.norm((x / np.linalg.norm(x)) @ a.T)
    x = a @ a[j]
    return largest * np.linalg.norm(a.T @ (x / np.linalg.norm(x)))


class KronLeaf:
    """evanatyourservice/psgd_jax@be955244: psgd_jax/kron.py, scale_by_kron.

    One vector or one matrix, in the order of Flax: [in, out].

    Args:
      b1: Decay of the momentum; 0 has none.
      precond_lr: preconditioner_lr.
      init_scale: preconditioner_init_scale.
      max_size: max_size_triangular; a longer axis has a diagonal factor.
      min_ndim: min_ndim_triangular.
      memory: memory_save_mode, None, "one_diag" or "all_diag".
      momentum_into_update: momentum_into_precond_update.
    """

    def __init__(
        self,
        b1=0.9,
        precond_lr=0.1,
        init_scale=1.0,
        max_size=8192,
        min_ndim=2,
        memory=None,
        momentum_into_update=True,
    ):
        self.b1 = b1
        self.precond_lr = precond_lr
        self.init_scale = init_scale
        self.max_size = max_size
        self.min_ndim = min_ndim
        self.memory = memory
        self.momentum_into_update = momentum_into_update
        self.t = 0
        self.mu = 0.0
        self.q = None

    def first_q(self, shape):
        """_init_Q_exprs: upper triangular matrices, or vectors for diagonal ones."""
        scale = self.init_scale ** (1 / len(shape))
        saved = {None: [], "all_diag": range(len(shape)), "one_diag": [np.argsort(shape)[-1]]}
        q = []
        for axis, size in enumerate(shape):
            diagonal = size == 1 or size > self.max_size or len(shape) < self.min_ndim
            diagonal = diagonal or axis in saved[self.memory]
            q.append(scale * (np.ones(size) if diagonal else np.eye(size)))
        return q

    def update(self, g, v, balance):
        """Move the factors; `g` is not damped yet, and `v` is normal noise of its shape."""
        if balance and len(self.q) > 1:
            norms = [np.max(np.abs(q)) for q in self.q]
            mean = np.prod(norms) ** (1 / len(norms))
            self.q = [q * (mean / norm) for q, norm in zip(self.q, norms, strict=True)]

        eps = np.float64(np.sqrt(np.finfo(np.float32).eps))
        g = g + eps * np.mean(np.abs(g)) * v
        whole = [np.diag(q) if q.ndim < 2 else q for q in self.q]
        if g.ndim == 1:
            a = whole[0] @ g
            b = np.linalg.solve(whole[0].T, v)
        else:
            left, right = whole
            a = left @ g @ right.T
            b = np.linalg.solve(right.T, np.linalg.solve(left.T, v).T).T

        moved = []
        for axis, q in enumerate(self.q):
            of_a, of_b = (np.moveaxis(x, axis, 0).reshape(len(q), -1) for x in (a, b))
            first = of_a @ of_a.T
            second = of_b @ of_b.T
            tiny = np.finfo(np.float64).tiny
            if q.ndim < 2:
                first = np.diag(first)
                second = np.diag(second)
                size = np.max(np.abs(first + second)) + tiny
                moved.append(q - self.precond_lr * (first - second) * q / size)
            else:
                size = norm_lower_bound(first + second) + tiny
                moved.append(q - np.triu(self.precond_lr * (first - second)) / size @ q)
        self.q = moved

    def __call__(self, g, v, update=True, balance=False):
        """Return the direction, clipped; `v` is read only in an update, `balance` before it."""
        if self.q is None:
            self.q = self.first_q(g.shape)
        self.t += 1
        m = g
        if self.b1 > 0:
            self.mu = (1 - self.b1) * g + self.b1 * self.mu
            m = self.mu / (1 - self.b1**self.t)
        if update:
            self.update(m if self.momentum_into_update else g, v, balance)

        p = m
        for axis, q in enumerate(self.q):
            square = np.diag(q * q) if q.ndim < 2 else q.T @ q
            p = np.moveaxis(np.tensordot(square, p, axes=(1, axis)), 0, axis)
        return p / max(1.0, np.sqrt(np.mean(p * p)) / 1.1)


class PsgdKron(WithAdam):
    """evanatyourservice/psgd_jax@be955244: psgd_jax/kron.py, kron.

    Takes the arguments of `KronLeaf`; `noise(name, step)`, which gives normal noise of the leaf's
    shape; `updates(step)` and `balances(step)`, which say what the step, counted from 0, does; and
    `weight_decay`. Each matrix is damped and clipped by itself; a scanned leaf of the code is as a
    whole.
    """

    def step(self, weights, gradients, rate):
        self.count = self.__dict__.get("count", -1) + 1
        for name, leaf in self.leaves.items():
            if leaf.kind == "matrix":
                noise = leaf.matrices(self.options["noise"](name, self.count))
                kept = self.kept.setdefault(name, [{} for _ in noise])
                for one, v in zip(kept, noise, strict=True):
                    one["v"] = v
        return super().step(weights, gradients, rate)

    def matrix(self, w, g, kept, rate):
        if "kron" not in kept:
            kept["kron"] = KronLeaf(**self.own("noise", "updates", "balances", "weight_decay"))
        update = self.options.get("updates", lambda step: kron_updates(step + 1)[-1])(self.count)
        balance = self.options.get("balances", lambda step: False)(self.count)
        direction = kept["kron"](g.T, kept["v"].T, update, balance).T
        return w - rate * (direction + self.options.get("weight_decay", 0.0) * w)


class Muown(WithAdam):
    """NVIDIA-NeMo/Emerging-Optimizers@fd772926: emerging_optimizers/contrib/muown.py.

    Takes `momentum`, `betas` and `eps` of the magnitude's Adam, `weight_decay`, `coefficients` and
    `factor`, the extra_scale_factor.
    """

    def orthogonalized(self, m):
        """muon.py and muon_utils.py: newton_schulz with the scale of the mode "spectral"."""
        rows, columns = m.shape
        x = m.T if rows > columns else m
        x = x / max(np.linalg.norm(x), 1e-15)
        for a, b, c in self.options.get("coefficients", QUINTIC):
            gram = x @ x.T
            x = a * x + (b * gram + c * gram @ gram) @ x
        x = x.T if rows > columns else x
        return x * max(rows, columns) ** 0.5 * self.options.get("factor", 1.0)

    def matrix(self, w, g, kept, rate):
        momentum = self.options.get("momentum", 0.95)
        if "adam" not in kept:
            norms = np.maximum(np.linalg.norm(w, axis=1, keepdims=True), 1e-12)
            betas = self.options.get("betas", (0.9, 0.95))
            adam = Adam(*betas, self.options.get("eps", 1e-8))
            kept.update(adam=adam, size=norms, norms=norms, m=0.0)
        size = kept["size"]
        unit = w / size
        of_size = np.sum(g * unit, axis=1, keepdims=True)
        of_way = size / kept["norms"] * (g - unit * of_size)

        kept["m"] = momentum * kept["m"] + (1 - momentum) * of_way
        way = unit * kept["norms"] - rate * self.orthogonalized(kept["m"])
        size = size - rate * kept["adam"](of_size)
        kept["size"] = size * (1 - rate * self.options.get("weight_decay", 0.0))
        kept["norms"] = np.linalg.norm(way, axis=1, keepdims=True)
        return kept["size"] * (way / kept["norms"])

"""Matrix optimizers in NumPy float64, transcribed from their public codes.

Codes that are Keller Jordan's with changes are classes of his.

A source is a class with `step(weights, gradients, rate)`: named leaves in, named leaves out. A leaf
is a `Leaf`, which says how the public code would see it: as matrices [out, in], a head, an
embedding, or a vector. Products are in float64, where the codes use bf16 or fp32.
"""

import dataclasses

import numpy as np

SIMPLE = [(3.4445, -4.7750, 2.0315)] * 5
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]
POLAR = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


@dataclasses.dataclass
class Leaf:
    """A leaf of the test model.

    Attributes:
      shape: Its shape in Flax's order.
      kind: "matrix", "head", "embedding" or "vector".
      layers: Number of layers, if axis 0 counts them, else 0.
      inputs: Number of axes of one layer that are reduced.
    """

    shape: tuple
    kind: str
    layers: int = 0
    inputs: int = 1

    def matrices(self, x):
        """Return a list of [out, in]."""
        ones = list(x) if self.layers else [x]
        return [one.reshape(int(np.prod(one.shape[: self.inputs])), -1).T for one in ones]

    def joined(self, matrices):
        one = self.shape[1:] if self.layers else self.shape
        parts = [m.T.reshape(one) for m in matrices]
        return np.stack(parts) if self.layers else parts[0]


def zeropower(g, coefficients, eps, factor=1.0):
    x = g.T if g.shape[0] > g.shape[1] else g
    below = factor * np.linalg.norm(x) + eps
    x = x / below if below > 0 else x
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def unit(x):
    norm = np.linalg.norm(x)
    return x / norm if norm > 0 else 0 * x


class Adam:
    """Adam's direction with bias correction: m' / (sqrt(v') + eps)."""

    def __init__(self, b1, b2, eps):
        self.b1 = b1
        self.b2 = b2
        self.eps = eps
        self.t = 0
        self.m = 0.0
        self.v = 0.0

    def __call__(self, g):
        self.t += 1
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        first = self.m / (1 - self.b1**self.t)
        second = self.v / (1 - self.b2**self.t)
        return first / (np.sqrt(second) + self.eps)


class Source:
    """Keeps what each leaf needs; a subclass says what a matrix and another leaf do."""

    def __init__(self, leaves, **options):
        self.leaves = leaves
        self.options = options
        self.kept = {}

    def step(self, weights, gradients, rate):
        moved = {}
        for name, leaf in self.leaves.items():
            w = weights[name]
            g = gradients[name]
            if leaf.kind == "matrix":
                kept = self.kept.setdefault(name, [{} for _ in leaf.matrices(w)])
                pairs = zip(leaf.matrices(w), leaf.matrices(g), kept, strict=True)
                moved[name] = leaf.joined([self.matrix(*one, rate) for one in pairs])
            else:
                moved[name] = self.other(w, g, self.kept.setdefault(name, {}), rate, leaf)
        return moved


class Keller(Source):
    """KellerJordan/Muon: muon_update, SingleDeviceMuonWithAuxAdam."""

    betas = (0.9, 0.95)
    ratio = 0.015
    coefficients = SIMPLE

    def direction(self, g, kept):
        m = kept["m"] = 0.95 * kept.get("m", 0) + 0.05 * g
        return zeropower(0.05 * g + 0.95 * m, self.coefficients, 1e-7)

    def matrix(self, w, g, kept, rate):
        update = self.direction(g, kept) * max(1, g.shape[0] / g.shape[1]) ** 0.5
        return w * (1 - rate * self.options.get("wd", 0)) - rate * update

    def other(self, w, g, kept, rate, leaf):
        adam = kept.setdefault("adam", Adam(*self.betas, 1e-10))
        return w - self.ratio * rate * adam(g)


class Moonlight(Source):
    """MoonshotAI/Moonlight: examples/toy_train.py."""

    def matrix(self, w, g, kept, rate):
        buffer = kept["m"] = 0.95 * kept.get("m", 0) + g
        update = zeropower(g + 0.95 * buffer, SIMPLE, 1e-7)
        return w * (1 - rate * 0.1) - rate * 0.2 * np.sqrt(max(w.shape)) * update

    def other(self, w, g, kept, rate, leaf):
        step = kept["t"] = kept.get("t", 0) + 1
        m = kept["m"] = 0.9 * kept.get("m", 0) + 0.1 * g
        v = kept["v"] = 0.95 * kept.get("v", 0) + 0.05 * g**2
        scale = (1 - 0.9**step) / (1 - 0.95**step) ** 0.5
        return w * (1 - rate * 0.1) - rate / scale * m / (1e-8 + np.sqrt(v))


class Polar(Source):
    """microsoft/dion: dion/muon.py with its default Polar Express."""

    def matrix(self, w, g, kept, rate):
        m = kept["m"] = 0.95 * kept.get("m", 0) + g
        update = zeropower(m, POLAR, 1e-8, 1.02)
        return w * (1 - rate * 0.01) - rate * np.sqrt(w.shape[0] / w.shape[1]) * update

    def other(self, w, g, kept, rate, leaf):
        adam = kept.setdefault("adam", Adam(0.9, 0.95, 1e-8))
        return w * (1 - rate * 0.01) - rate * adam(g)


class NorMuon(Keller):
    """zichongli5/NorMuon: normuon_update."""

    def direction(self, g, kept):
        update = super().direction(g, kept)
        norm = np.linalg.norm(update)
        mean = np.mean(update * update, axis=-1, keepdims=True)
        v = kept["v"] = 0.95 * kept.get("v", 0) + 0.05 * mean
        update = update / (np.sqrt(v) + 1e-10)
        return update * (norm / (np.linalg.norm(update) + 1e-10))


def scale_invariant(w, update, rate):
    """Return the step of MuonH and AdamH, which ends on the sphere that it starts from."""
    size = np.linalg.norm(w)
    new = w - rate * update * size / max(np.linalg.norm(update), 1e-10)
    return new / np.linalg.norm(new) * size


class MuonHMarin(Source):
    """marin-community/marin: levanter/optim/muonh.py and adamh.py.

    Without `clip`, the gradients of each of the three groups are not clipped to norm 1.
    """

    def step(self, weights, gradients, rate):
        if self.options.get("clip"):
            gradients = dict(gradients)
            for kinds in ({"matrix"}, {"head"}, {"embedding", "vector"}):
                names = [name for name, leaf in self.leaves.items() if leaf.kind in kinds]
                norm = np.sqrt(sum(np.sum(gradients[name] ** 2) for name in names))
                gradients.update({name: gradients[name] / max(norm, 1.0) for name in names})
        return super().step(weights, gradients, rate)

    def matrix(self, w, g, kept, rate):
        buffer = kept["m"] = 0.95 * kept.get("m", 0) + g
        return scale_invariant(w, zeropower(0.95 * buffer + g, QUINTIC, 1e-8), rate)

    def other(self, w, g, kept, rate, leaf):
        adam = kept.setdefault("adam", Adam(0.9, 0.95, 1e-8))
        if leaf.kind == "head":
            return scale_invariant(w, adam(g), rate)
        return w - self.options["ratio"] * rate * adam(g)


class MuonHModded(Keller):
    """KellerJordan/modded-nanogpt: track 3, 20260430_muonh."""

    betas = (0.8, 0.95)
    ratio = 0.5556
    coefficients = [(2, -1.5, 0.5)] * 12

    def matrix(self, w, g, kept, rate):
        return scale_invariant(w, self.direction(g, kept), rate)


class AdamHMarin(Source):
    """marin-community/marin: levanter/optim/adamh.py, without the clip."""

    def matrix(self, w, g, kept, rate):
        adam = kept.setdefault("adam", Adam(0.9, 0.95, 1e-8))
        return scale_invariant(w, adam(g), rate)

    def other(self, w, g, kept, rate, leaf):
        adam = kept.setdefault("adam", Adam(0.9, 0.95, 1e-8))
        if leaf.kind == "head":
            return scale_invariant(w, adam(g), rate)
        return w - self.options["ratio"] * rate * adam(g)


class ScionNvidia(Source):
    """NVIDIA-NeMo/Emerging-Optimizers: scion.py; the rest as arXiv:2502.07529, the sign oracle."""

    def matrix(self, w, g, kept, rate):
        w = w - rate * w
        m = kept["m"] = 0.95 * kept.get("m", 0) + 0.05 * g
        update = zeropower(m, QUINTIC, 0.0) * (w.shape[0] / w.shape[1]) ** 0.5
        return w - rate * update * self.options["radius"]

    def other(self, w, g, kept, rate, leaf):
        m = kept["m"] = 0.95 * kept.get("m", 0) + 0.05 * g
        return (1 - rate) * w - rate * np.sign(m)


class SoapPaper(Source):
    """nikhilvyas/SOAP: soap.py; with `sphere`, its directions on a sphere.

    The code decays the weights after its step, and not in the first one: `wd`. With `wd_before`
    they decay before each step, as by AdamW.
    """

    def matrix(self, w, g, kept, rate):
        w = w * (1 - rate * self.options.get("wd_before", 0.0))
        if "Q" not in kept:
            kept.update(step=0, m=0 * g, v=0 * g, GG=[0.05 * g @ g.T, 0.05 * g.T @ g])
            kept["Q"] = [np.linalg.eigh(factor)[1][:, ::-1] for factor in kept["GG"]]
            return w
        left, right = kept["Q"]
        kept["step"] += 1
        projected = left.T @ g @ right
        kept["m"] = 0.95 * kept["m"] + 0.05 * projected
        kept["v"] = 0.95 * kept["v"] + 0.05 * projected**2
        size = rate * np.sqrt(1 - 0.95 ** kept["step"]) / (1 - 0.95 ** kept["step"])
        update = left @ (kept["m"] / (np.sqrt(kept["v"]) + 1e-8)) @ right.T
        sphere = self.options.get("sphere", False)
        w = scale_invariant(w, update, rate) if sphere else w - size * update
        w = w * (1 - rate * self.options.get("wd", 0.0))

        back = left @ kept["m"] @ right.T
        kept["GG"] = [
            0.95 * old + 0.05 * new for old, new in zip(kept["GG"], (g @ g.T, g.T @ g), strict=True)
        ]
        if kept["step"] % 10 == 0:
            turned = []
            for axis, (factor, basis) in enumerate(zip(kept["GG"], kept["Q"], strict=True)):
                order = np.argsort(-np.diag(basis.T @ factor @ basis), kind="stable")
                kept["v"] = np.take(kept["v"], order, axis)
                turned.append(np.linalg.qr(factor @ basis[:, order])[0])
            kept["Q"] = turned
        kept["m"] = kept["Q"][0].T @ back @ kept["Q"][1]
        return w

    def other(self, w, g, kept, rate, leaf):
        adam = kept.setdefault("adam", Adam(0.95, 0.95, 1e-8))
        return w - rate * adam(g)


class SoapKl(Source):
    """KellerJordan/modded-nanogpt: track 3, 20260511_klsoap_h_lr_power_decay.

    On its sphere, or without with `flat`.
    """

    def matrix(self, w, g, kept, rate):
        rows, columns = g.shape
        if "Q" not in kept:
            kept.update(m=0 * g, v=0 * g, GG=[g @ g.T / columns, g.T @ g / rows])
            kept["Q"] = [np.linalg.eigh(factor)[1][:, ::-1] for factor in kept["GG"]]
            kept["roots"] = [np.full(rows, 0.1**-0.5), np.full(columns, 0.1**-0.5)]
            return w
        left, right = kept["Q"]
        of_left, of_right = kept["roots"]
        projected = left.T @ g @ right
        kept["m"] = 0.95 * kept["m"] + 0.05 * projected
        kept["v"] = 0.9 * kept["v"] + 0.1 * projected**2
        update = left @ (kept["m"] / (np.sqrt(kept["v"]) + 1e-8)) @ right.T

        whitened = (right.T @ g.T) * of_right[:, None]
        other = (left.T @ g) * of_left[:, None]
        targets = whitened.T @ whitened / columns, other.T @ other / rows
        kept["GG"] = [0.9 * old + 0.1 * new for old, new in zip(kept["GG"], targets, strict=True)]
        diagonals = (
            np.mean((projected * of_right) ** 2, axis=1),
            np.mean((projected * of_left[:, None]) ** 2, axis=0),
        )
        kept["roots"] = [
            np.minimum(np.maximum(0.9 / root**2 + 0.1 * new, 1e-30) ** -0.5, 4000.0)
            for root, new in zip(kept["roots"], diagonals, strict=True)
        ]
        back = left @ kept["m"] @ right.T
        kept["Q"] = [
            np.linalg.qr(factor @ basis)[0]
            for factor, basis in zip(kept["GG"], kept["Q"], strict=True)
        ]
        kept["m"] = kept["Q"][0].T @ back @ kept["Q"][1]
        flat = self.options.get("flat", False)
        return w - rate * update if flat else scale_invariant(w, update, rate)

    def other(self, w, g, kept, rate, leaf):
        adam = kept.setdefault("adam", Adam(0.8, 0.95, 1e-10))
        ratio = 1 if self.options.get("flat", False) else 0.5556
        return w - ratio * rate * adam(g)


class DionSimple(Source):
    """microsoft/dion: dion_simple.py; a zero momentum as in dion_reference.py."""

    def step(self, weights, gradients, rate):
        # The first bases are random: the test gives them, by name.
        for name, bases in self.options["bases"].items():
            self.kept.setdefault(name, [{"Q": np.float64(q)} for q in bases])
        return super().step(weights, gradients, rate)

    def matrix(self, w, g, kept, rate):
        total = kept.get("M", 0) + g
        w = w * (1 - 0.01 * rate)
        if not np.any(total):
            kept["M"] = total
            return w
        p = np.linalg.qr(total @ kept["Q"])[0]
        r = total.T @ p
        kept["M"] = total - (1 - 0.95) * p @ r.T
        kept["Q"] = r / (np.linalg.norm(r, axis=0) + 1e-8)
        return w - rate * (w.shape[0] / w.shape[1]) ** 0.5 * p @ kept["Q"].T

    def other(self, w, g, kept, rate, leaf):
        adam = kept.setdefault("adam", Adam(0.9, 0.95, 1e-8))
        return w * (1 - 0.01 * rate) - rate * adam(g)


class MuLoCo(Keller):
    """KellerJordan/modded-nanogpt: track 3, 20260504_muloco_normuonh, its outer optimizer."""

    def step(self, weights, gradients, rate):
        outer = self.__dict__.setdefault("outer", {"start": weights, "u": {}, "count": 0})
        moved = super().step(weights, gradients, rate)
        outer["count"] += 1
        if outer["count"] < 7:
            return moved
        for name, p in moved.items():
            way = outer["start"][name] - p
            u = outer["u"][name] = 0.6 * outer["u"].get(name, 0) + 0.4 * way
            moved[name] = outer["start"][name] - 0.6 * u - 0.4 * way
        outer.update(start=moved, count=0)
        return moved

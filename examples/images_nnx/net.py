from flax import nnx


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.first = nnx.LayerNorm(width, rngs=rngs)
        self.attend = nnx.MultiHeadAttention(4, width, decode=False, rngs=rngs)
        self.second = nnx.LayerNorm(width, rngs=rngs)
        self.widen = nnx.Linear(width, 2 * width, rngs=rngs)
        self.narrow = nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x):
        x += self.attend(self.first(x))
        return x + self.narrow(nnx.gelu(self.widen(self.second(x))))


class VisionTransformer(nnx.Module):
    def __init__(self, outputs, rngs, width=48, blocks=2):
        self.patches = nnx.Conv(3, width, (2, 2), (2, 2), rngs=rngs)
        self.position = nnx.Param(0.02 * rngs.params.normal((16, width)))
        self.blocks = nnx.List([Block(width, rngs) for _ in range(blocks)])
        self.head = nnx.Linear(width, outputs, rngs=rngs)

    def __call__(self, image):
        x = self.patches(image).reshape(len(image), 16, -1) + self.position[...]
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))

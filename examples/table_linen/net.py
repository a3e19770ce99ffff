import flax.linen as nn


class Net(nn.Module):
    outputs: int
    width: int = 32

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Dense(self.width)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x)
        return nn.Dense(self.outputs)(x)

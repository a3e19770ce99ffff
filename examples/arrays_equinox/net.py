import equinox as eqx
import jax
import jax.numpy as jnp


class Net(eqx.Module):
    first: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, outputs, key, channels=16):
        one, two = jax.random.split(key)
        self.first = eqx.nn.Conv2d(1, channels, 3, padding=1, key=one)
        self.norm = eqx.nn.BatchNorm(channels, axis_name="batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.2)
        self.head = eqx.nn.Linear(16 * channels, outputs, key=two)

    def __call__(self, image, state, key):
        x, state = self.norm(self.first(jnp.moveaxis(image, -1, 0)), state)
        x = jax.nn.relu(x).reshape(-1, 4, 2, 4, 2).mean((2, 4))
        return self.head(self.dropout(x.ravel(), key=key)), state

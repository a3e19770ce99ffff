import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Net(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.LayerNorm()(nn.Dense(64)(x)))
        return nn.Dense(self.outputs)(x)


def focal(logits, batch, gamma=2.0):
    """Return the focal loss of each example, and the share of examples with a sure answer."""
    each = optax.losses.sigmoid_focal_loss(logits, batch["labels"].astype(jnp.float32), gamma=gamma)
    sure = jnp.all(jnp.abs(jax.nn.sigmoid(logits) - 0.5) > 0.4, -1)
    return each.mean(-1), {"sure": sure}


def signed(learning_rate, weight_decay, mask, decay=0.9):
    """Return an optimizer of our own: signs of the momentum, with decoupled weight decay."""
    return optax.chain(
        optax.ema(decay, debias=False),
        optax.scale_by_sign(),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )

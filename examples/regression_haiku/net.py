import haiku as hk
import jax


def make(outputs, width=32):
    def forward(x, is_training):
        for _ in range(2):
            x = jax.nn.relu(hk.LayerNorm(-1, True, True)(hk.Linear(width)(x)))
        if is_training:
            x = hk.dropout(hk.next_rng_key(), 0.1, x)
        return hk.Linear(outputs)(x)

    return hk.transform(forward)

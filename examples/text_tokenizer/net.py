import flax.linen as nn
import jax.numpy as jnp


class Transformer(nn.Module):
    vocab_size: int
    width: int = 64
    layers: int = 2

    @nn.compact
    def __call__(self, tokens, train):
        where = self.param("positions", nn.initializers.normal(0.02), (512, self.width))
        x = nn.Embed(self.vocab_size, self.width, name="embed")(tokens) + where[: tokens.shape[1]]
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x += nn.SelfAttention(4, deterministic=not train)(nn.LayerNorm()(x), mask)
            x += nn.Dense(self.width)(nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x))))
        return nn.Dense(self.vocab_size, name="head")(nn.LayerNorm()(x)).astype(jnp.float32)

"""The peers of `scripts/bench models`: plain Flax modules in bf16, not tuned for TPUs."""

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

EFFICIENTNET_STAGES = (  # kernel, stride, expansion, channels, repeats
    (3, 1, 1, 16, 1),
    (3, 2, 6, 24, 2),
    (5, 2, 6, 40, 2),
    (3, 2, 6, 80, 3),
    (5, 1, 6, 112, 3),
    (5, 2, 6, 192, 4),
    (3, 1, 6, 320, 1),
)


class ResNet50(nn.Module):
    """Maps images [batch, height, width, 3] to logits [batch, 1000]."""

    dtype: type = jnp.bfloat16

    @nn.compact
    def __call__(self, x, train):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(
            nn.BatchNorm,
            use_running_average=not train,
            momentum=0.9,
            epsilon=1e-5,
            dtype=self.dtype,
        )
        x = nn.relu(norm()(conv(64, (7, 7), (2, 2), padding=[(3, 3), (3, 3)])(x)))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")

        for stage, depth in enumerate((3, 4, 6, 3)):
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                width = 64 * 2**stage
                y = nn.relu(norm()(conv(width, (1, 1))(x)))
                y = nn.relu(norm()(conv(width, (3, 3), (stride, stride))(y)))
                y = norm(scale_init=nn.initializers.zeros)(conv(4 * width, (1, 1))(y))
                if block == 0:
                    x = norm()(conv(4 * width, (1, 1), (stride, stride))(x))
                x = nn.relu(x + y)

        return nn.Dense(1000, dtype=self.dtype)(jnp.mean(x, (1, 2))).astype(jnp.float32)


class EfficientNet(nn.Module):
    """Maps images [batch, height, width, 3] to logits, without dropout and stochastic depth."""

    width: float
    depth: float
    dtype: type = jnp.bfloat16

    def channels(self, count):
        """Round to a multiple of 8, never down by more than 10 %."""
        wanted = count * self.width
        rounded = max(8, int(wanted + 4) // 8 * 8)
        return rounded + 8 if rounded < 0.9 * wanted else rounded

    @nn.compact
    def __call__(self, x, train):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(
            nn.BatchNorm,
            use_running_average=not train,
            momentum=0.99,
            epsilon=1e-3,
            dtype=self.dtype,
        )
        x = nn.swish(norm()(conv(self.channels(32), (3, 3), (2, 2))(x)))

        for kernel, stride, expansion, channels, repeats in EFFICIENTNET_STAGES:
            for block in range(math.ceil(self.depth * repeats)):
                step = stride if block == 0 else 1
                inside = x.shape[-1] * expansion
                out = self.channels(channels)
                y = x
                if expansion != 1:
                    y = nn.swish(norm()(conv(inside, (1, 1))(y)))
                y = conv(inside, (kernel, kernel), (step, step), feature_group_count=inside)(y)
                y = nn.swish(norm()(y))

                # Squeeze-excitation.
                gate = jnp.mean(y, (1, 2), keepdims=True)
                gate = nn.swish(nn.Conv(max(1, x.shape[-1] // 4), (1, 1), dtype=self.dtype)(gate))
                y = y * nn.sigmoid(nn.Conv(inside, (1, 1), dtype=self.dtype)(gate))

                y = norm()(conv(out, (1, 1))(y))
                x = x + y if block > 0 else y

        x = nn.swish(norm()(conv(self.channels(1280), (1, 1))(x)))
        return nn.Dense(1000, dtype=self.dtype)(jnp.mean(x, (1, 2))).astype(jnp.float32)


class BertLarge(nn.Module):
    """BERT-Large with both pretraining heads; only masked positions are decoded."""

    remat: bool = False
    dropout: float = 0.1
    dtype: type = jnp.bfloat16

    @nn.compact
    def __call__(self, batch, train):
        ids = batch["input_ids"]
        words = nn.Embed(30522, 1024, dtype=self.dtype)
        positions = nn.Embed(512, 1024, dtype=self.dtype)(jnp.arange(ids.shape[1]))
        x = words(ids) + positions + nn.Embed(2, 1024, dtype=self.dtype)(batch["token_type_ids"])
        x = nn.Dropout(self.dropout, deterministic=not train)(nn.LayerNorm(dtype=self.dtype)(x))
        mask = batch["attention_mask"][:, None, None, :].astype(bool)
        block = nn.remat(_Layer, static_argnums=(3,)) if self.remat else _Layer
        for _ in range(24):
            x = block(self.dropout, self.dtype)(x, mask, train)
        pooled = nn.tanh(nn.Dense(1024, dtype=self.dtype)(x[:, 0]))
        picked = jnp.take_along_axis(x, batch["masked_positions"][:, :, None], axis=1)
        picked = nn.LayerNorm(dtype=self.dtype)(nn.gelu(nn.Dense(1024, dtype=self.dtype)(picked)))
        bias = self.param("decoder_bias", nn.initializers.zeros, (30522,))
        word_logits = words.attend(picked).astype(jnp.float32) + bias
        return word_logits, nn.Dense(2)(pooled.astype(jnp.float32))


class _Layer(nn.Module):
    dropout: float
    dtype: type

    @nn.compact
    def __call__(self, x, mask, train):
        drop = nn.Dropout(self.dropout, deterministic=not train)
        attention = nn.MultiHeadDotProductAttention(
            16, dtype=self.dtype, dropout_rate=self.dropout, deterministic=not train
        )
        x = nn.LayerNorm(dtype=self.dtype)(x + drop(attention(x, x, mask=mask)))
        y = nn.Dense(1024, dtype=self.dtype)(nn.gelu(nn.Dense(4096, dtype=self.dtype)(x)))
        return nn.LayerNorm(dtype=self.dtype)(x + drop(y))


class BareResNet50(nn.Module):
    """ResNet-50 without batch norm, to time its convolutions, additions and ReLUs."""

    dtype: type = jnp.bfloat16

    @nn.compact
    def __call__(self, x, train):
        del train
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        x = nn.relu(conv(64, (4, 4), padding=[(2, 1), (2, 1)])(x))  # on images folded 2 x 2
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for stage, depth in enumerate((3, 4, 6, 3)):
            for block in range(depth):
                stride = 2 if stage > 0 and block == 0 else 1
                width = 64 * 2**stage
                y = nn.relu(conv(width, (1, 1))(x))
                y = nn.relu(conv(width, (3, 3), (stride, stride))(y))
                y = conv(4 * width, (1, 1))(y)
                x = nn.relu(y + (conv(4 * width, (1, 1), (stride, stride))(x) if block == 0 else x))
        return nn.Dense(1000)(jnp.mean(x, (1, 2)).astype(jnp.float32))


class BareEfficientNet(EfficientNet):
    """EfficientNet without batch norm, activations and squeeze-excitation, to time the rest."""

    @nn.compact
    def __call__(self, x, train):
        del train
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        x = conv(self.channels(32), (3, 3), (2, 2))(x)
        for kernel, stride, expansion, channels, repeats in EFFICIENTNET_STAGES:
            for block in range(math.ceil(self.depth * repeats)):
                step = stride if block == 0 else 1
                inside = x.shape[-1] * expansion
                y = conv(inside, (1, 1))(x) if expansion != 1 else x
                y = conv(inside, (kernel, kernel), (step, step), feature_group_count=inside)(y)
                y = conv(self.channels(channels), (1, 1))(y)
                x = x + y if block > 0 else y
        x = conv(self.channels(1280), (1, 1))(x)
        return nn.Dense(1000)(jnp.mean(x, (1, 2)).astype(jnp.float32))


def init(module, example):
    """Return the shapes of (params, model_state)."""
    variables = jax.eval_shape(
        lambda key: module.init({"params": key, "dropout": key}, example, train=True),
        jax.random.key(0),
    )
    variables = dict(variables)
    return variables.pop("params"), variables

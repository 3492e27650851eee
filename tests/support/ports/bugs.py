"""Bugs that are planted in the ports: a line of a port's source, and what takes its place."""

LINEN, FUNCTION, EQUINOX = "linen_gpt", "function_llama", "equinox_vit"
VALUE_WITHOUT_BIAS = 'nn.DenseGeneral((self.heads, head), use_bias=False, name="value")'

# A step that is missing leaves no equation. Known are the line that makes what lacks the step and
# the line that reads it, by the place of the bug in the list.
GONE = {
    8: ('"bqhd,bkhd->bhqk"', "jax.nn.softmax(scores)"),
    11: ('name="out")', 'name="ln_1")'),
    25: ('weights["k"]', '"bqkgd,bskd->bkgqs"'),
}
# Other steps that are missing: what is replaced, then as above.
MISSING = (
    (FUNCTION, "scores * q.shape[-1] ** -0.5", "scores", '"bqkgd,bskd->bkgqs"', "jnp.where(seen"),
    (FUNCTION, "q = rotary(q, positions)", "q = q", "k.shape[2], groups, -1)", '"bqkgd,bskd->'),
    (LINEN, "x + nn.DenseGeneral", "nn.DenseGeneral", 'name="proj"', 'name="ln_2"'),
)
# Means of other numbers: each is named with its line.
REDUCTIONS = (
    (EQUINOX, "y.var((0, 1, 3), keepdims=True)", "y.var((0, 1), keepdims=True)"),
    (EQUINOX, "y.var((0, 1, 3), keepdims=True)", "y.var(3, keepdims=True)"),
    (EQUINOX, "mean = y.mean((0, 1, 3)", "mean = y.mean((0, 1, 2, 3)"),
    (EQUINOX, "mean = y.mean((0, 1, 3)", "mean = y.max((0, 1, 3)"),
    (EQUINOX, "width, groups, channels // groups)", "width, channels // groups, groups)"),
    (FUNCTION, "axis=-1, keepdims=True)", "axis=1, keepdims=True)"),
)

# What the port is, the text that is replaced, and the text in its place.
BUGS = (
    (LINEN, "approximate=False", "approximate=True"),
    (LINEN, "nn.gelu(y, approximate=False)", "nn.relu(y)"),
    (LINEN, 'epsilon=1e-5, name="ln_1"', 'epsilon=1e-6, name="ln_1"'),
    (LINEN, 'epsilon=1e-5, name="ln_f"', 'name="ln_f"'),
    (LINEN, 'nn.LayerNorm(epsilon=1e-5, name="ln_2")', 'nn.RMSNorm(epsilon=1e-5, name="ln_2")'),
    (LINEN, "q / jnp.sqrt(head)", "q / head"),
    (LINEN, "jnp.sqrt(head)", "jnp.sqrt(self.width)"),
    (LINEN, "(length, length), bool))", "(length, length), bool), k=1)"),
    (LINEN, "jnp.where(mask, scores, -1e30)", "scores"),
    (LINEN, "scores, -1e30", "scores, -1.0"),
    (LINEN, "jax.nn.softmax(scores)", "jax.nn.softmax(scores, axis=1)"),
    (LINEN, "return x + y", "return y"),
    (LINEN, "return x + y", "return x + 2 * y"),
    (LINEN, "jnp.arange(ids.shape[1])", "jnp.arange(1, ids.shape[1] + 1)"),
    (LINEN, "wte(ids) + wpe", "wte(ids) * 24**0.5 + wpe"),
    (LINEN, "return wte.attend(x)", "return jnp.tanh(wte.attend(x) / 30) * 30"),
    (LINEN, 'nn.Dense(self.width, name="out")', 'nn.Dense(self.width, False, name="out")'),
    (LINEN, 'name="key")(y)', 'name="key")(x)'),
    (LINEN, '"bhqk,bkhd->bqhd", weights, v', '"bhqk,bkhd->bqhd", weights, k'),
    (FUNCTION, "+ 1e-6", "+ 1e-5"),
    (FUNCTION, "jax.lax.rsqrt(variance + 1e-6)", "1 / (jnp.sqrt(variance) + 1e-6)"),
    (FUNCTION, "* weight\n", "* (1 + weight)\n"),
    (FUNCTION, "10000.0", "500000.0"),
    (FUNCTION, "first * cos - second * sin", "first * cos + second * sin"),
    (FUNCTION, "jnp.split(x, 2, axis=-1)", "(x[..., ::2], x[..., 1::2])"),
    (FUNCTION, "k = rotary(k, positions)", "k = k"),
    (FUNCTION, "rotary(q, positions)", "rotary(q, positions + 1)"),
    (FUNCTION, "** -0.5", "** -1"),
    (FUNCTION, "key > query - 5", "key > query - 6"),
    (FUNCTION, "(key <= query)", "(key < query)"),
    (FUNCTION, "jax.nn.softmax(scores, axis=-1)", "jax.nn.softmax(scores, axis=-2)"),
    (FUNCTION, "jax.nn.silu", "jax.nn.gelu"),
    (
        FUNCTION,
        "q.reshape(batch, length, k.shape[2], groups, -1)",
        "jnp.swapaxes(q.reshape(batch, length, groups, k.shape[2], -1), 2, 3)",
    ),
    (FUNCTION, '"bkgqs,bskd->bqkgd", prob', '"bkgqs,bskd->bqgkd", prob'),
    (FUNCTION, "(gate * (y", "(gate + (y"),
    (FUNCTION, 'y = rms_norm(x, weights["post_norm"])', 'y = x * weights["post_norm"]'),
    (FUNCTION, 'x = params["embed"][ids]', 'x = params["embed"][ids] * 20**0.5'),
    (FUNCTION, 'return x @ params["head"]', 'return jnp.tanh(x @ params["head"] / 30) * 30'),
    (FUNCTION, '"btc,chd->bthd", y, weights["v"]', '"btc,chd->bthd", y, weights["k"]'),
    (LINEN, "return x + y", "return x - y"),
    (LINEN, 'nn.DenseGeneral((self.heads, head), name="value")', VALUE_WITHOUT_BIAS),
    (LINEN, "q = q / jnp.sqrt(head)", "q, k = q / jnp.sqrt(head), k / jnp.sqrt(head)"),
    (FUNCTION, "jnp.mean(jnp.square", "jnp.sum(jnp.square"),
    (FUNCTION, "positions[:, None] * inverse", "positions[:, None] / 2 * inverse"),
    (FUNCTION, 'rms_norm(x, weights["post_norm"])', 'rms_norm(x, weights["input_norm"])'),
    (FUNCTION, 'jax.nn.silu(y @ weights["gate"])', 'jax.nn.silu(y @ weights["up"])'),
    (EQUINOX, "channels // groups)", "channels // groups).swapaxes(2, 3)"),
    (EQUINOX, "y.var((0, 1, 3), keepdims=True)", "y.var((0, 1, 3), keepdims=True, ddof=1)"),
    (EQUINOX, "mean = y.mean((0, 1, 3)", "mean = y.mean((0, 1)"),
    (EQUINOX, "jax.nn.relu(", "jax.nn.silu("),
    (EQUINOX, "x.reshape(-1, x.shape[-1])", "x.swapaxes(0, 1).reshape(-1, x.shape[-1])"),
    (EQUINOX, "[self.token, x]", "[x, self.token]"),
    (EQUINOX, "x = x + self.positions", "x = x + self.positions[::-1]"),
    (EQUINOX, "q, k, v = jnp", "q, v, k = jnp"),
    (EQUINOX, "tokens, 3, self.heads, -1)", "tokens, 3, -1, self.heads).swapaxes(2, 3)"),
    (EQUINOX, "scores * q.shape[-1] ** -0.5", "scores * q.shape[1] ** -0.5"),
    (EQUINOX, "x = x + self.scale_1 * y", "x = x + y"),
    (EQUINOX, "1.702 * y", "1.0 * y"),
    (EQUINOX, "return x + self.scale_2 * y", "return x + self.scale_1 * y"),
    (EQUINOX, "self.head(x[0])", "self.head(x[1:].mean(0))"),
)

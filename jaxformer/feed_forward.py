"""The feed-forward of a block, plain or gated, and its activations."""

import functools
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxformer.execution import called_activations, called_feed_forward
from jaxformer.layers import Dropout, Linear, in_float32, project, widen

TANH_ROOT, BLOOM_ROOT = math.sqrt(2 / math.pi), 0.79788456


def relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes max(x, 0), with derivative 0 at 0."""
    return jax.nn.relu(x)


def relu_squared(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes max(x, 0)² (Primer, arXiv 2109.08668)."""
    return in_float32(lambda y: jnp.square(jax.nn.relu(y)), x)


def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes x · Φ(x) exactly (arXiv 1606.08415), as torch does; JAX defaults to tanh."""
    return called_activations.gelu(x) if called_activations.fits(x) else in_float32(_gelu, x)


@jax.custom_jvp
def _gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes x · (1 + erf(x/√2)) / 2; XLA takes twice as long by erfc, as in ``jax.nn``."""
    return x * _normal_cdf(x)


@_gelu.defjvp
def _gelu_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The derivative is made in the forward pass, from what is computed there."""
    (x,), (tangent,) = primals, tangents
    density = jnp.exp(-0.5 * jnp.square(x)) * (1 / math.sqrt(2 * math.pi))
    cdf = _normal_cdf(x)
    return x * cdf, tangent * (cdf + x * density)


def _normal_cdf(x: Float[Array, "..."]) -> Float[Array, "..."]:
    return 0.5 * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def gelu_tanh(x: Float[Array, "..."], root: float = TANH_ROOT) -> Float[Array, "..."]:
    """Approximates x · Φ(x) by tanh (arXiv 1606.08415, section 2): GPT-2's ``gelu_new``.

    x · (1 + tanh(u)) / 2 with u = root · (x + 0.044715 · x³), written as x · sigmoid(2u), which is
    equal: XLA's float32 tanh is less exact where it is nearly 1, and its gradient twice as far from
    the truth as torch's.
    """
    if called_activations.fits(x):
        return called_activations.gelu(x, root=root)
    return in_float32(functools.partial(_gelu_tanh, root), x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _gelu_tanh(root: float, x: Float[Array, "..."]) -> Float[Array, "..."]:
    return x * jax.nn.sigmoid(2 * root * (x + 0.044715 * x * x * x))


@_gelu_tanh.defjvp
def _gelu_tanh_jvp(
    root: float, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    """As for ``_gelu``."""
    (x,), (tangent,) = primals, tangents
    gate = jax.nn.sigmoid(2 * root * (x + 0.044715 * x * x * x))
    slope = 2 * root * (1 + 3 * 0.044715 * x * x)
    return x * gate, tangent * (gate + x * gate * (1 - gate) * slope)


def gelu_bloom(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes ``gelu_tanh`` with sqrt(2/π) cut to eight digits, as BLOOM (arXiv 2211.05100)."""
    return gelu_tanh(x, BLOOM_ROOT)


def quick_gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes x · sigmoid(1.702 · x) (arXiv 1606.08415, section 2)."""
    return in_float32(lambda y: y * jax.nn.sigmoid(1.702 * y), x)


def silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes x · sigmoid(x)."""
    return in_float32(jax.nn.silu, x)


def tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes the hyperbolic tangent."""
    return in_float32(jnp.tanh, x)


class XIELU(nnx.Module):
    """Computes an activation whose two curvatures are trained (xIELU, arXiv 2411.13010).

    a_p · x² + beta · x above 0, and a_n · (exp(min(x, eps)) - 1 - x) + beta · x elsewhere, with
    a_p = softplus(alpha_p) and a_n = beta + softplus(alpha_n), so that a_p > 0 and a_n > beta.
    ``alpha_p`` and ``alpha_n`` have shape (1,) and start where a_p and a_n are ``initial``.

    Args:
        initial: of a_p and a_n.
        beta: the slope at 0.
        eps: a small negative number that x is cut off at inside the exponential.
    """

    def __init__(self, *, initial: float = 0.8, beta: float = 0.5, eps: float = -1e-6):
        self.initial = initial
        self.beta = beta
        self.eps = eps
        self.alpha_p = nnx.Param(jnp.full((1,), math.log(math.expm1(initial))))
        self.alpha_n = nnx.Param(jnp.full((1,), math.log(math.expm1(initial - beta))))

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Returns the activation of x, of any shape, in its dtype."""
        wide = widen(x)
        above, below = (
            jax.nn.softplus(alpha[...].astype(wide.dtype)).reshape((1,) * x.ndim)
            for alpha in (self.alpha_p, self.alpha_n)
        )
        curved = jnp.where(
            wide > 0,
            above * wide * wide,
            (self.beta + below) * (jnp.expm1(jnp.minimum(wide, self.eps)) - wide),
        )
        return (curved + self.beta * wide).astype(x.dtype)


ACTIVATIONS = {
    "relu": relu,
    "relu_squared": relu_squared,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_bloom": gelu_bloom,
    "quick_gelu": quick_gelu,
    "silu": silu,
    "tanh": tanh,
}
# Of GELU's forms, as its custom call takes them.
GELU_ROOTS = {"gelu": 0.0, "gelu_tanh": TANH_ROOT, "gelu_bloom": BLOOM_ROOT}
GATED = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "clamped_swiglu": "clamped_silu",
}


def multiply_gate(
    activation: str,
    gate: Float[Array, "..."],
    up: Float[Array, "..."],
    clamp: tuple[float, float] = (1.702, 7.0),
) -> Float[Array, "..."]:
    """Computes activation(gate) · up, the middle of a gated feed-forward.

    ``clamped_silu`` with ``clamp`` (α, c) is g · sigmoid(α · g) · (u + 1), where g is the gate, at
    most c, and u is ``up`` within ±c (gpt-oss, arXiv 2508.10925, section 2.2).

    Args:
        activation: one of ``ACTIVATIONS``, or clamped_silu.
        gate: of any shape.
        up: of the same shape.
        clamp: of clamped_silu.
    """
    if activation != "clamped_silu":
        return ACTIVATIONS[activation](gate) * up
    (slope, limit), dtype = clamp, gate.dtype
    # Not by jnp.clip, whose derivative at the bounds themselves is a half, and torch's 1.
    gate, up = widen(gate), widen(up)
    gate = jnp.where(gate <= limit, gate, limit)
    up = jnp.where(jnp.abs(up) <= limit, up, jnp.sign(up) * limit)
    return (gate * jax.nn.sigmoid(slope * gate) * (up + 1)).astype(dtype)


def _are_plain(*layers: nnx.Module) -> bool:
    """Whether layers make a product and add a bias. Others, as those with adapters, do more."""
    return all(type(layer) is Linear for layer in layers)


class FeedForward(nnx.Module):
    """Computes down(activation(up(x))) (arXiv 1706.03762, eq. 2).

    Args:
        d_model: D.
        d_ff: F, default 4·D.
        activation: one of ``ACTIVATIONS``, or xielu, which has parameters of its own: ``xielu``.
        use_bias: whether both projections have biases.
        hidden_dropout: rate on the hidden activation.
        output_dropout: rate on the result.
        rngs: where the initial weights come from.
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        *,
        activation: str = "gelu",
        use_bias: bool = True,
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        d_ff = 4 * d_model if d_ff is None else d_ff
        self.activation = activation
        self.xielu = XIELU() if activation == "xielu" else None
        self.up_proj = Linear(d_model, d_ff, use_bias=use_bias, rngs=rngs)
        self.down_proj = Linear(d_ff, d_model, use_bias=use_bias, rngs=rngs)
        self.hidden_dropout = Dropout(hidden_dropout)
        self.output_dropout = Dropout(output_dropout)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the branch's output (B, T, D), in the dtype of x."""
        return self.output_dropout(self._project_twice(x))

    def _project_twice(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns down(dropout(activation(up(x)))); as custom calls, where these are taken."""
        up, down, root = self.up_proj, self.down_proj, GELU_ROOTS.get(self.activation)
        if root is not None and _are_plain(up, down) and not self.hidden_dropout.active:
            rows = jnp.reshape(x, (-1, x.shape[-1]))
            bias = None if up.bias is None else up.bias[...]
            weights = up.kernel[...], bias, down.kernel[...]
            if called_feed_forward.fits(rows, *weights) and not up.has_few(rows):
                y = called_feed_forward.feed_forward(rows, *weights, root=root)
                return down.finish(y, x.shape[:-1])
        return down(self.hidden_dropout(self._activate_up(x)))

    def _activate_up(self, x: Float[Array, "B T D"]) -> Float[Array, "B T F"]:
        """Returns activation(up(x)); GELU's custom call, where it is taken, adds the bias too."""
        up, root = self.up_proj, GELU_ROOTS.get(self.activation)
        if root is not None and _are_plain(up) and up.bias is not None:
            hidden = jax.ShapeDtypeStruct((*x.shape[:-1], up.kernel.shape[1]), x.dtype)
            if called_activations.fits(hidden, up.bias[...]):
                products = up.multiply(jnp.reshape(x, (-1, x.shape[-1])))
                y = called_activations.gelu(products, up.bias[...], root=root)
                return jnp.reshape(y, hidden.shape)
        activate = self.xielu or ACTIVATIONS[self.activation]
        return activate(up(x))


class GatedFeedForward(nnx.Module):
    """Computes down(activation(gate(x)) · up(x)) (Shazeer, arXiv 2002.05202, eq. 6).

    SwiGLU with ``activation="silu"``, GeGLU with ``"gelu"`` or ``"gelu_tanh"``.

    Args:
        d_model: D.
        d_ff: F, default int(8·D / 3), which keeps the parameters of a plain one of 4·D. It is
            used as given: no rounding to a multiple, no factor of 2/3.
        activation: one of ``ACTIVATIONS``, or clamped_silu.
        use_bias: whether the three projections have biases.
        clamp: see ``multiply_gate``.
        hidden_dropout: rate on the product.
        output_dropout: rate on the result.
        rngs: where the initial weights come from.
    """

    PROJECTED_TOGETHER = ("gate_proj", "up_proj")

    def __init__(
        self,
        d_model: int,
        d_ff: int | None = None,
        *,
        activation: str = "silu",
        use_bias: bool = False,
        clamp: tuple[float, float] = (1.702, 7.0),
        hidden_dropout: float = 0.0,
        output_dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        d_ff = int(8 * d_model / 3) if d_ff is None else d_ff
        self.activation = activation
        self.clamp = clamp
        self.gate_proj = Linear(d_model, d_ff, use_bias=use_bias, rngs=rngs)
        self.up_proj = Linear(d_model, d_ff, use_bias=use_bias, rngs=rngs)
        self.down_proj = Linear(d_ff, d_model, use_bias=use_bias, rngs=rngs)
        self.hidden_dropout = Dropout(hidden_dropout)
        self.output_dropout = Dropout(output_dropout)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Returns the branch's output (B, T, D), in the dtype of x."""
        gate, up = project(x, self.gate_proj, self.up_proj)
        hidden = multiply_gate(self.activation, gate, up, self.clamp)
        return self.output_dropout(self.down_proj(self.hidden_dropout(hidden)))

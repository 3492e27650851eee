"""Initial weights, with the distributions that PyTorch's users know.

``fan_in`` is the number of inputs of a linear layer, ``fan_out`` that of its outputs. A function
of ``schemes`` maps (path, shape, fan_in, fan_out) to an initializer, so a whole model is
initialised by one walk over its parameters.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from jaxformer.execution.delayed_draws import DelayedDraw, DelayedKey

# Takes a key, or None where only the shape is wanted (``parameters.abstract``), or a key whose
# array is drawn later.
Initializer = Callable[[Array | DelayedKey | None, tuple[int, ...]], Any]
# Outside of ``jax.jit``, arrays of up to so many numbers are cut from vectors of few lengths.
_SMALL, _LARGE = 2**12, 2**20


@dataclasses.dataclass(frozen=True)
class _Law:
    """A distribution: ``scale`` times U(-bound, bound), or times N(0, 1) without a bound.

    Called with a key or with what stands for one, it is an ``Initializer``.
    """

    scale: float = 1.0
    bound: float | None = None

    def __call__(self, key: Array | DelayedKey | None, shape: tuple[int, ...]) -> Any:
        """Returns an array of this distribution; without a key zeros.

        JAX draws each number from the key and the number's place in row-major order. So the first
        numbers of a longer vector are the same. Outside of ``jax.jit`` each shape would be
        compiled, which takes seconds for a model; the longer vectors have few lengths.
        """
        if key is None:
            return jnp.zeros(shape)
        if isinstance(key, DelayedKey):
            return DelayedDraw(self, key.key, shape)
        size = math.prod(shape)
        if isinstance(key, jax.core.Tracer) or size > _LARGE:
            return self.scale * self._sample(key, shape)
        length = max(_SMALL, 1 << max(size - 1, 0).bit_length())
        drawn = np.asarray(self._sample(key, (length,)))[:size].reshape(shape)
        return jax.device_put(float(self.scale) * drawn, may_alias=False)

    def _sample(self, key: Array, shape: tuple[int, ...]) -> Float[Array, "..."]:
        if self.bound is None:
            return jax.random.normal(key, shape)
        return jax.random.uniform(key, shape, minval=-self.bound, maxval=self.bound)


def uniform(bound: float) -> Initializer:
    """Returns the initializer of U(-bound, bound)."""
    return _Law(bound=bound)


def normal(std: float) -> Initializer:
    """Returns the initializer of N(0, std²)."""
    return _Law(std)


def constant(value: float) -> Initializer:
    """Returns the initializer of a constant."""
    return lambda key, shape: jnp.full(shape, value)


def kaiming_uniform(fan_in: int, negative_slope: float = 0.0) -> Initializer:
    """Returns U(-b, b) with b = sqrt(6 / ((1 + negative_slope²) · fan_in)) (arXiv 1502.01852).

    ``torch.nn.init.kaiming_uniform_`` with the same slope; its default slope is 0 as here.
    """
    return uniform(math.sqrt(6 / ((1 + negative_slope**2) * fan_in)))


def xavier_uniform(fan_in: int, fan_out: int) -> Initializer:
    """Returns U(-b, b) with b = sqrt(6 / (fan_in + fan_out)) (Glorot and Bengio, 2010, eq. 16)."""
    return uniform(math.sqrt(6 / (fan_in + fan_out)))


def torch_linear(fan_in: int) -> tuple[Initializer, Initializer]:
    """Returns the initializers of torch.nn.Linear's kernel and bias, U(±1/sqrt(fan_in)) both."""
    return kaiming_uniform(fan_in, math.sqrt(5)), uniform(1 / math.sqrt(fan_in))


def initialize(module: nnx.Module, scheme: str, num_layers: int, rngs: nnx.Rngs) -> None:
    """Draws every parameter of ``module`` anew, in place, by the named scheme.

    - ``gpt2``: kernels and embeddings N(0, 0.02²), the last projection of each residual branch
      (``o_proj``, ``down_proj``) N(0, 0.02² / (2·num_layers)), biases zero (GPT-2; nanoGPT).
    - ``torch``: what the constructors of the PyTorch twins draw; nothing is changed.
    - ``xavier_uniform``: that distribution for every parameter of two or more dimensions, biases as
      constructed (``torch.nn.Transformer``).
    - ``kaiming_uniform``, ``normal`` (std 0.02): likewise, biases zero.

    Norm scales are left as constructed in every scheme: at one, or at zero where one is added. So
    are the two numbers of an ``XIELU``, the biases of a ``Router``'s choice and attention's sinks.

    Raises:
        ValueError: the scheme is unknown.
    """
    if scheme == "torch":
        return
    for path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        shape = parameter[...].shape
        if path[-1] in ("scale", "alpha_p", "alpha_n", "choice_bias", "sinks"):
            continue
        if path[-1] == "bias":
            if scheme == "xavier_uniform":
                continue
            parameter.set_value(jnp.zeros_like(parameter[...]))
            continue
        # torch reads an embedding (rows, features) as a weight (fan_out, fan_in).
        fan_in, fan_out = shape[-2:] if path[-1] == "kernel" else reversed(shape)
        if scheme == "gpt2":
            residual = path[-2:-1] in (("o_proj",), ("down_proj",))
            init = normal(0.02 / math.sqrt(2 * num_layers) if residual else 0.02)
        elif scheme == "xavier_uniform":
            init = xavier_uniform(fan_in, fan_out)
        elif scheme == "kaiming_uniform":
            init = kaiming_uniform(fan_in)
        elif scheme == "normal":
            init = normal(0.02)
        else:
            raise ValueError(f"unknown initialization {scheme!r}")
        key = rngs.params()
        if key is None:
            # Only shapes are wanted, and each parameter has its shape.
            return
        # Through an index it would ask for the sharding, which is slow to miss while tracing.
        parameter.set_value(init(key, shape))

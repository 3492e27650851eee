"""Both sides in float64, and with the tables of positions that users have.

transformers computes norms, softmax and tables of positions in float32 whatever the dtype of the
model, and jaxformer computes its tables in float32 as well. In ``in_float64`` all of it is
float64, on both sides and each by its own code. What is left is the mathematics: that of the
tables too, which are not shared. In ``in_float32`` the tables are as users have them, and the
rest is float64: what differs then are the tables' last bits.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
import torch
from transformers.models.bloom import modeling_bloom
from transformers.models.falcon import modeling_falcon
from transformers.models.mpt import modeling_mpt

from jaxformer import position_tables, positions
from tests.support.hugging_face.case import SIZES

# The modules of jaxformer that compute tables of positions.
TABLE_MODULES = (position_tables, positions)

# Where transformers computes ALiBi's slopes or biases.
ALIBI = {
    modeling_bloom: "_get_alibi_slopes",
    modeling_falcon: "build_alibi_tensor",
    modeling_mpt: "build_mpt_alibi_tensor",
}

_FLOAT32 = torch.float32


@contextlib.contextmanager
def in_float32() -> Iterator[None]:
    """What transformers calls float32 is float64, but for its tables of positions.

    Those that it computes in every call are float32 too, their angles as well as their frequencies,
    and so are ALiBi's biases. Those of jaxformer always are.
    """
    call = torch.nn.Module.__call__

    def call_table(module: Any, *arguments: Any, **more: Any) -> Any:
        is_table = type(module).__name__.endswith("RotaryEmbedding")
        with _torch_in(_FLOAT32) if is_table else contextlib.nullcontext():
            return call(module, *arguments, **more)

    with contextlib.ExitStack() as stack:
        _forget_tables()
        stack.callback(_forget_tables)
        stack.enter_context(_torch_in(torch.float64))
        stack.enter_context(mock.patch.object(torch.nn.Module, "__call__", call_table))
        for module, name in ALIBI.items():
            biases = _torch_in(_FLOAT32)(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, biases))
        yield


@contextlib.contextmanager
def _torch_in(dtype: torch.dtype) -> Iterator[None]:
    """What PyTorch calls float32 is of this dtype, and so are numbers that have none."""
    before = torch.get_default_dtype()
    with (
        mock.patch.object(torch, "float32", dtype),
        mock.patch.object(torch, "float", dtype),
        mock.patch.object(torch.Tensor, "float", lambda array: array.to(dtype)),
    ):
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """What both sides call float32 is float64, in the tables of positions too.

    A model of transformers must be built and run within. What is called bfloat16 stays so: Falcon
    rounds its biases to it in every dtype, and jaxformer does the same.
    """
    with contextlib.ExitStack() as stack:
        # Tables that were computed before, and those that are computed within, are of no use.
        _forget_tables()
        stack.callback(_forget_tables)
        stack.enter_context(_torch_in(torch.float64))
        stack.enter_context(wide_slopes())
        for module in TABLE_MODULES:
            for name in vars(module).keys() & {"np", "jnp"}:
                wide = _Wide(getattr(module, name))
                stack.enter_context(mock.patch.object(module, name, wide))
        kept = mock.patch.object(jax.lax, "reduce_precision", lambda x, exponent, mantissa: x)
        stack.enter_context(kept)
        yield


class _Wide:
    """A module of arrays, whose float32 is float64."""

    def __init__(self, module: Any):
        self._module = module
        self.float32 = module.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _forget_tables() -> None:
    for module in TABLE_MODULES:
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()


def _wide_slopes(num_heads: int, max_bias: float = 8.0) -> np.ndarray:
    return _SLOPES(num_heads, max_bias).astype(np.float64)


_SLOPES = positions.alibi_slopes


@contextlib.contextmanager
def wide_slopes() -> Iterator[None]:
    """ALiBi's slopes have the same values in float64."""
    with mock.patch.object(positions, "alibi_slopes", _wide_slopes):
        yield


def source_tables(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """The cosines and sines that transformers computes, in the form of ``rotary_tables``."""
    module = next(m for m in model.modules() if type(m).__name__.endswith("RotaryEmbedding"))
    x = torch.zeros((), dtype=torch.float32)
    cos, sin = module(x, torch.arange(SIZES["max_position_embeddings"])[None])
    half = cos.shape[-1] // 2
    return cos[0, :, :half].numpy(), sin[0, :, :half].numpy()

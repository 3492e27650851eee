"""ALiBi's slopes in the exact run: as theirs are, and not multiplied in float32."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np

from jaxformer import positions


@contextlib.contextmanager
def match_alibi_slopes(torch_module: Any) -> Iterator[None]:
    """While it lasts, our slopes have the values of theirs, in float64.

    Slopes that are not powers of two are rounded where they are kept in float32 (buffers, tables),
    and not where they are computed as they are needed, which in the exact run is in float64. Either
    is right.
    """
    kept = type(torch_module).__module__.startswith("torch_ref") or any(
        name.endswith("slopes") for name, _ in torch_module.named_buffers()
    )
    rounded = positions.alibi_slopes

    def wide(num_heads: int) -> np.ndarray:
        return rounded(num_heads).astype(np.float64)

    with mock.patch.object(positions, "alibi_slopes", wide if kept else positions._exact_slopes):
        yield

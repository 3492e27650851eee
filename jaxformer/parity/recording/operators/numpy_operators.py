"""Common primitives of JAX in numpy, which compiles nothing and copies no argument.

JAX compiles a primitive for each shape, and takes a copy of each array. A float64 product of two
matrices, one of them transposed, takes XLA four times as long as numpy on a CPU (2.7 CPU s and 0.7
for the head of GPT-2 at 256 positions).

Each entry takes the parameters of an equation and returns a function of numpy arrays with one
result; those of ``SEVERAL`` give a sequence of results. Floats are float64; what numpy computes
otherwise than JAX (division of integers, gathers out of bounds) is left to JAX.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

Function = Callable[..., Any]
# Above this many numbers JAX is faster with what numpy computes slowly.
MOST_NUMBERS = 1 << 15
SLOW = {"tanh", "pow", "log1p", "expm1", "exp2"}
UNARY: dict[str, Function] = {
    "neg": np.negative, "exp": np.exp, "log": np.log, "tanh": np.tanh, "sqrt": np.sqrt,
    "sin": np.sin, "cos": np.cos, "floor": np.floor, "ceil": np.ceil, "abs": np.abs,
    "log1p": np.log1p, "expm1": np.expm1, "exp2": np.exp2, "square": np.square,
    "rsqrt": lambda x: 1 / np.sqrt(x), "logistic": lambda x: 1 / (1 + np.exp(-x)),
}  # fmt: skip
# The last two are of floats alone.
BINARY: dict[str, Function] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "max": np.maximum,
    "min": np.minimum, "div": np.divide, "pow": np.power,
}  # fmt: skip
COMPARISONS: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}  # fmt: skip
# Of integers and complex numbers these are the same in numpy.
OF_ANY_NUMBERS = {"neg", "add", "add_any", "sub", "mul"}
# What gives several arrays.
SEVERAL = {"split", "unstack"}
REDUCTIONS: dict[str, Function] = {
    "reduce_sum": np.sum, "reduce_max": np.max, "reduce_min": np.min, "reduce_and": np.all,
    "reduce_or": np.any,
}  # fmt: skip


def numpy_function(
    name: str, params: Mapping[str, Any], is_float: bool, size: int
) -> Function | None:
    """Returns what computes a primitive, None if it is left to JAX.

    Args:
        name: of the primitive.
        params: of its equation.
        is_float: whether it reads floats alone.
        size: the count of numbers in the largest array that it reads or makes.
    """
    if size > MOST_NUMBERS and (name in SLOW or _has_batch(name, params)):
        return None
    is_known = is_float or name in OF_ANY_NUMBERS
    if name in UNARY and is_known:
        return UNARY[name]
    if name in COMPARISONS:
        return COMPARISONS[name]
    if name in BINARY and is_known:
        return BINARY[name]
    if name in REDUCTIONS and (is_float or name in ("reduce_and", "reduce_or")):
        function, axes = REDUCTIONS[name], tuple(params["axes"])
        return lambda x: function(x, axis=axes)
    build = STRUCTURAL.get(name)
    return build(params) if build is not None else None


def _has_batch(name: str, params: Mapping[str, Any]) -> bool:
    """Returns whether a primitive is many small products of matrices."""
    return name == "dot_general" and bool(params["dimension_numbers"][1][0])


def _broadcast_in_dim(params: Mapping[str, Any]) -> Function | None:
    shape, places = params["shape"], params["broadcast_dimensions"]

    def broadcast(x: Any, *dynamic: Any) -> Any:
        given = [1] * len(shape)
        for place, size in zip(places, x.shape, strict=True):
            given[place] = size
        return np.broadcast_to(x.reshape(given), shape)

    return broadcast


def _reshape(params: Mapping[str, Any]) -> Function | None:
    shape = params["new_sizes"]
    return (lambda x: x.reshape(shape)) if params.get("dimensions") is None else None


def _slice(params: Mapping[str, Any]) -> Function | None:
    steps = params["strides"] or [None] * len(params["start_indices"])
    at = tuple(map(slice, params["start_indices"], params["limit_indices"], steps))
    return lambda x: x[at]


def _dot_general(params: Mapping[str, Any]) -> Function | None:
    (left_sum, right_sum), (left_batch, right_batch) = params["dimension_numbers"]

    def dot(left: Any, right: Any) -> Any:
        left_kept = [i for i in range(left.ndim) if i not in (*left_sum, *left_batch)]
        right_kept = [i for i in range(right.ndim) if i not in (*right_sum, *right_batch)]
        batch = [left.shape[i] for i in left_batch]
        rows, columns = [left.shape[i] for i in left_kept], [right.shape[i] for i in right_kept]
        summed = math.prod(left.shape[i] for i in left_sum)
        count = math.prod(batch)
        # Without -1, which an empty array has no size for.
        height, width = math.prod(rows), math.prod(columns)
        one = left.transpose(*left_batch, *left_kept, *left_sum).reshape(count, height, summed)
        two = right.transpose(*right_batch, *right_sum, *right_kept).reshape(count, summed, width)
        return (one @ two).reshape((*batch, *rows, *columns))

    return dot


def _select_n(params: Mapping[str, Any]) -> Function | None:
    def select(which: Any, *cases: Any) -> Any:
        if len(cases) != 2:
            return np.choose(which, cases)
        return np.where(which, cases[1], cases[0])

    return select


def _convert(params: Mapping[str, Any]) -> Function:
    """Leaves numbers as they are; the dtype is given to what comes of it."""
    is_complex = np.dtype(params["new_dtype"]).kind == "c"
    return lambda x: x if is_complex or x.dtype.kind != "c" else x.real


def _power(x: Any, exponent: int) -> Any:
    """Returns a small power by multiplying, which numpy's general power is far slower than."""
    if exponent in (2, 3, 4):
        square = x * x
        return {2: square, 3: square * x, 4: square * square}[exponent]
    return np.power(x, exponent)


def _squeeze(params: Mapping[str, Any]) -> Function | None:
    axes = tuple(params["dimensions"])
    return lambda x: np.squeeze(x, axes)


def _split(params: Mapping[str, Any]) -> Function | None:
    ends = list(itertools.accumulate(params["sizes"]))[:-1]
    return lambda x: np.split(x, ends, params["axis"])


def _unstack(params: Mapping[str, Any]) -> Function | None:
    return lambda x: list(np.moveaxis(x, params["axis"], 0))


def _pad(params: Mapping[str, Any]) -> Function | None:
    widths = params["padding_config"]
    if any(low < 0 or high < 0 for low, high, _ in widths):
        return None

    def pad(x: Any, filling: Any) -> Any:
        sizes = [
            n + max(n - 1, 0) * between for n, (_, _, between) in zip(x.shape, widths, strict=True)
        ]
        shape = [low + n + high for n, (low, high, _) in zip(sizes, widths, strict=True)]
        made = np.full(shape, filling, x.dtype)
        kept = zip(sizes, widths, strict=True)
        made[tuple(slice(low, low + n, 1 + step) for n, (low, _, step) in kept)] = x
        return made

    return pad


def _complex(params: Mapping[str, Any]) -> Function | None:
    def put_together(real: Any, imaginary: Any) -> Any:
        made = np.empty(np.broadcast_shapes(real.shape, imaginary.shape), np.complex128)
        made.real, made.imag = real, imaginary
        return made

    return put_together


def _start(x: Any, sizes: tuple[int, ...], at: tuple[Any, ...]) -> tuple[slice, ...]:
    """Returns a part of an array, which is moved back into the array where it goes beyond."""
    first = [min(max(int(i), 0), n - size) for i, n, size in zip(at, x.shape, sizes, strict=True)]
    return tuple(slice(i, i + size) for i, size in zip(first, sizes, strict=True))


def _dynamic_slice(params: Mapping[str, Any]) -> Function | None:
    return lambda x, *at: x[_start(x, params["slice_sizes"], at)]


def _dynamic_update_slice(params: Mapping[str, Any]) -> Function | None:
    def update(x: Any, part: Any, *at: Any) -> Any:
        made = np.array(x)
        made[_start(x, part.shape, at)] = part
        return made

    return update


def _scatter_add(params: Mapping[str, Any]) -> Function | None:
    """Returns what adds rows to rows of an array, as the gradient of a lookup does."""
    numbers = params["dimension_numbers"]
    places = numbers.inserted_window_dims, numbers.scatter_dims_to_operand_dims
    is_clipped = params["mode"] == jax.lax.GatherScatterMode.CLIP
    if places != ((0,), (0,)) or numbers.operand_batching_dims or is_clipped:
        return None

    def scatter(x: Any, at: Any, rows: Any) -> Any:
        kept = numbers.update_window_dims
        first = [axis for axis in range(rows.ndim) if axis not in kept]
        window = [rows.shape[axis] for axis in kept]
        rows = rows.transpose(*first, *kept).reshape(-1, *window)
        at = at.reshape(-1)
        inside = (at >= 0) & (at < len(x))
        made = np.array(x, order="C")
        # Rows that are shorter than those of the array are added to their beginnings.
        np.add.at(made[(slice(None), *map(slice, window))], at[inside], rows[inside])
        return made

    return scatter


STRUCTURAL: dict[str, Callable[[Mapping[str, Any]], Function | None]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "slice": _slice,
    "dot_general": _dot_general,
    "select_n": _select_n,
    "squeeze": _squeeze,
    "scatter-add": _scatter_add,
    "split": _split,
    "unstack": _unstack,
    "pad": _pad,
    "complex": _complex,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "real": lambda params: np.real,
    "imag": lambda params: np.imag,
    "transpose": lambda params: lambda x: x.transpose(params["permutation"]),
    "expand_dims": lambda params: lambda x: np.expand_dims(x, params["dimensions"]),
    "concatenate": lambda params: lambda *xs: np.concatenate(xs, params["dimension"]),
    "rev": lambda params: lambda x: np.flip(x, params["dimensions"]),
    "convert_element_type": _convert,
    "stop_gradient": lambda params: lambda x: x,
    "and": lambda params: np.bitwise_and,
    "or": lambda params: np.bitwise_or,
    "not": lambda params: np.invert,
    "integer_pow": lambda params: lambda x: _power(x, params["y"]),
    "is_finite": lambda params: np.isfinite,
}

"""A call within what is traced that is made when it is evaluated, as of code that reads files."""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive

_CALL = Primitive("call_on_host")
_CALL.def_impl(lambda *arrays, run, made: run(*arrays))
_CALL.def_abstract_eval(lambda *arrays, run, made: made)


def call_on_host(run: Callable[..., Any], made: Any, *trees: Any) -> Any:
    """Returns an array that a function makes, once what it is given is known.

    Args:
        run: takes the trees, with arrays in place of what is traced, and returns an array.
        made: has the shape and the dtype of that array.
        trees: what the function is given.
    """
    leaves, structure = jax.tree.flatten(trees)
    places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, jax.core.Tracer)]

    def run_flat(*arrays: Any) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return run(*jax.tree.unflatten(structure, filled))

    aval = jax.core.ShapedArray(made.shape, made.dtype)
    return _CALL.bind(*(leaves[place] for place in places), run=run_flat, made=aval)

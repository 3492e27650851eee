"""A PyTorch module run by itself, while its submodules return given tensors."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.trace.torch_values import floats, is_float, require_torch, view

# How far what a module returns again may be from what it returned, in float64.
ALIKE = 1e-7
# Given the float tensors of a module's result, and by path and call those that entered submodules.
Pick = Callable[[list[Any], Mapping[str, list[list[Any]]]], list[Any]]


@dataclasses.dataclass(frozen=True)
class RawCall:
    """One call of a module, as it was made.

    Attributes:
        args: positional arguments.
        kwargs: named arguments.
        output: whatever it returned.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None


def resolve(module: Any, path: str) -> tuple[Any, str]:
    """Returns the module at a path, and the method to call: a path may end in a called method."""
    if path in dict(module.named_modules()):
        return module.get_submodule(path), "forward"
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner), name


def record_calls(
    module: Any, paths: Sequence[str], run: Callable[[Any], Any]
) -> dict[str, list[RawCall]]:
    """Runs a model and returns every call of some of its modules, with copies of their tensors.

    Args:
        module: the model.
        paths: of the modules, or of their called methods.
        run: runs it.
    """
    torch = require_torch()
    calls: dict[str, list[RawCall]] = {path: [] for path in paths}

    def copied(tree: Any) -> Any:
        # What is one tensor stays one.
        copies: dict[int, Any] = {}

        def copy_leaf(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return copies.setdefault(id(leaf), leaf.detach().clone())
            return _as_it_is(leaf)

        return torch.utils._pytree.tree_map(copy_leaf, tree)

    def record(path: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        given_args, given_kwargs = copied((args, kwargs))
        output = original(*args, **kwargs)
        calls[path].append(RawCall(given_args, given_kwargs, copied(output)))
        return output

    with torch.no_grad():
        _replaced(module, paths, record, lambda: run(module))
    return calls


def _as_it_is(leaf: Any) -> Any:
    """Returns a copy of what is no tensor: a call may write to it, as to a cache of keys."""
    import torch

    is_code = callable(leaf) or isinstance(leaf, torch.nn.Module)
    return leaf if is_code else copy.deepcopy(leaf)


def _replaced(
    module: Any, paths: Sequence[str], called: Callable[..., Any], run: Callable[[], Any]
) -> Any:
    """Runs something while methods of submodules go through a function."""
    owners = []
    for path in paths:
        owner, name = resolve(module, path)

        method = functools.partial(_through, called, path, getattr(owner, name))
        owners.append((owner, name, vars(owner).get(name)))
        vars(owner)[name] = method
    try:
        return run()
    finally:
        for owner, name, before in reversed(owners):
            del vars(owner)[name]
            if before is not None:
                vars(owner)[name] = before


def _through(
    called: Callable[..., Any], path: str, original: Any, *args: Any, **kwargs: Any
) -> Any:
    return called(path, original, args, kwargs)


def isolate(
    module: Any, path: str, call: RawCall, inner: Mapping[str, Sequence[Any]], pick: Pick
) -> tuple[Any, list[Any]]:
    """Returns a module that makes one call of a part of a model, and the tensors that it takes.

    Args:
        module: the model.
        path: of the part.
        call: of the part, in float64.
        inner: what its submodules return, call by call, by path within it.
        pick: chooses the results.
    """
    require_torch()
    import torch

    given = (call.args, call.kwargs, dict(inner))
    leaves, structure = torch.utils._pytree.tree_flatten(given)
    tensors: dict[int, Any] = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    places = {one: place for place, one in enumerate(tensors)}
    owner, name = resolve(module, path)

    class Isolated(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Under its own name, by which reports call its parameters.
            self.add_module(path.rpartition(".")[2] or "model", owner)

        def forward(self, *tensors: Any) -> list[Any]:
            filled = [tensors[places[id(x)]] if id(x) in places else _as_it_is(x) for x in leaves]
            args, kwargs, returned = torch.utils._pytree.tree_unflatten(filled, structure)
            entered: dict[str, list[list[Any]]] = {}
            (part,) = self.children()

            def force(path: str, original: Any, args: Any, kwargs: Any) -> Any:
                seen = entered.setdefault(path, [])
                seen.append([*_in_order((args, kwargs))])
                return returned[path][min(len(seen), len(returned[path])) - 1]

            def run() -> Any:
                return getattr(part, name)(*args, **kwargs)

            results = floats(_replaced(part, list(inner), force, run))
            for result, expected in zip(results, floats(call.output), strict=True):
                # A module with a state of its own does something else this time.
                if not np.allclose(view(result), view(expected), ALIKE, ALIKE, equal_nan=True):
                    raise ValueError(f"{path} returns something else when it is run again")
            return pick(results, entered)

    return Isolated(), list(tensors.values())


def _in_order(value: Any) -> Iterator[Any]:
    """Yields the float tensors among arguments, in the order in which they were given."""
    if is_float(value):
        yield value
    for inner in value.values() if isinstance(value, dict) else ():
        yield from _in_order(inner)
    for inner in value if isinstance(value, tuple | list) else ():
        yield from _in_order(inner)

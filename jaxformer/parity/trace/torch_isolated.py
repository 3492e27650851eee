"""A PyTorch module run by itself, while its submodules return given tensors."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.trace.torch_recorder import TorchCall, copied, tensors_in_order
from jaxformer.parity.trace.torch_values import floats, is_float, require_torch, view
from jaxformer.parity.trace.wide_parameters import wide_parameters

# How far what a module returns again may be from what it returned, in float64; and the number of
# values that are compared.
ALIKE, SAMPLE = 1e-7, 1 << 16
# Given the float tensors of a module's result, and by path and call those that entered submodules.
Pick = Callable[[list[Any], Mapping[str, list[list[Any]]]], list[Any]]
# The calls of submodules that return what they returned, by path within the module.
Forced = Mapping[str, Sequence[TorchCall]]
# Given a float tensor, the gradient to pull back from it; None for zero.
Cotangents = Callable[[Any], Any]


class NotRepeatableError(ValueError):
    """A module does something else when it is run again; the message says which."""


def resolve(module: Any, path: str) -> tuple[Any, str]:
    """Returns the module at a path, and the method to call: a path may end in a called method."""
    if path in dict(module.named_modules()):
        # Hooks are part of what a module does.
        return module.get_submodule(path), "_call_impl"
    owner, _, name = path.rpartition(".")
    return module.get_submodule(owner), name


def _replaced(
    module: Any, paths: Sequence[str], called: Callable[..., Any], run: Callable[[], Any]
) -> Any:
    """Runs something while methods of submodules go through a function."""
    owners = []
    for path in paths:
        owner, name = resolve(module, path)
        owners.append((owner, name, vars(owner).get(name)))
        vars(owner)[name] = functools.partial(called, path)
    try:
        return run()
    finally:
        for owner, name, before in reversed(owners):
            del vars(owner)[name]
            if before is not None:
                vars(owner)[name] = before


def _run(
    part: tuple[Any, str], path: str, call: TorchCall, inner: Forced, given: Mapping[int, Any]
) -> tuple[list[Any], dict[str, list[list[Any]]]]:
    """Returns the float tensors of a module's result, and those that entered its submodules.

    Args:
        part: the module, and its method.
        path: of the module.
        call: of the module.
        inner: calls in it whose results are given.
        given: what stands for each recorded tensor, by its identity.
    """
    owner, name = part
    entered: dict[str, list[list[Any]]] = {}

    def force(inner_path: str, *args: Any, **kwargs: Any) -> Any:
        seen = entered.setdefault(inner_path, [])
        calls = inner[inner_path]
        known = calls[min(len(seen), len(calls) - 1)]
        tensors = [*tensors_in_order((args, kwargs))]
        seen.append([x for x in tensors if is_float(x)])
        # What a submodule only passes on is what entered it this time.
        recorded = tensors_in_order((known.args, known.kwargs))
        passed = {id(before): x for before, x in zip(recorded, tensors, strict=False)}
        return copied(known.output, lambda x: passed[id(x)] if id(x) in passed else given[id(x)])

    args, kwargs = copied((call.args, call.kwargs), lambda x: given[id(x)])
    output = _replaced(owner, [*inner], force, lambda: getattr(owner, name)(*args, **kwargs))
    results = floats(output)
    for result, expected in zip(results, floats(call.output), strict=True):
        step = max(1, expected.numel() // SAMPLE)
        again, before = (view(x).reshape(-1)[::step] for x in (result, expected))
        # A module with a state of its own does something else this time.
        if not np.allclose(again, before, ALIKE, ALIKE, equal_nan=True):
            raise NotRepeatableError(f"{path or 'the model'} returns something else when run again")
    return results, entered


def _recorded(call: TorchCall, inner: Forced) -> dict[int, Any]:
    """Returns the tensors that a call is given, and those that calls in it return."""
    leaves = require_torch().utils._pytree.tree_leaves
    outputs = [each.output for calls in inner.values() for each in calls]
    passed = {id(x) for calls in inner.values() for c in calls for x in leaves((c.args, c.kwargs))}
    found = {id(x): x for x in leaves((call.args, call.kwargs)) if _is_tensor(x)}
    return found | {id(x): x for x in leaves(outputs) if _is_tensor(x) and id(x) not in passed}


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, require_torch().Tensor)


def isolate(
    module: Any, path: str, call: TorchCall, inner: Forced, pick: Pick
) -> tuple[Any, list[Any]]:
    """Returns a module that makes one call of a part of a model, and the tensors that it takes.

    Args:
        module: the model.
        path: of the part.
        call: of the part, in float64.
        inner: calls in it whose results are given.
        pick: chooses the results.
    """
    torch = require_torch()
    recorded = _recorded(call, inner)
    owner, name = resolve(module, path)

    class Isolated(torch.nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            # Under its own name, by which reports call its parameters.
            self.add_module(path.rpartition(".")[2] or "model", owner)

        def forward(self, *tensors: Any) -> list[Any]:
            (part,) = self.children()
            given = dict(zip(recorded, tensors, strict=True))
            return pick(*_run((part, name), path, call, inner, given))

    return Isolated(), list(recorded.values())


def pull_back(
    module: Any, path: str, call: TorchCall, inner: Forced, cotangents: tuple[Any, Any]
) -> dict[int, np.ndarray]:
    """Runs one call of a part of a model again, and pulls gradients back through it alone.

    The gradients of its arguments and results, and of those of the calls in it, are left in the
    calls.

    Args:
        module: the model.
        path: of the part.
        call: of the part, in float64.
        inner: calls in it whose results are given.
        cotangents: make the gradient of each result, given the result and its place; and of what
            enters the calls in it, given the call too.

    Returns:
        The gradients of the parameters that were read, by the identity of the parameter.

    Raises:
        NotRepeatableError: the part does something else this time.
    """
    torch = require_torch()
    recorded = _recorded(call, inner)
    taken = {one: x.detach().requires_grad_() for one, x in recorded.items() if is_float(x)}
    of_result, of_entered = cotangents
    parameters: dict[int, Any] = {}
    with wide_parameters(module, parameters), torch.enable_grad():
        # A leaf may not be written to, its copy may.
        given = {one: taken.get(one, x).clone() for one, x in recorded.items()}
        results, entered = _run(resolve(module, path), path, call, inner, given)
        pulled: list[tuple[Any, Any]] = []

        def pull(tensor: Any, cotangent: np.ndarray | None) -> np.ndarray | None:
            if cotangent is not None and tensor.requires_grad:
                pulled.append((tensor, torch.from_numpy(cotangent)))
            return cotangent

        call.output_gradients = [pull(x, of_result(n, view(x))) for n, x in enumerate(results)]
        reached = [
            (each, arrays)
            for path, calls in inner.items()
            for each, arrays in zip(calls, entered.get(path, ()), strict=False)
        ]
        for each, arrays in reached:
            each.input_gradients = [
                pull(x, of_entered(each, n, view(x))) for n, x in enumerate(arrays)
            ]
        leaves = [*taken.values(), *parameters.values()]
        found: Sequence[Any] = [None] * len(leaves)
        if pulled and leaves:
            found = torch.autograd.grad(
                [x for x, _ in pulled], leaves, [c for _, c in pulled], allow_unused=True
            )
    known = dict(zip(taken, found, strict=False))

    def gradients(tensors: Sequence[Any]) -> Iterator[np.ndarray]:
        seen = set()
        for tensor in tensors:
            gradient = None if id(tensor) in seen else known.get(id(tensor))
            seen.add(id(tensor))
            zero = np.broadcast_to(0.0, tuple(tensor.shape))
            yield zero if gradient is None else gradient.numpy()

    arguments = [x for x in tensors_in_order((call.args, call.kwargs)) if is_float(x)]
    call.input_gradients = [*gradients(arguments)]
    for each, _ in reached:
        each.output_gradients = [*gradients(floats(each.output))]
    return {
        one: gradient.numpy()
        for one, gradient in zip(parameters, found[len(taken) :], strict=True)
        if gradient is not None
    }

"""A PyTorch module run by itself, while its submodules return given tensors."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.recording.calls.torch_recorder import TorchCall, copied, tensors_in_order
from jaxformer.parity.recording.torch_values import floats, is_float, require_torch, view
from jaxformer.parity.recording.wide_parameters import wide_parameters

# How far what a module returns again may be from what it returned, in float64; and the number of
# values that are compared.
ALIKE, SAMPLE = 1e-7, 1 << 16
# The float tensors of a module's result, and by path and call those that entered submodules.
Ran = tuple[list[Any], Mapping[str, list[list[Any]]]]
# Given that of each module.
Pick = Callable[[list[Ran]], list[Any]]
# The calls of submodules that return what they returned, by path within the module.
Forced = Mapping[str, Sequence[TorchCall]]
# Given a call and the place of a result: whether its gradient is compared.
IsCompared = Callable[[TorchCall, int], bool]


def _all_compared(call: TorchCall, place: int) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Directions:
    """The gradients to pull back through a call, and what they are compared with.

    Attributes:
        of_result: makes the gradient of a result, given its place and the array; None for zero.
        of_entered: the same of what enters a call inside it, given the call too.
        is_compared: whether the gradient of a result of a call inside it is compared, given the
            call and the place.
    """

    of_result: Callable[[int, np.ndarray], np.ndarray | None]
    of_entered: Callable[[TorchCall, int, np.ndarray], np.ndarray | None] = lambda *_: None
    is_compared: IsCompared = _all_compared


@dataclasses.dataclass(frozen=True)
class PulledBack:
    """What came of pulling gradients back through a call.

    Attributes:
        parameters: the gradients of those that were read, by the identity of the parameter.
        has_derived: whether a submodule makes of a result that is compared another one, which is
            used as well.
    """

    parameters: dict[int, np.ndarray]
    has_derived: bool


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
        vars(owner)[name] = functools.partial(called, path, getattr(owner, name))
    try:
        return run()
    finally:
        for owner, name, before in reversed(owners):
            del vars(owner)[name]
            if before is not None:
                vars(owner)[name] = before


def _run(
    part: tuple[Any, str],
    path: str,
    call: TorchCall,
    inner: Forced,
    given: Mapping[int, Any],
    is_compared: IsCompared,
    whole: Collection[int] = (),
    ran: dict[int, tuple[list[Any], list[Any]]] | None = None,
) -> tuple[list[Any], dict[str, list[list[Any]]]]:
    """Returns the float tensors of a module's result, and those that entered its submodules.

    Args:
        part: the module, and its method.
        path: of the module.
        call: of the module.
        inner: calls in it whose results are given.
        given: what stands for each recorded tensor, by its identity.
        is_compared: see ``Directions``.
        whole: identities of calls in it that are made nevertheless.
        ran: collects the float tensors that entered each of these, and those of its result.
    """
    owner, name = part
    entered: dict[str, list[list[Any]]] = {}

    def force(inner_path: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        seen = entered.setdefault(inner_path, [])
        calls = inner[inner_path]
        known = calls[min(len(seen), len(calls) - 1)]
        tensors = [*tensors_in_order((args, kwargs))]
        seen.append([x for x in tensors if is_float(x)])
        if id(known) in whole and ran is not None:
            args, kwargs = copied((args, kwargs), lambda x: x.view_as(x))
            output = original(*args, **kwargs)
            own = [x for x in tensors_in_order((args, kwargs)) if is_float(x)]
            ran[id(known)] = own, floats(output)
            return output
        # What a submodule only passes on is what entered it this time.
        recorded = tensors_in_order((known.args, known.kwargs))
        passed = {id(before): x for before, x in zip(recorded, tensors, strict=False)}
        for n, x in enumerate(floats(known.output)):
            if is_compared(known, n):
                passed.pop(id(x), None)
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


def _recorded(call: TorchCall, inner: Forced, is_compared: IsCompared) -> dict[int, Any]:
    """Returns the tensors that a call is given, and those that calls in it return."""
    leaves = require_torch().utils._pytree.tree_leaves
    made = [each for calls in inner.values() for each in calls]
    outputs = [each.output for each in made]
    passed = {id(x) for each in made for x in leaves((each.args, each.kwargs))}
    passed -= {
        id(x) for each in made for n, x in enumerate(floats(each.output)) if is_compared(each, n)
    }
    found = {id(x): x for x in leaves((call.args, call.kwargs)) if _is_tensor(x)}
    return found | {id(x): x for x in leaves(outputs) if _is_tensor(x) and id(x) not in passed}


def _is_tensor(leaf: Any) -> bool:
    return isinstance(leaf, require_torch().Tensor)


@dataclasses.dataclass(frozen=True)
class Part:
    """One call of a part of a model.

    Attributes:
        path: of the part.
        call: of the part, in float64.
        inner: calls in it whose results are given.
    """

    path: str
    call: TorchCall
    inner: Forced


def isolate(
    module: Any, parts: Sequence[Part], pick: Pick, is_compared: IsCompared
) -> tuple[Any, list[Any]]:
    """Returns a module that makes one call of each part of a model, and the tensors that it takes.

    Args:
        module: the model.
        parts: what is called, one after another.
        pick: chooses the results.
        is_compared: whether a result of a call in a part is given, even if the call only passes it
            on.
    """
    torch = require_torch()
    recorded: dict[int, Any] = {}
    for part in parts:
        recorded |= _recorded(part.call, part.inner, is_compared)

    class Isolated(torch.nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            for part, name in zip(parts, _names(parts), strict=True):
                self.add_module(name, resolve(module, part.path)[0])

        def forward(self, *tensors: Any) -> list[Any]:
            given = dict(zip(recorded, tensors, strict=True))
            return pick(
                [
                    _run(
                        (getattr(self, name), resolve(module, part.path)[1]),
                        part.path, part.call, part.inner, given, is_compared,
                    )
                    for part, name in zip(parts, _names(parts), strict=True)
                ]
            )  # fmt: skip

    return Isolated(), list(recorded.values())


def _names(parts: Sequence[Part]) -> list[str]:
    """Returns the names by which reports call parts: their own ones, where they differ."""
    names = [part.path.rpartition(".")[2] or "model" for part in parts]
    is_own = len(set(names)) == len(names) and not any(name.isdigit() for name in names)
    return names if is_own or len(names) == 1 else [p.path.replace(".", "_") for p in parts]


def pull_back(
    module: Any,
    path: str,
    call: TorchCall,
    inner: Forced,
    directions: Directions,
    buffers: Collection[int] = (),
) -> PulledBack:
    """Runs one call of a part of a model again, and pulls gradients back through it alone.

    The gradients of its arguments and results, and of those of the calls in it, are left in the
    calls.

    Args:
        module: the model.
        path: of the part.
        call: of the part, in float64.
        inner: calls in it whose results are given.
        directions: what to pull back.
        buffers: identities of buffers that have gradients too.

    Raises:
        NotRepeatableError: the part does something else this time.
    """
    made = _Pulled(module, path, call, inner, directions, buffers)
    if derived := made.derived():
        made = _Pulled(module, path, call, inner, directions, buffers, derived)
    return PulledBack(made.leave(), bool(derived))


class _Pulled:
    """One run of a call, forward and backward. For the arguments see ``pull_back``.

    Args:
        whole: identities of calls in it that are made, in place of returning what they returned.
    """

    def __init__(
        self,
        module: Any,
        path: str,
        call: TorchCall,
        inner: Forced,
        directions: Directions,
        buffers: Collection[int],
        whole: Collection[int] = (),
    ):
        torch = require_torch()
        self._call, self._directions = call, directions
        is_compared = directions.is_compared
        recorded = _recorded(call, inner, is_compared)
        leaves = {one: x.detach().requires_grad_() for one, x in recorded.items() if is_float(x)}
        parameters: dict[int, Any] = {}
        # Of calls that are made: what entered them, and their results.
        self._ran: dict[int, tuple[list[Any], list[Any]]] = {}
        with wide_parameters(module, parameters, buffers), torch.enable_grad():
            given = {one: leaves.get(one, x) for one, x in recorded.items()}
            if call.is_copied:
                # A leaf may not be written to, its copy may.
                given = {one: x.clone() for one, x in given.items()}
            part = resolve(module, path)
            results, entered = _run(part, path, call, inner, given, is_compared, whole, self._ran)
            self._reached = [
                (each, arrays)
                for inner_path, calls in inner.items()
                for each, arrays in zip(calls, entered.get(inner_path, ()), strict=False)
            ]
            pulled = [(x, directions.of_result(n, view(x))) for n, x in enumerate(results)]
            self._of_results = [cotangent for _, cotangent in pulled]
            self._of_entered: dict[int, list[np.ndarray | None]] = {}
            for each, arrays in self._reached:
                if id(each) not in whole:
                    own = [directions.of_entered(each, n, view(x)) for n, x in enumerate(arrays)]
                    self._of_entered[id(each)] = own
                    pulled += zip(arrays, own, strict=True)
            asked = leaves | parameters
            asked |= {id(x): x for both in self._ran.values() for x in (*both[0], *both[1])}
            asked = {one: x for one, x in asked.items() if x.requires_grad}
            known = [(x, c) for x, c in pulled if c is not None and x.requires_grad]
            found: Sequence[Any] = [None] * len(asked)
            if known and asked:
                found = torch.autograd.grad(
                    [x for x, _ in known], [*asked.values()],
                    [torch.from_numpy(c) for _, c in known], allow_unused=True,
                )  # fmt: skip
        self._found = {
            one: each.numpy() for one, each in zip(asked, found, strict=True) if each is not None
        }
        self._parameters = [*parameters]

    def derived(self) -> set[int]:
        """Returns the identities of calls with a result that is used, but not compared."""
        return {
            id(each)
            for each, _ in self._reached
            for n, x in enumerate(floats(each.output))
            if id(x) in self._found and not self._directions.is_compared(each, n)
        }

    def leave(self) -> dict[int, np.ndarray]:
        """Leaves the gradients in the calls, and returns those of the parameters."""
        arguments = tensors_in_order((self._call.args, self._call.kwargs))
        self._call.input_gradients = self._gradients([x for x in arguments if is_float(x)])
        self._call.output_gradients = self._of_results
        for each, _ in self._reached:
            own, results = self._ran.get(id(each), ([], floats(each.output)))
            each.output_gradients = self._gradients(results)
            each.input_gradients = self._of_entered.get(id(each)) or self._gradients(own)
        return {one: self._found[one] for one in self._parameters if one in self._found}

    def _gradients(self, tensors: Sequence[Any]) -> list[np.ndarray | None]:
        """Returns the gradient of each tensor; if one stands twice, the first has all of it."""
        found: dict[int, np.ndarray] = {}
        made: list[np.ndarray | None] = []
        for x in tensors:
            zero = np.broadcast_to(0.0, tuple(x.shape))
            made.append(zero if id(x) in found else self._found.get(id(x), zero))
            found[id(x)] = zero
        return made

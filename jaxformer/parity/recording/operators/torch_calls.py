"""The calls of a reference's modules: what entered and left them, and the gradients of that."""

import contextlib
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.recording.operators.torch_recorder import place_of
from jaxformer.parity.recording.reference_modules import modules_of, owner_of
from jaxformer.parity.recording.torch_values import floats, integers, map_nested, require_torch


@dataclasses.dataclass
class ModuleCall:
    """One call of a module.

    Attributes:
        begin: the place on the tape of its first operator.
        entered: the values of the tensors that entered it, each once.
        positions: its argument ``position_ids``, if there was one.
        end: the place of the first operator after it; -1 while it runs.
        returned: of the tensors of floats that it returned.
        chosen: of the tensors of integers in a named tuple that it returned.
        passed_on: of the floats, by place, which of those are the same tensor that entered.
        entered_gradients: by place in ``entered``, the gradient of what entered this call; None for
            zero. Of what is not differentiated there is none.
        returned_gradients: the same by place in ``returned``.
    """

    begin: int
    entered: list[Value]
    positions: Value | None = None
    end: int = -1
    returned: list[Value] = dataclasses.field(default_factory=list)
    chosen: list[Value] = dataclasses.field(default_factory=list)
    passed_on: dict[int, int] = dataclasses.field(default_factory=dict)
    entered_gradients: dict[int, Value | None] = dataclasses.field(default_factory=dict)
    returned_gradients: dict[int, Value | None] = dataclasses.field(default_factory=dict)


class _Entered:
    """The arguments of a call, with what the module gets in their place.

    It gets an alias of each tensor, and a copy of each list and dict. What is one object stays one.

    Attributes:
        tensors: the aliases.
    """

    def __init__(self) -> None:
        self.tensors: list[Any] = []
        # What is kept here has a number that nothing else gets.
        self._known: dict[int, tuple[Any, Any]] = {}

    def own(self, value: Any) -> Any:
        """Returns what the module gets in place of a value."""
        torch = require_torch()
        if type(value) is tuple:
            return tuple(map(self.own, value))
        if id(value) in self._known:
            return self._known[id(value)][1]
        if isinstance(value, torch.Tensor):
            made: Any = torch.ops.aten.alias(value)
            self.tensors.append(made)
        elif type(value) is list:
            made = [*map(self.own, value)]
        elif type(value) is dict:
            made = {name: self.own(inner) for name, inner in value.items()}
        else:
            return value
        self._known[id(value)] = value, made
        return made

    def write_back(self) -> None:
        """Writes to the lists and dicts that were given what the module has written to its own."""
        originals = {id(made): value for value, made in self._known.values()}
        for value, made in self._known.values():
            if isinstance(value, list):
                value[:] = [originals.get(id(inner), inner) for inner in made]
            elif isinstance(value, dict):
                found = {name: originals.get(id(inner), inner) for name, inner in made.items()}
                value.clear()
                value.update(found)


class WatchedForward:
    """What is called in place of the forward pass of a module whose calls are recorded.

    Args:
        enter: takes the arguments, and returns those that the module gets.
        original: the module's own.

    Attributes:
        original: what the module computes; another function may be put in its place.
    """

    def __init__(self, enter: Callable[[Any, Any], tuple[Any, Any]], original: Callable[..., Any]):
        # It has the same signature.
        functools.update_wrapper(self, original)
        self._enter, self.original = enter, original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Records the call and returns what is computed."""
        given, named = self._enter(args, kwargs)
        return self.original(*given, **named)


class WatchedCalls:
    """Records the calls of modules beside their operators.

    What enters a module is a tensor of its own, which has a gradient of its own: that which comes
    back through this call. What is one object stays one object. So is what a module only passes on.

    Args:
        recorder: of the operators.
        tape: which it records onto.

    Attributes:
        calls: of each module that is watched, by path, its calls.
    """

    def __init__(self, recorder: Any, tape: Tape):
        self._recorder, self._tape = recorder, tape
        self.calls: dict[str, list[ModuleCall]] = defaultdict(list)
        # Of each call that is running, what entered it and how often each tensor was written.
        self._running: list[tuple[ModuleCall, _Entered, list[int]]] = []
        self._taking: list[Any] = []

    @contextlib.contextmanager
    def watching(self, module: Any, paths: Collection[str]) -> Iterator[None]:
        """Records the calls of modules, by path, inside the ``with`` block."""
        with contextlib.ExitStack() as stack:
            for path, inner in modules_of(module).items():
                if path not in paths:
                    continue
                if owner_of(path, inner) == path:
                    # Hooks that keep what enters the module keep the tensor that others read; what
                    # hooks make of its output belongs to it.
                    watched = WatchedForward(partial(self._enter, path), inner.forward)
                    stack.enter_context(_replaced(inner, "forward", watched))
                    stack.callback(inner.register_forward_hook(self._leave).remove)
                else:
                    name = path.rpartition(".")[2]
                    call = partial(self._call, path, getattr(inner, name))
                    stack.enter_context(_replaced(inner, name, call))
            yield

    def _call(self, path: str, original: Any, *args: Any, **kwargs: Any) -> Any:
        given, named = self._enter(path, args, kwargs)
        return self._leave(None, args, original(*given, **named))

    def _enter(self, path: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        entered = _Entered()
        given = entered.own(tuple(args))
        named = {name: entered.own(value) for name, value in kwargs.items()}
        tensors = entered.tensors
        positions = named.get("position_ids")
        call = ModuleCall(
            len(self._tape.operators),
            [self._recorder.value(tensor) for tensor in tensors],
            None if positions is None else self._recorder.value(positions),
        )
        for value in call.entered:
            # No line of the module's code makes this copy.
            if value.producer is not None and value.producer.name == "alias":
                value.producer.source = ""
        self.calls[path].append(call)
        self._running.append((call, entered, [tensor._version for tensor in tensors]))
        self._take_gradients(tensors, call.entered_gradients)
        return given, named

    def _leave(self, module: Any, args: Any, output: Any) -> Any:
        torch = require_torch()
        call, entered, versions = self._running.pop()
        entered.write_back()
        call.end = len(self._tape.operators)
        # Modules inside may have made copies of it. What was written into is made here.
        places = {
            place_of(tensor): place
            for place, (tensor, version) in enumerate(zip(entered.tensors, versions, strict=True))
            if tensor._version == version
        }
        aliases: dict[int, tuple[Any, int]] = {}

        def alias(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or place_of(value) not in places:
                return value
            made = torch.ops.aten.alias(value)
            aliases[id(made)] = made, places[place_of(value)]
            return made

        made = map_nested(alias, output)
        tensors = floats(made)
        call.returned = [self._recorder.value(tensor) for tensor in tensors]
        call.chosen = [self._recorder.value(tensor) for tensor in integers(made)]
        found = ((n, aliases.get(id(tensor))) for n, tensor in enumerate(tensors))
        call.passed_on = {n: one[1] for n, one in found if one is not None}
        self._take_gradients(tensors, call.returned_gradients)
        return made

    def _take_gradients(self, tensors: Sequence[Any], found: dict[int, Value | None]) -> None:
        for place, array in enumerate(tensors):
            if array.requires_grad:
                found[place] = None
                self._taking.append(array.register_hook(partial(self._take, found, place)))

    def _take(self, found: dict[int, Value | None], place: int, gradient: Any) -> None:
        found[place] = self._recorder.value(gradient)

    def stop_taking(self) -> None:
        """Takes no more gradients. PyTorch's graph would keep what takes them for ever."""
        for hook in self._taking:
            hook.remove()
        self._taking = []


@contextlib.contextmanager
def _replaced(module: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Calls a function in place of a method."""
    own = vars(module)
    is_own, original = name in own, getattr(module, name)
    own[name] = function
    try:
        yield
    finally:
        if is_own:
            own[name] = original
        else:
            del own[name]

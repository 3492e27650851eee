"""The ATen operators of a PyTorch module, run in float64, with source lines and module paths."""

import contextlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.recording.operators.candidates import Caller
from jaxformer.parity.recording.operators.graph import Value
from jaxformer.parity.recording.operators.signatures import positional_names
from jaxformer.parity.recording.operators.tape import Tape
from jaxformer.parity.recording.operators.torch_calls import WatchedCalls
from jaxformer.parity.recording.operators.torch_parameters import (
    first_names,
    frozen_names,
    padding_rows,
    stored_numbers,
)
from jaxformer.parity.recording.operators.torch_recorder import (
    Softmax,
    float64_by_default,
    make_recorder,
)
from jaxformer.parity.recording.operators.torch_weights import keep_what_is_read, with_wide_weights
from jaxformer.parity.recording.reference_modules import modules_of
from jaxformer.parity.recording.result_parts import in_real_parts
from jaxformer.parity.recording.torch_values import (
    floats,
    is_float,
    is_whole,
    map_nested,
    require_torch,
    result_tensors,
    tensor,
    widest,
    without_fast_path,
)


class TorchRun:
    """One run of a copy of a module in float64, in evaluation mode: forward, then backward.

    Args:
        module: it is not changed.
        args: positional arguments; numpy arrays become tensors.
        kwargs: named arguments.
        backward: whether to prepare the backward pass.
        buffers: paths of buffers that have gradients too.
        caller: how to call the module, given it and its inputs; None to call it with them.
        before_forgetting: called with each value whose array is let go of.
        watched: paths of the modules whose calls are recorded.

    Attributes:
        tape: the operators.
        stored: the parameters by path, as the module has them; 16 bits become float32, and complex
            numbers pairs of real ones, in a last axis.
        returned: of each module that was called, by path, the float values that it returned.
        calls: of each module that is watched, by path, its calls.
        kinds: the class of each module, by path, a module before those inside it.
        kinds_of_all: the same, of methods that are called like modules too.
        softmaxes: those of the forward pass.
        first_names: of each name of a tied parameter, the first one.
        padding_rows: by the name of an embedding's parameter, the row of its padding token, which
            PyTorch does not train; here its gradient is computed.
        frozen: names of the parameters that the module does not train, beside others that it does;
            here their gradients are computed.
        no_gradients: why there is no backward pass; "" if there is one.
    """

    def __init__(
        self,
        module: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        backward: bool = True,
        buffers: Collection[str] = (),
        caller: Caller | None = None,
        before_forgetting: Callable[[Value], None] | None = None,
        watched: Collection[str] = (),
    ):
        torch = require_torch()
        wide, weights = with_wide_weights(module)
        self.tape = Tape()
        self.stored = {name: stored_numbers(p) for name, p in module.named_parameters()}
        self.returned: dict[str, list[Value]] = {}
        self.kinds = {path: type(inner).__name__ for path, inner in wide.named_modules()}
        self.kinds_of_all = {path: type(one).__name__ for path, one in modules_of(wide).items()}
        self.first_names = first_names(wide)
        self.padding_rows = padding_rows(wide)
        self.frozen = frozen_names(module)
        self.no_gradients = ""
        self._recorder = make_recorder(self.tape, weights, before_forgetting)
        self._leaves: dict[int, Any] = {}
        pairs = _Pairs()
        for name, one in wide.named_parameters():
            parameter = pairs.leaf(one)
            parameter.requires_grad_(backward and parameter.dtype.is_floating_point)
            self._name(parameter, name, "parameter")
        for name, one in wide.named_buffers():
            buffer = pairs.leaf(one)
            if buffer.dtype.is_floating_point:
                buffer.requires_grad_(backward and name in buffers)
                self._name(buffer, name, "constant")
        given: list[Any] = map_nested(_tensor, list(args))
        named: dict[str, Any] = map_nested(_tensor, dict(kwargs))
        for name, value in _tensors("", {**dict(enumerate(given)), **named}):
            value.requires_grad_(backward and value.dtype.is_floating_point)
            self._name(value, name, "input")
        if caller is None:
            self.tape.argument_names = positional_names(module.forward, len(given))
        paths = _paths(wide, self._recorder.stack, self._leave)
        self._watched = WatchedCalls(self._recorder, self.tape)
        self.calls = self._watched.calls
        watching = self._watched.watching(wide, watched)
        reading = keep_what_is_read(weights)
        with contextlib.ExitStack() as stack, _settings(), torch.set_grad_enabled(backward):
            stack.callback(self.close)
            with paths, watching, reading, self._recorder:
                pairs.join(wide)
                output = _call(wide, given, named, caller)
                tensors = list(in_real_parts(result_tensors(output)))
            stack.pop_all()
        logits = [one for one in [getattr(output, "logits", None)] if is_float(one)]
        results = [tensor for _, tensor in tensors if is_float(tensor)]
        found = [*logits, *(t for t in results if not any(t is one for one in logits))]
        self.tape.outputs = [self._recorder.value(tensor) for tensor in found]
        names = {id(tensor): name for name, tensor in tensors}
        self.tape.output_names = [names.get(id(tensor), "logits") for tensor in found]
        self.tape.choices = {
            name: self._recorder.value(tensor) for name, tensor in tensors if is_whole(tensor)
        }
        self._outputs = found
        self.softmaxes: list[Softmax] = self._recorder.softmaxes
        self._recorder.forget()

    def close(self) -> None:
        """Takes no more gradients of calls; after it there is no backward pass.

        Values can still be read. They let go of what was made of them.
        """
        self._watched.stop_taking()
        self.tape.recent.clear()
        for value in self.tape.values:
            value.consumers = []

    def _name(self, tensor: Any, name: str, kind: str) -> None:
        value = self._recorder.name(tensor, name, kind)
        if tensor.requires_grad:
            self._leaves[value.index] = tensor

    def _leave(self, path: str, output: Any) -> None:
        found = [self._recorder.value(_of_all_rows(tensor)) for tensor in floats(output)]
        self.returned.setdefault(path, []).extend(found)

    def backward(self, cotangents: Mapping[int, np.ndarray]) -> dict[int, Value]:
        """Records the backward pass.

        Args:
            cotangents: of outputs, by the index of their value; the others have none.

        Returns:
            the gradient of each parameter, of each float input and of the buffers that were asked
            for, by the index of its value. Empty if the module cannot be differentiated;
            ``no_gradients`` then says why.
        """
        torch = require_torch()
        # A tensor that is returned twice has its cotangent once.
        outputs = {
            value.index: tensor
            for tensor, value in zip(self._outputs, self.tape.outputs, strict=True)
        }
        given = [
            (tensor, torch.from_numpy(np.array(cotangents[index])))
            for index, tensor in outputs.items()
            if index in cotangents and tensor.requires_grad
        ]
        if not given:
            self.no_gradients = "no result of the reference depends on a parameter or a float input"
            return {}
        for _, cotangent in given:
            self._recorder.name(cotangent, "cotangent", "input")
        gradients: dict[int, Value] = {}
        hooks = [leaf.register_hook(self._taker(gradients, i)) for i, leaf in self._leaves.items()]
        try:
            with _settings(), self._recorder:
                found = torch.autograd.grad(
                    [tensor for tensor, _ in given],
                    list(self._leaves.values()),
                    [cotangent for _, cotangent in given],
                    allow_unused=True,
                    materialize_grads=True,
                )
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            self.no_gradients = f"the reference cannot be differentiated: {reason}"
            return {}
        finally:
            for hook in hooks:
                hook.remove()
            self._watched.stop_taking()
        # Those of what no result depends on are zeros, which no line made.
        for index, gradient in zip(self._leaves, found, strict=True):
            if index not in gradients:
                value = gradients[index] = self._recorder.gradient(gradient)
                reader = next(iter(self.tape.values[index].consumers), None)
                if value.producer is not None and reader is not None:
                    value.producer.source, value.producer.module = reader.source, reader.module
        del found
        self._recorder.forget()
        return gradients

    def stops(self) -> list[str]:
        """Returns "path:line" of each place where the module's code stops gradients."""
        return list(filter(None, self._recorder.stops.sources))

    def _taker(self, gradients: dict[int, Value], index: int) -> Callable[[Any], Any]:
        """Returns what takes a gradient as soon as it is there, and gives PyTorch no memory of it.

        PyTorch would keep all gradients until the last one is there.
        """
        leaf = self._leaves[index]
        stand_in = leaf.new_zeros(()).expand(leaf.shape)

        def take(gradient: Any) -> Any:
            gradients[index] = self._recorder.gradient(gradient)
            return stand_in

        return take


class _Pairs:
    """Complex parameters and buffers of a module as pairs of real numbers, which have gradients."""

    def __init__(self) -> None:
        self._pairs: dict[int, tuple[Any, Any]] = {}

    def leaf(self, array: Any) -> Any:
        """Returns the pairs of a complex array, any other array unchanged."""
        if not array.is_complex():
            return array
        pair = require_torch().view_as_real(array.detach()).clone()
        self._pairs[id(array)] = array, pair
        return pair

    def join(self, module: Any) -> None:
        """Makes the module have complex numbers of the pairs in place of its own."""
        torch = require_torch()
        joined = {key: torch.view_as_complex(pair) for key, (_, pair) in self._pairs.items()}
        for inner in module.modules() if joined else ():
            for arrays in (inner._parameters, inner._buffers):
                own = {n: joined[id(a)] for n, a in arrays.items() if id(a) in joined}
                arrays.update(own)


def run_torch(
    module: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    backward: bool,
    buffers: Sequence[str],
    caller: Caller | None = None,
    before_forgetting: Callable[[Value], None] | None = None,
    watched: Collection[str] = (),
) -> TorchRun:
    """Runs a module; without a backward pass if it writes over what that would read.

    PyTorch does not differentiate by every buffer: the means of a batch norm have no gradients.
    Arguments as in ``TorchRun``.
    """
    reason = ""
    for asked in dict.fromkeys([tuple(buffers), ()]) if backward else ():
        try:
            return TorchRun(module, args, kwargs, True, asked, caller, before_forgetting, watched)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
    run = TorchRun(module, args, kwargs, False, (), caller, before_forgetting, watched)
    if reason:
        run.no_gradients = f"the reference cannot be differentiated: {reason}"
    return run


def raised_alone(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], caller: Caller | None = None
) -> Exception | None:
    """Returns what a module raises where its operators are not recorded; None if nothing.

    Arguments as in ``TorchRun``.
    """
    wide, _ = with_wide_weights(module)
    try:
        with _settings():
            _call(wide, map_nested(_tensor, list(args)), map_nested(_tensor, dict(kwargs)), caller)
    except Exception as error:
        return error
    return None


def _call(module: Any, given: list[Any], named: dict[str, Any], caller: Caller | None) -> Any:
    return module(*given, **named) if caller is None else caller(module, named or given)


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Makes PyTorch compute everything in float64, in operators that can be recorded."""
    torch = require_torch()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with contextlib.ExitStack() as stack:
        if "torch._dynamo" in sys.modules:
            # Of a compiled function the operators are not seen.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(float64_by_default())
        stack.enter_context(without_fast_path())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


def _of_all_rows(tensor: Any) -> Any:
    """Returns the tensor of all rows of which ``torch.func.vmap`` shows a function one."""
    functorch = require_torch()._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def _tensor(value: Any) -> Any:
    torch = require_torch()
    if isinstance(value, np.ndarray):
        value = tensor(value)
    if isinstance(value, torch.Tensor):
        return value.long() if value.dtype == torch.int32 else value.to(widest(value.dtype))
    return value


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the tensors of nested lists, tuples and dicts, with their paths."""
    if isinstance(value, require_torch().Tensor):
        yield name, value
        return
    inside = enumerate(value) if type(value) in (list, tuple) else ()
    for key, inner in value.items() if type(value) is dict else inside:
        yield from _tensors(f"{name}.{key}".lstrip("."), inner)


@contextlib.contextmanager
def _paths(module: Any, stack: list[str], leave: Callable[[str, Any], None]) -> Iterator[None]:
    """Keeps the path of the module that is running on top of a stack."""
    hooks = []
    for path, inner in module.named_modules():

        def enter(module: Any, args: Any, path: str = path) -> None:
            stack.append(path)

        def done(module: Any, args: Any, output: Any, path: str = path) -> None:
            leave(path, output)
            stack.pop()

        hooks += [inner.register_forward_pre_hook(enter), inner.register_forward_hook(done)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()

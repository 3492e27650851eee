"""Records the calls of PyTorch modules while a model runs, with hooks on each module."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.trace import torch_values
from jaxformer.parity.trace.attention import RecordedWeights, attention_scores

# Methods that are called like modules (as in torch_ref): path of the module + name.
METHODS = ("attend",)
# Scores below BLOCKED are masked out, above ALLOWED they are not: masks add or fill in -1e9, the
# dtype's minimum, or minus infinity, and some old ones -1e4, which a real score might also be.
BLOCKED, ALLOWED = -1e8, -5e3


@dataclasses.dataclass
class TorchCall:
    """One call of one PyTorch module.

    Attributes:
        order: its place among all calls of the pass.
        inputs: its float arrays, positional ones first.
        identities: of each input, a number that is equal for inputs that are one tensor.
        integers: its integer arrays, positional ones first.
        positions: its argument ``position_ids``, if there was one.
        outputs: the float arrays of its result.
        integer_outputs: its integer arrays: which experts a router chose.
        input_gradients: of each input, through this call alone; None where it needs no gradient.
        output_gradients: of each output; None without a backward pass.
        weights: of its attention, if it computed any.
        allowed: of each attention in it, (B, N, T, S): 1 where a query may attend to a key, -1
            where it may not, 0 where the score does not tell.
        later: further calls of the same module.
    """

    order: int
    inputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    identities: list[int] = dataclasses.field(default_factory=list)
    integers: list[np.ndarray] = dataclasses.field(default_factory=list)
    positions: np.ndarray | None = None
    outputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    integer_outputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    input_gradients: list[np.ndarray | None] = dataclasses.field(default_factory=list)
    output_gradients: list[np.ndarray | None] = dataclasses.field(default_factory=list)
    weights: RecordedWeights | None = None
    allowed: list[np.ndarray] = dataclasses.field(default_factory=list)
    later: list["TorchCall"] = dataclasses.field(default_factory=list)

    @property
    def all(self) -> list["TorchCall"]:
        """This call and the further ones."""
        return [self, *self.later]


def modules_of(module: Any) -> dict[str, Any]:
    """Returns all modules by path, and by path + name the owners of methods called like modules."""
    found = {}
    for path, inner in module.named_modules():
        found[path] = inner
        for name in METHODS:
            if callable(getattr(inner, name, None)):
                found[f"{path}.{name}".lstrip(".")] = inner
    return found


def owner_of(path: str, module: Any) -> str:
    """Returns the path of the module itself, also where ``path`` is that of a called method."""
    owner, _, name = path.rpartition(".")
    return owner if name in METHODS and callable(getattr(module, name, None)) else path


def tied_parameters(modules: Mapping[str, Any], kept: Container[str]) -> dict[str, list[str]]:
    """Returns, by path of each kept module, its parameters that other modules use too."""
    holders: dict[int, list[tuple[str, str]]] = {}
    for path, inner in modules.items():
        for leaf, parameter in inner._parameters.items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((path, leaf))
    tied: dict[str, list[str]] = {}
    for places in holders.values():
        for path, leaf in places if len(places) > 1 else ():
            if path in kept:
                tied.setdefault(path, []).append(leaf)
    return tied


def _alias(value: Any) -> Any:
    """Returns another tensor of the same numbers, if it is one of floats."""
    return value.view_as(value) if torch_values.is_float(value) else value


class CallRecorder:
    """Records the calls of modules, and in a backward pass their gradients.

    Args:
        backward: whether a backward pass follows.
        tied: names of tied parameters by the path of a module that uses them.
        copying: whether to copy arrays; otherwise they share memory with the tensors.

    Attributes:
        calls: the first call of every module, by path.
        shares: of tied parameters, the gradient that came through each of their modules.
    """

    def __init__(self, backward: bool, tied: Mapping[str, Sequence[str]], copying: bool):
        self.backward = backward
        self.tied = tied
        self.copying = copying
        # Tensors recorded without a copy, and how often each had been written to by then.
        self.uncopied: list[tuple[Any, int]] = []
        self.calls: dict[str, TorchCall] = {}
        self.shares: dict[str, np.ndarray] = {}
        self.count = 0
        self.running: list[TorchCall] = []
        # Of each running call: where in a list or dict an alias stands for a tensor.
        self._aliases: list[list[tuple[Any, Any, Any, Any]]] = []

    def array(self, tensor: Any) -> np.ndarray:
        """Returns a tensor as an array, without a copy where possible: activations are large."""
        if self.copying:
            return torch_values.array(tensor)
        self.uncopied.append((tensor, tensor._version))
        return torch_values.view(tensor)

    def is_intact(self) -> bool:
        """Returns whether no recorded tensor was overwritten later; call it once, at the end."""
        intact = all(tensor._version == version for tensor, version in self.uncopied)
        # Tensors hold their hooks, and the hooks hold the recorder.
        self.uncopied.clear()
        return intact

    def _store(self, gradients: list[np.ndarray | None], place: int, gradient: Any) -> None:
        gradients[place] = self.array(gradient)

    @contextlib.contextmanager
    def recording(self, modules: Mapping[str, Any]) -> Iterator[None]:
        """Records the calls of these modules inside the ``with`` block."""
        with contextlib.ExitStack() as stack:
            for path, module in modules.items():
                if owner_of(path, module) != path:
                    name = path.rpartition(".")[2]
                    stack.enter_context(self._recording_method(path, module, name))
                    continue
                before = functools.partial(self._before_call, path)
                after = functools.partial(self._after_call, path)
                for handle in (
                    module.register_forward_pre_hook(before, with_kwargs=True),
                    module.register_forward_hook(after, with_kwargs=True, always_call=True),
                ):
                    stack.callback(handle.remove)
            yield

    @contextlib.contextmanager
    def _recording_method(self, path: str, module: Any, name: str) -> Iterator[None]:
        original = getattr(module, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._before_call(path, module, args, kwargs)
            output = None
            try:
                output = original(*args, **kwargs)
            finally:
                self._after_call(path, module, args, kwargs, output)
            return output

        vars(module)[name] = method
        try:
            yield
        finally:
            del vars(module)[name]

    def _before_call(self, path: str, module: Any, args: Any, kwargs: Any) -> Any:
        made = TorchCall(self.count)
        self.count += 1
        self.running.append(made)
        self._aliases.append([])
        if path in self.calls:
            self.calls[path].later.append(made)
        else:
            self.calls[path] = made
        for leaf in self.tied.get(path, ()):
            own = module._parameters[leaf]
            # An alias collects the gradient that comes through this module alone.
            module._parameters[leaf] = self._share(f"{path}.{leaf}", own)
        if torch_values.is_integer(kwargs.get("position_ids")):
            made.positions = self.array(kwargs["position_ids"])
        return (
            tuple(self._record_argument(made, value) for value in args),
            {name: self._record_argument(made, value) for name, value in kwargs.items()},
        )

    def _after_call(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        made = self.running.pop()
        for container, key, alias, value in self._aliases.pop():
            if container[key] is alias:
                container[key] = value
        for leaf in self.tied.get(path, ()):
            module._parameters[leaf] = module._parameters[leaf].aliased
        if self.backward and isinstance(output, tuple) and hasattr(output, "_fields"):
            # One of several results may be made of another: an alias has the gradient that comes
            # from outside alone.
            output = type(output)(*(_alias(value) for value in output))
        made.integer_outputs = [self.array(value) for value in torch_values.integers(output)]
        for value in torch_values.floats(output):
            made.outputs.append(self.array(value))
            made.output_gradients.append(None)
            if not self.backward:
                continue
            if not value.requires_grad:
                # A gradient that stops here is recorded too, to show which module stops it.
                value.requires_grad_()
            made.output_gradients[-1] = np.broadcast_to(0.0, tuple(value.shape))
            place = len(made.outputs) - 1
            value.register_hook(functools.partial(self._store, made.output_gradients, place))
        return output

    def _record_argument(self, made: TorchCall, value: Any) -> Any:
        """Records one argument, and returns it, or an alias of it if it needs a gradient."""
        if type(value) is tuple:
            return tuple(self._record_argument(made, inner) for inner in value)
        if type(value) in (list, dict):
            # The call may write to it: a cache.
            for key in range(len(value)) if type(value) is list else list(value):
                inner = value[key]
                value[key] = self._record_argument(made, inner)
                if value[key] is not inner:
                    self._aliases[-1].append((value, key, value[key], inner))
            return value
        if torch_values.is_integer(value):
            made.integers.append(self.array(value))
        if not torch_values.is_float(value):
            return value
        made.inputs.append(self.array(value))
        made.identities.append(id(value))
        made.input_gradients.append(None)
        if not (self.backward and value.requires_grad):
            return value
        place = len(made.inputs) - 1
        made.input_gradients[place] = np.broadcast_to(0.0, tuple(value.shape))
        alias = value.view_as(value)
        alias.register_hook(functools.partial(self._store, made.input_gradients, place))
        return alias

    def _share(self, name: str, parameter: Any) -> Any:
        # A leaf of its own: nobody needs the sum of all shares, which would be one more array.
        alias = parameter.detach().requires_grad_()
        alias.aliased = parameter

        def add(alias: Any) -> None:
            before = self.shares.get(name)
            share = self.array(alias.grad)
            alias.grad = None
            self.shares[name] = share if before is None else before + share

        alias.register_post_accumulate_grad_hook(add)
        return alias

    @contextlib.contextmanager
    def recording_attention(self) -> Iterator[None]:
        """Records attention weights and masks, from every softmax inside the ``with`` block."""
        torch = torch_values.require_torch()
        functional = torch.nn.functional
        owners = ((functional, "softmax"), (torch, "softmax"), (torch.Tensor, "softmax"))
        saved = [getattr(owner, name) for owner, name in owners]
        fused = functional.scaled_dot_product_attention
        busy = False

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def softmax(scores: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal busy
                # One of these functions calls another.
                outermost, busy = not busy, True
                try:
                    result = original(scores, *args, **kwargs)
                finally:
                    busy = not outermost
                if outermost:
                    self._record_attention(scores, result)
                return result

            return softmax

        @functools.wraps(fused)
        def attention(
            query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0,
            *args: Any, **kwargs: Any,
        ) -> Any:  # fmt: skip
            if query.dim() == 4:
                with torch.no_grad():
                    scores = attention_scores(query, key, attn_mask, *args, **kwargs)
                    self._record_attention(scores, saved[1](scores, -1))
            return fused(query, key, value, attn_mask, dropout_p, *args, **kwargs)

        try:
            for (owner, name), original in zip(owners, saved, strict=True):
                setattr(owner, name, wrap(original))
            functional.scaled_dot_product_attention = attention
            yield
        finally:
            functional.scaled_dot_product_attention = fused
            for (owner, name), original in zip(owners, saved, strict=True):
                setattr(owner, name, original)

    def _record_attention(self, scores: Any, weights: Any) -> None:
        if not self.running or weights.dim() != 4:
            return
        made = self.running[-1]
        made.weights = made.weights or RecordedWeights.of(torch_values.view(weights))
        scores = torch_values.view(scores)
        made.allowed.append((scores > ALLOWED).astype(np.int8) - (scores < BLOCKED))

"""What passes through their modules while they run."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxformer.parity.trace import torch_values
from jaxformer.parity.trace.recorded_weights import RecordedWeights

# Methods that are called like modules, as in torch_ref: path of the module + name.
METHODS = ("attend",)
# Scores below the first are blocked, above the second allowed: masks add or fill in -1e9, the
# least number of the dtype, or minus infinity, and some old ones -1e4, as a real score might be.
BLOCKED, ALLOWED = -1e8, -5e3


@dataclasses.dataclass
class Call:
    """One call of one module.

    Attributes:
        order: its place among all calls.
        inputs: its float arrays, positional ones first.
        identities: of each input, a number that two have alike if they are one tensor.
        integers: its integer arrays, positional ones first.
        positions: of its tokens, where they were given by this name.
        outputs: the float arrays of its result.
        input_gradients: of each input, through this call alone; None where it has none to give.
        output_gradients: of each output; None without a backward pass.
        weights: of attention, if it computed such.
        allowed: who may attend to whom, of each attention that it computed.
        later: further calls of the same module.
    """

    order: int
    inputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    identities: list[int] = dataclasses.field(default_factory=list)
    integers: list[np.ndarray] = dataclasses.field(default_factory=list)
    positions: np.ndarray | None = None
    outputs: list[np.ndarray] = dataclasses.field(default_factory=list)
    input_gradients: list[np.ndarray | None] = dataclasses.field(default_factory=list)
    output_gradients: list[np.ndarray | None] = dataclasses.field(default_factory=list)
    weights: RecordedWeights | None = None
    allowed: list[np.ndarray] = dataclasses.field(default_factory=list)
    later: list["Call"] = dataclasses.field(default_factory=list)

    @property
    def all(self) -> list["Call"]:
        """This call and the further ones."""
        return [self, *self.later]


def modules_of(module: Any) -> dict[str, Any]:
    """All modules by path, and by path and name those that have methods called like modules."""
    found = {}
    for path, inner in module.named_modules():
        found[path] = inner
        for name in METHODS:
            if callable(getattr(inner, name, None)):
                found[f"{path}.{name}".lstrip(".")] = inner
    return found


def owner_of(path: str, module: Any) -> str:
    """The path of the module, where a path of ``modules_of`` ends in one of its methods."""
    owner, _, name = path.rpartition(".")
    return owner if name in METHODS and callable(getattr(module, name, None)) else path


def tied_parameters(modules: Mapping[str, Any], kept: Container[str]) -> dict[str, list[str]]:
    """The parameters that are used in several places, by the path of those that are kept."""
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


def _scores(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """What ``scaled_dot_product_attention`` takes the softmax of."""
    torch = torch_values.require_torch()
    if enable_gqa:
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = query @ key.transpose(-2, -1)
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        return scores
    if attn_mask.dtype == torch.bool:
        return scores.masked_fill(~attn_mask, -torch.inf)
    return scores + attn_mask


class Watcher:
    """Notes what passes through modules while they run.

    Attributes:
        calls: the first of every module.
        shares: of tied parameters, the gradient that came through each of their modules.
    """

    def __init__(self, backward: bool, tied: Mapping[str, Sequence[str]], copying: bool):
        self.backward = backward
        self.tied = tied
        self.copying = copying
        # What was noted without a copy, and how often it had been written to.
        self.noted: list[tuple[Any, int]] = []
        self.calls: dict[str, Call] = {}
        self.shares: dict[str, np.ndarray] = {}
        self.count = 0
        self.running: list[Call] = []

    def array(self, tensor: Any) -> np.ndarray:
        """A tensor's numbers, where possible without a copy: activations are many."""
        if self.copying:
            return torch_values.array(tensor)
        self.noted.append((tensor, tensor._version))
        return torch_values.view(tensor)

    def is_whole(self) -> bool:
        """Whether nothing that was noted has been written to since; asked once, at the end."""
        whole = all(tensor._version == version for tensor, version in self.noted)
        # Tensors hold their hooks, and these the watcher.
        self.noted.clear()
        return whole

    def _put(self, gradients: list[np.ndarray | None], place: int, gradient: Any) -> None:
        gradients[place] = self.array(gradient)

    @contextlib.contextmanager
    def watching(self, modules: Mapping[str, Any]) -> Iterator[None]:
        """Notes the calls of these modules."""
        with contextlib.ExitStack() as stack:
            for path, module in modules.items():
                if owner_of(path, module) != path:
                    name = path.rpartition(".")[2]
                    stack.enter_context(self._watching_method(path, module, name))
                    continue
                enter, leave = (functools.partial(f, path) for f in (self._enter, self._leave))
                before = module.register_forward_pre_hook(enter, with_kwargs=True)
                after = module.register_forward_hook(leave, with_kwargs=True, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield

    @contextlib.contextmanager
    def _watching_method(self, path: str, module: Any, name: str) -> Iterator[None]:
        original = getattr(module, name)

        def method(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._enter(path, module, args, kwargs)
            output = None
            try:
                output = original(*args, **kwargs)
            finally:
                self._leave(path, module, args, kwargs, output)
            return output

        vars(module)[name] = method
        try:
            yield
        finally:
            del vars(module)[name]

    def _enter(self, path: str, module: Any, args: Any, kwargs: Any) -> Any:
        made = Call(self.count)
        self.count += 1
        self.running.append(made)
        if path in self.calls:
            self.calls[path].later.append(made)
        else:
            self.calls[path] = made
        for leaf in self.tied.get(path, ()):
            own = module._parameters[leaf]
            # Its gradient is what comes through this module alone.
            module._parameters[leaf] = self._share(f"{path}.{leaf}", own)
        if torch_values.is_integer(kwargs.get("position_ids")):
            made.positions = self.array(kwargs["position_ids"])
        return (
            tuple(self._note(made, value) for value in args),
            {name: self._note(made, value) for name, value in kwargs.items()},
        )

    def _leave(self, path: str, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        made = self.running.pop()
        for leaf in self.tied.get(path, ()):
            module._parameters[leaf] = module._parameters[leaf].aliased
        for value in torch_values.floats(output):
            made.outputs.append(self.array(value))
            made.output_gradients.append(None)
            if not self.backward:
                continue
            if not value.requires_grad:
                # What theirs cuts off is asked for too, so that it can be seen who cut it.
                value.requires_grad_()
            made.output_gradients[-1] = np.broadcast_to(0.0, tuple(value.shape))
            place = len(made.outputs) - 1
            value.register_hook(functools.partial(self._put, made.output_gradients, place))

    def _note(self, made: Call, value: Any) -> Any:
        """Notes one argument; of a float array that has a gradient an alias goes in."""
        if type(value) in (tuple, list):
            return type(value)(self._note(made, inner) for inner in value)
        if type(value) is dict:
            return {name: self._note(made, inner) for name, inner in value.items()}
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
        alias.register_hook(functools.partial(self._put, made.input_gradients, place))
        return alias

    def _share(self, name: str, parameter: Any) -> Any:
        # A leaf of its own: the sum of all shares is not asked for, and would be one more array.
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
    def seeing_weights(self) -> Iterator[None]:
        """Notes the softmax of attentions."""
        torch = torch_values.require_torch()
        functional = torch.nn.functional
        owners = ((functional, "softmax"), (torch, "softmax"), (torch.Tensor, "softmax"))
        saved = [getattr(owner, name) for owner, name in owners]
        fused = functional.scaled_dot_product_attention
        busy = False

        def watch(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def softmax(scores: Any, *args: Any, **kwargs: Any) -> Any:
                nonlocal busy
                # One calls another.
                outermost, busy = not busy, True
                try:
                    result = original(scores, *args, **kwargs)
                finally:
                    busy = not outermost
                if outermost:
                    self._see(scores, result)
                return result

            return softmax

        @functools.wraps(fused)
        def attention(query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
            if query.dim() == 4:
                with torch.no_grad():
                    scores = _scores(query, key, *args, **kwargs)
                    self._see(scores, saved[1](scores, -1))
            return fused(query, key, *args, **kwargs)

        try:
            for (owner, name), original in zip(owners, saved, strict=True):
                setattr(owner, name, watch(original))
            functional.scaled_dot_product_attention = attention
            yield
        finally:
            functional.scaled_dot_product_attention = fused
            for (owner, name), original in zip(owners, saved, strict=True):
                setattr(owner, name, original)

    def _see(self, scores: Any, weights: Any) -> None:
        if not self.running or weights.dim() != 4:
            return
        made = self.running[-1]
        made.weights = made.weights or RecordedWeights.of(torch_values.view(weights))
        scores = torch_values.view(scores)
        made.allowed.append((scores > ALLOWED).astype(np.int8) - (scores < BLOCKED))
